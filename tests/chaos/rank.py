"""What does a rank of a chaos run do? Asks for every position of its epochs, and writes down all that it received.

    python -m tests.chaos.rank '{"service": ..., "home": ..., ...}'

Each answer is one line of its file, written at once, so that a killed rank goes on from there as from a checkpoint of
the same run: it asks for a few batches again, maybe by way of another home, and for what it had not written. At the end
it asks for the whole last epoch once more, creates ``FILE.done``, and goes on asking for some of it. It ends when its
standard input closes: with whoever started it, whatever became of that.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from refill.errors import RefillError
from refill.pods.pod_connection import PodConnection
from refill.protocol.job_spec import JobSpec
from refill.protocol.wire_format import Int64Array

__all__ = ["Answer", "Begun", "RankPlan", "end_half_a_line", "end_with_input", "read_answers", "read_begun"]

_AGAIN_BATCHES = 3
_AGAIN_SHARE = 0.03


@dataclass(frozen=True)
class RankPlan:
    """What one rank does."""

    service: str
    home: str
    spec: dict[str, Any]
    rank: int
    epochs: int
    file: str
    seed: int
    tmp: str = ""
    """Its TMPDIR; empty: the one that there is."""
    batch: int = 16
    workers: int = 2
    """Threads that ask, as loader workers do: their batches overlap."""
    step_seconds: float = 0.0
    """Between two batches of a worker."""
    timeout_seconds: float = 110.0
    state: dict[str, Any] | None = None
    """Of a planned job, as a loop saves it: from which it goes on. None: from its beginning."""
    mixture: dict[str, Any] | None = None
    """Arguments of :class:`refill.Mixture`, with the URLs of its datasets; None: the job is of one dataset."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class Answer(NamedTuple):
    """One line of a rank's file. ``checksums`` are crc32 of the samples' bytes."""

    epoch: int
    positions: list[int]
    samples: list[int]
    checksums: list[int]
    plan_id: str = ""
    """Of a planned job: by which plan."""


class Begun(NamedTuple):
    """What the pods said of the job when a rank began."""

    incarnation: str
    epoch: int
    """The first one that the rank asks for."""
    start: int
    """The first position in it."""
    length: int
    """Positions of that epoch."""
    dealt_from: int = 0
    """Of a planned job: the position of the epoch's one order from which on that epoch is dealt."""
    plan: dict[str, Any] | None = None


def read_answers(path: Path) -> Iterator[Answer]:
    """The answers that a rank wrote down."""
    if path.exists():
        *lines, _ = path.read_bytes().split(b"\n")  # the last one is empty, or was cut by a kill
        for line in lines:
            yield Answer(*json.loads(line))


def read_begun(file: str) -> Begun | None:
    path = Path(f"{file}.begun")
    return Begun(*json.loads(path.read_text())) if path.exists() else None


class _Rank:
    def __init__(self, plan: RankPlan) -> None:
        self._plan = plan
        spec = JobSpec.from_dict(plan.spec)
        self._pods = PodConnection(plan.service, spec, plan.rank, plan.home, plan.timeout_seconds)
        self._chooser = random.Random(f"{plan.seed} {plan.rank} {os.getpid()}")
        self._writing = threading.Lock()
        self._file = os.open(plan.file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def run(self) -> None:
        before = [(answer.epoch, answer.positions[0]) for answer in read_answers(Path(self._plan.file))]
        end_half_a_line(Path(self._plan.file))
        done = set(before[: max(0, len(before) - _AGAIN_BATCHES)])
        first = max((epoch for epoch, _ in done), default=0)
        if (begun := read_begun(self._plan.file)) is None:
            self._begin()
        elif before:
            self._pods.goes_on(begun.incarnation, first)
        length = int(self._pods.info()["samples_per_rank"])
        with ThreadPoolExecutor(self._plan.workers) as workers:
            for epoch in range(first, self._plan.epochs):
                self._post_trace(epoch, length)
                starts = self._starts(length)
                wanted = [start for start in starts if (epoch, start.start) not in done]
                list(workers.map(lambda start, epoch=epoch: self._step(epoch, start), wanted))
            last = self._plan.epochs - 1
            starts = self._starts(length)
            list(workers.map(lambda start: self._ask(last, start), starts))
        Path(f"{self._plan.file}.done").touch()
        while True:
            time.sleep(0.1)
            if starts:
                self._ask(last, self._chooser.choice(starts))

    def _begin(self) -> None:
        """Register the job, and write down which run of it that is."""
        info = self._pods.info()
        new = Path(f"{self._plan.file}.begun.new")
        new.write_text(json.dumps(Begun(info["incarnation"], 0, 0, int(info["samples_per_rank"]))))
        new.replace(f"{self._plan.file}.begun")

    def _starts(self, length: int) -> list[range]:
        """Positions of each batch."""
        batch = self._plan.batch
        return [range(start, min(start + batch, length)) for start in range(0, length, batch)]

    def _step(self, epoch: int, positions: range) -> None:
        if positions.start >= self._plan.batch and self._chooser.random() < _AGAIN_SHARE:
            back = self._chooser.randrange(1, positions.start // self._plan.batch + 1) * self._plan.batch
            self._ask(epoch, range(positions.start - back, positions.start - back + self._plan.batch))
        self._ask(epoch, positions)
        time.sleep(self._plan.step_seconds)

    def _ask(self, epoch: int, asked: range) -> None:
        positions = np.arange(asked.start, asked.stop)
        answer = self._pods.batch(epoch, positions)
        checksums = [zlib.crc32(payload) for payload in answer.payloads]
        line = Answer(epoch, positions.tolist(), answer.sample_ids.tolist(), checksums)
        with self._writing:
            os.write(self._file, json.dumps(line).encode() + b"\n")

    def _post_trace(self, epoch: int, length: int) -> None:
        if self._plan.spec.get("order") == "explicit":
            self._pods.post_trace(epoch, trace_of(self._plan, epoch, length))


def trace_of(plan: RankPlan, epoch: int, length: int) -> Int64Array:
    """A permutation of the samples, the same for all ranks, of which each takes its part."""
    world_size = int(plan.spec["world_size"])
    order = np.random.default_rng([plan.seed, epoch]).permutation(length * world_size)
    return order[plan.rank :: world_size]


def end_half_a_line(path: Path) -> None:
    content = path.read_bytes() if path.exists() else b""
    if content and not content.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)


def end_with_input() -> None:
    """Let a thread end this process when its standard input closes."""

    def wait() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    plan = RankPlan(**json.loads(sys.argv[1]))
    end_with_input()
    try:
        _Rank(plan).run()
    except RefillError as error:
        raise SystemExit(f"rank {plan.rank}: {type(error).__name__}: {error}") from error


if __name__ == "__main__":
    main()
