"""What does it cost that everything can be asked again, whoever was killed? With all of it, beside without.

    python benchmarks/exactly_once_cost.py

One run, rounds alternating, medians. *without*: two pods that keep no journal, and a client that keeps no record of
what it received. *with*: the same with ``journal_dir`` on this machine's disk, synced every second, and the client's
record. Batches of 256 samples that lie in the pods' memory; half of each batch comes from the other pod, whose answers
the home pod remembers in both cases (that can't be switched off). All processes share the machine's cores. About a
minute.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
import uuid
from pathlib import Path

import numpy as np
from machine import machine
from pod_throughput import WARM_UP, cpu_of_pods, resident_bytes, written_files
from targets import target

from refill.delivery_record import DeliveryRecord
from refill.pod_connection import PodConnection
from refill.protocol.job_spec import JobSpec
from refill.protocol.records import Record
from refill_service.datasets.pack import pack
from refill_service.demo.local_cluster import LocalCluster

BATCH = 256
ROUNDS = 15
SHAPES = ((100_000, 2560), (3_000, 51_200))
"""``(bytes of a sample, samples)``"""
NUM_PODS = 2


class NoRecord(DeliveryRecord):
    """Keeps nothing."""

    def num_reports(self) -> int:
        return 0

    def add(self, record: Record, num_reports: int, moves: int | None = None) -> bool:
        return True


def main() -> None:
    print(f"{machine()}; medians of {ROUNDS} rounds, batches of {BATCH}, {NUM_PODS} pods")
    print(f"{'':10} {'sample':>8} {'MB/s':>7} {'samples/s':>10} {'CPU s/GB':>9}")
    for size, count in SHAPES:
        with tempfile.TemporaryDirectory(prefix="refill-bench-") as folder:
            _measure(Path(folder), size, count)


def _measure(folder: Path, size: int, count: int) -> None:
    dataset = (folder / "store").as_uri()
    packed = asyncio.run(pack(str(written_files(folder, size, count + WARM_UP)), dataset)).blob_bytes
    settings = {"memory_bytes": 3 * packed, "job_memory_fraction": 0.9, "recent_fraction": 0, "pinned_fraction": 0}
    ways = {"without": settings, "with": settings | {"journal_dir": f"{folder}/journal-{{ordinal}}"}}
    clusters: dict[str, LocalCluster] = {}
    try:
        for way, of_way in ways.items():
            logs = folder / way
            logs.mkdir()
            clusters[way] = LocalCluster(NUM_PODS, logs, of_way).__enter__()
        rounds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for number in range(ROUNDS):
            # Whichever comes first has the colder caches: take turns.
            for way in list(ways) if number % 2 else reversed(list(ways)):
                record = DeliveryRecord() if way == "with" else NoRecord()
                rounds[way].append(measured_epoch(clusters[way], dataset, count, record))
    finally:
        for cluster in clusters.values():
            cluster.stop()
    total = packed * count / (count + WARM_UP)
    for way, measures in rounds.items():
        seconds, cpu = (statistics.median(column) for column in zip(*measures, strict=True))
        print(
            f"{way:10} {size:8,} {total / seconds / 1e6:7,.0f} {count / seconds:10,.0f} {cpu / total * 1e9:9.2f}",
            flush=True,
        )
    # Of pairs that were measured one after another, so that what else the machine does is in both.
    ratios = [without[0] / with_[0] for without, with_ in zip(rounds["without"], rounds["with"], strict=True)]
    target(f"throughput with / without, samples of {size:,} bytes", statistics.median(ratios), at_least=0.95)


def measured_epoch(cluster: LocalCluster, dataset: str, count: int, record: DeliveryRecord) -> tuple[float, float]:
    """``(seconds, CPU seconds of all processes)`` to move all samples once, from memory."""
    spec = JobSpec(
        f"bench-{uuid.uuid4().hex[:8]}", dataset, chunk_size=64, policy="drain", prefetch_window=0, num_epochs=1
    )
    rank = PodConnection(cluster.pod_urls[0], spec, 0, None, 60, record)
    rank.batch(0, np.arange(BATCH))
    deadline = time.monotonic() + 30
    while sum(map(resident_bytes, cluster.pod_urls)) < 0.999 * rank.info()["total_bytes"] * (1 - BATCH / count) - BATCH:
        if time.monotonic() > deadline:
            raise TimeoutError("the pods did not load the dataset within 30 s")
        time.sleep(0.05)
    for start in range(BATCH, WARM_UP, BATCH):
        rank.batch(0, np.arange(start, min(start + BATCH, WARM_UP)))
    pids = [process.pid for process in cluster.processes]
    cpu, started = cpu_of_pods(pids), time.perf_counter()
    for start in range(WARM_UP, WARM_UP + count, BATCH):
        rank.batch(0, np.arange(start, min(start + BATCH, WARM_UP + count)))
    taken = time.perf_counter() - started, cpu_of_pods(pids) - cpu
    rank.end_job()
    return taken


if __name__ == "__main__":
    main()
