"""Does a pod stay under what Kubernetes is told, whatever the size of its samples?

    python benchmarks/pod_memory.py [--only 256]

For each shape one pod, and one job of two epochs in batches of 256: the most that the pod's process has held, against
memory + 15 % + 200 MB, the limit that the Helm chart gives it. With few bytes a sample, what Python needs beside each
of them is most of it. About 5 min.
"""

from __future__ import annotations

import argparse
import tempfile
import uuid
from pathlib import Path

import numpy as np
from machine import machine
from targets import target

from refill.pods.planned_connection import PlannedConnection
from refill.protocol.job_spec import JobSpec
from refill_service.cache_core.dataset_index import INDEX_KEY, RECORD, sample_checksum
from refill_service.datasets.index_writer import IndexWriter
from refill_service.demo.local_cluster import LocalCluster

SHAPES = (
    (20_000, 20_000, 64 << 20),
    (20_000, 20_000, 256 << 20),
    (400_000, 2_000, 512 << 20),
    (400_000, 1_000, 512 << 20),
    (400_000, 256, 64 << 20),
    (400_000, 256, 256 << 20),
    (1_600_000, 256, 256 << 20),
    (1_000_000, 64, 128 << 20),
)
"""``(samples, bytes of each, memory_bytes)``"""
EPOCHS = 2
BATCH = 256
BLOB_BYTES = 64 << 20


def main() -> None:
    parser = argparse.ArgumentParser(description="The most that a pod holds, by the size of its samples.")
    parser.add_argument("--only", type=int, help="samples of this many bytes alone")
    only = parser.parse_args().only
    print(f"{machine()}; one pod, {EPOCHS} epochs of one job in batches of {BATCH}")
    print(f"{'samples':>10} {'bytes':>7} {'memory':>8} {'limit':>8} {'peak':>8} {'peak/limit':>10}")
    most = 0.0
    for samples, size, memory_bytes in SHAPES:
        if only in (None, size):
            with tempfile.TemporaryDirectory(prefix="refill-bench-") as folder:
                most = max(most, _measure(Path(folder), samples, size, memory_bytes))
    target("the most that a pod held / its limit", most, at_most=1)


def _measure(folder: Path, samples: int, size: int, memory_bytes: int) -> float:
    """The most that it held, of its limit."""
    url = _write_dataset(folder / "store", samples, size)
    with LocalCluster(1, folder, {"memory_bytes": memory_bytes, "job_memory_fraction": 1}) as cluster:
        spec = JobSpec(f"bench-{uuid.uuid4().hex[:8]}", url, num_epochs=EPOCHS)
        rank = PlannedConnection(cluster.pod_urls[0], spec, 0, None, 60)
        for epoch in range(EPOCHS):
            for start in range(0, samples, BATCH):
                rank.batch(epoch, np.arange(start, min(start + BATCH, samples)))
        peak = _peak_bytes(cluster.processes[0].pid)
    limit = 1.15 * memory_bytes + 200e6
    print(
        f"{samples:10,} {size:7,} {memory_bytes >> 20:5} Mi {limit / 1e6:5,.0f} MB {peak / 1e6:5,.0f} MB"
        f" {peak / limit:10.2f}",
        flush=True,
    )
    return peak / limit


def _write_dataset(folder: Path, samples: int, size: int) -> str:
    """Blobs of random bytes: pods don't look into samples."""
    folder.mkdir()
    generator = np.random.default_rng(1)
    with IndexWriter(folder) as writer:
        for first in range(0, samples, BLOB_BYTES // size):
            count = min(BLOB_BYTES // size, samples - first)
            data = generator.bytes(count * size)
            records = np.zeros(count, dtype=RECORD)
            records["offset"] = np.arange(count) * size
            records["length"] = size
            view = memoryview(data)
            records["checksum"] = np.fromiter(
                (sample_checksum(view[start : start + size]) for start in range(0, len(data), size)), np.uint64, count
            )
            name = f"{writer.num_blobs:06}.bin"
            (folder / name).write_bytes(data)
            writer.add_blob(name, len(data), [records])
        writer.finish({}).rename(folder / INDEX_KEY)
    return folder.as_uri()


def _peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))


if __name__ == "__main__":
    main()
