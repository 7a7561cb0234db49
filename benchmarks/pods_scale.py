"""What does a sample cost with more pods? CPU of pods and of ranks for 1,000 samples, planned orders beside ``drain``.

    python benchmarks/pods_scale.py
    python benchmarks/pods_scale.py --pods 1 4 --plot scale.svg

Two ranks, each a process that asks for batches of 256 one after another, for one epoch that is not the first. Memory of
all pods together is for 32 % of the dataset, whatever their number. CPU is that of whole processes, user and system, so
that it hardly depends on what else the machine does. Rounds alternate; medians. A few minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import statistics
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine

from refill.planned_connection import PlannedConnection
from refill.pod_connection import PodConnection
from refill.protocol.job_spec import JobSpec
from refill_service.datasets.pack import pack
from refill_service.demo.local_cluster import LocalCluster

SHAPES = ((100_000, 2_560), (3_000, 25_600))
"""``(bytes of a sample, samples)``"""
PART_IN_MEMORY = 0.32
RANKS, BATCH = 2, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pods", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    print(f"{machine()}; medians of {args.rounds} rounds; CPU ms of pods + ranks for 1,000 samples")
    print(f"{'sample':>8} {'policy':10}" + "".join(f"{pods:>8} pod{'s' * (pods > 1):1}" for pods in args.pods))
    found: dict[tuple[int, str], list[float]] = {}
    for size, count in SHAPES:
        with tempfile.TemporaryDirectory(prefix="refill-bench-") as folder:
            for policy, of_pods in _measured(Path(folder), size, count, args.pods, args.rounds).items():
                found[size, policy] = [sum(each) for each in of_pods]
                shown = "".join(f"{pods:7.0f} +{ranks:4.0f}" for pods, ranks in of_pods)
                print(f"{size:8,} {policy:10}{shown}   {sum(of_pods[-1]) / sum(of_pods[0]):.2f}x")
    if args.plot:
        _plot(args.plot, args.pods, found)


def _measured(
    folder: Path, size: int, count: int, pods: list[int], rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """By policy, for each number of pods: CPU ms of pods and of ranks for 1,000 samples."""
    dataset = (folder / "store").as_uri()
    files = folder / "files"
    files.mkdir()
    for number in range(count):
        (files / f"{number:06}.bin").write_bytes(random.randbytes(size))
    packed = asyncio.run(pack(str(files), dataset)).blob_bytes
    found: dict[str, list[tuple[float, float]]] = {"drain": [], "planned": []}
    for num_pods in pods:
        pod_bytes = int(packed * PART_IN_MEMORY / num_pods * 1.6) + 16 * count
        settings = {"memory_bytes": 4 * pod_bytes + (16 << 20), "pinned_fraction": 0}
        with LocalCluster(num_pods, folder, settings) as cluster:
            measures: dict[str, list[tuple[float, float]]] = {policy: [] for policy in found}
            for _ in range(rounds):
                for policy in found:
                    measures[policy].append(_epoch(cluster, dataset, policy, count, pod_bytes))
        for policy, each in measures.items():
            found[policy].append((statistics.median(p for p, _ in each), statistics.median(r for _, r in each)))
    return found


def _epoch(cluster: LocalCluster, dataset: str, policy: str, count: int, pod_bytes: int) -> tuple[float, float]:
    job = {
        "name": f"scale-{uuid.uuid4().hex[:8]}",
        "dataset": dataset,
        "policy": policy,
        "world_size": RANKS,
        "memory_bytes": pod_bytes,
        "chunk_size": 8,
        "num_epochs": 3,
    }
    before = 0.0
    context = multiprocessing.get_context("spawn")
    begin, results = context.Barrier(RANKS + 1), context.Queue()
    ranks = [
        context.Process(target=_rank, args=(cluster.pod_urls[0], job, rank, begin, results)) for rank in range(RANKS)
    ]
    for rank in ranks:
        rank.start()
    begin.wait(120)  # the first epoch is over
    before = _cpu_seconds(cluster)
    begin.wait(120)
    of_ranks = sum(results.get(timeout=300) for _ in ranks)
    of_pods = _cpu_seconds(cluster) - before
    begin.wait(120)
    for rank in ranks:
        rank.join(60)
    return 1e6 * of_pods / count, 1e6 * of_ranks / count


def _rank(url: str, job: dict[str, Any], rank: int, begin: Any, results: Any) -> None:
    spec = JobSpec.from_dict(job)
    kind = PlannedConnection if spec.is_planned else PodConnection
    connection = kind(url, spec, rank, None, 60)
    length = connection.info()["samples_per_rank"]
    if isinstance(connection, PlannedConnection):
        connection.asks_in_batches(BATCH)  # as a DataLoader of such batches has it
    _ask(connection, 0, length)
    begin.wait(120)
    begin.wait(120)
    before = time.process_time()
    _ask(connection, 1, length)
    results.put(time.process_time() - before)
    begin.wait(120)  # all have come to the epoch's end
    if rank == 0:
        connection.end_job()


def _ask(connection: PodConnection | PlannedConnection, epoch: int, length: int) -> None:
    for start in range(0, length, BATCH):
        connection.batch(epoch, np.arange(start, min(start + BATCH, length), dtype=np.int64))


def _cpu_seconds(cluster: LocalCluster) -> float:
    """Of all pods, user and system."""
    total = 0.0
    for process in cluster.processes:
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def _plot(path: Path, pods: list[int], found: dict[tuple[int, str], list[float]]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for (size, policy), of_pods in found.items():
        axes.plot(pods, [each / of_pods[0] for each in of_pods], marker="o", label=f"{policy}, {size:,} bytes")
    axes.set_xlabel("pods")
    axes.set_ylabel("CPU for a sample, of one pod's")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
