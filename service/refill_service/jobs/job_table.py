"""Which jobs does this pod have, and with how much memory? Finds, makes and closes them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from refill.errors import JobConflict, JobError, JobLost, JobMoved, MemoryTooSmall, PodStopping, RefillError, UnknownJob
from refill.protocol.incarnation import is_later, same_line
from refill.protocol.job_spec import JobSpec
from refill.protocol.part_names import whole_of
from refill_service.cache_core.job_holder import check_holder
from refill_service.cache_core.job_lifecycle import Begin, is_another
from refill_service.cache_core.job_memory import JobMemory, check_tables, table_memory
from refill_service.cache_core.kept_runs import RunPart
from refill_service.cache_core.memory_shares import Claim, memory_shares
from refill_service.cache_core.policies import drain, redox
from refill_service.cache_core.posted_traces import memory_with_traces, trace_memory
from refill_service.cache_core.sample_mapping import ChunkLayout
from refill_service.cache_core.score_book import score_memory
from refill_service.cache_core.team_quotas import TeamQuotas
from refill_service.datasets.dataset_reader import Dataset
from refill_service.datasets.early_opening import EarlyOpening
from refill_service.jobs.home import Home
from refill_service.jobs.job import Job
from refill_service.jobs.job_at_pod import JobAtPod
from refill_service.jobs.job_use import GONE_SECONDS, JobUse
from refill_service.jobs.owner import Owner
from refill_service.jobs.rank_waits import RankWaits
from refill_service.jobs.run_parts import part_of_job, part_of_journal
from refill_service.journal.journal import Journal, KeptJob
from refill_service.journal.kept_parts import KeptParts
from refill_service.memory.byte_gate import ByteGate
from refill_service.memory.pinned_tier import PinnedTier
from refill_service.object_store.store_patience import within
from refill_service.peers.job_peers import Introduce, JobPeers
from refill_service.peers.peers import Peers
from refill_service.settings import Settings

__all__ = ["JobTable"]

log = logging.getLogger(__name__)

_NAMED_JOBS = 20
_STEP_BYTES = 1 << 16
"""Less is not moved from job to job."""
_LOOK_SECONDS = 0.05

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
    :param kept_parts: of runs that have ended.
    """

    def __init__(
        self,
        settings: Settings,
        quotas: TeamQuotas,
        peers: Peers,
        journal: Journal,
        gate: ByteGate,
        pinned: PinnedTier,
        opening: EarlyOpening,
        kept_parts: KeptParts,
    ) -> None:
        self.settings = settings
        self.journal = journal
        self.opening = opening
        self.kept_parts = kept_parts
        self.jobs: dict[str, JobAtPod] = {}
        self.planned: Mapping[str, TakesMemory] = {}
        """Jobs whose order is planned, which share the pod's memory with these."""
        self.end_planned: Callable[[str], Awaitable[None]] = _no_such_job
        self.was_left: Callable[[str], None] = lambda name: None
        """Is told of a job that nobody asks for here any more."""
        self._gives_way: JobAtPod | None = None
        """It ends as soon as the next run of its name is made, which counts its memory as free."""
        self.takes_jobs = True
        """False when the pod ends."""
        self.waits = RankWaits(settings.wait_seconds)
        """Of requests of all jobs, for other ranks."""
        self._quotas = quotas
        self._peers = peers
        self.gate = gate
        self.pinned = pinned
        self._keep_what_was_ending()

    def find(
        self, name: str, incarnation: str | None = None, *, looked_at: bool = False, pod: int | None = None
    ) -> JobAtPod:
        """Raises :class:`UnknownJob`, or :class:`JobLost` when the asker means an earlier registration.

        :param looked_at: by somebody who watches, which does not keep an idle job alive.
        :param pod: another one, which asks for samples for its ranks.
        """
        at_pod = self.jobs.get(name)
        if at_pod is None or at_pod.job.life.is_but_a_name_beside(incarnation or ""):
            raise UnknownJob(f"pod {self.settings.ordinal} knows no job {name}: register it first", job=name)
        if incarnation is not None and incarnation != at_pod.job.incarnation:
            if same_line(incarnation, at_pod.job.incarnation):
                raise self._moved(name, is_later(at_pod.job.incarnation, incarnation))
            raise at_pod.job.recovering() if at_pod.job.life.recovering else is_another(name)
        if not looked_at:
            self.is_asked(at_pod, pod)
        return at_pod

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
        kept = sum(each.memory_bytes for each in self._staying if _keeps(each))
        least = sum(each.claim.least_bytes for each in self._awake() if each.claim is not None)
        if kept + at_pod.memory_bytes + least > self._for_jobs_bytes:
            raise self._too_small(at_pod.spec, at_pod.memory_bytes, self._for_jobs_bytes - kept - least)
        at_pod.gave_all = False

    def _moved(self, name: str, here: bool) -> JobError:
        if here:
            return JobMoved(f"job {name} has moved to {self.settings.num_pods} pods: register it again", job=name)
        return UnknownJob(f"pod {self.settings.ordinal} does not know that job {name} has moved", job=name)

    def of_team(self, team: str) -> dict[str, JobAtPod]:
        """Those that a team may hear of: its own, and what nobody registered with a token."""
        return {name: at_pod for name, at_pod in self.jobs.items() if at_pod.job.spec.holder in ("", team)}

    def parts_of_rank(self, name: str, rank: int) -> dict[str, Any]:
        """Whether a rank has come to this job here, and the jobs of other parts of the same dataset that it reads now:
        for ranks that look whether all read the same. Raises :class:`UnknownJob`."""
        jobs = {**self.planned, **self.jobs}
        if name not in jobs:
            raise UnknownJob(f"pod {self.settings.ordinal} knows no job {name}", job=name)
        asked, whole = jobs[name], whole_of(name)
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
        """Whose token a job was registered with; None when this pod has no such job, not even of before a restart."""
        for of_kind in (self.jobs, self.planned):
            if name in of_kind:
                return of_kind[name].spec.holder
        return self.journal.holder_of(name)

    def stopping(self) -> PodStopping:
        return PodStopping(f"pod {self.settings.ordinal} stops", pod=self.settings.ordinal)

    def check_taking_jobs(self) -> None:
        """Raises :class:`PodStopping` when the pod ends."""
        if not self.takes_jobs:
            raise self.stopping()

    def check_num_jobs(self, team: str) -> None:
        """Raises :class:`NotAllowed` when a team may have no more."""
        self._quotas.check_jobs(team, sum(at_pod.spec.holder == team for at_pod in self._staying))

    async def make(
        self,
        spec: JobSpec,
        begin: Begin,
        introduce: Introduce,
        kept: KeptJob | None = None,
    ) -> JobAtPod:
        """A job that is not in the table yet.

        :param begin: how it came here; its incarnation is not empty.
        :param introduce: registers it at a pod that was restarted.
        :param kept: what the pod's journal has of it.
        """
        settings = self.settings
        self.check_taking_jobs()
        if (planned := self.planned.get(spec.name)) is not None:
            check_holder(spec.name, planned.spec.holder, spec.holder)
            raise JobConflict(
                f"job {spec.name} runs with policy planned, and you ask for {spec.policy}; end it first (refill end), "
                "or use another name"
            )
        if kept is None:
            self.check_num_jobs(spec.holder)
        # Opening goes on, for when the client comes again.
        async with within(settings.wait_seconds, f"pod {settings.ordinal} waits to open {spec.dataset}"):
            dataset = await self.opening.take(spec.dataset)
        try:
            parts = self.parts_of(dataset)
            chunk_size = spec.chunk_size or dataset.chunk_size_of(spec.policy)
            claim = self.claim_of(spec, dataset, chunk_size, parts)
            kept_bytes = 0 if kept is None else kept.header["memory_bytes"]
            await self.until_others_are_known(claim)
            memory_bytes, _ = self.memory_for(spec, kept_bytes, claim, ran_before=begin.ran_before)
            # Before anything is made in its size; shares are about equal.
            dataset.check_room(-(-dataset.num_samples // settings.num_pods))
            layout = ChunkLayout(dataset.blobs.first_sample, chunk_size)
            share = layout.share(settings.ordinal, settings.num_pods)
            tables_bytes = table_memory(share.num_samples, share.num_chunks, spec.world_size)
            check_tables(memory_bytes, tables_bytes, spec.name, share.num_chunks, spec.world_size)
            records = await dataset.load_records(share.first_sample, share.end_sample)
            for_traces = 0
            if spec.order == "explicit":
                for_traces = trace_memory(memory_bytes, dataset.num_samples, names_classes=spec.names_classes)
            for_scores = score_memory(share.num_samples) if spec.is_by_importance else 0
            memory = replace(parts, memory_bytes=max(0, memory_bytes - for_traces - for_scores))
            # It may come to have more, and the number of its abstract chunks stays.
            most = replace(parts, memory_bytes=max(memory_bytes, claim.most_bytes)) if _is_flexible(spec) else memory
            job = self._job_of(
                spec,
                dataset,
                records,
                layout,
                ordinal=settings.ordinal,
                num_pods=settings.num_pods,
                memory_bytes=memory_bytes,
                abstract_bytes=memory.abstract_bytes,
                most_abstract_bytes=most.abstract_bytes,
                incarnation=begin.incarnation,
                trace_bytes=for_traces,
                begin=begin,
                journal_is_whole=kept is not None and kept.whole,
            )
            pinned = self.pinned.lease(dataset.shared_as, records)
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
            begin.incarnation,
            settings.ordinal,
            settings.num_pods,
            self._peers,
            settings.wait_seconds,
            introduce,
        )
        peers.table_size = owner.table_size
        home = Home(job, owner, peers, memory.remote_bytes)
        claim = replace(claim, least_bytes=min(claim.least_bytes, memory_bytes))
        at_pod = JobAtPod(job, owner, home, peers, pinned, parts, claim if _is_flexible(spec) else None)
        owner.books.epoch_ended = at_pod.epoch_ended
        if kept is not None:
            at_pod.ended |= kept.receipts
        return at_pod

    def _job_of(self, spec: JobSpec, *of_dataset: Any, **rest: Any) -> Job:
        try:
            return Job(spec, *of_dataset, **rest)
        except MemoryTooSmall as error:
            raise self._with_holders(spec, error) from None

    def put(self, at_pod: JobAtPod) -> None:
        self.jobs[at_pod.job.spec.name] = at_pod
        self.share_memory()

    def share_memory(self) -> None:
        """Fact: a job has come, has gone, sleeps or has woken, or some time has passed. Each that runs gets its share
        of what those that sleep leave; one that is to have less gives it back at once."""
        for at_pod in self._all:
            if at_pod.use.is_found_left():
                log.info("job %s: nobody asks for it any more, and others may have its memory", at_pod.spec.name)
                self.was_left(at_pod.spec.name)
            if at_pod.claim is not None and at_pod.use.sleeps and at_pod.taken_bytes < at_pod.memory_bytes:
                at_pod.memory_is(at_pod.taken_bytes)
        awake = self._awake()
        self._give(awake, self._shares(awake))

    def _give(self, awake: list[TakesMemory], shares: list[int]) -> None:
        more = {at_pod.spec.name: share - at_pod.memory_bytes for at_pod, share in zip(awake, shares, strict=True)}
        for at_pod in sorted(awake, key=lambda at_pod: more[at_pod.spec.name]):  # who gives back first
            wanted = more[at_pod.spec.name]
            if wanted > 0:
                wanted = min(wanted, self._make_room(wanted + _STEP_BYTES) // _STEP_BYTES * _STEP_BYTES)
            if wanted:
                at_pod.memory_is(at_pod.memory_bytes + wanted)

    async def until_others_are_known(self, claim: Claim) -> None:
        """A job comes. Processes of others that are gone are known to be in a moment, and then it has more."""
        ends = time.monotonic() + 2 * GONE_SECONDS
        while time.monotonic() < ends and any(at_pod.use.may_be_left for at_pod in self._staying):
            awake = self._awake()
            *others, own = self._shares(awake, claim)
            gives = any(share < at_pod.memory_bytes for share, at_pod in zip(others, awake, strict=True))
            if own >= claim.most_bytes and not gives:
                return
            await asyncio.sleep(_LOOK_SECONDS)
            self.share_memory()

    @property
    def _all(self) -> list[TakesMemory]:
        return [*self.jobs.values(), *self.planned.values()]

    @property
    def _staying(self) -> list[TakesMemory]:
        """Those whose memory is taken."""
        return [at_pod for at_pod in self._all if at_pod is not self._gives_way]

    def _awake(self) -> list[TakesMemory]:
        """Those that run, and whose memory may change."""
        return [at_pod for at_pod in self._staying if at_pod.claim is not None and not at_pod.use.sleeps]

    def _shares(
        self, running: list[TakesMemory], coming: Claim | None = None, taken_bytes: int = 0, team: str = ""
    ) -> list[int]:
        """Of those whose memory may change, and last of one that comes.

        :param taken_bytes: by one of this team that comes, and gets as much as it says.
        """
        kept: Counter[str] = Counter({team: taken_bytes})
        for at_pod in self._staying:
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

    def _make_room(self, wanted_bytes: int) -> int:
        """How much is free, once jobs that sleep have let go of what they hold, as far as that is needed."""
        free = self._free_bytes()
        asleep = [each for each in self._staying if each.use.is_left or (each.claim is not None and each.use.sleeps)]
        for at_pod in sorted(asleep, key=lambda at_pod: -at_pod.use.idle_seconds):
            if free >= wanted_bytes:
                break
            at_pod.let_go()
            free = self._free_bytes()
        return max(0, free)

    def _free_bytes(self) -> int:
        return self._for_jobs_bytes - sum(at_pod.taken_bytes for at_pod in self._staying)

    def parts_of(self, dataset: Dataset, *, planned: bool = False) -> JobMemory:
        sample_bytes = dataset.index.sample_bytes / max(1, dataset.num_samples)
        return self.settings.pod_memory.parts(sample_bytes, planned=planned)

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
            with_traces = partial(memory_with_traces, num_samples=dataset.num_samples, names_classes=spec.names_classes)
            most_bytes = with_traces(most_bytes)
            least_bytes = min(most_bytes, with_traces(least_bytes))
        return Claim(spec.holder, least_bytes, most_bytes)

    def begin_journal(self, at_pod: JobAtPod) -> None:
        """Not before all is known that is to be in it: what a journal lacks was never delivered. May be put off until
        an epoch opens."""
        job, owner = at_pod.job, at_pod.owner
        if not owner.snapshots_say_all:
            owner.begin_journal = partial(self.begin_journal, at_pod)
            return
        owner.begin_journal = lambda: None
        header = {
            "spec": job.spec.to_dict(),
            "incarnation": job.incarnation,
            "fingerprint": job.info()["fingerprint"],
            "memory_bytes": job.memory_bytes,
            "num_pods": job.num_pods,
            "num_samples": job.layout.num_samples,
            "share": [job.share.first_sample, job.share.end_sample],
        }
        owner.journal = self.journal.begin(job.spec.name, header, owner.snapshot, owner.epochs_to_keep)

    async def remove(self, name: str, holder: str | None = None, why: RefillError | None = None) -> bool:
        """End a job on this pod, free its memory and keep its receipts alone; False when there is none.

        :param holder: whose token asks for it; None: a pod for reasons of its own. Raises :class:`NotAllowed` when the
            job belongs to another one.
        :param why: the answer to requests under way; None: that somebody has ended it.
        """
        if holder is not None and (held_by := self.holder(name)) is not None:
            check_holder(name, held_by, holder)
        if name in self.planned:
            await self.end_planned(name)
            return True
        ended = self.jobs.pop(name, None) or self.journal.find(name)
        if ended is None:
            return False
        self.journal.end(name, _incarnation_of(ended))
        await self._keep_receipts_of(ended, why or self.was_ended(name))
        return True

    @contextlib.contextmanager
    def giving_way(self, name: str) -> Iterator[None]:
        """While the next run of this name is made. If that fails, because the store is away, say, the one that is there
        goes on as if nothing had been."""
        self._gives_way = self.jobs.get(name)
        try:
            yield
        finally:
            self._gives_way = None

    async def replace(self, at_pod: JobAtPod) -> None:
        """Put a job in the place of a run of its name that has ended, and end that as :meth:`remove` does. A pod that
        is killed meanwhile has either of them."""
        name = at_pod.job.spec.name
        ended = self.jobs.pop(name, None) or self.journal.find(name)
        if ended is not None:
            self.journal.end(name, _incarnation_of(ended))
        self.begin_journal(at_pod)
        self.put(at_pod)
        if ended is not None:
            await self._keep_receipts_of(ended, self.was_ended(name))

    async def _keep_receipts_of(self, ended: JobAtPod | KeptJob, why: RefillError) -> None:
        part: RunPart | None
        if isinstance(ended, KeptJob):
            part = await asyncio.to_thread(part_of_journal, ended, self.settings.ordinal, time.time())
        else:
            await self.close_job(ended, why)
            self.share_memory()
            part = await part_of_job(ended, time.time())
        await self._keep(part, _incarnation_of(ended))

    def _keep_what_was_ending(self) -> None:
        for kept in self.journal.was_ending():
            part: RunPart | None = part_of_journal(kept, self.settings.ordinal, time.time())
            if part is not None and any(part.key == each.key for each in self.kept_parts.of(*part.key[:2])):
                part = None  # it was kept, and says more
            self._keep_here(part, kept.header["incarnation"])

    def _keep_here(self, part: RunPart | None, incarnation: str) -> None:
        """Before the journal goes, so that this pod may be killed at any time."""
        if part is not None and part.about["epochs"]:
            self.kept_parts.put(part)
        self.journal.receipts_are_kept(incarnation)

    async def _keep(self, part: RunPart | None, incarnation: str) -> None:
        """Here, and at the pod after this one: a pod that is restarted does not lose it."""
        self._keep_here(part, incarnation)
        if part is None or not part.about["epochs"]:
            return
        following = (self.settings.ordinal + 1) % self.settings.num_pods
        if following != self.settings.ordinal:
            with contextlib.suppress(RefillError, TimeoutError):
                async with asyncio.timeout(_GIVE_SECONDS):
                    path = f"/peer/v1/jobs/{part.about['job']}/ended"
                    await self._peers.call(following, "PUT", path, part.encode())

    async def forget(self, name: str) -> None:
        """Let go of a job that could not be taken up, as if this pod had never heard of it; journals stay."""
        if (at_pod := self.jobs.pop(name, None)) is not None:
            await self.close_job(at_pod, at_pod.job.recovering())
            self.journal.let_go(name, at_pod.owner.journal)

    async def close_job(self, at_pod: JobAtPod, why: RefillError) -> None:
        """Requests under way end with ``why``."""
        if at_pod.recovery is not None:
            at_pod.recovery.cancel()
            await asyncio.gather(at_pod.recovery, return_exceptions=True)
        await at_pod.home.close(why)
        await at_pod.owner.close(why)
        await at_pod.job.dataset.close()
        self.pinned.release(at_pod.pinned)

    def was_ended(self, name: str) -> JobLost:
        return JobLost(f"job {name} was ended while it was asked for samples", job=name)

    def memory_for(self, spec: JobSpec, kept_bytes: int, claim: Claim, *, ran_before: bool) -> tuple[int, int]:
        """``(what it gets now, its share)``: others may have reads under way into what they have given back.

        :param kept_bytes: what the job has had before a restart, whatever its team has now; 0: it is a new one.
        :param claim: of a job that names no memory, so that others find room.
        :param ran_before: it ran before a restart, and goes on with less where its policy can.
        """
        wanted = spec.memory_bytes or kept_bytes
        awake = self._awake()
        if not _is_flexible(spec):  # it will not give back: others that are like it find some, too
            most_bytes = int(self._left_bytes * self.settings.job_memory_fraction)
            claim = replace(claim, most_bytes=max(0, min(claim.most_bytes, most_bytes)))
        if not spec.memory_bytes and (not kept_bytes or _is_flexible(spec)):
            *shares, wanted = self._shares(awake, claim)
        else:
            least = sum(each.claim.least_bytes for each in awake if each.claim is not None)
            taken_bytes = min(wanted, max(0, self._left_bytes - least))
            shares = self._shares(awake, taken_bytes=taken_bytes, team=spec.holder)
        self._give(awake, [min(share, at_pod.memory_bytes) for share, at_pod in zip(shares, awake, strict=True)])
        free = self._make_room(wanted)
        used: Counter[str] = Counter()
        for at_pod in self._staying:
            used[at_pod.spec.holder] += at_pod.taken_bytes
        may_have = free if kept_bytes else min(free, self._quotas.left_for(spec.holder, self._for_jobs_bytes, used))
        slots_stay = spec.shuffle and spec.policy == redox.KIND.name
        if ran_before and wanted > may_have > 0 and not slots_stay:
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
            to_do = ""
            if ran_before and slots_stay:
                to_do = (
                    "; policy redox keeps as many slots as it had: give the pod its memory back, or end the job and "
                    "begin the epoch anew"
                )
            raise self._too_small(spec, wanted or claim.least_bytes, may_have, free - may_have, to_do)
        return wanted, wanted

    @property
    def _left_bytes(self) -> int:
        """Of the jobs' memory, by those whose memory does not change."""
        return self._for_jobs_bytes - sum(at_pod.memory_bytes for at_pod in self._staying if _keeps(at_pod))

    def _too_small(
        self, spec: JobSpec, wanted_bytes: int, free_bytes: int, kept_for_others: int = 0, to_do: str = ""
    ) -> MemoryTooSmall:
        less = "ask for less memory_bytes" if spec.memory_bytes else "give the pods more memory"
        return MemoryTooSmall(
            f"memory too small: job {spec.name} wants {wanted_bytes:,} bytes and pod {self.settings.ordinal} has "
            f"{max(0, free_bytes):,} of {self.settings.memory_bytes:,} free ({self._who_holds(spec, kept_for_others)})"
            f"{to_do or f'; end a job that is not needed (refill end NAME), or {less}'}",
            pod=self.settings.ordinal,
        )

    def _with_holders(self, spec: JobSpec, error: MemoryTooSmall) -> MemoryTooSmall:
        """The error of a job that did not get enough, with who has what it lacks."""
        if not any(at_pod.taken_bytes for at_pod in self._staying):
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


async def _no_such_job(name: str) -> None:
    raise UnknownJob(f"there is no planned job {name}", job=name)


def _incarnation_of(job: JobAtPod | KeptJob) -> str:
    return job.job.incarnation if isinstance(job, JobAtPod) else str(job.header["incarnation"])


def _keeps(at_pod: TakesMemory) -> bool:
    """Whether it has what it has."""
    return at_pod.claim is None and not (at_pod.gave_all or at_pod.use.is_left)


def _is_flexible(spec: JobSpec) -> bool:
    """Whether its memory may change while it runs: it names none, and its policy reads on with less, or with more."""
    return (
        not spec.memory_bytes and spec.policy in (drain.KIND.name, "planned") and spec.shuffle and spec.order == "keyed"
    )
