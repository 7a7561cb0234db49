"""How does a home pod assemble a batch? From its own share, from its remote memory, and from other owners.

The path of a batch: ``batch`` -> which sample each position asks for, and who owns it -> what was sent ahead ->
one ``take`` on the pod's own share and one request to every other owner that is still needed, all at once ->
samples in the order of the positions. What owners send ahead arrives after their answer and does not delay it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from refill.errors import InvalidInput, PodUnreachable, RankTaken, RefillError, SamplesSkipped
from refill.protocol.rank_life import RankLife
from refill.protocol.wire_format import MAX_SAMPLES, BatchRequest, Int64Array
from refill_service.cache_core.epoch_order import IdArray
from refill_service.cache_core.remote_memory import RemoteMemory
from refill_service.cache_core.skipped_positions import JudgedEpochs, skipped_for_good
from refill_service.cache_core.started_positions import StartedPositions
from refill_service.jobs.answer_size import AnswerSize
from refill_service.jobs.home_record import HomeRecord
from refill_service.jobs.job import Job
from refill_service.jobs.leased_ranks import LeasedRanks
from refill_service.jobs.owner import Owner
from refill_service.memory.payload import Payload
from refill_service.observing.tracing import span
from refill_service.peers.job_peers import JobPeers
from refill_service.peers.peers import BodyPieces

__all__ = ["Batch", "Home", "HomeCounts"]

log = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True)
class Batch:
    """Samples in the order of the positions that were asked for."""

    positions: Int64Array
    sample_ids: Int64Array
    payloads: list[Payload]


@dataclass
class HomeCounts:
    """Where one epoch's requests of a home pod's ranks were answered."""

    local: int = 0
    """From the pod's own share."""
    remote_memory: int = 0
    """By samples sent ahead."""
    remote_on_demand: int = 0
    """By an owner that was asked: the papers' remote requests."""
    repeats: int = 0
    """Positions that repeat a sample of the epoch (padding, replacement)."""
    ahead_received: int = 0
    ahead_refused: int = 0
    """Sent ahead and dropped: the rank had been answered otherwise."""
    batches: int = 0
    delivered_bytes: int = 0


class _Assembly:
    """A batch in the making. ``asked``, ``repeats`` and ``owners`` have an entry for each position, as results have."""

    def __init__(
        self, epoch: int, rank: int, positions: Int64Array, asked: Int64Array, repeats: NDArray[np.bool_]
    ) -> None:
        self.epoch = epoch
        self.rank = rank
        self.positions = positions
        self.asked = asked
        self.repeats = repeats
        self.owners = np.zeros(len(positions), dtype=np.int64)
        self.sample_ids = np.empty(len(positions), dtype=np.int64)
        self.filled = np.zeros(len(positions), dtype=bool)
        self._payloads: list[Payload] = [b""] * len(positions)

    def put(self, places: Int64Array, sample_ids: Int64Array, payloads: Sequence[Payload]) -> None:
        self.sample_ids[places] = sample_ids
        self.filled[places] = True
        for place, payload in zip(places.tolist(), payloads, strict=True):
            self._payloads[place] = payload

    def put_one(self, place: int, sample_id: int, payload: Payload) -> None:
        self.sample_ids[place] = sample_id
        self.filled[place] = True
        self._payloads[place] = payload

    def complete(self) -> list[Payload]:
        if not self.filled.all():
            raise RuntimeError(f"batch of rank {self.rank} was assembled with {(~self.filled).sum()} samples missing")
        return self._payloads


class Home:
    """One pod as the home of some ranks of one job."""

    def __init__(
        self,
        job: Job,
        owner: Owner,
        peers: JobPeers,
        remote_memory_bytes: int,
        wait_seconds: float,
    ) -> None:
        self.job = job
        self.remote_memory: RemoteMemory[tuple[int, Payload]] = RemoteMemory(remote_memory_bytes)
        self.history: dict[int, HomeCounts] = {}
        self.sent_bytes = [0] * job.num_pods
        self.received_bytes = [0] * job.num_pods
        self._owner = owner
        self.peers = peers
        self._wait_seconds = wait_seconds
        self._started: dict[tuple[int, int], StartedPositions] = {}
        self._under_way: Counter[tuple[int, int]] = Counter()
        """Batches of each (epoch, rank) that are being assembled."""
        self._most_under_way: Counter[tuple[int, int]] = Counter()
        """As many as the rank has workers that ask."""
        self._judged = JudgedEpochs(knows_all=not job.life.taken_up and not job.life.moves and job.resumed is None)
        self._largest: Counter[tuple[int, int]] = Counter()
        """Positions of the largest batch of each (epoch, rank)."""
        self._opened: dict[int, int] = {}
        self._receiving: set[asyncio.Task[None]] = set()
        self._arriving: dict[tuple[int, int, int], asyncio.Future[None]] = {}
        """Requests (epoch, rank, position) whose samples an owner has announced and is sending."""
        self._why_closed: RefillError = PodUnreachable(f"pod {job.ordinal} stops", pod=job.ordinal)
        self.record = HomeRecord(job)
        self.leases = LeasedRanks(job.spec.name)
        self._never_asked: Counter[tuple[int, int]] = Counter()
        """Samples sent ahead for (epoch, rank) that it left without asking for them."""

    async def close(self, why: RefillError) -> None:
        """Requests under way end with ``why``."""
        self._why_closed = why
        for task in self._receiving:
            task.cancel()
        await asyncio.gather(*self._receiving, return_exceptions=True)

    async def batch(
        self,
        request: BatchRequest,
        before_taking: Callable[[], Awaitable[object]] | None = None,
        *,
        allow_skipped: bool = False,
    ) -> Batch:
        """Raises :class:`InvalidInput` for a position past the end of the rank's trace, :class:`RequestTooLarge` for
        more samples than an answer holds.

        :param before_taking: awaited when the epoch is open and before anything is taken: an error costs nothing here.
        :param allow_skipped: whether the rank may have left positions out of epochs before; else it is an error.
        """
        job, epoch, rank = self.job, request.epoch, request.rank
        job.check_rank(rank)
        self.record.check_reported(rank)
        await self._owner.wait_for_traces()
        traces = await job.traces(epoch, self._wait_seconds)
        positions = request.positions
        if int(positions.max()) >= traces.length(rank):
            raise InvalidInput(
                f"rank {rank} asks for position {int(positions.max())}, but epoch {epoch} of job {job.spec.name} "
                f"has {traces.length(rank)} positions for it"
            )
        AnswerSize(self._owner.answer_bytes).check(job.mean_bytes(len(positions)))
        if not allow_skipped:
            self._nothing_was_skipped(rank, before_epoch=epoch)
        await self._open(epoch, rank)  # not before: what is refused must not move the rank on
        batch = _Assembly(epoch, rank, positions, *traces.asked(rank, positions))
        batch.owners = job.owner_of(batch.asked)
        if before_taking is not None:
            if (batch.owners == job.ordinal).any():
                await self._owner.wait_until_open(epoch, rank)
            await before_taking()
        self._largest[epoch, rank] = max(self._largest[epoch, rank], len(positions))
        self._under_way[epoch, rank] += 1
        self._most_under_way[epoch, rank] = max(self._most_under_way[epoch, rank], self._under_way[epoch, rank])
        try:
            with span("batch", job=job.spec.name, epoch=epoch, rank=rank, positions=len(positions)):
                await self._assemble(batch)
        finally:
            self._under_way[epoch, rank] -= 1
        counts = self._counts(epoch)
        counts.batches += 1
        payloads = batch.complete()
        counts.delivered_bytes += sum(map(len, payloads))
        return Batch(positions, batch.sample_ids, payloads)

    async def _assemble(self, batch: _Assembly) -> None:
        mine = batch.owners == self.job.ordinal
        arriving = self._take_sent_ahead(batch, np.flatnonzero(~mine & ~batch.repeats))
        on_the_way = np.zeros(len(batch.positions), dtype=bool)
        on_the_way[list(arriving)] = True
        self._start(batch, ~on_the_way)
        wanted = ~batch.filled & ~batch.repeats & ~on_the_way
        await _all_done(
            self._take_own(batch, np.flatnonzero(wanted & mine)),
            self._take_remote(batch, np.flatnonzero(wanted & ~mine)),
            self._take_arriving(batch, arriving),
            self._read_repeats(batch, np.flatnonzero(batch.repeats)),
        )
        self._start(batch, on_the_way)

    def _take_sent_ahead(self, batch: _Assembly, places: Int64Array) -> dict[int, asyncio.Future[None]]:
        """Put in what was sent ahead; returns those of the places whose samples were announced and are on their way."""
        arriving = {}
        if len(self.remote_memory) or self._arriving:
            for place in places.tolist():
                key = (batch.epoch, batch.rank, int(batch.positions[place]))
                if (entry := self.remote_memory.take(key)) is not None:
                    batch.put_one(place, *entry)
                    self._counts(batch.epoch).remote_memory += 1
                elif key in self._arriving:
                    arriving[place] = self._arriving[key]
        return arriving

    async def _take_own(self, batch: _Assembly, places: Int64Array) -> None:
        if len(places):
            batch.put(places, *await self._owner.take(batch.epoch, batch.rank, batch.asked[places]))
            self._counts(batch.epoch).local += len(places)

    async def _take_remote(self, batch: _Assembly, places: Int64Array) -> None:
        owners = batch.owners[places]
        pods = np.unique(owners).tolist()
        of_pods = [places[owners == pod] for pod in pods]
        asks = [
            self.peers.patiently(pod, partial(self._ask, pod, batch, of_pod, len(pods) - i))
            for i, (pod, of_pod) in enumerate(zip(pods, of_pods, strict=True))
        ]
        for of_pod, answer in zip(of_pods, await _all_done(*asks), strict=True):
            batch.put(of_pod, *answer)
        self._counts(batch.epoch).remote_on_demand += len(places)

    async def _take_arriving(self, batch: _Assembly, arriving: dict[int, asyncio.Future[None]]) -> None:
        if not arriving:
            return
        await asyncio.wait(set(arriving.values()))
        places = np.array(sorted(arriving), dtype=np.int64)
        self._take_sent_ahead(batch, places)
        await self._take_remote(batch, places[~batch.filled[places]])  # lost on the way

    async def _read_repeats(self, batch: _Assembly, places: Int64Array) -> None:
        if len(places):
            batch.put(places, batch.asked[places], await self.exact(batch.asked[places]))
            self._counts(batch.epoch).repeats += len(places)

    async def exact(self, sample_ids: Int64Array) -> list[Payload]:
        """Exactly these samples, from whoever owns them; one that is asked for often is read and held once.

        Raises :class:`RequestTooLarge` when they are more bytes than an answer may have.
        """
        ids, place_of = np.unique(sample_ids, return_inverse=True)
        owners = self.job.owner_of(ids)
        found: list[Payload] = [b""] * len(ids)
        size = AnswerSize(self._owner.answer_bytes)

        async def ask(pod: int, places: Int64Array) -> None:
            for start in range(0, len(places), MAX_SAMPLES):
                part = places[start : start + MAX_SAMPLES]
                if pod == self.job.ordinal:
                    data: Sequence[Payload] = await self._owner.exact(ids[part], size)
                else:
                    data = await self.peers.patiently(pod, partial(self._exact_of, pod, ids[part], size))
                for place, payload in zip(part.tolist(), data, strict=True):
                    found[place] = payload

        await _all_done(*(ask(pod, np.flatnonzero(owners == pod)) for pod in np.unique(owners).tolist()))
        if len(ids) == len(sample_ids):
            return [found[place] for place in place_of.tolist()]
        lengths = np.fromiter(map(len, found), dtype=np.int64, count=len(found))
        size.check(int(lengths[place_of].sum()))
        return [found[place] for place in place_of.tolist()]

    async def _exact_of(self, pod: int, sample_ids: Int64Array, size: AnswerSize) -> Sequence[Payload]:
        part = size.part()
        try:
            async with self.peers.frames(pod, "samples", sample_ids.astype("<i8").tobytes()) as frames:
                found = (await frames.frame(part.add)).payloads
                self.received_bytes[pod] += frames.bytes_received
                return found
        except BaseException:
            part.forget()
            raise

    async def post_trace(self, epoch: int, rank: int, sample_ids: IdArray) -> None:
        """A rank's own trace: kept here and by every owner. Errors as :meth:`Job.post_trace`."""
        self.record.check_reported(rank)
        await self._owner.wait_for_traces()
        await self.job.post_trace(epoch, rank, sample_ids)
        self._owner.trace_posted(epoch, rank, sample_ids)
        await self.peers.call_all("PUT", f"epochs/{epoch}/ranks/{rank}/trace", BodyPieces(sample_ids))

    async def epoch_counts(self, epoch: int, here: dict[str, Any]) -> dict[str, Any]:
        """``{"pods": [counts of each pod], "total": their sum}``; ``here`` are those of this pod."""
        pods = await self.peers.call_all("GET", f"epochs/{epoch}")
        pods = sorted([here, *pods], key=lambda counts: int(counts["pod"]))
        total: dict[str, Any] = {}
        for counts in pods:
            for name, value in counts.items():
                if name not in ("pod", "epoch"):
                    total[name] = total.get(name, 0) + value
        return {"job": self.job.spec.name, "epoch": epoch, "pods": pods, "total": total}

    async def _open(self, epoch: int, rank: int) -> None:
        """Tell every owner when a rank enters an epoch, so that none waits for it in an earlier one."""
        if self._opened.get(rank, -1) >= epoch:
            return
        if rank not in self._opened and self.leases.holder(rank) is not None and self.peers.others:
            # Before any pod is told: a process that one of them refuses must not move the rank on at the others. Once
            # it is open here, another process can't have become the rank elsewhere: that takes it from _opened.
            await self._told_of(rank, f"ranks/{rank}/asks")
        self._judged.comes(rank, epoch)
        self._owner.rank_opens(epoch, rank, self.job.ordinal)
        await self._told_of(rank, f"epochs/{epoch}/ranks/{rank}")
        self._opened[rank] = max(epoch, self._opened.get(rank, -1))
        for old, never_asked in self.remote_memory.forget(rank, before_epoch=epoch).items():
            self._never_asked[old, rank] += never_asked
        self.record.rank_opened(rank)
        for key in [known for known in self._started if known[1] == rank and known[0] < epoch - 1]:
            del self._started[key]
            self._under_way.pop(key, None)
            self._largest.pop(key, None)
            self._most_under_way.pop(key, None)

    def _nothing_was_skipped(self, rank: int, before_epoch: int) -> None:
        """Raises :class:`SamplesSkipped` when a rank that asks for an epoch has left out positions of one before."""
        if self._opened.get(rank, -1) >= before_epoch:
            return
        for epoch in sorted(epoch for epoch, of_rank in self._started if of_rank == rank and epoch < before_epoch):
            gap = skipped_for_good(self._started[epoch, rank], self._largest[epoch, rank])
            if gap is not None and self._judged(rank, epoch):
                raise SamplesSkipped(
                    f"rank {rank} of job {self.job.spec.name} has left epoch {epoch} and never asked for its positions "
                    f"{gap[0]} to {gap[1] - 1}, while it asked for later ones: its samples are divided a second time, "
                    "or batches are skipped. Let the trainer take the sampler as it is (docs/TRAINERS.md); "
                    "allow_skipped=True, given to the dataset, allows it",
                    epoch=epoch,
                    rank=rank,
                    start=gap[0],
                    end=gap[1],
                )

    def asked(self, epoch: int, rank: int) -> StartedPositions | None:
        """What a rank has asked of an epoch; None when this pod may not know all of it."""
        return self._started.get((epoch, rank)) if self._judged(rank, epoch) else None

    def positions_under_way(self, epoch: int, rank: int) -> int:
        """At most so many are being answered."""
        return self._under_way[epoch, rank] * self._largest[epoch, rank]

    async def _told_of(self, rank: int, what: str) -> None:
        """Tell the others who the rank is. Raises :class:`RankTaken` when one of them is home to another process that
        is this rank."""
        life = self.leases.holder(rank)
        try:
            await self.peers.call_all("POST", what, None if life is None else {"life": life.encode()})
        except RankTaken:
            if life is not None:
                self.leases.returned(rank, life)
            raise

    async def take_over(self, rank: int, ended: RankLife, by: RankLife) -> None:
        """Fact: a process that is a rank has ended, as the one that goes on in its place has seen."""
        self.leases.ended(rank, ended, by)
        try:
            await self.peers.call_all("POST", f"ranks/{rank}/ended", {"life": ended.encode(), "by": by.encode()})
        except RankTaken:
            raise
        except RefillError as error:
            log.info("rank %d goes on by way of pod %d, as not all pods know: %s", rank, self.job.ordinal, error)

    def rank_left(self, epoch: int, rank: int) -> None:
        """Fact: the rank asks for this epoch by way of another home, which gets from the owners what was sent ahead
        here. If it comes back, the others have to be told again, so that the same happens to what is at theirs."""
        self._judged.left(rank, epoch)
        self._opened.pop(rank, None)
        self.remote_memory.forget(rank, before_epoch=epoch + 1)
        self.record.forget_ended()
        for key in [known for known in self._started if known[1] == rank]:
            del self._started[key]  # and what is still on its way is refused

    def _start(self, batch: _Assembly, which: NDArray[np.bool_]) -> None:
        self._started_by(batch).started(batch.positions[which])

    def _started_by(self, batch: _Assembly) -> StartedPositions:
        return self._started.setdefault((batch.epoch, batch.rank), StartedPositions())

    def _counts(self, epoch: int) -> HomeCounts:
        return self.history.setdefault(epoch, HomeCounts())

    async def _ask(
        self, pod: int, batch: _Assembly, places: Int64Array, owners_left: int
    ) -> tuple[Int64Array, list[Payload]]:
        """Ask an owner for positions; returns when they are here, while what it sends ahead still arrives."""
        room = self.remote_memory.grant(owners_left)
        started = self._started_by(batch)
        # While the owner answers, the rank's other workers come with the batches that follow: what they ask for
        # on demand would cross with what is sent ahead.
        others = self._most_under_way[batch.epoch, batch.rank] - 1
        ahead_from = started.end + others * len(batch.positions)
        request = BatchRequest(batch.epoch, batch.rank, batch.positions[places], room, started.below, ahead_from)
        answered: asyncio.Future[tuple[Int64Array, list[Payload]]] = asyncio.get_running_loop().create_future()
        with span("ask owner", pod=pod, positions=len(places)):
            task = asyncio.create_task(self._receive(pod, request, answered))
            self._receiving.add(task)
            task.add_done_callback(self._receiving.discard)
            # However the task ends, even before it began: who waits for its answer must not wait for ever.
            task.add_done_callback(lambda _: None if answered.done() else answered.set_exception(self._why_closed))
            return await answered

    async def _receive(
        self, pod: int, request: BatchRequest, answered: asyncio.Future[tuple[Int64Array, list[Payload]]]
    ) -> None:
        """Read an owner's answer: which positions it sends ahead, what was asked for, what is sent ahead."""
        epoch, rank = request.epoch, request.rank
        keys: list[tuple[int, int, int]] = []
        received: list[tuple[tuple[int, int, int], int, tuple[int, Payload]]] = []
        here: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        body = request.encode()
        self.sent_bytes[pod] += len(body)
        restarts = self.record.restarts_of(pod)
        try:
            async with self.peers.frames(pod, "take", body) as frames:
                try:
                    announced = await frames.frame()
                    keys = [(epoch, rank, position) for position in announced.positions.tolist()]
                    self._arriving.update(dict.fromkeys(keys, here))
                    asked = await frames.frame()
                    self.record.came(pod, restarts, request, request.positions, asked.sample_ids)
                    if not answered.done():
                        answered.set_result((asked.sample_ids, list(asked.payloads)))
                    ahead = await frames.frame()
                    self.record.came(pod, restarts, request, ahead.positions, ahead.sample_ids)
                finally:
                    self.received_bytes[pod] += frames.bytes_received
            # Copies: a sample sent ahead must not keep the buffer of all that came with it.
            received = [
                (key, len(payload), (sample, bytes(payload)))
                for key, sample, payload in zip(keys, ahead.sample_ids.tolist(), ahead.payloads, strict=True)
            ]
        except Exception as error:
            if answered.done():
                # What was lost was assigned to later requests; they ask on demand and get the same samples.
                log.warning("samples sent ahead were lost: %s: %s", type(error).__name__, error)
            else:
                answered.set_exception(error)
        finally:
            try:
                self._settle(epoch, rank, request.room_bytes, received)
            finally:
                for key in keys:
                    self._arriving.pop(key, None)
                here.set_result(None)

    def _settle(
        self, epoch: int, rank: int, room: int, received: list[tuple[tuple[int, int, int], int, tuple[int, Payload]]]
    ) -> None:
        counts = self._counts(epoch)
        started = self._started.get((epoch, rank))
        # A position that was asked for on demand meanwhile has been answered: nobody would come for it again.
        wanted = [entry for entry in received if started is not None and entry[0][2] not in started]
        kept = self.remote_memory.settle(room, wanted)
        counts.ahead_received += kept
        counts.ahead_refused += len(received) - kept

    def unused_ahead(self, epoch: int) -> dict[int, int]:
        """How many samples of an epoch were sent ahead to each rank that it has not come to, or never came to."""
        unused = self.remote_memory.held(epoch)
        for (of_epoch, rank), count in self._never_asked.items():
            if of_epoch == epoch:
                unused[rank] += count
        return dict(unused)

    def books_closed(self, epoch: int) -> None:
        """Fact: nobody will ask for the receipt's part of an epoch again."""
        for key in [key for key in self._never_asked if key[0] == epoch]:
            del self._never_asked[key]


async def _all_done(*work: Coroutine[Any, Any, Result]) -> list[Result]:
    """Run all to their end, then raise the first error: what one owner answered is not lost to another's failure."""
    results = await asyncio.gather(*work, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]
