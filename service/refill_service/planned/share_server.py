"""How does a pod serve one share of a planned job? Carries out what :class:`ShareMemory` decides.

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

import numpy as np

from refill.errors import StoreUnavailable
from refill_service.cache_core.planned.job_orders import JobOrders
from refill_service.cache_core.planned.share_memory import Asked, ChunkRead, PlacedOrder, ShareMemory
from refill_service.cache_core.policies.interface import Read
from refill_service.cache_core.sample_mapping import Int64Array
from refill_service.jobs.chunk_reader import ChunkReader, ReadChunk, ReadGroup
from refill_service.jobs.recently_sent import RecentlySent
from refill_service.jobs.running_epoch import OwnerCounts
from refill_service.jobs.single_reads import SingleReads
from refill_service.memory.payload import Damage, Payload
from refill_service.observing.tracing import span

__all__ = ["ShareServer"]

log = logging.getLogger(__name__)

_Key = tuple[int, int]
"""Epoch and sample of the dataset."""


class ShareServer:
    """One share at this pod.

    :param chunks: reads samples of the dataset, by their ids; ``single`` reads them one by one.
    :param recent: what has just left, of all shares of the job.
    :param counts_of: those of an epoch.
    :param wait_seconds: for the store.
    :param num_epochs: that will be asked for; 0: not known.
    :param num_askers: how many ranks ask for each sample.
    :param planning: of the job, which plans one share at a time: whoever asks for epochs that nobody needs takes one
        thread at most.
    """

    def __init__(
        self,
        orders: JobOrders,
        number: int,
        chunks: ChunkReader,
        single: SingleReads,
        recent: RecentlySent,
        counts_of: Callable[[int], OwnerCounts],
        *,
        name: str,
        wait_seconds: float,
        num_epochs: int,
        num_askers: int,
        planning: asyncio.Lock,
    ) -> None:
        self.number = number
        self.share, self._lengths = orders.share(number)
        self.memory = ShareMemory(self.share.starts, self._lengths, orders.planned_bytes(number), num_askers)
        self.last_asked = time.monotonic()
        self._orders = orders
        self._chunks = chunks
        self._single = single
        self._recent = recent
        self._counts_of = counts_of
        self._name = name
        self._wait_seconds = wait_seconds
        self._num_epochs = num_epochs
        self._payloads: dict[_Key, Payload] = {}
        """Of samples that are in memory, and that nobody has asked for."""
        self.resident_bytes = 0
        """Of them."""
        self._arriving: dict[_Key, asyncio.Future[None]] = {}
        """Done when the read under way that brings a sample has arrived, or failed."""
        self._changed = asyncio.Event()
        """Set, and replaced by a new one, when one of them is done."""
        self._taking: dict[_Key, list[dict[_Key, Payload]]] = {}
        """Who takes the bytes of a sample when they arrive."""
        self._planning: dict[int, asyncio.Task[None]] = {}
        self._one_at_a_time = planning
        self._reads: set[asyncio.Task[None]] = set()

    def memory_is(self, capacity_bytes: int) -> None:
        """Fact: its samples may take so much memory."""
        self._read(self.memory.memory_is(capacity_bytes))

    async def warm(self, epoch: int, place: int) -> None:
        """Read what comes from a place on, as much as memory holds, unless somebody asks for samples already."""
        while not self.memory.knows(epoch):
            await self._planned(epoch)
        self._read(self.memory.warmed(epoch, place))

    def forget(self) -> None:
        """Fact: nobody asks for this share here any more, or not soon."""
        self._drop(self.memory.forget())

    async def close(self) -> None:
        """Stop all reads; requests under way end with :class:`asyncio.CancelledError`."""
        tasks = [*self._reads, *self._planning.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for coming in self._arriving.values():  # of what was cancelled before it began
            coming.cancel()
        self._arriving.clear()
        self._changed.set()
        self.forget()

    async def take(self, epoch: int, places: Int64Array, *, says_damage: bool) -> tuple[Int64Array, list[Payload]]:
        """``(sample ids, their bytes)`` at places ``(n,)`` of an epoch, all different.

        :param says_damage: whether :class:`Damage` stands for a sample that is damaged; else it is raised.
        """
        self.last_asked = time.monotonic()
        while not self.memory.knows(epoch):
            await self._planned(epoch)
        asked = self.memory.asked(epoch, places)
        ids = self.share.samples[asked.samples]
        keys = [(epoch, sample) for sample in ids.tolist()]
        here = zip(keys, asked.stay.tolist(), strict=True)
        leave = {key: self._payloads.get(key) if stays else self._pop(key) for key, stays in here}
        found = {key: payload for key, payload in leave.items() if payload is not None}
        try:
            await self._come(keys, found, asked)
            self._plan_ahead()
            await self._come_again(ids, found, epoch, says_damage=says_damage)
        finally:
            # Who asks again finds what is here already, within the limit of what is kept of answers that left.
            intact = {sample: payload for (_, sample), payload in found.items() if type(payload) is not Damage}
            self._recent.put(epoch, list(intact), list(intact.values()))
        payloads = [found[key] for key in keys]
        self._counts_of(epoch).core.takes += len(payloads)
        return ids, payloads

    async def _come(self, keys: list[_Key], found: dict[_Key, Payload], asked: Asked) -> None:
        """Finds what is on its way."""
        missing = [key for key in keys if key not in found]
        self._counts_of(keys[0][0]).core.misses += len(missing)
        self._drop(asked.dropped)
        with self._takes(missing, found):
            self._read(asked.reads)
            if missing:
                with span("wait for chunks", missing=len(missing)):
                    await self._arrival_of(missing)

    async def _come_again(self, ids: Int64Array, found: dict[_Key, Payload], epoch: int, *, says_damage: bool) -> None:
        """Finds what was asked for before, or is damaged."""
        gone = np.array([sample for sample in ids.tolist() if (epoch, sample) not in found], dtype=np.int64)
        if not len(gone):
            return
        counts = self._counts_of(epoch)
        counts.replays += len(gone)
        for sample in gone.tolist():
            if (payload := self._elsewhere(epoch, sample)) is not None:
                found[epoch, sample] = payload
        alone = np.array([sample for sample in gone.tolist() if (epoch, sample) not in found], dtype=np.int64)
        if len(alone):
            counts.exact_reads += len(alone)
            counts.exact_bytes += int(self._lengths[np.searchsorted(self.share.samples, alone)].sum())
            results = await self._single.read(alone.tolist(), says_damage=says_damage)
            for sample, result in zip(alone.tolist(), results, strict=True):
                if not isinstance(result, BaseException):
                    found[epoch, sample] = result
            for result in results:
                if isinstance(result, BaseException):
                    raise result

    # The orders of epochs, made by threads.

    async def _planned(self, epoch: int) -> None:
        if epoch not in self._planning:
            self._planning[epoch] = asyncio.create_task(self._plan(epoch))
        await asyncio.shield(self._planning[epoch])

    async def _plan(self, epoch: int) -> None:
        def placed() -> PlacedOrder:
            return self.memory.placed(self._orders.order(epoch, self.number))

        try:
            async with self._one_at_a_time:
                order = await asyncio.to_thread(placed)
            self._read(self.memory.planned(epoch, order))
        finally:
            del self._planning[epoch]

    def _plan_ahead(self) -> None:
        wanted = self.memory.next_wanted()
        if wanted is None or wanted in self._planning or (self._num_epochs and wanted >= self._num_epochs):
            return
        self._planning[wanted] = asyncio.create_task(self._plan(wanted))

    # Reads, and what becomes of them.

    def _read(self, reads: list[ChunkRead]) -> None:
        orders: dict[Read, ChunkRead] = {}
        for read in reads:
            ids = self.share.samples[read.samples]
            orders[Read(int(ids[0]), int(ids[-1]) + 1, ids, read.chunk)] = read
        to_read = []
        for order, read in orders.items():
            self._counts_of(read.epoch).core.refills += 1
            if (chunk := self._chunks.pinned(order)) is not None:
                self._arrived(read, chunk)
            else:
                to_read.append(order)
        for group in self._chunks.together(to_read):
            of_group = {order: orders[order] for order in group.reads}
            coming = {order: asyncio.get_running_loop().create_future() for order in group.reads}
            for order, read in of_group.items():
                self._arriving.update(((read.epoch, sample), coming[order]) for sample in order.samples.tolist())
            task = asyncio.create_task(self._fetch(group, of_group, coming))
            self._reads.add(task)
            task.add_done_callback(self._reads.discard)

    async def _fetch(
        self, group: ReadGroup, reads: dict[Read, ChunkRead], coming: dict[Read, asyncio.Future[None]]
    ) -> None:
        error: BaseException | None = None

        def arrived(chunk: ReadChunk) -> None:
            self._arrived(reads[chunk.read], chunk)
            self._done(reads[chunk.read], chunk.read, coming[chunk.read], None)

        try:
            await self._chunks.read(group, arrived)
        except BaseException as raised:
            error = raised
            if not isinstance(raised, Exception):
                raise
        finally:
            group.ended()
            for order, read in reads.items():
                if not coming[order].done():
                    self._failed(read, error)
                    self._done(read, order, coming[order], error)

    def _arrived(self, read: ChunkRead, chunk: ReadChunk) -> None:
        counts = self._counts_of(read.epoch).core
        lengths = self._lengths
        intact = np.array([payload is not None for payload in chunk.payloads], dtype=bool)
        kept_bytes = int(lengths[read.samples[intact]].sum())
        if chunk.pinned:
            counts.refills_pinned += 1
            counts.bytes_pinned += kept_bytes
        else:
            counts.samples_read += chunk.read.end - chunk.read.first
            counts.samples_filled += int(intact.sum())
            counts.bytes_read += int(lengths[read.samples[0] : read.samples[-1] + 1].sum())
            counts.bytes_filled += kept_bytes
            self._chunks.outage_is_known = False
        stay = self.memory.arrived(read, read.samples[~intact])
        for sample, payload, stays in zip(chunk.read.samples.tolist(), chunk.payloads, stay.tolist(), strict=True):
            if payload is None:
                continue
            key = (read.epoch, sample)
            takers = self._taking.get(key, ())
            for taken in takers:
                taken[key] = payload
            if stays:
                self._payloads[key] = payload
                self.resident_bytes += len(payload)
            elif not takers:  # who has asked for it has gone away, and may come again
                self._recent.put(read.epoch, [sample], [payload])

    def _failed(self, read: ChunkRead, error: BaseException | None) -> None:
        if isinstance(error, Exception) and not self._chunks.outage_is_known:
            log.warning("job %s: a chunk could not be read, and is read again when it is needed: %s", self._name, error)
        self._chunks.outage_is_known = True
        self._counts_of(read.epoch).refills_failed += 1
        self.memory.failed(read)

    def _done(self, read: ChunkRead, order: Read, coming: asyncio.Future[None], error: BaseException | None) -> None:
        for sample in order.samples.tolist():
            if self._arriving.get((read.epoch, sample)) is coming:
                del self._arriving[read.epoch, sample]
        if error is None:
            coming.set_result(None)
        elif isinstance(error, Exception):
            coming.set_exception(error)
            coming.exception()  # known: a read ahead of need has nobody who waits for it
        else:
            coming.cancel()
        self._changed.set()
        self._changed = asyncio.Event()

    async def _arrival_of(self, keys: list[_Key]) -> None:
        """Wait for the reads that bring these samples, and raise what went wrong with the first that failed."""
        arriving = {self._arriving[key] for key in keys if key in self._arriving}
        started = time.perf_counter()
        try:
            while not all(each.done() for each in arriving):
                async with asyncio.timeout(self._wait_seconds):
                    await self._changed.wait()
        except TimeoutError as silence:
            raise StoreUnavailable(
                f"job {self._name} waits for the store: nothing has come for {self._wait_seconds:g} s"
            ) from silence
        finally:
            counts = self._counts_of(keys[0][0])
            counts.waited_takes += len(keys)
            counts.wait_seconds += time.perf_counter() - started
        for each in arriving:
            if not each.cancelled() and (error := each.exception()) is not None:
                raise error

    @contextmanager
    def _takes(self, keys: list[_Key], taken: dict[_Key, Payload]) -> Iterator[None]:
        """The bytes of these samples are put there as they arrive."""
        for key in keys:
            self._taking.setdefault(key, []).append(taken)
        try:
            yield
        finally:
            for key in keys:
                self._taking[key] = [each for each in self._taking[key] if each is not taken]
                if not self._taking[key]:
                    del self._taking[key]

    def _pop(self, key: _Key) -> Payload | None:
        payload = self._payloads.pop(key, None)
        if payload is not None:
            self.resident_bytes -= len(payload)
        return payload

    def _drop(self, dropped: list[tuple[int, Int64Array]]) -> None:
        for epoch, samples in dropped:
            for sample in self.share.samples[samples].tolist():
                self._pop((epoch, sample))

    def _elsewhere(self, epoch: int, sample: int) -> Payload | None:
        """The same bytes: of what has just left, or of another epoch."""
        for other in (epoch, epoch - 1, epoch + 1):
            for payload in (self._payloads.get((other, sample)), self._recent.get(other, sample)):
                if payload is not None:
                    return payload
        return None
