"""How long does training stand still when a pod, its machine or the network between fails? Two ranks ask two pods.

    sudo python -m benchmarks.stalls [--policy redox] [--only NAME] [--json]

Prints the table of docs/CORRECTNESS.md. For each kind of failure: seconds without a batch, beside those that passed
until what failed was there again. Needs root, for networks of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from benchmarks.lost_machines import LostMachines, enter
from benchmarks.machine import machine

from refill.pods.planned_connection import PlannedConnection
from refill.pods.pod_connection import PodConnection
from refill.protocol.job_spec import JobSpec
from refill_service.datasets.pack import pack

_SAMPLES = 2_000
_BATCH = 10
_BETWEEN_BATCHES_SECONDS = 0.01
_OUTAGE_SECONDS = 12.0
_SETTINGS = {"memory_bytes": "8MiB", "pinned_fraction": 0, "dataset_urls": "file:///"}


class Stall(NamedTuple):
    failure: str
    outage_seconds: float
    """From the failure until its end: the replacement is ready, the network or the process goes on."""
    stall_seconds: float
    """Longest time without a batch of a rank, that began at the failure or later."""
    epochs: int
    """That were whole, each sample once."""
    said: str
    """The last warning of a rank that waits."""


class _Ranks:
    """Two ranks that go through epochs until they are told to end."""

    def __init__(self, service_url: str, dataset: str, policy: str) -> None:
        spec = JobSpec("stalls", dataset, chunk_size=16, memory_bytes=2_000_000, world_size=2, policy=policy)
        kind = PlannedConnection if spec.is_planned else PodConnection
        self.connections = [kind(service_url, spec, rank, None, 300) for rank in range(2)]
        self.came_at: list[list[float]] = [[], []]
        self._samples: dict[int, list[int]] = {}
        self._ended = threading.Event()
        self._errors: list[BaseException] = []
        self._last_epoch: int | None = None
        self._threads = [threading.Thread(target=self._train, args=(rank,)) for rank in range(2)]
        for thread in self._threads:
            thread.start()

    def until_they_run(self, since: float) -> None:
        """Until both have had a few batches."""
        while not all(sum(at > since for at in came) > 5 for came in self.came_at):
            self._check()
            time.sleep(0.02)

    def end(self) -> int:
        """Both finish the epoch that they are in. Returns how many epochs there were; raises unless all are exact."""
        self._ended.set()
        for thread in self._threads:
            thread.join()
        self._check()
        for epoch, samples in self._samples.items():
            if sorted(samples) != list(range(_SAMPLES)):
                raise AssertionError(f"epoch {epoch}: {len(samples)} samples, {len(set(samples))} different ones")
        return len(self._samples)

    def longest_stall(self, since: float) -> float:
        gaps = [b - a for came in self.came_at for a, b in itertools.pairwise(came) if b > since]
        return max(gaps)

    def _train(self, rank: int) -> None:
        try:
            connection = self.connections[rank]
            epoch = 0
            while not self._ended.is_set() or self._other_needs(epoch):
                for start in range(0, connection.info()["samples_per_rank"], _BATCH):
                    found = connection.batch(epoch, np.arange(start, start + _BATCH))
                    self._samples.setdefault(epoch, []).extend(found.sample_ids.tolist())
                    self.came_at[rank].append(time.monotonic())
                    time.sleep(_BETWEEN_BATCHES_SECONDS)
                epoch += 1
        except BaseException as error:
            self._errors.append(error)

    def _other_needs(self, epoch: int) -> bool:
        """Whether the other rank has begun this epoch, which has to become whole."""
        return epoch in self._samples

    def _check(self) -> None:
        if self._errors:
            raise self._errors[0]


def killed(pods: LostMachines, ranks: _Ranks) -> None:
    pods.end(1, signal.SIGKILL)
    pods.begin(1, elsewhere=False)
    pods.wait_until_ready(1)


def replaced(pods: LostMachines, ranks: _Ranks) -> None:
    pods.end(1)
    pods.fall_silent(1)
    pods.begin(1)
    pods.wait_until_ready(1)


def machine_lost(pods: LostMachines, ranks: _Ranks) -> None:
    pods.fall_silent(1)
    pods.end(1, signal.SIGKILL)
    pods.begin(1)
    pods.wait_until_ready(1)


def lost_while_answering(pods: LostMachines, ranks: _Ranks) -> None:
    pods.signal(1, signal.SIGSTOP)
    while not pods.unread_bytes(1):
        time.sleep(0.01)
    machine_lost(pods, ranks)


def network_cut(pods: LostMachines, ranks: _Ranks) -> None:
    pods.fall_silent(1)
    time.sleep(_OUTAGE_SECONDS)
    pods.be_heard(1)


def paused(pods: LostMachines, ranks: _Ranks) -> None:
    pods.signal(1, signal.SIGSTOP)
    time.sleep(_OUTAGE_SECONDS)
    pods.signal(1, signal.SIGCONT)


FAILURES: dict[str, tuple[str, Callable[[LostMachines, _Ranks], None]]] = {
    "killed": ("a pod's process is killed, and started again at its address", killed),
    "replaced": ("a pod ends in order, and comes back at another address", replaced),
    "machine-lost": ("its machine is gone, and it comes back at another address", machine_lost),
    "lost-while-answering": ("the same, in the middle of a request", lost_while_answering),
    "network-cut": (f"the network drops what goes to it for {_OUTAGE_SECONDS:.0f} s", network_cut),
    "paused": (f"it stands still for {_OUTAGE_SECONDS:.0f} s", paused),
}


def measured(name: str, dataset: str, folder: Path, policy: str) -> Stall:
    description, fail = FAILURES[name]
    warnings: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("refill").addHandler(handler)
    with LostMachines(2, folder, _SETTINGS) as pods:
        ranks = _Ranks(pods.url(0), dataset, policy)
        try:
            ranks.until_they_run(0)
            failed_at = time.monotonic()
            fail(pods, ranks)
            over_at = time.monotonic()
            ranks.until_they_run(over_at)
        finally:
            epochs = ranks.end()
    logging.getLogger("refill").removeHandler(handler)
    waits = [each for each in warnings if "has waited" in each]
    stall = ranks.longest_stall(failed_at)
    return Stall(description, over_at - failed_at, stall, epochs, waits[-1] if waits else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--only", choices=FAILURES, action="append")
    parser.add_argument("--policy", choices=("planned", "redox"), default="planned")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    enter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "files").mkdir()
        (folder / "data").mkdir()
        generator = random.Random(1)
        for i in range(_SAMPLES):
            (folder / "files" / f"{i:05}.bin").write_bytes(generator.randbytes(1000))
        dataset = (folder / "data").as_uri()
        asyncio.run(pack(str(folder / "files"), dataset, blob_bytes=200_000))
        stalls = [measured(name, dataset, folder, arguments.policy) for name in arguments.only or FAILURES]
    if arguments.json:
        print(json.dumps([stall._asdict() for stall in stalls]))
        return
    print(f"{machine()}\n")
    print("| what fails | there again after | training stands still for | |\n| --- | --- | --- | --- |")
    for stall in stalls:
        more = max(0.0, stall.stall_seconds - stall.outage_seconds)
        print(f"| {stall.failure} | {stall.outage_seconds:.1f} s | {stall.stall_seconds:.1f} s | + {more:.1f} s |")


if __name__ == "__main__":
    main()
