"""Where do the bytes of a chunk come from? From the pinned tier, or from the store by as few ranged GETs as can be.

The path of a read: ``pinned`` finds it in memory at once, or ``together`` joins it with its neighbours and
``read`` fetches them, verifies each sample, and keeps what belongs to the pinned tier.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from refill.errors import SampleDamaged
from refill_service.cache_core.dataset_index import SampleRecords
from refill_service.cache_core.fair_queue import Need
from refill_service.cache_core.policies.interface import Read
from refill_service.cache_core.record_pieces import Records
from refill_service.cache_core.sample_mapping import Int64Array, OwnerShare
from refill_service.cache_core.shared_room import NOBODY, Asker
from refill_service.datasets.dataset_reader import Dataset
from refill_service.formats.rows import MOST_GROUP_BYTES
from refill_service.memory.byte_gate import ByteGate, Passage
from refill_service.memory.loop_turns import all_done
from refill_service.memory.payload import Payload
from refill_service.memory.pinned_tier import PinnedFile, PinnedMemory, PinnedShare
from refill_service.observing.tracing import span

log = logging.getLogger(__name__)

COALESCED_BYTES = 8 << 20
"""Most bytes of chunks that are read together: more would gain nothing over the time of one request."""


_AT_ONCE_SAMPLES = 512
"""What has come is verified in pieces of about so many."""


@dataclass(frozen=True)
class ReadChunk:
    """A read that came: its samples."""

    read: Read
    payloads: Sequence[Payload | None]
    """Of the samples that are wanted, in their order; None for one that is damaged."""
    pinned: bool = False
    """Whether they came from the pinned tier."""
    shared: bool = False
    """Whether another job has read them."""


class _ToKeep(NamedTuple):
    """Samples in a row that the pinned tier is to keep."""

    part: PinnedFile
    first: int
    payloads: list[bytes]


class ChunkReader:
    """Reads chunks of one share of a dataset.

    :param gate: bounds the bytes of reads in flight, over all jobs of the pod.
    :param asker: whose turns these reads take there.
    :param pinned: what the pod keeps of this share, for all jobs.
    """

    def __init__(
        self,
        dataset: Dataset,
        records: Records,
        share: OwnerShare,
        gate: ByteGate,
        pinned: PinnedShare,
        asker: Asker = NOBODY,
    ) -> None:
        self._dataset = dataset
        self.records = records
        self._share = share
        self._gate = gate
        self._asker = asker
        self._pinned = pinned
        self.outage_is_known = False
        """So that an outage is one line in the log."""
        self._proven = np.zeros(len(records), dtype=bool)
        """Samples in the pinned tier's memory that this job has put there or verified. They never change there."""
        self.limit_bytes = min(COALESCED_BYTES, gate.limit_bytes // 4)
        """Of what is read together."""
        if dataset.group_samples is not None:  # each part of a group costs as much as all of it
            self.limit_bytes = MOST_GROUP_BYTES

    def pinned(self, read: Read) -> ReadChunk | None:
        """A chunk that lies in the pinned tier's memory."""
        first, end = self._bounds(read)
        part = self._in_memory(first, end)
        found = None if part is None else self._proven_views(part, first, end)
        return None if found is None else self._wanted(read, found, pinned=True)

    def is_at_hand(self, first: int, end: int) -> bool:
        """Whether local samples ``first <= sample < end`` lie in the pinned tier's memory."""
        return self._in_memory(first + self._share.first_sample, end + self._share.first_sample) is not None

    def together(self, reads: Sequence[Read]) -> list[list[Read]]:
        """What one ranged GET reads each; alone what the pinned tier has on disk, or is about to get."""
        alone: list[list[Read]] = []
        rest = []
        for read in reads:
            if self._is_kept(read) or self._coming(read):
                alone.append([read])
            else:
                rest.append(read)
        return alone + coalesced(rest, self._neighbours, self._reach_bytes, self.limit_bytes)

    def _is_kept(self, read: Read) -> bool:
        first, end = self._bounds(read)
        part = self._pinned.part_for(first, end)
        return part is not None and part.holds(first, end)

    def _coming(self, read: Read) -> set[asyncio.Future[None]]:
        """What brings samples of it into the pinned tier now."""
        first, end = self._bounds(read)
        return set() if self._pinned.part_for(first, end) is None else self._pinned.coming(first, end)

    def _announced(self, reads: Sequence[Read]) -> Callable[[], None]:
        """Those of them that the pinned tier keeps are being read, until what is returned is called."""
        bounds = [self._bounds(read) for read in reads]
        return self._pinned.announce([chunk for chunk in bounds if self._pinned.part_for(*chunk) is not None])

    def verified(self, read: Read, payloads: Sequence[Payload]) -> ReadChunk | None:
        """A chunk whose bytes another job has read, if this job's own records say that they are right."""
        records = self.records.part(*self._bounds(read))
        if self._damaged(payloads, records, read.samples + self._share.first_sample):
            return None
        return ReadChunk(read, payloads, shared=True)

    def side_by_side(self, bounds: Sequence[tuple[int, int]], most: int) -> list[list[int]]:
        """The places of reads with these bounds, those together that one ranged GET may read: ``most`` at once, the
        first ordered first. Any thread may call it."""
        first, end = np.array(bounds, dtype=np.int64).T
        order = np.argsort(first, kind="stable")
        first, last = first[order] + self._share.first_sample, end[order] - 1 + self._share.first_sample
        blob = np.searchsorted(self._share.layout.first_sample, first, side="right")
        records = self.records
        begins, last_places = records.offset[records.places(first)], records.places(last)
        ends = records.offset[last_places] + records.length[last_places]
        follows = (first[1:] == last[:-1] + 1) & (blob[1:] == blob[:-1])
        groups: list[list[int]] = []
        start = 0
        for at in range(1, len(order) + 1):
            together = at < len(order) and follows[at - 1] and ends[at] - begins[start] <= self.limit_bytes
            if not together or at - start == most:
                groups.append(order[start:at].tolist())
                start = at
        return sorted(groups, key=min)

    async def read(
        self, reads: Sequence[Read], arrived: Callable[[ReadChunk], None], *, need: Need | None = None
    ) -> None:
        """Fetch the chunks of a group; ``arrived`` is called with each once its bytes are here and verified.

        Raises what the store raised; then some of the chunks may have arrived.

        What other jobs have brought into the pinned tier since the group was made is not read again, and what they read
        now is waited for.

        :param need: as of :meth:`ByteGate.passage`.
        """
        work: list[Coroutine[Any, Any, None]] = []
        rest = []
        for read in reads:
            if self._is_kept(read):
                work.append(self._from_pinned_tier(read, arrived, need))
            elif coming := self._coming(read):
                work.append(self._behind_others(read, coming, arrived, need))
            else:
                rest.append(read)
        groups = coalesced(rest, self._neighbours, self._reach_bytes, self.limit_bytes)
        await all_done(*work, *(self._from_store(group, arrived, need) for group in groups))

    async def _from_pinned_tier(self, read: Read, arrived: Callable[[ReadChunk], None], need: Need | None) -> None:
        first, end = self._bounds(read)
        if (part := self._pinned.part_for(first, end)) is not None:
            async with self._gate.passage(self._reach_bytes(read.first, read.end), self._asker, need=need):
                found: Sequence[Payload] | None = await part.load(first, end)
                if found is not None and isinstance(part, PinnedMemory):
                    found = self._proven_views(part, first, end)
            if found is not None:
                arrived(self._wanted(read, found, pinned=True))
                return
        log.warning("%s: samples %d-%d in the pinned tier are damaged; read again", self._dataset.url, first, end)
        await self.read([read], arrived, need=need)

    async def _behind_others(
        self, read: Read, coming: set[asyncio.Future[None]], arrived: Callable[[ReadChunk], None], need: Need | None
    ) -> None:
        await asyncio.wait(coming)
        await self.read([read], arrived, need=need)

    async def _from_store(self, group: list[Read], arrived: Callable[[ReadChunk], None], need: Need | None) -> None:
        """Other jobs wait for it once it is past the gate, and so waits for nobody itself: jobs never wait for each
        other in a circle, nor for what is ahead of need."""
        cost_bytes = self._dataset.read_cost_bytes(
            self._bounds(group[0])[0], self._reach_bytes(group[0].first, group[-1].end)
        )
        to_keep: list[_ToKeep] | None = None
        with ExitStack() as announced:
            async with self._gate.passage(cost_bytes, self._asker, need=need) as room:
                is_first = not any(self._is_kept(read) or self._coming(read) for read in group)
                if is_first:
                    announced.callback(self._announced(group))
                    to_keep = await self._read_out(group, room, arrived)
            for part, first, payloads in to_keep or ():  # others wait until the disk has it, too
                await part.keep(first, payloads)
        if not is_first:
            await self.read(group, arrived, need=need)
        elif to_keep is None:
            for read in group:
                await self._from_store([read], arrived, need)

    async def _read_out(
        self, group: list[Read], room: Passage, arrived: Callable[[ReadChunk], None]
    ) -> list[_ToKeep] | None:
        """Returns what is left to be kept, when nobody waits for it any more. None: the blob ends too early, or is
        gone, and one of the chunks may be intact all the same."""
        first, end = self._bounds(group[0])[0], self._bounds(group[-1])[1]
        try:
            with span("read chunks", job=self._asker.job, chunks=len(group)):
                buffer = await self._dataset.read_samples(self.records, first, end, room)
        except SampleDamaged as error:
            if len(group) > 1:
                return None
            log.warning("%s", error)
            arrived(ReadChunk(group[0], [None] * len(group[0].samples)))
            return []
        to_keep, num_samples = list[_ToKeep](), 0
        records = self._dataset.as_read(self.records.part(first, end))
        for read in group:
            to_keep += self._hand_over(read, buffer, records, arrived)
            num_samples += len(read.samples)
            if num_samples >= _AT_ONCE_SAMPLES:
                num_samples = 0
                await asyncio.sleep(0)
        return to_keep

    def _hand_over(
        self, read: Read, buffer: memoryview, of_buffer: SampleRecords, arrived: Callable[[ReadChunk], None]
    ) -> list[_ToKeep]:
        """Verify a chunk's samples out of a buffer, which holds those of these records."""
        first, end = self._bounds(read)
        part = self._pinned.part_for(first, end)
        # What is not wanted is verified only to be pinned.
        samples = read.samples + self._share.first_sample if part is None else np.arange(first, end, dtype=np.int64)
        records = of_buffer.part(first, end)
        begins = records.offset[samples - first] - int(of_buffer.offset[0])
        ends = begins + records.length[samples - first]
        views = list(map(buffer.__getitem__, map(slice, begins.tolist(), ends.tolist())))
        if isinstance(part, PinnedMemory) and not self._dataset.damaged(views, records, samples):
            self._proven[self._places(first, end)] |= part.put(first, views)
            if (kept := self._proven_views(part, first, end)) is not None:
                arrived(self._wanted(read, kept))
                return []
        # Copies, so that the wasted rest of the buffer is freed with it.
        copies = list(map(bytes, views))
        damaged = self._damaged(copies, records, samples)
        payloads: list[bytes | None] = [*copies]
        for place in damaged:
            payloads[place] = None
        arrived(ReadChunk(read, payloads) if part is None else self._wanted(read, payloads))
        if not isinstance(part, PinnedFile) or damaged:
            return []
        return [_ToKeep(part, first, copies)]

    def _proven_views(self, part: PinnedMemory, first: int, end: int) -> Sequence[Payload] | None:
        """Samples ``[first, end)`` out of memory that jobs share; None, and forgotten there, unless this job's own
        records say that they are right. Each is verified once a job."""
        views, proven = part.views(first, end), self._proven[self._places(first, end)]
        if not proven.all():
            records = self.records.part(first, end)
            unproven = np.flatnonzero(~proven)
            damaged = self._damaged([views[place] for place in unproven.tolist()], records, first + unproven)
            if damaged:
                part.forget(first, end, len(damaged))
                return None
            proven[:] = True
        return views

    def _damaged(self, payloads: Sequence[Payload], records: SampleRecords, samples: Int64Array) -> Collection[int]:
        """Which of samples ``(n,)``, by their places among them, are not what the index says."""
        damaged = self._dataset.damaged(payloads, records, samples)
        for error in damaged.values():
            log.warning("%s", error)
        return damaged.keys()

    def _wanted(self, read: Read, payloads: Sequence[Payload | None], *, pinned: bool = False) -> ReadChunk:
        """Of a chunk's payloads those of the samples that are wanted."""
        return ReadChunk(read, [payloads[sample - read.first] for sample in read.samples.tolist()], pinned)

    def _in_memory(self, first: int, end: int) -> PinnedMemory | None:
        part = self._pinned.part_for(first, end)
        return part if isinstance(part, PinnedMemory) and part.holds(first, end) else None

    def _bounds(self, read: Read) -> tuple[int, int]:
        """The samples ``[first, end)`` of the dataset."""
        return read.first + self._share.first_sample, read.end + self._share.first_sample

    def _places(self, first: int, end: int) -> slice:
        place = self.records.place(first)
        return slice(place, place + end - first)

    def _reach_bytes(self, first: int, end: int) -> int:
        """What one ranged GET of these local samples reads."""
        records = self.records.part(first + self._share.first_sample, end + self._share.first_sample)
        return int(records.offset[-1] + records.length[-1] - records.offset[0])

    def _neighbours(self, read: Read, next_read: Read) -> bool:
        """Whether the second begins where the first ends, in the same blob."""
        if next_read.first != read.end:
            return False
        blobs = self._share.layout.first_sample
        begins = next_read.first + self._share.first_sample
        return int(blobs[np.searchsorted(blobs, begins)]) != begins


def coalesced(
    reads: Sequence[Read],
    neighbours: Callable[[Read, Read], bool],
    reach_bytes: Callable[[int, int], int],
    limit_bytes: int,
) -> list[list[Read]]:
    """The reads in groups, each of ascending neighbours; a group comes where the first ordered of it came.

    :param neighbours: whether the second begins where the first ends, in the same blob.
    :param reach_bytes: ``(first, end)`` -> from the first byte of these samples to the last, with what lies between.
    :param limit_bytes: a group of more than one read is never larger.
    """
    place = {id(read): i for i, read in enumerate(reads)}
    groups: list[list[Read]] = []
    for read in sorted(reads, key=lambda read: read.first):
        follows = bool(groups) and neighbours(groups[-1][-1], read)
        if follows and reach_bytes(groups[-1][0].first, read.end) <= limit_bytes:
            groups[-1].append(read)
        else:
            groups.append([read])
    return sorted(groups, key=lambda group: min(place[id(read)] for read in group))
