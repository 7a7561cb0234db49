"""A live job on its pods over several epochs, without I/O: the machines of the pods, and what the shells of ``jobs/``
do around them. What those await is a message that a test delivers, or loses.

What must hold is checked by what ranks have received, with no word of the pods believed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from refill.errors import EpochEnded, PodBusy, PodUnreachable, RefillError
from refill.protocol.job_spec import JobSpec
from refill.protocol.policies import terms_of
from refill_service.cache_core.epoch_order import Traces
from refill_service.cache_core.home_machine import Batch, Entry, HomeMachine, OwnerRequest, SentAhead
from refill_service.cache_core.job_state import JobState
from refill_service.cache_core.owner_machine import CarryOut, CloseBooks, EpochState, OpenEpoch, Order, OwnerMachine
from refill_service.cache_core.policies.interface import NO_SAMPLES, Carried, EpochBegan, Policy, Read
from refill_service.cache_core.policies.registry import new_policy
from refill_service.cache_core.receipt import EpochReceipt, receipt_of, sum_of_receipts
from refill_service.cache_core.sample_mapping import AbstractMapping, ChunkLayout, abstract_chunks_for_budget

Int64s = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True)
class Shape:
    blobs: tuple[int, ...]
    chunk_size: int
    num_pods: int
    num_ranks: int
    policy: str
    num_epochs: int
    window: int
    remote_bytes: int
    memory_bytes: int
    drop_last: bool
    seed: int


@dataclass(eq=False)
class Asked:
    """A batch of a rank, from the request to the answer."""

    pod: Pod
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
    answered: bool = False
    samples: Int64s | None = None
    ahead: list[SentAhead[int]] = field(default_factory=list)
    first_frames_came: bool = False


class Pod:
    """The job at a pod: the machines, and what the shells beside them keep."""

    def __init__(self, model: JobModel, ordinal: int) -> None:
        shape = self.shape = model.shape
        self.job = JobState(model.spec, model.layout, ordinal=ordinal, num_pods=shape.num_pods, incarnation="a")
        share = self.job.share
        self.lengths = model.lengths[share.first_sample : share.end_sample]
        starts = share.starts[:-1] - share.first_sample
        chunk_bytes = float(np.add.reduceat(self.lengths, starts).mean()) if len(self.lengths) else 1.0
        abstract_chunks = abstract_chunks_for_budget(share.num_chunks, chunk_bytes, shape.memory_bytes)
        self.mapping = AbstractMapping(share, max(1, abstract_chunks) if share.num_chunks else 0)
        self.owner = OwnerMachine(self.job, self.job.ranks, share.first_sample, shape.memory_bytes, self._new_policy)
        self.home: HomeMachine[int] = HomeMachine(ordinal, self.job.owner_bounds, shape.remote_bytes)
        self.reading: list[tuple[OpenEpoch, Read]] = []
        self.receipts: dict[int, EpochReceipt] = {}

    def _new_policy(self, epoch: int, traces: Traces, carried: Carried) -> Policy:
        name = self.shape.policy
        began = EpochBegan(
            self.mapping,
            traces,
            self.lengths,
            prefetch_window=self.shape.window,
            key=f"{self.shape.seed} {epoch} {self.job.ordinal}",
            settings=terms_of(name).settings_with(name, {}),
            carried=carried,
            next_traces=self.job.known_traces(epoch + 1) if self.job.has_epoch(epoch + 1) else None,
        )
        return new_policy(name, began)

    def carry_out(self, orders: list[Order]) -> None:
        for order in orders:
            match order:
                case CarryOut(epoch, wanted):
                    self.reading += [(epoch, read) for read in wanted.reads]
                case CloseBooks(epoch):
                    self.receipts[epoch.number] = self._receipt_of(epoch)
                    self.job.forget_traces(before_epoch=epoch.number + 1)
        if self.owner.may_go_on:
            self.carry_out(self.owner.go_on())

    def _receipt_of(self, epoch: OpenEpoch) -> EpochReceipt:
        share, answered = self.job.share, self.owner.answered_of(epoch)
        return receipt_of(*answered, share.first_sample, share.end_sample, epoch.traces)

    def receipt(self, epoch: int) -> EpochReceipt:
        """Of the pod's share."""
        if (known := self.owner.known(epoch)) is not None:
            return self._receipt_of(known)
        if (found := self.receipts.get(epoch)) is not None:
            return found
        share, traces = self.job.share, self.job.known_traces(epoch)  # nothing was asked of it
        assert traces is not None
        return receipt_of(NO_SAMPLES, NO_SAMPLES, share.first_sample, share.end_sample, traces)

    def rank_opens(self, epoch: int, rank: int) -> None:
        """As ``JobAtPod.rank_opens``."""
        self.carry_out(self.owner.rank_entered(epoch, rank))
        self.home.left(epoch, rank)

    def open(self, epoch: int, rank: int) -> OpenEpoch:
        """As ``Owner.open``; what would wait there is to be asked again."""
        self.carry_out(self.owner.rank_entered(epoch, rank))
        if (known := self.owner.known(epoch)) is not None:
            return known
        state = self.owner.state_of(epoch)
        if state is EpochState.ENDED:
            raise EpochEnded("it has ended")
        if state is EpochState.WAITS:
            raise PodBusy("other ranks are behind")
        traces = self.job.known_traces(epoch)
        assert traces is not None
        self.carry_out(self.owner.traces_known(epoch, traces))
        known = self.owner.known(epoch)
        assert known is not None, "an epoch that may open was not opened"
        return known


class JobModel:
    """A job on its pods, and all that its ranks have received."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.layout = ChunkLayout(np.concatenate([[0], np.cumsum(shape.blobs)]), shape.chunk_size)
        self.lengths = np.random.default_rng(shape.seed).integers(1, 100, self.layout.num_samples)
        self.spec = JobSpec(
            "job",
            "file:///x",
            world_size=shape.num_ranks,
            seed=shape.seed,
            policy=shape.policy,
            num_epochs=shape.num_epochs,
            drop_last=shape.drop_last,
            prefetch_window=shape.window,
        )
        self.pods = [Pod(self, ordinal) for ordinal in range(shape.num_pods)]
        self.homes = [rank % shape.num_pods for rank in range(shape.num_ranks)]
        """The pod that each rank asks."""
        self.epochs = [0] * shape.num_ranks
        """That each rank is in."""
        self.asked: list[Asked] = []
        self.messages: list[Message] = []
        self.responses: list[Asked] = []
        self.got: list[dict[tuple[int, int], int]] = [{} for _ in range(shape.num_epochs)]
        """By epoch: what each (rank, position) has received, and has not to ask for again."""
        self.ever_got: list[dict[tuple[int, int], int]] = [{} for _ in range(shape.num_epochs)]
        """The same, and what it had before it asked again."""
        traces = [self.pods[0].job.known_traces(epoch) for epoch in range(shape.num_epochs)]
        self.traces = [each for each in traces if each is not None]

    def length(self, epoch: int, rank: int) -> int:
        return self.traces[epoch].length(rank)

    def missing(self, epoch: int, rank: int) -> Int64s:
        had = self.got[epoch]
        return np.array([p for p in range(self.length(epoch, rank)) if (rank, p) not in had], dtype=np.int64)

    # A rank asks its home, homes ask owners.

    def ask(self, rank: int, positions: Int64s, *, cut_off: frozenset[int] = frozenset()) -> bool:
        """A batch of a rank. False when it is refused for now: it asks again.

        :param cut_off: pods that the home does not reach.
        """
        try:
            asked = self._open_batch(self.pods[self.homes[rank]], rank, positions, cut_off)
        except EpochEnded as error:
            raise AssertionError(f"refused for good: {error}") from error
        except RefillError:
            return False
        self.asked.append(asked)
        self._go_on(asked)
        return True

    def _open_batch(self, pod: Pod, rank: int, positions: Int64s, cut_off: frozenset[int]) -> Asked:
        """As ``Home.open``, then what ``Home.assemble`` begins with."""
        epoch = self.epochs[rank]
        asked, repeats = self.traces[epoch].asked(rank, positions)
        if pod.home.entry(epoch, rank) is not Entry.KNOWN:
            pod.carry_out(pod.owner.rank_entered(epoch, rank))
            for other in self.pods:
                if other is not pod:
                    if other.job.ordinal in cut_off:
                        raise PodUnreachable("it is cut off", pod=other.job.ordinal)
                    other.rank_opens(epoch, rank)
            pod.home.entered(epoch, rank)
        own_epoch = pod.open(epoch, rank) if pod.job.share.holds(asked).any() else None
        batch = pod.home.begin(epoch, rank, positions, asked, repeats)
        found = Asked(pod, batch)
        if len(batch.repeats):
            batch.put(batch.repeats, asked[batch.repeats], asked[batch.repeats].tolist())
        for owner, places in batch.of_owners.items():
            self._send(found, owner, places, len(batch.of_owners))
        if len(batch.own):
            assert own_epoch is not None
            answers, orders = pod.owner.requested(own_epoch, rank, asked[batch.own])
            pod.carry_out(orders)
            assert answers is not None, "an epoch was left before its end"
            samples = answers.samples + pod.job.share.first_sample
            batch.put(batch.own, samples, samples.tolist())
        return found

    def _send(self, asked: Asked, owner: int, places: Int64s, owners_left: int) -> None:
        request = asked.pod.home.ask(asked.batch, owner, places, owners_left)
        self.messages.append(Message(asked, request, places))

    def _give_up(self, asked: Asked) -> None:
        if not asked.given_up and not asked.complete:
            asked.given_up = True
            asked.pod.home.over(asked.batch)
            self.asked.remove(asked)

    def _go_on(self, asked: Asked) -> None:
        """As ``Home.assemble`` does when something has come."""
        batch = asked.batch
        if asked.given_up or asked.complete:
            return
        under_way = {message.request for message in self.messages}
        if batch.awaited and not asked.awaited_ended and under_way.isdisjoint(batch.awaited):
            asked.awaited_ended = True
            lost = asked.pod.home.arrived(batch)
            for owner, places in lost.items():
                self._send(asked, owner, places, len(lost))
        if None not in batch.found:
            asked.complete = True
            asked.pod.home.complete(batch, 0)
            asked.pod.home.over(batch)
            self.asked.remove(asked)
            self.responses.append(asked)

    def message_moves(self, message: Message, *, lost: bool) -> None:
        """The next step of a message: the owner answers, the first two frames arrive, the third does."""
        if not message.answered:
            lost = lost or not self._owner_answers(message)
            message.answered = True
        elif not message.first_frames_came:
            if not lost:
                self._first_frames_come(message)
            message.first_frames_came = True
        else:
            self._ends(message, [] if lost else message.ahead)
            return
        if lost:
            self._ends(message, [])
            self._give_up(message.asked)

    def _ends(self, message: Message, ahead: list[SentAhead[int]]) -> None:
        self.messages.remove(message)
        message.asked.pod.home.ended(message.request, ahead)
        for asked in [*self.asked]:
            if message.request in asked.batch.awaited:
                self._go_on(asked)

    def _owner_answers(self, message: Message) -> bool:
        wire, pod = message.request.wire, self.pods[message.request.pod]
        asked, repeats = self.traces[wire.epoch].asked(wire.rank, wire.positions)
        assert not repeats.any(), "an owner is asked for a repeat"
        assert pod.job.share.holds(asked).all(), "an owner is asked for what it does not own"
        try:
            epoch = pod.open(wire.epoch, wire.rank)
        except RefillError:  # for good, too: it may have been under way since the rank had its answer
            return False
        answers, orders = pod.owner.requested(epoch, wire.rank, asked)
        pod.carry_out(orders)
        if answers is None:
            return False
        first = pod.job.share.first_sample
        message.samples = answers.samples + first
        _, ahead, orders = pod.owner.answer_left(
            wire.epoch, wire.rank, asked, wire.ahead_from, wire.room_bytes, wire.started_below
        )
        pod.carry_out(orders)
        sizes = self.lengths[ahead.samples + first].tolist()
        assert sum(sizes) <= wire.room_bytes, "more was sent ahead than there was room for"
        entries = zip(ahead.positions.tolist(), sizes, (ahead.samples + first).tolist(), strict=True)
        message.ahead = [SentAhead(position, sample, size, sample) for position, size, sample in entries]
        return True

    def _first_frames_come(self, message: Message) -> None:
        asked = message.asked
        asked.pod.home.announced(message.request, np.array([each.position for each in message.ahead], dtype=np.int64))
        assert message.samples is not None
        if not asked.given_up:
            asked.batch.put(message.places, message.samples, message.samples.tolist())
            self._go_on(asked)

    def response_arrives(self, asked: Asked, *, lost: bool = False) -> None:
        self.responses.remove(asked)
        batch = asked.batch
        if lost:
            return
        for position, sample in zip(batch.positions.tolist(), batch.sample_ids.tolist(), strict=True):
            self.got[batch.epoch][batch.rank, position] = sample
            before = self.ever_got[batch.epoch].setdefault((batch.rank, position), sample)
            assert before == sample, f"rank {batch.rank} position {position} got {before}, asked again {sample}"

    def deliver_all(self) -> None:
        """Until nothing is under way."""
        while self.messages or self.responses:
            for message in [*self.messages]:
                if message in self.messages:
                    self.message_moves(message, lost=False)
            for asked in [*self.responses]:
                self.response_arrives(asked)

    def read_ends(self, pod: Pod, which: int, *, fails: bool) -> None:
        epoch, read = pod.reading.pop(which % len(pod.reading))
        pod.carry_out(pod.owner.failed(epoch, read) if fails else pod.owner.arrived(epoch, read))

    def all_reads_end(self) -> None:
        for pod in self.pods:
            while pod.reading:
                self.read_ends(pod, 0, fails=False)

    def asks_again(self, rank: int, position: int) -> None:
        """A process goes on from a checkpoint of its epoch: it asks for what comes after that."""
        had = self.got[self.epochs[rank]]
        for key in [key for key in had if key[0] == rank and key[1] >= position]:
            del had[key]

    # What must hold.

    def check(self) -> None:
        for pod in self.pods:
            memory = pod.home.remote_memory
            assert memory.used + memory.granted <= memory.capacity, "remote memory above its limit"
        for epoch, got in enumerate(self.ever_got):
            twice = Counter(got.values()) - self._multiplicity(epoch)
            assert not twice, f"epoch {epoch}: samples {[*twice]} came more often than they were asked for"

    def _multiplicity(self, epoch: int) -> Counter[int]:
        """How often each sample may come: once, and as often as positions repeat it."""
        found = Counter(range(self.layout.num_samples))
        for rank in range(self.spec.world_size):
            asked, repeats = self.traces[epoch].asked(rank, np.arange(self.length(epoch, rank)))
            found.update(asked[repeats].tolist())
        return found

    def finish_epoch(self, epoch: int) -> None:
        """All ranks ask for what they lack of an epoch; nothing is lost any more. Then the receipt is held against what
        came."""
        for _ in range(60):
            ranks = [rank for rank in range(self.spec.world_size) if self.epochs[rank] == epoch]
            lacks = {rank: self.missing(epoch, rank) for rank in ranks}
            if not any(map(len, lacks.values())):
                break
            for rank, positions in lacks.items():
                if len(positions):
                    self.ask(rank, positions)
                    self.deliver_all()
            self.all_reads_end()
        else:
            raise AssertionError(f"epoch {epoch} does not end")
        self.check()
        receipt = sum_of_receipts([pod.receipt(epoch) for pod in self.pods])
        for pod in self.pods:
            receipt = receipt.without(pod.home.unused_ahead(epoch))
        assert receipt.exact, f"epoch {epoch} was exact, and its receipt says {receipt}"
        came = {rank: 0 for rank in range(self.spec.world_size)}
        for rank in came:
            _, repeats = self.traces[epoch].asked(rank, np.arange(self.length(epoch, rank)))
            came[rank] = int(np.count_nonzero(~repeats))
        assert receipt.ranks == {rank: count for rank, count in came.items() if count}, f"epoch {epoch}: {receipt}"
