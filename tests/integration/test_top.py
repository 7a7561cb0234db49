"""``refill top --once`` shows jobs, ranks and pods as they are; a URL that leads nowhere is told in one line."""

from __future__ import annotations

import fcntl
import http.server
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.forked_processes import run_refill
from tests.pod_fixtures import rank_of, whole_epoch
from tests.refill_command import refill_says
from tests.waiting import until

from refill_service.demo.local_cluster import LocalCluster


def top(*url: str) -> list[str]:
    """The lines of one frame."""
    ended = run_refill(["top", *url, "--once", "--interval", "0.2"])
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout.splitlines()


def rows(lines: list[str], table: str) -> dict[str, list[str]]:
    """The table whose first column has this heading: the words of each row by the first one."""
    start = next(number for number, line in enumerate(lines) if line.split()[:1] == [table])
    body = lines[start + 1 :]
    end = next((number for number, line in enumerate(body) if not line.strip()), len(body))
    return {line.split()[0]: line.split()[1:] for line in body[:end]}


def test_jobs_and_ranks_and_all_pods(three_pods: LocalCluster, job: dict[str, Any]) -> None:
    rank = rank_of(three_pods, job)
    whole_epoch(rank, 0)
    rank.report(0.0, 1000, 0)
    assert rows(top(three_pods.pod_urls[0]), "job")[job["name"]], "a job whose rank is alive has a line of its own"
    for url in three_pods.pod_urls:
        lines = top(url)
        epoch, _, progress, *_, memory, unit = rows(lines, "job")[job["name"]]
        assert (epoch, progress) == ("0", "100%")
        assert unit in ("kB", "MB"), f"memory of the job: {memory} {unit}"
        names = [url.removeprefix("http://") for url in three_pods.pod_urls]
        assert list(rows(lines, "memory")) == list(rows(lines, "work")) == names
        assert {tuple(row[:2]) for row in rows(lines, "memory").values()} == {("4.19", "MB")}
    ranks = next(number for number, line in enumerate(lines) if line.split()[:2] == ["job", "rank"])
    assert lines[ranks + 1].split() == [job["name"], "0", "0%", "0"]


def test_a_cache_without_jobs(tmp_path: Path) -> None:
    """Its pod names itself by an address that can't be reached from here, as those within a cluster can't."""
    with LocalCluster(1, tmp_path, {"memory_bytes": "1MiB", "pod_urls": "http://127.0.0.1:1"}) as cluster:
        lines = top("--url", cluster.pod_urls[0])
        assert "1 pod, 0 jobs" in lines[0]
        assert "No job is registered." in lines
        assert list(rows(lines, "memory")) == [cluster.pod_urls[0].removeprefix("http://")]


def test_a_pod_that_is_away_is_shown_as_such(tmp_path: Path) -> None:
    with LocalCluster(2, tmp_path, {"memory_bytes": "1MiB"}) as cluster:
        cluster.kill(1)
        lines = top(cluster.pod_urls[0])
        assert lines[1].startswith("1 pod without an answer")
        assert rows(lines, "work")[cluster.pod_urls[1].removeprefix("http://")] == ["does", "not", "answer"]


@contextmanager
def top_on_a_terminal(url: str, rows: int) -> Iterator[tuple[int, subprocess.Popen[bytes]]]:
    """``(the terminal that it runs on, its process)``; gives the terminal back as it was."""
    terminal, its_end = pty.openpty()
    fcntl.ioctl(its_end, termios.TIOCSWINSZ, struct.pack("HHHH", rows, 120, 0, 0))
    settings_before = termios.tcgetattr(terminal)
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-m", "refill_service.cli", "top", url, "--interval", "0.2"]
    process = subprocess.Popen(
        command, stdin=its_end, stdout=its_end, stderr=its_end, env=environment | {"TERM": "xterm"}
    )
    try:
        yield terminal, process
        until(lambda: has_ended(process, terminal), "its end")
        assert process.returncode == 0
        assert termios.tcgetattr(terminal) == settings_before, "the terminal is as it was"
    finally:
        process.kill()
        process.wait()
        os.close(its_end)
        os.close(terminal)


def has_ended(process: subprocess.Popen[bytes], terminal: int) -> bool:
    """Takes what it writes meanwhile: else it waits for a reader before its terminal is as it was."""
    waiting = select.poll()  # select() knows no descriptors from 1,024 on
    waiting.register(terminal, select.POLLIN)
    while waiting.poll(0):
        os.read(terminal, 65536)
    return process.poll() is not None


@pytest.mark.variants("q")
@pytest.mark.parametrize("leave_by", ["ctrl-c", "q"])
def test_on_a_terminal_it_goes_on_until_it_is_left_and_outlives_its_pods(tmp_path: Path, leave_by: str) -> None:
    with (
        LocalCluster(1, tmp_path, {"memory_bytes": "1MiB"}) as cluster,
        top_on_a_terminal(cluster.pod_urls[0], 40) as (terminal, process),
    ):
        read_until(terminal, b"1 pod, 0 jobs")
        if leave_by == "q":
            os.write(terminal, b"q")
        else:
            cluster.kill(0)
            read_until(terminal, b"does not answer")
            cluster.restart(0)
            read_until(terminal, b"1.05 MB")
            process.send_signal(signal.SIGINT)


def test_on_a_terminal_of_few_rows_it_is_scrolled(tmp_path: Path) -> None:
    with (
        LocalCluster(3, tmp_path, {"memory_bytes": "1MiB"}) as cluster,
        top_on_a_terminal(cluster.pod_urls[0], 10) as (terminal, _),
    ):
        read_until(terminal, b"lines 1 to 9 of 14: arrows and pages scroll, q ends")
        os.write(terminal, b"\x1b[B")
        read_until(terminal, b"lines 2 to 10 of 14")
        os.write(terminal, b"\x1b[6~")
        read_until(terminal, b"lines 6 to 14 of 14")
        os.write(terminal, b"q")


def read_until(terminal: int, text: bytes) -> None:
    """What comes from now on; fails by the test's time limit."""
    found = b""
    while text not in found:
        found += os.read(terminal, 65536)


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """A server that answers, and is no pod."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as server:
        server.RequestHandlerClass.log_message = lambda *_: None  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_urls_that_lead_nowhere(elsewhere: str) -> None:
    assert "http://127.0.0.1:1 does not answer" in refill_says("top", "http://127.0.0.1:1", "--once")
    assert "'refill' is not the URL of a service" in refill_says("top", "refill", "--once")
    assert "is not a pod of refill" in refill_says("top", elsewhere, "--once")
    assert "is not a pod of refill" in refill_says("jobs", "--url", elsewhere)
    assert "is not a time" in refill_says("top", elsewhere, "--interval", "-1")
