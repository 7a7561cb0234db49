"""How often do jobs of a sweep read the store together? Jobs with other seeds on two pods, each a few batches behind
the one before it; bytes are those that the pods' clients of the store count.

    make bench-two-jobs

Prints the table of docs/CLIENT.md. Jobs go in step, batch by batch, so that only counts matter, not how fast a machine
is.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
from benchmarks.machine import machine
from benchmarks.targets import target

from refill.pods.planned_connection import PlannedConnection
from refill.protocol.job_spec import JobSpec
from refill.protocol.plan_settings import PlanSettings
from refill_service.datasets.pack import pack
from refill_service.demo.local_cluster import LocalCluster

__all__ = ["Row", "Sizes", "SweepReads", "measure"]

_NUM_PODS = 2
_READ_BYTES = re.compile(r'^refill_store_bytes_total\{operation="read_range"\} (\S+)$', re.MULTILINE)


class Sizes(NamedTuple):
    num_samples: int
    sample_bytes: int
    memory_bytes: int
    """Of each job, on each pod."""
    num_epochs: int
    batch: int = 64


class Row(NamedTuple):
    num_jobs: int
    behind: float
    """Each job behind the one before it, in parts of what its order is planned for."""
    read_seed: int | None


class SweepReads(NamedTuple):
    planned: float
    """What orders are planned for, in parts of the dataset."""
    times: float
    """Bytes that were read of the store, in those of the epochs of one job."""
    each_once: bool
    """Whether each job had each sample once an epoch."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=8_000)
    parser.add_argument("--sample-bytes", type=int, default=8_000)
    parser.add_argument("--memory-bytes", type=int, default=6_000_000, help="of a job on each of two pods")
    parser.add_argument("--epochs", type=int, default=2)
    args = parser.parse_args()
    sizes = Sizes(args.samples, args.sample_bytes, args.memory_bytes, args.epochs)
    print(f"{machine()}; {sizes.num_samples:,} samples of {sizes.sample_bytes:,} bytes, {sizes.num_epochs} epochs")
    print("\n| jobs | read_seed | behind, in parts of M | M | the store is read |")
    print("| --- | --- | --- | --- | --- |")
    rows = [Row(2, 0.0, None), *(Row(2, behind, 0) for behind in (0.0, 0.1, 0.25, 0.4, 1.0)), Row(4, 0.1, 0)]
    near = []
    for row, found in zip(rows, measure(sizes, rows), strict=True):
        seed = "none" if row.read_seed is None else row.read_seed
        cells = row.num_jobs, seed, f"{row.behind:g}", f"{found.planned:.0%}", f"{found.times:.2f} times"
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
        if not found.each_once:
            raise SystemExit("a job did not have each sample once an epoch")
        if row.read_seed is not None and row.behind <= 0.4:
            near.append(found.times)
    target("times that the store is read by jobs up to 0.4 of M behind", max(near), at_most=1.1)


def measure(sizes: Sizes, rows: Sequence[Row]) -> Iterator[SweepReads]:
    """One sweep after another."""
    with tempfile.TemporaryDirectory(prefix="refill-bench-") as folder:
        files, dataset, draws = Path(folder, "files"), Path(folder, "dataset"), random.Random(0)
        files.mkdir()
        for number in range(sizes.num_samples):
            size = draws.randint(sizes.sample_bytes // 2, 3 * sizes.sample_bytes // 2)
            Path(files, f"{number:06}.bin").write_bytes(draws.randbytes(size))
        asyncio.run(pack(str(files), dataset.as_uri(), blob_bytes=16 << 20))
        settings = {"memory_bytes": 8 * sizes.memory_bytes, "pinned_fraction": 0, "wait_seconds": 60}
        with LocalCluster(_NUM_PODS, Path(folder), settings) as cluster:
            for row in rows:
                yield _swept(cluster, dataset.as_uri(), sizes, row)


def _swept(cluster: LocalCluster, dataset: str, sizes: Sizes, row: Row) -> SweepReads:
    """Of one sweep; its jobs are ended after it."""
    jobs = [
        PlannedConnection(
            cluster.pod_urls[0],
            JobSpec(
                f"sweep-{uuid.uuid4().hex[:8]}",
                dataset,
                seed=seed,
                read_seed=row.read_seed,
                chunk_size=8,
                memory_bytes=sizes.memory_bytes,
                num_epochs=sizes.num_epochs,
                policy_settings={"shares": _NUM_PODS},
            ),
            0,
            None,
            300,
        )
        for seed in range(1, row.num_jobs + 1)
    ]
    infos = [job.info() for job in jobs]  # now all have read their indexes
    num_bytes = int(infos[0]["total_bytes"])
    planned, before = PlanSettings.from_dict(jobs[0].plan).memory_bytes / num_bytes, _read_bytes(cluster)
    late, per_epoch = int(row.behind * planned * sizes.num_samples) // sizes.batch, -(-sizes.num_samples // sizes.batch)
    came = np.zeros((row.num_jobs, sizes.num_epochs, sizes.num_samples), dtype=np.int64)
    for step in range(sizes.num_epochs * per_epoch + (row.num_jobs - 1) * late):
        for number, job in enumerate(jobs):
            epoch, batch = divmod(step - number * late, per_epoch)
            if 0 <= epoch < sizes.num_epochs:
                positions = np.arange(batch * sizes.batch, min((batch + 1) * sizes.batch, sizes.num_samples))
                came[number, epoch, job.batch(epoch, positions).sample_ids] += 1
    times = (_read_bytes(cluster) - before) / num_bytes / sizes.num_epochs
    for job in jobs:
        job.end_job()
    return SweepReads(planned, times, bool((came == 1).all()))


def _read_bytes(cluster: LocalCluster) -> float:
    texts = (httpx.get(f"{url}/metrics", timeout=60).text for url in cluster.pod_urls)
    return sum(float(found) for text in texts for found in _READ_BYTES.findall(text))


if __name__ == "__main__":
    main()
