"""An interrupt that comes while processes are being started leaves none of them behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from refill_service.demo import local_cluster, run
from refill_service.demo.local_cluster import LocalCluster
from refill_service.interrupts import interrupts_after


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[Any]]:
    """Processes that were started; Ctrl-C comes while the first one runs and its ``Popen`` has not returned."""
    processes: list[subprocess.Popen[Any]] = []

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            processes.append(self)
            if len(processes) == 1:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    return processes


def assert_ended(processes: list[subprocess.Popen[Any]]) -> None:
    assert len(processes) == 1, "an interrupt came, and further processes were started"
    (process,) = processes
    try:
        assert process.returncode is not None, "nobody ended the process that runs"
    finally:
        process.kill()
        process.wait()


def test_pods_on_one_machine(
    tmp_path: Path, started: list[subprocess.Popen[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Tests fork their pods: here one is a process that this one starts, as outside of tests.
    monkeypatch.setattr(local_cluster, "start_process", lambda *_: subprocess.Popen([sys.executable, "--help"]))
    with pytest.raises(KeyboardInterrupt), LocalCluster(2, tmp_path):
        pass
    assert_ended(started)


def test_ranks_of_the_demo(tmp_path: Path, started: list[subprocess.Popen[Any]]) -> None:
    with pytest.raises(KeyboardInterrupt), run.started_ranks(tmp_path, ["--help"]):
        pass
    assert_ended(started)


def test_it_comes_at_the_end_of_the_block_and_at_once_after_it() -> None:
    came = []
    before = signal.signal(signal.SIGTERM, lambda number, _frame: came.append("SIGTERM"))
    try:
        with interrupts_after():
            os.kill(os.getpid(), signal.SIGTERM)
            assert came == []
        assert came == ["SIGTERM"]
        os.kill(os.getpid(), signal.SIGTERM)
        assert came == ["SIGTERM"] * 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_it_comes_where_the_block_fails_too() -> None:
    def fail_to_start() -> None:
        with interrupts_after():
            signal.raise_signal(signal.SIGINT)
            raise OSError("it could not be started")

    with pytest.raises(KeyboardInterrupt):
        fail_to_start()


def test_threads_that_signals_do_not_interrupt_may_use_it_too() -> None:
    reached = []

    def start() -> None:
        with interrupts_after():
            reached.append("here")

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert reached == ["here"]
