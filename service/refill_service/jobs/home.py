"""How does a home pod assemble a batch? From its own share, from what was sent ahead, and from other owners.

The path of a batch: ``open`` finds what its positions ask for and sees to it that all owners know of the rank, and may
refuse; nothing is taken before it returns. ``assemble`` has the machine plan the batch, then takes from the pod's own
share and asks every other owner that is still needed, once each and all at the same time, and returns the samples in
the order of the positions. What owners send ahead arrives after their answers and does not delay them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from refill.errors import InvalidInput, PodUnreachable, RankTaken, RefillError
from refill.protocol.rank_life import RankLife
from refill.protocol.wire_format import MAX_SAMPLES, BatchRequest, Int64Array
from refill_service.cache_core.home_machine import Batch, DamagedSamples, Entry, HomeMachine, OwnerRequest, SentAhead
from refill_service.cache_core.rank_places import LONGEST_STEP
from refill_service.cache_core.skipped_positions import samples_skipped
from refill_service.jobs.job import AskedPositions, Job
from refill_service.jobs.leased_ranks import LeasedRanks
from refill_service.jobs.owner import Owner
from refill_service.jobs.running_epoch import RunningEpoch
from refill_service.memory.loop_turns import all_done
from refill_service.memory.payload import AnswerSize, Payload
from refill_service.observing.tracing import span
from refill_service.peers.job_peers import JobPeers

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenBatch:
    """A batch that may be assembled."""

    asked: AskedPositions
    own_epoch: RunningEpoch | None
    """Of this pod's share; None: nothing is asked of it."""
    says_damage: bool
    """Whether :class:`Damage` stands for a sample that is damaged; else it is raised."""


class Home:
    """One pod as the home of some ranks of one job. What it decides, it asks its ``machine``."""

    def __init__(self, job: Job, owner: Owner, peers: JobPeers, remote_memory_bytes: int) -> None:
        self.machine: HomeMachine[Payload] = HomeMachine(job.ordinal, job.owner_bounds, remote_memory_bytes)
        self.damaged = DamagedSamples()
        """What ranks went on without."""
        self.leases = LeasedRanks(job.spec.name)
        self.entry = RankEntry(self.machine, job, owner, self.leases, peers)
        self.exact = ExactSamples(job, owner, peers)
        self._job = job
        self._owner = owner
        self._peers = peers
        self._answers = OwnerAnswers(self.machine, peers, job.ordinal)

    async def close(self, why: RefillError) -> None:
        """Requests under way end with ``why``."""
        await self._answers.close(why)

    async def open(self, request: BatchRequest, *, allow_skipped: bool = False, says_damage: bool = False) -> OpenBatch:
        """Once it is known what the positions ask for, and the epoch is open. An error costs nothing here.

        Errors as of :meth:`RankEntry.check_comes_next` and :meth:`Job.asked`; raises :class:`RequestTooLarge` for
        more samples than an answer holds.

        :param allow_skipped: whether the rank may have left positions out of epochs before; else it is an error.
        """
        epoch, rank = request.epoch, request.rank
        self.entry.check_comes_next(epoch, rank)  # before its traces replace those of others
        asked = await self._job.asked(request, self._owner.waits)
        AnswerSize(self._owner.answer_bytes).check(self._job.mean_bytes(len(asked.positions)))
        if not allow_skipped:
            self._nothing_was_skipped(rank, before_epoch=epoch)
        await self.entry.enter(epoch, rank)  # not before: what is refused must not move the rank on
        here = self._job.share.holds(asked.samples).any()
        return OpenBatch(asked, await self._owner.open(epoch, rank) if here else None, says_damage)

    async def assemble(self, opened: OpenBatch) -> Batch[Payload]:
        """The batch, with all its samples."""
        asked = opened.asked
        epoch, rank, positions = asked.epoch, asked.rank, asked.positions
        batch = self.machine.begin(epoch, rank, positions, asked.samples, asked.repeats)
        try:
            with span("batch", job=self._job.spec.name, epoch=epoch, rank=rank, positions=len(positions)):
                await all_done(
                    self._take_own(batch, opened),
                    self._take_of_owners(batch, batch.of_owners, opened.says_damage),
                    self._take_arriving(batch, opened.says_damage),
                    self._read_repeats(batch, opened.says_damage),
                )
            self.machine.complete(batch, sum(map(len, batch.payloads)))
        finally:
            self.machine.over(batch)
        return batch

    def rank_goes_without(self, epoch: int, rank: int, positions: Int64Array, sample_ids: Int64Array) -> None:
        """Fact: a rank goes on without what came for these positions, since it is damaged.

        Raises :class:`InvalidInput` for what is not in the dataset.
        """
        last = self._job.layout.num_samples - 1
        if len(sample_ids) and not 0 <= int(sample_ids.min()) <= int(sample_ids.max()) <= last:
            raise InvalidInput(f"rank {rank} tells of damaged samples that are not in the dataset, 0 to {last}")
        if (traces := self._job.known_traces(epoch)) is not None:  # repeats are counted where they are no repeats
            inside = (positions >= 0) & (positions < traces.length(rank))
            positions, sample_ids = positions[inside], sample_ids[inside]
            sample_ids = sample_ids[~traces.asked(rank, positions)[1]]
        self.damaged.rank_goes_without(epoch, rank, sample_ids.tolist())

    async def _take_own(self, batch: Batch[Payload], opened: OpenBatch) -> None:
        epoch, says_damage = opened.own_epoch, opened.says_damage
        if epoch is not None and len(places := batch.own):
            taken = await self._owner.take(epoch, batch.rank, batch.asked[places], says_damage=says_damage)
            batch.put(places, *taken)

    async def _take_of_owners(self, batch: Batch[Payload], of_owners: dict[int, Int64Array], says_damage: bool) -> None:
        asks = [
            self._peers.patiently(pod, partial(self._answers.ask, batch, pod, places, len(of_owners) - i, says_damage))
            for i, (pod, places) in enumerate(of_owners.items())
        ]
        for places, answer in zip(of_owners.values(), await all_done(*asks), strict=True):
            batch.put(places, *answer)

    async def _take_arriving(self, batch: Batch[Payload], says_damage: bool) -> None:
        """What other answers bring ahead; what of it was lost on the way is asked for."""
        if batch.awaited:
            await self._answers.wait_for(batch.awaited)
            await self._take_of_owners(batch, self.machine.arrived(batch), says_damage)

    async def _read_repeats(self, batch: Batch[Payload], says_damage: bool) -> None:
        if len(places := batch.repeats):
            repeated = await self.exact.read(batch.asked[places], says_damage=says_damage, repeats=True)
            batch.put(places, batch.asked[places], repeated)

    def _nothing_was_skipped(self, rank: int, before_epoch: int) -> None:
        """Raises :class:`SamplesSkipped` when a rank that asks for an epoch has left out positions of one before."""
        if (skipped := self.machine.skipped(rank, before_epoch)) is not None:
            raise samples_skipped(self._job.spec.name, rank, *skipped)


class RankEntry:
    """Tells other pods, before a home pod serves a rank, who the rank is and which epoch it is in."""

    def __init__(
        self,
        machine: HomeMachine[Payload],
        job: Job,
        owner: Owner,
        leases: LeasedRanks,
        peers: JobPeers,
    ) -> None:
        self._machine = machine
        self._job = job
        self._owner = owner
        self._leases = leases
        self._peers = peers

    def check_comes_next(self, epoch: int, rank: int) -> None:
        """Raises :class:`InvalidInput` for an epoch in which the rank can't be yet."""
        ranks, name = self._job.ranks, self._job.spec.name
        if not ranks.may_ask(epoch):
            raise InvalidInput(
                f"rank {rank} asks for epoch {epoch} while job {name} is in epoch {ranks.newest}: at most "
                f"{LONGEST_STEP:,} may be left out. Was set_epoch given a number of steps? To go on there all the "
                f"same, end the job first (refill end {name}) or use another name",
                epoch=epoch,
                rank=rank,
                newest=ranks.newest,
            )

    async def enter(self, epoch: int, rank: int) -> None:
        """Every owner learns when a rank enters an epoch, so that none waits for it in an earlier one."""
        entry = self._machine.entry(epoch, rank)
        if entry is Entry.KNOWN:
            return
        if entry is Entry.COMES and self._leases.holder(rank) is not None and self._peers.others:
            # Before any pod learns of it: a process that one of them refuses must not move the rank on at the others.
            # Once it has entered here, another process can't have become the rank elsewhere: that makes it come anew.
            await self._post_to_others(rank, f"ranks/{rank}/asks")
        self._owner.rank_opens(epoch, rank)
        await self._post_to_others(rank, f"epochs/{epoch}/ranks/{rank}")
        self._machine.entered(epoch, rank)

    async def take_over(self, rank: int, ended: RankLife, by: RankLife) -> None:
        """Fact: a process that is a rank has ended, as the one that goes on in its place has seen."""
        self._leases.ended(rank, ended, by)
        try:
            await self._peers.call_all("POST", f"ranks/{rank}/ended", {"life": ended.encode(), "by": by.encode()})
        except RankTaken:
            raise
        except RefillError as error:
            log.info("rank %d goes on by way of pod %d, as not all pods know: %s", rank, self._job.ordinal, error)

    async def _post_to_others(self, rank: int, what: str) -> None:
        """Who the rank is. Raises :class:`RankTaken` when one of them is home to another process that is this rank."""
        life = self._leases.holder(rank)
        try:
            await self._peers.call_all("POST", what, None if life is None else {"life": life.encode()})
        except RankTaken:
            if life is not None:
                self._leases.returned(rank, life)
            raise


class ExactSamples:
    """Gets exactly the samples that are asked for, from whoever owns them: repeats of a batch, and random access. A
    sample that is asked for often is read and held once."""

    def __init__(self, job: Job, owner: Owner, peers: JobPeers) -> None:
        self._job = job
        self._owner = owner
        self._peers = peers

    async def read(self, sample_ids: Int64Array, *, says_damage: bool = False, repeats: bool = False) -> list[Payload]:
        """Raises :class:`RequestTooLarge` when they are more bytes than an answer may have.

        :param says_damage: whether :class:`Damage` stands for a sample that is damaged; else it is raised.
        :param repeats: whether positions of an epoch that repeat them ask for them.
        """
        ids, place_of = np.unique(sample_ids, return_inverse=True)
        owners = self._job.owner_of(ids)
        found: list[Payload] = [b""] * len(ids)
        size = AnswerSize(self._owner.answer_bytes)

        async def ask(pod: int, places: Int64Array) -> None:
            for start in range(0, len(places), MAX_SAMPLES):
                part = places[start : start + MAX_SAMPLES]
                if pod == self._job.ordinal:
                    data: Sequence[Payload] = await self._owner.exact(
                        ids[part], size, says_damage=says_damage, repeats=repeats
                    )
                else:
                    read = partial(self._read_at, pod, ids[part], size, says_damage, repeats)
                    data = await self._peers.patiently(pod, read)
                for place, payload in zip(part.tolist(), data, strict=True):
                    found[place] = payload

        await all_done(*(ask(pod, np.flatnonzero(owners == pod)) for pod in np.unique(owners).tolist()))
        if len(ids) < len(sample_ids):
            lengths = np.fromiter(map(len, found), dtype=np.int64, count=len(found))
            size.check(int(lengths[place_of].sum()))
        return [found[place] for place in place_of.tolist()]

    async def _read_at(
        self, pod: int, sample_ids: Int64Array, size: AnswerSize, says_damage: bool, repeats: bool
    ) -> Sequence[Payload]:
        part = size.part()
        try:
            ids = sample_ids.astype("<i8").tobytes()
            frames_of = self._peers.frames(pod, "samples", ids, says_damage=says_damage, repeats=repeats)
            async with frames_of as frames:
                return (await frames.frame(len(sample_ids), part.add)).payloads
        except BaseException:
            part.forget()
            raise


Answer = tuple[Int64Array, Sequence[Payload]]
"""Sample ids and bytes, in the order of the positions that were asked for."""


class OwnerAnswers:
    """Asks other owners for one home pod, and takes the three frames of their answers.

    ``ask`` returns when what was asked for is here, with the second frame. What the owner sends ahead arrives after it,
    in a task of its own; a batch that asks for some of that meanwhile waits until this answer has ended.
    """

    def __init__(self, machine: HomeMachine[Payload], peers: JobPeers, ordinal: int) -> None:
        self._machine = machine
        self._peers = peers
        self._why_closed: RefillError = PodUnreachable(f"pod {ordinal} stops", pod=ordinal)
        self._receiving: set[asyncio.Task[list[SentAhead[Payload]]]] = set()
        self.under_way: dict[OwnerRequest, asyncio.Future[None]] = {}
        """Requests, each with what is done when it has ended."""

    async def close(self, why: RefillError) -> None:
        """Requests under way end with ``why``."""
        self._why_closed = why
        for task in self._receiving:
            task.cancel()
        await asyncio.gather(*self._receiving, return_exceptions=True)

    async def ask(
        self, batch: Batch[Payload], pod: int, places: Int64Array, owners_left: int, says_damage: bool = False
    ) -> Answer:
        """Ask an owner for places of a batch, once."""
        request = self._machine.ask(batch, pod, places, owners_left)
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Answer] = loop.create_future()
        self.under_way[request] = loop.create_future()
        with span("ask owner", pod=pod, positions=len(places)):
            task = asyncio.create_task(self._receive(request, answered, says_damage))
            self._receiving.add(task)
            task.add_done_callback(lambda task: self._has_ended(request, task, answered))
            return await answered

    async def wait_for(self, requests: Iterable[OwnerRequest]) -> None:
        """Until these have ended, well or badly."""
        if under_way := [self.under_way[request] for request in requests if request in self.under_way]:
            await asyncio.wait(under_way)

    async def _receive(
        self, request: OwnerRequest, answered: asyncio.Future[Answer], says_damage: bool
    ) -> list[SentAhead[Payload]]:
        """Read an owner's answer: which positions it sends ahead, what was asked for, what is sent ahead."""
        pod, wire = request.pod, request.wire
        async with self._peers.frames(pod, "take", wire.encode(), says_damage=says_damage) as frames:
            self._machine.announced(request, (await frames.frame()).positions)
            asked = await frames.frame(len(request.wire.positions))
            if not answered.done():
                answered.set_result((asked.sample_ids, asked.payloads))
            ahead = await frames.frame()
        # Copies: a sample sent ahead must not keep the buffer of all that came with it.
        return [
            SentAhead(position, sample, len(payload), bytes(payload))
            for position, sample, payload in zip(
                ahead.positions.tolist(), ahead.sample_ids.tolist(), ahead.payloads, strict=True
            )
        ]

    def _has_ended(
        self, request: OwnerRequest, task: asyncio.Task[list[SentAhead[Payload]]], answered: asyncio.Future[Answer]
    ) -> None:
        """However it ended, even before it began: its room is free again, and nobody waits for it any more."""
        self._receiving.discard(task)
        error = self._why_closed if task.cancelled() else task.exception()
        self._machine.ended(request, task.result() if error is None else ())
        self.under_way.pop(request).set_result(None)
        if not answered.done():
            answered.set_exception(error or self._why_closed)
        elif error is not None and not task.cancelled():
            # What was lost was assigned to later requests; they ask on demand and get the same samples.
            log.warning("samples sent ahead were lost: %s: %s", type(error).__name__, error)
