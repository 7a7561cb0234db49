"""A cluster of cores without servers: every owner and home pod of a job, driven in any order by a test.

It does what ``home.py`` and ``owner.py`` do around the core, with messages that a test can lose and reads that it
can hold back or fail, and checks after each step what must always hold.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import numpy as np

from refill_service.cache_core.epoch_order import ExplicitTraces, KeyedTraces
from refill_service.cache_core.owner_epoch import OwnerEpoch
from refill_service.cache_core.policies import new_epoch
from refill_service.cache_core.redox_epoch import RedoxEpoch
from refill_service.cache_core.refill import Refill
from refill_service.cache_core.remote_memory import RemoteMemory, StartedPositions
from refill_service.cache_core.sample_mapping import AbstractMapping, ChunkLayout, abstract_chunks_for_groups


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
        self.homes: list[RemoteMemory[int]] = [RemoteMemory(shape.remote_bytes) for _ in range(shape.num_pods)]
        self.started = [StartedPositions() for _ in range(shape.num_ranks)]
        self.reading: list[tuple[OwnerEpoch, Refill]] = []
        self.answers: dict[tuple[int, int], int] = {}
        self.arrived: set[int] = set()
        self.read_bytes = 0
        for owner in self.owners:
            for refill in owner.start():
                self._ordered(owner, refill)

    def _owner(self, layout: ChunkLayout, pod: int) -> OwnerEpoch:
        share = layout.share(pod, self.shape.num_pods)
        num_abstract_chunks = abstract_chunks_for_groups(share.num_chunks, self.shape.group_size)
        return new_epoch(
            self.shape.policy,
            AbstractMapping(share, num_abstract_chunks, self.shape.group_order),
            self.traces,
            self.lengths[share.first_sample : share.end_sample],
            capacity_bytes=self.shape.capacity_bytes,
            refill=self.shape.refill,
            prefetch_window=self.shape.window,
            key=f"{self.shape.seed} {pod}",
        )

    def ask(self, rank: int, positions: np.ndarray, lose: float = 0.0) -> None:
        """One batch of a rank. Each owner's answer, and what it sends ahead, is lost with probability ``lose``."""
        home = rank % self.shape.num_pods
        asked, repeats = self.traces.asked(rank, positions)
        owners = np.searchsorted(self.bounds[1:-1], asked, side="right")
        wanted = ~repeats
        for place in np.flatnonzero(wanted & (owners != home)).tolist():
            held = self.homes[home].take((0, rank, int(positions[place])))
            if held is not None:
                self._answered(rank, int(positions[place]), held)
                wanted[place] = False
        self.started[rank].started(positions)
        for place in np.flatnonzero(repeats).tolist():
            self._answered(rank, int(positions[place]), int(asked[place]))
        for pod in np.unique(owners[wanted]).tolist():
            places = np.flatnonzero(wanted & (owners == pod))
            self._ask_owner(pod, home, rank, positions[places], asked[places], lose)

    def _ask_owner(self, pod: int, home: int, rank: int, positions: np.ndarray, asked: np.ndarray, lose: float) -> None:
        owner, memory = self.owners[pod], self.homes[home]
        first = owner.mapping.share.first_sample
        before = owner.memory.sample_at.copy() if isinstance(owner, RedoxEpoch) else None
        taken = owner.take(asked - first)
        if isinstance(owner, RedoxEpoch):
            self._check_never_evicted(before, owner, taken.samples, taken.refills)
        for refill in taken.refills:
            self._ordered(owner, refill)
        if self.random.random() >= lose:
            for position, sample in zip(positions.tolist(), taken.samples.tolist(), strict=True):
                self._answered(rank, position, sample + first)
        if pod == home:
            return
        room = memory.grant(self.random.randint(1, 2))
        assert memory.used + memory.granted <= memory.capacity, "granted more than the remote memory has"
        below, end = self.started[rank].below, self.started[rank].end
        ahead = owner.send_ahead(rank, owner.mapping.locations(asked - first), end, room, below)
        for refill in ahead.refills:
            self._ordered(owner, refill)
        sizes = self.lengths[ahead.samples + first].tolist()
        assert set((ahead.samples + first).tolist()) <= self.arrived, "sent ahead what is not in memory yet"
        assert sum(sizes) <= room, "sent more ahead than the requester has room for"
        received = []
        if self.random.random() >= lose:
            entries = zip(ahead.positions.tolist(), sizes, ahead.samples.tolist(), strict=True)
            received = [((0, rank, p), size, s + first) for p, size, s in entries if p not in self.started[rank]]
        memory.settle(room, received)
        assert memory.used <= memory.capacity, "remote memory above its limit"

    def some_reads_end(self, fail: float = 0.0) -> None:
        """Some of the reads under way arrive, in any order; each fails with probability ``fail``."""
        self.random.shuffle(self.reading)
        for _ in range(self.random.randint(0, len(self.reading))):
            self._ends(*self.reading.pop(), fail)

    def all_reads_end(self) -> None:
        while self.reading:
            self._ends(*self.reading.pop(), fail=0.0)

    def _ends(self, owner: OwnerEpoch, refill: Refill, fail: float) -> None:
        if self.random.random() < fail:
            owner.refill_failed(refill)
            return
        owner.refill_arrived(refill)
        self.arrived.update((refill.samples + owner.mapping.share.first_sample).tolist())
        starts = owner.mapping.share.starts
        self.read_bytes += int(self.lengths[starts[refill.chunk] : starts[refill.chunk + 1]].sum())

    def _ordered(self, owner: OwnerEpoch, refill: Refill) -> None:
        self.reading.append((owner, refill))

    def _answered(self, rank: int, position: int, sample: int) -> None:
        before = self.answers.setdefault((rank, position), sample)
        assert before == sample, f"rank {rank} position {position} got sample {before}, asked again {sample}"

    @staticmethod
    def _check_never_evicted(before: np.ndarray, owner: RedoxEpoch, taken: np.ndarray, refills: list[Refill]) -> None:
        filled = np.concatenate([refill.samples for refill in refills] or [taken[:0]])
        here = set(before[before >= 0].tolist()) | set(filled.tolist())
        gone = here - set(owner.memory.sample_at[owner.memory.sample_at >= 0].tolist())
        assert gone <= set(taken.tolist()), f"samples {sorted(gone - set(taken.tolist()))} left memory undelivered"

    def delivered(self) -> Counter[int]:
        """How often each sample was handed to a position that is no repeat."""
        counts: Counter[int] = Counter()
        for (rank, position), sample in self.answers.items():
            if not self.traces.asked(rank, np.array([position]))[1][0]:
                counts[sample] += 1
        return counts
