"""A cluster of cores without servers: every owner and home pod of a job, driven in any order by a test.

Homes are those of pods (``HomeMachine``). What ``owner.py`` does around the core is done here, with messages that a
test can lose or hold back and reads that it can hold back or fail. After each step it is checked what must always hold.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from refill.protocol.policies import terms_of
from refill_service.cache_core.epoch_order import ExplicitTraces, KeyedTraces
from refill_service.cache_core.home_machine import Batch, HomeMachine, OwnerRequest, SentAhead
from refill_service.cache_core.policies.interface import EpochBegan, Orders, Policy, Read
from refill_service.cache_core.policies.redox import RedoxPolicy
from refill_service.cache_core.policies.registry import new_policy
from refill_service.cache_core.sample_mapping import AbstractMapping, ChunkLayout


@dataclass(frozen=True)
class Shape:
    blob_samples: tuple[int, ...]
    chunk_size: int
    group_size: int
    num_pods: int
    num_ranks: int
    batch: int
    window: int
    remote_bytes: int
    policy: str = "redox"
    capacity_bytes: int = 0
    refill: str = "best"
    group_order: str = "consecutive"
    drop_last: bool = False
    seed: int = 0

    @property
    def num_samples(self) -> int:
        return sum(self.blob_samples)


class ClusterModel:
    """One epoch."""

    def __init__(self, shape: Shape, traces: KeyedTraces | ExplicitTraces | None = None) -> None:
        self.shape = shape
        self.random = random.Random(shape.seed)
        layout = ChunkLayout(np.concatenate([[0], np.cumsum(shape.blob_samples)]), shape.chunk_size)
        self.lengths = np.random.default_rng(shape.seed).integers(1, 1000, layout.num_samples)
        self.traces = traces or KeyedTraces(
            layout.num_samples, shape.num_ranks, seed=shape.seed, drop_last=shape.drop_last
        )
        self.bounds = layout.owner_bounds(shape.num_pods)
        self.owners = [self._owner(layout, pod) for pod in range(shape.num_pods)]
        self.homes: list[HomeMachine[int]] = [
            HomeMachine(pod, self.bounds, shape.remote_bytes) for pod in range(shape.num_pods)
        ]
        self.on_the_way: dict[tuple[int, OwnerRequest], list[SentAhead[int]]] = {}
        """By home and request, what owners have announced and not yet sent ahead."""
        self.reading: list[tuple[Policy, Read]] = []
        self.answers: dict[tuple[int, int], int] = {}
        self.arrived: set[int] = set()
        self.read_bytes = 0
        for owner in self.owners:
            self._ordered(owner, owner.memory_changed(shape.capacity_bytes))

    def _owner(self, layout: ChunkLayout, pod: int) -> Policy:
        share = layout.share(pod, self.shape.num_pods)
        num_abstract_chunks = -(-share.num_chunks // self.shape.group_size)
        own = {"refill": self.shape.refill} if self.shape.policy == "redox" else {}
        began = EpochBegan(
            AbstractMapping(share, num_abstract_chunks, self.shape.group_order),
            self.traces,
            self.lengths[share.first_sample : share.end_sample],
            prefetch_window=self.shape.window,
            key=f"{self.shape.seed} {pod}",
            settings=terms_of(self.shape.policy).settings_with(self.shape.policy, own),
        )
        return new_policy(self.shape.policy, began)

    def ask(self, rank: int, positions: np.ndarray, lose: float = 0.0) -> None:
        """One batch of a rank. Each owner's answer, and what it sends ahead, is lost with probability ``lose``."""
        home = rank % self.shape.num_pods
        asked, repeats = self.traces.asked(rank, positions)
        batch = self.homes[home].begin(0, rank, positions, asked, repeats)
        batch.put(batch.repeats, asked[batch.repeats], asked[batch.repeats].tolist())
        if len(batch.own):
            samples, _ = self._take(home, rank, asked[batch.own])
            if self.random.random() >= lose:
                batch.put(batch.own, samples, samples.tolist())
        self._ask_owners(home, batch, batch.of_owners, lose)
        if batch.awaited:
            for request in batch.awaited:
                self._ends_ahead(home, request, lose)
            self._ask_owners(home, batch, self.homes[home].arrived(batch), lose)
        for place, sample in enumerate(batch.found):
            if sample is not None:
                assert sample == batch.sample_ids[place]
                self._answered(rank, int(positions[place]), sample)
        if None not in batch.found:
            self.homes[home].complete(batch, int(self.lengths[batch.sample_ids].sum()))
        self.homes[home].over(batch)
        while self.on_the_way and self.random.random() < 0.5:
            self._ends_ahead(*self.random.choice(list(self.on_the_way)), lose)

    def _ask_owners(self, home: int, batch: Batch[int], of_owners: dict[int, np.ndarray], lose: float) -> None:
        """What owners send ahead stays on the way for a while, so that later batches find it there."""
        machine = self.homes[home]
        for i, (pod, places) in enumerate(of_owners.items()):
            request = machine.ask(batch, pod, places, len(of_owners) - i)
            wire = request.wire
            assert machine.remote_memory.used + machine.remote_memory.granted <= self.shape.remote_bytes, "granted more"
            samples, owner = self._take(pod, batch.rank, batch.asked[places])
            if self.random.random() >= lose:
                batch.put(places, samples, samples.tolist())
            first = owner.mapping.share.first_sample
            answered = batch.asked[places] - first
            ahead = owner.send_ahead(batch.rank, answered, wire.ahead_from, wire.room_bytes, wire.started_below)
            self._ordered(owner, ahead.orders)
            sizes = self.lengths[ahead.samples + first].tolist()
            assert set((ahead.samples + first).tolist()) <= self.arrived, "sent ahead what is not in memory yet"
            assert sum(sizes) <= wire.room_bytes, "sent more ahead than the requester has room for"
            entries = zip(ahead.positions.tolist(), sizes, (ahead.samples + first).tolist(), strict=True)
            self.on_the_way[home, request] = [SentAhead(p, s, size, s) for p, size, s in entries]
            machine.announced(request, ahead.positions)

    def _take(self, pod: int, rank: int, asked: np.ndarray) -> tuple[np.ndarray, Policy]:
        owner = self.owners[pod]
        first = owner.mapping.share.first_sample
        before = ~owner.memory.slots if isinstance(owner, RedoxPolicy) else None
        taken = owner.requested(rank, asked - first)
        if isinstance(owner, RedoxPolicy):
            self._check_never_evicted(before, owner, taken.samples, taken.orders.reads)
        self._ordered(owner, taken.orders)
        return taken.samples + first, owner

    def _ends_ahead(self, home: int, request: OwnerRequest, lose: float) -> None:
        sent = self.on_the_way.pop((home, request))
        self.homes[home].ended(request, sent if self.random.random() >= lose else [])
        memory = self.homes[home].remote_memory
        assert memory.used + memory.granted <= memory.capacity, "remote memory above its limit"

    def some_reads_end(self, fail: float = 0.0) -> None:
        """Some of the reads under way arrive, in any order; each fails with probability ``fail``."""
        self.random.shuffle(self.reading)
        for _ in range(self.random.randint(0, len(self.reading))):
            self._ends(*self.reading.pop(), fail)

    def all_reads_end(self) -> None:
        while self.reading:
            self._ends(*self.reading.pop(), fail=0.0)

    def _ends(self, owner: Policy, read: Read, fail: float) -> None:
        if self.random.random() < fail:
            self._ordered(owner, owner.failed(read))
            return
        self._ordered(owner, owner.arrived(read))
        first = owner.mapping.share.first_sample
        self.arrived.update((read.samples + first).tolist())
        self.read_bytes += int(self.lengths[read.first + first : read.end + first].sum())

    def _ordered(self, owner: Policy, orders: Orders) -> None:
        self.reading += [(owner, read) for read in orders.reads]

    def _answered(self, rank: int, position: int, sample: int) -> None:
        before = self.answers.setdefault((rank, position), sample)
        assert before == sample, f"rank {rank} position {position} got sample {before}, asked again {sample}"

    @staticmethod
    def _check_never_evicted(before: np.ndarray, owner: RedoxPolicy, taken: np.ndarray, reads: Sequence[Read]) -> None:
        filled = np.concatenate([read.samples for read in reads] or [taken[:0]])
        here = set(before[before >= 0].tolist()) | set(filled.tolist())
        gone = here - set((~owner.memory.slots).tolist())
        assert gone <= set(taken.tolist()), f"samples {sorted(gone - set(taken.tolist()))} left memory undelivered"

    def delivered(self) -> Counter[int]:
        """How often each sample was handed to a position that is no repeat."""
        counts: Counter[int] = Counter()
        for (rank, position), sample in self.answers.items():
            if not self.traces.asked(rank, np.array([position]))[1][0]:
                counts[sample] += 1
        return counts


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    blobs = draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))
    return Shape(
        blob_samples=tuple(blobs),
        chunk_size=draw(st.integers(1, max(blobs))),
        group_size=draw(st.integers(1, 6)),
        num_pods=draw(st.integers(1, 4)),
        num_ranks=draw(st.integers(1, 5)),
        batch=draw(st.integers(1, 17)),
        window=draw(st.sampled_from([0, 1, 3, 50, 1000])),
        remote_bytes=draw(st.integers(0, 20_000)),
        capacity_bytes=draw(st.integers(0, 50_000)),
        refill=draw(st.sampled_from(["best", "random"])),
        group_order=draw(st.sampled_from(["consecutive", "interleaved"])),
        drop_last=draw(st.booleans()),
        seed=draw(st.integers(0, 2**32)),
    )


def run_epoch(model: ClusterModel, lose: float = 0.0, fail: float = 0.0, skew: int = 3) -> None:
    """Every rank asks for all its batches, in an order as several loader workers would; lost ones are asked again."""
    batch = model.shape.batch
    ranks = range(model.shape.num_ranks)
    todo = {
        rank: [
            np.arange(i, min(i + batch, model.traces.length(rank))) for i in range(0, model.traces.length(rank), batch)
        ]
        for rank in ranks
    }
    while any(todo.values()):
        rank = model.random.choice([rank for rank in ranks if todo[rank]])
        place = model.random.randrange(min(skew, len(todo[rank])))
        positions = todo[rank][place]
        model.ask(rank, positions, lose)
        model.some_reads_end(fail)
        if all((rank, position) in model.answers for position in positions.tolist()):
            del todo[rank][place]
    model.all_reads_end()
