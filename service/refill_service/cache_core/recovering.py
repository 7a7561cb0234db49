"""What has a pod learned that recovers a job, is it enough, and what follows from it?

It asks the others round after round (:mod:`refill_service.membership.recovery`). Each round puts records together:
those of its own journal, of itself as the home of ranks that have reported since, and of all who answer. When
:meth:`JobLife.next_step` says that it is enough, what was answered is restored. A pod that learns for all how a job
moved deals the rest of its epochs anew first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from refill.errors import JobLost
from refill.protocol.records import Record
from refill_service.cache_core.epoch_order import Traces
from refill_service.cache_core.home_record import HomeRecord
from refill_service.cache_core.job_lifecycle import Learned, Restore, Wait
from refill_service.cache_core.job_state import JobState
from refill_service.cache_core.moved_epoch import moved_traces
from refill_service.cache_core.owner_machine import Order, OwnerMachine, Restored
from refill_service.cache_core.rank_leases import LEASE_SECONDS
from refill_service.cache_core.recollection import Recollection
from refill_service.cache_core.sample_mapping import Int64Array

__all__ = ["EpochToDeal", "FoundInJournal", "Recovering", "restore"]

_GOES_ON_WITH_EPOCHS = 3
"""As many as an owner has open."""
_FORGETS_WITHIN_SECONDS = 2.0
"""A pod to which a job was introduced, and that does not know it any more so soon, has given it up: it has found no pod
that knows how epochs were dealt."""


class FoundInJournal(NamedTuple):
    """What the pod's own journal has of the job."""

    records: Sequence[Record]
    whole: bool
    """Whether nothing that was delivered can be missing."""
    handed_over_to: tuple[int, ...] = ()
    """Pods to which records may have been handed over when that run ended. They must not keep them for later runs."""


class EpochToDeal(NamedTuple):
    """An epoch that had begun on other pods."""

    epoch: int
    before: Traces
    """As it was asked for so far."""
    received: Mapping[int, tuple[Int64Array, Int64Array]]
    """By rank, ``(positions, samples)`` of what it keeps."""
    world_size: int
    num_samples: int
    key: str

    @property
    def num_received(self) -> int:
        return sum(len(positions) for positions, _ in self.received.values())

    def traces(self) -> dict[int, Int64Array]:
        """For :meth:`JobState.move_traces`. Raises ValueError as :func:`moved_traces`."""
        return moved_traces(self.before, self.world_size, self.num_samples, self.received, self.key)


class Recovering:
    """One job at one pod, after a restart. Times are in seconds, and never go back."""

    def __init__(self, job: JobState, home: HomeRecord, journal: FoundInJournal | None) -> None:
        self._job = job
        self._life = job.life
        self._home = home
        self._journal = journal
        self._all_answered: float | None = None
        """Since when all other pods have answered."""
        self._introduced: dict[int, float] = {}
        """When the job was last introduced to each pod that did not know it."""
        self._unused: dict[int, float] = {}
        """By rank, since when its processes have reported nothing but that they had received nothing."""

    def from_journal(self) -> Recollection | None:
        """What to go on with from the journal alone; None: that is not enough."""
        if self._journal is None or not self._journal.whole or self._journal.handed_over_to:
            return None
        recollection = self._records_of_the_journal()
        self._restore_traces(recollection)
        return recollection

    def whom_to_ask(self, others: Sequence[int]) -> list[int]:
        """Of the other pods. With a journal that is whole, only those that must not keep a table."""
        if self._journal is None or not self._journal.whole:
            return list(others)
        return [pod for pod in self._journal.handed_over_to if pod in others]

    def begin_round(self) -> Recollection:
        """What this pod knows itself; what others know is to be added."""
        recollection = self._records_of_the_journal()
        ordinal = self._job.ordinal
        recollection.add(self._home.records_for(ordinal, everything=self._life.moving), ordinal)
        return recollection

    def introduces_to(self, pod: int, now: float) -> bool:
        """Fact: a pod that was asked does not have the job. Whether it is to be introduced there, and counts as silent:
        it was restarted, too, and will ask in its turn. Else it has given the job up."""
        before = self._introduced.get(pod, -_FORGETS_WITHIN_SECONDS)
        if self._life.moves and not self._life.moving and now - before < _FORGETS_WITHIN_SECONDS:
            return False
        self._introduced[pod] = now
        return True

    def end_round(
        self, recollection: Recollection, silent: Sequence[str], now: float, patience_seconds: float
    ) -> Wait | Restore:
        """Fact: all were asked. When what follows is to restore, ``recollection`` has what is to be restored.

        Raises as :meth:`JobLife.next_step`.

        :param silent: other pods that may have records and did not answer, in words.
        :param patience_seconds: how long ranks are waited for that do not report.
        """
        self._restore_traces(recollection)
        if not silent and self._all_answered is None:
            self._all_answered = now
        try:
            step = self._life.next_step(self._learned(recollection, silent, now), patience_seconds)
        except JobLost as error:
            if not self._life.moving:
                raise
            raise self.can_not_move(error.message) from None
        if isinstance(step, Wait):
            if step.patience_begins:
                self._all_answered = None
        elif self._life.moves or not recollection.table_is_whole:
            recollection.forget_partly_known(self._job.spec.world_size)
        return step

    def to_deal(self, recollection: Recollection) -> Iterator[EpochToDeal]:
        """Epochs that are to be dealt anew, of a job that moves. Raises :class:`JobLost` when they can't be."""
        if not self._life.moving:
            return
        job, oldest = self._job, recollection.oldest_entered
        if resumed := [rank for rank, since in recollection.whole_since.items() if since > oldest]:
            raise self.can_not_move(
                f"rank {resumed[0]} was resumed within epoch {oldest}, and does not know what it had"
            )
        for epoch in recollection.epochs()[-_GOES_ON_WITH_EPOCHS:]:
            if (before := job.known_traces(epoch)) is not None:  # else nobody could have asked
                received = recollection.received(epoch)
                size, key = job.layout.num_samples, f"refill move {job.spec.seed} {epoch} {job.life.moves}"
                yield EpochToDeal(epoch, before, received, job.spec.world_size, size, key)

    def can_not_move(self, why: str) -> JobLost:
        name, pods = self._job.spec.name, self._job.num_pods
        return JobLost(
            f"job {name} can't move to the {pods} pods that there are now: {why}; begin the epoch anew under "
            "another job name",
            job=name,
        )

    def _records_of_the_journal(self) -> Recollection:
        recollection = Recollection()
        if self._journal is not None:
            recollection.add(self._journal.records, self._job.ordinal)
            recollection.table_is_whole = self._journal.whole
        return recollection

    def _restore_traces(self, recollection: Recollection) -> None:
        for (epoch, rank), sample_ids in recollection.traces.items():
            if self._life.moves and not self._life.moving:  # as they were dealt anew, whatever the rank has posted
                self._job.replace_trace(epoch, rank, sample_ids)
            else:
                self._job.restore_trace(epoch, rank, sample_ids)

    def _learned(self, recollection: Recollection, silent: Sequence[str], now: float) -> Learned:
        unreported = recollection.unreported(self._job.spec.world_size)
        if not silent:
            self._unused = {rank: self._unused.get(rank, now) for rank in recollection.unused if rank in unreported}
        return Learned(
            silent=tuple(silent),
            unreported=tuple(unreported),
            gone=tuple(
                rank
                for rank in unreported
                if now - self._unused.get(rank, now) > LEASE_SECONDS
                or (recollection.has_reported_all(rank) and not self._life.moving)
            ),
            missing_traces=tuple(self._unposted(recollection)),
            deal_is_known=not self._life.lacks_deal(
                another_pod_runs_it=recollection.another_pod_runs_it, table_is_whole=recollection.table_is_whole
            ),
            another_pod_will_recover=recollection.another_pod_will_recover,
            waited_seconds=None if self._all_answered is None else now - self._all_answered,
        )

    def _unposted(self, recollection: Recollection) -> list[str]:
        """Traces that are missing: without them, positions that were received can't be mapped to samples."""
        return [
            f"a trace of epoch {epoch}"
            for epoch in recollection.received_epochs()
            if epoch >= recollection.oldest_entered and self._job.known_traces(epoch) is None
        ]


def restore(job: JobState, machine: OwnerMachine, recollection: Recollection, without: Sequence[int]) -> list[Order]:
    """Fact: this is what was answered before a restart.

    Raises :class:`JobLost` when it can't be of this job as it is now.

    :param without: ranks that had not reported what they received.
    """
    numbers = recollection.epochs()[-_GOES_ON_WITH_EPOCHS:]
    forgotten = recollection.a_place_is_unknown(job.spec.world_size)
    if forgotten and numbers and 0 < recollection.newest_entered <= numbers[0]:
        numbers.insert(0, recollection.newest_entered - 1)  # a rank may be there
    first = min(numbers, default=0)
    known_from = {rank: epoch for rank, epoch in recollection.known_from.items() if epoch > first}
    job.life.unknown.restored(known_from, without, recollection.newest_entered)
    for rank, (epoch, homes) in recollection.ranks.items():
        job.life.ranks.restored(rank, epoch, homes)
    for rank in recollection.given_up(without):
        job.life.ranks.given_up(rank)
    share, epochs = job.share, []
    for epoch in numbers:
        if (traces := job.known_traces(epoch)) is not None:  # else nobody could have asked
            answered = recollection.answered(epoch, traces, share.first_sample, share.end_sample)
            epochs.append(Restored(epoch, traces, answered))
    try:
        orders = machine.restored(epochs, forgotten=forgotten)
    except ValueError as error:
        raise JobLost(
            f"job {job.spec.name} can't go on after the restart of pod {job.ordinal}: {error}", job=job.spec.name
        ) from error
    job.life.restored(complete=not without)
    return orders
