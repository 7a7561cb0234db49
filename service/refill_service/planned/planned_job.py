"""What is a planned job at one pod? Any pod answers any position of any epoch; nothing has to be remembered for that.

The path of a batch: ``batch`` finds the share and the place of each position, and asks the pod of each share for its
part, itself among them; ``take`` has the servers of shares answer. Where a pod is away, another one stands in for its
shares: it reads them, and answers the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Container
from dataclasses import replace
from functools import lru_cache
from typing import Any
from urllib.parse import urlencode

import numpy as np

from refill.errors import EpochNotReady, InvalidInput, JobConflict, MemoryTooSmall, RefillError, UnknownJob
from refill.protocol.dealing import Dealing
from refill.protocol.job_spec import JobSpec
from refill.protocol.plan_memory import PlanMemory, asked_at_once
from refill.protocol.plan_settings import PlanSettings
from refill.protocol.wire_format import MAX_LISTED, BatchRequest, Int64Array, check_samples
from refill_service.cache_core.admission import AsksAs
from refill_service.cache_core.job_memory import JobMemory, chunks_in_memory, memory_for_chunks
from refill_service.cache_core.memory_shares import Claim
from refill_service.cache_core.planned.epoch_digest import MOST_DIGESTED
from refill_service.cache_core.planned.job_orders import JobOrders
from refill_service.cache_core.planned.posted_lists import AboutList, PostedLists
from refill_service.cache_core.planned.received import ReceivedEpochs
from refill_service.cache_core.planned.shared_chunks import SharedChunks
from refill_service.cache_core.sample_mapping import ChunkLayout
from refill_service.cache_core.shared_room import Asker
from refill_service.datasets.dataset_reader import Dataset
from refill_service.jobs.job_figures import Clients, JobCounts, JobFigures
from refill_service.jobs.job_use import JobUse
from refill_service.jobs.leased_ranks import LeasedRanks
from refill_service.jobs.single_reads import ReadAlone, SingleReads
from refill_service.memory.byte_gate import ByteGate
from refill_service.memory.loop_turns import all_done
from refill_service.memory.payload import AnswerSize, Payload, RecentlySent, Samples, joined, joined_in_pieces
from refill_service.memory.pinned_tier import PinnedShare
from refill_service.observing.tracing import span
from refill_service.peers.peers import Peers
from refill_service.planned.job_records import JobRecords
from refill_service.planned.job_shares import JobShares
from refill_service.planned.pods_away import PodsAway, is_away, planned_path
from refill_service.planned.share_server import ShareServer
from refill_service.settings import Settings

log = logging.getLogger(__name__)

_LEAST_FOR_RANKS, _PART_FOR_RANKS = 1 << 20, 16
"""Of the job's memory: what is kept of what its ranks say."""
_BYTES_OF_PROCESS = 500
"""Its lease."""
_TAKEN_AT_ONCE, _COUNTED_AT_ONCE = 32, 256
"""Of one share and request: what asks for more is carried out piece by piece, and the rest does not count as a run that
has gone back."""
_HANDED_OVER_AT_ONCE = 256
"""Of one request, of what is in memory."""
_PLACED_AT_ONCE = 1 << 12
"""Positions whose shares are found."""
_READ_AT_ONCE = 8192
"""Samples that such a piece may have read, of chunks that are large."""

_KEPT_DEALINGS = 256


class PlannedJob:
    """Answers for one planned job at one pod: its own shares, those of pods that are away, and by asking other pods.

    :param orders: of its plan; ``spec`` has all of its settings.
    :param memory_bytes: what the job may use here.
    :param for_plan: of that, what the orders take.
    :param samples_bytes: memory for samples that it has here once others have given back what they had.
    :param lists: that ranks will post; None: the order is that of the plan.
    :param confirmed: whether a rank is known to have received something by this plan.
    :param other_plan: is told of a pod that has the job by another one.
    :param shared: by share, what jobs that read its chunks in this order read for each other; None: it reads alone.
    """

    def __init__(
        self,
        spec: JobSpec,
        orders: JobOrders,
        dataset: Dataset,
        records: JobRecords,
        layout: ChunkLayout,
        *,
        settings: Settings,
        memory_bytes: int,
        for_plan: int,
        samples_bytes: int,
        lists: PostedLists | None,
        parts: JobMemory,
        claim: Claim | None,
        gate: ByteGate,
        pinned: PinnedShare,
        peers: Peers,
        away: PodsAway,
        confirmed: bool,
        other_plan: Callable[[dict[str, Any]], Awaitable[None]],
        shared: Callable[[int], SharedChunks[Payload]] | None,
    ) -> None:
        self.spec, self.orders, self.dataset, self.records, self.layout = spec, orders, dataset, records, layout
        self.asker = Asker.of(spec)
        dataset.read_by = spec.name
        self.ordinal, self.num_pods = settings.ordinal, settings.num_pods
        self.memory_bytes = memory_bytes
        self.parts, self.claim, self.pinned = parts, claim, pinned
        self.gave_all = False
        """Others have its memory, which may not change, until somebody asks for it again."""
        self.confirmed = confirmed
        self.began_midway = confirmed
        """Whether others had this job before, so that this pod has not seen all that ranks asked for."""
        self.share = layout.share(0, 1)
        """Of the dataset, all of it: the reads of this job are by ids of the dataset."""
        self.lists = lists
        self.leases = LeasedRanks(spec.name)
        self.received = ReceivedEpochs(self._for_ranks(memory_bytes))
        self.clients = Clients()
        self.counts = JobCounts()
        self.sent_bytes: dict[int, int] = {}
        self.since = time.time()
        """When the run was registered, at the first pod."""
        self.use = JobUse(self.leases)
        self._num_bytes = dataset.index.sample_bytes
        self._for_plan = for_plan
        self._answer_size = AnswerSize(settings.answer_limit_bytes)
        self._peers, self._away, self._other_plan = peers, away, other_plan
        self._recent = RecentlySent(parts.recent_bytes)
        self._single = SingleReads(self, gate, settings.wait_seconds)
        self.shares = JobShares(
            self,
            orders,
            records,
            settings=settings,
            gate=gate,
            pinned=pinned,
            away=away,
            single=self._single,
            recent=self._recent,
            counts_of=self.counts.owner,
            lists=lists,
            shared=shared,
        )
        """Of the dataset, those that are served here."""
        self._is_short = False
        """Whether it has less memory than its order is planned for."""
        self._takes: dict[object, float] = {}
        """Requests for samples of shares that are served here, and when each began."""
        self._bringing: set[asyncio.Task[None]] = set()
        """Lists, to pods that have lost them."""
        self._composing = asyncio.Lock()
        self._whole: tuple[int, Int64Array] | None = None
        """An epoch, and its whole order by the plan."""
        self._plan_memory = PlanMemory(samples_bytes, self.shares.own_planned_bytes)
        self._share_memory()
        self.ranks_are(spec)

    # What others want to know of it.

    @property
    def plan_id(self) -> str:
        return self.orders.settings.plan_id

    @property
    def resident_bytes(self) -> int:
        return self.shares.resident_bytes

    @property
    def recent_bytes(self) -> int:
        """Of samples that have left, kept a while: in case they are asked for again, or for other jobs."""
        return self._recent.used_bytes + self.shares.kept_bytes

    @property
    def taken_bytes(self) -> int:
        """What others can't have: what it was given, or holds still of what it had; while it sleeps, what it holds."""
        are_served = self.shares.are_served()
        if self.claim is None:
            return 0 if self.gave_all else self.memory_bytes
        if self.use.sleeps:
            held_bytes = memory_for_chunks(self.resident_bytes + self.recent_bytes, self.parts)
            return min(held_bytes + self._for_plan * are_served, self.memory_bytes)
        return max(memory_for_chunks(self.shares.held_bytes, self.parts) + self._for_plan, self.memory_bytes)

    def mean_bytes(self, num_samples: int) -> int:
        """What so many samples take, about."""
        return num_samples * self._num_bytes // max(1, self.layout.num_samples)

    def info(self) -> dict[str, Any]:
        """What a client gets on registration."""
        settings = self.orders.settings
        return {
            "spec": self.spec.to_dict(),
            "plan": settings.to_dict(),
            "plan_id": settings.plan_id,
            "incarnation": settings.plan_id,
            "since": self.since,
            "num_pods": self.num_pods,
            "share_sizes": self.orders.shares.sizes.tolist(),
            "num_samples": self.layout.num_samples,
            "num_blobs": len(self.layout.first_sample) - 1,
            "total_bytes": self.dataset.index.sample_bytes,
            "fingerprint": settings.dataset,
            "metadata": self.dataset.index.metadata,
            "ordinal": self.ordinal,
            "memory_bytes": self.memory_bytes,
            "plan_memory": self._plan_memory.to_dict(),
            "policy": self.spec.policy,
            "chunk_size": self.layout.chunk_size,
            "chunks_in_memory": chunks_in_memory(
                self._capacity_bytes, self.layout.num_chunks, self.dataset.index.sample_bytes
            ),
        }

    def users(self) -> dict[str, Any]:
        """Who uses the job, as far as this pod sees (as :meth:`JobAtPod.use`)."""
        return {"epoch": self.newest_epoch, **self.use.to_dict()}

    @property
    def newest_epoch(self) -> int | None:
        """That ranks or other pods have asked for here, not what is read ahead for it; None: none."""
        taken = (epoch for epoch, counts in self.counts.owners.items() if counts.core.takes)
        newest = max(self.received.newest, max(self.counts.homes, default=-1), max(taken, default=-1))
        return newest if newest >= 0 else None

    @property
    def num_counts(self) -> int:
        """How much :meth:`figures` has of epochs and ranks, about."""
        return len(self.counts.owners) + len(self.counts.homes) + len(self.clients.of_rank) + self.received.num_ranks

    def figures(self) -> JobFigures:
        """For metrics."""
        return JobFigures(
            self.spec.policy,
            self.newest_epoch,
            self.counts.owners,
            self.counts.homes.values(),
            self.clients,
            self.mean_bytes(self.shares.num_own_samples),
            self.memory_bytes,
            self.resident_bytes,
            0,
            self.recent_bytes,
            self.sent_bytes,
            len(self.leases.alive()),
            self._progress(),
            damaged=self.received.num_damaged,
            received=self.received.of_ranks(),
            oldest_take_seconds=time.monotonic() - min(self._takes.values()) if self._takes else 0.0,
        )

    def _progress(self) -> tuple[int, int] | None:
        """Requests of the newest epoch for the shares of this pod, ``(answered, all)``."""
        newest = self.newest_epoch
        if newest is None:
            return None
        every = self.shares.num_own_samples
        if self.lists is not None:  # about
            every = every * self.lists.num_positions(newest) // max(1, self.layout.num_samples)
        answered = self.counts.owners[newest].core.takes if newest in self.counts.owners else 0
        return min(every, answered), every

    # Memory.

    @property
    def _capacity_bytes(self) -> int:
        return replace(self.parts, memory_bytes=max(0, self.memory_bytes - self._for_plan)).abstract_bytes

    def lacks(self, at_once: int) -> str | None:
        """What of its memory here does not fit, in words.

        :param at_once: positions that the loader of a rank asks for at once; 0: not known.
        """
        sample_bytes = self._num_bytes / max(1, self.layout.num_samples)
        asked = asked_at_once(at_once, self.spec.num_groups, sample_bytes, self.num_pods)
        return self._plan_memory.lacks(asked, self._num_bytes)

    def memory_is(self, memory_bytes: int) -> None:
        """Fact: the job has so much memory now. What it held beyond that is read again when it is needed."""
        had_bytes, self.memory_bytes = self.memory_bytes, memory_bytes
        is_short = self._capacity_bytes < self.shares.own_planned_bytes and not self.use.sleeps
        if is_short and not self._is_short:
            log.warning(
                "job %s has memory for %s bytes of samples here, and its order is planned for %s: it reads more of the "
                "store from now on (refill_given_up_bytes_total)",
                self.spec.name,
                f"{self._capacity_bytes:,}",
                f"{self.shares.own_planned_bytes:,}",
            )
        self._is_short = is_short
        self._recent.limit(replace(self.parts, memory_bytes=memory_bytes).recent_bytes)
        self.received.limit_bytes = self._for_ranks(memory_bytes)
        self._share_memory()
        if memory_bytes < had_bytes:
            self.shares.give_back()

    def _share_memory(self) -> None:
        kept_bytes = replace(self.parts, memory_bytes=self.memory_bytes).sweep_bytes
        self.shares.memory_is(self._capacity_bytes, kept_bytes)

    @staticmethod
    def _for_ranks(memory_bytes: int) -> int:
        """What is kept of what ranks say may take so much."""
        return max(_LEAST_FOR_RANKS, memory_bytes // _PART_FOR_RANKS)

    def check_rank(self, asks: AsksAs) -> None:
        """Raises :class:`InvalidInput` for a rank that there is not, and :class:`MemoryTooSmall` for more processes
        than the job's memory has places for."""
        if asks.rank >= asks.num_ranks:
            raise InvalidInput(f"rank {asks.rank} is not one of {asks.num_ranks} ranks")
        most, num_processes = self._for_ranks(self.memory_bytes) // _BYTES_OF_PROCESS, asks.num_ranks * asks.group
        if num_processes > most:
            raise MemoryTooSmall(
                f"job {self.spec.name} has {self.memory_bytes:,} bytes on this pod, in which {most:,} processes find a "
                f"place, and you ask as one of {num_processes:,}: give it more memory_bytes"
            )

    def ranks_are(self, spec: JobSpec) -> None:
        """Fact: the job begins, or goes on, with these ranks."""
        names = ("world_size", "drop_last", "num_epochs", "batch_group")
        self.spec = replace(self.spec, **{name: getattr(spec, name) for name in names})
        self.shares.ranks_are(spec.batch_group, spec.world_size, spec.num_epochs)

    def let_go(self) -> None:
        """Forget the bytes of what nobody has asked for, and the orders: should somebody do so all the same, it is read
        again."""
        if self.memory_bytes and not self.gave_all:  # it is told so as long as others want memory
            log.info("job %s sleeps, and lets go of its memory", self.spec.name)
        self.shares.forget()
        self._recent.clear()
        self._whole = None
        if self.claim is None:
            self.gave_all = True
        else:
            self.memory_is(0)

    async def close(self, why: RefillError) -> None:
        """Requests under way end with this error, and so do those that come late."""
        for task in self._bringing:
            task.cancel()
        await self.shares.close(why)
        self._recent.clear()
        await self.dataset.close()

    # What is asked for.

    def check_wanted(self, wanted: BatchRequest) -> None:
        """Raises :class:`InvalidInput` for positions that no epoch has, and unless samples are named where the ranks
        have the order in lists; :class:`RequestTooLarge` for more than an answer may have."""
        if (wanted.sample_ids is not None) != (self.lists is not None):
            raise InvalidInput(
                f"job {self.spec.name} has order {self.spec.order}: a request "
                + ("names the sample of each position" if self.lists is not None else "names positions alone")
            )
        if wanted.sample_ids is not None:
            self.check_samples(wanted.sample_ids)
        elif int(wanted.positions.max()) >= self.layout.num_samples:
            raise InvalidInput(
                f"epoch {wanted.epoch} of job {self.spec.name} has positions 0 to {self.layout.num_samples - 1}, got "
                f"{int(wanted.positions.max())}"
            )
        self._answer_size.check(self.wanted_bytes(wanted))

    def wanted_bytes(self, wanted: BatchRequest) -> int:
        """What the samples of a request take: exactly where it names them, as often as it does; else about."""
        if wanted.sample_ids is None:
            return self.mean_bytes(len(wanted.positions))
        return int(self.records.lengths_of(wanted.sample_ids).sum())

    def check_samples(self, ids: Int64Array) -> None:
        """Raises :class:`InvalidInput` for samples that the dataset does not have."""
        check_samples(ids, self.layout.num_samples)

    def check_dealing(self, epoch: int, dealing: Dealing, asks: AsksAs) -> None:
        """Fact: a process asks for samples of an epoch that is dealt so. While another one that lives goes through it
        by a later dealing, raises :class:`JobConflict`, or :class:`EpochNotReady` for a process that goes back."""
        process, group = asks.process, asks.group
        overtaken = self.received.goes_by(epoch, dealing, process, time.time(), asks.life)
        if overtaken is None:
            return

        def said(process: int, dealing: Dealing) -> str:
            start = f"from position {dealing.start}" if dealing.start else "from the start"
            ranks = f"rank {process // group} of {dealing.num_ranks}"
            return f"{ranks} goes through epoch {epoch} {start} in batches of {dealing.batch}"

        text = (
            f"job {self.spec.name}: {said(process, dealing)}, and {said(overtaken.by, overtaken.dealing)}: all ranks "
            "must load states of the same step, and their loaders have one batch_size (else give EpochSampler("
            "batch_size=1) to all)"
        )
        if overtaken.for_good:
            raise JobConflict(text)
        raise EpochNotReady(text, rank=process // group)

    def dealing(self, num_ranks: int, batch: int, start: int, drop_last: bool) -> Dealing:
        """How positions of an epoch are dealt to ranks."""
        if self.lists is not None:
            return Dealing.of_lists(num_ranks)
        return _dealing(self.layout.num_samples, num_ranks, batch, start, drop_last)

    # Lists that ranks have.

    async def post_list(self, epoch: int, rank: int, about: AboutList, first: int, samples: Int64Array) -> None:
        """Fact: a part of a rank's list, as :meth:`PostedLists.post`."""
        if self.lists is None:
            raise InvalidInput(f"job {self.spec.name} has an order of its own: it takes no lists")
        self.check_samples(samples)
        now = time.time()
        self.received.is_listed(epoch, Dealing.of_lists(about.num_ranks), rank, about.length, about.digest, now=now)
        if self.lists.post(epoch, rank, about, first, samples):
            await self.shares.lists_are_known(epoch)

    def lists_of(self, rank: int) -> dict[int, str]:
        """The digests of a rank's lists that are known, by epoch."""
        return {} if self.lists is None else self.lists.of_rank(rank)

    async def whole_order(self, epoch: int) -> Int64Array:
        """The sample at each position of the plan's order, of which ranks compose lists, or pack sequences. Raises
        :class:`InvalidInput` for more than a pod holds of a job whose ranks have no lists."""
        if self.lists is None and self.layout.num_samples > MOST_DIGESTED:
            raise InvalidInput(
                f"job {self.spec.name} has {self.layout.num_samples:,} samples, and pods say the whole order of "
                f"{MOST_DIGESTED:,} at most: divide the dataset into several"
            )
        async with self._composing:
            if self._whole is None or self._whole[0] != epoch:
                self._whole = epoch, await asyncio.to_thread(self.orders.whole, epoch)
            return self._whole[1]

    # Batches.

    async def batch(
        self, wanted: BatchRequest, *, says_damage: bool, asker: dict[str, Any], silent: Container[int] = ()
    ) -> Samples:
        """``(sample ids, their bytes)`` of the positions of a request, all different, whoever has them.

        :param asker: what else other pods are told of who asks.
        :param silent: pods that gave it no sign of life.
        """
        shares, share_places = await self._placed(wanted)
        home = self.counts.home(wanted.epoch)
        pods = self.shares.pods_of(shares)
        if not (pods != self.ordinal).any():  # of a rank that asks each pod itself
            home.local += len(shares)
            with span("batch", job=self.spec.name, epoch=wanted.epoch, positions=len(shares)):
                found = await self._take(wanted, shares, share_places, says_damage=says_damage)
            home.batches += 1
            home.delivered_bytes += sum(map(len, found[1]))
            return found

        async def ask(pod: int, places: Int64Array) -> Samples | None:
            """None: it is away."""
            if pod == self.ordinal:
                home.local += len(places)
                part = wanted.at(places)
                return await self._take(part, shares[places], share_places[places], says_damage=says_damage)
            asked = self._ask(pod, wanted.at(places), asker, says_damage=says_damage)
            try:
                found = await self._away.answer_of(pod, asked, was_silent=pod in silent)
            except RefillError as error:
                if not is_away(error):
                    raise
                self._away.is_gone(pod, error)
                return None
            home.remote_on_demand += len(places)
            return found

        with span("batch", job=self.spec.name, epoch=wanted.epoch, positions=len(shares)):
            parts: list[tuple[Int64Array, Samples]] = []
            left = np.arange(len(shares))
            while len(left):
                asked = [(pod, left[at]) for pod, at in _grouped(self.shares.pods_of(shares[left]))]
                answers = await all_done(*(ask(pod, places) for pod, places in asked))
                came = [(places, part) for (_, places), part in zip(asked, answers, strict=True) if part is not None]
                unanswered = [places for (_, places), part in zip(asked, answers, strict=True) if part is None]
                left = np.sort(np.concatenate(unanswered)) if unanswered else left[:0]
                parts += came
        ids, payloads = await joined_in_pieces(len(shares), parts)
        home.batches += 1
        home.delivered_bytes += sum(map(len, payloads))
        return ids, payloads

    def at_hand(self, wanted: BatchRequest) -> Callable[[], Samples] | None:
        """How :meth:`batch` is answered in this moment, where all that is wanted is in memory here: to be called at
        once. None: it is not; then nothing has been done."""
        self.shares.look_at_others()
        epoch = wanted.epoch
        if len(wanted.positions) > _HANDED_OVER_AT_ONCE:
            return None
        shares, places = self.orders.places_of(wanted)
        found: list[tuple[Int64Array, ShareServer, Int64Array, list[int]]] = []
        for share, at in _grouped(shares):
            server = self.shares.at_hand(share)
            of_share = places if len(at) == len(places) else places[at]
            entries = None if server is None else server.at_hand(epoch, of_share)
            if server is None or entries is None:
                return None
            found.append((at, server, of_share, entries))

        def taken() -> Samples:
            parts = [(at, server.take_entries(epoch, of_share, entries)) for at, server, of_share, entries in found]
            ids, payloads = joined(len(places), parts)
            self._recent.put(epoch, ids.tolist(), payloads)
            home = self.counts.home(epoch)
            home.local += len(places)
            home.batches += 1
            home.delivered_bytes += sum(map(len, payloads))
            return ids, payloads

        return taken

    async def take(self, wanted: BatchRequest, *, says_damage: bool) -> Samples:
        """The same, of this pod alone, whichever shares they are of."""
        return await self._take(wanted, *await self._placed(wanted), says_damage=says_damage)

    async def _placed(self, wanted: BatchRequest) -> tuple[Int64Array, Int64Array]:
        """As :meth:`JobOrders.places_of`, of very many in pieces."""
        if len(wanted.positions) <= _PLACED_AT_ONCE:
            return self.orders.places_of(wanted)
        found = []
        for first in range(0, len(wanted.positions), _PLACED_AT_ONCE):
            found.append(self.orders.places_of(wanted.at(slice(first, first + _PLACED_AT_ONCE))))
            await asyncio.sleep(0)  # it is others' turn
        shares, places = zip(*found, strict=True)
        return np.concatenate(shares), np.concatenate(places)

    async def _take(
        self, wanted: BatchRequest, shares: Int64Array, places: Int64Array, *, says_damage: bool
    ) -> Samples:
        """:param places: ``(n,)`` of these shares, whose samples are wanted."""
        self.shares.look_at_others()
        epoch, ids, missing = wanted.epoch, wanted.sample_ids, list[tuple[int, Int64Array]]()
        parts: list[tuple[Int64Array, Samples]] = []
        left = _HANDED_OVER_AT_ONCE
        for share, at in _grouped(shares):
            if left < len(at) <= _HANDED_OVER_AT_ONCE:
                await asyncio.sleep(0)  # it is others' turn
                left = _HANDED_OVER_AT_ONCE
            server = self.shares.made(share)
            if ids is None and len(at) <= left and server is not None:
                part = server.take_at_once(epoch, places[at])
                if part is not None:
                    left -= len(at)
                    parts.append((at, part))
                    continue
            missing.append((share, at))
        if missing:
            parts += await self._take_missing(wanted, missing, places, says_damage=says_damage)
        return await joined_in_pieces(len(places), parts)

    async def _take_missing(
        self, wanted: BatchRequest, of_shares: list[tuple[int, Int64Array]], places: Int64Array, *, says_damage: bool
    ) -> list[tuple[Int64Array, Samples]]:
        """Of shares, each with ``(n,)`` where its samples are wanted, what may have to be waited for."""
        epoch, ids, alone = wanted.epoch, wanted.sample_ids, ReadAlone()

        async def taken(share: int, at: Int64Array, is_rest: bool) -> Samples:
            server = await self.shares.server(share)
            if ids is None:
                return await server.take(epoch, places[at], says_damage=says_damage, is_rest=is_rest)
            of_list = epoch, places[at], ids[at], alone
            return await server.take_listed(*of_list, says_damage=says_damage, is_rest=is_rest)

        size = max(1, min(_TAKEN_AT_ONCE, _READ_AT_ONCE // self.layout.chunk_size))
        pieces = [
            (share, at[first : first + size], first >= _COUNTED_AT_ONCE)
            for share, at in of_shares
            for first in range(0, len(at), size)
        ]
        take = object()
        self._takes[take] = time.monotonic()
        try:
            parts = await all_done(*(taken(*piece) for piece in pieces))
        finally:
            del self._takes[take]
        return [(at, part) for (_, at, _), part in zip(pieces, parts, strict=True)]

    async def samples(self, ids: Int64Array, *, says_damage: bool = False) -> list[Payload]:
        """Exactly these samples, outside of any epoch, each by a read of its own, however often it is named."""
        records = await self.records.of_samples(ids)
        self._answer_size.check(int(records.length[records.places(ids)].sum()))
        different = list(dict.fromkeys(ids.tolist()))
        results = await self._single.read(different, records, says_damage=says_damage)
        found: dict[int, Payload] = {}
        for sample, result in zip(different, results, strict=True):
            if isinstance(result, BaseException):
                raise result
            found[sample] = result
        return [found[sample] for sample in ids.tolist()]

    async def _ask(self, pod: int, request: BatchRequest, asker: dict[str, Any], *, says_damage: bool) -> Samples:
        """Another pod for its part of a batch; one that does not know the job is told of it first."""
        path = planned_path(self.spec.name)
        asker = asker | {"plan": self.plan_id, "pod": self.ordinal, "damaged": "say" if says_damage else "raise"}
        body = request.encode()
        for may_introduce in (True, False):
            try:
                self.sent_bytes[pod] = self.sent_bytes.get(pod, 0) + len(body)
                async with self._peers.frames(pod, f"{path}/take?{urlencode(asker)}", body) as frames:
                    frame = await frames.frame(len(request.positions), self._answer_size.check)
                if not np.array_equal(frame.positions, request.positions):
                    raise RefillError(f"{self._peers.name(pod)} answers other positions than it was asked for")
                return frame.sample_ids, list(frame.payloads)
            except UnknownJob:
                if not may_introduce:
                    raise
                there = await self._peers.call(pod, "PUT", path, self.introduction() | {"again": True})
                if PlanSettings.from_dict(there["plan"]).plan_id != self.plan_id:
                    await self._other_plan(there)
                elif self.lists is not None:
                    bringing = asyncio.create_task(self._bring_lists(pod, self.lists))
                    self._bringing.add(bringing)
                    bringing.add_done_callback(self._bringing.discard)
        raise AssertionError("the second turn returns or raises")

    async def _bring_lists(self, pod: int, lists: PostedLists) -> None:
        """To a pod that has lost them, or never heard of them."""
        path = planned_path(self.spec.name)
        found = [(epoch, *each) for epoch in lists.epochs for each in lists.of_epoch(epoch)]
        with contextlib.suppress(RefillError):  # it reads what it is asked for
            for epoch, rank, about, samples in found:
                for place in range(0, max(1, len(samples)), MAX_LISTED):
                    query = {"plan": self.plan_id, "first": about.start + place} | about._asdict()
                    body = samples[place : place + MAX_LISTED].astype("<i8").tobytes()
                    what = f"epochs/{epoch}/ranks/{rank}/list?{urlencode(query)}"
                    await self._peers.call(pod, "PUT", f"{path}/{what}", body)

    def introduction(self) -> dict[str, Any]:
        """What makes the job known to another pod."""
        plan = self.orders.settings.to_dict()
        return {"spec": self.spec.to_dict(), "plan": plan, "confirmed": self.confirmed, "since": self.since}


_dealing = lru_cache(maxsize=_KEPT_DEALINGS)(Dealing)


def place_of(wanted: BatchRequest) -> int:
    """Which of a job's requests is needed first."""
    return (wanted.epoch << 40) + (int(wanted.positions.min()) if len(wanted.positions) else 0)


def step_of(wanted: BatchRequest, dealing: Dealing) -> int:
    """About how many samples all ranks ask for together."""
    return dealing.num_ranks * max(dealing.batch, len(wanted.positions))


def _grouped(numbers: Int64Array) -> list[tuple[int, Int64Array]]:
    """Each number that there is, and the places ``(n,)`` where it is."""
    first = int(numbers[0]) if len(numbers) else 0
    if np.count_nonzero(numbers == first) == len(numbers):
        return [(first, np.arange(len(numbers)))] if len(numbers) else []
    return [(number, np.flatnonzero(numbers == number)) for number in sorted(set(numbers.tolist()))]
