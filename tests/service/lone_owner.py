"""How do tests run an owner of a whole dataset, without a pod around it?"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from refill.errors import JobLost
from refill.protocol.job_spec import JobSpec
from refill_service.cache_core.sample_mapping import ChunkLayout
from refill_service.datasets.dataset_reader import Dataset
from refill_service.jobs.job import Job
from refill_service.jobs.owner import Owner
from refill_service.jobs.waits import RankWaits
from refill_service.memory.byte_gate import ByteGate
from refill_service.memory.pinned_tier import PinnedTier

__all__ = ["BATCH", "owner_of", "reads_end", "take"]

BATCH = 32


@asynccontextmanager
async def owner_of(
    url: str,
    abstract_bytes: int,
    pinned_bytes: int = 0,
    trace_bytes: int = 0,
    recent_bytes: int = 10_000,
    gate: ByteGate | None = None,
    **settings: Any,
) -> AsyncIterator[Owner]:
    """An owner of a whole dataset, without a pod around it."""
    spec = JobSpec("job", url, **{"chunk_size": 8, "policy": "redox"} | settings)
    dataset = await Dataset.open(url)
    records = await dataset.load_records(0, dataset.num_samples)
    job = Job(
        spec,
        dataset,
        records,
        ChunkLayout(dataset.blobs.first_sample, spec.chunk_size),
        ordinal=0,
        num_pods=1,
        memory_bytes=2 * abstract_bytes,
        abstract_bytes=abstract_bytes,
        incarnation="",
        trace_bytes=trace_bytes,
    )
    pinned = PinnedTier(pinned_bytes).lease("1", records)
    owner = Owner(job, gate or ByteGate(100_000), pinned, recent_bytes, wait_seconds=60, waits=RankWaits(5))
    try:
        yield owner
    finally:
        await owner.close(JobLost("the job was ended"))
        await dataset.close()


async def take(owner: Owner, epoch: int, rank: int, start: int) -> list[int]:
    traces = await owner.job.traces(epoch, RankWaits(1))
    end = min(start + BATCH, traces.length(rank))
    asked, repeats = traces.asked(rank, np.arange(start, end))
    samples, payloads = await owner.take(await owner.open(epoch, rank), rank, asked[~repeats])
    for sample, payload in zip(samples.tolist(), payloads, strict=True):
        owner.job.dataset.verify_sample(payload, owner.job.records, sample)
    return samples.tolist()


async def reads_end(owner: Owner) -> None:
    while owner.reads:
        await asyncio.wait(owner.reads)
