"""One run of a pod, its volume, and a training process, without I/O: what the shells of ``jobs/`` and ``membership/``
keep and carry out, for :mod:`membership_model` and :mod:`requests_model`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from refill.errors import (
    EpochEnded,
    PodBusy,
    PodRecovering,
)
from refill.protocol.policies import terms_of
from refill.protocol.records import Kind, Record, RecordReader, encode_records
from refill_service.cache_core.epoch_order import Traces
from refill_service.cache_core.home_machine import Batch, HomeMachine, OwnerRequest, SentAhead
from refill_service.cache_core.home_record import HomeRecord
from refill_service.cache_core.job_lifecycle import (
    Begin,
    JournalFound,
)
from refill_service.cache_core.job_state import JobState
from refill_service.cache_core.owner_machine import (
    Answered,
    CarryOut,
    CloseBooks,
    EpochState,
    Open,
    OpenEpoch,
    Order,
    OwnerMachine,
    Write,
)
from refill_service.cache_core.pod_records import PodRecords, snapshot, snapshots_say_all
from refill_service.cache_core.policies.interface import Carried, EpochBegan, Policy, Read
from refill_service.cache_core.policies.registry import new_policy
from refill_service.cache_core.receipt import EpochReceipt, receipt_of
from refill_service.cache_core.recovering import FoundInJournal, Recovering
from refill_service.cache_core.sample_mapping import AbstractMapping, abstract_chunks_for_budget

if TYPE_CHECKING:
    from membership_model import MembershipModel

Int64s = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class Shape:
    blobs: tuple[int, ...]
    chunk_size: int
    num_pods: int
    num_ranks: int
    policy: str
    num_epochs: int
    journals: bool
    window: int
    remote_bytes: int
    memory_bytes: int
    drop_last: bool
    seed: int


class Volume:
    """A pod's journal of the job, as ``journal/`` keeps it: a file for each epoch."""

    def __init__(self) -> None:
        self.incarnation = ""
        self.num_pods = 0
        self.files: dict[int, bytes] = {}
        self.receipts: dict[int, EpochReceipt] = {}
        self.whole = True

    def begin(self, pod: Pod) -> None:
        self.incarnation, self.num_pods, self.whole = pod.job.incarnation, pod.job.num_pods, True
        self.files = {e: encode_records(snapshot(pod.job, pod.owner, e)) for e in pod.owner.live_epochs}

    def write(self, record: Record) -> None:
        self.files[record.epoch] = self.files.get(record.epoch, b"") + record.encode()

    def found(self) -> FoundInJournal:
        records = [record for epoch in sorted(self.files) for record in RecordReader(self.files[epoch])]
        return FoundInJournal(records, self.whole)

    def power_is_lost(self, lost_bytes: int) -> None:
        """What was written last had not reached the disk."""
        self.whole = False
        if self.files:
            newest = max(self.files)
            self.files[newest] = self.files[newest][: max(0, len(self.files[newest]) - lost_bytes)]


@dataclass(eq=False)
class Asked:
    """A batch of a rank, from the request to the answer."""

    pod: Pod
    process: Process
    reports: int
    moves: int
    batch: Batch[int]
    awaited_ended: bool = False
    given_up: bool = False
    complete: bool = False


@dataclass(eq=False)
class Message:
    """A home asks an owner, and is answered in three frames."""

    asked: Asked
    request: OwnerRequest
    places: Int64s
    restarts: int
    answered: bool = False
    samples: Int64s | None = None
    ahead: list[SentAhead[int]] = field(default_factory=list)
    first_frames_came: bool = False


@dataclass(eq=False)
class Process:
    """A training process: what its record has of what it received (client/refill/delivery_record.py)."""

    rank: int
    incarnation: str
    since: int = 0
    reports: int = 0
    moves: int = 0
    received: dict[int, dict[int, int]] = field(default_factory=dict)

    def report(self, moves: int) -> Iterable[Record]:
        self.reports += 1
        self.moves = max(moves, self.moves)
        for epoch, had in sorted(self.received.items()):
            yield Record(Kind.RECEIVED, epoch, self.rank, (np.array([*had]), np.array([*had.values()])))
        since = max(self.since, max(self.received) - 1) if self.received else self.since
        whole = bool(self.received or since)
        yield Record(Kind.WHOLE, since, self.rank) if whole else Record(Kind.UNUSED, 0, self.rank)

    def add(self, epoch: int, positions: Int64s, samples: Int64s) -> None:
        if not self.received:
            self.since = max(self.since, epoch)
        self.received.setdefault(epoch, {}).update(zip(positions.tolist(), samples.tolist(), strict=True))
        for old in [known for known in self.received if known < epoch - 1]:
            del self.received[old]


class Pod:
    """The job at one run of a pod: the machines, and what the shells beside them keep."""

    def __init__(
        self,
        model: MembershipModel,
        place: Place,
        begin: Begin,
        journal: FoundInJournal | None,
    ) -> None:
        shape = model.shape
        self.model = model
        self.place = place
        self.run = next(model.runs)
        self.job = JobState(
            model.spec,
            model.layout,
            ordinal=place.ordinal,
            num_pods=len(model.places),
            incarnation=begin.incarnation,
            begin=begin,
            journal_is_whole=journal is not None and journal.whole,
        )
        self.life = self.job.life
        share = self.job.share
        self.lengths = model.lengths[share.first_sample : share.end_sample]
        chunk_bytes = (
            float(np.add.reduceat(self.lengths, share.starts[:-1] - share.first_sample).mean())
            if len(self.lengths)
            else 1.0
        )
        memory_bytes = model.memory_bytes[place.ordinal]
        abstract_chunks = abstract_chunks_for_budget(share.num_chunks, chunk_bytes, memory_bytes)
        self.mapping = AbstractMapping(share, max(1, abstract_chunks) if share.num_chunks else 0)
        self.owner = OwnerMachine(self.job, self.life.ranks, share.first_sample, memory_bytes, self.new_policy)
        seen_from_start = not self.life.ran_before and not self.life.moves
        self.home: HomeMachine[int] = HomeMachine(
            place.ordinal, self.job.owner_bounds, shape.remote_bytes, seen_from_start=seen_from_start
        )
        self.record = HomeRecord(self.job)
        self.records = PodRecords(self.job, self.record)
        self.recovering = Recovering(self.job, self.record, journal) if begin.ran_before else None
        self.reading: list[tuple[OpenEpoch, Read]] = []
        self.receipts: dict[int, EpochReceipt] = {}
        self.journaling = False
        self.waited_long = False
        """For ranks that did not report, while it recovered."""

    def new_policy(self, epoch: int, traces: Traces, answered: Answered | None, carried: Carried) -> Policy:
        name = self.model.spec.policy
        began = EpochBegan(
            self.mapping,
            traces,
            self.lengths,
            prefetch_window=self.model.shape.window,
            key=f"{self.model.shape.seed} {epoch} {self.job.ordinal}",
            settings=terms_of(name).settings_with(name, {}),
            answered=answered,
            carried=carried,
            next_traces=self.job.known_traces(epoch + 1) if self.job.has_epoch(epoch + 1) else None,
        )
        return new_policy(name, began)

    def carry_out(self, orders: list[Order]) -> None:
        for order in orders:
            match order:
                case CarryOut(epoch, wanted):
                    self.reading += [(epoch, read) for read in wanted.reads]
                case Write(record):
                    self.write(record)
                case Open(epoch, _, _, live):
                    for record in self.life.unknown.epoch_opens(max(epoch.number, self.life.ranks.newest)):
                        self.write(record)
                    self.life.unknown.forget(before_epoch=min([*live, *(each.number for each in self.owner.epochs)]))
                    if not (self.journaling or self.life.recovering):
                        self.begin_journal()
                case CloseBooks(epoch):
                    self.receipts[epoch.number] = self.receipt_of(epoch)
                    self.job.forget_traces(before_epoch=epoch.number + 1)
                    if self.journaling and self.place.volume is not None:
                        self.place.volume.receipts[epoch.number] = self.receipts[epoch.number]
                        self.place.volume.files.pop(epoch.number, None)

    def write(self, record: Record) -> None:
        if self.journaling and self.place.volume is not None:
            self.place.volume.write(record)

    def begin_journal(self) -> None:
        """As ``JobTable.begin_journal``."""
        if self.place.volume is not None and snapshots_say_all(self.job, self.owner):
            self.place.volume.begin(self)
            self.journaling = True

    def receipt_of(self, epoch: OpenEpoch) -> EpochReceipt:
        share, answered = self.job.share, self.owner.answered_of(epoch)
        unknown = self.life.unknown
        of_whom = unknown.ranks(epoch.number), unknown.ranks_that_had_come(epoch.number)
        return receipt_of(*answered, share.first_sample, share.end_sample, epoch.traces, *of_whom)

    def receipt(self, epoch: int) -> EpochReceipt | None:
        """Of the pod's share; None where it does not know."""
        if (known := self.owner.known(epoch)) is not None:
            return self.receipt_of(known)
        return self.receipts.get(epoch) if self.job.share.num_samples else EpochReceipt()

    def later(self, why: str) -> PodRecovering:
        return PodRecovering(why, pod=self.job.ordinal)

    def traces(self, epoch: int) -> Traces:
        if self.life.moves and self.life.recovering:
            raise self.later("it has to learn how the job was dealt")
        if (traces := self.job.known_traces(epoch)) is None:
            self.job.check_traces(epoch)
            raise self.later("traces are not known")
        return traces

    def rank_opens(self, epoch: int, rank: int, home: int) -> None:
        """As ``JobAtPod.rank_opens``."""
        if not self.life.traces_are_final:
            raise self.later("it is recovering")
        self.carry_out(self.owner.rank_came(epoch, rank, home))
        self.home.left(epoch, rank)
        self.record.forget_ended()

    def open(self, epoch: int, rank: int) -> OpenEpoch:
        """As ``Owner.open``; what would wait there is to be asked again."""
        self.carry_out(self.owner.rank_entered(epoch, rank))
        if self.life.recovering:
            raise self.later("it is recovering")
        if (known := self.owner.known(epoch)) is not None:
            return known
        state = self.owner.state_of(epoch)
        if state is EpochState.ENDED:
            raise EpochEnded("it has ended")
        if state is EpochState.WAITS:
            raise PodBusy("other ranks are behind")
        self.carry_out(self.owner.traces_known(epoch, self.traces(epoch)))
        known = self.owner.known(epoch)
        assert known is not None, "an epoch that may open was not opened"
        return known


@dataclass(eq=False)
class Place:
    ordinal: int
    volume: Volume | None
    up: bool = True
    pod: Pod | None = None

    @property
    def journal(self) -> JournalFound | None:
        volume = self.volume
        if volume is None or not volume.incarnation:
            return None
        return JournalFound(volume.incarnation, volume.num_pods, volume.whole)
