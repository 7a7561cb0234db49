"""How does a pod that was restarted in the middle of a job come to know what it had delivered?

From its own journal, if that is whole. Else it asks the other pods for their records as homes of their ranks, and for
those that it handed over to them when it ended in order. And it waits until its own ranks have reported what they have
received. Until then it answers nothing from its share: a sample that one rank has already must not be given to another.
:meth:`JobLife.next_step` decides when it has learned enough.

A job that moves to more or to fewer pods goes on in the same way, but that pod 0 asks for what ranks have received of
all shares, and deals the rest of their epochs anew (:mod:`refill_service.cache_core.moved_epoch`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from refill.errors import JobLost, PodUnreachable, RefillError, UnknownJob
from refill.protocol.records import RecordReader, encode_records
from refill_service.cache_core.job_lifecycle import Learned, Restore
from refill_service.cache_core.moved_epoch import moved_traces
from refill_service.cache_core.rank_leases import LEASE_SECONDS
from refill_service.cache_core.recollection import Recollection
from refill_service.jobs.job_at_pod import JobAtPod
from refill_service.journal.journal import KeptJob
from refill_service.peers.job_peers import Introduce

__all__ = ["Recovery"]

log = logging.getLogger(__name__)

_PAUSE_SECONDS = 0.25
_FORGETS_WITHIN_SECONDS = 2.0
"""A pod to which a job was introduced, and that does not know it any more so soon, has given it up: it has found no pod
that knows how epochs were dealt."""
_SAY_EVERY_SECONDS = 10.0
_MOVED_EPOCHS = 3
"""As many as an owner goes on with."""


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
        self._home = at_pod.home
        self._peers = at_pod.peers
        self._kept = kept
        self._seconds = seconds
        self._introduce = introduce
        self._introduced: dict[int, float] = {}
        """When the job was last introduced to each pod that did not know it."""
        self._unused: dict[int, float] = {}
        """By rank, since when its processes have reported nothing but that they had received nothing."""

    def from_journal(self) -> bool:
        """Go on from the journal alone; False when that is not enough."""
        if self._kept is None or not self._kept.whole or self._kept.handed_over_to:
            return False
        recollection = self._records_of_the_journal()
        self._restore_traces(recollection)
        self._owner.restore(recollection)
        return True

    async def from_others(self, done: Callable[[], None]) -> None:
        """Ask until nothing more can be learned, then go on; ``done`` is called right after, before any answer.

        Raises :class:`JobLost` when another pod says that the job has ended or is another one by now, and when it can't
        go on with what is known; :class:`PodUnreachable` when no pod is left that knows how it was dealt, and the job
        is to move once more.
        """
        name, started = self._job.spec.name, time.monotonic()
        all_answered, said = None, started
        while True:
            recollection = self._records_of_the_journal()
            recollection.add(
                self._home.record.records_for(self._job.ordinal, everything=self._life.moving), self._job.ordinal
            )
            silent = await self._ask_others(recollection)
            self._restore_traces(recollection)
            now = time.monotonic()
            if not silent and all_answered is None:
                all_answered = now
            try:
                step = self._life.next_step(self._learned(recollection, silent, all_answered, now), self._seconds)
            except JobLost as error:
                raise self._can_not_move(error.message) from None if self._life.moving else error
            if isinstance(step, Restore):
                break
            if step.patience_begins:
                all_answered = None
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
        if self._life.moves or not recollection.table_is_whole:
            recollection.forget_partly_known()
        if self._life.moving:
            await self._deal_anew(recollection)
        self._owner.restore(recollection, step.without)
        done()
        if self._life.unknown:
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

    def _learned(
        self, recollection: Recollection, silent: list[str], all_answered: float | None, now: float
    ) -> Learned:
        unreported = recollection.unreported(self._job.spec.world_size)
        if not silent:
            self._unused = {rank: self._unused.get(rank, now) for rank in recollection.unused if rank in unreported}
        return Learned(
            silent=tuple(silent),
            unreported=tuple(unreported),
            gone=tuple(rank for rank in unreported if now - self._unused.get(rank, now) > LEASE_SECONDS),
            missing_traces=tuple(self._unposted(recollection)),
            deal_is_known=not self._life.lacks_deal(
                another_pod_runs_it=recollection.another_pod_runs_it, table_is_whole=recollection.table_is_whole
            ),
            another_pod_will_recover=recollection.another_pod_will_recover,
            waited_seconds=None if all_answered is None else now - all_answered,
        )

    async def _deal_anew(self, recollection: Recollection) -> None:
        job = self._job
        oldest = recollection.oldest_entered
        if resumed := [rank for rank, since in recollection.whole_since.items() if since > oldest]:
            raise self._can_not_move(
                f"rank {resumed[0]} was resumed within epoch {oldest}, and does not know what it had"
            )
        for epoch in recollection.epochs()[-_MOVED_EPOCHS:]:
            if (before := job.known_traces(epoch)) is None:
                continue  # nobody could have asked
            received = recollection.received(epoch)
            size, key = job.layout.num_samples, f"refill move {job.spec.seed} {epoch} {job.life.moves}"
            try:
                traces = await asyncio.to_thread(moved_traces, before, job.spec.world_size, size, received, key)
            except ValueError as error:
                raise self._can_not_move(str(error)) from error
            job.move_traces(epoch, traces)
            had = sum(len(positions) for positions, _ in received.values())
            log.warning(
                "job %s moves to %d pods in epoch %d: ranks keep the %d samples that they have, the rest is dealt anew",
                job.spec.name,
                job.num_pods,
                epoch,
                had,
            )

    def _can_not_move(self, why: str) -> JobLost:
        name, pods = self._job.spec.name, self._job.num_pods
        return JobLost(
            f"job {name} can't move to the {pods} pods that there are now: {why}; if journals were kept, resume it "
            "from a checkpoint (CacheDataset(..., resume=state)), else begin the epoch anew under another job name",
            job=name,
        )

    def _records_of_the_journal(self) -> Recollection:
        recollection = Recollection()
        if self._kept is not None:
            recollection.add(self._kept.records, self._job.ordinal)
            recollection.table_is_whole = self._kept.whole
        return recollection

    async def _ask_others(self, recollection: Recollection) -> list[str]:
        """Returns those that did not answer."""

        async def ask(pod: int) -> str | None:
            try:
                reader = RecordReader(await self._peers.records_from(pod, everything=self._life.moving))
                recollection.add(list(reader), pod)
            except UnknownJob:
                introduced, now = self._introduced.get(pod, -_FORGETS_WITHIN_SECONDS), time.monotonic()
                if self._life.moves and not self._life.moving and now - introduced < _FORGETS_WITHIN_SECONDS:
                    return None  # it has given the job up
                self._introduced[pod] = now
                await self._introduce(pod)  # it was restarted, too, and will ask in its turn
                return f"pod {pod}"
            except PodUnreachable:
                return f"pod {pod}"
            return f"pod {pod}, whose answer was damaged" if reader.damaged else None

        asked = self._peers.others
        if self._kept is not None and self._kept.whole:  # only those that were left a table must not keep it
            asked = [pod for pod in self._kept.handed_over_to if pod in asked]
        answers = await asyncio.gather(*(ask(pod) for pod in asked), return_exceptions=True)
        silent = []
        for answer in answers:
            if isinstance(answer, RefillError) and answer.status < 500:
                raise answer  # the job is another one there; a pod that failed is asked again
            if isinstance(answer, RefillError):
                silent.append(answer.message)
            elif isinstance(answer, BaseException):
                raise answer
            elif answer is not None:
                silent.append(answer)
        return silent

    def _restore_traces(self, recollection: Recollection) -> None:
        for (epoch, rank), sample_ids in recollection.traces.items():
            if self._life.moves and not self._life.moving:  # as they were dealt anew, whatever the rank has posted
                self._job.replace_trace(epoch, rank, sample_ids)
            else:
                self._job.restore_trace(epoch, rank, sample_ids)

    def _unposted(self, recollection: Recollection) -> list[str]:
        """Traces that are missing: without them, positions that were received can't be mapped to samples."""
        return [
            f"a trace of epoch {epoch}"
            for epoch in recollection.received_epochs()
            if epoch >= recollection.oldest_entered and self._job.known_traces(epoch) is None
        ]
