"""How does a pod serve one share of a planned job? Carries out what :class:`ShareMemory` decides.

Where ranks have the order in lists of their own, each request says which samples it wants: the lists that are known say
what to read ahead, and nothing else.

The path of a request: ``take`` -> the memory says which samples the places are, and orders reads -> chunks are fetched,
and what is wanted of them is kept -> the bytes leave with the answer. What left a short while ago, or stands in memory
for another epoch, answers who asks again; what is nowhere is read alone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

import numpy as np

from refill.errors import RefillError
from refill_service.cache_core.planned.job_orders import JobOrders
from refill_service.cache_core.planned.placed_order import ChunkRead, PlacedOrder
from refill_service.cache_core.planned.posted_lists import AboutList, PostedLists, merged
from refill_service.cache_core.planned.share_memory import Asked, ShareMemory
from refill_service.cache_core.planned.shares import Share
from refill_service.cache_core.sample_mapping import Int64Array
from refill_service.jobs.chunk_reader import ChunkReader, ReadChunk
from refill_service.jobs.running_epoch import OwnerCounts
from refill_service.jobs.single_reads import ReadAlone, SingleReads
from refill_service.memory.loop_turns import given_up, in_turn_of_team
from refill_service.memory.payload import Damage, Payload, Payloads, RecentlySent
from refill_service.observing.tracing import span
from refill_service.planned.share_reads import HeldBack, ShareReads
from refill_service.planned.shared_reads import SharedReads

log = logging.getLogger(__name__)

_KEPT_VERSIONS = 8
_BEGUN_AT_ONCE = 100_000
"""Samples of a share: an epoch of more begins in a thread, unless it does so at its start."""
_DROPPED_AT_ONCE = 4096


class _EpochBytes:
    """Keeps, for one epoch, by sample of the dataset: what is here, and who takes what is on its way."""

    def __init__(self) -> None:
        self.payloads = Payloads()
        """Of what is in memory, and that somebody has yet to ask for: by entry of the epoch's order, since a list may
        have a sample there twice."""
        self.taking: dict[int, list[dict[int, Payload]]] = {}
        """Who takes the bytes of a sample when they arrive."""

    @property
    def is_empty(self) -> bool:
        return not (self.payloads or self.taking)

    def leave(self, asked: Asked, samples: list[int]) -> dict[int, Payload]:
        """The bytes of those that are here, for an answer. They leave memory, but for those that are to stay.

        :param samples: of the dataset, those that are asked for.
        """
        different = dict.fromkeys(zip(asked.samples.tolist(), samples, asked.stay.tolist(), strict=True))
        left = (
            (sample, self.payloads.get(entry) if stays else self.payloads.pop(entry))
            for entry, sample, stays in different
        )
        return {sample: payload for sample, payload in left if payload is not None}

    def drop(self, entries: Int64Array) -> None:
        for entry in entries.tolist():
            self.payloads.pop(entry)

    @contextmanager
    def taken(self, samples: list[int], by: dict[int, Payload]) -> Iterator[None]:
        """The bytes of these samples are put there as they arrive."""
        for sample in samples:
            self.taking.setdefault(sample, []).append(by)
        try:
            yield
        finally:
            for sample in samples:
                self.taking[sample] = [each for each in self.taking[sample] if each is not by]
                if not self.taking[sample]:
                    del self.taking[sample]


class ShareServer:
    """Answers for one share at this pod: carries out what its ``ShareMemory`` decides.

    :param lengths: ``(n,)`` bytes of each of its samples; ``memory``: decides for it.
    :param chunks: reads samples of the dataset, by their ids; ``single`` reads them one by one.
    :param recent: what has just left, of all shares of the job.
    :param counts_of: those of an epoch.
    :param wait_seconds: for the store.
    :param num_epochs: that will be asked for; 0: not known.
    :param lists: that ranks have posted; None: the order is that of the plan.
    :param planning: of the job, which plans one share at a time: whoever asks for epochs that nobody needs takes one
        thread at most.
    :param held_back: reads ahead of the job, when ranks begin.
    :param shared: its reads, and those of other jobs that read in the same order; None: it reads alone.
    """

    def __init__(
        self,
        orders: JobOrders,
        number: int,
        share: Share,
        lengths: Int64Array,
        memory: ShareMemory,
        chunks: ChunkReader,
        single: SingleReads,
        recent: RecentlySent,
        counts_of: Callable[[int], OwnerCounts],
        *,
        name: str,
        wait_seconds: float,
        num_epochs: int,
        lists: PostedLists | None,
        planning: asyncio.Lock,
        held_back: HeldBack,
        shared: SharedReads | None,
    ) -> None:
        self.number = number
        self.share, self._lengths, self.memory = share, lengths, memory
        self.last_asked = time.monotonic()
        """When a request ended last."""
        self.num_asking = 0
        """Requests under way."""
        self._asked_last = 0
        """The epoch."""
        self._given_up_bytes = 0
        """That have been counted."""
        self._orders = orders
        self._chunks = chunks
        self._single = single
        self._recent = recent
        self._counts_of = counts_of
        self._name = name
        self._num_epochs = num_epochs
        self._lists = lists
        self._list_versions: dict[int, int] = {}
        """What is known of lists here, by epoch."""
        self._epochs: dict[int, _EpochBytes] = {}
        self._planning: dict[int, asyncio.Task[None]] = {}
        self._one_at_a_time, self._preparing = planning, asyncio.Lock()
        self._held_back = held_back
        self._shared = shared
        self._reads = ShareReads(
            share,
            chunks,
            held_back,
            shared,
            decide=self._read_ahead,
            arrived=self._arrived,
            failed=self._failed,
            name=name,
            wait_seconds=wait_seconds,
        )
        self._dropping: set[asyncio.Task[None]] = set()
        self._over: RefillError | None = None
        """Why nobody is answered any more."""

    @property
    def resident_bytes(self) -> int:
        """Of samples that are in memory, and that somebody has yet to ask for."""
        return sum(found.payloads.num_bytes for found in self._epochs.values())

    @property
    def kept_bytes(self) -> int:
        """What is kept of samples that have left, for other jobs."""
        return 0 if self._shared is None else self._shared.kept_bytes

    def memory_is(self, capacity_bytes: int, kept_bytes: int) -> None:
        """Fact: its samples may take so much memory; and what it keeps for other jobs."""
        self.memory.memory_is(capacity_bytes)
        if self._shared is not None:
            self._shared.may_keep(kept_bytes)
        self._reads.go_on()

    def gives_back(self) -> None:
        """Fact: others wait for what its samples take beyond that."""
        self._drop(self.memory.gives_back())
        self._count_given_up(self._asked_last)

    async def warm(self, epoch: int, place: int) -> None:
        """Read what comes from a place on, as much as memory holds, unless somebody asks for samples already."""
        while not self.memory.knows(epoch):
            await self._planned(epoch)
        self._drop(self.memory.warmed_anew(epoch, place))
        self._reads.go_on()

    def forget(self) -> None:
        """Fact: nobody asks for this share here any more, or not soon."""
        if self._shared is not None:
            self._shared.close()
        self._drop(self.memory.forget())
        self.memory.orders.clear()
        self._reads.forget()

    @property
    def is_reading(self) -> bool:
        """Whether something is under way still."""
        return bool(self._reads.are_under_way or self._dropping or self._planning)

    @contextmanager
    def _is_asked(self) -> Iterator[None]:
        """While a request lasts."""
        self.num_asking += 1
        try:
            yield
        finally:
            self.num_asking -= 1
            self.last_asked = time.monotonic()

    async def close(self, why: RefillError) -> None:
        """Stop all reads. Requests under way end with this error."""
        self._over = why
        await self._reads.close(why)
        await given_up([*self._dropping, *self._planning.values()])
        epochs, self._epochs = self._epochs, {}
        for each in epochs.values():
            while each.payloads:
                each.payloads.drop_some(_DROPPED_AT_ONCE)
                await asyncio.sleep(0)

    async def take(
        self, epoch: int, places: Int64Array, *, says_damage: bool, is_rest: bool = False
    ) -> tuple[Int64Array, list[Payload]]:
        """``(sample ids, their bytes)`` at places ``(n,)`` of an epoch, all different.

        :param is_rest: as of :meth:`ShareMemory.asked`.
        :param says_damage: whether :class:`Damage` stands for a sample that is damaged; else it is raised.
        """
        with self._is_asked(), self._held_back.first(is_first=self.memory.is_cold):
            while not self.memory.knows(epoch):
                await self._planned(epoch)
            await self._prepare(epoch, places)
            asked = self.memory.asked(epoch, places, is_rest=is_rest)
            ids = self.share.samples[asked.local]
            return ids, await self._taken(epoch, ids.tolist(), asked, ReadAlone(), says_damage=says_damage)

    async def _prepare(self, epoch: int, places: Int64Array) -> None:
        """Of a large share, where an epoch begins in its midst. Others that ask for the same meanwhile wait for it."""
        if len(self.share.samples) <= _BEGUN_AT_ONCE or self.memory.to_prepare(epoch, places) is None:
            return
        async with self._preparing:
            if (to_prepare := self.memory.to_prepare(epoch, places)) is not None:
                begun = await asyncio.to_thread(to_prepare)
                if self.memory.to_prepare(epoch, places) is not None:  # still
                    self.memory.prepared(begun)
        while not self.memory.knows(epoch):
            await self._planned(epoch)

    def take_at_once(self, epoch: int, places: Int64Array) -> tuple[Int64Array, list[Payload]] | None:
        """As :meth:`take`, of what is in memory, all of it: as most is where a rank asks for positions in order. None:
        it is not, and nothing has been done."""
        entries = self.at_hand(epoch, places)
        if entries is None:
            return None
        ids, payloads = self.take_entries(epoch, places, entries)
        self._recent.put(epoch, ids.tolist(), payloads)
        return ids, payloads

    def at_hand(self, epoch: int, places: Int64Array) -> list[int] | None:
        """What is at these places, if all of it is in memory; None: it is not."""
        order = self.memory.order_of(epoch)
        here = self._epochs.get(epoch)
        if order is None or here is None or self._over is not None or self.memory.is_cold:
            return None
        entries = order[places]
        return entries.tolist() if self.memory.are_here(epoch, entries).all() else None

    def take_entries(self, epoch: int, places: Int64Array, entries: list[int]) -> tuple[Int64Array, list[Payload]]:
        """What has left is to be put to what was sent recently.

        :param entries: as :meth:`at_hand` has just returned them.
        """
        here = self._epochs[epoch]
        self.last_asked = time.monotonic()
        self._asked_last = epoch
        asked = self.memory.asked(epoch, places)
        ids = self.share.samples[asked.local]
        payloads = here.payloads.taken(entries, asked.stay)
        if self._shared is not None:
            self._shared.gone(epoch, asked.samples[~asked.stay])
        if asked.dropped:
            self._drop(asked.dropped)
        self._count_given_up(epoch)
        if asked.reads:
            self._read(asked.reads)
        if not self.memory.is_full and not (self.memory.is_all_ordered and self._next_to_plan() is None):
            self._reads.go_on()
        self._counts_of(epoch).core.takes += len(payloads)
        return ids, payloads

    async def take_listed(
        self,
        epoch: int,
        positions: Int64Array,
        ids: Int64Array,
        alone: ReadAlone,
        *,
        says_damage: bool,
        is_rest: bool = False,
    ) -> tuple[Int64Array, list[Payload]]:
        """``(sample ids, their bytes)`` of samples of the dataset ``(n,)`` that somebody wants at these positions, all
        different. Else as :meth:`take`.

        :param alone: what other parts of the same request read alone.
        """
        with self._is_asked(), self._held_back.first(is_first=self.memory.is_cold):
            if self._lists is not None and self._lists.version(epoch) and not self.memory.knows(epoch):
                await self._planned(epoch)
            asked = None
            if self.memory.knows(epoch):
                places = self.memory.places_of(epoch, positions, np.searchsorted(self.share.samples, ids))
                if (is_known := places >= 0).any():
                    asked = self.memory.asked(epoch, places[is_known], is_rest=is_rest)
            return ids, await self._taken(epoch, ids.tolist(), asked, alone, says_damage=says_damage)

    async def _taken(
        self, epoch: int, samples: list[int], asked: Asked | None, alone: ReadAlone, *, says_damage: bool
    ) -> list[Payload]:
        """:param asked: of those whose places are known; None: there are none."""
        if self._over is not None:  # nothing is read any more, and who waited for it would wait for ever
            raise self._over
        self._asked_last = epoch
        found: dict[int, Payload] = {}
        try:
            if asked is not None:
                expected = self.share.samples[asked.local].tolist()
                found |= self._bytes_of(epoch).leave(asked, expected)
                if self._shared is not None:
                    self._shared.gone(epoch, asked.samples[~asked.stay])
                await self._come(epoch, expected, found, asked)
            await self._come_again(epoch, list(dict.fromkeys(samples)), found, alone, says_damage=says_damage)
        finally:
            # Who asks again finds what is here already, within the limit of what is kept of answers that left.
            intact = {sample: payload for sample, payload in found.items() if type(payload) is not Damage}
            self._recent.put(epoch, list(intact), list(intact.values()))
        self._counts_of(epoch).core.takes += len(samples)
        return [found[sample] for sample in samples]

    async def _come(self, epoch: int, samples: list[int], found: dict[int, Payload], asked: Asked) -> None:
        """Finds what is on its way."""
        missing = list(dict.fromkeys(sample for sample in samples if sample not in found))
        self._counts_of(epoch).core.misses += len(missing)
        self._drop(asked.dropped)
        self._count_given_up(epoch)
        with self._bytes_of(epoch).taken(missing, found):
            self._read(asked.reads)
            self._reads.go_on()
            if missing:
                with span("wait for chunks", missing=len(missing)):
                    await self._wait_for(epoch, missing, asked.place)

    async def _wait_for(self, epoch: int, samples: list[int], place: int) -> None:
        started = time.monotonic()
        try:
            await self._reads.have_brought(epoch, samples, place)
        finally:
            counts = self._counts_of(epoch)
            counts.waited_takes += len(samples)
            counts.wait_seconds += time.monotonic() - started

    async def _come_again(
        self, epoch: int, samples: list[int], found: dict[int, Payload], alone: ReadAlone, *, says_damage: bool
    ) -> None:
        """Finds what was asked for before, or is damaged."""
        gone = [sample for sample in samples if sample not in found]
        if not gone:
            return
        counts = self._counts_of(epoch)
        counts.replays += len(gone)
        while self._recent.has_new:
            self._recent.find_out_some()
            await asyncio.sleep(0)
        for sample in gone:
            if (payload := self._elsewhere(epoch, sample)) is not None:
                found[sample] = payload
        gone = [sample for sample in gone if sample not in found]
        if not gone:
            return

        async def read(new: list[int]) -> list[Payload | BaseException]:
            counts.exact_reads += len(new)
            counts.exact_bytes += int(self._lengths[np.searchsorted(self.share.samples, new)].sum())
            return await self._single.read(new, self._chunks.records, says_damage=says_damage)

        results = await alone.results(gone, read)
        for sample, result in zip(gone, results, strict=True):
            if not isinstance(result, BaseException):
                found[sample] = result
        for result in results:
            if isinstance(result, BaseException):
                raise self._over or result

    # The orders of epochs, made by threads.

    async def _planned(self, epoch: int) -> None:
        if self._over is not None:
            raise self._over
        if epoch not in self._planning:
            self._planning[epoch] = asyncio.create_task(self._plan(epoch))
        planning = self._planning[epoch]
        await asyncio.wait([planning])
        if not planning.cancelled():
            planning.result()

    async def _plan(self, epoch: int) -> None:
        def placed() -> PlacedOrder:
            return self.memory.placed(self._orders.order(epoch, self.number, self._lengths))

        try:
            if self._lists is not None:
                await self._plan_lists(epoch, self._lists)
                return
            async with self._one_at_a_time:
                order = await asyncio.to_thread(placed)
            self.memory.planned(epoch, order)
            self._reads.go_on()
        finally:
            del self._planning[epoch]

    async def _plan_lists(self, epoch: int, lists: PostedLists) -> None:
        """By all lists that are known when it is done."""

        def placed(known: list[tuple[int, AboutList, Int64Array]]) -> PlacedOrder:
            positions, samples = merged(known)
            here = self._orders.shares_of(samples) == self.number
            return self.memory.placed_list(np.searchsorted(self.share.samples, samples[here]), positions[here])

        before = self._list_versions.get(epoch, 0)
        while lists.version(epoch) != before or not self.memory.knows(epoch):
            version, begun_anew = lists.version(epoch), lists.begun_anew(epoch)
            async with self._one_at_a_time:
                order = await asyncio.to_thread(placed, lists.of_epoch(epoch))
            self._drop(self.memory.grown(epoch, order, from_start=begun_anew > before))
            self.memory.warmed(epoch, 0)
            self._reads.go_on()
            self._list_versions[epoch] = before = version
            for old in list(self._list_versions)[:-_KEPT_VERSIONS]:
                del self._list_versions[old]

    def lists_are_known(self, epoch: int) -> None:
        """Fact: more is known of the lists of an epoch."""
        is_used = epoch in self._list_versions
        if self._lists is not None and (is_used or self._lists.is_whole(epoch)) and epoch not in self._planning:
            self._planning[epoch] = asyncio.create_task(self._plan(epoch))

    def _next_to_plan(self) -> int | None:
        wanted = self.memory.next_wanted()
        if wanted is None or wanted in self._planning or (self._num_epochs and wanted >= self._num_epochs):
            return None
        return wanted if self._lists is None or self._lists.is_whole(wanted) else None

    # Reads, and what becomes of them.

    def _read_ahead(self) -> bool:
        """Order some of what it is time to read; whether there was any."""
        reads = self.memory.read_ahead()
        if reads is None:
            if (wanted := self._next_to_plan()) is not None:
                self._planning[wanted] = asyncio.create_task(self._plan(wanted))
            return False
        self._read(reads)
        return True

    def _read(self, reads: list[ChunkRead]) -> None:
        for read in reads:
            self._counts_of(read.epoch).core.refills += 1
        self._reads.order(reads)

    def _arrived(self, read: ChunkRead, chunk: ReadChunk) -> None:
        counts = self._counts_of(read.epoch).core
        lengths = self._lengths
        intact = np.array([payload is not None for payload in chunk.payloads], dtype=bool)
        kept_bytes = int(lengths[read.local[intact]].sum())
        if chunk.pinned:
            counts.refills_pinned += 1
            counts.bytes_pinned += kept_bytes
        elif chunk.shared:
            counts.bytes_shared += kept_bytes
        else:
            counts.samples_read += chunk.read.end - chunk.read.first
            counts.samples_filled += int(intact.sum())
            counts.bytes_read += int(lengths[read.local[0] : read.local[-1] + 1].sum())
            counts.bytes_filled += kept_bytes
            self._chunks.outage_is_known = False
        here = self._bytes_of(read.epoch)
        stay = self.memory.arrived(read, read.samples[~intact], self._found_lengths(read, chunk))
        if not here.taking and stay.all():  # nobody waits for it, and all of it was intact
            here.payloads.put_all(read.samples.tolist(), cast("list[Payload]", chunk.payloads))
            self._keep_within_memory()
            return
        samples = zip(read.samples.tolist(), chunk.read.samples.tolist(), chunk.payloads, stay.tolist(), strict=True)
        for entry, sample, payload, stays in samples:
            if payload is None:
                continue
            takers = here.taking.get(sample, ())
            for taken in takers:
                taken[sample] = payload
            if stays:
                here.payloads.put(entry, payload)
            elif not takers:  # who has asked for it has gone away, and may come again
                self._recent.put(read.epoch, [sample], [payload])
        self._keep_within_memory()

    def _found_lengths(self, read: ChunkRead, chunk: ReadChunk) -> Int64Array | None:
        """``(n,)`` bytes of its samples, where means stood for them."""
        if not self.memory.are_means:
            return None
        expected = self._lengths[read.local].tolist()
        found = (len(each) if each is not None else mean for each, mean in zip(chunk.payloads, expected, strict=True))
        return np.fromiter(found, np.int64, len(expected))

    def _keep_within_memory(self) -> None:
        """Samples that have come may be longer than was expected."""
        if self.memory.are_means and self.memory.held_bytes > self.memory.capacity_bytes:
            self.gives_back()

    def _failed(self, read: ChunkRead, error: BaseException | None) -> None:
        if error is not None and error is not self._over and not self._chunks.outage_is_known:
            log.warning("job %s: a chunk could not be read, and is read again when it is needed: %s", self._name, error)
        self._chunks.outage_is_known = True
        self._counts_of(read.epoch).refills_failed += 1
        self.memory.failed(read)

    def _count_given_up(self, epoch: int) -> None:
        self._counts_of(epoch).given_up_bytes += self.memory.given_up_bytes - self._given_up_bytes
        self._given_up_bytes = self.memory.given_up_bytes

    def _drop(self, dropped: list[tuple[int, Int64Array]]) -> None:
        if sum(len(samples) for _, samples in dropped) > _DROPPED_AT_ONCE:
            dropping = asyncio.create_task(in_turn_of_team(partial(self._drop_in_pieces, dropped)))
            self._dropping.add(dropping)
            dropping.add_done_callback(self._dropping.discard)
            return
        for epoch, samples in dropped:
            self._bytes_of(epoch).drop(samples)
            if self._shared is not None:
                self._shared.gone(epoch, samples)

    async def _drop_in_pieces(self, dropped: list[tuple[int, Int64Array]]) -> None:
        for epoch, samples in dropped:
            for first in range(0, len(samples), _DROPPED_AT_ONCE):
                piece = samples[first : first + _DROPPED_AT_ONCE]
                left = piece[~self.memory.are_here(epoch, piece)]  # else read again meanwhile
                self._bytes_of(epoch).drop(left)
                if self._shared is not None:
                    self._shared.gone(epoch, left)
                await asyncio.sleep(0)

    def _elsewhere(self, epoch: int, sample: int) -> Payload | None:
        """The same bytes: of what has just left, or of another epoch."""
        entry = int(np.searchsorted(self.share.samples, sample)) if self._lists is None else -1
        for other in (epoch, epoch - 1, epoch + 1):
            here = self._epochs.get(other)
            for payload in (here.payloads.get(entry) if here else None, self._recent.get(other, sample)):
                if payload is not None:
                    return payload
        return None

    def _bytes_of(self, epoch: int) -> _EpochBytes:
        if epoch not in self._epochs:
            self._epochs = {number: found for number, found in self._epochs.items() if not found.is_empty}
            self._epochs[epoch] = _EpochBytes()
        return self._epochs[epoch]
