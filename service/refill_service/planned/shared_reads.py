"""How does one share of a job read its chunks, if other jobs read them in the same order?

What another job has kept is taken, what another one reads in this moment is waited for, and the rest is read, for all
(``cache_core/planned/shared_chunks.py``). Each job verifies by its own index what it takes, as if it came from the
store, and reads itself what is not right.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial

from refill_service.cache_core.fair_queue import Need
from refill_service.cache_core.planned.placed_order import ChunkRead
from refill_service.cache_core.planned.share_memory import ShareMemory
from refill_service.cache_core.planned.shared_chunks import ReadUnderWay, SharedChunks
from refill_service.cache_core.policies.interface import Read
from refill_service.cache_core.sample_mapping import Int64Array
from refill_service.jobs.chunk_reader import ChunkReader, ReadChunk
from refill_service.memory.loop_turns import all_done
from refill_service.memory.payload import Payload

_AT_ONCE_SAMPLES = 512
"""What others have kept is verified in pieces of about so many."""


class SharedReads:
    """
    :param others: the same for all jobs that read the share in this order.
    :param lengths: ``(n,)`` bytes of each sample of the share.
    """

    def __init__(
        self, others: SharedChunks[Payload], memory: ShareMemory, lengths: Int64Array, chunks: ChunkReader
    ) -> None:
        self._others, self._memory, self._lengths, self._chunks = others, memory, lengths, chunks
        others.joined(memory)

    @property
    def kept_bytes(self) -> int:
        return self._others.kept_bytes(self._memory)

    def may_keep(self, limit_bytes: int) -> None:
        """Fact: what is kept for others may take so much."""
        self._others.may_keep(self._memory, limit_bytes)

    def gone(self, epoch: int, entries: Int64Array) -> None:
        """Fact: these samples of the share have left memory."""
        if not self.kept_bytes:
            return
        chunks, lengths = self._memory.chunks_of(entries).tolist(), self._lengths[entries].tolist()
        self._others.gone(self._memory, epoch, zip(chunks, lengths, strict=True))

    def close(self) -> None:
        """Fact: nobody asks here any more."""
        self._others.left(self._memory)

    async def read(
        self,
        group: list[Read],
        reads: Mapping[Read, ChunkRead],
        arrived: Callable[[ReadChunk], None],
        *,
        need: Need,
    ) -> None:
        """As :meth:`ChunkReader.read`.

        :param reads: what each read of the group is to the memory.
        """
        own: dict[Read, ReadUnderWay[Payload]] = {}
        try:
            await self._read_or_wait(group, own, reads, arrived, need=need)
        finally:
            self._no_more_of(own)

    def _no_more_of(self, own: dict[Read, ReadUnderWay[Payload]]) -> None:
        """Others wait for these."""
        while own:
            self._others.ended(own.popitem()[1])

    async def _read_or_wait(
        self,
        group: list[Read],
        own: dict[Read, ReadUnderWay[Payload]],
        reads: Mapping[Read, ChunkRead],
        arrived: Callable[[ReadChunk], None],
        *,
        need: Need,
    ) -> None:
        """:param own: is filled with those that no other job brings; they leave it when they have come."""
        coming: list[tuple[Read, ReadUnderWay[Payload], asyncio.Event]] = []
        num_taken = 0
        for read in group:
            if num_taken >= _AT_ONCE_SAMPLES:
                num_taken = 0
                await asyncio.sleep(0)
            at = reads[read]
            places = self._memory.places_in(at.chunk, at.samples)
            found = self._others.find(self._memory, at.epoch, at.chunk, places)
            if found is not None and self._take(read, at, found, arrived):
                num_taken += len(found)
                continue
            under_way = self._others.coming(self._memory, at.epoch, at.chunk, places, need)
            if under_way is not None:
                ended = asyncio.Event()  # told of at once: it may end before anybody waits
                under_way.when_ended.append(ended.set)
                coming.append((read, under_way, ended))
            else:
                own[read] = self._others.begins(self._memory, at.epoch, at.chunk, places, need)
        await all_done(
            self._read(group, own, reads, arrived, need=need),
            *(self._come(*each, reads, arrived, need=need) for each in coming),
        )

    def _take(self, read: Read, at: ChunkRead, found: list[Payload], arrived: Callable[[ReadChunk], None]) -> bool:
        """Have what another job has read; False if not all of it is right."""
        chunk = self._chunks.verified(read, found)
        if chunk is not None:
            arrived(chunk)
            self._others.has(self._memory, at.epoch, at.chunk)
        return chunk is not None

    async def _come(
        self,
        read: Read,
        under_way: ReadUnderWay[Payload],
        ended: asyncio.Event,
        reads: Mapping[Read, ChunkRead],
        arrived: Callable[[ReadChunk], None],
        *,
        need: Need,
    ) -> None:
        # Whoever reads it may still wait for its turn, and nobody there for what it brings.
        with need.telling(partial(under_way.need.is_due, 0)):
            await ended.wait()
        at = reads[read]
        found = [under_way.pieces.get(place) for place in self._memory.places_in(at.chunk, at.samples)]
        there = [each for each in found if each is not None]
        if len(there) < len(found) or not self._take(read, at, there, arrived):
            await self.read([read], reads, arrived, need=need)

    async def _read(
        self,
        group: list[Read],
        own: dict[Read, ReadUnderWay[Payload]],
        reads: Mapping[Read, ChunkRead],
        arrived: Callable[[ReadChunk], None],
        *,
        need: Need,
    ) -> None:
        """What no other job brings, for all."""

        def here(chunk: ReadChunk) -> None:
            arrived(chunk)
            under_way = own.pop(chunk.read)
            self._came(under_way, reads[chunk.read], chunk)
            self._others.ended(under_way)

        try:
            if own:
                await self._chunks.read(list(own), here, need=need)
        finally:  # now, not when all has come that this job waits for: who reads that may wait for these
            self._no_more_of(own)

    def _came(self, under_way: ReadUnderWay[Payload], at: ChunkRead, chunk: ReadChunk) -> None:
        """What the pinned tier has in memory needs no other place."""
        if chunk.pinned or self._chunks.is_at_hand(chunk.read.first, chunk.read.end):
            return
        gone = at.samples[~self._memory.are_here(at.epoch, at.samples)]
        self._others.came(under_way, chunk.payloads, self._lengths[gone].tolist())
