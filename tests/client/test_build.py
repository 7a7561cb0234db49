"""What is said of versions: of this refill, and of a client and pods that are far apart."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import refill
from refill import build
from refill.errors import InvalidInput, PodUnreachable


@pytest.fixture(autouse=True)
def nothing_said_yet() -> None:
    build.say_once.cache_clear()
    build.commit.cache_clear()


@pytest.mark.parametrize(
    ("pods", "client", "says"),
    [
        ("0.3.0", "0.3.9", None),
        ("0.3.0", "0.4.1", None),
        ("0.5.0rc1", "0.4.1", None),
        ("0.5.0", "0.3.0", "upgrade this client"),
        ("0.3.0", "0.5.0", "upgrade the pods'"),
        ("1.0.0", "0.9.0", "upgrade this client"),
        ("", "0.1.0", None),
        ("new", "0.1.0", None),
    ],
)
def test_versions_that_are_one_minor_release_apart_are_nothing_to_speak_of(
    pods: str, client: str, says: str | None
) -> None:
    said = build.said_of_versions(pods, client)
    assert (said is None) == (says is None)
    assert says is None or (said is not None and said.endswith(says) and pods in said and client in said)


def test_it_is_said_once_a_process(caplog: pytest.LogCaptureFixture) -> None:
    for answer in ({"refill": "9.0.0"}, {"refill": "9.0.0"}, {"refill": refill.__version__}, {"refill": 9}, {}):
        build.tell_of_pods_version(answer)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"the pods run refill 9.0.0, and this client is {refill.__version__}" in caplog.text


def refused(answer: dict[str, Any] | Exception) -> None:
    def health() -> dict[str, Any]:
        if isinstance(answer, Exception):
            raise answer
        return answer

    with pytest.raises(InvalidInput, match="unknown job setting"), build.versions_told(health):
        raise InvalidInput("unknown job setting 'new'")


@pytest.mark.parametrize(
    "answer", [{"version": refill.__version__}, {"status": "ok"}, PodUnreachable("gone", url="http://x")], ids=str
)
def test_a_refusal_by_pods_of_the_same_version_or_of_an_unknown_one_is_said_alone(
    answer: dict[str, Any] | Exception, caplog: pytest.LogCaptureFixture
) -> None:
    refused(answer)
    assert not caplog.records


def test_a_refusal_by_pods_of_another_version_names_both(caplog: pytest.LogCaptureFixture) -> None:
    refused({"version": "0.0.9"})
    assert f"the pods that refuse this run refill 0.0.9, and this client is {refill.__version__}" in caplog.text


@pytest.mark.parametrize(
    ("written", "line"),
    [
        ("0123456789abcdef0123456789abcdef01234567\n", "(commit 0123456789ab)"),
        ("0123456789abcdef0123456789abcdef01234567-dirty\n", "(commit 0123456789ab-dirty)"),
        (None, ""),
    ],
)
def test_a_version_is_said_with_its_commit(
    written: str | None, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if written is not None:
        (tmp_path / "commit.txt").write_text(written)
    monkeypatch.setattr(build, "_COMMIT", tmp_path / "commit.txt")
    assert build.version_line() == f"refill {refill.__version__} {line}".rstrip()
