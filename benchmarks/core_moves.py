"""How much does one core of a pod move, from the store to training? For sizing.

    make bench-cores

CPU seconds of the pods alone, over a whole epoch: chunks of 1.6 MB read from an S3 server (ministack, without TLS),
samples of 100 KB sent to other pods and to clients over TCP. Memory for a quarter of the dataset, a planned job, one
rank for each pod, which takes batches of 256 from its home. Of three pods, two thirds of the samples pass from pod to
pod first. CPU of the server and of the clients is not in it. Of five rounds the one that took the least: what else
runs on the machine only adds. About half a minute on two cores.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from machine import machine
from pod_throughput import cpu_of_pod, written_files
from s3_server import BUCKET, s3_server

from refill.pods.planned_connection import PlannedConnection
from refill.protocol.job_spec import JobSpec
from refill_service.datasets.pack import pack
from refill_service.demo.local_cluster import LocalCluster

SAMPLE_BYTES = 100_000
SAMPLES = 3072
CHUNK_SIZE = 16
CLUSTERS = (1, 3)
BATCH = 256
ROUNDS = 5


def main() -> None:
    print(f"{machine()}; the least of {ROUNDS} rounds; {SAMPLES} samples of {SAMPLE_BYTES:,} bytes")
    with tempfile.TemporaryDirectory(prefix="refill-bench-") as folder, s3_server() as environment:
        os.environ.update(environment)
        dataset = f"s3://{BUCKET}/{uuid.uuid4().hex}"
        total = asyncio.run(pack(str(written_files(Path(folder), SAMPLE_BYTES, SAMPLES)), dataset)).blob_bytes
        for num_pods in CLUSTERS:
            settings = {"memory_bytes": total // 4 // num_pods, "job_memory_fraction": 1, "pinned_fraction": 0}
            with LocalCluster(num_pods, Path(folder), settings, environment) as cluster:
                per_gb = min(_epoch(cluster, dataset) for _ in range(ROUNDS))
            print(f"pods {num_pods}: {per_gb:5.2f} CPU s/GB, so a core moves {1 / per_gb:5.2f} GB/s", flush=True)


def _epoch(cluster: LocalCluster, dataset: str) -> float:
    """CPU seconds of all pods for each GB that clients got."""
    name, pids = f"bench-{uuid.uuid4().hex[:8]}", [process.pid for process in cluster.processes]
    spec = JobSpec(name, dataset, world_size=cluster.num_pods, chunk_size=CHUNK_SIZE, num_epochs=1)
    ranks = [PlannedConnection(url, spec, rank, url, 60) for rank, url in enumerate(cluster.pod_urls)]
    for rank in ranks:
        rank.info()
    before = sum(map(cpu_of_pod, pids))
    with ThreadPoolExecutor(len(ranks)) as threads:
        list(threads.map(_take_all, ranks))
    used = sum(map(cpu_of_pod, pids)) - before
    counts = ranks[0].epoch_counts(0)["total"]
    ranks[0].end_job()
    return used / counts["delivered_bytes"] * 1e9


def _take_all(rank: PlannedConnection) -> None:
    length = rank.info()["samples_per_rank"]
    for start in range(0, length, BATCH):
        rank.batch(0, np.arange(start, min(start + BATCH, length), dtype=np.int64))


if __name__ == "__main__":
    main()
