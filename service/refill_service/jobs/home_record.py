"""What has a home pod seen of its ranks' answers, so that an owner that lost its memory can be told?

It is kept from answer to answer; after a restart of the home pod itself, each rank has to tell it first.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from refill.errors import InvalidInput, PodUnreachable, RecordsWanted
from refill.protocol.records import Kind, Record
from refill.protocol.wire_format import BatchRequest, Int64Array
from refill_service.cache_core.epoch_order import check_ids
from refill_service.cache_core.received_samples import ReceivedSamples
from refill_service.jobs.job import Job

__all__ = ["HomeRecord"]


_MOST_EPOCHS = 4
"""Of a rank: it tells of the last two, and may have entered others since."""


class HomeRecord:
    """Of one job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._ranks: set[int] = set()
        """Ranks that have come here."""
        self._told: dict[int, int] = {}
        """Ranks that have told all that they had received before the pod was restarted, and since which epoch."""
        self._heard: set[int] = set()
        """Those, and ranks that have told what they still know of it. Nothing more is to be had from these."""
        self._unused: dict[int, bool] = {}
        """Ranks whose processes have told that they have received nothing, and whether none can have."""
        self._received = ReceivedSamples()
        self._restarts = [0] * job.num_pods
        """How often each pod has asked what it had sent, since it had lost its memory."""

    def rank_opened(self, rank: int) -> None:
        """Fact: a rank of this home asks for an epoch."""
        self._ranks.add(rank)
        if self._job.life.taken_up and rank not in self._heard:
            # Of a process that had received nothing: what it receives is known from now on, and no more.
            self._heard.add(rank)
            self._told[rank] = 0 if self._unused.get(rank) else self._job.life.ranks.newest + 2
        self.forget_ended()

    def forget_ended(self) -> None:
        """Whatever this rank asks for: another one may be in an epoch before, and must not be given what this one had
        of it."""
        self._received.forget(before_epoch=self._job.life.ranks.oldest_needed)

    def restarts_of(self, pod: int) -> int:
        """To be given to :meth:`came` with the answer to what is asked of the pod now."""
        return self._restarts[pod]

    def came(
        self, pod: int, restarts: int, request: BatchRequest, positions: Int64Array, sample_ids: Int64Array
    ) -> None:
        """Fact: an owner has answered. Raises :class:`PodUnreachable` when it has been restarted since, and was told
        that this had not come: then it may be on its way to somebody else."""
        if self._restarts[pod] != restarts:
            raise PodUnreachable(f"pod {pod} was restarted while it answered", pod=pod)
        self._remember(request.epoch, request.rank, positions, sample_ids)

    def _remember(self, epoch: int, rank: int, positions: Int64Array, sample_ids: Int64Array) -> None:
        length = self._job.trace_length(epoch, rank)
        if len(positions) and 0 <= int(positions.min()) <= int(positions.max()) < length:
            self._received.put(epoch, rank, length, positions, sample_ids)

    async def tell(self, rank: int, records: AsyncIterator[Record]) -> int:
        """Fact: this is what a rank has received. Told to a pod that was restarted, by the rank itself; returns the
        number of records. What came before an error is no less true, but the rank has not told all then."""
        self._job.check_rank(rank)
        whole_since, count, is_used = None, 0, True
        async for record in records:
            count += 1
            if record.kind is Kind.RECEIVED and record.rank == rank:
                self._hear(record.epoch, rank, *record.columns)
            elif record.kind is Kind.TRACE and record.rank == rank:
                self._hear_trace(record.epoch, rank, record.columns[0])
            elif record.kind is Kind.WHOLE and record.rank == rank:
                whole_since = record.epoch
            elif record.kind is Kind.UNUSED and record.rank == rank:
                is_used = False
        if not is_used:
            self._unused[rank] = self._job.life.has_not_begun(rank)
            return count
        self._heard.add(rank)
        if whole_since is not None:
            self._told[rank] = whole_since
        return count

    def _hear(self, epoch: int, rank: int, positions: Int64Array, sample_ids: Int64Array) -> None:
        known = self._received.epochs(rank)
        if epoch not in known and len(known) >= _MOST_EPOCHS:
            raise InvalidInput(f"rank {rank} tells of more than {_MOST_EPOCHS} epochs")
        self._remember(epoch, rank, positions, sample_ids)

    def _hear_trace(self, epoch: int, rank: int, sample_ids: Int64Array) -> None:
        job = self._job
        if job.spec.order != "explicit" or rank in job.posted.of_epoch(epoch):
            return
        check_ids(job.layout.num_samples, rank, sample_ids)
        with job.posted.arriving(len(sample_ids)):
            job.restore_trace(epoch, rank, sample_ids)

    def told(self, pod: int, *, everything: bool = False) -> Iterator[Record]:
        """What this pod knows of another one's answers, and forgets nothing of from now on: answers that are still on
        their way are refused.

        :param everything: what it knows of all pods' answers, for a job that moves.
        """
        self._restarts[pod] += pod != self._job.ordinal
        first, end = (0, self._job.layout.num_samples) if everything else self._job.owner_bounds[pod : pod + 2].tolist()
        for epoch, rank, positions, samples in self._received.of_samples(first, end):
            yield Record(Kind.RECEIVED, epoch, rank, (positions, samples))
        for rank, since in self._told.items() if self._job.life.taken_up else dict.fromkeys(self._ranks, 0).items():
            yield Record(Kind.WHOLE, since, rank)
        for rank in self._unused:
            yield Record(Kind.UNUSED, 0, rank)

    def is_reported(self, rank: int) -> bool:
        """Whether a process that has received something as this rank has told so, after a restart."""
        return rank in self._heard

    def check_reported(self, rank: int) -> None:
        """Raises :class:`RecordsWanted` when the rank has to tell something before it is answered."""
        life = self._job.life
        settled = rank in self._heard or (rank in self._unused and not life.recovering)
        if life.taken_up and not settled:
            raise RecordsWanted(
                f"pod {self._job.ordinal} was restarted and has yet to be told what rank {rank} of job "
                f"{self._job.spec.name} has received",
                rank=rank,
            )
