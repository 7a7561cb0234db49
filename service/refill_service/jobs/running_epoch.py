"""What does an owner hold of one epoch that runs? The bytes of its samples, and the reads under way.

``read_and_drop`` and ``begin_reads`` have fetched what the policy wants; its bytes are kept until they leave or are
dropped. ``wait_for`` waits until the bytes of promised samples are here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_right, insort
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from refill.errors import StoreUnavailable
from refill.protocol.wire_format import Int64Array
from refill_service.cache_core.owner_machine import OpenEpoch, Order, OwnerMachine
from refill_service.cache_core.policies.interface import NO_SAMPLES, EpochCounts, Orders, Policy, Read
from refill_service.jobs.chunk_reader import ChunkReader, ReadChunk
from refill_service.jobs.job import Job
from refill_service.memory.loop_turns import in_turn_of_team
from refill_service.memory.payload import Payload, Payloads

log = logging.getLogger(__name__)

_FEW_SAMPLES = 256
"""Of a read, each of which is entered by itself."""

_MOST_LOOKED_AT = 1 << 11
"""Reads, in one piece."""

_DROPPED_AT_ONCE = 1 << 10
"""Samples."""

_MOST_NOT_BEGUN = 64
"""Reads that wait for more, which may be their neighbours."""


@dataclass
class OwnerCounts:
    """What an owner did in one epoch, beside what its core decided."""

    core: EpochCounts
    waited_takes: int = 0
    """Takes, and repeats, that had to wait for the store, whether for their own refill or for one under way."""
    wait_seconds: float = 0.0
    replays: int = 0
    """Requests that were asked again after their bytes had left."""
    exact_reads: int = 0
    """Samples read by a ranged GET of their own: replays of what left long ago, repeats and random access."""
    exact_bytes: int = 0
    refills_failed: int = 0
    given_up_bytes: int = 0
    """Of samples that had to leave memory before they were asked for, of planned jobs: they are read again."""


class RunningEpoch:
    """The bytes and the reads of one epoch of an owner.

    :param machine: gets what arrived and what failed, as facts.
    :param carry_out: what it then orders.
    :param reads: the owner's reads under way, of all epochs, so that it can end them.
    """

    def __init__(
        self,
        job: Job,
        epoch: OpenEpoch,
        machine: OwnerMachine,
        carry_out: Callable[[list[Order]], None],
        chunks: ChunkReader,
        reads: set[asyncio.Task[None]],
    ) -> None:
        self.job = job
        self.epoch = epoch
        self.counts = OwnerCounts(epoch.policy.counts)
        self.payloads = Payloads()
        """Bytes of local samples that are in memory, or that were assigned and have yet to leave."""
        self._machine = machine
        self._carry_out = carry_out
        self._chunks = chunks
        self._reads = reads
        self._arriving = _Arriving()
        self._not_begun: dict[Read, asyncio.Future[None]] = {}
        """Reads that are ordered; each with what is done when it has arrived."""
        self._changed = asyncio.Event()
        """Set, and replaced by a new one, when one of these is done."""
        self._taking: dict[int, list[dict[int, Payload]]] = {}
        """Who takes the bytes of a local sample when they arrive, whether or not they stay."""
        self._left_to_drop = NO_SAMPLES
        """What gives way in pieces, and has yet to. Not what was read again and has come meanwhile."""

    @property
    def number(self) -> int:
        return self.epoch.number

    @property
    def core(self) -> Policy:
        return self.epoch.policy

    def leave(self, samples: Int64Array) -> list[Payload | None]:
        """The bytes of these samples for an answer; None for one that is not here. They leave memory, unless the policy
        wants them to stay."""
        stays = self.core.stays(samples)
        if stays is None:
            return [self.payloads.pop(sample) for sample in samples.tolist()]
        pairs = zip(samples.tolist(), stays.tolist(), strict=True)
        return [self.payloads.get(sample) if stay else self.payloads.pop(sample) for sample, stay in pairs]

    def read_and_drop(self, orders: Orders) -> None:
        """Forget what is to be dropped, and have chunks fetched, unless the pinned tier has them: many at once, or when
        :meth:`begin_reads` is called, so that neighbours are read together."""
        self._drop(orders.drops)
        for read in orders.reads:
            if (chunk := self._chunks.pinned(read)) is not None:
                self._arrived(chunk)
                continue
            self._not_begun[read] = asyncio.get_running_loop().create_future()
            self._arriving.add(read, self._not_begun[read])
        if len(self._not_begun) >= _MOST_NOT_BEGUN:
            self.begin_reads()

    def _drop(self, samples: Int64Array) -> None:
        """All of a chunk's may give way at once: then they do so in pieces."""
        if len(samples) <= _DROPPED_AT_ONCE:
            self.payloads.drop(samples.tolist())
            return
        is_dropping = len(self._left_to_drop) > 0
        self._left_to_drop = np.concatenate([self._left_to_drop, samples])
        if not is_dropping:
            dropping = asyncio.create_task(in_turn_of_team(self._drop_in_pieces))
            self._reads.add(dropping)
            dropping.add_done_callback(self._reads.discard)

    async def _drop_in_pieces(self) -> None:
        while len(self._left_to_drop):
            piece, self._left_to_drop = np.split(self._left_to_drop, [_DROPPED_AT_ONCE])
            self.payloads.drop(piece.tolist())
            await asyncio.sleep(0)

    def begin_reads(self) -> None:
        """Begin those that were ordered."""
        if not self._not_begun:
            return
        not_begun, self._not_begun = self._not_begun, {}
        for group in self._chunks.together(list(not_begun)):
            here = {read: not_begun[read] for read in group}
            task = asyncio.create_task(in_turn_of_team(partial(self._read, group, here)))
            self._reads.add(task)
            task.add_done_callback(lambda task, here=here: self._read_ended(task, here))  # type: ignore[misc]

    def give_up_reads(self) -> None:
        """Those that were ordered and have not begun will not come."""
        not_begun, self._not_begun = self._not_begun, {}
        for each in not_begun.values():
            each.cancel()
        if not_begun:
            self._done()

    @contextmanager
    def taking(self, samples: list[int], taken: dict[int, Payload]) -> Iterator[None]:
        """Puts the bytes of these samples into ``taken``, as they arrive, whether or not they stay: they take no memory
        that would have to be given back."""
        for sample in samples:
            self._taking.setdefault(sample, []).append(taken)
        try:
            yield
        finally:
            for sample in samples:
                if len(takers := self._taking.pop(sample)) > 1:
                    self._taking[sample] = [each for each in takers if each is not taken]

    def coming(self, samples: list[int]) -> list[asyncio.Future[None]]:
        """The reads that bring those of these samples which are on their way."""
        return self._arriving.of(samples)

    async def wait_for(self, arriving: set[asyncio.Future[None]], num_samples: int, patience_seconds: float) -> None:
        """Wait for reads that bring samples, and raise what went wrong with the first that failed.

        :param arriving: as :meth:`coming` has returned them.
        :param num_samples: that they bring for who waits.
        :param patience_seconds: raises :class:`StoreUnavailable` when nothing has come at all for so long; reads go on.
        """
        if not arriving:
            return
        started, left = time.perf_counter(), list(arriving)
        try:
            while left:
                if left[-1].done():
                    left.pop()  # not looked at again: they may be very many
                    if not len(left) % _MOST_LOOKED_AT:
                        await asyncio.sleep(0)  # it is others' turn
                    continue
                async with asyncio.timeout(patience_seconds):
                    await self._changed.wait()
        except TimeoutError as silence:
            raise StoreUnavailable(
                f"pod {self.job.ordinal} waits for the store: nothing has come from {self.job.dataset.url} for "
                f"{patience_seconds:g} s",
                pod=self.job.ordinal,
            ) from silence
        finally:
            self.counts.waited_takes += num_samples
            self.counts.wait_seconds += time.perf_counter() - started
        for place, each in enumerate(arriving):
            if place and not place % _MOST_LOOKED_AT:
                await asyncio.sleep(0)
            if not each.cancelled() and (error := each.exception()) is not None:
                raise error

    async def _read(self, group: list[Read], here: dict[Read, asyncio.Future[None]]) -> None:
        """Fetch the chunks of some refills and keep the samples that fill a slot. Who waits learns how it went."""

        def arrived(chunk: ReadChunk) -> None:
            self._arrived(chunk)
            here[chunk.read].set_result(None)
            self._done()

        error: BaseException | None = None
        try:
            await self._chunks.read(group, arrived)
        except BaseException as raised:
            error = raised
            if not isinstance(raised, Exception):
                raise
        finally:
            for read in group:
                if not here[read].done():
                    self._failed(read, here[read], error)

    def _arrived(self, chunk: ReadChunk) -> None:
        """A damaged sample keeps its slot without bytes: the request that it falls to reads it alone and gets the
        error."""
        read = chunk.read
        self._chunks.outage_is_known = self._chunks.outage_is_known and chunk.pinned
        if not self.epoch.abandoned:
            came = dict(zip(read.samples.tolist(), chunk.payloads, strict=True))
            damaged = [sample for sample, payload in came.items() if payload is None]
            here = {sample: payload for sample, payload in came.items() if payload is not None}
            if len(self._left_to_drop):
                self._left_to_drop = self._left_to_drop[~np.isin(self._left_to_drop, read.samples)]
            self.payloads.put_all(list(here), list(here.values()))
            for sample in self._taking.keys() & here.keys() if self._taking else ():
                for taken in self._taking[sample]:
                    taken[sample] = here[sample]
            orders = self._machine.arrived(self.epoch, read, np.array(damaged, dtype=np.int64), pinned=chunk.pinned)
            self._carry_out(orders)
        self._arriving.forget(read)

    def _failed(self, read: Read, here: asyncio.Future[None], error: BaseException | None) -> None:
        if isinstance(error, Exception) and not self._chunks.outage_is_known:
            log.warning("job %s: a refill failed, and is ordered again when needed: %s", self.job.spec.name, error)
        self._chunks.outage_is_known = True
        self.counts.refills_failed += 1
        orders = self._machine.failed(self.epoch, read)
        self._arriving.forget(read)
        if not isinstance(error, Exception):
            here.cancel()
        elif not here.cancelled():
            here.set_exception(error)
            here.exception()  # known: a read ahead of need has nobody who waits for it
        self._done()
        self._carry_out(orders)

    def _read_ended(self, task: asyncio.Task[None], here: dict[Read, asyncio.Future[None]]) -> None:
        """Whatever became of it, even if it was cancelled before it began: nobody waits for it any more."""
        self._reads.discard(task)
        for each in here.values():
            if each.cancel():
                self._done()

    def _done(self) -> None:
        """Fact: a chunk has arrived, or will not."""
        self._changed.set()
        self._changed = asyncio.Event()


class _Arriving:
    """Which read brings a local sample, and what is done when it has arrived, or failed."""

    def __init__(self) -> None:
        self._by_sample: dict[int, asyncio.Future[None]] = {}
        """Of reads of few samples."""
        self._large: dict[int, dict[Read, asyncio.Future[None]]] = {}
        """Others, by their first sample. Two of them have the same place, or none in common."""
        self._places: list[int] = []
        """The first samples of these, ascending."""

    def add(self, read: Read, arrives: asyncio.Future[None]) -> None:
        if read.end - read.first <= _FEW_SAMPLES:
            self._by_sample.update(dict.fromkeys(read.samples.tolist(), arrives))
            return
        if read.first not in self._large:
            insort(self._places, read.first)
        self._large.setdefault(read.first, {})[read] = arrives

    def forget(self, read: Read) -> None:
        if read.end - read.first <= _FEW_SAMPLES:
            for sample in read.samples.tolist():
                self._by_sample.pop(sample, None)
        elif read in (there := self._large.get(read.first, {})):
            del there[read]
            if not there:
                del self._large[read.first]
                self._places.remove(read.first)

    def of(self, samples: list[int]) -> list[asyncio.Future[None]]:
        """Those that bring these samples, of which some may not be on their way."""
        found = [self._by_sample.get(sample) or self._of_large(sample) for sample in samples]
        return [arrives for arrives in found if arrives is not None]

    def _of_large(self, sample: int) -> asyncio.Future[None] | None:
        place = bisect_right(self._places, sample) - 1
        if place < 0:
            return None
        for read, arrives in reversed(self._large[self._places[place]].items()):
            at = int(np.searchsorted(read.samples, sample))
            if at < len(read.samples) and read.samples[at] == sample:
                return arrives
        return None
