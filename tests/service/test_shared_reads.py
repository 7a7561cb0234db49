"""Two jobs read a share in one order: one read serves both, each verifies what it gets, and what goes wrong with one
costs the other a read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from refill.errors import StoreUnavailable
from refill_service.cache_core.fair_queue import Need
from refill_service.cache_core.planned.placed_order import ChunkRead
from refill_service.cache_core.planned.share_memory import ShareMemory
from refill_service.cache_core.planned.shared_chunks import SharedChunks
from refill_service.cache_core.policies.interface import Read
from refill_service.cache_core.sample_mapping import ChunkLayout
from refill_service.cache_core.shared_room import Asker
from refill_service.datasets.dataset_reader import Dataset
from refill_service.jobs.chunk_reader import ChunkReader, ReadChunk
from refill_service.memory.byte_gate import ByteGate
from refill_service.memory.payload import Payload
from refill_service.memory.pinned_tier import PinnedTier
from refill_service.object_store.store_counters import StoreCounters
from refill_service.planned.shared_reads import SharedReads

Packed = tuple[str, dict[str, bytes]]


class Gated(ChunkReader):
    """A job's reads, which begin when they may, or fail."""

    may_read: asyncio.Event
    fails = False

    async def read(
        self, reads: Sequence[Read], arrived: Callable[[ReadChunk], None], *, need: Need | None = None
    ) -> None:
        await self.may_read.wait()
        if self.fails:
            raise StoreUnavailable("the store is away")
        await super().read(reads, arrived, need=need)


@dataclass
class Reading:
    """A job at a pod, as far as it reads one chunk."""

    chunks: Gated
    memory: ShareMemory
    shared: SharedReads
    came: list[ReadChunk] = field(default_factory=list)

    async def read(self, need: Need) -> list[bytes]:
        asked = self.memory.asked(0, np.arange(8))
        (read,) = asked.reads
        order = Read(int(read.local[0]), int(read.local[-1]) + 1, read.local, read.chunk)
        (group,) = self.chunks.together([order])

        def arrived(chunk: ReadChunk) -> None:
            self.memory.arrived(read)
            self.came.append(chunk)

        reads: dict[Read, ChunkRead] = {order: read}
        await self.shared.read(group, reads, arrived, need=need)
        return [bytes(payload) for payload in self.came[-1].payloads if payload is not None]


@asynccontextmanager
async def two_jobs(packed: Packed) -> AsyncIterator[tuple[Reading, Reading, SharedChunks[Payload], StoreCounters]]:
    counters, others = StoreCounters(), SharedChunks[Payload]()
    dataset = await Dataset.open(packed[0], counters=counters)
    try:
        records = await dataset.load_records(0, dataset.num_samples)
        layout = ChunkLayout(dataset.blobs.first_sample, 8)
        starts = layout.starts(np.arange(layout.num_chunks + 1))
        found = []
        for name in ("first", "second"):
            pinned = PinnedTier(0).lease("proof", records)
            chunks = Gated(dataset, records, layout.share(0, 1), ByteGate(10**6), pinned, Asker(job=name))
            chunks.may_read = asyncio.Event()
            memory = ShareMemory(starts, records.length, 100_000)
            memory.memory_is(100_000)
            memory.planned(0, memory.placed(np.arange(dataset.num_samples)))
            shared = SharedReads(others, memory, records.length, chunks)
            shared.may_keep(50_000)
            found.append(Reading(chunks, memory, shared))
        counters.operations["read_range"].requests = 0
        yield found[0], found[1], others, counters
    finally:
        await dataset.close()


def run(packed: Packed, work: Callable[..., Coroutine[Any, Any, None]]) -> None:
    async def with_jobs() -> None:
        async with two_jobs(packed) as (first, second, others, counters):
            await work(first, second, others, counters.operations["read_range"])

    asyncio.run(with_jobs())


def test_who_wants_what_another_one_reads_has_it_at_the_same_time(packed: Packed) -> None:
    async def work(first: Reading, second: Reading, others: SharedChunks[Payload], gets: Any) -> None:
        reading = [asyncio.create_task(each.read(Need(0))) for each in (first, second)]
        await asyncio.sleep(0)
        first.chunks.may_read.set()  # the second one may not read
        got, again = await asyncio.gather(*reading)
        assert got == again
        assert gets.requests == 1
        assert [each.came[-1].shared for each in (first, second)] == [False, True]

    run(packed, work)


def test_who_comes_later_has_what_was_kept(packed: Packed) -> None:
    async def work(first: Reading, second: Reading, others: SharedChunks[Payload], gets: Any) -> None:
        first.chunks.may_read.set()
        got = await first.read(Need())
        assert await second.read(Need()) == got
        assert gets.requests == 1

    run(packed, work)


@pytest.mark.parametrize("how", ["fails", "ends"])
def test_what_another_job_does_not_bring_is_read(packed: Packed, how: str) -> None:
    async def work(first: Reading, second: Reading, others: SharedChunks[Payload], gets: Any) -> None:
        reading = [asyncio.create_task(each.read(Need(0))) for each in (first, second)]
        await asyncio.sleep(0)
        second.chunks.may_read.set()
        assert gets.requests == 0
        if how == "fails":
            first.chunks.fails = True
            first.chunks.may_read.set()
        else:
            first.shared.close()
            reading[0].cancel()
        with pytest.raises((StoreUnavailable, asyncio.CancelledError)):
            await reading[0]
        assert len(await reading[1]) == 8
        assert (gets.requests, second.came[-1].shared) == (1, False)

    run(packed, work)


def test_a_read_that_ends_before_anybody_waits_for_it_holds_nobody(packed: Packed) -> None:
    async def work(first: Reading, second: Reading, others: SharedChunks[Payload], gets: Any) -> None:
        under_way = others.begins(first.memory, 0, 0, list(range(8)), Need(0))
        reading = asyncio.create_task(second.read(Need(0)))
        await asyncio.sleep(0)
        others.ended(under_way)
        second.chunks.may_read.set()
        async with asyncio.timeout(20):
            assert len(await reading) == 8

    run(packed, work)


def test_who_is_cancelled_reads_nothing_any_more(packed: Packed) -> None:
    async def work(first: Reading, second: Reading, others: SharedChunks[Payload], gets: Any) -> None:
        reading = asyncio.create_task(first.read(Need(0)))
        await asyncio.sleep(0)
        assert others.coming(second.memory, 0, 0, [1], Need(0)) is not None
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert others.coming(second.memory, 0, 0, [1], Need(0)) is None

    run(packed, work)


def test_each_verifies_what_another_one_has_read(packed: Packed) -> None:
    """By its own records: wrong bytes in the memory of one are not given to the other."""

    async def work(first: Reading, second: Reading, others: SharedChunks[Payload], gets: Any) -> None:
        wrong = others.begins(first.memory, 0, 0, list(range(8)), Need())
        first.memory.asked(0, np.arange(1))
        others.came(wrong, [b"\0" * 100] * 8, [])
        others.ended(wrong)
        second.chunks.may_read.set()
        got = await second.read(Need())
        assert len(got) == 8
        assert b"\0" * 100 not in got
        assert (gets.requests, second.came[-1].shared) == (1, False)

    run(packed, work)
