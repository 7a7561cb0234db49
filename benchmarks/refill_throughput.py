"""How fast does a pod refill from S3, beside the same library with nothing else to do?

    python benchmarks/refill_throughput.py

An S3 server (ministack) on loopback, a dataset of 100 KB samples, planned jobs. *store alone*: the pod's own S3 store,
with its settings, reads every chunk once, as many bytes at once as the pod lets in. *filling*: a pod that has just
been given a job, with memory for all of it, reads the same chunks; no client takes anything. *draining*: a pod with
memory for a quarter, while one client takes batches of 256 as fast as it can: a whole epoch, from its first request to
its last answer. Server, pod and client share the machine's cores, and CPU is of pod and client (or of the process that
reads alone), without the server's. Rounds alternate; medians. Takes about a minute.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from machine import machine
from pod_throughput import cpu_of, print_resident, written_files
from s3_server import BUCKET, s3_server
from targets import target

from refill.pods.planned_connection import PlannedConnection
from refill.protocol.job_spec import JobSpec
from refill_service.cache_core.sample_mapping import ChunkLayout
from refill_service.datasets.dataset_reader import Dataset
from refill_service.datasets.pack import pack
from refill_service.demo.local_cluster import LocalCluster
from refill_service.memory.byte_gate import ByteGate
from refill_service.object_store.store_settings import StoreSettings
from refill_service.settings import Settings

SAMPLE_BYTES = 100_000
SAMPLES = 3072
BATCH = 256
ROUNDS = 5
CHUNK_SIZES = (16, 64)
IN_FLIGHT_FRACTION = Settings.model_fields["in_flight_fraction"].default
"""As pods have it when nothing is set."""

Measure = tuple[float, float]
"""``(seconds, CPU seconds)`` of one reading of the dataset; the server's CPU is not in it."""


def main() -> None:
    print(f"{machine()}; medians of {ROUNDS} rounds; {SAMPLES} samples of {SAMPLE_BYTES:,} bytes")
    with tempfile.TemporaryDirectory(prefix="refill-bench-") as folder, s3_server() as environment:
        os.environ.update(environment)
        dataset = f"s3://{BUCKET}/{uuid.uuid4().hex}"
        total = asyncio.run(pack(str(written_files(Path(folder), SAMPLE_BYTES, SAMPLES)), dataset)).blob_bytes
        for way, measure, memory_bytes in (("filling", _fill, 2 * total), ("draining", _drain, total // 4)):
            settings = {
                "memory_bytes": memory_bytes,
                "job_memory_fraction": 1,
                "pinned_fraction": 0,
                "in_flight_fraction": IN_FLIGHT_FRACTION,
            }
            with LocalCluster(1, Path(folder), settings, environment) as cluster:
                for chunk_size in CHUNK_SIZES:
                    job = Job(cluster.pod_urls[0], cluster.processes[0].pid, dataset, chunk_size, memory_bytes)
                    _compare(way, measure, job, total)
                print_resident(way, cluster.processes[0].pid, memory_bytes)


@dataclass(frozen=True)
class Job:
    """What is measured: a dataset in chunks of so many samples, and the pod that reads it."""

    pod_url: str
    pid: int
    dataset: str
    chunk_size: int
    memory_bytes: int

    def registered(self) -> PlannedConnection:
        name = f"bench-{uuid.uuid4().hex[:8]}"
        spec = JobSpec(name, self.dataset, chunk_size=self.chunk_size, num_epochs=1)
        rank = PlannedConnection(self.pod_url, spec, 0, self.pod_url, 60)
        rank.info()
        return rank


def _compare(way: str, measure: Callable[[Job], Measure], job: Job, total: int) -> None:
    rounds: dict[str, list[Measure]] = {"store alone": [], way: []}
    for _ in range(ROUNDS):
        rounds["store alone"].append(asyncio.run(_store_alone(job)))
        rounds[way].append(measure(job))
    for who, measures in rounds.items():
        seconds, cpu = (statistics.median(column) for column in zip(*measures, strict=True))
        print(
            f"{who:12} chunks of {job.chunk_size:3} ({job.chunk_size * SAMPLE_BYTES / 1e6:.1f} MB)"
            f" {total / seconds / 1e6:7,.0f} MB/s {cpu / total * 1e9:6.2f} CPU s/GB"
        )
    ratios = [alone / pod for (alone, _), (pod, _) in zip(rounds["store alone"], rounds[way], strict=True)]
    target(f"{way} in chunks of {job.chunk_size} / store alone", statistics.median(ratios), at_least=0.9)


async def _store_alone(job: Job) -> Measure:
    """The chunks in a random order, as a pod reads them."""
    opened = await Dataset.open(job.dataset, StoreSettings.from_environment())
    records = await opened.load_records(0, opened.num_samples)
    layout = ChunkLayout(opened.blobs.first_sample, job.chunk_size)
    starts = layout.starts(np.arange(layout.num_chunks + 1))
    gate = ByteGate(int(job.memory_bytes * IN_FLIGHT_FRACTION))

    async def read(chunk: int) -> None:
        first, end = int(starts[chunk]), int(starts[chunk + 1])
        async with gate.passage(int(records.part(first, end).length.sum())):
            await opened.read_samples(records, first, end)

    chunks = random.Random(job.chunk_size).sample(range(layout.num_chunks), layout.num_chunks)
    cpu, started = time.process_time(), time.perf_counter()
    await asyncio.gather(*map(read, chunks))
    taken = time.perf_counter() - started, time.process_time() - cpu
    await opened.close()
    return taken


def _fill(job: Job) -> Measure:
    """From the request that opens the epoch until all chunks are in memory."""
    rank = job.registered()
    cpu, started = cpu_of(job.pid), time.perf_counter()
    rank.batch(0, np.array([0]))
    while rank.epoch_counts(0)["total"]["samples_filled"] < SAMPLES:
        if time.perf_counter() - started > 60:
            raise TimeoutError("the pod did not read the dataset within 60 s")
        time.sleep(0.005)
    taken = time.perf_counter() - started, cpu_of(job.pid) - cpu
    rank.end_job()
    return taken


def _drain(job: Job) -> Measure:
    rank = job.registered()
    cpu, started = cpu_of(job.pid), time.perf_counter()
    for start in range(0, SAMPLES, BATCH):
        rank.batch(0, np.arange(start, min(start + BATCH, SAMPLES)))
    taken = time.perf_counter() - started, cpu_of(job.pid) - cpu
    rank.end_job()
    return taken


if __name__ == "__main__":
    main()
