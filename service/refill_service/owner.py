"""How does a pod serve its share of a job? Carries out what ``OwnerEpoch`` decides: reads chunks, keeps bytes.

The path of a request: ``take`` -> the core assigns samples and orders refills -> ``_read`` has the chunks fetched and
keeps what fills a slot -> the bytes leave with the answer and are forgotten. ``ahead`` follows the answer. When an
epoch has nothing left to read, ``_preload`` begins the next one with the memory that it leaves.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from refill.errors import EpochEnded, EpochNotReady, JobLost
from refill.protocol.wire_format import Int64Array
from refill_service.byte_gate import ByteGate
from refill_service.cache_core.epoch_order import Traces
from refill_service.cache_core.owner_epoch import EpochCounts, OwnerEpoch
from refill_service.cache_core.policies import new_epoch
from refill_service.cache_core.refill import Refill
from refill_service.chunk_reader import ChunkReader, ReadChunk, ReadGroup
from refill_service.job import Job
from refill_service.peers import Payload
from refill_service.pinned_tier import PinnedShare
from refill_service.recently_sent import RecentlySent

__all__ = ["Owner", "OwnerCounts"]

log = logging.getLogger(__name__)


@dataclass
class OwnerCounts:
    """What an owner did in one epoch, beside what its core decided."""

    core: EpochCounts
    waited_takes: int = 0
    """Takes that had to wait for the store, whether for their own refill or for one under way."""
    wait_seconds: float = 0.0
    replays: int = 0
    """Requests that were asked again after their bytes had left."""
    exact_reads: int = 0
    """Samples read by a ranged GET of their own: replays of what left long ago, repeats and random access."""
    exact_bytes: int = 0
    refills_failed: int = 0


@dataclass
class _Epoch:
    """The running state of one epoch: the core, and the bytes of what it holds."""

    number: int
    core: OwnerEpoch
    counts: OwnerCounts
    payloads: _Payloads = field(default_factory=lambda: _Payloads())
    """Bytes of local samples that fill a slot, or that were assigned and have yet to leave."""
    arriving: dict[int, asyncio.Future[None]] = field(default_factory=dict)
    """Done when the refill under way that brings a local sample has arrived, or failed."""
    coming: set[asyncio.Future[None]] = field(default_factory=set)
    """All of these."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set, and replaced by a new one, when one of them is done."""
    abandoned: bool = False

    def done(self, read: asyncio.Future[None]) -> None:
        """Fact: a chunk has arrived, or will not."""
        self.coming.discard(read)
        self.changed.set()
        self.changed = asyncio.Event()

    @property
    def is_over(self) -> bool:
        return self.abandoned or self.core.finished


class _Payloads:
    """Bytes by local sample, and how many they are."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._by_sample: dict[int, Payload] = {}

    def put(self, sample: int, payload: Payload) -> None:
        self._by_sample[sample] = payload
        self.num_bytes += len(payload)

    def pop(self, sample: int) -> Payload | None:
        payload = self._by_sample.pop(sample, None)
        if payload is not None:
            self.num_bytes -= len(payload)
        return payload

    def drop_oldest(self, limit_bytes: int) -> None:
        """Until no more than ``limit_bytes`` are left. Whoever was promised one of them has it read alone."""
        while self.num_bytes > limit_bytes:
            self.pop(next(iter(self._by_sample)))

    def clear(self) -> None:
        self._by_sample.clear()
        self.num_bytes = 0


class Owner:
    """One pod's share of one job.

    :param gate: bounds the bytes of reads in flight, over all jobs of the pod.
    :param pinned: what the pod keeps of this share, for all jobs.
    :param recent_bytes: how much of what was sent is kept for those who ask again.
    """

    def __init__(self, job: Job, gate: ByteGate, pinned: PinnedShare, recent_bytes: int, wait_seconds: float) -> None:
        self.job = job
        self.history: dict[int, OwnerCounts] = {}
        self._gate = gate
        self._chunks = ChunkReader(job.dataset, job.records, job.share, gate, pinned)
        self._recent = RecentlySent(recent_bytes)
        self.wait_seconds = wait_seconds
        self._epochs: list[_Epoch] = []
        """The newest last. While it loads, the one before it can still be in use, and what the one before that gave
        can still be asked for again."""
        self._rank_epochs = [-1] * job.spec.world_size
        self._moved_on = asyncio.Event()
        """Set, and replaced by a new one, when a rank has moved on or an epoch was opened."""
        self._reads: set[asyncio.Task[None]] = set()
        self._closed = False
        self._store_fails = False
        """So that an outage is one line in the log."""

    @property
    def resident_bytes(self) -> int:
        return sum(epoch.payloads.num_bytes for epoch in self._epochs)

    @property
    def epoch(self) -> int:
        """The latest epoch that a rank has entered; -1 when none has."""
        return max(self._rank_epochs)

    @property
    def begun(self) -> bool:
        """Whether a rank has entered an epoch, here or at another pod: all owners are told before any is asked."""
        return self.epoch >= 0

    @property
    def recent_bytes(self) -> int:
        return self._recent.used_bytes

    async def close(self) -> None:
        """Stop all reads and forget everything. Requests under way, and later ones, end with :class:`JobLost`."""
        self._closed = True
        self._wake()
        for task in self._reads:
            task.cancel()
        await asyncio.gather(*self._reads, return_exceptions=True)
        self._epochs.clear()
        self._recent.clear()

    async def rank_opens(self, epoch: int, rank: int) -> None:
        """Fact: a rank asks for this epoch now, so it has left all before."""
        self.job.check_rank(rank)
        if self._rank_epochs[rank] < epoch:
            self._rank_epochs[rank] = epoch
            self._leave_behind()
            self._wake()

    async def take(self, epoch: int, rank: int, asked: Int64Array) -> tuple[Int64Array, list[Payload]]:
        """Answer requests for samples of this share: ``(sample ids, their bytes)`` in the order of ``asked``.

        :param asked: ``(n,)`` sample ids that the rank's trace asks for, all different, none a repeat.
        """
        state = await self._epoch(epoch, rank)
        if state.abandoned:
            raise EpochEnded(
                f"job {self.job.spec.name} has left epoch {epoch} before its end; it can't be taken up again"
            )
        first = self.job.share.first_sample
        taken = state.core.take(asked - first)
        self._order(state, taken.refills)
        samples = taken.samples.tolist()
        payloads = [state.payloads.pop(sample) for sample in samples]
        missing = [i for i, payload in enumerate(payloads) if payload is None]
        self._preload()
        if state.core.finished:
            self._wake()
        try:
            await self._wait_for(state, [samples[i] for i in missing], taken.answer_after)
            for i in missing:
                payloads[i] = state.payloads.pop(samples[i])
            await self._replay(state, samples, payloads)
        except BaseException:
            # Who asks again finds what is here already, within the limit of what is kept of answers that left.
            here = {sample: found for sample, found in zip(samples, payloads, strict=True) if found is not None}
            self._recent.put(epoch, list(here), list(here.values()))
            raise
        found = [payload for payload in payloads if payload is not None]
        self._recent.put(epoch, samples, found)
        return taken.samples + first, found

    async def _replay(self, state: _Epoch, samples: list[int], payloads: list[Payload | None]) -> None:
        """Fill in what is missing: its bytes have left with an answer that never came through, or are damaged."""
        gone = [i for i, payload in enumerate(payloads) if payload is None]
        state.counts.replays += len(gone)
        for i in gone:
            payloads[i] = self._recent.get(state.number, samples[i])
        lost = [i for i in gone if payloads[i] is None]
        results = await self._exact(state.counts, [samples[i] for i in lost])
        for i, result in zip(lost, results, strict=True):
            payloads[i] = None if isinstance(result, BaseException) else result
        _raise_first(results)

    def ahead(
        self, epoch: int, rank: int, answered: Int64Array, ahead_from: int, room: int, started_below: int
    ) -> tuple[Int64Array, Int64Array, list[Payload]]:
        """What to send after an answer: ``(positions, sample ids, their bytes)``. Parameters as ``send_ahead``.

        :param answered: the samples that the requests just answered asked for.
        """
        state = self._known(epoch)
        if state is None or state.abandoned:
            empty = np.empty(0, dtype=np.int64)
            return empty, empty, []
        first = self.job.share.first_sample
        locations = self.job.mapping.locations(answered - first)
        ahead = state.core.send_ahead(rank, locations, ahead_from, room, started_below)
        self._order(state, ahead.refills)
        found = [state.payloads.pop(sample) for sample in ahead.samples.tolist()]
        here = [i for i, payload in enumerate(found) if payload is not None]
        samples = ahead.samples[here].tolist()
        payloads = [payload for payload in found if payload is not None]
        self._preload()
        if state.core.finished:
            self._wake()
        self._recent.put(epoch, samples, payloads)
        return ahead.positions[here], ahead.samples[here] + first, payloads

    async def exact(self, sample_ids: Int64Array) -> list[Payload]:
        """The bytes of exactly these samples of the share, outside of any epoch's protocol."""
        counts = self._epochs[-1].counts if self._epochs else OwnerCounts(EpochCounts())
        results = await self._exact(counts, (sample_ids - self.job.share.first_sample).tolist())
        _raise_first(results)
        return [result for result in results if not isinstance(result, BaseException)]

    async def _epoch(self, epoch: int, rank: int) -> _Epoch:
        self._refuse_when_closed()
        await self.rank_opens(epoch, rank)
        if (known := self._known(epoch)) is not None:
            return known
        if self._epochs and epoch < self._epochs[-1].number:
            raise EpochEnded(
                f"job {self.job.spec.name} is at epoch {self.epoch}, epoch {epoch} has ended: "
                "use another job name to start over, or end this job first"
            )
        traces = await self.job.traces(epoch, self.wait_seconds)
        try:
            async with asyncio.timeout(self.wait_seconds):
                while not self._may_open(epoch):
                    await self._moved_on.wait()
                    self._refuse_when_closed()
        except TimeoutError as error:
            behind = [rank for rank, at in enumerate(self._rank_epochs) if at < epoch]
            raise EpochNotReady(
                f"epoch {epoch} of job {self.job.spec.name} waits for rank {behind[0] if behind else '?'} "
                f"to finish epoch {max(0, min(self._rank_epochs))}",
                ranks=behind,
            ) from error
        self._refuse_when_closed()
        if not self._epochs or self._epochs[-1].number < epoch:
            self._open(epoch, traces)
        return await self._epoch(epoch, rank)

    def _refuse_when_closed(self) -> None:
        if self._closed:
            raise JobLost(f"job {self.job.spec.name} was ended while it was asked for samples", job=self.job.spec.name)

    def _wake(self) -> None:
        """Whoever waits for an epoch looks again whether it may open."""
        self._moved_on.set()
        self._moved_on = asyncio.Event()

    def _known(self, epoch: int) -> _Epoch | None:
        return next((known for known in self._epochs if known.number == epoch), None)

    def _may_open(self, epoch: int) -> bool:
        """Those before need no more memory: they are used up, or every rank has left them."""
        if not self._epochs or self._epochs[-1].number >= epoch or self._all_reached(epoch):
            return True
        return all(known.is_over for known in self._epochs)

    def _all_reached(self, epoch: int) -> bool:
        """Whether every rank that asks for anything in this epoch has entered it."""
        return all(at >= epoch or self.job.asks_nothing(epoch, rank) for rank, at in enumerate(self._rank_epochs))

    def _open(self, epoch: int, traces: Traces) -> None:
        spec = self.job.spec
        core = new_epoch(
            # In the order of the dataset each chunk is used up before the next: nothing to redirect, nothing wasted.
            spec.policy if spec.shuffle else "redox",
            self.job.mapping,
            traces,
            self.job.records.length,
            capacity_bytes=0,  # until _use_freed_memory says how much there is
            refill=spec.refill,
            prefetch_window=spec.prefetch_window,
            key=f"{spec.seed} {epoch} {self.job.ordinal}",
        )
        core.at_hand = self._chunks.is_at_hand
        self._epochs = [*self._epochs[-2:], _Epoch(epoch, core, OwnerCounts(core.counts))]
        self.history[epoch] = self._epochs[-1].counts
        self._leave_behind()
        self._use_freed_memory()
        self._wake()

    def _leave_behind(self) -> None:
        """An epoch that all ranks have left, with samples that nobody asked for, gives its memory to the next."""
        for before, after in pairwise(self._epochs):
            if not before.is_over and self._all_reached(after.number):
                before.abandoned = True
                before.payloads.clear()
                self._use_freed_memory()

    def _preload(self) -> None:
        """Near the end of an epoch, the memory that it leaves loads for the next: no gap between them (DESIGN 4.2)."""
        if self._closed or not self._epochs:
            return
        self._use_freed_memory()
        *before, newest = self._epochs
        following = newest.number + 1
        if (
            newest.core.nothing_left_to_read
            and all(known.is_over for known in before)
            and self._all_reached(newest.number)
            and self.job.has_epoch(following)
            and (traces := self.job.known_traces(following)) is not None
        ):
            self._open(following, traces)

    def _use_freed_memory(self) -> None:
        """The newest epoch gets what those before it do not hold any more."""
        *before, newest = self._epochs
        held_bytes = sum(known.core.held_bytes for known in before if not known.is_over)
        self._order(newest, newest.core.capacity_changed(self.job.abstract_bytes - held_bytes))

    def _order(self, state: _Epoch, refills: list[Refill]) -> None:
        to_read = []
        for refill in refills:
            if (chunk := self._chunks.pinned(refill)) is not None:
                self._arrived(state, chunk)
            else:
                to_read.append(refill)
        for group in self._chunks.together(to_read):
            here: dict[int, asyncio.Future[None]] = {}
            for refill in group.refills:
                here[refill.chunk] = asyncio.get_running_loop().create_future()
                state.arriving.update(dict.fromkeys(refill.samples.tolist(), here[refill.chunk]))
                state.coming.add(here[refill.chunk])
            task = asyncio.create_task(self._read(state, group, here))
            self._reads.add(task)
            task.add_done_callback(lambda task, group=group, here=here: self._read_ended(task, state, group, here))  # type: ignore[misc]

    async def _read(self, state: _Epoch, group: ReadGroup, here: dict[int, asyncio.Future[None]]) -> None:
        """Fetch the chunks of some refills and keep the samples that fill a slot. Tells who waits how it went."""

        def arrived(chunk: ReadChunk) -> None:
            self._arrived(state, chunk)
            here[chunk.refill.chunk].set_result(None)
            state.done(here[chunk.refill.chunk])

        error: BaseException | None = None
        try:
            await self._chunks.read(group, arrived)
        except BaseException as raised:
            error = raised
            if not isinstance(raised, Exception):
                raise
        finally:
            for refill in group.refills:
                if not here[refill.chunk].done():
                    self._failed(state, refill, here[refill.chunk], error)

    def _failed(self, state: _Epoch, refill: Refill, here: asyncio.Future[None], error: BaseException | None) -> None:
        if isinstance(error, Exception) and not self._store_fails:
            log.warning("job %s: a refill failed, and is ordered again when needed: %s", self.job.spec.name, error)
        self._store_fails = True
        state.counts.refills_failed += 1
        state.core.refill_failed(refill)
        self._forget_arriving(state, refill)
        if not isinstance(error, Exception):
            here.cancel()
        elif not here.cancelled():
            here.set_exception(error)
            here.exception()  # known: a read ahead of need has nobody who waits for it
        state.done(here)

    def _read_ended(
        self, task: asyncio.Task[None], state: _Epoch, group: ReadGroup, here: dict[int, asyncio.Future[None]]
    ) -> None:
        """Whatever became of it, even if it was cancelled before it began: nobody waits for it any more."""
        self._reads.discard(task)
        group.ended()
        for each in here.values():
            if each.cancel():
                state.done(each)

    def _arrived(self, state: _Epoch, chunk: ReadChunk) -> None:
        """A damaged sample keeps its slot without bytes: the request that it falls to reads it alone and gets the
        error."""
        refill = chunk.refill
        self._store_fails = self._store_fails and chunk.pinned
        if not state.abandoned:
            intact = [i for i, payload in enumerate(chunk.payloads) if payload is not None]
            for sample, payload in zip(refill.samples.tolist(), chunk.payloads, strict=True):
                if payload is not None:
                    state.payloads.put(sample, payload)
            arrived = Refill(refill.chunk, refill.samples[intact], refill.locations[intact])
            state.core.refill_arrived(arrived, pinned=chunk.pinned)
            if not self.job.spec.shuffle:
                # Chunks are used up one after another, unless one rank falls far behind the others.
                state.payloads.drop_oldest(self.job.abstract_bytes)
        self._forget_arriving(state, refill)

    def _forget_arriving(self, state: _Epoch, refill: Refill) -> None:
        for sample in refill.samples.tolist():
            state.arriving.pop(sample, None)

    async def _wait_for(self, state: _Epoch, samples: list[int], came_bytes: int) -> None:
        """Wait for the refills that bring these samples, and raise what went wrong with the first that failed.

        :param came_bytes: wait until so much has come, too, as long as anything is on its way.
        """
        waiting = [state.arriving[sample] for sample in samples if sample in state.arriving]
        arriving = set(waiting)
        if not arriving and (state.core.came_bytes >= came_bytes or not state.coming):
            return
        started = time.perf_counter()
        if arriving:
            await asyncio.wait(arriving)
        while state.core.came_bytes < came_bytes and state.coming:
            await state.changed.wait()
        state.counts.waited_takes += max(1, len(waiting))
        state.counts.wait_seconds += time.perf_counter() - started
        for each in arriving:
            if not each.cancelled() and (error := each.exception()) is not None:
                raise error

    async def _exact(self, counts: OwnerCounts, samples: list[int]) -> list[Payload | BaseException]:
        """Read single samples; what went wrong stands in the place of each that failed."""
        self._refuse_when_closed()
        records, dataset = self.job.records, self.job.dataset

        async def read(sample: int) -> Payload:
            # Somebody waits for it; the reads ahead of need can wait.
            async with self._gate.passage(int(records.length[sample - records.first_sample]), urgent=True):
                payload = bytes(await dataset.read_samples(records, sample, sample + 1))
            dataset.verify_sample(payload, records, sample)
            return payload

        first = self.job.share.first_sample
        found = await asyncio.gather(*(read(sample + first) for sample in samples), return_exceptions=True)
        if any(isinstance(each, asyncio.CancelledError) for each in found):
            self._refuse_when_closed()  # the store was closed under its reads
        payloads = [each for each in found if not isinstance(each, BaseException)]
        counts.exact_reads += len(payloads)
        counts.exact_bytes += sum(map(len, payloads))
        return found


def _raise_first(results: Sequence[object]) -> None:
    for result in results:
        if isinstance(result, BaseException):
            raise result
