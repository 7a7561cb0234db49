"""How does a live job come to all pods, and how does it end on all of them?

A live job is on all pods or on none. Each pod has in its memory alone who got what of its share: when one is restarted,
that run of the job is lost. It is ended everywhere, and its ranks get :class:`JobLost`.

A client registers a job at any pod. That has pod 0 do it, which names the *run* of the job, its incarnation, and makes
it at itself and at all others. Pod 0 knows by which process each of them takes part, and the successor of that process
does not get the run: so no two processes ever hand out samples of one share for one run.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable
from functools import partial
from typing import Any
from urllib.parse import quote, urlencode

from refill.errors import InvalidInput, JobConflict, JobLost, PodBusy, RefillError, UnknownJob
from refill.protocol.job_spec import JobSpec
from refill_service.cache_core.admission import check_holder
from refill_service.jobs.job import Job
from refill_service.jobs.job_at_pod import JobAtPod
from refill_service.jobs.job_table import JobTable
from refill_service.jobs.job_use import GONE_SECONDS
from refill_service.peers.peers import Peers

log = logging.getLogger(__name__)

LEADER = 0
"""The pod that names runs, and makes plans of planned jobs."""
_LOOK_SECONDS = 0.1
_ASK_SECONDS = 1.0


class LiveJobs:
    """Registers live jobs on all pods, and ends them on all, as one pod does its part."""

    def __init__(self, table: JobTable, peers: Peers) -> None:
        self.process = uuid.uuid4().hex
        """Names this process of the pod."""
        self._table = table
        self._settings = table.settings
        self._peers = peers
        self._rounds: dict[str, tuple[JobSpec, asyncio.Task[dict[str, Any]]]] = {}
        """At pod 0: registrations under way, by job."""
        self.ending: dict[str, asyncio.Task[None]] = {}
        """By incarnation."""

    async def close(self) -> None:
        tasks = [*(task for _, task in self._rounds.values()), *self.ending.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # Registration, by clients at any pod, and by that pod at pod 0.

    async def register(self, spec: JobSpec, incarnation: str = "") -> dict[str, Any]:
        """Register a job on every pod; registering it again with the same settings changes nothing.

        :param incarnation: the run that the client goes on with; empty: whichever there is, or a new one.

        Raises :class:`JobLost` where the pod does not have that run, :class:`JobConflict` for other settings, and
        :class:`NotAllowed` for a job of another team.
        """
        if incarnation:
            at_pod = await self._found(spec, incarnation)
        else:
            if spec.name not in self._table.jobs:
                self._table.check_taking_jobs()
                self._table.opening.begin(spec.dataset)
            if self._settings.ordinal == LEADER:
                led = await self.lead(spec)
            else:
                led = await self._peers.call(LEADER, "PUT", _path(spec.name), {"spec": spec.to_dict()})
            try:
                at_pod = self._table.find(spec.name, led["incarnation"])
            except UnknownJob as error:
                raise PodBusy(f"job {spec.name} was ended while it was registered: register it again") from error
        return at_pod.job.info() | {"pods": list(self._settings.pod_urls)}

    async def _found(self, spec: JobSpec, incarnation: str) -> JobAtPod:
        try:
            at_pod = self._table.find(spec.name, incarnation)
        except UnknownJob as error:
            other = self._table.jobs.get(spec.name)
            if other is not None:
                check_holder(spec.name, other.spec.holder, spec.holder)
            why = f"pod {self._settings.ordinal} was restarted" if other is None else "another run of it has begun"
            lost = await self._why_lost(spec, incarnation, why)
            self._end_soon(spec, incarnation, lost)
            raise lost from error
        _check_same(at_pod.job, spec)
        return at_pod

    async def _why_lost(self, spec: JobSpec, incarnation: str, why: str) -> JobLost:
        """As another pod says of a run that this one does not have, if one answers at once that knows more."""
        path = f"{_path(spec.name)}?{urlencode({'incarnation': incarnation})}"
        calls = [asyncio.create_task(self._peers.call(pod, "GET", path)) for pod in self._settings.other_pods]
        if calls:
            await asyncio.wait(calls, timeout=_ASK_SECONDS)
        for call in calls:
            call.cancel()
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, JobLost):
                return answer
        return spec.lost(why, max((each["epoch"] for each in answers if isinstance(each, dict)), default=-1))

    async def lead(self, spec: JobSpec) -> dict[str, Any]:
        """At pod 0: the run that all pods have when this returns. Ranks come at about the same time, and those of the
        same settings share what is asked of the others."""
        if self._settings.ordinal != LEADER:
            raise InvalidInput(f"pod {self._settings.ordinal} names no runs of jobs: pod {LEADER} does")
        while True:
            under_way = self._rounds.get(spec.name)
            if under_way is None or under_way[1].done():
                task = asyncio.create_task(self._agree(spec))
                under_way = self._rounds[spec.name] = spec, task
                task.add_done_callback(partial(self._agreed, spec.name))
            of_spec, task = under_way
            if of_spec == spec:
                return await asyncio.shield(task)
            await asyncio.wait([task])

    def _agreed(self, name: str, task: asyncio.Task[dict[str, Any]]) -> None:
        if self._rounds[name][1] is task:
            del self._rounds[name]
        if not task.cancelled():
            task.exception()  # known, if anybody still waits

    async def _agree(self, spec: JobSpec) -> dict[str, Any]:
        known = self._table.jobs.get(spec.name)
        if known is not None:
            _check_same(known.job, spec)
            self._table.is_asked(known)
            if await self._is_over(known):
                log.info("job %s: its run is over, and a new one begins", spec.name)
                await self._end_run(known.spec, known.job.incarnation, None)
            else:
                try:
                    return await self._at_all_pods(known)
                except JobLost as lost:
                    log.warning("%s", lost.message)
                    await self._end_run(known.spec, known.job.incarnation, lost)
        at_pod = await self._begin(spec)
        try:
            return await self._at_all_pods(at_pod)
        except RefillError as error:
            # One pod refuses it for good: the others must not keep it, or its name and memory would be taken.
            if error.status < 500:
                await self._end_run(spec, at_pod.job.incarnation, None)
            if isinstance(error, JobLost):
                raise PodBusy(f"a pod was restarted while job {spec.name} was registered: register it again") from error
            raise

    async def _begin(self, spec: JobSpec) -> JobAtPod:
        """A new run, at this pod. What others have under that name is of a run that this pod has lost."""
        self._table.check_name(spec)
        self._table.check_taking_jobs()
        self._table.opening.begin(spec.dataset)
        path = f"{_path(spec.name)}/begins"
        others = self._settings.other_pods
        answers = await self._peers.call_all(others, "POST", path, {"spec": spec.to_dict()})
        await self._table.opened_ahead(spec)
        async with self._table.making:
            at_pod = await self._made(spec, uuid.uuid4().hex)
        at_pod.processes = {pod: answer["process"] for pod, answer in zip(others, answers, strict=True)}
        return at_pod

    async def _at_all_pods(self, at_pod: JobAtPod) -> dict[str, Any]:
        """Raises :class:`JobLost` when a pod was restarted since the run has begun."""
        job = at_pod.job
        info = job.info()
        body = {"spec": job.spec.to_dict(), "incarnation": job.incarnation, "fingerprint": info["fingerprint"]}
        others = self._settings.other_pods
        calls = (
            self._peers.call(pod, "PUT", _path(job.spec.name), body | {"process": at_pod.processes[pod]})
            for pod in others
        )
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for pod, answer in zip(others, answers, strict=True):
            if isinstance(answer, JobLost):
                raise job.spec.lost(f"pod {pod} was restarted", job.ranks.newest) from answer
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        if self._table.jobs.get(job.spec.name) is not at_pod:  # ended meanwhile, as some of them may not have heard
            why = self._table.why_ended(job.incarnation) or self._table.was_ended(job.spec.name)
            self._end_soon(job.spec, job.incarnation, why)
            raise why
        return info

    # What pod 0 asks of the others.

    async def make_way(self, spec: JobSpec) -> str:
        """Fact: a new run of a job is about to begin. Ends the one that is here, and opens the dataset already. Returns
        the name of this process. Raises :class:`NotAllowed` and :class:`JobConflict` where the name is taken."""
        self._table.check_name(spec)
        self._table.check_taking_jobs()
        if (left := self._table.jobs.get(spec.name)) is not None:
            check_holder(spec.name, left.spec.holder, spec.holder)
            lost = left.spec.lost(f"pod {LEADER} was restarted", left.job.ranks.newest)
            await self._table.remove(spec.name, why=lost)
        self._table.opening.begin(spec.dataset)
        return self.process

    async def take_part(self, spec: JobSpec, incarnation: str, fingerprint: str, process: str) -> dict[str, Any]:
        """Have a run here that pod 0 has named.

        :param fingerprint: of the dataset as pod 0 read it.
        :param process: of this pod, that takes part. Raises :class:`JobLost` in another one.
        """
        if spec.name not in self._table.jobs:
            await self._table.opened_ahead(spec)
        async with self._table.making:
            at_pod = self._table.jobs.get(spec.name)
            if process != self.process or (at_pod is not None and at_pod.job.incarnation != incarnation):
                raise spec.lost(f"pod {self._settings.ordinal} was restarted")
            if at_pod is None:
                at_pod = await self._made(spec, incarnation)
        self._table.is_asked(at_pod)
        info = at_pod.job.info()
        if info["fingerprint"] != fingerprint:
            raise JobConflict(
                f"dataset {spec.dataset} was replaced: pods read different versions of it for job {spec.name}; end the "
                f"job (refill end {spec.name}), then start it again"
            )
        return info

    async def _made(self, spec: JobSpec, incarnation: str) -> JobAtPod:
        at_pod = await self._table.make(spec, incarnation, partial(self._pod_has_lost, spec, incarnation))
        self._table.put(at_pod)
        job = at_pod.job
        log.info(
            "job %s: %s, run %.8s, %d abstract chunks of %d samples, group size %d",
            spec.name,
            spec.dataset,
            incarnation,
            job.mapping.num_abstract_chunks,
            job.layout.chunk_size,
            job.mapping.group_size,
        )
        return at_pod

    def known(self, name: str, incarnation: str | None = None) -> dict[str, Any]:
        """What this pod knows of a live job. Errors as of :meth:`JobTable.find`."""
        at_pod = self._table.find(name, incarnation, looked_at=True)
        return {
            "incarnation": at_pod.job.incarnation,
            "holder": at_pod.spec.holder,
            "epoch": at_pod.job.ranks.newest,
            "finished": at_pod.is_finished,
            "ranks_alive": at_pod.users()["ranks_alive"],
            "may_be_left": at_pod.use.may_be_left,
            "idle": at_pod.use.idle_seconds > self._settings.job_idle_seconds,
        }

    async def _known_at_all(self, at_pod: JobAtPod) -> list[dict[str, Any]] | None:
        """What all pods know of a run that is here. None: not all of them have it, or say so."""
        name = at_pod.spec.name
        asked = (self._peers.call(pod, "GET", _path(name)) for pod in self._settings.other_pods)
        answers = [self.known(name), *await asyncio.gather(*asked, return_exceptions=True)]
        known = [each for each in answers if isinstance(each, dict) and each["incarnation"] == at_pod.job.incarnation]
        return known if len(known) == len(answers) and self._table.jobs.get(name) is at_pod else None

    async def _is_over(self, at_pod: JobAtPod) -> bool:
        """Whether every rank has entered the newest epoch and had all of it, and no process of the run is there any
        more. One that was killed is known to be gone in a moment."""
        ends = time.monotonic() + 2 * GONE_SECONDS
        while at_pod.is_finished and (known := await self._known_at_all(at_pod)) is not None:
            alive = [each for each in known if each["ranks_alive"]]
            if not all(each["finished"] for each in known):
                return False
            if not alive:
                return True
            if time.monotonic() > ends or not all(each["may_be_left"] for each in alive):
                return False
            await asyncio.sleep(_LOOK_SECONDS)
            self._table.share_memory()  # looks who is gone
        return False

    # The end.

    async def end_here(self, name: str, holder: str, incarnation: str, why: str) -> bool:
        """Another pod has found that a run is over or lost, and why. Others of the name stay."""
        at_pod = self._table.jobs.get(name)
        if at_pod is None or at_pod.job.incarnation != incarnation:
            return False
        error: RefillError = JobLost(why, job=name) if why else _is_over(name)
        return await self._table.remove(name, holder, error)

    def _pod_has_lost(self, spec: JobSpec, incarnation: str, pod: int) -> RefillError:
        """Fact: a pod of a run does not know it. The error is for who asked for samples."""
        at_pod = self._table.jobs.get(spec.name)
        if at_pod is None or at_pod.job.incarnation != incarnation:
            return self._table.why_ended(incarnation) or self._table.was_ended(spec.name)
        lost = spec.lost(f"pod {pod} was restarted", at_pod.job.ranks.newest)
        self._end_soon(spec, incarnation, lost)
        return lost

    def _end_soon(self, spec: JobSpec, incarnation: str, why: RefillError) -> None:
        if incarnation not in self.ending:
            log.warning("%s", why.message)
            task = self.ending[incarnation] = asyncio.create_task(self._end_run(spec, incarnation, why))
            task.add_done_callback(lambda _: self.ending.pop(incarnation))

    async def _end_run(self, spec: JobSpec, incarnation: str, why: RefillError | None) -> None:
        """End a run on all pods, as far as they answer: one that does not has it no more, or finds out when it asks
        another one.

        :param why: what its ranks are told; None: nothing, they may register it anew.
        """
        said = {"incarnation": incarnation, "holder": spec.holder, "why": "" if why is None else why.message}
        path = f"{_path(spec.name)}?{urlencode(said)}"
        calls: list[Awaitable[Any]] = [self._peers.call(pod, "DELETE", path) for pod in self._settings.other_pods]
        calls.append(self.end_here(spec.name, spec.holder, incarnation, said["why"]))
        for answer in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(answer, BaseException):
                log.info("run %.8s of job %s was perhaps not ended: %s", incarnation, spec.name, answer)

    async def remove_idle(self) -> None:
        """End jobs that are idle here, and at all other pods: one that owns little of the dataset, or sends far ahead,
        gets few requests. A job may be in use at a pod that does not answer."""
        idle_seconds = self._settings.job_idle_seconds
        for name, at_pod in list(self._table.jobs.items()):
            if at_pod.use.idle_seconds <= idle_seconds:
                continue
            known = await self._known_at_all(at_pod)
            if known is not None and all(each["idle"] for each in known):
                why = JobLost(f"job {name} was ended: nobody had asked for it for {idle_seconds:.0f} s", job=name)
                log.info("%s", why.message)
                await self._end_run(at_pod.spec, at_pod.job.incarnation, why)


def _path(name: str) -> str:
    return f"/peer/v1/jobs/{quote(name, safe='')}"


def _check_same(job: Job, spec: JobSpec) -> None:
    """Raises :class:`NotAllowed`, and :class:`JobConflict` when a job is to be registered with other settings than it
    has."""
    check_holder(spec.name, job.spec.holder, spec.holder)
    job.spec.check_same(spec)


def _is_over(name: str) -> UnknownJob:
    return UnknownJob(f"a run of job {name} is over: register it anew", job=name)
