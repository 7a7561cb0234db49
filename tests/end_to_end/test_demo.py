"""`refill demo`: it trains, says what happened, and leaves nothing running, on Ctrl-C neither."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import httpx
import pytest
from tests.forked_processes import PODS, RANKS, python_of
from tests.waiting import until

from refill_service.cli import main


def demo(tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "refill_service.cli", "demo", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path), "HTTP_PROXY": "http://127.0.0.1:9"},  # for others than this machine
        start_new_session=True,
    )


def started_by(tmp_path: Path) -> list[str]:
    """Command lines of processes whose environment names this test's folder."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and str(tmp_path).encode() in (process / "environ").read_bytes():
                found.append((process / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # it has ended meanwhile
            continue
    return found


def test_trains_and_every_sample_comes_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here, with pods and ranks that are forked; in the test below all are processes as users have them."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.join(python_of(RANKS))} "$@"\n')
    python.chmod(0o755)
    python_of(PODS)  # it is started by Python itself
    monkeypatch.setattr(sys, "executable", str(python))
    (tmp_path / "below").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "below"))
    assert main(["demo", "--epochs", "2", "--json"]) == 0
    output, errors = capsys.readouterr()
    assert "memory for" not in errors, "pods that the demo started are large enough for it"
    rows = [json.loads(line) for line in output.splitlines()]
    assert [row["epoch"] for row in rows] == [0, 1]
    for row in rows:
        assert (row["delivered"], row["duplicates"], row["missing"]) == (1500, 0, 0)
        assert row["waste"] == 0
        # What the end of an epoch and the beginning of the next want is read once, for one of them.
        of_first, of_later = pytest.approx(1, abs=0.02), pytest.approx(0.6, abs=0.4)
        assert row["read_amplification"] == (of_first if row["epoch"] == 0 else of_later)
    assert rows[1]["accuracy_refill"] > 0.6
    assert abs(rows[1]["accuracy_refill"] - rows[1]["accuracy_files"]) < 0.15
    assert list((tmp_path / "below").iterdir()) == []
    pod = re.search(r"http://[\d.:]+", errors)
    assert pod, errors
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{pod[0]}/readyz")


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGINT, id="Ctrl-C", marks=pytest.mark.variant), pytest.param(signal.SIGTERM, id="SIGTERM")],
)
def test_everything_stops_with_it(tmp_path: Path, number: signal.Signals) -> None:
    process = demo(tmp_path, "--epochs", "1")

    def trains() -> bool:
        assert process.poll() is None, "the demo ended before it trained"
        return any("refill_service.demo.train" in line for line in started_by(tmp_path))

    until(trains, "training")
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "refill: interrupted"
    assert "Traceback" not in errors
    assert started_by(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
