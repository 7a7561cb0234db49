"""`refill serve --pods 3`: several pods on one machine, as README's quick start has them."""

from __future__ import annotations

import contextlib
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch.utils.data
from tests.refill_command import refill_says

import refill

REFILL = [sys.executable, "-m", "refill_service.cli"]
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("REFILL_")}
SECONDS = 120


class Pods:
    """The process, and what it writes, line by line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._coming: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._coming.put(line)
        self._coming.put(None)

    def until(self, text: str) -> str:
        while True:
            line = self._coming.get(timeout=SECONDS)
            assert line is not None, f"it ended without saying {text!r}: {self.lines}"
            self.lines.append(line)
            if text in line:
                return line


@contextmanager
def serving(folder: Path, *arguments: str, **environment: str) -> Iterator[Pods]:
    process = subprocess.Popen(
        [*REFILL, "serve", *arguments],
        cwd=folder,
        env=CLEAN | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield Pods(process)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(SECONDS)


def ports() -> tuple[str, ...]:
    """For three pods, which listen 10 ports apart; below those that other tests take one by one."""
    while True:
        port = random.SystemRandom().randrange(10_000, 19_000)
        with contextlib.ExitStack() as probes, contextlib.suppress(OSError):
            for taken in (port + 10 * pod + other for pod in range(3) for other in (0, 1)):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", taken))
            break
    return "--port", str(port), "--peer-port", str(port + 1)


@pytest.mark.variant  # a stranger types the same three in test_strangers_hour.py
def test_three_commands_to_a_training_loop(tmp_path: Path) -> None:
    for number in range(90):
        path = tmp_path / "images" / str(number % 3) / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"%d" % number)
    subprocess.run([*REFILL, "pack", "images", "dataset", "--quiet"], cwd=tmp_path, env=CLEAN, check=True)
    with serving(tmp_path, "--pods", "3", "--memory-bytes", "2MiB", *ports()) as pods:
        ready = pods.until("3 pods are ready")
        urls = [word for word in ready.split() if word.startswith("http://127.0.0.1:")]
        assert len(urls) == 3
        assert [httpx.get(f"{url}/readyz").json()["ordinal"] for url in urls] == [0, 1, 2]
        options: dict[str, Any] = {"dataset": (tmp_path / "dataset").as_uri(), "job": "laptop", "chunk_size": 4}
        dataset = refill.CacheDataset(urls[1], **options)
        sampler = refill.EpochSampler(dataset)
        loader = torch.utils.data.DataLoader(dataset, batch_size=10, sampler=sampler, collate_fn=list)
        assert sorted(int(sample["txt"]) for batch in loader for sample in batch) == list(range(90))
        dataset.end_job()
        assert any(line.startswith("pod 2 | ") for line in pods.lines), "nobody sees which pod a line is of"
        pods.process.send_signal(signal.SIGINT)
        assert pods.process.wait(SECONDS) == 0
    for url in urls:
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/healthz")


def test_a_pod_that_ends_takes_the_others_with_it(tmp_path: Path) -> None:
    with serving(tmp_path, "--pods", "2", *ports()) as pods:
        pods.until("2 pods are ready")
        number = pods.process.pid
        children = Path(f"/proc/{number}/task/{number}/children").read_text().split()
        os.kill(int(children[1]), signal.SIGKILL)
        pods.until("pod 1 has ended, and so do the others")
        assert sum("open: whoever reaches" in line for line in pods.lines) == 1, "it is said once for all of them"
        assert pods.process.wait(SECONDS) != 0


def test_who_listens_there_already_is_not_taken_for_a_pod() -> None:
    taken = ports()
    with socket.create_server(("127.0.0.1", int(taken[1]) + 10)):
        said = refill_says("serve", "--pods", "2", *taken)
    assert said == (
        f"refill: pod 1 can't listen on 127.0.0.1:{int(taken[1]) + 10}: Address already in use; choose another "
        "--port, --peer-port or --metrics-port"
    )


def test_what_can_not_be_is_one_line() -> None:
    assert "--pods must be 1 to 16" in refill_says("serve", "--pods", "0")
    for name, value, said in (
        ("REFILL_ORDINAL", "1", "leave it out, and REFILL_ORDINAL, too"),
        ("REFILL_MEMORY_BYTE", "1GiB", "is REFILL_MEMORY_BYTES meant?"),
    ):
        assert said in refill_says("serve", "--pods", "2", environment={name: value})
    assert "setting memory_bytes" in refill_says("serve", "--pods", "2", "--memory-bytes", "lots")
