"""A process without a state asks for an epoch that its rank has been in: does it go on with the run that the pods know,
or begin a new one?

Only a process that asks for epoch 0 can begin a new run. A run has *ended* when its job was ended, or when each of its
ranks has had all of its newest epoch, and is gone or asks anew as well (:func:`how_to_start_again`). Then the name
stands for a new run, and the one before leaves its receipts. Else the run goes on: the same requests get the same
samples. Pod 0 decides, so that all ranks begin the same.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from weakref import WeakValueDictionary

from refill.errors import JobError, PodBusy, RunEnded
from refill.protocol.incarnation import line_of, next_run
from refill.protocol.job_spec import JobSpec
from refill_service.cache_core.job_lifecycle import RunAtPod, StartAgain, how_to_start_again, is_another
from refill_service.cache_core.rank_leases import LEASE_SECONDS
from refill_service.jobs.job_at_pod import JobAtPod
from refill_service.jobs.job_table import JobTable
from refill_service.membership.jobs_here import LEADER, JobsHere
from refill_service.membership.registration import Registration
from refill_service.peers.peers import Peers

__all__ = ["NewRuns"]

log = logging.getLogger(__name__)

_FIRST_WORKER_SECONDS = 60.0
"""Within which the loader worker that asks for a process's first positions has come, after others of it."""


class NewRuns:
    """Begins new runs at this pod, or has pod 0 do so."""

    def __init__(self, table: JobTable, peers: Peers, here: JobsHere, registration: Registration) -> None:
        self._table = table
        self._peers = peers
        self._here = here
        self._registration = registration
        self._beginning: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """By job, for as long as somebody asks: one may wait for a pod that is silent, and others must not."""

    def check_is_newest(self, name: str, incarnation: str | None) -> None:
        """Raises :class:`RunEnded` when another process has begun a new run since the asker registered the job, and
        :class:`PodBusy` while one does."""
        if name in self._here.replacing:
            raise PodBusy(f"job {name} begins a new run")
        at_pod = self._table.jobs.get(name)
        if at_pod is not None and incarnation and at_pod.job.run == next_run(line_of(incarnation)):
            raise _ended(name, line_of(incarnation))

    async def check(self, at_pod: JobAtPod, epoch: int, rank: int, begins_at: int | None = 0) -> None:
        """A process that has received nothing, and goes on from no state, asks for an epoch.

        :param begins_at: the first position that it asks for. A process that begins at a later one than 0 has skipped
            those before, and goes on where it was. None: it asks for a later one, and another loader worker of the same
            process may ask for the first at about the same time.

        Raises :class:`RunEnded` when it has begun a new run by that, and :class:`PodBusy` while other ranks may still
        be in the one that there is, or another process may be this rank that was not heard since this pod was started.
        """
        life = at_pod.job.life
        if life.recovering:
            await at_pod.owner.until_restored()
        leases = at_pod.home.leases
        if (
            life.ran_before
            and leases.holder(rank) is None
            and not leases.all_were_heard
            and life.ranks.epoch(rank) >= 0
        ):
            raise PodBusy(
                f"pod {self._table.settings.ordinal} was started a moment ago, and rank {rank} of job "
                f"{at_pod.job.spec.name} is asked for by a process that has received nothing: if another one is that "
                "rank, it is heard in a moment"
            )
        if life.ranks.epoch(rank) < epoch:
            return  # it has never been there: it joins, or goes on to the next
        if epoch > 0:
            # A run begins at epoch 0. This process knows that there was an epoch before, as trainers do that go on from
            # a checkpoint by iterating over what the loop has had already: it needs the same samples again, even if
            # all of the epoch was sent ahead before the process was killed.
            return
        waited = leases.comes_again(rank)
        if not at_pod.run_here().finished:
            return
        # A rank that goes on being heard for longer than a lease is in the run that there is, and that goes on.
        name, incarnation, may_wait = at_pod.job.spec.name, at_pod.job.incarnation, waited <= LEASE_SECONDS
        if begins_at is None and waited <= _FIRST_WORKER_SECONDS:
            raise PodBusy(
                f"rank {rank} of job {name} has had all of epoch {at_pod.owner.epoch}, and a loader worker asks again: "
                "if the rank begins at position 0 anew, another worker asks for that in a moment"
            )
        if begins_at != 0:
            return
        if self._table.settings.ordinal == LEADER:
            begun = await self.begin(name, incarnation, may_wait)
        else:
            body = {"incarnation": incarnation, "may_wait": may_wait}
            begun = (await self._peers.call(LEADER, "POST", f"/peer/v1/jobs/{name}/again", body))["begun"]
        if begun:
            raise _ended(name, at_pod.job.run)

    async def begin(self, name: str, incarnation: str, may_wait: bool) -> bool:
        """Begin a new run on all pods if this one has ended; False: it goes on. Pod 0 alone is asked."""
        async with self._beginning.setdefault(name, asyncio.Lock()):
            at_pod = self._table.find(name, looked_at=True)
            if at_pod.job.run == next_run(line_of(incarnation)):
                return True
            if at_pod.job.incarnation != incarnation:
                raise is_another(name)
            known = [RunAtPod(**answer) for answer in await at_pod.peers.call_all("GET", "run")]
            decided = how_to_start_again([at_pod.run_here(), *known], may_wait=may_wait)
            if decided is StartAgain.WAIT:
                raise PodBusy(
                    f"job {name} has had all of epoch {at_pod.owner.epoch}, and is asked for anew, without a state: "
                    "when its other ranks have been silent for a while, that is a new run"
                )
            if decided is StartAgain.NEW_RUN:
                await self._begin(at_pod.job.spec, next_run(at_pod.job.run), incarnation)
            return decided is StartAgain.NEW_RUN

    async def _begin(self, spec: JobSpec, incarnation: str, ended: str) -> None:
        await self._here.replace_run(spec, incarnation, ended)
        log.info("job %s had ended, and begins a new run %s", spec.name, incarnation)
        await self._registration.register(spec)

    def run_here(self, at_pod: JobAtPod) -> dict[str, Any]:
        """For pod 0. Raises :class:`PodRecovering` while nobody knows."""
        if at_pod.job.life.recovering:
            raise at_pod.job.recovering()
        return vars(at_pod.run_here())


def _ended(name: str, run: str) -> JobError:
    return RunEnded(f"run {run} of job {name} has ended: without a state, a new run begins", job=name, run=run)
