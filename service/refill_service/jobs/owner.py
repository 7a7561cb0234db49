"""How does a pod serve its share of a job? Carries out what ``OwnerMachine`` decides, epoch after epoch.

The path of a request: ``take`` -> the machine assigns samples and orders reads -> the running epoch fetches chunks
and keeps what is wanted -> the bytes leave with the answer. ``ahead`` follows the answer.

The loop is for all jobs and teams. So many requests are decided in pieces, and what is read ahead in a task of its own.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np
from numpy.typing import NDArray

from refill.errors import (
    EpochEnded,
    EpochNotReady,
    InvalidInput,
    RefillError,
)
from refill.protocol.wire_format import Int64Array
from refill_service.cache_core.epoch_order import Traces
from refill_service.cache_core.owner_machine import (
    Abandon,
    CarryOut,
    CloseBooks,
    EpochState,
    Open,
    OpenEpoch,
    Order,
    OwnerMachine,
    Wake,
)
from refill_service.cache_core.policies.interface import Carried, EpochBegan, EpochCounts, Policy
from refill_service.cache_core.policies.registry import new_policy
from refill_service.cache_core.score_book import DrawnFrom, ScoreBook
from refill_service.jobs.chunk_reader import ChunkReader
from refill_service.jobs.epoch_books import EpochBooks
from refill_service.jobs.job import Job
from refill_service.jobs.running_epoch import OwnerCounts, RunningEpoch
from refill_service.jobs.single_reads import SingleReads
from refill_service.jobs.waits import Changes, RankWaits
from refill_service.memory.byte_gate import ByteGate
from refill_service.memory.loop_turns import given_up, in_turn_of_team
from refill_service.memory.payload import AnswerSize, Damage, Moving, Payload, RecentlySent
from refill_service.memory.pinned_tier import PinnedShare
from refill_service.observing.tracing import span

log = logging.getLogger(__name__)

_MOST_AT_ONCE = 1 << 10
"""Samples that are handed over in one piece."""


class Owner:
    """Answers requests for this pod's share of one live job: carries out what its ``OwnerMachine`` decides.

    :param gate: bounds the bytes of reads in flight, over all jobs of the pod.
    :param pinned: what the pod keeps of this share, for all jobs.
    :param recent_bytes: how much of what was sent is kept for those who ask again.
    :param wait_seconds: for the store.
    :param waits: for other ranks.
    :param answer_bytes: most bytes of samples in one answer.
    """

    def __init__(
        self,
        job: Job,
        gate: ByteGate,
        pinned: PinnedShare,
        recent_bytes: int,
        wait_seconds: float,
        waits: RankWaits,
        *,
        answer_bytes: int = 1 << 62,
    ) -> None:
        self.job = job
        self.answer_bytes = answer_bytes
        self.history: dict[int, OwnerCounts] = {}
        self._chunks = ChunkReader(job.dataset, job.records, job.share, gate, pinned, job.asker)
        self._single_reads = SingleReads(job, gate, wait_seconds)
        self._recent = RecentlySent(recent_bytes)
        self.wait_seconds = wait_seconds
        self.waits = waits
        self._scores = OwnerScores(job, waits)
        self._machine = OwnerMachine(
            job, job.ranks, job.share.first_sample, job.abstract_bytes, self._new_policy, book=self._scores.book
        )
        self._running: dict[OpenEpoch, RunningEpoch] = {}
        """By the machine's epochs that are open, or have ended for good while their receipts are written."""
        self.books = EpochBooks(job, self._machine, self._running)
        self._ranks = job.ranks
        self._moved_on = Changes()
        """A rank has moved on, an epoch was opened, or the owner was closed."""
        self.reads: set[asyncio.Task[None]] = set()
        """And what decides about them."""
        self._going_on: asyncio.Task[None] | None = None
        self._planning = asyncio.Lock()
        """Held from when a plan is begun until what it is for has been told of."""
        self._ordering = 0
        """How many order reads now, piece by piece."""
        self._why_closed: RefillError | None = None
        job.posted.make_room = self._forget_ended

    @property
    def epochs(self) -> list[RunningEpoch]:
        return [self._running[epoch] for epoch in self._machine.epochs]

    @property
    def resident_bytes(self) -> int:
        return sum(epoch.payloads.num_bytes for epoch in self.epochs)

    def let_go(self) -> None:
        """Forget the bytes of all samples: who asks for one of them after all waits for a read of its own."""
        for epoch in self._running.values():
            epoch.payloads.clear()
        self._recent.clear()

    @property
    def epoch(self) -> int:
        """The latest epoch that a rank has entered; -1 when none has."""
        return self._ranks.newest

    @property
    def has_given_all(self) -> bool:
        """Whether all ranks are in the newest epoch, and every request of it for this share was answered."""
        if not self._ranks.begun or not self._ranks.all_entered(self.epoch):
            return False
        if (newest := self._machine.known(self.epoch)) is not None:
            return newest.policy.finished
        share, traces = self.job.share, self.job.known_traces(self.epoch)
        members = None if traces is None else traces.members(share.first_sample, share.end_sample)
        return share.first_sample == share.end_sample or (members is not None and not members.any())

    def progress(self) -> tuple[int, int] | None:
        """``(answered, all)`` requests of the epoch that the job is in, or was in last as far as is known here."""
        return self._machine.progress()

    @property
    def recent_bytes(self) -> int:
        return self._recent.used_bytes

    async def close(self, why: RefillError) -> None:
        """Stop all reads. Requests under way, and later ones, end with ``why``."""
        self._why_closed = why
        self._machine.closed()
        self._moved_on.happened()
        self._scores.close(why)
        for running in self._running.values():
            running.give_up_reads()
        while self.reads:  # one that ends between two pieces may have begun another
            await given_up(self.reads)
        await asyncio.gather(*self.books.closing, return_exceptions=True)
        for epoch in self.epochs:
            epoch.payloads.clear()
        self._recent.clear()

    def rank_opens(self, epoch: int, rank: int) -> None:
        """Fact: a rank asks for this epoch now."""
        self._carry_out(self._machine.rank_entered(epoch, rank))

    async def take(
        self, state: RunningEpoch, rank: int, asked: Int64Array, *, says_damage: bool = False
    ) -> tuple[Int64Array, list[Payload]]:
        """Answer requests for samples of this share: ``(sample ids, their bytes)`` in the order of ``asked``.

        Raises :class:`EpochEnded` when the epoch was ended since it was opened.

        :param state: as :meth:`open` has returned it.
        :param asked: ``(n,)`` sample ids that the rank's trace asks for, all different, none a repeat.
        :param says_damage: whether :class:`Damage` stands for a sample that is damaged; else it is raised.
        """
        epoch, samples, payloads = state.number, list[int](), list[Payload | None]()
        came: dict[int, Payload] = {}
        coming, num_coming = set[asyncio.Future[None]](), 0
        pieces: list[tuple[int, ExitStack]] = []
        """Where each ends, and what has what comes taken for it."""
        try:
            # What comes may give way again to what others ask for, before this is told of it.
            with ExitStack() as taking:
                with self._orders_reads():
                    while len(samples) < len(asked):
                        if samples:
                            await asyncio.sleep(0)  # it is others' turn
                        left = asked[len(samples) :]
                        async with self._planning:
                            await self._plan(state.epoch, left)
                            taken, orders = self._requested(state, rank, left)
                            # Before the orders are carried out: what they drop may be what is asked for.
                            found = state.leave(taken)
                            samples += taken.tolist()
                            payloads += found
                            there = zip(taken.tolist(), found, strict=True)
                            wanted = [sample for sample, each in there if each is None]
                            pieces.append((len(samples), taking.enter_context(ExitStack())))
                            pieces[-1][1].enter_context(state.taking(wanted, came))
                            self._carry_out(orders)
                        comes = state.coming(wanted)
                        coming.update(comes)
                        num_coming += len(comes)
                with span("wait for chunks", missing=payloads.count(None)):
                    await state.wait_for(coming, num_coming, self.wait_seconds)
                begin = looked_at = 0
                for end, taking_of_piece in pieces:
                    if end - looked_at > _MOST_AT_ONCE:
                        looked_at = begin
                        await asyncio.sleep(0)  # it is others' turn; what comes is taken all the same
                    missing = [i for i in range(begin, end) if payloads[i] is None]
                    gone = np.array([samples[i] for i in missing], dtype=np.int64)
                    for i, payload in zip(missing, state.leave(gone), strict=True):
                        payloads[i] = came.get(samples[i]) if payload is None else payload
                    taking_of_piece.close()
                    begin = end
            await self._replay(state, samples, payloads, says_damage)
        except BaseException:
            # Who asks again finds what is here already, within the limit of what is kept of answers that left.
            self._keep_recent(epoch, samples, payloads)
            raise
        for begin in range(0, len(samples), _MOST_AT_ONCE):
            if begin:
                await asyncio.sleep(0)
            piece = slice(begin, begin + _MOST_AT_ONCE)
            self._keep_recent(epoch, samples[piece], payloads[piece])
        found_ids = np.array(samples, dtype=np.int64) + self.job.share.first_sample
        return found_ids, [payload for payload in payloads if payload is not None]

    def _requested(self, state: RunningEpoch, rank: int, asked: Int64Array) -> tuple[Int64Array, list[Order]]:
        """The samples that answer the first of these requests, as many as are decided in one piece."""
        self._refuse_when_closed()
        if self._machine.known(state.number) is not state.epoch:
            raise self._ended(state.number)
        piece = asked[: self._machine.in_one_piece(state.epoch, asked)]
        taken, orders = self._machine.requested(state.epoch, rank, piece)
        if taken is None:
            raise EpochEnded(
                f"job {self.job.spec.name} has left epoch {state.number} before its end; it can't be taken up again"
            )
        return taken.samples, orders

    async def _plan(self, epoch: OpenEpoch | None, asked: Int64Array | None) -> None:
        """Make the plans for what is told of next, in pieces. They hold as long as nothing else is told of: who calls
        this has ``_planning``. Parameters as of the machine's ``planning``."""
        self._refuse_when_closed()
        for _ in self._machine.planning(epoch, asked):
            await asyncio.sleep(0)
            self._refuse_when_closed()

    @contextmanager
    def _orders_reads(self) -> Iterator[None]:
        """Reads that are ordered meanwhile begin afterwards, those of neighbours together, or when they are many."""
        self._ordering += 1
        try:
            yield
        finally:
            self._ordering -= 1
            self._begin_reads()

    def _begin_reads(self) -> None:
        for running in self._running.values():
            if self._why_closed is None:
                running.begin_reads()
            else:
                running.give_up_reads()

    def _keep_recent(self, epoch: int, samples: list[int], payloads: list[Payload | None]) -> None:
        here = {
            sample: payload
            for sample, payload in zip(samples, payloads, strict=True)
            if payload is not None and type(payload) is not Damage
        }
        self._recent.put(epoch, list(here), list(here.values()))

    async def _replay(
        self, state: RunningEpoch, samples: list[int], payloads: list[Payload | None], says_damage: bool
    ) -> None:
        """Fill in what is missing: its bytes have left with an answer that never came through, or are damaged."""
        gone = [i for i, payload in enumerate(payloads) if payload is None]
        state.counts.replays += len(gone)
        for i in gone:
            payloads[i] = self._recent.get(state.number, samples[i])
            if payloads[i] is None:
                payloads[i] = self._elsewhere(samples[i])
        to_read = [i for i in gone if payloads[i] is None]
        results = await self._exact(state.counts, [samples[i] for i in to_read], says_damage)
        for i, result in zip(to_read, results, strict=True):
            payloads[i] = None if isinstance(result, BaseException) else result
        _raise_first(results)

    def _elsewhere(self, sample: int) -> Payload | None:
        """The same bytes, of any epoch: what one has handed on to the next, say."""
        found = (running.payloads.get(sample) for running in self._running.values())
        return next((payload for payload in found if payload is not None), None)

    async def look_ahead(self, state: RunningEpoch, rank: int, ahead_from: int) -> None:
        """Find out, in pieces, what a rank asks for next. To be called before :meth:`ahead`, which does it else."""
        for _ in self._machine.looking_ahead(state.epoch, rank, ahead_from):
            await asyncio.sleep(0)

    def ahead(
        self, epoch: int, rank: int, answered: Int64Array, ahead_from: int, room: int, started_below: int
    ) -> tuple[Int64Array, Int64Array, list[Payload]]:
        """What to send after an answer: ``(positions, sample ids, their bytes)``. Parameters as ``send_ahead``.

        :param answered: the samples that the requests just answered asked for.
        """
        first = self.job.share.first_sample
        opened, ahead, orders = self._machine.answer_left(epoch, rank, answered, ahead_from, room, started_below)
        found = [] if opened is None else self._running[opened].leave(ahead.samples)
        self._carry_out(orders)
        here = [i for i, payload in enumerate(found) if payload is not None]
        samples = ahead.samples[here].tolist()
        payloads = [payload for payload in found if payload is not None]
        self._recent.put(epoch, samples, payloads)
        return ahead.positions[here], ahead.samples[here] + first, payloads

    async def exact(
        self,
        sample_ids: Int64Array,
        size: AnswerSize | None = None,
        *,
        says_damage: bool = False,
        repeats: bool = False,
    ) -> list[Payload]:
        """The bytes of exactly these samples of the share, outside of any epoch's protocol. All different, or one of
        them is read several times. What is in memory is not read.

        :param size: of the answer that they are part of; None: of one of their own. Raises what it raises.
        :param repeats: whether positions of an epoch that repeat them ask: the policy is told, and what is read for
            them stays in memory if it wants that.
        """
        samples = sample_ids - self.job.share.first_sample
        (size or AnswerSize(self.answer_bytes)).add(int(self.job.records.length[samples].sum()))
        counts = self.epochs[-1].counts if self.epochs else OwnerCounts(EpochCounts())
        payloads = await self._repeats(samples) if repeats else list(map(self._elsewhere, samples.tolist()))
        to_read = [i for i, payload in enumerate(payloads) if payload is None]
        results = await self._exact(counts, [int(samples[i]) for i in to_read], says_damage)
        _raise_first(results)
        for i, result in zip(to_read, results, strict=True):
            payloads[i] = None if isinstance(result, BaseException) else result
        return [payload for payload in payloads if payload is not None]

    async def _repeats(self, samples: Int64Array) -> list[Payload | None]:
        """The bytes of what is in memory, or on its way by now; None for a sample that is to be read alone."""
        self._refuse_when_closed()
        found: dict[int, Payload | None] = {}
        came: dict[int, Payload] = {}
        waits: list[tuple[RunningEpoch, list[asyncio.Future[None]]]] = []
        with ExitStack() as taking:
            with self._orders_reads():
                num_told = 0
                while num_told < len(samples):
                    if num_told:
                        await asyncio.sleep(0)  # it is others' turn
                    left = samples[num_told:] + self.job.share.first_sample
                    async with self._planning:
                        await self._plan(None, left)
                        piece = samples[num_told:][: self._machine.in_one_piece(None, left)]
                        num_told += len(piece)
                        newest, orders = self._machine.repeated(piece + self.job.share.first_sample)
                        # Before the orders are carried out: what they drop may be what is asked for.
                        found |= {sample: self._elsewhere(sample) for sample in piece.tolist()}
                        missing = [sample for sample in piece.tolist() if found[sample] is None]
                        if newest is None or not missing:
                            self._carry_out(orders)
                            continue
                        running = self._running[newest]
                        taking.enter_context(running.taking(missing, came))
                        self._carry_out(orders)
                    waits.append((running, running.coming([sample for sample in missing if sample not in came])))
            with span("wait for chunks", missing=sum(payload is None for payload in found.values())):
                for running, coming in waits:
                    await running.wait_for(set(coming), len(coming), self.wait_seconds)
        return [came.get(sample, found[sample]) for sample in samples.tolist()]

    def scored(self, sample_ids: Int64Array, scores: NDArray[np.float32]) -> str:
        """Fact: training gave these samples of the share these scores. Returns the name of what keeps them, which is
        another one in another run. Raises :class:`InvalidInput` for a job whose cache takes none."""
        self._scores.checked_book()
        self._carry_out(self._machine.scored(sample_ids, scores))
        return self._scores.name

    async def drawn_from(self, epoch: int, rank: int) -> DrawnFrom:
        """What a rank draws an epoch from: the same for all of them, as soon as all have come to draw it, or have drawn
        it before. Raises :class:`EpochNotReady` while one has not, and as :meth:`scored`."""
        return await self._scores.drawn_from(epoch, rank, self._cached)

    def _cached(self) -> NDArray[np.bool_]:
        cached = np.zeros(self.job.share.num_samples, dtype=bool)
        cached[self._machine.kept()] = True
        return cached

    async def open(self, epoch: int, rank: int) -> RunningEpoch:
        """The epoch, as soon as requests of the rank are answered in it. Raises :class:`EpochNotReady` when others are
        not as far in time, and :class:`EpochEnded` for one that is over."""
        self._refuse_when_closed()
        self.rank_opens(epoch, rank)
        if (known := self._machine.known(epoch)) is not None:
            return self._running[known]
        if self._machine.state_of(epoch) is EpochState.ENDED:
            raise self._ended(epoch)
        traces = await self.job.traces(epoch, self.waits)
        try:
            await self.waits.until(
                self._moved_on,
                lambda: self._why_closed is not None or self._machine.state_of(epoch) is not EpochState.WAITS,
            )
        except TimeoutError as error:
            behind = self._ranks.behind(epoch)
            raise EpochNotReady(
                f"epoch {epoch} of job {self.job.spec.name} waits for rank {behind[0] if behind else '?'} "
                f"to finish epoch {max(0, self._ranks.oldest)}",
                ranks=behind,
            ) from error
        self._refuse_when_closed()
        self._carry_out(self._machine.traces_known(epoch, traces))
        await asyncio.sleep(0)  # it is others' turn
        return await self.open(epoch, rank)

    def _ended(self, epoch: int) -> EpochEnded:
        return EpochEnded(
            f"job {self.job.spec.name} is at epoch {self.epoch}, epoch {epoch} has ended: to start over, end the job "
            f"(refill end {self.job.spec.name}), or use another name"
        )

    def _refuse_when_closed(self) -> None:
        if self._why_closed is not None:
            raise self._why_closed

    def trace_posted(self) -> None:
        """Fact: a rank has posted its trace."""
        self._scores.rank_has_drawn()

    def _carry_out(self, orders: list[Order]) -> None:
        self._ordering += 1  # what the pinned tier has arrives at once, and more may be ordered then
        for order in orders:
            match order:
                case CarryOut(epoch, wanted):
                    if (running := self._running.get(epoch)) is not None:  # else it ended while reads were under way
                        running.read_and_drop(wanted)
                case Open():
                    self._open(order)
                case Abandon(epoch):
                    self._running[epoch].payloads.clear()
                case CloseBooks(epoch):
                    self._running[epoch].give_up_reads()
                    self.books.close(self._running[epoch])
                case Wake():
                    self._moved_on.happened()
        self._ordering -= 1
        if not self._ordering:
            self._begin_reads()
        if self._machine.may_go_on and (self._going_on is None or self._going_on.done()):
            self._going_on = asyncio.create_task(in_turn_of_team(self._go_on))
            self.reads.add(self._going_on)
            self._going_on.add_done_callback(self._went_on)

    async def _go_on(self) -> None:
        """Decide what is read ahead, a piece at a time."""
        with self._orders_reads():
            while self._machine.may_go_on:
                async with self._planning:
                    await self._plan(None, None)
                    if self._machine.may_go_on:
                        self._carry_out(self._machine.go_on())
                await asyncio.sleep(0)

    def _went_on(self, task: asyncio.Task[None]) -> None:
        self.reads.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("job %s: nothing more is read ahead", self.job.spec.name, exc_info=error)

    def _new_policy(self, epoch: int, traces: Traces, carried: Carried) -> Policy:
        spec = self.job.spec
        began = EpochBegan(
            self.job.mapping,
            traces,
            self.job.records.length,
            prefetch_window=spec.prefetch_window,
            key=f"{spec.seed} {epoch} {self.job.ordinal}",
            settings=self.job.policy_settings,
            at_hand=self._chunks.is_at_hand,
            carried=carried,
            next_traces=self.job.known_traces(epoch + 1) if self.job.has_epoch(epoch + 1) else None,
            known_bytes=self.job.share_bytes,
        )
        return new_policy(self.job.policy, began)

    def _open(self, order: Open) -> None:
        state = RunningEpoch(self.job, order.epoch, self._machine, self._carry_out, self._chunks, self.reads)
        self._running[order.epoch] = state
        self.history[state.number] = state.counts
        if order.carried_from is not None:
            moving = state.payloads.take_over(self._running[order.carried_from].payloads, order.carried.samples)
            if moving.some():
                task = asyncio.create_task(in_turn_of_team(partial(self._move, moving)))
                self.reads.add(task)
                task.add_done_callback(self.reads.discard)

    @staticmethod
    async def _move(moving: Moving) -> None:
        while True:
            await asyncio.sleep(0)
            if not moving.some():
                return

    def _forget_ended(self) -> None:
        """Epochs that nobody can ask for any more give room to new traces."""
        self._carry_out(self._machine.room_is_wanted())
        self.books.forget_traces(before_epoch=self._machine.oldest_traces)

    async def _exact(self, counts: OwnerCounts, samples: list[int], says_damage: bool) -> list[Payload | BaseException]:
        """Read single samples; what went wrong stands in the place of each that failed."""
        self._refuse_when_closed()
        found = await self._single_reads.read(samples, self.job.records, says_damage=says_damage)
        if any(isinstance(each, asyncio.CancelledError) for each in found):
            self._refuse_when_closed()  # the store was closed under its reads
        payloads = [each for each in found if not isinstance(each, (BaseException, Damage))]
        counts.exact_reads += len(payloads)
        counts.exact_bytes += sum(map(len, payloads))
        return found


def _raise_first(results: Sequence[object]) -> None:
    for result in results:
        if isinstance(result, BaseException):
            raise result


class OwnerScores:
    """Keeps the scores of an owner's share, and says when ranks may draw an epoch from them. Only of jobs whose cache
    goes by importance; scores come by way of ``jobs/scores.py``."""

    def __init__(self, job: Job, waits: RankWaits) -> None:
        self.book = ScoreBook(job.share.num_samples, job.spec.world_size) if job.is_by_importance else None
        self.name = os.urandom(8).hex()
        """Another one in another run, when the scores are gone."""
        self._job = job
        self._waits = waits
        self._draws = Changes()
        """A rank has come to draw an epoch, or the owner was closed."""
        self._why_closed: RefillError | None = None

    def close(self, why: RefillError) -> None:
        """Who waits to draw an epoch gets ``why``."""
        self._why_closed = why
        self._draws.happened()

    def rank_has_drawn(self) -> None:
        """Fact: a rank has posted what it drew."""
        self._draws.happened()

    def checked_book(self) -> ScoreBook:
        """Raises :class:`InvalidInput` for a job whose cache takes no scores."""
        if self.book is None:
            raise InvalidInput(
                f"job {self._job.spec.name} takes no scores: its policy must be exact with eviction importance, as "
                "refill.ImportanceSampler registers it"
            )
        return self.book

    async def drawn_from(self, epoch: int, rank: int, cached: Callable[[], NDArray[np.bool_]]) -> DrawnFrom:
        """As :meth:`Owner.drawn_from`.

        :param cached: ``(samples,)`` what is in memory now.
        """
        book = self.checked_book()
        book.draws(epoch, rank)
        self._draws.happened()

        def has_drawn(other: int) -> bool:
            return other in self._job.posted.of_epoch(epoch) or self._job.ranks.epoch(other) >= epoch

        try:
            await self._waits.until(
                self._draws, lambda: self._why_closed is not None or not book.waits_for(epoch, has_drawn)
            )
        except TimeoutError as error:
            behind = book.waits_for(epoch, has_drawn)
            raise EpochNotReady(
                f"epoch {epoch} of job {self._job.spec.name} is drawn when rank {behind[0] if behind else '?'} has "
                "told how important its last samples were",
                ranks=behind,
            ) from error
        if self._why_closed is not None:
            raise self._why_closed
        return book.drawn_from(epoch, cached)
