"""Where is a rank in an order that all ranks have, and where does it go on from a state? By the plan that it holds."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, MutableSequence, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from refill.errors import InvalidInput, JobConflict, RefillError
from refill.pods.batch_groups import BatchGroups
from refill.pods.index_reads import DatasetIndex
from refill.pods.resume_state import ResumeState
from refill.protocol.column_values import ColumnValues
from refill.protocol.dealing import Dealing
from refill.protocol.job_spec import JobSpec
from refill.protocol.plan_settings import PlanSettings
from refill.protocol.receipt_digest import DigestPart
from refill.protocol.wire_format import Int64Array

if TYPE_CHECKING:
    from refill.pods.received_batch import ReceivedBatch

_MAY_CHANGE = ("plan_bytes", "shares", "run")
"""Settings of policy planned that a job may name anew where an epoch has ended."""
_KEPT_DEALINGS = 64
_LISTED_AT = 11
"""Where it is said which list a rank asks by."""


class RankPlace:
    """Shares among all processes of a rank where it is: by which plan samples have come, from which position on an
    epoch is dealt to the ranks that there are now, and how many positions are dealt to a rank together.

    :param shared: zeros in memory that these share.
    """

    NUM_SHARED = 11 + 8

    def __init__(self, shared: MutableSequence[Any] | Any) -> None:
        self._shared = shared

    def goes_by(self, plan_id: str) -> None:
        """Fact: samples have come by this plan. Raises :class:`JobConflict` when others have come by another one."""
        number = _number_of(plan_id)
        if not self._shared[0]:
            self._shared[0] = number
        if int(self._shared[0]) != number:
            raise JobConflict(
                f"samples have come to this rank by another plan than {plan_id:.8}: end the job (refill end) and start "
                "all ranks from the same state"
            )

    def may_go_by(self, plan: dict[str, Any]) -> bool:
        """Whether nothing has come to this rank by another plan."""
        return not self.has_begun or int(self._shared[0]) == _number_of(PlanSettings.from_dict(plan).plan_id)

    @property
    def has_begun(self) -> bool:
        """Whether samples have come, here or before the state that the loop goes on from."""
        return bool(self._shared[0])

    def is_dealt(self, epoch: int, start: int, had: int, batch: int) -> None:
        """Fact: the loop goes on in an epoch of which all positions before ``start`` were had when it was dealt, and
        ``had`` of each rank's since.

        :param batch: how many positions of that epoch are dealt to a rank together; 0: as in the other epochs.
        """
        self._shared[2], self._shared[3], self._shared[4] = start, had, batch
        self._shared[1] = epoch + 1

    @property
    def epoch(self) -> int | None:
        """That is dealt so; None: the loop began with no state."""
        return int(self._shared[1]) - 1 if self._shared[1] else None

    def start(self, epoch: int) -> int:
        return int(self._shared[2]) if epoch == self.epoch else 0

    def had(self, epoch: int) -> int:
        return int(self._shared[3]) if epoch == self.epoch else 0

    def asks_in_batches(self, batch: int, workers: int = 0) -> None:
        """Fact: the loop's loader makes batches of so many, by so many workers. The first one that says so stands: what
        has been asked for stays dealt as it was."""
        if not self._shared[5]:
            self._shared[5], self._shared[6] = batch, batch * max(1, workers)

    def asks(self, epoch: int, end: int, count: int) -> None:
        """Fact: a process asks for so many positions of an epoch, all before ``end``. Should two say so
        in the same moment, one may be lost: then an epoch is not known to be whole."""
        shared = self._shared
        if int(shared[7]) != epoch + 1:
            if int(shared[7]) and int(shared[8]) == int(shared[9]):
                shared[10] = int(shared[7])
            had = self.had(epoch)
            shared[7], shared[8], shared[9] = epoch + 1, had, had
        shared[8] = int(shared[8]) + count
        shared[9] = max(int(shared[9]), end)

    @property
    def has_asked(self) -> bool:
        """Whether a process of the rank has asked for samples; what lies in a state does not count."""
        return bool(self._shared[7])

    def has_left_none(self, epoch: int) -> bool:
        """Whether the rank is known to have asked for all positions of the epoch before, up to where it ended: nobody
        need look for what it has left out."""
        shared = self._shared
        if int(shared[7]) == epoch:
            return int(shared[8]) == int(shared[9])
        return epoch > 0 and int(shared[10]) == epoch

    def is_listed(self, epoch: int, length: int, digest: str) -> None:
        """Fact: the rank asks by a list of its own in an epoch. The last two are known.

        :param digest: of the list, 16 bytes in hexadecimal digits.
        """
        at = _LISTED_AT + epoch % 2 * 4
        self._shared[at] = 0  # another process may look
        for place, half in enumerate((digest[:16], digest[16:]), at + 2):
            self._shared[place] = int(half, 16) - (1 << 63)
        self._shared[at + 1] = length
        self._shared[at] = epoch + 1

    def listed(self, epoch: int) -> tuple[int, str] | None:
        """How long the rank's list is, and its digest; None: it is not known."""
        at = _LISTED_AT + epoch % 2 * 4
        if int(self._shared[at]) != epoch + 1:
            return None
        length, *halves = (int(self._shared[place]) for place in range(at + 1, at + 4))
        return length, "".join(f"{half + (1 << 63):016x}" for half in halves)

    @property
    def at_once(self) -> int:
        """Positions that the loop's loader asks for at once; 0: not known."""
        return int(self._shared[6])

    def batch(self, epoch: int) -> int:
        """Positions of an epoch that are dealt to a rank together, as far as that is known."""
        return int(epoch == self.epoch and self._shared[4]) or int(self._shared[5]) or 1


def _number_of(plan_id: str) -> int:
    """As memory that processes share can hold it."""
    return int(plan_id[:15], 16)


_dealing = lru_cache(maxsize=_KEPT_DEALINGS)(Dealing)


class DealtConnection(ABC):
    """What a rank asks where all ranks have one order: its places of an epoch, which deal that order to the ranks.

    :param place: shared by all copies.
    :param groups: of ranks that share a batch; None: as many in a row as ``spec`` says.
    """

    home: str
    """The pod that this rank's requests go to."""

    def __init__(self, spec: JobSpec, rank: int, place: RankPlace | None, groups: BatchGroups | None) -> None:
        self.spec, self.rank = spec, rank
        self._groups = groups or BatchGroups.in_a_row(spec.batch_group)
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
        return _dealing(
            self.num_positions(epoch),
            self.spec.num_groups,
            self._batch_dealt(epoch),
            self._place.start(epoch),
            self.spec.drop_last,
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
    def index(self) -> DatasetIndex | None:
        """What reads the index, as long as no job is registered. None: there is none."""

    @abstractmethod
    def lengths(self, num_samples: int) -> Int64Array:
        """Bytes of all samples of a dataset."""

    @abstractmethod
    def column(self, name: str, num_samples: int) -> Iterator[ColumnValues]:
        """A column of the index, of all samples of a dataset, in blocks."""

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

    def listed(self, epoch: int) -> tuple[int, str] | None:
        """How long the list is by which this rank asks in an epoch, and its digest; None: there is none, or it is not
        known. Another process of the rank may have posted it, or one that is gone."""
        return self._place.listed(epoch)

    def had_of_list(self, epoch: int, had: int, length: int, digest: str) -> None:
        """Fact: the loop goes on from a state that it saved when it had so many positions of this list."""
        self._place.is_listed(epoch, length, digest)

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


def goes_on_from(state: ResumeState, connection: DealtConnection) -> ResumeState:
    """The place of this rank in what a state leaves of its epoch; dealt anew if the number of ranks has changed.

    Raises :class:`InvalidInput` for the state of a job that was not planned, and for one that has other lengths.
    """
    if state.plan is None:
        raise InvalidInput(
            f"the state is of job {state.job} by another policy: it can't go on with policy "
            "planned; start the epoch over, without it"
        )
    keeps_plan = connection.keeps_plan_of(state)
    if connection.spec.is_listed:
        return _goes_on_in_list(state, connection)
    same_ranks = state.num_groups == connection.spec.num_groups
    num_positions = connection.num_positions(state.epoch)
    if state.at_end or not state.position:
        start, position = (0, 0) if state.at_end else (state.start, 0)
    elif same_ranks:
        start, position = state.start, state.position
    elif state.num_groups > 1 and state.position % state.batch and state.position != state.length:
        raise InvalidInput(
            f"the state is of {state.num_groups} ranks that had {state.position} samples each, and were dealt "
            f"{state.batch} at a time: in the middle of these it needs as many ranks again, and there are "
            f"{connection.spec.num_groups}; save states between batches of {state.batch}, as the epoch was begun with, "
            "or at its end"
        )
    else:
        start, position = min(state.num_had, num_positions), 0
    connection.deals(state.epoch, start, position, state.batch if position else 0)
    if keeps_plan:  # receipts count by plan
        if state.at_end:
            connection.had_before(state.epoch, (), state.epoch, state.digest)
        else:
            connection.had_before(state.epoch, state.digest, state.epoch - 1, state.digest_before)
    length = connection.dealing(state.epoch).per_rank
    if state.at_end:
        position = length
    elif same_ranks and state.length and state.length != length:
        raise InvalidInput(
            f"the state counts {state.length} samples of rank {state.rank} in epoch {state.epoch}, and there are "
            f"{length}: the dataset or drop_last has changed since it was saved"
        )
    return dataclasses.replace(
        state,
        dataset=connection.spec.dataset,
        incarnation=connection.plan_id,
        world_size=connection.spec.world_size,
        group=connection.spec.batch_group,
        rank=connection.rank,
        position=position,
        length=length,
        start=start,
        batch=connection.dealing(state.epoch).batch,
    )


def names_another(spec: JobSpec, plan: PlanSettings) -> bool:
    """Whether a job asks for another plan than this one of the same samples."""
    named = {"chunk_size": spec.chunk_size} | {name: spec.policy_settings.get(name) for name in _MAY_CHANGE}
    planned = {"chunk_size": plan.chunk_size} | plan.policy_settings()
    return any(value and value != planned[name] for name, value in named.items())


def _goes_on_in_list(state: ResumeState, connection: DealtConnection) -> ResumeState:
    """Each rank has a list of its own: the state stays that of its rank."""
    spec = connection.spec
    if state.num_groups != spec.num_groups:
        raise InvalidInput(
            f"the state was saved with world_size {state.world_size}, and this job has {spec.world_size}: ranks ask "
            "by lists of their own, so as many ranks must go on as before, or start the epoch over without the state"
        )
    connection.deals(state.epoch, 0, 0 if state.at_end else state.position)
    if state.listed and state.rank == connection.rank:  # at an epoch's end it may be another rank's
        connection.had_of_list(state.epoch, state.position, *state.listed)
    return dataclasses.replace(
        state,
        dataset=spec.dataset,
        incarnation=connection.plan_id,
        world_size=spec.world_size,
        group=spec.batch_group,
        start=0,
    )


def state_at(connection: DealtConnection, epoch: int, position: int, length: int) -> ResumeState:
    """Of a loop of this rank that has come to ``position`` of the ``length`` positions of an epoch."""
    spec, dealing = connection.spec, connection.dealing(epoch)
    now = dealing.num_ranks, dealing.batch, dealing.start, dealing.drop_last, connection.group
    parts = connection.digest_parts(epoch)
    return ResumeState(
        spec.name,
        spec.dataset,
        connection.plan_id,
        spec.world_size,
        connection.rank,
        epoch,
        position,
        length,
        plan=connection.plan,
        start=dealing.start,
        batch=dealing.batch,
        group=spec.batch_group,
        # Of a loop that counts for itself, the state may be of an earlier position.
        digest=tuple(each for each in parts if each.dealt != now or not each.spans or each.spans[-1][1] <= position),
        digest_before=tuple(connection.digest_parts(epoch - 1)),
        listed=connection.listed(epoch),
    )
