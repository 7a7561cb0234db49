"""What is a planned job at one pod? Any pod answers any position of any epoch; nothing has to be remembered for that.

The path of a batch: ``batch`` finds the share and the place of each position, and asks the pod of each share for its
part, itself among them; ``take`` has the servers of shares answer. Where a pod is away, another one stands in for its
shares: it reads them, and answers the same.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from refill.errors import EpochNotReady, InvalidInput, RefillError, UnknownJob
from refill.protocol.dealing import Dealing
from refill.protocol.job_spec import JobSpec
from refill.protocol.plan_settings import PlanSettings
from refill.protocol.wire_format import BatchRequest, Int64Array
from refill_service.cache_core.dataset_index import SampleRecords
from refill_service.cache_core.job_memory import JobMemory, memory_for_chunks
from refill_service.cache_core.memory_shares import Claim
from refill_service.cache_core.planned.dealings import RankDealings
from refill_service.cache_core.planned.job_orders import JobOrders
from refill_service.cache_core.planned.received import ReceivedEpochs
from refill_service.cache_core.planned.share_owners import share_owners, stand_in
from refill_service.cache_core.sample_mapping import ChunkLayout
from refill_service.datasets.dataset_reader import Dataset
from refill_service.jobs.all_done import all_done
from refill_service.jobs.answer_size import AnswerSize
from refill_service.jobs.chunk_reader import ChunkReader
from refill_service.jobs.job_at_pod import SLEEPS_AFTER_SECONDS, Clients, JobFigures
from refill_service.jobs.leased_ranks import LeasedRanks
from refill_service.jobs.recently_sent import RecentlySent
from refill_service.jobs.single_reads import SingleReads
from refill_service.memory.byte_gate import ByteGate
from refill_service.memory.payload import Payload
from refill_service.memory.pinned_tier import PinnedShare
from refill_service.observing.tracing import span
from refill_service.peers.peers import Peers
from refill_service.planned.job_counts import JobCounts
from refill_service.planned.pods_away import PodsAway, is_away
from refill_service.planned.share_server import ShareServer
from refill_service.settings import Settings

__all__ = ["PlannedJob"]

log = logging.getLogger(__name__)

_STANDS_IN_SECONDS = 10.0
"""A share of another pod that nobody has asked for here for so long is let go of."""


class PlannedJob:
    """One planned job at one pod.

    :param orders: of its plan; ``spec`` has all of its settings.
    :param memory_bytes: what the job may use here.
    :param for_plan: of that, what the orders take.
    :param confirmed: whether a rank is known to have received something by this plan.
    :param other_plan: is told of a pod that has the job by another one.
    """

    def __init__(
        self,
        spec: JobSpec,
        orders: JobOrders,
        dataset: Dataset,
        records: SampleRecords,
        layout: ChunkLayout,
        *,
        settings: Settings,
        memory_bytes: int,
        for_plan: int,
        parts: JobMemory,
        claim: Claim | None,
        gate: ByteGate,
        pinned: PinnedShare,
        peers: Peers,
        away: PodsAway,
        confirmed: bool,
        other_plan: Callable[[dict[str, Any]], Awaitable[None]],
    ) -> None:
        self.spec, self.orders, self.dataset, self.records, self.layout = spec, orders, dataset, records, layout
        self.ordinal, self.num_pods = settings.ordinal, settings.num_pods
        self.memory_bytes = memory_bytes
        self.parts, self.claim, self.pinned = parts, claim, pinned
        self.confirmed = confirmed
        self.began_midway = confirmed
        """Whether others had this job before, so that this pod has not seen all that ranks asked for."""
        self.share = layout.share(0, 1)
        """Of the dataset, all of it: the reads of this job are by ids of the dataset."""
        self.leases = LeasedRanks(spec.name)
        self.received = ReceivedEpochs()
        self._dealings = RankDealings()
        self.clients = Clients()
        self.counts = JobCounts()
        self.sent_bytes: dict[int, int] = {}
        self.received_bytes: dict[int, int] = {}
        self.since = time.time()
        """When the run was registered, at the first pod."""
        self.last_used = time.monotonic()
        self.requests_under_way = 0
        self._num_bytes = int(records.length.sum())
        self._for_plan = for_plan
        self._settings = settings
        self._peers, self._away = peers, away
        self._other_plan = other_plan
        self._owners = share_owners(orders.settings.num_shares, settings.num_pods)
        self._recent = RecentlySent(parts.recent_bytes)
        self._chunks = ChunkReader(dataset, records, self.share, gate, pinned, spec.name)
        self._single = SingleReads(self, gate, settings.wait_seconds)
        self._servers: dict[int, ShareServer] = {}
        self._planning = asyncio.Lock()
        self._warming: dict[int, asyncio.Task[None]] = {}
        """By share."""
        own_bytes = sum(orders.planned_bytes(share) for share in np.flatnonzero(self._owners == self.ordinal).tolist())
        self._own_planned_bytes = max(1, own_bytes)

    # What others want to know of it.

    @property
    def plan_id(self) -> str:
        return self.orders.settings.plan_id

    @property
    def idle_seconds(self) -> float:
        """Since the last request for the job here; requests that only look at it don't count."""
        return 0.0 if self.requests_under_way else time.monotonic() - self.last_used

    @property
    def sleeps(self) -> bool:
        """Whether nobody has asked for anything for so long that others may have its memory."""
        return self.idle_seconds > SLEEPS_AFTER_SECONDS

    @property
    def resident_bytes(self) -> int:
        return sum(server.resident_bytes for server in self._servers.values())

    @property
    def recent_bytes(self) -> int:
        return self._recent.used_bytes

    @property
    def taken_bytes(self) -> int:
        """What others can't have: what it was given, or holds still of what it had; while it sleeps, what it holds."""
        if self.claim is None:
            return self.memory_bytes
        held_bytes = sum(server.memory.held_bytes for server in self._servers.values())
        if self.sleeps:
            held_bytes = memory_for_chunks(self.resident_bytes + self.recent_bytes, self.parts)
            return min(held_bytes + self._for_plan, self.memory_bytes)
        return max(memory_for_chunks(held_bytes, self.parts) + self._for_plan, self.memory_bytes)

    def mean_bytes(self, num_samples: int) -> int:
        """What so many samples take, about."""
        return num_samples * self._num_bytes // max(1, len(self.records))

    def info(self) -> dict[str, Any]:
        """What a client gets on registration."""
        settings = self.orders.settings
        return {
            "spec": self.spec.to_dict(),
            "plan": settings.to_dict(),
            "plan_id": settings.plan_id,
            "incarnation": settings.plan_id,
            "num_pods": self.num_pods,
            "num_samples": self.layout.num_samples,
            "num_blobs": len(self.layout.first_sample) - 1,
            "total_bytes": self.dataset.index.sample_bytes,
            "fingerprint": settings.dataset,
            "metadata": self.dataset.index.metadata,
            "ordinal": self.ordinal,
            "memory_bytes": self.memory_bytes,
            "policy": self.spec.policy,
            "chunk_size": self.layout.chunk_size,
            "chunks_in_memory": self._capacity_bytes
            * self.layout.num_chunks
            // max(1, self.dataset.index.sample_bytes),
        }

    def use(self) -> dict[str, Any]:
        """Who uses the job, as far as this pod sees (as :meth:`JobAtPod.use`)."""
        return {
            "epoch": self.newest_epoch,
            "ranks_alive": self.leases.num_alive(),
            "idle_seconds": round(self.idle_seconds, 1),
        }

    @property
    def newest_epoch(self) -> int | None:
        """That ranks have asked for here, or other pods; None: none."""
        newest = max(self.received.newest, max(self.counts.owners, default=-1))
        return newest if newest >= 0 else None

    def figures(self) -> JobFigures:
        """For metrics."""
        return JobFigures(
            self.spec.policy,
            self.newest_epoch,
            self.counts.owners,
            self.counts.homes.values(),
            self.clients,
            self.mean_bytes(int(self.orders.shares.sizes[self._owners == self.ordinal].sum())),
            self.memory_bytes,
            self.resident_bytes,
            0,
            self.recent_bytes,
            self.sent_bytes,
            self.received_bytes,
            self._progress(),
            damaged=self.received.num_damaged,
        )

    def _progress(self) -> tuple[int, int] | None:
        """Requests of the newest epoch for the shares of this pod, ``(answered, all)``."""
        newest = self.newest_epoch
        if newest is None:
            return None
        every = int(self.orders.shares.sizes[self._owners == self.ordinal].sum())
        answered = self.counts.owners[newest].core.takes if newest in self.counts.owners else 0
        return min(every, answered), every

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """For the time of a request, which may wait for longer than a job may be idle."""
        self.requests_under_way += 1
        try:
            yield
        finally:
            self.requests_under_way -= 1
            self.last_used = time.monotonic()

    # Memory.

    @property
    def _capacity_bytes(self) -> int:
        return replace(self.parts, memory_bytes=max(0, self.memory_bytes - self._for_plan)).abstract_bytes

    def memory_is(self, memory_bytes: int) -> None:
        """Fact: the job has so much memory now."""
        self.memory_bytes = memory_bytes
        self._recent.limit(replace(self.parts, memory_bytes=memory_bytes).recent_bytes)
        self._share_memory()

    def ranks_are(self, spec: JobSpec) -> None:
        """Fact: the job goes on with other ranks than before."""
        names = ("world_size", "drop_last", "num_epochs", "batch_group")
        self.spec = replace(self.spec, **{name: getattr(spec, name) for name in names})
        for server in self._servers.values():
            server.memory.num_askers = spec.batch_group

    def let_go(self) -> None:
        """Forget the bytes of what nobody has asked for: should somebody do so all the same, it is read again."""
        log.info("job %s sleeps, and lets go of its memory", self.spec.name)
        for server in self._servers.values():
            server.forget()
        self._recent.clear()
        self.memory_is(self.taken_bytes)

    def _share_memory(self) -> None:
        """Among the shares that are served here, by what each is planned for. Of those of this pod, all have their part
        from the beginning; others are here while their pods are away."""
        others = [number for number in self._servers if self._owners[number] != self.ordinal]
        planned_bytes = self._own_planned_bytes + sum(map(self.orders.planned_bytes, others))
        for number, server in self._servers.items():
            server.memory_is(self._capacity_bytes * self.orders.planned_bytes(number) // planned_bytes)

    async def close(self) -> None:
        for task in self._warming.values():
            task.cancel()
        await asyncio.gather(*(server.close() for server in self._servers.values()))
        self._recent.clear()
        await self.dataset.close()

    # Batches.

    def check_positions(self, epoch: int, positions: Int64Array) -> None:
        """Raises :class:`InvalidInput` for positions that no epoch has, and for too many at once."""
        if len(positions) and int(positions.max()) >= self.layout.num_samples:
            raise InvalidInput(
                f"epoch {epoch} of job {self.spec.name} has positions 0 to {self.layout.num_samples - 1}, got "
                f"{int(positions.max())}"
            )
        AnswerSize(self._settings.answer_limit_bytes).check(self.mean_bytes(len(positions)))

    def check_samples(self, ids: Int64Array) -> None:
        """Raises :class:`InvalidInput` for samples that the dataset does not have."""
        last = self.layout.num_samples - 1
        if wrong := ids[(ids < 0) | (ids > last)].tolist():
            raise InvalidInput(f"there is no sample {wrong[0]}; the dataset has samples 0 to {last}")

    def check_dealing(self, epoch: int, rank: int, dealing: Dealing) -> None:
        """Fact: a rank asks for samples of an epoch that is dealt so. Raises :class:`EpochNotReady` while another one
        that lives goes through it by a later dealing."""
        refused_by = self._dealings.asks(rank, epoch, dealing, time.monotonic())
        if refused_by is not None:
            other, theirs = refused_by
            raise EpochNotReady(
                f"rank {rank} of {dealing.num_ranks} goes on from position {dealing.start} of epoch {epoch} of job "
                f"{self.spec.name}, and rank {other} of {theirs.num_ranks} from position {theirs.start}: all ranks "
                "must load states of the same step",
                rank=rank,
            )

    async def batch(
        self, epoch: int, rank: int, dealing: Dealing, positions: Int64Array, *, says_damage: bool
    ) -> tuple[Int64Array, list[Payload]]:
        """``(sample ids, their bytes)`` of ``(n,)`` positions of an epoch, all different, whoever has them.

        :param rank: who asks, and how the epoch is dealt to it and the others.
        """
        shares, _ = self.orders.places(epoch, positions)
        ids = np.empty(len(positions), dtype=np.int64)
        payloads: list[Payload] = [b""] * len(positions)
        home = self.counts.home(epoch)

        async def ask(pod: int, places: Int64Array) -> bool:
            """Whether it has answered."""
            if pod == self.ordinal:
                found_ids, found = await self.take(epoch, positions[places], says_damage=says_damage)
                home.local += len(places)
            else:
                try:
                    request = BatchRequest(epoch, rank, positions[places])
                    asked = self._ask(pod, request, dealing, says_damage=says_damage)
                    found_ids, found = await self._away.answer_of(pod, asked)
                except RefillError as error:
                    if not is_away(error):
                        raise
                    self._away.is_gone(pod, error)
                    return False
                home.remote_on_demand += len(places)
            ids[places] = found_ids
            for place, payload in zip(places.tolist(), found, strict=True):
                payloads[place] = payload
            return True

        left = np.arange(len(positions))
        with span("batch", job=self.spec.name, epoch=epoch, positions=len(positions)):
            while len(left):
                of_pods = self._pods_of(shares[left])
                parts = [(pod, left[of_pods == pod]) for pod in np.unique(of_pods).tolist()]
                answered = await all_done(*(ask(pod, places) for pod, places in parts))
                unanswered = [places for (_, places), is_done in zip(parts, answered, strict=True) if not is_done]
                left = np.concatenate(unanswered) if unanswered else left[:0]
        home.delivered_bytes += sum(map(len, payloads))
        return ids, payloads

    async def take(self, epoch: int, positions: Int64Array, *, says_damage: bool) -> tuple[Int64Array, list[Payload]]:
        """The same, of this pod alone, whichever shares they are of."""
        shares, share_places = self.orders.places(epoch, positions)
        ids = np.empty(len(positions), dtype=np.int64)
        payloads: list[Payload] = [b""] * len(positions)

        async def ask(share: int, places: Int64Array) -> None:
            ids[places], found = await self._server(share).take(epoch, share_places[places], says_damage=says_damage)
            for place, payload in zip(places.tolist(), found, strict=True):
                payloads[place] = payload

        self._let_go_of_others()
        await all_done(*(ask(share, np.flatnonzero(shares == share)) for share in np.unique(shares).tolist()))
        return ids, payloads

    def warm(self, epoch: int, position: int) -> dict[str, int]:
        """Have the shares of this pod read what an epoch begins with, or goes on with from a position on. Returns what
        is in memory by now, and what will be."""
        for number in np.flatnonzero(self._owners == self.ordinal).tolist():
            if number not in self._warming and self.orders.shares.sizes[number]:
                place = self.orders.first_place(epoch, number, position)
                self._warming[number] = asyncio.create_task(self._server(number).warm(epoch, place))
        planning = sum(not task.done() for task in self._warming.values())
        if not planning:
            for task in self._warming.values():
                task.result()
        held = sum(server.memory.held_bytes for server in self._servers.values())
        return {"is_planning": planning, "in_memory_bytes": self.resident_bytes, "wanted_bytes": held}

    async def samples(self, ids: Int64Array, *, says_damage: bool = False) -> list[Payload]:
        """Exactly these samples, outside of any epoch, each by a read of its own."""
        AnswerSize(self._settings.answer_limit_bytes).add(int(self.records.length[ids].sum()))
        results = await self._single.read(ids.tolist(), says_damage=says_damage)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if not isinstance(result, BaseException)]

    async def _ask(
        self, pod: int, request: BatchRequest, dealing: Dealing, *, says_damage: bool
    ) -> tuple[Int64Array, list[Payload]]:
        """Another pod for its part of a batch; one that does not know the job is told of it first."""
        path = f"/peer/v1/jobs/{self.spec.name}/planned"
        damaged = "&damaged=say" if says_damage else ""
        body = request.encode()
        for may_introduce in (True, False):
            try:
                asker = (
                    f"?plan={self.plan_id}&pod={self.ordinal}&ranks={dealing.num_ranks}&start={dealing.start}{damaged}"
                )
                self.sent_bytes[pod] = self.sent_bytes.get(pod, 0) + len(body)
                async with self._peers.frames(pod, f"{path}/take{asker}", body) as frames:
                    frame = await frames.frame()
                    self.received_bytes[pod] = self.received_bytes.get(pod, 0) + frames.bytes_received
                if not np.array_equal(frame.positions, request.positions):
                    raise RefillError(f"{self._peers.name(pod)} answers other positions than it was asked for")
                return frame.sample_ids, list(frame.payloads)
            except UnknownJob:
                if not may_introduce:
                    raise
                there = await self._peers.call(pod, "PUT", path, self.introduction() | {"again": True})
                if PlanSettings.from_dict(there["plan"]).plan_id != self.plan_id:
                    await self._other_plan(there)
        raise AssertionError("the second turn returns or raises")

    def introduction(self) -> dict[str, Any]:
        """What makes the job known to another pod."""
        plan = self.orders.settings.to_dict()
        return {"spec": self.spec.to_dict(), "plan": plan, "confirmed": self.confirmed, "since": self.since}

    def _pods_of(self, shares: Int64Array) -> Int64Array:
        owners = self._owners[shares]
        if self._away.away:
            for place in np.flatnonzero(np.isin(owners, list(self._away.away))).tolist():
                owners[place] = stand_in(int(shares[place]), len(self._owners), self.num_pods, self._away.away)
        return owners

    def _server(self, number: int) -> ShareServer:
        if number not in self._servers:
            self._servers[number] = ShareServer(
                self.orders,
                number,
                self._chunks,
                self._single,
                self._recent,
                self.counts.owner,
                name=self.spec.name,
                wait_seconds=self._settings.wait_seconds,
                num_epochs=self.spec.num_epochs,
                num_askers=self.spec.batch_group,
                planning=self._planning,
            )
            self._share_memory()
        return self._servers[number]

    def _let_go_of_others(self) -> None:
        """Shares of other pods, which answer again."""
        now = time.monotonic()
        over = [
            number
            for number, server in self._servers.items()
            if self._owners[number] != self.ordinal and now - server.last_asked > _STANDS_IN_SECONDS
        ]
        for number in over:
            self._servers.pop(number).forget()
        if over:
            self._share_memory()
