"""Is what was given wrong said in one line, before anything is made in a cluster?"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.cluster.__main__ import main

VALUES = "dataset: {url: s3://bucket/images}\n"


@pytest.mark.parametrize(
    ("values", "arguments", "says"),
    [
        (None, ["--values", "nowhere.yaml"], "nowhere.yaml can't be read as values: [Errno 2] No such file"),
        ("a: [", [], "can't be read as values: while parsing"),
        ("hello", [], "dataset.url is needed, a dataset that the pods can read"),
        ("dataset: {}", [], "dataset.url is needed"),
        (VALUES + "tls: {secret: keys}", [], "has tokens or TLS: --client-secret is needed"),
        (VALUES, ["--only", ""], "--only '': no such event; --list names them"),
        (VALUES, ["--only", "delete, forst"], "--only 'forst': no such event"),
        (VALUES, ["--soak-minutes", "1", "--only", "node"], "--only node: a soak with these options does again, all"),
        (VALUES, ["--soak-minutes", "1", "--only", "api,dns"], "--only api,dns: a soak with these options does again"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(
    values: str | None,
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if values is not None:
        (tmp_path / "values.yaml").write_text(values)
        arguments = ["--values", str(tmp_path / "values.yaml"), *arguments]
    monkeypatch.setattr(sys, "argv", ["tests.cluster", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert says in last


def test_events_are_listed_with_what_they_need(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tests.cluster", "--list"])
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert "drain     `kubectl drain` of a node; needs two nodes" in lines
    assert any(line.startswith("node ") and line.endswith("needs --cut-node; not in a soak") for line in lines)
