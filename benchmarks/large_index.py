"""What does a pod hold and read of the index of a very large dataset? A made-up index is built, and opened by share.

    python benchmarks/large_index.py
    python benchmarks/large_index.py --samples 1e9 --pods 1000

The index is written by the code of ``refill pack`` and ``refill index``, of samples that nobody has; it takes some 40
bytes of disk for each of them while it is built. It is then opened by another process as one of the pods does for a
planned job: the head whole, and of the records those of its shares; an epoch of one share is planned. Peak memory is of
that whole process. Below stands what all of the records take, unless that is more than ``--most-memory``.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine

from refill.protocol.plan_settings import PlanSettings
from refill.protocol.share_owners import share_owners
from refill_service.cache_core.dataset_index import RECORD
from refill_service.cache_core.planned.job_orders import JobOrders
from refill_service.cache_core.planned.job_plan import planned_chunk_size
from refill_service.cache_core.planned.shares import Shares
from refill_service.cache_core.sample_mapping import ChunkLayout
from refill_service.datasets.dataset_reader import Dataset
from refill_service.datasets.index_writer import IndexWriter
from refill_service.object_store.store_counters import StoreCounters
from refill_service.planned.job_records import JobRecords
from refill_service.planning.pod_sizing import job_alone
from refill_service.settings import default_pod_memory

GB = 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=float, default=1e8)
    parser.add_argument("--sample-bytes", type=int, default=323_000)
    parser.add_argument("--blob-bytes", type=int, default=64_000_000)
    parser.add_argument("--pods", type=int, default=1000)
    parser.add_argument("--pod-memory", type=float, default=64 * GB, help="bytes that each has for samples")
    parser.add_argument("--most-memory", type=float, default=8 * GB, help="bytes of records that are opened at most")
    parser.add_argument("--folder", type=Path, help="where the index is built (default: a temporary folder)")
    args = parser.parse_args()
    args.samples = int(args.samples)
    print(
        f"{machine()}; {args.samples:,} samples of {args.sample_bytes:,} bytes, {args.pods:,} pods; a folder as store"
    )
    print(f"{'':44} {'seconds':>8} {'GETs':>8} {'MB read':>9} {'peak MB':>9}")
    with tempfile.TemporaryDirectory(prefix="refill-bench-", dir=args.folder) as folder:
        _in_process(_build, args, folder)
        _in_process(_open_share, args, folder)
        if 24 * args.samples <= args.most_memory:
            _in_process(_open_all, args, folder)


def _in_process(what: Any, *arguments: Any) -> None:
    """Each in a process of its own, whose peak memory is its own, too."""
    process = multiprocessing.get_context("spawn").Process(target=what, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{what.__name__} ended with {process.exitcode}")


@contextmanager
def _measured(what: str, counters: StoreCounters | None = None) -> Iterator[None]:
    reads = None if counters is None else counters.operations["read_range"]
    before = (0, 0) if reads is None else (reads.requests, reads.bytes)
    started = time.perf_counter()
    yield
    seconds = time.perf_counter() - started
    requests, read = (0, 0) if reads is None else (reads.requests - before[0], reads.bytes - before[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"{what:44} {seconds:8.1f} {requests:8,} {read / 1e6:9.1f} {peak / 1e6:9.0f}", flush=True)


def _build(args: argparse.Namespace, folder: str) -> None:
    per_blob = max(1, args.blob_bytes // args.sample_bytes)
    of_blob = np.zeros(per_blob, dtype=RECORD)
    of_blob["length"] = args.sample_bytes
    of_blob["offset"] = np.arange(per_blob) * args.sample_bytes
    with _measured("build"), IndexWriter(Path(folder)) as writer:
        for number in range(-(-args.samples // per_blob)):
            records = of_blob[: args.samples - number * per_blob]
            records["checksum"] = number
            writer.add_blob(f"blob-{number:06}.tar", len(records) * args.sample_bytes, [records])
        writer.finish({"made_by": "pack"}).rename(Path(folder) / "refill.index")
    size = (Path(folder) / "refill.index").stat().st_size
    print(f"  {size / 1e6:,.0f} MB of index, {-(-args.samples // per_blob):,} blobs")


def _open_share(args: argparse.Namespace, folder: str) -> None:
    asyncio.run(_share_opened(args, folder))


async def _share_opened(args: argparse.Namespace, folder: str) -> None:
    counters = StoreCounters()
    with _measured("open: head and blobs", counters):
        dataset = await Dataset.open(Path(folder).as_uri(), counters=counters)
    plan = _plan(args, dataset)
    with _measured(f"chunks of {plan.chunk_size}, {plan.num_shares:,} shares"):
        layout = ChunkLayout(dataset.blobs.first_sample, plan.chunk_size)
        shares = Shares(layout, plan.num_shares)
    own = np.flatnonzero(share_owners(plan.num_shares, args.pods) == 0).tolist()
    with _measured(f"records of pod 0's {len(own)} shares", counters):
        records = await JobRecords.load(dataset, layout, shares, own, whole=False)
    orders = JobOrders(plan, layout, records.lengths_of, shares)
    with _measured("one of them, and its lengths"):
        share, lengths = orders.share(own[0])
    with _measured(f"an epoch of it: {len(share.samples):,} samples"):
        orders.order(1, own[0], lengths)
    with _measured("the share and place of a batch of 256"):
        orders.places(1, np.arange(256, dtype=np.int64))
    await dataset.close()


def _open_all(args: argparse.Namespace, folder: str) -> None:
    asyncio.run(_all_opened(folder))


async def _all_opened(folder: str) -> None:
    counters = StoreCounters()
    with _measured("beside it: head and all records", counters):
        dataset = await Dataset.open(Path(folder).as_uri(), counters=counters)
        await dataset.load_records(0, dataset.num_samples)
        await dataset.close()


def _plan(args: argparse.Namespace, dataset: Dataset) -> PlanSettings:
    """As pods make it for a job that names nothing."""
    num_samples, total_bytes = dataset.num_samples, dataset.index.sample_bytes
    pod = default_pod_memory(int(args.pod_memory), args.pods)
    largest_blob = int(np.diff(dataset.blobs.first_sample).max())
    memory = job_alone(pod, "planned", 8, num_samples, total_bytes).memory
    chunk_size = planned_chunk_size(
        num_samples, args.sample_bytes, largest_blob, args.pods * memory.abstract_bytes, args.pods, 0
    )
    chosen = job_alone(pod, "planned", chunk_size, num_samples, total_bytes).plan
    assert chosen is not None
    return PlanSettings(
        f"{dataset.index.fingerprint:016x}",
        num_samples,
        chunk_size,
        chosen["shares"],
        chosen["plan_bytes"],
        chosen["run"],
    )


if __name__ == "__main__":
    main()
