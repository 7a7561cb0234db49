"""How does a pod serve its share of a job? Carries out what its policy decides, epoch after epoch.

The path of a request: ``take`` -> the core assigns samples and orders refills -> the journal has it -> the running
epoch fetches chunks and keeps what fills a slot -> the bytes leave with the answer and are forgotten. ``ahead`` follows
the answer. When an epoch has nothing left to read, ``_preload`` begins the next one with the memory that it leaves.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import pairwise

import numpy as np

from refill.errors import (
    EpochEnded,
    EpochNotReady,
    InvalidInput,
    JobLost,
    PodRecovering,
    RefillError,
    SampleDamaged,
    StoreUnavailable,
)
from refill.protocol.records import Kind, Record
from refill.protocol.wire_format import Int64Array
from refill_service.cache_core.epoch_order import IdArray, Traces
from refill_service.cache_core.policies.interface import EpochBegan, EpochCounts
from refill_service.cache_core.policies.registry import new_policy
from refill_service.cache_core.receipt import EpochReceipt, receipt_of
from refill_service.cache_core.recollection import Recollection
from refill_service.jobs.answer_size import AnswerSize
from refill_service.jobs.chunk_reader import ChunkReader
from refill_service.jobs.job import Job
from refill_service.jobs.recently_sent import RecentlySent
from refill_service.jobs.running_epoch import OwnerCounts, RunningEpoch
from refill_service.journal.journal import JobJournal
from refill_service.memory.byte_gate import ByteGate
from refill_service.memory.payload import Payload
from refill_service.memory.pinned_tier import PinnedShare
from refill_service.observing.tracing import span
from refill_service.peers.job_peers import PATIENCE_SECONDS

__all__ = ["Owner"]

log = logging.getLogger(__name__)

_READS_AT_ONCE = 64
"""Of single samples, for one request."""


class Owner:
    """One pod's share of one job.

    :param gate: bounds the bytes of reads in flight, over all jobs of the pod.
    :param pinned: what the pod keeps of this share, for all jobs.
    :param recent_bytes: how much of what was sent is kept for those who ask again.
    :param answer_bytes: most bytes of samples in one answer.
    """

    def __init__(
        self,
        job: Job,
        gate: ByteGate,
        pinned: PinnedShare,
        recent_bytes: int,
        wait_seconds: float,
        *,
        answer_bytes: int = 1 << 62,
    ) -> None:
        self.job = job
        self.answer_bytes = answer_bytes
        self.history: dict[int, OwnerCounts] = {}
        self.journal: JobJournal | None = None
        self.epoch_ended: Callable[[int], Awaitable[None]] | None = None
        """Told when an epoch will not be asked for again, and its receipt is final."""
        self._gate = gate
        self._chunks = ChunkReader(job.dataset, job.records, job.share, gate, pinned, job.spec.name)
        self._recent = RecentlySent(recent_bytes)
        self.wait_seconds = wait_seconds
        self._epochs: list[RunningEpoch] = []
        """The newest last. While it loads, the one before it can still be in use, and what the one before that gave
        can still be asked for again."""
        self._life = job.life
        self._ranks = job.life.ranks
        self._over: list[RunningEpoch] = []
        """Those that have ended for good, while their receipts are written."""
        self._moved_on = asyncio.Event()
        """Set, and replaced by a new one, when a rank has moved on or an epoch was opened."""
        self._restored = asyncio.Event()
        if not job.life.recovering:
            self._restored.set()
        self._reads: set[asyncio.Task[None]] = set()
        self._closing_books: set[asyncio.Task[None]] = set()
        self._why_closed: RefillError | None = None
        job.posted.make_room = self._forget_ended

    @property
    def resident_bytes(self) -> int:
        return sum(epoch.payloads.num_bytes for epoch in self._epochs)

    @property
    def epoch(self) -> int:
        """The latest epoch that a rank has entered; -1 when none has."""
        return self._ranks.newest

    def progress(self) -> tuple[int, int] | None:
        """``(answered, all)`` requests of the epoch that the job is in, or was in last as far as is known here."""
        entered = [known for known in self._epochs if known.number <= self.epoch]
        if not entered:
            return None
        core = entered[-1].core
        return core.num_answered, core.num_requests

    @property
    def recent_bytes(self) -> int:
        return self._recent.used_bytes

    async def close(self, why: RefillError) -> None:
        """Stop all reads. Requests under way, and later ones, end with ``why``."""
        self._why_closed = why
        self._life.closed()
        self._restored.set()
        self._wake()
        for task in self._reads:
            task.cancel()
        await asyncio.gather(*self._reads, *self._closing_books, return_exceptions=True)
        for epoch in self._epochs:
            epoch.payloads.clear()
        self._recent.clear()

    def rank_opens(self, epoch: int, rank: int, home: int) -> None:
        """Fact: a rank asks for this epoch now, by way of a home pod."""
        self.job.check_rank(rank)
        before = self._ranks.epoch(rank)
        if self._ranks.comes_by(rank, epoch, home):
            self._write(Record(Kind.OPENED, epoch, rank, (np.array([home]),)))
        if before < epoch:
            self._rank_moved_on()

    def _rank_enters(self, epoch: int, rank: int) -> None:
        self.job.check_rank(rank)
        if self._ranks.enters(rank, epoch):
            self._rank_moved_on()

    def _rank_moved_on(self) -> None:
        """It has left all epochs before."""
        self._leave_behind()
        self._wake()

    async def wait_until_open(self, epoch: int, rank: int) -> None:
        """Until requests of the rank are answered here; errors as of :meth:`take`, which would wait as long."""
        await self._epoch(epoch, rank)

    async def take(self, epoch: int, rank: int, asked: Int64Array) -> tuple[Int64Array, list[Payload]]:
        """Answer requests for samples of this share: ``(sample ids, their bytes)`` in the order of ``asked``.

        :param asked: ``(n,)`` sample ids that the rank's trace asks for, all different, none a repeat.
        """
        state = await self._epoch(epoch, rank)
        first = self.job.share.first_sample
        if state.abandoned and not state.core.has_answered(asked - first):
            raise EpochEnded(
                f"job {self.job.spec.name} has left epoch {epoch} before its end; it can't be taken up again"
            )
        taken = state.core.requested(rank, asked - first)
        samples = taken.samples.tolist()
        # Before the orders are carried out: what they drop may be what is asked for.
        payloads = state.leave(taken.samples)
        state.carry_out(taken.orders)
        # Before anything leaves: what is not written down may be given to somebody else after a restart.
        new = slice(None) if taken.repeated is None else ~taken.repeated
        self._write(Record(Kind.ANSWERED, epoch, 0, (asked[new], taken.samples[new] + first)))
        missing = [i for i, payload in enumerate(payloads) if payload is None]
        self._preload()
        if state.core.finished:
            self._wake()
        try:
            with span("wait for chunks", missing=len(missing)):
                await state.wait_for([samples[i] for i in missing], taken.wait_until_bytes)
            for i, payload in zip(missing, state.leave(taken.samples[missing]), strict=True):
                payloads[i] = payload
            await self._replay(state, samples, payloads)
        except BaseException:
            # Who asks again finds what is here already, within the limit of what is kept of answers that left.
            here = {sample: found for sample, found in zip(samples, payloads, strict=True) if found is not None}
            self._recent.put(epoch, list(here), list(here.values()))
            raise
        found = [payload for payload in payloads if payload is not None]
        self._recent.put(epoch, samples, found)
        return taken.samples + first, found

    async def _replay(self, state: RunningEpoch, samples: list[int], payloads: list[Payload | None]) -> None:
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
        ahead = state.core.send_ahead(rank, answered - first, ahead_from, room, started_below)
        found = state.leave(ahead.samples)
        state.carry_out(ahead.orders)
        if len(ahead.samples):
            asked, _ = state.traces.asked(rank, ahead.positions)
            self._write(Record(Kind.ANSWERED, epoch, 0, (asked, ahead.samples + first)))
        here = [i for i, payload in enumerate(found) if payload is not None]
        samples = ahead.samples[here].tolist()
        payloads = [payload for payload in found if payload is not None]
        self._preload()
        if state.core.finished:
            self._wake()
        self._recent.put(epoch, samples, payloads)
        return ahead.positions[here], ahead.samples[here] + first, payloads

    async def exact(self, sample_ids: Int64Array, size: AnswerSize | None = None) -> list[Payload]:
        """The bytes of exactly these samples of the share, outside of any epoch's protocol. All different, or one of
        them is read several times.

        :param size: of the answer that they are part of; None: of one of their own. Raises what it raises.
        """
        samples = sample_ids - self.job.share.first_sample
        (size or AnswerSize(self.answer_bytes)).add(int(self.job.records.length[samples].sum()))
        counts = self._epochs[-1].counts if self._epochs else OwnerCounts(EpochCounts())
        results = await self._exact(counts, samples.tolist())
        _raise_first(results)
        return [result for result in results if not isinstance(result, BaseException)]

    async def receipt(self, epoch: int) -> EpochReceipt:
        """What this owner delivered in an epoch, or assigned to be sent ahead.

        Raises :class:`InvalidInput` for one that has not begun here.
        """
        state = next((known for known in (*self._epochs, *self._over) if known.number == epoch), None)
        if state is None:
            if self._life.recovering:
                raise self.recovering()
            raise InvalidInput(f"epoch {epoch} of job {self.job.spec.name} has not begun, or is long over")
        return await self._receipt_of(state)

    async def _receipt_of(self, state: RunningEpoch) -> EpochReceipt:
        share = self.job.share
        return await asyncio.to_thread(
            receipt_of, *state.answered(), share.first_sample, share.end_sample, state.traces, rebuilt=state.rebuilt
        )

    def answered(self, epoch: int) -> tuple[Int64Array, Int64Array] | None:
        """``(asked, samples)`` of all requests of an epoch that were answered; None when it is not known any more."""
        if (state := self._known(epoch)) is not None:
            return state.answered()
        none = np.empty(0, dtype=np.int64)
        return (none, none) if not self._epochs or epoch > self._epochs[-1].number else None

    def snapshot(self, epoch: int) -> Iterator[Record]:
        """All that is to be known of an epoch to go on with it, without its bytes."""
        for rank, at in self._ranks:
            if at == epoch:
                yield Record(Kind.OPENED, epoch, rank, (np.array(self._ranks.homes(rank), dtype=np.int64),))
        yield from self.job.trace_records(epoch)
        if (state := self._known(epoch)) is not None:
            yield Record(Kind.ANSWERED, epoch, 0, state.answered())

    @property
    def live_epochs(self) -> list[int]:
        """Those that can still be asked for."""
        return sorted({at for _, at in self._ranks} | {known.number for known in self._epochs})

    def opened(self) -> Iterator[Record]:
        """Where each rank is that has begun, and whether these are all."""
        for rank, homes in self._ranks.with_homes():
            at = max(0, self._ranks.epoch(rank))
            yield Record(Kind.OPENED, at, rank, (np.array(homes, dtype=np.int64),))
        if self._life.knows_all_ranks and not self._life.recovering:
            yield Record(Kind.ALL_RANKS, 0)

    def restore(self, told: Recollection, *, rebuilt: bool, complete: bool = True) -> None:
        """Fact: this is what was answered before a restart.

        :param rebuilt: it is what others remember, not what this pod wrote down.
        :param complete: whether nobody was gone on without.

        Raises :class:`JobLost` when it can't be of this job as it is now.
        """
        for rank, (epoch, homes) in told.ranks.items():
            self._ranks.restored(rank, epoch, homes)
        for epoch in told.epochs()[-3:]:
            if (traces := self.job.known_traces(epoch)) is None:
                continue  # nobody could have asked
            share = self.job.share
            asked, samples = told.answered(epoch, traces, share.first_sample, share.end_sample)
            try:
                self._open(epoch, traces, (asked - share.first_sample, samples - share.first_sample), rebuilt=rebuilt)
            except ValueError as error:
                raise JobLost(
                    f"job {self.job.spec.name} can't go on after the restart of pod {self.job.ordinal}: {error}",
                    job=self.job.spec.name,
                ) from error
        self._life.restored(complete=complete)
        self._restored.set()
        self._wake()

    async def _epoch(self, epoch: int, rank: int) -> RunningEpoch:
        self._refuse_when_closed()
        self._rank_enters(epoch, rank)
        await self._until_restored()
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
            behind = self._ranks.behind(epoch)
            raise EpochNotReady(
                f"epoch {epoch} of job {self.job.spec.name} waits for rank {behind[0] if behind else '?'} "
                f"to finish epoch {max(0, self._ranks.oldest)}",
                ranks=behind,
            ) from error
        self._refuse_when_closed()
        if not self._epochs or self._epochs[-1].number < epoch:
            self._open(epoch, traces)
        return await self._epoch(epoch, rank)

    async def wait_for_traces(self) -> None:
        """After a move, what positions ask for is known when nothing is lost any more."""
        if self._life.moves:
            await self._until_restored()

    async def _until_restored(self) -> None:
        try:
            async with asyncio.timeout(min(self.wait_seconds, PATIENCE_SECONDS)):
                await self._restored.wait()
        except TimeoutError as error:
            raise self.recovering() from error
        self._refuse_when_closed()

    def recovering(self) -> PodRecovering:
        """For who must come again when nothing is lost any more."""
        return PodRecovering(
            f"pod {self.job.ordinal} was restarted while job {self.job.spec.name} ran, and waits to be told what "
            f"it had delivered: {self._life.waits_for or 'other pods are asked'}",
            pod=self.job.ordinal,
        )

    def _refuse_when_closed(self) -> None:
        if self._why_closed is not None:
            raise self._why_closed

    def trace_posted(self, epoch: int, rank: int, sample_ids: IdArray) -> None:
        """Fact: a rank has posted its trace."""
        self._write(Record(Kind.TRACE, epoch, rank, (sample_ids,)))

    def _write(self, record: Record) -> None:
        if self.journal is not None:
            self.journal.write(record)

    def _wake(self) -> None:
        """Whoever waits for an epoch looks again whether it may open."""
        self._moved_on.set()
        self._moved_on = asyncio.Event()

    def _known(self, epoch: int) -> RunningEpoch | None:
        return next((known for known in self._epochs if known.number == epoch), None)

    def _may_open(self, epoch: int) -> bool:
        """No rank may be two epochs ahead of another, which homes and ranks then forget. And those before need no more
        memory: they are used up, or every rank has left them."""
        if not self._epochs or self._epochs[-1].number >= epoch or self._ranks.all_entered(epoch):
            return True
        return self._ranks.all_entered(epoch - 1) and all(known.is_over for known in self._epochs)

    def _open(
        self,
        epoch: int,
        traces: Traces,
        answered: tuple[Int64Array, Int64Array] | None = None,
        *,
        rebuilt: bool = False,
    ) -> None:
        spec = self.job.spec
        began = EpochBegan(
            self.job.mapping,
            traces,
            self.job.records.length,
            prefetch_window=spec.prefetch_window,
            key=f"{spec.seed} {epoch} {self.job.ordinal}",
            settings=self.job.policy_settings,
            at_hand=self._chunks.is_at_hand,
            answered=answered,
        )
        core = new_policy(self.job.policy, began)
        for over in self._epochs[:-2]:
            self._close_books(over)
        state = RunningEpoch(self.job, epoch, core, traces, self._chunks, self._reads, rebuilt=rebuilt)
        self._epochs = [*self._epochs[-2:], state]
        self.history[epoch] = state.counts
        if self.journal is not None:
            self.journal.epoch_begins(self.live_epochs)
        self._leave_behind()
        self._use_freed_memory()
        self._wake()

    def _close_books(self, over: RunningEpoch) -> None:
        """An epoch that will not be asked for again leaves its receipt."""

        async def close() -> None:
            try:
                if self.epoch_ended is not None:
                    await self.epoch_ended(over.number)
                if self.journal is not None:
                    self.journal.forget(over.number)
            except StoreUnavailable as error:
                log.error("job %s: the receipt of epoch %d is not kept: %s", self.job.spec.name, over.number, error)
            finally:
                self._over.remove(over)

        self._over.append(over)
        task = asyncio.create_task(close())
        self._closing_books.add(task)
        task.add_done_callback(self._closing_books.discard)

    def _leave_behind(self) -> None:
        """An epoch that all ranks have left, with samples that nobody asked for, gives its memory to the next."""
        for before, after in pairwise(self._epochs):
            if not before.is_over and self._ranks.all_entered(after.number):
                before.abandon()
                self._use_freed_memory()

    def _forget_ended(self) -> None:
        """A rank can ask for its epoch and the one before: what all ranks have left behind gives room to new traces."""
        oldest = self._ranks.oldest_needed
        ended = [known for known in self._epochs[:-1] if known.number < oldest]
        self._epochs = [known for known in self._epochs if known not in ended]
        for over in ended:
            self._close_books(over)
        self.job.forget_traces(before_epoch=min([oldest, *(known.number for known in self._epochs)]))

    def _preload(self) -> None:
        """Near the end of an epoch, the memory that it leaves loads for the next: no gap between them (DESIGN 4.2)."""
        if self._why_closed is not None or not self._epochs:
            return
        self._use_freed_memory()
        *before, newest = self._epochs
        following = newest.number + 1
        if (
            newest.core.nothing_left_to_read
            and all(known.is_over for known in before)
            and self._ranks.all_entered(newest.number)
            and self.job.has_epoch(following)
            and (traces := self.job.known_traces(following)) is not None
        ):
            self._open(following, traces)

    def _use_freed_memory(self) -> None:
        """The newest epoch gets what those before it do not hold any more."""
        *before, newest = self._epochs
        held_bytes = sum(known.core.held_bytes for known in before if not known.is_over)
        newest.carry_out(newest.core.memory_changed(self.job.abstract_bytes - held_bytes))

    async def _exact(self, counts: OwnerCounts, samples: list[int]) -> list[Payload | BaseException]:
        """Read single samples; what went wrong stands in the place of each that failed."""
        self._refuse_when_closed()
        records, dataset = self.job.records, self.job.dataset

        async def read(sample: int) -> Payload:
            try:
                return await read_once(sample)
            except SampleDamaged:  # perhaps on its way only, and the store has the right bytes
                return await read_once(sample)

        async def read_once(sample: int) -> Payload:
            # Somebody waits for it; the reads ahead of need can wait.
            size_bytes = int(records.length[sample - records.first_sample])
            async with self._gate.passage(size_bytes, self.job.spec.name, urgent=True):
                payload = bytes(await dataset.read_samples(records, sample, sample + 1))
            dataset.verify_sample(payload, records, sample)
            return payload

        first = self.job.share.first_sample
        found: list[Payload | BaseException] = [b""] * len(samples)
        to_read = iter(enumerate(samples))

        async def read_some() -> None:
            for place, sample in to_read:
                try:
                    found[place] = await read(sample + first)
                except Exception as error:
                    found[place] = error
                except asyncio.CancelledError as error:
                    if (task := asyncio.current_task()) is None or task.cancelling():
                        raise
                    found[place] = error  # of the read alone

        await asyncio.gather(*(read_some() for _ in samples[:_READS_AT_ONCE]))
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
