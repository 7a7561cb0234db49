"""What does training from memory read, as DeepIO's modes? Three pods, two ranks' worth of epochs, on loopback.

    python benchmarks/in_memory.py      # under a minute

*All in memory*: the pinned tier holds the dataset; in order (`exact`, DeepIO's ordered mode) and in any (`planned`, its
opportunistic mode). *A share R in memory*: rounds by `planned`, nothing pinned. Bytes that pods read from the store, in
datasets, of each epoch; samples a second of the last one, one process that asks for batches of 256.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from machine import machine
from pod_throughput import written_files

from refill.pods.planned_connection import PlannedConnection
from refill.pods.pod_connection import PodConnection
from refill.protocol.job_spec import JobSpec
from refill_service.datasets.pack import pack
from refill_service.demo.local_cluster import LocalCluster

NUM_SAMPLES = 8192
SAMPLE_BYTES = 10_000
NUM_PODS = 3
EPOCHS = 3
BATCH = 256
ROWS: tuple[tuple[str, float, float, dict[str, Any]], ...] = (
    # name, pods' memory in datasets, pinned_fraction, job
    ("all pinned, in order", 1.6, 0.75, {"policy": "exact", "chunk_size": 64}),
    ("all pinned, any order", 1.6, 0.75, {"chunk_size": 8}),
    ("R = 1/2, any order", 0.6, 0.0, {"chunk_size": 8}),
    ("R = 1/4, any order", 0.3, 0.0, {"chunk_size": 8}),
)


def main() -> None:
    print(f"{machine()}; {NUM_PODS} pods, {NUM_SAMPLES} samples of {SAMPLE_BYTES:,} bytes, batches of {BATCH}")
    print(f"{'':24}" + "".join(f"  epoch {epoch}" for epoch in range(EPOCHS)) + "   samples/s")
    with tempfile.TemporaryDirectory(prefix="refill-bench-") as temporary:
        folder = Path(temporary)
        dataset = (folder / "store").as_uri()
        blob_bytes = asyncio.run(pack(str(written_files(folder, SAMPLE_BYTES, NUM_SAMPLES)), dataset)).blob_bytes
        for number, (name, memory, pinned, job) in enumerate(ROWS):
            logs = folder / str(number)
            logs.mkdir()
            settings: dict[str, str | int | float] = {
                "memory_bytes": int(blob_bytes * memory / NUM_PODS),
                "pinned_fraction": pinned,
                "job_memory_fraction": 1,
            }
            with LocalCluster(NUM_PODS, logs, settings) as cluster:
                read, rate = epochs(cluster, dataset, f"job-{number}", job, blob_bytes)
            print(f"{name:24}" + "".join(f"{part:8.2f}x" for part in read) + f"{rate:12,.0f}", flush=True)


def epochs(
    cluster: LocalCluster, dataset: str, name: str, job: dict[str, Any], blob_bytes: int
) -> tuple[list[float], float]:
    """Datasets read in each epoch, and samples a second of the last one."""
    spec = JobSpec(name, dataset, num_epochs=EPOCHS, **job)
    rank = (PlannedConnection if spec.is_planned else PodConnection)(cluster.pod_urls[0], spec, 0, None, 60)
    read, seconds = [], 0.0
    for epoch in range(EPOCHS):
        began = time.monotonic()
        ids = [
            rank.batch(epoch, np.arange(start, min(start + BATCH, NUM_SAMPLES))).sample_ids
            for start in range(0, NUM_SAMPLES, BATCH)
        ]
        seconds = time.monotonic() - began
        if (np.sort(np.concatenate(ids)) != np.arange(NUM_SAMPLES)).any():
            raise SystemExit(f"error: {name}, epoch {epoch}: not each sample once")
    for epoch in range(EPOCHS):
        counts = httpx.get(f"{cluster.pod_urls[0]}/v1/jobs/{name}/epochs/{epoch}", trust_env=False).json()["total"]
        read.append(counts["bytes_read"] / blob_bytes)
    rank.end_job()
    return read, NUM_SAMPLES / seconds


if __name__ == "__main__":
    main()
