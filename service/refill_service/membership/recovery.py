"""How does a pod that was restarted in the middle of a job come to know what it had delivered?

From its own journal, if that is whole. Else it asks the other pods for their records as homes of their ranks, and for
those that it handed over to them when it ended in order. And it waits until its own ranks have reported what they have
received. Until then it answers nothing from its share: a sample that one rank has already must not be given to another.
:class:`Recovering` decides when it has learned enough, and what follows.

A job that moves to more or to fewer pods goes on in the same way, but that pod 0 asks for what ranks have received of
all shares, and deals the rest of their epochs anew (:mod:`refill_service.cache_core.moved_epoch`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from refill.errors import JobError, PodUnreachable, RefillError, UnknownJob
from refill.protocol.records import RecordReader, encode_records
from refill_service.cache_core.job_lifecycle import Restore
from refill_service.cache_core.recollection import Recollection
from refill_service.cache_core.recovering import FoundInJournal, Recovering
from refill_service.jobs.job_at_pod import JobAtPod
from refill_service.journal.journal import KeptJob
from refill_service.peers.job_peers import Introduce

__all__ = ["Recovery"]

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.25
_SAY_EVERY_SECONDS = 10.0


class Recovery:
    """One job at one pod, after a restart.

    :param kept: what the pod's own journal has of the job.
    :param seconds: how long ranks are waited for that do not report; without them the epoch goes on, and what they may
        have received is *unknown* in its receipt.
    :param introduce: makes the job known to a pod that does not have it.
    """

    def __init__(self, at_pod: JobAtPod, kept: KeptJob | None, seconds: float, introduce: Introduce) -> None:
        self._job = at_pod.job
        self._life = at_pod.job.life
        self._owner = at_pod.owner
        self._peers = at_pod.peers
        journal = None if kept is None else FoundInJournal(kept.records, kept.whole, kept.handed_over_to)
        self._recovering = Recovering(at_pod.job, at_pod.home.record, journal)
        self._seconds = seconds
        self._introduce = introduce

    def from_journal(self) -> bool:
        """Go on from the journal alone; False when that is not enough."""
        if (recollection := self._recovering.from_journal()) is None:
            return False
        self._owner.restore(recollection)
        return True

    async def from_others(self, done: Callable[[], None]) -> None:
        """Ask until nothing more can be learned, then go on; ``done`` is called right after, before any answer.

        Raises :class:`JobLost` when another pod says that the job has ended or is another one by now, and when it can't
        go on with what is known; :class:`PodUnreachable` when no pod is left that knows how it was dealt, and the job
        is to move once more.
        """
        name, started = self._job.spec.name, time.monotonic()
        said = started
        while True:
            recollection = self._recovering.begin_round()
            silent = await self._ask_others(recollection)
            now = time.monotonic()
            step = self._recovering.end_round(recollection, silent, now, self._seconds)
            if isinstance(step, Restore):
                break
            if now - said > _SAY_EVERY_SECONDS:
                said = now
                log.warning("job %s was lost in a restart, and waits for %s", name, ", ".join(step.for_what))
            await asyncio.sleep(_PAUSE_SECONDS)
        if step.without:
            log.warning(
                "job %s goes on without %s: what they received of this pod is unknown, and counts so in receipts",
                name,
                ", ".join(f"rank {rank}" for rank in step.without),
            )
        await self._deal_anew(recollection)
        self._owner.restore(recollection, step.without)
        done()
        if self._life.unknown:
            for rank, epoch in sorted(self._life.unknown.by_rank().items()):
                if rank not in step.without:
                    log.warning(
                        "job %s: nobody can tell all that rank %d had received of this pod in epochs up to %d: what is "
                        "not known counts as unknown in receipts",
                        name,
                        rank,
                        epoch - 1,
                    )
            await self._share_unknown()
        log.info("job %s goes on after %.1f s, from what others knew", name, time.monotonic() - started)

    async def _share_unknown(self) -> None:
        """Give the other pods the records of what is unknown, since this pod may lose its memory again. Ranks get them
        by way of their homes."""
        records = encode_records(self._life.unknown.records())
        answers = await asyncio.gather(
            *(self._peers.call(pod, "PUT", "unknown", records) for pod in self._peers.others), return_exceptions=True
        )
        for error in answers:
            if isinstance(error, RefillError):
                log.info("job %s: not all pods know what is unknown: %s", self._job.spec.name, error)

    async def _deal_anew(self, recollection: Recollection) -> None:
        job = self._job
        for dealt in self._recovering.to_deal(recollection):
            try:
                traces = await asyncio.to_thread(dealt.traces)
            except ValueError as error:
                raise self._recovering.can_not_move(str(error)) from error
            job.move_traces(dealt.epoch, traces)
            log.warning(
                "job %s moves to %d pods in epoch %d: ranks keep the %d samples that they have, the rest is dealt anew",
                job.spec.name,
                job.num_pods,
                dealt.epoch,
                dealt.num_received,
            )

    async def _ask_others(self, recollection: Recollection) -> list[str]:
        """Returns those that did not answer."""

        async def ask(pod: int) -> str | None:
            try:
                reader = RecordReader(await self._peers.records_from(pod, everything=self._life.moving))
                recollection.add(list(reader), pod)
            except UnknownJob:
                if not self._recovering.introduces_to(pod, time.monotonic()):
                    return None
                await self._introduce(pod)
                return f"pod {pod}"
            except PodUnreachable:
                return f"pod {pod}"
            return f"pod {pod}, whose answer was damaged" if reader.damaged else None

        asked = self._recovering.whom_to_ask(self._peers.others)
        answers = await asyncio.gather(*(ask(pod) for pod in asked), return_exceptions=True)
        silent = []
        for pod, answer in zip(asked, answers, strict=True):
            if isinstance(answer, JobError) and answer.status < 500:
                raise answer  # the job is another one there; a pod that failed, or has no room for it, is asked again
            if isinstance(answer, RefillError):
                silent.append(answer.message if answer.status >= 500 else f"pod {pod}: {answer.message}")
            elif isinstance(answer, BaseException):
                raise answer
            elif answer is not None:
                silent.append(answer)
        return silent
