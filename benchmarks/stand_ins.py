"""Does it cost throughput that other pods stand in for one that is away, where none is, or one is slow or paused?

    sudo make bench-stand-ins     # about 5 minutes; needs iproute2, and root for networks of its own

A rule that takes a late pod to be away is metastable: others read its samples once more, so that all are later still.
So this tries what makes pods late. Each of four pods is a host of its own in a shaped network; the store's link is so
narrow that it is what limits, and not the machine's cores. Eight ranks in step, as an all-reduce keeps them, with eight
loader workers each, ask for batches as torch's loader does, two for each worker. A step takes so long that the loop
wants a part of what the link can carry.

Each run is made with stand-ins and without, in turn, on pods and by clients that differ in nothing else; medians.
Every epoch has to be exact.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from machine import machine
from shaped_network import ShapedNetwork
from shaped_pods import DATASET, Pods, ShapedPods
from targets import target

from refill.pods.planned_connection import PlannedConnection
from refill.pods.planned_place import RankPlace
from refill.pods.received_batch import ReceivedBatch
from refill.protocol.job_spec import JobSpec
from refill_service.cli import main as refill
from refill_service.planned.pods_away import PodsAway

STORE_MBIT = POD_MBIT = 100
NUM_PODS, NUM_RANKS, NUM_WORKERS = 4, 8, 8
"""Workers of each rank."""
BATCH, PREFETCH = 4, 2
NUM_SAMPLES, SAMPLE_BYTES, CHUNK_SIZE = 3072, 40_000, 16
POD_MEMORY_BYTES = 16_000_000
POD = 1
"""The one that something happens to."""
HAPPENS_AT_SECONDS, PAUSE_SECONDS, BACK_SECONDS = 8.0, 5.0, 5.0
GATE, MOST_READ_AGAIN = 0.95, 2.5
WITHOUT = "serve-without-stand-ins"


class Scenario(NamedTuple):
    name: str
    load: float
    """What the loop wants, of what the link can carry."""
    epochs: int
    happens: Callable[[Bed, Pods], None] = lambda bed, pods: None
    """Meanwhile, in a thread of its own from the beginning on."""
    begin: float = 0.0
    """Seconds, from which on it is measured: what happens does so when the start is over."""


class Run(NamedTuple):
    seconds: float
    came_at: list[float]
    """When each step had its batches, of all ranks; from the first request on."""
    read: float
    """Bytes that left the store, with headers, over those of the samples that came."""
    bytes_of_pod: float
    """Of samples that a pod has memory for, as the order is planned."""

    def samples_per_second(self, begin: float) -> float:
        """From a time on."""
        return sum(at > begin for at in self.came_at) * NUM_RANKS * BATCH / (self.seconds - begin)

    def longest_stall(self, begin: float) -> float:
        return max(b - max(a, begin) for a, b in itertools.pairwise([0.0, *self.came_at]) if b > begin)


class Bed:
    """The store, and pods with stand-ins and without, of which only those are used that are measured."""

    def __init__(self, network: ShapedNetwork, folder: Path, payload_rate: float) -> None:
        self.network, self.payload_rate = network, payload_rate
        cache = ShapedPods(network, folder)
        cache.start_store(NUM_SAMPLES, SAMPLE_BYTES)
        without = (sys.executable, __file__, WITHOUT)
        self.pods = {
            True: cache.start_pods(NUM_PODS, POD_MEMORY_BYTES),
            False: cache.start_pods(NUM_PODS, POD_MEMORY_BYTES, without, 8100, "pod-without"),
        }
        for pod in range(NUM_PODS):
            network.limit(f"pod{pod}", POD_MBIT)
        self._numbers = itertools.count()

    def run(self, scenario: Scenario, stands_in: bool) -> Run:
        pods = self.pods[stands_in]
        spec = JobSpec(
            f"run-{next(self._numbers)}",
            DATASET,
            world_size=NUM_RANKS,
            policy="planned",
            chunk_size=CHUNK_SIZE,
            num_epochs=scenario.epochs,
        )
        step_seconds = NUM_RANKS * BATCH * SAMPLE_BYTES / (self.payload_rate * scenario.load)
        in_step = threading.Barrier(NUM_RANKS)
        kind = PlannedConnection if stands_in else AsksOnlyOwners
        ranks = [Rank(kind, pods.urls, spec, rank, step_seconds, in_step) for rank in range(NUM_RANKS)]
        happens = threading.Thread(target=scenario.happens, args=(self, pods))
        read, started = self.network.store_link_bytes(), time.monotonic()
        happens.start()
        with self.network.inside("trainer"):
            for rank in ranks:
                rank.start()
        for each in [*ranks, happens]:
            each.join()
        read = self.network.store_link_bytes() - read
        for rank in ranks:
            if rank.error is not None:
                raise SystemExit(f"error: {scenario.name}: rank {rank.number}: {rank.error!r}")
        _check_exactly_once(scenario, ranks)
        memory_bytes = float(ranks[0].connections[0].plan["memory_bytes"])
        with self.network.inside("trainer"):
            ranks[0].connections[0].end_job()
        came = [max(at) - started for at in zip(*(rank.came_at for rank in ranks), strict=True)]
        num_bytes = scenario.epochs * NUM_SAMPLES * SAMPLE_BYTES
        return Run(came[-1] + step_seconds, came, read / num_bytes, memory_bytes / NUM_PODS)


class Rank(threading.Thread):
    """A loop and its loader's workers, each of which has connections of its own as a process has."""

    def __init__(
        self,
        kind: type[PlannedConnection],
        urls: list[str],
        spec: JobSpec,
        number: int,
        step_seconds: float,
        in_step: threading.Barrier,
    ) -> None:
        super().__init__()
        self.number = number
        self._epochs, self._step_seconds, self._in_step = spec.num_epochs, step_seconds, in_step
        place = RankPlace([0] * RankPlace.NUM_SHARED)
        url = urls[number % len(urls)]
        self.connections = [kind(url, spec, number, None, 120, place=place) for _ in range(NUM_WORKERS)]
        self.came_at: list[float] = []
        self.samples: list[list[int]] = [[] for _ in range(self._epochs)]
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._train()
        except BaseException as error:
            self.error = error
            self._in_step.abort()

    def _train(self) -> None:
        workers = [ThreadPoolExecutor(1) for _ in self.connections]
        self.connections[0].asks_in_batches(BATCH)
        length = self.connections[0].info()["samples_per_rank"]
        batches = [(epoch, first) for epoch in range(self._epochs) for first in range(0, length, BATCH)]
        coming: deque[tuple[int, Future[ReceivedBatch]]] = deque()

        def ask(number: int) -> None:
            epoch, first = batches[number]
            positions = np.arange(first, first + BATCH)
            worker = number % NUM_WORKERS
            coming.append((epoch, workers[worker].submit(self.connections[worker].batch, epoch, positions)))

        for number in range(NUM_WORKERS * PREFETCH):
            ask(number)
        for number in range(len(batches)):
            epoch, batch = coming.popleft()
            self.samples[epoch] += batch.result().sample_ids.tolist()
            if number + NUM_WORKERS * PREFETCH < len(batches):
                ask(number + NUM_WORKERS * PREFETCH)
            self._in_step.wait()
            self.came_at.append(time.monotonic())
            time.sleep(self._step_seconds)
        for worker in workers:
            worker.shutdown()


class AsksOnlyOwners(PlannedConnection):
    """Waits for the pod that has the samples, whatever becomes of it."""

    def _answers(self, pod: str) -> bool:
        return True

    def _is_away(self, pod: str, *, said: bool = True) -> None:
        pass


def serve_without_stand_ins() -> int:
    """A pod that waits for the others so."""

    async def answer_of(away: PodsAway, pod: int, answer: Awaitable[Any], **_: Any) -> Any:
        return await answer

    def is_gone(away: PodsAway, pod: int, why: Exception) -> None:
        raise why

    PodsAway.answer_of = answer_of  # type: ignore[method-assign, assignment]
    PodsAway.is_gone = is_gone  # type: ignore[method-assign, assignment]
    return refill(["serve"])


def _check_exactly_once(scenario: Scenario, ranks: list[Rank]) -> None:
    for epoch in range(scenario.epochs):
        came = sorted(sample for rank in ranks for sample in rank.samples[epoch])
        if came != list(range(NUM_SAMPLES)):
            raise SystemExit(f"error: {scenario.name}: epoch {epoch} delivered {len(set(came))} of {NUM_SAMPLES}")


def is_slow(bed: Bed, pods: Pods) -> None:
    time.sleep(HAPPENS_AT_SECONDS)
    bed.network.limit(f"pod{POD}", POD_MBIT / 10)


def is_paused(bed: Bed, pods: Pods) -> None:
    time.sleep(HAPPENS_AT_SECONDS)
    pods.processes[POD].send_signal(signal.SIGSTOP)
    time.sleep(PAUSE_SECONDS)
    pods.processes[POD].send_signal(signal.SIGCONT)


WARM_UP = Scenario("the first job of pods that have just started, which is not shown", 1.2, 1)
PAUSED = Scenario(f"a pod is paused for {PAUSE_SECONDS:.0f} s, 70 %", 0.7, 2, is_paused, HAPPENS_AT_SECONDS)
SCENARIOS = (
    Scenario("cold start, 70 % of the link", 0.7, 1),
    Scenario("cold start, 120 %", 1.2, 1),
    Scenario("a pod falls to a tenth of its speed, 70 %", 0.7, 1, is_slow, HAPPENS_AT_SECONDS),
    PAUSED,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", type=int, choices=range(len(SCENARIOS)), help="one scenario, by its number")
    arguments = parser.parse_args()
    hosts = ("store", *(f"pod{pod}" for pod in range(NUM_PODS)), "trainer")
    with (
        tempfile.TemporaryDirectory(prefix="refill-bench-") as folder,
        ShapedNetwork(hosts, store_mbit=STORE_MBIT, rtt_ms=0) as network,
    ):
        link = network.measure({"trainer": 4})
        bed = Bed(network, Path(folder), link.payload_bytes_per_second)
        print(
            f"{machine()}; load {os.getloadavg()[0]:.1f}; links of {STORE_MBIT} Mbit/s; {NUM_PODS} pods, "
            f"{NUM_RANKS} ranks x {NUM_WORKERS} workers, batches of {BATCH}; {NUM_SAMPLES} samples of "
            f"{SAMPLE_BYTES:,} bytes\n"
        )
        print("| | samples/s with, without | ratio | longest stall, s | read of the store |")
        print("| --- | --- | --- | --- | --- |")
        for stands_in in (True, False):
            bed.run(WARM_UP, stands_in)
        measured: dict[Scenario, dict[bool, list[Run]]] = {}
        for scenario in SCENARIOS if arguments.only is None else [SCENARIOS[arguments.only]]:
            runs = measured[scenario] = {True: [], False: []}
            for number in range(arguments.rounds):
                for stands_in in (True, False) if number % 2 == 0 else (False, True):
                    runs[stands_in].append(bed.run(scenario, stands_in))
                    network.limit(f"pod{POD}", POD_MBIT)
            print(_row(scenario, runs), flush=True)
    print()
    for scenario, runs in measured.items():
        _check(scenario, runs)


def _row(scenario: Scenario, runs: dict[bool, list[Run]]) -> str:
    def both(value: Callable[[Run], float], digits: int, unit: str = "") -> str:
        return ", ".join(f"{_median(value, runs[stands_in]):.{digits}f}{unit}" for stands_in in (True, False))

    rates = both(lambda run: run.samples_per_second(scenario.begin), 0)
    stalls = both(lambda run: run.longest_stall(scenario.begin), 1)
    return (
        f"| {scenario.name} | {rates} | {_ratio(runs, scenario.begin):.2f} | {stalls} | "
        f"{both(lambda run: run.read, 2, 'x')} |"
    )


def _check(scenario: Scenario, runs: dict[bool, list[Run]]) -> None:
    target(f"{scenario.name}: with over without", _ratio(runs, scenario.begin), at_least=GATE)
    if scenario is not PAUSED:
        return
    back_at = HAPPENS_AT_SECONDS + PAUSE_SECONDS + BACK_SECONDS
    target(f"the same, from {BACK_SECONDS:.0f} s after the pause on", _ratio(runs, back_at), at_least=GATE)
    of, without = (_median(lambda run: run.read, runs[stands_in]) for stands_in in (True, False))
    again = (of - without) * scenario.epochs * NUM_SAMPLES * SAMPLE_BYTES / runs[True][0].bytes_of_pod
    target("read again, over what the pod's shares held in memory", again, at_most=MOST_READ_AGAIN)


def _ratio(runs: dict[bool, list[Run]], begin: float) -> float:
    """Throughput with stand-ins over that without."""
    of, without = (_median(lambda run: run.samples_per_second(begin), runs[stands_in]) for stands_in in (True, False))
    return of / without


def _median(value: Callable[[Run], float], runs: list[Run]) -> float:
    return statistics.median(map(value, runs))


if __name__ == "__main__":
    if sys.argv[1:] == [WITHOUT]:
        sys.exit(serve_without_stand_ins())
    main()
