"""What does a sample of a planned job cost with more pods? CPU of pods and of ranks for 1,000 samples.

    python benchmarks/pods_scale.py
    python benchmarks/pods_scale.py --pods 1 4 --sizes 3000 --rounds 9 --plot scale.svg
    python benchmarks/pods_scale.py --pods 1 2 4 --ranks-per-pod 3
    python benchmarks/pods_scale.py --one-dataset

Two ranks, each a process that asks the pods for batches of 256 one after another, and each pod for its part of them:
the more pods, the less each has to do, and what seldom runs costs more each time. With --ranks-per-pod the load of a
pod stays as it is, and samples/s say what a machine with enough cores gains by another pod.

The dataset grows with the pods: each has memory for 32 % of its part, as it would have for more of a larger one. How
the order is made (K, shares, the length of a run) is what a job gets that has 4 GiB on each pod and a dataset that is
far larger, which no one machine holds. With --one-dataset it stays the same, and so does the memory of all pods
together: each of 16 has so little that it reads chunk by chunk where another one reads several at once.

CPU is that of whole processes, user and system, by the kernel's clock for them, so that it hardly depends on what else
the machine does. All numbers of pods are up at once. A round is an epoch of the largest dataset, or as many of a
smaller one; the first one is not counted; medians. Some ten minutes.

Beside it: requests that a batch of 256 makes, and what an answer of 32 samples costs the one thread that a pod answers
with, what it does to read them included.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import shutil
import statistics
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from machine import machine
from targets import target

from refill.pods.planned_connection import PlannedConnection
from refill.pods.pod_channel import PodChannel
from refill.protocol.job_spec import JobSpec
from refill_service.cache_core.dataset_index import INDEX_KEY, RECORD, sample_checksum
from refill_service.cache_core.planned.job_plan import planned_bytes, planned_chunk_size, with_plan
from refill_service.datasets.blob_builder import whole_chunks
from refill_service.datasets.index_writer import IndexWriter
from refill_service.demo.local_cluster import LocalCluster

SHAPES = {3_000: 51_200, 100_000: 1_280}
"""Samples for each pod, by the bytes of one."""
POD_BYTES = 4 << 30
"""That orders are made for."""
PART_IN_MEMORY = 0.32
MOST_OVER_ONE = 1.15
"""Of the CPU that a sample costs with one pod."""
RANKS, BATCH, SMALL_BATCH = 2, 256, 32
BLOB_BYTES = 64 << 20
_SECONDS = 600


class _Dataset(NamedTuple):
    url: str
    num_samples: int
    sample_bytes: int


class Epochs(NamedTuple):
    """What one took, or several."""

    pods_seconds: float
    main_threads_seconds: float
    ranks_seconds: float
    seconds: float
    samples: int
    requests: int
    batches: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pods", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SHAPES), help="bytes of a sample")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks-per-pod", type=int, help=f"default: {RANKS} ranks, however many pods")
    parser.add_argument("--one-dataset", action="store_true", help="of one size, however many pods")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    print(f"{machine()}; medians of {args.rounds} epochs; CPU ms for 1,000 samples")
    print(
        f"{'sample':>8} {'pods':>5} {'ranks':>6} {'of pods':>8} {'of ranks':>9} {'both':>7} {'ratio':>6} "
        f"{'requests for 256':>17} {'samples/s':>10}"
    )
    found: dict[int, list[float]] = {}
    for size in args.sizes:
        with tempfile.TemporaryDirectory(prefix="refill-bench-") as folder:
            found[size] = _measure(Path(folder), size, args)
    if args.plot:
        _plot(args.plot, args.pods, found)


def _measure(folder: Path, size: int, asked: argparse.Namespace) -> list[float]:
    """Prints, and returns what 1,000 samples cost with each number of pods."""
    pods: list[int] = asked.pods
    ranks = [each * asked.ranks_per_pod if asked.ranks_per_pod else RANKS for each in pods]
    parts = [max(pods) if asked.one_dataset else each for each in pods]
    datasets = {each: _written(folder, size, each * SHAPES[size]) for each in {1, *parts}}
    with ExitStack() as stack:
        jobs = [
            stack.enter_context(_job(folder, num_pods, num_ranks, datasets[part], BATCH))
            for num_pods, num_ranks, part in zip(pods, ranks, parts, strict=True)
        ]
        small = stack.enter_context(_job(folder, 1, 1, datasets[1], SMALL_BATCH))
        times = [max(parts) // part for part in parts]
        for job in jobs:
            job.epochs(1)
        small.epochs(1)
        epochs = [
            [job.epochs(count) for job, count in zip([*jobs, small], [*times, 1], strict=True)]
            for _ in range(asked.rounds)
        ]
    *of_jobs, of_small = zip(*epochs, strict=True)
    costs: list[float] = []
    for num_pods, num_ranks, of_job in zip(pods, ranks, of_jobs, strict=True):
        of_pods, of_ranks = (statistics.median(1e6 * each[place] / each.samples for each in of_job) for place in (0, 2))
        requests = statistics.median(each.requests / each.batches for each in of_job)
        speed = statistics.median(each.samples / each.seconds for each in of_job)
        costs.append(of_pods + of_ranks)
        print(
            f"{size:8,} {num_pods:5} {num_ranks:6} {of_pods:8.1f} {of_ranks:9.1f} {costs[-1]:7.1f} "
            f"{costs[-1] / costs[0]:5.2f}x {requests:17.2f} {speed:10,.0f}",
            flush=True,
        )
    answer = statistics.median(1e3 * each.main_threads_seconds / each.requests for each in of_small)
    what = f"CPU of a sample of {size:,} bytes: {pods[-1]} pods over {pods[0]}"
    target(what, costs[-1] / costs[0], at_most=MOST_OVER_ONE)
    print(f"{size:8,} an answer of {SMALL_BATCH} samples: {answer:.2f} ms of the pod's main thread", flush=True)
    return costs


def _written(folder: Path, size: int, count: int) -> _Dataset:
    """Samples of random bytes, in blobs without anything around them, of whole chunks as ``refill pack`` makes them."""
    store = folder / f"store-{count}"
    store.mkdir()
    with tempfile.TemporaryDirectory() as spool, IndexWriter(Path(spool)) as writer:
        fitting = BLOB_BYTES // size
        for blob, first in enumerate(range(0, count, most := whole_chunks(fitting, fitting * size))):
            samples = [random.randbytes(size) for _ in range(min(most, count - first))]
            name = f"blob-{blob:06}.tar"
            (store / name).write_bytes(b"".join(samples))
            records = np.zeros(len(samples), dtype=RECORD)
            records["offset"], records["length"] = np.arange(len(samples)) * size, size
            records["checksum"] = [sample_checksum(each) for each in samples]
            writer.add_blob(name, len(samples) * size, [records])
        shutil.copy(writer.finish({}), store / INDEX_KEY)
    return _Dataset(store.as_uri(), count, size)


class _Job:
    """One job with pods and ranks of its own."""

    def __init__(self, cluster: LocalCluster, ranks: list[Connection], count: int, batch: int) -> None:
        self._pids = [process.pid for process in cluster.processes]
        self._ranks, self._count, self._batch = ranks, count, batch
        self._next = 0
        """Epoch."""

    def epochs(self, count: int) -> Epochs:
        """Of so many, what they take."""
        pods, threads = sum(map(_cpu_seconds, self._pids)), sum(map(_main_thread_seconds, self._pids))
        began = time.perf_counter()
        of_ranks = []
        for number in range(self._next, self._next + count):
            for rank in self._ranks:
                rank.send(number)
            of_ranks += [rank.recv() for rank in self._ranks]
        self._next += count
        seconds = time.perf_counter() - began
        return Epochs(
            sum(map(_cpu_seconds, self._pids)) - pods,
            sum(map(_main_thread_seconds, self._pids)) - threads,
            sum(cpu for cpu, _ in of_ranks),
            seconds,
            count * self._count,
            sum(requests for _, requests in of_ranks),
            count * -(-self._count // self._batch),
        )


@contextmanager
def _job(folder: Path, num_pods: int, num_ranks: int, dataset: _Dataset, batch: int) -> Iterator[_Job]:
    data_bytes = dataset.num_samples * dataset.sample_bytes
    pod_bytes = int(data_bytes * PART_IN_MEMORY / num_pods * 1.6) + 16 * dataset.num_samples
    name = f"scale-{uuid.uuid4().hex[:8]}"
    job = {
        "name": name,
        "dataset": dataset.url,
        "policy": "planned",
        "world_size": num_ranks,
        "memory_bytes": pod_bytes,
    }
    job |= _order_of_large_job(JobSpec.from_dict(job), num_pods, dataset.sample_bytes)
    logs = folder / name
    logs.mkdir()
    settings = {"memory_bytes": 4 * pod_bytes + (16 << 20), "pinned_fraction": 0}
    context = multiprocessing.get_context("spawn")
    with LocalCluster(num_pods, logs, settings) as cluster:
        pipes = [context.Pipe() for _ in range(num_ranks)]
        ranks = [
            context.Process(target=_rank, args=(cluster.pod_urls[0], job, rank, batch, pipes[rank][1]), daemon=True)
            for rank in range(num_ranks)
        ]
        for rank in ranks:
            rank.start()
        yield _Job(cluster, [here for here, _ in pipes], dataset.num_samples, batch)
        for here, _ in pipes:
            here.send(None)
        for rank in ranks:
            rank.join(_SECONDS)


def _order_of_large_job(spec: JobSpec, num_pods: int, sample_bytes: int) -> dict[str, Any]:
    """What the planner chooses for a job with that much memory on each pod and a dataset that is far larger."""
    num_samples = 20 * num_pods * POD_BYTES // sample_bytes
    plan_bytes = planned_bytes(spec, POD_BYTES, num_pods)
    chunk_size = planned_chunk_size(num_samples, sample_bytes, num_samples, plan_bytes, num_pods, num_classes=0)
    chosen = with_plan(spec, POD_BYTES, num_pods, chunk_size, sample_bytes).policy_settings
    return {"chunk_size": chunk_size, "policy_settings": {name: chosen[name] for name in ("shares", "run")}}


def _rank(url: str, job: dict[str, Any], rank: int, batch: int, pipe: Connection) -> None:
    connection = PlannedConnection(url, JobSpec.from_dict(job), rank, None, 60)
    connection._channel = counted = _CountedRequests(connection.credentials, 2.0)
    length = connection.info()["samples_per_rank"]
    connection.asks_in_batches(batch)  # as a DataLoader of such batches has it
    while (epoch := pipe.recv()) is not None:
        before, counted.count = time.process_time(), 0
        for start in range(0, length, batch):
            connection.batch(epoch, np.arange(start, min(start + batch, length), dtype=np.int64))
        pipe.send((time.process_time() - before, counted.count))


class _CountedRequests(PodChannel):
    count = 0

    def _begin(self, *request: Any) -> Any:
        self.count += 1
        return super()._begin(*request)


def _cpu_seconds(pid: int) -> float:
    """Of a process, all of its threads, those that have ended included: the clock of clock_getcpuclockid(3)."""
    return time.clock_gettime(~pid << 3 | 2)


def _main_thread_seconds(pid: int) -> float:
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def _plot(path: Path, pods: list[int], found: dict[int, list[float]]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    for size, costs in found.items():
        axes.plot(pods, [each / costs[0] for each in costs], marker="o", label=f"{size:,} bytes")
    axes.axhline(MOST_OVER_ONE, color="grey", linewidth=0.8)
    axes.set_xlabel("pods")
    axes.set_ylabel("CPU for a sample, of one pod's")
    axes.set_ylim(bottom=0)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
