"""What have a home pod's ranks received? Kept for an owner that lost its memory, which asks the home for its records.

Each answer adds to it. After a restart of the home pod itself, each rank has to report what it has received first.
"""

from __future__ import annotations

from collections.abc import Iterator

from refill.errors import InvalidInput, PodUnreachable, RecordsWanted
from refill.protocol.records import Kind, Record
from refill.protocol.wire_format import BatchRequest, Int64Array
from refill_service.cache_core.damaged_samples import DamagedSamples
from refill_service.cache_core.job_state import JobState
from refill_service.cache_core.received_samples import ReceivedSamples

__all__ = ["HomeRecord", "RankReport"]


_MOST_EPOCHS = 4
"""Of one rank: it reports the last two, and may have entered others since."""


class HomeRecord:
    """Of one job."""

    def __init__(self, job: JobState) -> None:
        self._job = job
        self.damaged = DamagedSamples()
        """What ranks went on without."""
        self._ranks: set[int] = set()
        """Ranks that have come here."""
        self._complete_since: dict[int, int] = {}
        """Of ranks that reported all that they had received before this pod was restarted: from which epoch on their
        reports are complete."""
        self._reported: set[int] = set()
        """Ranks that have reported, completely or in part. They have nothing more to report."""
        self._unused: dict[int, bool] = {}
        """Ranks whose process reported that it had received nothing, and whether no other process of the rank can have
        received anything."""
        self._received = ReceivedSamples()
        self._restarts = [0] * job.num_pods
        """How often each pod has asked what it had sent, since it had lost its memory."""

    def rank_opened(self, rank: int) -> None:
        """Fact: a rank of this home asks for an epoch."""
        self._ranks.add(rank)
        if self._job.life.ran_before and rank not in self._reported:
            # Its process had received nothing. What it receives from now on is known; what another one had is not.
            self._reported.add(rank)
            self._complete_since[rank] = 0 if self._unused.get(rank) else self._job.life.ranks.newest + 2
        self.forget_ended()

    def forget_ended(self) -> None:
        """Drop epochs that no rank of the job needs any more. An older epoch is kept while another rank is in it: else
        that rank could be given what ranks of this home had of it."""
        self._received.forget(before_epoch=self._job.life.ranks.oldest_needed)

    def restarts_of(self, pod: int) -> int:
        """To be given to :meth:`came` with the answer to what is asked of the pod now."""
        return self._restarts[pod]

    def came(
        self, pod: int, restarts: int, request: BatchRequest, positions: Int64Array, sample_ids: Int64Array
    ) -> None:
        """Fact: an owner has answered. Raises :class:`PodUnreachable` when the owner was restarted since it was asked:
        this pod's records for it said that this answer had not come, so it may give the samples to another rank."""
        if self._restarts[pod] != restarts:
            raise PodUnreachable(f"pod {pod} was restarted while it answered", pod=pod)
        self._remember(request.epoch, request.rank, positions, sample_ids)

    def _remember(self, epoch: int, rank: int, positions: Int64Array, sample_ids: Int64Array) -> None:
        length = self._job.trace_length(epoch, rank)
        if len(positions) and 0 <= int(positions.min()) <= int(positions.max()) < length:
            self._received.put(epoch, rank, length, positions, sample_ids)

    def report_of(self, rank: int) -> RankReport:
        """Fact: a rank begins to report what it has received, since this pod was restarted. What comes before an error
        is kept, and the rank has to report again."""
        self._job.check_rank(rank)
        return RankReport(self, rank)

    def _reports(self, report: RankReport) -> None:
        rank = report.rank
        if not report.is_used:
            self._unused[rank] = self._job.life.has_not_begun(rank)
            return
        self._reported.add(rank)
        if report.whole_since is not None:
            self._complete_since[rank] = report.whole_since

    def rank_goes_without(self, epoch: int, rank: int, positions: Int64Array, sample_ids: Int64Array) -> None:
        """Fact: a rank goes on without what came for these positions, since it is damaged.

        Raises :class:`InvalidInput` for what is not in the dataset.
        """
        last = self._job.layout.num_samples - 1
        if len(sample_ids) and not 0 <= int(sample_ids.min()) <= int(sample_ids.max()) <= last:
            raise InvalidInput(f"rank {rank} tells of damaged samples that are not in the dataset, 0 to {last}")
        if (traces := self._job.known_traces(epoch)) is not None:  # repeats are counted where they are no repeats
            inside = (positions >= 0) & (positions < traces.length(rank))
            positions, sample_ids = positions[inside], sample_ids[inside]
            sample_ids = sample_ids[~traces.asked(rank, positions)[1]]
        self.damaged.rank_goes_without(epoch, rank, sample_ids.tolist())

    def _add_received(self, epoch: int, rank: int, positions: Int64Array, sample_ids: Int64Array) -> None:
        known = self._received.epochs(rank)
        if epoch not in known and len(known) >= _MOST_EPOCHS:
            raise InvalidInput(f"rank {rank} reports more than {_MOST_EPOCHS} epochs")
        self._remember(epoch, rank, positions, sample_ids)

    def _add_trace(self, epoch: int, rank: int, sample_ids: Int64Array) -> None:
        job = self._job
        if job.spec.order != "explicit" or rank in job.posted.of_epoch(epoch):
            return
        job.check_trace(rank, sample_ids)
        with job.posted.arriving(len(sample_ids)):
            job.restore_trace(epoch, rank, sample_ids)

    def records_for(self, pod: int, *, everything: bool = False) -> Iterator[Record]:
        """This pod's records of another one's answers. Answers of that pod that are still on their way are refused from
        now on, since these records say that they have not come.

        :param everything: the records of all pods' answers, for a job that moves.
        """
        self._restarts[pod] += pod != self._job.ordinal
        first, end = (0, self._job.layout.num_samples) if everything else self._job.owner_bounds[pod : pod + 2].tolist()
        for epoch, rank, positions, samples in self._received.of_samples(first, end):
            yield Record(Kind.RECEIVED, epoch, rank, (positions, samples))
        for rank, since in (
            self._complete_since.items() if self._job.life.ran_before else dict.fromkeys(self._ranks, 0).items()
        ):
            yield Record(Kind.WHOLE, since, rank)
        if self._job.life.ran_before:
            for rank in self._reported - self._complete_since.keys():
                yield Record(Kind.PART, 0, rank)
        for rank in self._unused:
            yield Record(Kind.UNUSED, 0, rank)

    def is_reported(self, rank: int) -> bool:
        """Whether a process that has received something as this rank has reported, after a restart."""
        return rank in self._reported

    def check_reported(self, rank: int) -> None:
        """Raises :class:`RecordsWanted` when the rank has to report before it is answered."""
        life = self._job.life
        settled = rank in self._reported or (rank in self._unused and not life.recovering)
        if life.ran_before and not settled:
            raise RecordsWanted(
                f"pod {self._job.ordinal} was restarted and has yet to be told what rank {rank} of job "
                f"{self._job.spec.name} has received",
                rank=rank,
            )


class RankReport:
    """One that a rank makes."""

    def __init__(self, home: HomeRecord, rank: int) -> None:
        self.rank = rank
        self.num_records = 0
        self.whole_since: int | None = None
        """The epoch from which on it says all; None: it does not."""
        self.is_used = True
        """Whether the process that reports has received anything."""
        self._home = home

    def add(self, record: Record) -> None:
        """Raises what :meth:`JobState.restore_trace` and :class:`PostedTraces` raise."""
        self.num_records += 1
        if record.rank != self.rank:
            return
        if record.kind is Kind.RECEIVED:
            self._home._add_received(record.epoch, self.rank, *record.columns)
        elif record.kind is Kind.TRACE:
            self._home._add_trace(record.epoch, self.rank, record.columns[0])
        elif record.kind is Kind.DAMAGED:
            self._home.rank_goes_without(record.epoch, self.rank, *record.columns)
        elif record.kind is Kind.WHOLE:
            self.whole_since = record.epoch
        elif record.kind is Kind.UNUSED:
            self.is_used = False

    def ended(self) -> None:
        """Fact: all of it has come."""
        self._home._reports(self)
