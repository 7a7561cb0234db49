"""What does a rank ask where all ranks have one order? Its places of an epoch, which deal that order to the ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from refill.batch_groups import BatchGroups
from refill.errors import InvalidInput, RefillError
from refill.planned_place import RankPlace
from refill.protocol.dealing import Dealing
from refill.protocol.job_spec import JobSpec
from refill.protocol.receipt_digest import DigestPart
from refill.protocol.wire_format import Int64Array
from refill.received_batch import ReceivedBatch
from refill.resume_state import ResumeState

__all__ = ["DealtConnection"]


class DealtConnection(ABC):
    """
    :param place: shared by all copies.
    :param groups: of ranks that share a batch; None: as many in a row as ``spec`` says.
    """

    home: str
    """The pod that this rank's requests go to."""

    def __init__(self, spec: JobSpec, rank: int, place: RankPlace | None, groups: BatchGroups | None) -> None:
        self.spec, self.rank = spec, rank
        self._groups = groups or BatchGroups(spec.batch_group)
        self._place = place or RankPlace([0] * RankPlace.NUM_SHARED)

    @abstractmethod
    def info(self) -> dict[str, Any]:
        """What the pods say of the job; registers it the first time."""

    @abstractmethod
    def num_samples(self) -> int:
        """There are so many ids. The job need not be registered, and is not by this."""

    @abstractmethod
    def num_positions(self, epoch: int) -> int:
        """Of an epoch's one order; -1: of any. The job is registered."""

    @property
    @abstractmethod
    def plan(self) -> dict[str, Any]:
        """What the order follows from, whole, for states."""

    @property
    def plan_id(self) -> str:
        return str(self.info()["plan_id"])

    @property
    def group(self) -> int:
        """As which rank it asks for samples: of those that share a batch, all ask as one."""
        return self._groups.number(self.rank)

    def samples_in(self, epoch: int) -> int:
        """Positions of each rank in an epoch, or in the rest of one that a state leaves."""
        self.info()
        return self.dealing(epoch).per_rank

    @abstractmethod
    def keeps_plan_of(self, state: ResumeState) -> bool:
        """Fact: the loop goes on from a state, by its plan, which holds for all that comes. False: at the end of its
        epoch it goes on by another one. Raises :class:`InvalidInput` or :class:`JobConflict` where it can't."""

    def deals(self, epoch: int, start: int, had: int, batch: int = 0) -> None:
        """Fact: see :meth:`RankPlace.is_dealt`."""
        self._place.is_dealt(epoch, start, had, batch)

    def asks_in_batches(self, batch: int, workers: int = 0) -> None:
        """Fact: see :meth:`RankPlace.asks_in_batches`."""
        if not self._place.at_once:
            self._place.asks_in_batches(batch, workers)

    def dealing(self, epoch: int) -> Dealing:
        """How the positions of an epoch are dealt to the ranks."""
        if self.spec.is_listed:
            return Dealing.of_lists(self.spec.num_groups)
        return Dealing(
            self.num_positions(epoch),
            self.spec.num_groups,
            self._batch_dealt(epoch),
            self._place.start(epoch),
            drop_last=self.spec.drop_last,
        )

    def _batch_dealt(self, epoch: int) -> int:
        """How many positions in a row a rank gets together. Where nothing is shuffled each of R ranks gets every R-th
        position, as torch's DistributedSampler has it: who puts together what ranks found relies on that."""
        return self._place.batch(epoch) if self.spec.shuffle else 1

    def _check_positions(self, epoch: int, positions: Int64Array) -> None:
        if self.group >= self.spec.num_groups:
            raise InvalidInput(
                f"rank {self.rank} asks, but job {self.spec.name} was registered for world_size {self.spec.world_size}"
            )
        length = self.dealing(epoch).per_rank
        if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < length:
            raise InvalidInput(
                f"rank {self.rank} asks for position {int(positions.max())}, but epoch {epoch} of job {self.spec.name} "
                f"has {length} positions for it"
            )

    # Samples.

    @abstractmethod
    def batch(self, epoch: int, positions: Int64Array, sample_ids: Int64Array | None = None) -> ReceivedBatch:
        """The samples that answer positions of this rank, in their order.

        :param sample_ids: ``(n,)`` which ones, where ranks have the order in lists of their own.
        """

    @abstractmethod
    def samples(self, sample_ids: Int64Array) -> ReceivedBatch:
        """Exactly these samples, outside of any epoch. In as many requests as pods want it split into."""

    @abstractmethod
    def labels(self, num_samples: int) -> Int64Array:
        """Of all samples of a dataset that has labels."""

    @abstractmethod
    def lengths(self, num_samples: int) -> Int64Array:
        """Bytes of all samples of a dataset."""

    @abstractmethod
    def of_rank(self, rank: int) -> DealtConnection:
        """A connection of this process for another rank, which asks for nothing itself: its process is given what this
        one reads."""

    # What the loop has had, for receipts.

    @abstractmethod
    def loop_has(self, epoch: int, first: int, end: int) -> None:
        """Fact: the loop was given what came for the positions ``[first, end)`` of this rank."""

    @abstractmethod
    def had_before(
        self, epoch: int, parts: Sequence[DigestPart], last: int, parts_of_last: Sequence[DigestPart]
    ) -> None:
        """Fact: the loop goes on from a state of an epoch, of which loops had these by then, and those of the epoch
        ``last``, which they had left."""

    @abstractmethod
    def digest_parts(self, epoch: int) -> list[DigestPart]:
        """What the loop has had of an epoch, and others before the state that it goes on from."""

    @abstractmethod
    def goes_without(self, epoch: int, positions: Int64Array, sample_ids: Int64Array, why: list[RefillError]) -> None:
        """Fact: this rank goes on without what came for these positions, since it is damaged. Receipts name it."""

    @abstractmethod
    def skipped(self, epoch: int, start: int, end: int) -> bool:
        """Whether this rank has left out some of the positions ``[start, end)`` of an epoch so far: in all its
        processes. False when the pods don't know."""

    @abstractmethod
    def report(self, data_wait_seconds: float, samples: int, num_bytes: int) -> None:
        """Report to the home pod what the loop has seen since the last report; tried once."""

    @abstractmethod
    def epoch_counts(self, epoch: int) -> dict[str, Any]:
        """Counts of an epoch, of each pod and in sum."""

    @abstractmethod
    def end_job(self) -> None:
        """End the job on all pods and free its memory; nothing happens when that was done before."""
