"""Owners, homes and ranks that lose answers and memory in any order: never two samples for one request, never one
sample for two, and in the end every sample.

Everything that decides is the pods' own: ``Policy``, records as bytes, ``Recollection``, ``ReceivedSamples``. What
is modelled is what carries it: who asks whom, what is on its way when somebody is killed.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from refill.protocol.job_spec import JobSpec
from refill.protocol.policies import terms_of
from refill.protocol.records import Kind, Record, RecordReader, encode_records
from refill_service.cache_core.epoch_order import KeyedTraces, Traces
from refill_service.cache_core.policies.interface import EpochBegan, Policy, Read
from refill_service.cache_core.policies.registry import new_policy
from refill_service.cache_core.receipt import receipt_of, sum_of_receipts
from refill_service.cache_core.received_samples import ReceivedSamples
from refill_service.cache_core.recollection import Recollection
from refill_service.cache_core.resumed_epoch import ResumedEpoch, consumed_before, keyed_traces
from refill_service.cache_core.sample_mapping import AbstractMapping, ChunkLayout, abstract_chunks_for_groups

Int64s = np.ndarray[tuple[int], np.dtype[np.int64]]
EPOCH = 0


@dataclass
class Pod:
    owner: Policy
    journal: bytearray | None
    received: ReceivedSamples = field(default_factory=ReceivedSamples)
    """As a home, of other owners."""
    reading: list[Read] = field(default_factory=list)
    restarts: list[int] = field(default_factory=list)
    """How often each owner has asked what it had answered."""


@dataclass
class Answer:
    """From an owner to a home, still on its way."""

    owner: int
    restarts: int
    rank: int
    positions: Int64s
    samples: Int64s


class Machine(RuleBasedStateMachine):
    @initialize(
        blobs=st.lists(st.integers(1, 20), min_size=1, max_size=4),
        num_pods=st.integers(1, 3),
        num_ranks=st.integers(1, 3),
        chunk_size=st.integers(1, 8),
        policy=st.sampled_from(["drain", "redox"]),
        journals=st.lists(st.booleans(), min_size=3, max_size=3),
        window=st.sampled_from([0, 100]),
        seed=st.integers(0, 2**16),
    )
    def begin(
        self,
        blobs: list[int],
        num_pods: int,
        num_ranks: int,
        chunk_size: int,
        policy: str,
        journals: list[bool],
        window: int,
        seed: int,
    ) -> None:
        self.layout = ChunkLayout(np.concatenate([[0], np.cumsum(blobs)]), min(chunk_size, max(blobs)))
        self.num_pods, self.num_ranks, self.policy, self.window, self.seed = num_pods, num_ranks, policy, window, seed
        self.lengths = np.random.default_rng(seed).integers(1, 100, self.layout.num_samples)
        self.bounds = self.layout.owner_bounds(num_pods)
        self.journals = journals
        self.done: set[int] = set()
        """Consumed before the job was resumed."""
        self.begin_with(KeyedTraces(self.layout.num_samples, num_ranks, seed=seed))

    def begin_with(self, traces: Traces) -> None:
        self.traces = traces
        self.pods = [
            Pod(self.new_owner(pod, None), bytearray() if self.journals[pod] else None, restarts=[0] * self.num_pods)
            for pod in range(self.num_pods)
        ]
        self.delivered: list[dict[int, int]] = [{} for _ in range(self.num_ranks)]
        """What each rank has: its own record."""
        self.on_the_way: list[Answer] = []

    def new_owner(self, pod: int, answered: tuple[Int64s, Int64s] | None) -> Policy:
        share = self.layout.share(pod, self.num_pods)
        began = EpochBegan(
            AbstractMapping(share, abstract_chunks_for_groups(share.num_chunks, 3), "consecutive"),
            self.traces,
            self.lengths[share.first_sample : share.end_sample],
            prefetch_window=self.window,
            key=f"{self.seed} {pod}",
            settings=terms_of(self.policy).settings_with(self.policy, {}),
            answered=answered,
        )
        owner = new_policy(self.policy, began)
        owner.memory_changed(1000)  # nobody reads what it begins with: a slow store
        return owner

    def home_of(self, rank: int) -> int:
        return rank % self.num_pods

    @rule(data=st.data(), rank=st.integers(0, 2), size=st.integers(1, 7), lost=st.booleans())
    def ask(self, data: st.DataObject, rank: int, size: int, lost: bool) -> None:
        """A batch of a rank, new or asked before. Owners answer; the answers are on their way, or lost."""
        rank %= self.num_ranks
        length = self.traces.length(rank)
        if length == 0:
            return
        first = data.draw(st.integers(0, length - 1))
        self.ask_for(rank, np.arange(first, min(first + size, length)), lost)

    def ask_for(self, rank: int, positions: Int64s, lost: bool = False) -> None:
        asked, repeats = self.traces.asked(rank, positions)
        owners = np.searchsorted(self.bounds[1:-1], asked, side="right")
        home = self.pods[self.home_of(rank)]
        for pod in np.unique(owners[~repeats]).tolist():
            here = np.flatnonzero((owners == pod) & ~repeats)
            share = self.pods[pod].owner.mapping.share
            local = asked[here] - share.first_sample
            taken = self.pods[pod].owner.requested(rank, local)
            self.pods[pod].reading += taken.orders.reads
            self.write(pod, asked[here], taken.samples + share.first_sample)
            answer = Answer(pod, home.restarts[pod], rank, positions[here], taken.samples + share.first_sample)
            if not lost:
                self.on_the_way.append(answer)
            ahead = self.pods[pod].owner.send_ahead(rank, local, int(positions[-1]) + 1, 200, 0)
            self.pods[pod].reading += ahead.orders.reads
            if len(ahead.samples):
                self.write(pod, self.traces.asked(rank, ahead.positions)[0], ahead.samples + share.first_sample)
                self.on_the_way.append(
                    Answer(pod, home.restarts[pod], rank, ahead.positions, ahead.samples + share.first_sample)
                )

    def write(self, pod: int, asked: Int64s, samples: Int64s) -> None:
        journal = self.pods[pod].journal
        if journal is not None:
            journal += Record(Kind.ANSWERED, EPOCH, 0, (asked, samples)).encode()

    @precondition(lambda self: getattr(self, "on_the_way", None))
    @rule(data=st.data())
    def an_answer_arrives(self, data: st.DataObject) -> None:
        self.arrive(self.on_the_way.pop(data.draw(st.integers(0, len(self.on_the_way) - 1))))

    def arrive(self, answer: Answer) -> None:
        """At the home, if the owner has not been restarted since it was asked; and from there at the rank."""
        home = self.pods[self.home_of(answer.rank)]
        if home.restarts[answer.owner] != answer.restarts:
            return
        length = self.traces.length(answer.rank)
        home.received.put(EPOCH, answer.rank, length, answer.positions, answer.samples)
        for position, sample in zip(answer.positions.tolist(), answer.samples.tolist(), strict=True):
            before = self.delivered[answer.rank].setdefault(position, sample)
            assert before == sample, f"rank {answer.rank} position {position} got {before}, then {sample}"

    @precondition(lambda self: any(pod.reading for pod in getattr(self, "pods", [])))
    @rule(data=st.data(), fails=st.booleans())
    def a_read_ends(self, data: st.DataObject, fails: bool) -> None:
        pod = data.draw(st.sampled_from([pod for pod in self.pods if pod.reading]))
        read = pod.reading.pop(data.draw(st.integers(0, len(pod.reading) - 1)))
        if fails:
            pod.owner.failed(read)
        else:
            pod.owner.arrived(read)

    @precondition(lambda self: hasattr(self, "pods"))
    @rule(pods=st.lists(st.integers(0, 2), min_size=1, max_size=3), torn=st.integers(0, 40), lost=st.booleans())
    def pods_are_killed(self, pods: list[int], torn: int, lost: bool) -> None:
        """At the same time, perhaps with their volumes. They come back; all ranks live, and report what they have."""
        killed = sorted({pod % self.num_pods for pod in pods})
        # What was on its way to a home that died never comes; what a dead owner had sent may still be in a buffer.
        self.on_the_way = [each for each in self.on_the_way if self.home_of(each.rank) not in killed]
        for pod in killed:
            self.pods[pod].received = ReceivedSamples()
            self.pods[pod].restarts = [0] * self.num_pods
            self.pods[pod].reading = []
            if lost:
                self.pods[pod].journal = None
        for rank in range(self.num_ranks):
            if self.home_of(rank) in killed:
                reported = self.report_of_rank(rank)
                self.pods[self.home_of(rank)].received.put(EPOCH, rank, self.traces.length(rank), *reported)
        for pod in killed:
            self.recover(pod, torn)

    def report_of_rank(self, rank: int) -> tuple[Int64s, Int64s]:
        known = self.delivered[rank]
        positions = np.array(sorted(known), dtype=np.int64)
        record = Record(
            Kind.RECEIVED, EPOCH, rank, (positions, np.array([known[p] for p in sorted(known)], dtype=np.int64))
        )
        (again,) = RecordReader(record.encode())
        return again.columns[0], again.columns[1]

    def recover(self, pod: int, torn: int) -> None:
        share = self.layout.share(pod, self.num_pods)
        share_of = (share.first_sample, share.end_sample)
        recollection, journal = Recollection(), self.pods[pod].journal
        if journal is not None:
            # A record that was being written when the pod was killed: its answer had not left.
            cut = Record(Kind.ANSWERED, EPOCH, 0, (np.arange(3), np.arange(3))).encode()[:torn]
            recollection.add(RecordReader(bytes(journal) + cut), pod)
        else:
            for other, each in enumerate(self.pods):
                each.restarts[pod] += other != pod
                records = [
                    Record(Kind.RECEIVED, epoch, rank, (positions, samples))
                    for epoch, rank, positions, samples in each.received.of_samples(
                        share.first_sample, share.end_sample
                    )
                ]
                recollection.add(RecordReader(encode_records(records)), other)
        asked, samples = recollection.answered(EPOCH, self.traces, *share_of)
        self.pods[pod].owner = self.new_owner(pod, (asked - share.first_sample, samples - share.first_sample))

    @precondition(lambda self: hasattr(self, "pods"))
    @rule(data=st.data(), num_ranks=st.integers(1, 3), num_pods=st.integers(1, 3))
    def resumed(self, data: st.DataObject, num_ranks: int, num_pods: int) -> None:
        """All ranks have consumed up to one position; the job goes on from there with other ranks and pods."""
        length = self.traces.length(0)
        whole = next((p for p in range(length + 1) if not self.all_have(p)), length)
        position = data.draw(st.integers(0, whole))
        consumed = np.array(sorted(self.done), dtype=np.int64)
        for pod in range(self.num_pods):
            first = self.pods[pod].owner.mapping.share.first_sample
            asked, samples = (ids + first for ids in self.pods[pod].owner.answered())
            consumed = np.union1d(consumed, consumed_before(position, asked, samples, self.traces))
        had = [sample for rank in self.delivered for p, sample in rank.items() if p < position]
        assert set(consumed.tolist()) == self.done | set(had), "the pods' tables and what the ranks consumed differ"
        if len(consumed) == self.layout.num_samples:
            return  # nothing is left to resume
        self.done |= set(had)
        self.num_ranks, self.num_pods = num_ranks, num_pods
        self.bounds = self.layout.owner_bounds(num_pods)
        spec = JobSpec("job", "file:///x", world_size=num_ranks, seed=self.seed)
        rest = ResumedEpoch("", EPOCH, position, consumed)
        self.begin_with(keyed_traces(spec, EPOCH, self.layout.num_samples, rest))

    def all_have(self, position: int) -> bool:
        """Whether every rank has its sample of this position (a repeat is none of the protocol's)."""
        for rank in range(self.num_ranks):
            here = position >= self.traces.length(rank) or position in self.delivered[rank]
            if not here and not self.traces.asked(rank, np.array([position]))[1][0]:
                return False
        return True

    @invariant()
    def no_sample_twice(self) -> None:
        if hasattr(self, "delivered"):
            counts = Counter(sample for rank in self.delivered for sample in rank.values())
            twice = [sample for sample, count in counts.items() if count > 1]
            assert not twice, f"samples {twice} were delivered twice"
            assert self.done.isdisjoint(counts), "consumed before the checkpoint, and delivered again"

    def teardown(self) -> None:
        """The epoch is asked for to its end."""
        if not hasattr(self, "pods"):
            return
        for rank in range(self.num_ranks):
            self.ask_for(rank, np.arange(self.traces.length(rank)))
        while self.on_the_way:
            self.arrive(self.on_the_way.pop())
        self.no_sample_twice()
        delivered = {sample for rank in self.delivered for sample in rank.values()}
        assert delivered | self.done == set(range(self.layout.num_samples)), "samples are missing"
        receipts = []
        for pod in self.pods:
            share = pod.owner.mapping.share
            asked, samples = (ids + share.first_sample for ids in pod.owner.answered())
            receipts.append(receipt_of(asked, samples, share.first_sample, share.end_sample, self.traces))
        total = sum_of_receipts(receipts)
        assert total.exact
        assert total.delivered == total.requests == self.layout.num_samples - len(self.done)
        assert total.ranks == {rank: len(got) for rank, got in enumerate(self.delivered) if got}


Machine.TestCase.settings = settings(
    max_examples=int(os.environ.get("CORE_SCHEDULES", "300")), stateful_step_count=25, deadline=None
)
test_schedules = Machine.TestCase
