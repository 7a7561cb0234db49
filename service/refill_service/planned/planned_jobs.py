"""Which planned jobs does this pod have, and by which plan? The one thing that pods and ranks must agree on.

A plan is made once, by pod 0, where no pod and no rank has one of that job: its memory is what pods have for the job
then. From then on it is brought along: by ranks that register the job at a pod that does not know it, by pods that ask
others for samples, and in states of loops. Where two plans of one name meet, one that a rank has received samples by
stands; if both are such, the request that shows it is refused, with both named.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Hashable, Iterable
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode
from weakref import WeakValueDictionary

import numpy as np

from refill.errors import (
    InvalidInput,
    JobConflict,
    MemoryTooSmall,
    PodUnreachable,
    RefillError,
    UnknownJob,
)
from refill.protocol.job_spec import JobSpec
from refill.protocol.plan_memory import asked_at_once
from refill.protocol.plan_settings import STORED_ORDER, PlanSettings
from refill.protocol.share_owners import share_owners
from refill_service.cache_core.admission import check_holder
from refill_service.cache_core.job_memory import check_tables, most_memory, way_to_more_memory
from refill_service.cache_core.planned.job_orders import JobOrders
from refill_service.cache_core.planned.job_plan import (
    SMALLEST_CHUNK,
    fitted_chunk_size,
    plan_memory,
    plan_of,
    planned_bytes,
    planned_chunk_size,
    with_plan,
)
from refill_service.cache_core.planned.posted_lists import AboutList, PostedLists, list_memory
from refill_service.cache_core.planned.shared_chunks import SharedChunks
from refill_service.cache_core.planned.shares import Shares
from refill_service.cache_core.record_pieces import holds_all
from refill_service.cache_core.sample_mapping import ChunkLayout, Int64Array
from refill_service.datasets.dataset_reader import Dataset
from refill_service.jobs.job_table import JobTable
from refill_service.memory.payload import Payload, check_largest_sample
from refill_service.object_store.store_counters import within
from refill_service.peers.peers import Peers
from refill_service.planned.job_records import JobRecords
from refill_service.planned.planned_job import PlannedJob
from refill_service.planned.planned_receipts import PlannedReceipts, last_digests
from refill_service.planned.pods_away import PodsAway, is_away, planned_path

log = logging.getLogger(__name__)

_OF_RANKS = ("world_size", "drop_last", "num_epochs", "batch_group")
"""Settings of a job that its ranks may change: the order does not follow from them."""


class PlannedJobs:
    """Knows the planned jobs of one pod and their plans.

    :param table: shares the pod's memory among these and its live jobs.
    """

    def __init__(self, jobs: dict[str, PlannedJob], table: JobTable, peers: Peers, away: PodsAway) -> None:
        self.jobs = jobs
        self._table, self._settings = table, table.settings
        self._peers, self._away = peers, away
        self.receipts = PlannedReceipts(jobs, table, away)
        self._beginning: dict[str, tuple[asyncio.Future[None], JobSpec]] = {}
        """Names of jobs that clients register here, of which the other pods have yet to be told."""
        self._shared: WeakValueDictionary[tuple[Hashable, ...], SharedChunks[Payload]] = WeakValueDictionary()
        """By read order and share, as long as a job reads there."""

    def find(
        self, name: str, plan_id: str | None = None, *, looked_at: bool = False, pod: int | None = None
    ) -> PlannedJob:
        """Raises :class:`UnknownJob`, for another plan of the name, too: who asks registers his.

        :param looked_at: by somebody who watches, which does not keep an idle job alive.
        :param pod: another one, which asks for samples for its ranks.
        """
        job = self.jobs.get(name)
        if job is None or (plan_id is not None and job.plan_id != plan_id):
            raise self._unknown(name)
        if not looked_at:
            self._table.is_asked(job, pod)
        return job

    def _unknown(self, name: str) -> UnknownJob:
        return UnknownJob(f"pod {self._settings.ordinal} knows no job {name} of this plan: register it", job=name)

    async def close(self) -> None:
        for job in list(self.jobs.values()):
            await job.close(self._table.stopping())
        self.jobs.clear()

    # How a job becomes known.

    async def register(
        self,
        spec: JobSpec,
        plan: PlanSettings | None,
        *,
        begun: bool,
        again: bool,
        since: float | None = None,
        at_once: int = 0,
    ) -> dict[str, Any]:
        """For a client: on this pod, and on all that can be reached.

        :param plan: that it brings; None: it knows none.
        :param begun: whether it has received samples by that plan, in this process or before the state that it goes on
            from.
        :param again: whether this process had registered the job before.
        :param since: when that was, as the first pod said; None: that is not known.
        :param at_once: positions that the loader of a rank asks for at once, workers x batch; 0: not known.
        """
        while (others := self._beginning.get(spec.name)) is not None:
            beginning, of_others = others
            await asyncio.wait([beginning])  # till its plan stands: nobody may receive anything by it before
            if plan is None and spec == of_others and (error := beginning.exception()) is not None:
                raise error  # in its place: else each would wait for the next one to fail
        if (known := self.jobs.get(spec.name)) is not None:
            job = await self.register_here(spec, plan, begun=begun, again=again, since=since, at_once=at_once)
            if job.plan_id != known.plan_id:
                await self._introduce(job, is_made_now=False)
            return self._info(job)
        beginning = asyncio.get_running_loop().create_future()
        self._beginning[spec.name] = beginning, spec
        try:
            job = await self._begin(spec, plan, begun=begun, again=again, since=since, at_once=at_once)
        except RefillError as error:
            beginning.set_exception(error)
            beginning.exception()  # known: nobody else may wait for it
            raise
        finally:
            del self._beginning[spec.name]
            if not beginning.done():
                beginning.set_result(None)
        return self._info(job)

    def _info(self, job: PlannedJob) -> dict[str, Any]:
        return job.info() | {"pods": list(self._settings.pod_urls)}

    async def _begin(
        self,
        spec: JobSpec,
        plan: PlanSettings | None,
        *,
        begun: bool,
        again: bool,
        since: float | None,
        at_once: int,
    ) -> PlannedJob:
        """A job that this pod does not know. Parameters as of :meth:`register`."""
        self._table.check_taking_jobs()
        self._table.opening.begin(spec.dataset, whole=True)
        announcing = asyncio.create_task(self._announce(spec))
        announcing.add_done_callback(lambda done: done.cancelled() or done.exception())
        is_made_now = False
        if plan is None:
            answers = await self._known_at(spec, self._settings.other_pods)
            plan, begun = self._plan_of_others(spec, answers)
            if plan is None:
                is_made_now = True
                plan, begun = await self._plan_of_first(spec, at_once, _away_by(answers))
        elif self._settings.client_tokens:
            await self._check_name(spec)
        try:
            job = await self.register_here(spec, plan, begun=begun, again=again, since=since, at_once=at_once)
        except MemoryTooSmall:
            if is_made_now and plan is not None:  # another pod has made it, and has the job
                await self._take_back_elsewhere(spec.name, plan.plan_id)
            raise
        try:
            await self._introduce(job, is_made_now=is_made_now and not begun)
        except RefillError:
            await self._take_back(job)
            raise
        return self.jobs.get(spec.name, job)

    async def register_here(
        self,
        spec: JobSpec,
        plan: PlanSettings | None,
        *,
        begun: bool,
        again: bool = False,
        of_pod: bool = False,
        since: float | None = None,
        at_once: int = 0,
    ) -> PlannedJob:
        """At this pod alone; parameters as of :meth:`register`. Raises :class:`JobConflict` when two plans or settings
        of the name contradict each other, and :class:`JobLost` when it was ended while the process that asks ran.

        :param of_pod: another pod has brought the plan. Of two that nobody has received anything by, all pods keep the
            one with the smaller id.
        :param since: when the run was registered at the first pod, as a pod said that has it; None: now.
        """
        known = self.jobs.get(spec.name)
        if known is None:
            await self._table.opened_ahead(spec)
        elif self._stays(known, spec, plan, begun=begun, of_pod=of_pod):
            return known
        async with self._table.making:
            known = self.jobs.get(spec.name)
            if known is None and (live := self._table.jobs.get(spec.name)) is not None:
                check_holder(spec.name, live.spec.holder, spec.holder)
                raise JobConflict(f"job {spec.name} runs with policy {live.spec.policy}, and you ask for planned")
            if known is not None and self._stays(known, spec, plan, begun=begun, of_pod=of_pod):
                return known
            ended_at = None if plan is None else self.receipts.ended_at(spec, plan.plan_id)
            if ended_at is not None and again and (since is None or since < ended_at):
                raise self._table.was_ended(spec.name)
            if known is not None:
                log.warning(
                    "job %s: plan %.8s, by which nobody has received anything, gives way", spec.name, known.plan_id
                )
                await self._close(known, self._unknown(spec.name))
            job = await self._make(spec, plan, at_once, confirmed=begun)
            self.receipts.goes_on(spec, job.plan_id)
            job.since = job.since if since is None else min(job.since, since)
            self.jobs[spec.name] = job
            self._table.share_memory()
            settings = job.orders.settings
            log.info(
                "job %s: %s, plan %.8s: %d shares, chunks of %d samples, memory for %s bytes",
                spec.name,
                spec.dataset,
                settings.plan_id,
                settings.num_shares,
                settings.chunk_size,
                f"{settings.memory_bytes:,}",
            )
            if (lacks := job.lacks(at_once)) is not None:
                log.warning("job %s: %s", spec.name, lacks)
            return job

    def _stays(self, known: PlannedJob, spec: JobSpec, plan: PlanSettings | None, *, begun: bool, of_pod: bool) -> bool:
        """Fact: somebody registers a job that this pod has. Returns whether it goes on by its plan, or that gives way
        to another one. Errors and parameters as of :meth:`register_here`."""
        check_holder(spec.name, known.spec.holder, spec.holder)
        self._check_settings(known, spec, plan)
        gives_way = begun or (of_pod and plan is not None and plan.plan_id < known.plan_id)
        if plan is None or plan.plan_id == known.plan_id or not gives_way:
            known.confirmed |= begun and plan is not None
            known.ranks_are(spec)
            self._table.is_asked(known)
            return True
        if known.confirmed and begun:
            raise JobConflict(
                f"job {spec.name} runs here by plan {known.plan_id:.8}, and you go on by plan {plan.plan_id:.8}: ranks "
                "of one run must go on from states of one run; end the job (refill end) and start all ranks from the "
                "same state, or use another name"
            )
        return known.confirmed

    async def other_plan(self, introduced: dict[str, Any]) -> None:
        """Fact: another pod has the job by another plan. Errors as those of :meth:`register_here`."""
        spec, plan = JobSpec.from_dict(introduced["spec"]), PlanSettings.from_dict(introduced["plan"])
        await self.register_here(
            spec, plan, begun=bool(introduced["confirmed"]), of_pod=True, since=introduced["since"]
        )

    def _check_settings(self, known: PlannedJob, spec: JobSpec, plan: PlanSettings | None) -> None:
        alike = replace(spec, **{name: getattr(known.spec, name) for name in _OF_RANKS})
        if plan is not None and spec.policy_settings == plan.policy_settings():
            alike = replace(
                alike, policy_settings=known.spec.policy_settings
            )  # which of two plans stands is told below
        known.spec.check_same(alike, memory_bytes=known.spec.memory_bytes)

    async def _announce(self, spec: JobSpec) -> None:
        """Let the other pods open the dataset already. Errors are left to what follows."""
        path, body = f"/peer/v1/jobs/{spec.name}/opening", {"dataset": spec.dataset, "whole": True}
        calls = (self._peers.call(pod, "POST", path, body) for pod in self._settings.other_pods)
        await asyncio.gather(*calls, return_exceptions=True)

    def _plan_of_others(
        self, spec: JobSpec, answers: dict[int, dict[str, Any] | BaseException]
    ) -> tuple[PlanSettings | None, bool]:
        """As a pod has it that has the job; one that somebody has received samples by, if there is one. Raises
        :class:`PodUnreachable` when none has it, and so many don't say so that ranks may have begun by a plan that
        nobody knows on this side of a network that is cut."""
        found = [answer for answer in answers.values() if isinstance(answer, dict)]
        for answer in sorted(found, key=lambda answer: not answer["confirmed"]):
            return PlanSettings.from_dict(answer["plan"]), bool(answer["confirmed"])
        has_said = sum(isinstance(answer, UnknownJob) for answer in answers.values())
        if 2 * (1 + has_said) <= self._settings.num_pods:
            silent = next(answer for answer in answers.values() if not isinstance(answer, UnknownJob))
            raise PodUnreachable(
                f"no plan is made for job {spec.name} while half of the pods or more can't say whether it has one: "
                f"{silent}"
            )
        return None, False

    async def _plan_of_first(
        self, spec: JobSpec, at_once: int, silent: Container[int]
    ) -> tuple[PlanSettings | None, bool]:
        """As the first pod makes it that is there, so that all who register the job at once get the same; and whether
        somebody has received samples by it. None: that is this pod.

        A pod is passed over when more than half of all say that they can't reach it, and none of them has the job or
        reaches it. Raises :class:`PodUnreachable` when fewer say so.

        :param silent: pods that did not answer a moment ago.
        """
        body = {"spec": spec.to_dict(), "at_once": at_once}
        for first in range(self._settings.ordinal):
            answers: list[Any] = [await self.known_or_made(spec, first, at_once, was_silent=first in silent)]
            if answers == [{}]:
                path = f"{planned_path(spec.name)}/made_by/{first}"
                asked = (
                    self._away.answer_of(pod, self._peers.call(pod, "POST", path, body), was_silent=pod in silent)
                    for pod in self._settings.other_pods
                    if pod != first
                )
                answers += await asyncio.gather(*asked, return_exceptions=True)
            for answer in answers:
                if isinstance(answer, dict) and answer:
                    return PlanSettings.from_dict(answer["plan"]), bool(answer["confirmed"])
                if isinstance(answer, BaseException) and not is_away(answer):
                    raise answer
            if 2 * answers.count({}) <= self._settings.num_pods:
                raise PodUnreachable(
                    f"no plan is made for job {spec.name}: pod {first} is to make it and can't be reached, and too few "
                    "other pods can say whether it is away"
                )
        return None, False

    async def known_or_made(
        self, spec: JobSpec, first: int, at_once: int, *, was_silent: bool = False
    ) -> dict[str, Any]:
        """A new job as this pod has it by now, or else as the first pod has it, which makes it if need be; empty: that
        can't be reached from here."""
        if (known := self.jobs.get(spec.name)) is not None:
            check_holder(spec.name, known.spec.holder, spec.holder)
            return known.introduction()
        asked = self._peers.call(first, "PUT", planned_path(spec.name), {"spec": spec.to_dict(), "at_once": at_once})
        was_silent = was_silent or first in self._away.away
        try:
            return await self._away.answer_of(first, asked, was_silent=was_silent)
        except RefillError as error:
            if not is_away(error):
                raise
            return {}

    async def _check_name(self, spec: JobSpec) -> None:
        """Whoever brings a plan may be of another team than the ranks of a job that this pod has lost: as long as it
        had the name here, they would be refused. Raises :class:`NotAllowed` when a pod knows it as another team's. Pods
        that are away, or give no sign of life, are not waited for."""
        await self._known_at(spec, [pod for pod in self._settings.other_pods if pod not in self._away.away])

    async def _known_at(self, spec: JobSpec, pods: Iterable[int]) -> dict[int, dict[str, Any] | BaseException]:
        """What each of these pods says of a job, or why it says nothing. Raises :class:`NotAllowed` as above."""
        pods = list(pods)
        asked = (self._away.answer_of(pod, self._peers.call(pod, "GET", planned_path(spec.name))) for pod in pods)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, dict):
                check_holder(spec.name, answer["spec"].get("holder", ""), spec.holder)
        return dict(zip(pods, answers, strict=True))

    async def _introduce(self, job: PlannedJob, *, is_made_now: bool) -> None:
        """To all other pods; one that can't be reached learns of it when it is asked for samples.

        :param is_made_now: its plan. Then more than half of the pods must have it, before anybody receives anything by
            it: so another one can't be made elsewhere. Raises :class:`PodUnreachable` when fewer can be told.
        """
        body = job.introduction()
        path = planned_path(job.spec.name)
        told = (
            self._away.answer_of(pod, self._peers.call(pod, "PUT", path, body)) for pod in self._settings.other_pods
        )
        answers = await asyncio.gather(*told, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not is_away(answer):
                raise answer
            if isinstance(answer, dict) and answer["plan"] != body["plan"]:
                await self.other_plan(answer)
        untold = [answer for answer in answers if isinstance(answer, BaseException)]
        if is_made_now and 2 * len(untold) >= self._settings.num_pods:
            raise PodUnreachable(
                f"job {job.spec.name} does not begin while half of the pods or more can't be told of it: {untold[0]}"
            )

    def most_memory(self, dataset: Dataset) -> int:
        """More than this no job on the dataset can use here, whatever its chunks and whoever else reads it: all of the
        dataset is in memory then."""
        parts = self._table.parts_of(dataset, planned=True, in_sweep=True)
        for_plan = plan_memory(dataset.num_samples, dataset.num_samples, 1)
        return most_memory(dataset.index.sample_bytes, parts) + for_plan

    async def _make(self, spec: JobSpec, plan: PlanSettings | None, at_once: int, *, confirmed: bool) -> PlannedJob:
        table, settings = self._table, self._settings
        table.check_taking_jobs()
        table.check_num_jobs(spec.holder)
        async with within(settings.wait_seconds, f"pod {settings.ordinal} waits to open {spec.dataset}"):
            dataset = await table.opening.take(spec.dataset, "" if plan is None else plan.dataset)
        try:
            return await self._made_of(spec, plan, dataset, at_once, confirmed=confirmed)
        except BaseException:
            await dataset.close()
            raise

    async def _made_of(
        self, spec: JobSpec, plan: PlanSettings | None, dataset: Dataset, at_once: int, *, confirmed: bool
    ) -> PlannedJob:
        table, settings = self._table, self._settings
        fingerprint = dataset.version
        if plan is not None and plan.dataset != fingerprint:
            raise JobConflict(
                f"dataset {spec.dataset} was replaced since job {spec.name} began: its plan is of version "
                f"{plan.dataset:.16}, which was not kept; end the job (refill end), and begin anew without its state",
                version=fingerprint,
            )
        if plan is not None:
            _check_plan(spec, plan, dataset.num_samples)
        largest_blob = int(np.diff(dataset.blobs.first_sample).max(initial=1))
        chunk_size = spec.chunk_size if plan is None else plan.chunk_size
        dataset.check_chunk_size(chunk_size)
        if dataset.group_samples is not None:
            chunk_size = dataset.group_samples
        leaves_it_open = not chunk_size and not spec.is_listed
        if not chunk_size:
            chunk_size = dataset.chunk_size_of(spec.policy) if spec.is_listed else min(SMALLEST_CHUNK, largest_blob)
        in_sweep = spec.read_seed is not None and not dataset.has_means
        parts = table.parts_of(dataset, planned=True, in_sweep=in_sweep)
        num_pods, num_chunks = settings.num_pods, -(-dataset.num_samples // chunk_size)
        for_plan, least_for_plan = (
            plan_memory(dataset.num_samples, count, num_pods, is_listed=spec.is_listed) for count in (num_chunks, 1)
        )
        claim = table.claim_of(spec, dataset, chunk_size, parts, for_plan)
        away = await table.until_others_are_known(claim)
        memory_bytes, share_bytes = table.memory_for(spec, claim, may_be_less=confirmed, away=away)
        lists = None
        if spec.is_listed:
            for_lists = list_memory(memory_bytes, dataset.num_samples)
            for_plan, least_for_plan = for_plan + for_lists, least_for_plan + for_lists
            lists = PostedLists(dataset.num_samples, for_lists)
        whole = holds_all(dataset.num_samples, is_listed=spec.is_listed)
        if whole:
            dataset.check_room(dataset.num_samples)
        check_tables(memory_bytes, for_plan, least_for_plan, spec.name, num_chunks, spec.world_size)
        samples_bytes = replace(parts, memory_bytes=max(0, share_bytes - for_plan)).abstract_bytes
        if plan is None:
            of_pod = samples_bytes
            if in_sweep and not spec.memory_bytes:  # all of a sweep are planned for the same, whoever is here already
                of_all = settings.pod_memory
                most = min(claim.most_bytes, int(of_all.kept_fraction * of_all.for_jobs_bytes))
                of_pod = replace(parts, memory_bytes=max(0, most - for_plan)).abstract_bytes
            spec, chunk_size = _planned_for(
                spec, of_pod, dataset, 0 if leaves_it_open else chunk_size, at_once, num_pods
            )
            plan = plan_of(spec, fingerprint, ChunkLayout(dataset.blobs.first_sample, chunk_size))
        else:
            spec = replace(spec, policy_settings=plan.policy_settings())
        layout = ChunkLayout(dataset.blobs.first_sample, chunk_size)
        shares = await asyncio.to_thread(Shares, layout, plan.num_shares)
        own = np.flatnonzero(share_owners(plan.num_shares, num_pods) == settings.ordinal).tolist()
        if not whole:  # and of those for which it may have to stand in
            dataset.check_room(min(dataset.num_samples, 2 * int(shares.sizes[own].sum())))
        records = await JobRecords.load(dataset, layout, shares, own, whole=whole)
        reach = await asyncio.to_thread(records.largest_reach)
        _check_reach(reach, samples_bytes, spec, layout.chunk_size, dataset, table)
        if lists is not None:  # else an answer is measured by the mean
            check_largest_sample(spec.name, records.own.length, settings.answer_limit_bytes)
        kept = await asyncio.to_thread(records.of_own_shares)
        if dataset.has_means:  # it has a place for each sample by its length
            kept = kept.between(0, 0)
        pinned = await table.pinned.leased(dataset.shared_as, kept)
        return PlannedJob(
            spec,
            JobOrders(plan, layout, records.lengths_of, shares),
            dataset,
            records,
            layout,
            settings=settings,
            memory_bytes=memory_bytes,
            for_plan=for_plan,
            samples_bytes=samples_bytes,
            lists=lists,
            parts=replace(parts, memory_bytes=memory_bytes),
            claim=None if spec.memory_bytes else replace(claim, least_bytes=min(claim.least_bytes, memory_bytes)),
            gate=table.gate,
            pinned=pinned,
            peers=self._peers,
            away=self._away,
            confirmed=confirmed,
            other_plan=self.other_plan,
            shared=self._shared_by(spec, plan, dataset) if in_sweep else None,
        )

    def _shared_by(self, spec: JobSpec, plan: PlanSettings, dataset: Dataset) -> Callable[[int], SharedChunks[Payload]]:
        """By share, what a job shares with others of its team that read the same bytes in the same order."""
        for name, other in self.jobs.items():
            theirs = other.orders.settings
            if (other.spec.holder, other.dataset.shared_as, theirs.read_seed) == (
                spec.holder,
                dataset.shared_as,
                plan.read_seed,
            ) and (theirs.chunk_size, theirs.num_shares) != (plan.chunk_size, plan.num_shares):
                log.warning(
                    "job %s reads for itself, though job %s has its read_seed: it has chunks of %d samples, and that "
                    "one of %d; %d shares, and that one %d. Give both the same chunk_size and shares",
                    *(spec.name, name, plan.chunk_size, theirs.chunk_size, plan.num_shares, theirs.num_shares),
                )
        order = spec.holder, dataset.shared_as, plan.dataset, plan.chunk_size, plan.num_shares, plan.read_seed

        def of_share(number: int) -> SharedChunks[Payload]:
            found = self._shared.get((*order, number))
            if found is None:
                found = self._shared[*order, number] = SharedChunks()
            return found

        return of_share

    async def warm(self, name: str, epoch: int, position: int) -> dict[str, int]:
        """Have all pods read what an epoch goes on with from a position on; see :meth:`PlannedJob.warm`. Raises what
        any of them does."""
        job = self.find(name)
        if not 0 <= position < max(1, job.layout.num_samples):
            raise InvalidInput(f"an epoch of job {name} has {job.layout.num_samples} positions, got {position}")
        path = f"{planned_path(name)}/warm?plan={job.plan_id}&epoch={epoch}&position={position}"
        calls = (self._peers.call(pod, "POST", path) for pod in self._settings.other_pods)
        parts = [job.shares.warm(epoch, position), *await asyncio.gather(*calls)]
        return {"pods": len(parts)} | {each: sum(part[each] for part in parts) for each in parts[0]}

    # Lists that ranks have.

    async def post_list(
        self, name: str, epoch: int, rank: int, about: AboutList, first: int, samples: Int64Array
    ) -> None:
        """Tell all pods that can be asked of a part of a rank's list."""
        job = self.find(name)
        await job.post_list(epoch, rank, about, first, samples)
        body = np.ascontiguousarray(samples, dtype="<i8").tobytes()
        query = urlencode({"plan": job.plan_id, "first": first} | about._asdict())
        path = f"{planned_path(name)}/epochs/{epoch}/ranks/{rank}/list?{query}"
        await self._away.answers_of(self._settings.other_pods, "PUT", path, body)

    # How it ends.

    async def end_here(self, name: str) -> None:
        """End a job on this pod, and keep what its ranks have received."""
        if (job := self.jobs.get(name)) is not None:
            digests = self.receipts.keep(job)
            await self._close(job, self._table.was_ended(name))
            digests |= await last_digests(job)

    async def remove_idle(self, idle_seconds: float) -> None:
        """A rank in one long step looks after its home alone: a job that is in use at one pod ends at none."""
        for name, job in list(self.jobs.items()):
            if job.use.idle_seconds <= idle_seconds or not await self._is_idle_elsewhere(name):
                continue
            if self.jobs.get(name) is job and job.use.idle_seconds > idle_seconds:
                log.info("job %s: nobody asked for %.0f s, removed", name, idle_seconds)
                await self.end_here(name)

    async def _is_idle_elsewhere(self, name: str) -> bool:
        """It may be in use at a pod that does not answer."""
        asked = (self._peers.call(pod, "GET", planned_path(name)) for pod in self._settings.other_pods)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return all(
            isinstance(answer, UnknownJob) or (isinstance(answer, dict) and answer.get("idle", True))
            for answer in answers
        )

    async def _take_back(self, job: PlannedJob) -> None:
        """A job that not all pods can have, from all of them."""
        await self._take_back_elsewhere(job.spec.name, job.plan_id)
        if self.jobs.get(job.spec.name) is job:
            await self._close(job, self._unknown(job.spec.name))

    async def _take_back_elsewhere(self, name: str, plan_id: str) -> None:
        path = f"{planned_path(name)}?plan={plan_id}"
        told = (self._away.answer_of(pod, self._peers.call(pod, "DELETE", path)) for pod in self._settings.other_pods)
        await asyncio.gather(*told, return_exceptions=True)

    async def take_back_here(self, name: str, plan_id: str) -> None:
        """Fact: a pod that brought this plan can't have the job. One that somebody has received samples by stays."""
        job = self.jobs.get(name)
        if job is not None and job.plan_id == plan_id and not job.confirmed:
            await self._close(job, self._unknown(name))

    async def _close(self, job: PlannedJob, why: RefillError) -> None:
        """:param why: what requests under way get."""
        if self.jobs.get(job.spec.name) is job:
            del self.jobs[job.spec.name]
        await job.close(why)
        self._table.pinned.release(job.pinned)
        self._table.share_memory()


def _away_by(answers: dict[int, dict[str, Any] | BaseException]) -> set[int]:
    """The pods that did not answer."""
    return {pod for pod, answer in answers.items() if isinstance(answer, BaseException) and is_away(answer)}


def _planned_for(
    spec: JobSpec, samples_bytes: int, dataset: Dataset, chunk_size: int, at_once: int, num_pods: int
) -> tuple[JobSpec, int]:
    """A job with all settings of its plan, and its chunk size.

    :param samples_bytes: that it has for samples on each pod; ``chunk_size``: 0: it is chosen here.
    """
    sample_bytes = dataset.index.sample_bytes / max(1, dataset.num_samples)
    of_loaders = asked_at_once(at_once, spec.num_groups, sample_bytes, num_pods)
    if not chunk_size:
        chunk_size = planned_chunk_size(
            dataset.num_samples,
            sample_bytes,
            int(np.diff(dataset.blobs.first_sample).max(initial=1)),
            planned_bytes(spec, samples_bytes, num_pods, of_loaders),
            num_pods,
            dataset.classes_in_pieces,
        )
        chunk_size = fitted_chunk_size(chunk_size, dataset.blobs.first_sample)
    return with_plan(spec, samples_bytes, num_pods, chunk_size, sample_bytes, of_loaders), chunk_size


def _check_reach(
    reach: int, samples_bytes: int, spec: JobSpec, chunk_size: int, dataset: Dataset, table: JobTable
) -> None:
    """A chunk is read whole, if nothing else is in memory. Raises :class:`MemoryTooSmall` for one that is larger."""
    if reach > samples_bytes:
        error = MemoryTooSmall(
            f"memory too small: job {spec.name} has {samples_bytes:,} bytes for samples on a pod, and its largest "
            f"chunk of {chunk_size} samples takes {reach:,} of its blob; "
            f"{way_to_more_memory(spec.memory_bytes)} or {dataset.way_to_smaller_chunks}",
            samples_bytes=samples_bytes,
            largest_chunk_bytes=reach,
        )
        raise table.with_holders(spec, error)


def _check_plan(spec: JobSpec, plan: PlanSettings, num_samples: int) -> None:
    """Raises :class:`JobConflict` for the plan of a job with other settings, and :class:`InvalidInput` for one that
    nobody has made of this dataset."""
    if plan.num_samples != num_samples:
        raise InvalidInput(f"the plan is of {plan.num_samples:,} samples, and the dataset has {num_samples:,}")
    given: dict[str, Any] = {"seed": spec.seed, "read_seed": spec.read_seed}
    given |= {"chunk_size": spec.chunk_size or plan.chunk_size}
    given |= {"selection": ""} | {name: value for name, value in spec.policy_settings.items() if value}
    planned: dict[str, Any] = {"seed": plan.seed, "read_seed": plan.read_seed, "chunk_size": plan.chunk_size}
    planned |= {"selection": ""} | plan.policy_settings()
    if not spec.is_listed:
        given["shuffle"], planned["shuffle"] = spec.shuffle, not plan.keeps_stored_order
        given["selection"] = given["selection"] or STORED_ORDER * (not spec.shuffle)
    for name, value in given.items():
        if planned[name] != value:
            raise JobConflict(
                f"job {spec.name} is to go on by a plan with {name} {planned[name]!r}, and has {name} {value!r}: give "
                "it the same as before, or begin it anew without the state"
            )
