"""Which jobs does this pod have, and with how much memory? Finds, makes and closes them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from refill.errors import JobConflict, JobLost, MemoryTooSmall, PodBusy, PodStopping, RefillError, UnknownJob
from refill.protocol.job_spec import JobSpec
from refill.protocol.part_names import whole_of
from refill.protocol.rank_life import RankLife
from refill_service.cache_core.admission import check_holder
from refill_service.cache_core.job_memory import JobMemory, check_tables, table_memory
from refill_service.cache_core.kept_runs import KeptRuns
from refill_service.cache_core.memory_shares import Claim, memory_shares
from refill_service.cache_core.posted_traces import memory_with_traces, trace_memory
from refill_service.cache_core.sample_mapping import ChunkLayout
from refill_service.cache_core.score_book import score_memory
from refill_service.cache_core.team_quotas import TeamQuotas
from refill_service.datasets.dataset_reader import Dataset
from refill_service.datasets.early_opening import EarlyOpening
from refill_service.jobs.home import Home
from refill_service.jobs.job import Job
from refill_service.jobs.job_at_pod import JobAtPod
from refill_service.jobs.job_use import GONE_SECONDS, Goodbyes, JobUse
from refill_service.jobs.owner import Owner
from refill_service.jobs.waits import RankWaits
from refill_service.memory.byte_gate import ByteGate
from refill_service.memory.payload import check_largest_sample
from refill_service.memory.pinned_tier import PinnedTier
from refill_service.object_store.store_counters import within
from refill_service.peers.job_peers import JobPeers, WasRestarted
from refill_service.peers.peers import Peers
from refill_service.settings import Settings

log = logging.getLogger(__name__)

_NAMED_JOBS = 20
_STEP_BYTES = 1 << 16
"""Less is not moved from job to job."""
_LOOK_SECONDS = 0.05

_ENDED_JOBS = 1000
"""Of which it is known why they ended."""
_ASK_SECONDS = 1.0
"""For a pod to say whether a job has ranks there."""
_GIVE_SECONDS = 2.0
"""How long the end of a job waits for another pod to take a copy of its receipts."""


class TakesMemory(Protocol):
    """A job at a pod, as far as memory is shared by it and others."""

    @property
    def spec(self) -> JobSpec: ...
    @property
    def claim(self) -> Claim | None: ...
    @property
    def memory_bytes(self) -> int: ...
    @property
    def taken_bytes(self) -> int: ...
    @property
    def use(self) -> JobUse: ...

    gave_all: bool
    """Of a job whose memory may not change: others have all of it, until somebody asks for the job again."""

    def memory_is(self, memory_bytes: int) -> None: ...
    def let_go(self) -> None: ...


class JobTable:
    """The jobs of one pod.

    :param gate: bounds the bytes of reads in flight, over all jobs.
    :param opening: opens datasets.
    :param planned: jobs whose order is planned, which share the pod's memory with these.
    """

    def __init__(
        self,
        settings: Settings,
        quotas: TeamQuotas,
        peers: Peers,
        gate: ByteGate,
        pinned: PinnedTier,
        opening: EarlyOpening,
        planned: Mapping[str, TakesMemory],
    ) -> None:
        self.settings = settings
        self.opening = opening
        self.kept_runs = KeptRuns()
        self.jobs: dict[str, JobAtPod] = {}
        self.planned = planned
        self.goodbyes = Goodbyes(settings.ordinal, peers)
        self.making = asyncio.Lock()
        """Held while a job, live or planned, is given memory and put into the table: that is free until then."""
        self.takes_jobs = True
        """False when the pod ends."""
        self.waits = RankWaits(settings.wait_seconds)
        """Of requests of all jobs, for other ranks."""
        self._quotas = quotas
        self._peers = peers
        self.gate = gate
        self.pinned = pinned
        self._ended: dict[str, RefillError] = {}
        """By incarnation, why live jobs ended that a rank may ask for all the same; the newest last."""

    def find(
        self, name: str, incarnation: str | None = None, *, looked_at: bool = False, pod: int | None = None
    ) -> JobAtPod:
        """Raises :class:`UnknownJob`, for another run of the name, too; or why that one has ended, if it is known.

        :param looked_at: by somebody who watches, which does not keep an idle job alive.
        :param pod: another one, which asks for samples for its ranks.
        """
        at_pod = self.jobs.get(name)
        if at_pod is None or incarnation not in (None, at_pod.job.incarnation):
            if incarnation is not None and (why := self.why_ended(incarnation)) is not None:
                raise why
            raise UnknownJob(f"pod {self.settings.ordinal} knows no job {name}: register it first", job=name)
        if not looked_at:
            self.is_asked(at_pod, pod)
        return at_pod

    def why_ended(self, incarnation: str) -> RefillError | None:
        """What ranks of a live job are told that has ended; None: that is not known, or nothing but to register it."""
        why = self._ended.get(incarnation)
        return None if why is None else type(why)(why.message, **why.details)

    def is_asked(self, at_pod: TakesMemory, pod: int | None = None) -> None:
        """Fact: somebody asks for a job here. One that slept gets its memory again, or raises
        :class:`MemoryTooSmall`.

        :param pod: as of :meth:`find`.
        """
        slept = at_pod.use.sleeps
        if slept and at_pod.claim is None and at_pod.gave_all:
            self._take_again(at_pod)
        at_pod.use.asked(pod)
        if slept:
            self.share_memory()

    def _take_again(self, at_pod: TakesMemory) -> None:
        """A job whose memory may not change had given all of it to others."""
        kept = sum(each.memory_bytes for each in self._all if _keeps(each))
        least = sum(each.claim.least_bytes for each in self._awake() if each.claim is not None)
        if kept + at_pod.memory_bytes + least > self._for_jobs_bytes:
            raise self._too_small(at_pod.spec, at_pod.memory_bytes, self._for_jobs_bytes - kept - least)
        at_pod.gave_all = False

    async def said_goodbye(self, name: str, rank: int, life: RankLife) -> None:
        """Fact: a training process that was a rank ends. Raises :class:`UnknownJob`. Other pods know it, too, when this
        returns, as far as they answer at once."""
        self._any(name).use.said_goodbye(rank, life)
        self.share_memory()
        await self.goodbyes.told(name)

    def pod_said_goodbye(self, name: str, pod: int) -> None:
        """Fact: no rank whose home is another pod asks for the job any more. Raises :class:`UnknownJob`."""
        self._any(name).use.pod_said_goodbye(pod)
        self.share_memory()

    def has_ranks(self, name: str) -> bool:
        """Whether the job has ranks whose home this pod is. Raises :class:`UnknownJob`."""
        return self._any(name).use.has_ranks

    def _any(self, name: str) -> TakesMemory:
        at_pod = self.jobs.get(name) or self.planned.get(name)
        if at_pod is None:
            raise UnknownJob(f"pod {self.settings.ordinal} knows no job {name}", job=name)
        return at_pod

    def of_team(self, team: str) -> dict[str, JobAtPod]:
        """Those that a team may hear of: its own, and what nobody registered with a token."""
        return {name: at_pod for name, at_pod in self.jobs.items() if at_pod.job.spec.holder in ("", team)}

    def parts_of_rank(self, name: str, rank: int) -> dict[str, Any]:
        """Whether a rank has come to this job here, and the jobs of other parts of the same dataset that it reads now:
        for ranks that look whether all read the same. Raises :class:`UnknownJob`."""
        jobs = {**self.planned, **self.jobs}
        asked, whole = self._any(name), whole_of(name)
        others = [
            other
            for other, at_pod in jobs.items()
            if whole is not None
            and other != name
            and whole_of(other) == whole
            and (at_pod.spec.holder, at_pod.spec.world_size) == (asked.spec.holder, asked.spec.world_size)
            and at_pod.use.is_there(rank)
        ]
        return {"here": asked.use.has_come(rank), "others": others}

    def holder(self, name: str) -> str | None:
        """Whose token a job was registered with; None when this pod has no such job."""
        at_pod = self.jobs.get(name) or self.planned.get(name)
        return None if at_pod is None else at_pod.spec.holder

    def stopping(self) -> PodStopping:
        return PodStopping(f"pod {self.settings.ordinal} stops", pod=self.settings.ordinal)

    def check_taking_jobs(self) -> None:
        """Raises :class:`PodStopping` when the pod ends."""
        if not self.takes_jobs:
            raise self.stopping()

    def check_name(self, spec: JobSpec) -> None:
        """Raises :class:`JobConflict` where a planned job has the name of a live one that is to be made."""
        if (planned := self.planned.get(spec.name)) is not None:
            check_holder(spec.name, planned.spec.holder, spec.holder)
            raise JobConflict(
                f"job {spec.name} runs with policy planned, and you ask for {spec.policy}; end it first (refill end), "
                "or use another name"
            )

    def check_num_jobs(self, team: str) -> None:
        """Raises :class:`NotAllowed` when a team may have no more."""
        self._quotas.check_jobs(team, sum(at_pod.spec.holder == team for at_pod in self._all))

    async def opened_ahead(self, spec: JobSpec) -> None:
        """Called before a job is made, while no other waits for that: its store may be slow, or not answer. Raises as
        :meth:`make`."""
        self.check_taking_jobs()
        self.check_num_jobs(spec.holder)
        async with within(self.settings.wait_seconds, f"pod {self.settings.ordinal} waits to open {spec.dataset}"):
            dataset = await self.opening.dataset(spec.dataset)
        await dataset.loaded_ahead()

    async def make(self, spec: JobSpec, incarnation: str, was_restarted: WasRestarted) -> JobAtPod:
        """A job that is not in the table yet.

        :param was_restarted: is told of another pod that has lost it.
        """
        settings = self.settings
        self.check_taking_jobs()
        self.check_name(spec)
        self.check_num_jobs(spec.holder)
        # Opening goes on, for when the client comes again.
        async with within(settings.wait_seconds, f"pod {settings.ordinal} waits to open {spec.dataset}"):
            dataset = await self.opening.take(spec.dataset)
        try:
            parts = self.parts_of(dataset)
            dataset.check_lengths(f"policy {spec.policy}")
            dataset.check_chunk_size(spec.chunk_size)
            chunk_size = spec.chunk_size or dataset.chunk_size_of(spec.policy)
            claim = self.claim_of(spec, dataset, chunk_size, parts)
            away = await self.until_others_are_known(claim)
            memory_bytes, _ = self.memory_for(spec, claim, away=away)
            # Before anything is made in its size; shares are about equal.
            dataset.check_room(-(-dataset.num_samples // settings.num_pods))
            layout = ChunkLayout(dataset.blobs.first_sample, chunk_size)
            share = await asyncio.to_thread(layout.share, settings.ordinal, settings.num_pods)
            tables_bytes, least_bytes = (
                table_memory(share.num_samples, num_chunks, spec.world_size) for num_chunks in (share.num_chunks, 1)
            )
            check_tables(memory_bytes, tables_bytes, least_bytes, spec.name, share.num_chunks, spec.world_size)
            records = await dataset.load_records(share.first_sample, share.end_sample)
            check_largest_sample(spec.name, records.length, settings.answer_limit_bytes)
            for_traces = 0
            if spec.order == "explicit":
                for_traces = trace_memory(memory_bytes, dataset.num_samples)
            for_scores = score_memory(share.num_samples) if spec.is_by_importance else 0
            memory = replace(parts, memory_bytes=max(0, memory_bytes - for_traces - for_scores))
            job = await self._job_of(
                spec,
                dataset,
                records,
                layout,
                ordinal=settings.ordinal,
                num_pods=settings.num_pods,
                memory_bytes=memory_bytes,
                abstract_bytes=memory.abstract_bytes,
                incarnation=incarnation,
                trace_bytes=for_traces,
            )
            pinned = await self.pinned.leased(dataset.shared_as, records)
        except BaseException:
            await dataset.close()
            raise
        owner = Owner(
            job,
            self.gate,
            pinned,
            memory.recent_bytes,
            settings.wait_seconds,
            self.waits,
            answer_bytes=settings.answer_limit_bytes,
        )
        peers = JobPeers(
            spec.name,
            incarnation,
            settings.ordinal,
            settings.num_pods,
            self._peers,
            settings.wait_seconds,
            was_restarted,
        )
        home = Home(job, owner, peers, memory.remote_bytes)
        at_pod = JobAtPod(job, owner, home, peers, pinned)
        owner.books.epoch_ended = at_pod.epoch_ended
        return at_pod

    async def _job_of(self, spec: JobSpec, *of_dataset: Any, **rest: Any) -> Job:
        try:
            return await asyncio.to_thread(Job, spec, *of_dataset, **rest)  # tables of very many chunks take a while
        except MemoryTooSmall as error:
            raise self.with_holders(spec, error) from None

    def put(self, at_pod: JobAtPod) -> None:
        self.jobs[at_pod.job.spec.name] = at_pod
        self.share_memory()

    def share_memory(self) -> None:
        """Fact: a job has come, has gone, sleeps or has woken, or some time has passed. Each that runs gets its share
        of what those that sleep leave; one that is to have less gives it back at once."""
        for at_pod in self._all:
            if at_pod.use.is_found_left():
                log.info("job %s: nobody asks for it any more, and others may have its memory", at_pod.spec.name)
                self.goodbyes.tell(at_pod.spec.name)
            if at_pod.claim is not None and at_pod.use.sleeps and at_pod.taken_bytes < at_pod.memory_bytes:
                at_pod.memory_is(at_pod.taken_bytes)
        awake = self._awake()
        self._give(awake, self._shares(awake))

    def _give(self, awake: list[TakesMemory], shares: list[int]) -> None:
        more = [share - at_pod.memory_bytes for at_pod, share in zip(awake, shares, strict=True)]
        room = _Room(self._for_jobs_bytes, self._all)
        for wanted, place in sorted((each, place) for place, each in enumerate(more) if each):  # who gives back first
            given = wanted
            if wanted > 0:
                given = min(wanted, room.make(wanted + _STEP_BYTES) // _STEP_BYTES * _STEP_BYTES)
            if given:
                room.memory_is(awake[place], awake[place].memory_bytes + given)

    async def until_others_are_known(self, claim: Claim) -> set[int]:
        """A job comes. Processes of others that are gone are known to be in a moment, and then it has more. Returns
        pods that can't be asked whether others still have ranks."""
        ends, away = time.monotonic() + 2 * GONE_SECONDS, set[int]()
        while time.monotonic() < ends and any(at_pod.use.may_be_left for at_pod in self._all):
            awake = self._awake()
            *others, own = self._shares(awake, claim)
            gives = any(share < at_pod.memory_bytes for share, at_pod in zip(others, awake, strict=True))
            if own >= claim.most_bytes and not gives:
                return set()
            await asyncio.sleep(_LOOK_SECONDS)
            away = await self._ask_homes()
            self.share_memory()
        return away

    async def _ask_homes(self) -> set[int]:
        """Whether jobs still have ranks there that nobody else asks for. Returns those that don't answer."""
        silent = [(at_pod, pod) for at_pod in self._all for pod in at_pod.use.silent_homes]
        away = set[int]()

        async def ask(at_pod: TakesMemory, pod: int) -> None:
            path = f"/peer/v1/jobs/{at_pod.spec.name}/ranks"
            try:
                async with asyncio.timeout(_ASK_SECONDS):
                    has_ranks = (await self._peers.call(pod, "GET", path))["has_ranks"]
            except UnknownJob:  # it was restarted
                has_ranks = False
            except (TimeoutError, RefillError):
                away.add(pod)
                return
            if not has_ranks:
                at_pod.use.pod_said_goodbye(pod)

        await asyncio.gather(*(ask(*each) for each in silent))
        return away

    @property
    def _all(self) -> list[TakesMemory]:
        return [*self.jobs.values(), *self.planned.values()]

    def _awake(self) -> list[TakesMemory]:
        """Those that run, and whose memory may change."""
        return [at_pod for at_pod in self._all if at_pod.claim is not None and not at_pod.use.sleeps]

    def _shares(
        self, running: list[TakesMemory], coming: Claim | None = None, taken_bytes: int = 0, team: str = ""
    ) -> list[int]:
        """Of those whose memory may change, and last of one that comes.

        :param taken_bytes: by one of this team that comes, and gets as much as it says.
        """
        kept: Counter[str] = Counter({team: taken_bytes})
        for at_pod in self._all:
            if _keeps(at_pod):
                kept[at_pod.spec.holder] += at_pod.memory_bytes
        claims = [at_pod.claim for at_pod in running if at_pod.claim is not None]
        left = max(0, self._for_jobs_bytes - kept.total())
        if coming is not None:  # it takes from nobody what that one needs to shuffle well
            least = min(coming.least_bytes, max(0, left - sum(claim.least_bytes for claim in claims)))
            claims.append(replace(coming, least_bytes=least))
        reserved = self._quotas.reserved(self._for_jobs_bytes)
        return memory_shares(left, claims, reserved, kept)

    @property
    def _for_jobs_bytes(self) -> int:
        return self.settings.memory_bytes - self.pinned.memory_bytes

    def parts_of(self, dataset: Dataset, *, planned: bool = False, in_sweep: bool = False) -> JobMemory:
        sample_bytes = dataset.index.sample_bytes / max(1, dataset.num_samples)
        return self.settings.pod_memory.parts(sample_bytes, planned=planned, in_sweep=in_sweep)

    def claim_of(
        self, spec: JobSpec, dataset: Dataset, chunk_size: int, parts: JobMemory, beside_bytes: int = 0
    ) -> Claim:
        """What a job that names no memory can use here, and what it needs to shuffle well.

        :param beside_bytes: that it needs beside its samples.
        """
        least_bytes, most_bytes = self.settings.pod_memory.least_and_most(
            parts,
            dataset.index.sample_bytes,
            chunk_size,
            gives_back=_is_flexible(spec),
            beside_bytes=beside_bytes,
        )
        if spec.order == "explicit":
            with_traces = partial(memory_with_traces, num_samples=dataset.num_samples)
            most_bytes = with_traces(most_bytes)
            least_bytes = min(most_bytes, with_traces(least_bytes))
        return Claim(spec.holder, least_bytes, most_bytes)

    async def remove(self, name: str, holder: str | None = None, why: RefillError | None = None) -> bool:
        """End a live job on this pod, free its memory and keep its receipts alone; False when there is none.

        :param holder: whose token asks for it; None: a pod for reasons of its own. Raises :class:`NotAllowed` when the
            job belongs to another one.
        :param why: the answer to requests under way, and to later ones for this run; None: that somebody has ended it.
            :class:`UnknownJob`: that it is to be registered anew.
        """
        if holder is not None and (held_by := self.holder(name)) is not None:
            check_holder(name, held_by, holder)
        if (at_pod := self.jobs.pop(name, None)) is None:
            return False
        why = why or self.was_ended(name)
        if not isinstance(why, UnknownJob):
            self._ended[at_pod.job.incarnation] = why
            while len(self._ended) > _ENDED_JOBS:
                self._ended.pop(next(iter(self._ended)))
        await self.close_job(at_pod, why)
        self.share_memory()
        await self._keep_receipts_of(at_pod)
        return True

    async def _keep_receipts_of(self, at_pod: JobAtPod) -> None:
        """Here, and at the pod after this one: a pod that is restarted does not lose it."""
        part = await at_pod.kept_part(time.time())
        if part is None or not part.about["epochs"]:
            return
        self.kept_runs.put(part)
        following = (self.settings.ordinal + 1) % self.settings.num_pods
        if following != self.settings.ordinal:
            with contextlib.suppress(RefillError, TimeoutError):
                async with asyncio.timeout(_GIVE_SECONDS):
                    path = f"/peer/v1/jobs/{part.about['job']}/ended"
                    await self._peers.call(following, "PUT", path, part.encode())

    async def close_job(self, at_pod: JobAtPod, why: RefillError) -> None:
        """Requests under way end with ``why``."""
        await at_pod.home.close(why)
        await at_pod.owner.close(why)
        await at_pod.job.dataset.close()
        self.pinned.release(at_pod.pinned)

    def was_ended(self, name: str) -> JobLost:
        return JobLost(
            f"job {name} was ended while it was asked for samples: a new CacheDataset of this name begins it anew",
            job=name,
        )

    def memory_for(
        self, spec: JobSpec, claim: Claim, *, may_be_less: bool = False, away: Collection[int] = ()
    ) -> tuple[int, int]:
        """``(what it gets now, its share)``: others may have reads under way into what they have given back.

        :param claim: of a job that names no memory, so that others find room.
        :param may_be_less: it ran before, and goes on with less than it names where there is no more.
        :param away: pods that can't be asked whether others still have ranks.
        """
        wanted = spec.memory_bytes
        awake = self._awake()
        if not _is_flexible(spec):  # it will not give back: others that are like it find some, too
            most_bytes = int(self._left_bytes * self.settings.job_memory_fraction)
            claim = replace(claim, most_bytes=max(0, min(claim.most_bytes, most_bytes)))
        if not wanted:
            *shares, wanted = self._shares(awake, claim)
        else:
            least = sum(each.claim.least_bytes for each in awake if each.claim is not None)
            taken_bytes = min(wanted, max(0, self._left_bytes - least))
            shares = self._shares(awake, taken_bytes=taken_bytes, team=spec.holder)
        self._give(awake, [min(share, at_pod.memory_bytes) for share, at_pod in zip(shares, awake, strict=True)])
        free = _Room(self._for_jobs_bytes, self._all).make(wanted)
        used: Counter[str] = Counter()
        for at_pod in self._all:
            used[at_pod.spec.holder] += at_pod.taken_bytes
        may_have = min(free, self._quotas.left_for(spec.holder, self._for_jobs_bytes, used))
        if may_be_less and spec.memory_bytes > may_have:
            may_have = self._with_part_of_own(spec, may_have)
        if may_be_less and wanted > may_have > 0:
            log.warning(
                "job %s had %s bytes of this pod before its restart, and goes on with %s: there is no more",
                spec.name,
                f"{wanted:,}",
                f"{may_have:,}",
            )
            return may_have, wanted
        if _is_flexible(spec) and 0 < may_have < wanted:
            return may_have, wanted  # others give back what it lacks
        if wanted > may_have or wanted == 0:
            raise self._too_small(spec, wanted or claim.least_bytes, may_have, free - may_have, away)
        return wanted, wanted

    def _with_part_of_own(self, spec: JobSpec, may_have: int) -> int:
        """What a job has that is back with less than it names. Its team's other jobs that name theirs may have come
        back first, and taken all that there is: each keeps as large a part of what it names as this one gets."""
        named = [job for job in self.planned.values() if _keeps(job) and job.spec.holder == spec.holder]
        named = [job for job in named if job.spec.name != spec.name and job.spec.memory_bytes]
        have = may_have + sum(job.memory_bytes for job in named)
        of_all = spec.memory_bytes + sum(job.spec.memory_bytes for job in named)
        for job in named:
            part = have * job.spec.memory_bytes // of_all
            if part < job.memory_bytes:
                may_have += job.memory_bytes - part
                job.memory_is(part)
        return min(may_have, spec.memory_bytes)

    @property
    def _left_bytes(self) -> int:
        """Of the jobs' memory, by those whose memory does not change."""
        return self._for_jobs_bytes - sum(at_pod.memory_bytes for at_pod in self._all if _keeps(at_pod))

    def _too_small(
        self,
        spec: JobSpec,
        wanted_bytes: int,
        free_bytes: int,
        kept_for_others: int = 0,
        away: Collection[int] = (),
    ) -> RefillError:
        """:class:`MemoryTooSmall`; :class:`PodBusy` as long as it is not known whether those that hold memory live."""
        lacks = (
            f"memory too small: job {spec.name} wants {wanted_bytes:,} bytes and pod {self.settings.ordinal} has "
            f"{max(0, free_bytes):,} of {self.settings.memory_bytes:,} free ({self._who_holds(spec, kept_for_others)})"
        )
        if away:
            return PodBusy(
                f"{lacks}; whether all of these jobs still run is not known until pod {min(away)} answers: ask again",
                pod=self.settings.ordinal,
            )
        less = "ask for less memory_bytes" if spec.memory_bytes else "give the pods more memory"
        return MemoryTooSmall(
            f"{lacks}; end a job that is not needed (refill end NAME), or {less}", pod=self.settings.ordinal
        )

    def with_holders(self, spec: JobSpec, error: MemoryTooSmall) -> MemoryTooSmall:
        """The error of a job that did not get enough, with who has what it lacks, unless it asked for no more."""
        if spec.memory_bytes or not any(at_pod.taken_bytes for at_pod in self._all):
            return error
        return MemoryTooSmall(f"{error.message} ({self._who_holds(spec)})", **error.details)

    def _who_holds(self, spec: JobSpec, kept_for_others: int = 0) -> str:
        others = f"; kept for others: {kept_for_others:,}" * (kept_for_others > 0)
        return f"pinned: {self.pinned.memory_bytes:,}; taken: {self._taken(spec.holder)}{others}"

    def _taken(self, team: str) -> str:
        """By whom memory is taken; of other teams in sum, since nobody is told which jobs they run."""
        of_team = ("", team)
        holding = [at_pod for at_pod in self._all if at_pod.taken_bytes]
        mine = {at_pod.spec.name: at_pod for at_pod in holding if at_pod.spec.holder in of_team}
        largest = sorted(mine.items(), key=lambda each: -each[1].taken_bytes)
        taken = [
            f"{name} {at_pod.taken_bytes:,} ({'idle' if at_pod.use.sleeps else 'asked for'})"
            for name, at_pod in largest[:_NAMED_JOBS]
        ]
        if more := sum(at_pod.taken_bytes for _, at_pod in largest[_NAMED_JOBS:]):
            taken.append(f"{len(largest) - _NAMED_JOBS} more jobs {more:,}")
        if others := sum(at_pod.taken_bytes for at_pod in holding if at_pod.spec.name not in mine):
            taken.append(f"other teams {others:,}")
        return ", ".join(taken) or "none"


class _Room:
    """How much of the jobs' memory is free, while it is given to them. What each has is looked at once: of thousands of
    jobs it takes a while.

    :param jobs: all that there are.
    """

    def __init__(self, for_jobs_bytes: int, jobs: list[TakesMemory]) -> None:
        self._for_jobs_bytes, self._jobs = for_jobs_bytes, jobs
        self._free: int | None = None
        self._asleep: list[TakesMemory] | None = None
        """That have yet to let go, the longest idle last."""

    def make(self, wanted_bytes: int) -> int:
        """How much is free, once jobs that sleep have let go of what they hold, as far as that is needed."""
        if self._free is None:
            self._free = self._for_jobs_bytes - sum(at_pod.taken_bytes for at_pod in self._jobs)
        while self._free < wanted_bytes and (at_pod := self._next_asleep()) is not None:
            before = at_pod.taken_bytes
            at_pod.let_go()
            self._free += before - at_pod.taken_bytes
        return max(0, self._free)

    def memory_is(self, at_pod: TakesMemory, memory_bytes: int) -> None:
        """Fact: a job has so much now."""
        before = 0 if self._free is None else at_pod.taken_bytes
        at_pod.memory_is(memory_bytes)
        if self._free is not None:
            self._free += before - at_pod.taken_bytes

    def _next_asleep(self) -> TakesMemory | None:
        if self._asleep is None:
            asleep = [each for each in self._jobs if each.use.is_left or (each.claim is not None and each.use.sleeps)]
            self._asleep = sorted(asleep, key=lambda at_pod: at_pod.use.idle_seconds)
        return self._asleep.pop() if self._asleep else None


def _keeps(at_pod: TakesMemory) -> bool:
    """Whether it has what it has."""
    return at_pod.claim is None and not (at_pod.gave_all or at_pod.use.is_left)


def _is_flexible(spec: JobSpec) -> bool:
    """Whether its memory may change while it runs: it names none, and its order is planned."""
    return not spec.memory_bytes and spec.is_planned and spec.shuffle and spec.order == "keyed"
