"""How does a job come into this pod's table: as a new one, or restored as it was before a restart?

Carries out what :func:`how_to_begin` decides: asks the other pods, makes the job, restores what it had answered from
the pod's journal, or has it learn that from others (:mod:`refill_service.membership.recovery`).
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from dataclasses import replace
from typing import Any

from refill.errors import (
    InvalidInput,
    JobConflict,
    JobError,
    JobLost,
    JobMoved,
    PodUnreachable,
    RefillError,
)
from refill.protocol.incarnation import is_later, line_of, next_run, same_line
from refill.protocol.job_spec import JobSpec
from refill_service.cache_core.heard_answers import what_is_missing
from refill_service.cache_core.job_holder import check_holder
from refill_service.cache_core.job_lifecycle import (
    AskPeers,
    Begin,
    JournalFound,
    KnownJob,
    check_same_settings,
    expected,
    how_to_begin,
    is_another,
)
from refill_service.jobs.job_at_pod import JobAtPod
from refill_service.jobs.job_table import JobTable
from refill_service.jobs.run_parts import parts_without_receipt
from refill_service.journal.journal import KeptJob
from refill_service.membership.recovery import Recovery
from refill_service.membership.who_holds import WhoHolds
from refill_service.peers.fence import Fence
from refill_service.peers.peers import Peers

__all__ = ["LEADER", "JobsHere", "journal_found"]

log = logging.getLogger(__name__)

_KEPT_FAILURES = 100
_RESUMED = "-resumed"
"""In the names that an earlier version gave."""
LEADER = 0
"""The pod that names jobs, and that decides how they move and go on from checkpoints."""


def journal_found(kept: KeptJob | None) -> JournalFound | None:
    return None if kept is None else JournalFound(kept.header["incarnation"], kept.header["num_pods"], kept.whole)


class JobsHere:
    """Registers jobs at this pod alone."""

    def __init__(self, table: JobTable, peers: Peers, who_holds: WhoHolds, fence: Fence) -> None:
        self.registering = asyncio.Lock()
        """Locked while a job is put into the table or replaced there."""
        self.replacing: set[str] = set()
        """Jobs whose run has ended, until the next one has taken its place."""
        self._table = table
        self._peers = peers
        self._who_holds = who_holds
        self._fence = fence
        self._failed: dict[str, str] = {}
        """By incarnation, why a job could not move, or not go on after a restart."""

    async def register(
        self, spec: JobSpec, incarnation: str, fingerprint: str, *, begun: bool = False
    ) -> dict[str, Any]:
        """Register a job on this pod only.

        :param incarnation: as another pod or a client names it; empty: whatever it is here, a new one if need be.
        :param fingerprint: of the dataset as another pod read it; empty: any.
        :param begun: whether ranks were seen to ask for samples: then a pod that does not know the job has lost it.
        """
        table = self._table
        async with self.registering:
            known = table.jobs.get(spec.name)
            if known is not None and is_later(incarnation, known.job.incarnation):
                check_holder(spec.name, known.job.spec.holder, spec.holder)
                await table.forget(spec.name)  # a client that has the later name accepts no answer of this one
                known = None
            elif known is not None and incarnation and line_of(incarnation) == next_run(known.job.run):
                check_holder(spec.name, known.job.spec.holder, spec.holder)
                await self._replace(spec, incarnation)  # it ended, as pod 0 found
                known = table.jobs[spec.name]
            elif known is not None and begun and known.job.life.is_but_a_name_beside(incarnation):
                check_holder(spec.name, known.job.spec.holder, spec.holder)
                self.check_may_go_on(spec.name, incarnation)
                await table.forget(spec.name)
                known = None
            created = known is None
            if known is None:
                known = await self.begin(spec, incarnation, begun=begun)
        check_holder(spec.name, known.job.spec.holder, spec.holder)
        life = known.job.life
        if incarnation and known.job.incarnation != incarnation and life.recovering:
            raise known.job.recovering()  # it may be named so by a rank of an earlier run only
        check_same_settings(spec.name, known.job.spec.differences(spec), here=True)
        if incarnation and known.job.incarnation != incarnation:
            raise is_another(spec.name)
        self._table.is_asked(known)
        info = known.job.info() | {"begun": life.begun, "created": created}
        if fingerprint and info["fingerprint"] != fingerprint:
            raise _replaced(spec)
        return info

    async def begin(self, spec: JobSpec, incarnation: str, *, begun: bool) -> JobAtPod:
        """Make a job that this pod does not have: a new one, or one that it lost in a restart. Parameters as
        :meth:`register`; the caller has locked ``registering``."""
        table, settings = self._table, self._table.settings
        kept = table.journal.find(spec.name)
        if kept is not None and incarnation in ("", kept.header["incarnation"]):
            check_holder(spec.name, kept.header["spec"].get("holder", ""), spec.holder)
        elsewhere: KnownJob | AskPeers | None = AskPeers.WHO_HAS_IT
        while True:
            order = how_to_begin(
                spec.name,
                journal_found(kept),
                settings.num_pods,
                incarnation,
                begun=begun,
                names_jobs=settings.ordinal == LEADER,
                elsewhere=elsewhere,
            )
            if isinstance(order, Begin):
                break
            elsewhere = await self._who_holds.known_to_others(spec.name, spec.holder)
        if isinstance(elsewhere, KnownJob) and same_line(elsewhere.incarnation, order.incarnation):
            elsewhere.check_settings(spec)  # before this pod has the job otherwise than they do
        self.check_may_go_on(spec.name, order.incarnation)
        if order.ran_before:
            await self._fence.until_known()
            if (earlier := self._fence.lives.earlier) is not None:
                table.journal.earlier_run_was(earlier)
            kept = table.journal.find(spec.name)  # all that an earlier run of this pod has answered is there now
            if kept is not None and kept.whole and order.from_journal:
                kept = await self._unless_others_know_more(spec.name, order.incarnation, kept)
        return await self.make(spec, order, kept if order.from_journal else None)

    async def _unless_others_know_more(self, name: str, incarnation: str, kept: KeptJob) -> KeptJob | None:
        """The journal, which is not whole when other pods have heard of more answers of this pod than are in it."""
        answered = await asyncio.to_thread(kept.num_answered)
        path = f"/peer/v1/jobs/{name}/heard?incarnation={incarnation}&pod={self._table.settings.ordinal}"

        async def heard(pod: int) -> dict[int, int]:
            try:
                counts = await self._peers.call(pod, "GET", path)
            except (JobError, InvalidInput):  # it does not know this job, or this path
                return {}
            return {int(epoch): count for epoch, count in counts.items()}

        for of_pod in await asyncio.gather(*map(heard, self._table.settings.other_pods)):
            if (why := what_is_missing(answered, of_pod)) is not None:
                self._table.journal.doubt(name, why)
                return self._table.journal.find(name)
        return kept

    async def make(self, spec: JobSpec, order: Begin, kept: KeptJob | None) -> JobAtPod:
        """Carry out an order to begin a job; it is in the table then.

        :param kept: what the journal has of it, or of what it was before it moved.
        """
        table, name = self._table, spec.name
        self.check_was_the_same(spec, kept)
        order = replace(order, incarnation=order.incarnation or uuid.uuid4().hex)
        of_now = None if order.moving else kept  # a journal of other pods says nothing of this one's share
        at_pod = await table.make(spec, order, lambda pod: self.introduce(pod, at_pod), of_now)
        try:
            if kept is not None and kept.header["fingerprint"] != at_pod.job.info()["fingerprint"]:
                raise _replaced(spec)
            if order.ran_before:
                self._restore(at_pod, of_now)
            else:
                table.begin_journal(at_pod)
        except BaseException:
            await table.close_job(at_pod, table.was_ended(name))
            raise
        table.put(at_pod)
        if of_now is not None:
            self._keep_receipts(
                at_pod, await asyncio.to_thread(list, parts_without_receipt(of_now, at_pod.job.ordinal))
            )
        job = at_pod.job
        log.info(
            "job %s: %s, %d abstract chunks of %d samples, group size %d%s",
            name,
            spec.dataset,
            job.mapping.num_abstract_chunks,
            job.layout.chunk_size,
            job.mapping.group_size,
            ", taken up after a restart" if order.ran_before and not order.moving else "",
        )
        return at_pod

    def _keep_receipts(self, at_pod: JobAtPod, parts: list[dict[str, Any]]) -> None:
        """Of epochs that were over, and of which the journal lacks a receipt."""
        oldest = min(at_pod.owner.live_epochs, default=0)
        for part in parts:
            if part["epoch"] < oldest and part["epoch"] not in at_pod.ended:
                at_pod.keep_receipt(part)

    def check_was_the_same(self, spec: JobSpec, kept: KeptJob | None) -> None:
        """Raises :class:`NotAllowed` and :class:`JobConflict` when a journal is of a job of another kind."""
        if kept is not None:
            before = JobSpec.from_dict(kept.header["spec"])
            check_holder(spec.name, before.holder, spec.holder)
            check_same_settings(spec.name, before.differences(spec), here=False)

    def check_may_go_on(self, name: str, incarnation: str) -> None:
        """Raises :class:`JobLost` for a job that has ended, or that could not move or go on."""
        if _RESUMED in incarnation:
            raise JobLost(
                f"job {name} was dealt anew from a checkpoint by an earlier version, and no pod knows how: begin the "
                "epoch anew, without the state",
                job=name,
            )
        if (why := self._failed.get(incarnation)) is not None:
            raise JobLost(why, job=name)
        if self._table.journal.has_ended(incarnation):
            raise JobLost(f"job {name} was ended and can't go on: a dataset made anew begins a new run", job=name)

    async def replace_run(self, spec: JobSpec, incarnation: str, ended: str) -> None:
        """The next run of a job, in place of one that has ended, at this pod. Raises :class:`JobLost` when another one
        has taken its place meanwhile.

        :param ended: the incarnation of the one that has ended.
        """
        async with self.registering:
            known = self._table.jobs.get(spec.name)
            if known is not None and known.job.incarnation != ended:
                raise is_another(spec.name)
            await self._replace(spec, incarnation)

    async def _replace(self, spec: JobSpec, incarnation: str) -> None:
        table, name = self._table, spec.name
        self.replacing.add(name)
        try:
            with table.giving_way(name):
                order = Begin(incarnation, from_journal=False, ran_before=False)
                at_pod = await table.make(spec, order, lambda pod: self.introduce(pod, at_pod))
            await table.replace(at_pod)
        finally:
            self.replacing.discard(name)

    def known(self, name: str) -> KnownJob:
        """What this pod knows of a job, be it from before a restart. Raises :class:`UnknownJob`."""
        if name not in self._table.jobs and (kept := self._table.journal.find(name)) is not None:
            return KnownJob(
                kept.header["incarnation"],
                kept.header["spec"].get("holder", ""),
                running=False,
                world_size=kept.header["spec"]["world_size"],
                spec=kept.header["spec"],
                knows=kept.whole and kept.header["num_pods"] == self._table.settings.num_pods,
            )
        at_pod = self._table.find(name, looked_at=True)
        life, spec = at_pod.job.life, at_pod.job.spec
        return KnownJob(
            at_pod.job.incarnation,
            spec.holder,
            begun=life.begun,
            idle=self.is_idle(at_pod),
            world_size=spec.world_size,
            knows=life.has_records,
            ranks_alive=at_pod.home.leases.num_alive(),
            newest=life.ranks.newest,
            spec=spec.to_dict(),
        )

    def is_idle(self, at_pod: JobAtPod) -> bool:
        return at_pod.use.idle_seconds > self._table.settings.job_idle_seconds

    def _restore(self, at_pod: JobAtPod, kept: KeptJob | None) -> None:
        recovery = Recovery(
            at_pod, kept, self._table.settings.recovery_seconds, lambda pod: self.introduce(pod, at_pod)
        )
        if recovery.from_journal():
            self._table.begin_journal(at_pod)
        else:
            at_pod.recovery = asyncio.create_task(self._recover(at_pod, recovery))

    async def _recover(self, at_pod: JobAtPod, recovery: Recovery) -> None:
        table, name, life = self._table, at_pod.job.spec.name, at_pod.job.life
        moving = life.moving
        try:
            await recovery.from_others(lambda: table.begin_journal(at_pod))
        except (PodUnreachable, JobMoved) as error:  # the next request will name it as it is by then
            log.warning("%s: it is asked for anew", error)
            at_pod.recovery = None
            if table.jobs.get(name) is at_pod:
                await table.forget(name)
        except Exception as error:
            log.error("job %s can't go on after a restart of this pod: %s", name, error, exc_info=not expected(error))
            at_pod.recovery = None
            if table.jobs.get(name) is not at_pod:
                return
            why = error if isinstance(error, RefillError) and expected(error) else None
            if why is not None and (moving or not life.moves):
                # The answer to later requests.
                self._failed[at_pod.job.incarnation] = why.message
                while len(self._failed) > _KEPT_FAILURES:
                    self._failed.pop(next(iter(self._failed)))
            if life.moves:
                await table.forget(name)
            else:
                await table.remove(name, why=why)

    async def introduce(self, pod: int, at_pod: JobAtPod) -> None:
        """Make a job known again to a pod that lost it in a restart."""
        job = at_pod.job
        body = {
            "spec": job.spec.to_dict(),
            "incarnation": job.incarnation,
            "fingerprint": job.info()["fingerprint"],
            "begun": True,
        }
        await self._peers.call(pod, "PUT", f"/peer/v1/jobs/{job.spec.name}", body)


def _replaced(spec: JobSpec) -> JobConflict:
    return JobConflict(
        f"dataset {spec.dataset} was replaced while job {spec.name} ran: pods read different versions; "
        f"end the job on all pods (DELETE /v1/jobs/{spec.name}), then start it anew"
    )
