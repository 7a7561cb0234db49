"""Lists that ranks have posted, as a share carries them out: what comes is what is asked for, whatever is known of the
list, whatever order it has, and whatever was forgotten; and what is read for it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill_service.cache_core.planned.placed_order import ChunkRead, PlacedOrder, placed_list
from refill_service.cache_core.planned.share_memory import ShareMemory
from refill_service.cache_core.sample_mapping import Int64Array


@dataclass(eq=False)
class Listed:
    """A share, and a list for each epoch: the sample at each position. Positions have gaps: others are of other
    shares."""

    sizes: list[int]
    lengths: Int64Array
    lists: list[Int64Array]
    planned_bytes: int
    step: int = 1
    """Between positions."""

    def __post_init__(self) -> None:
        self.starts = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)
        self.chunk_of = np.repeat(np.arange(len(self.sizes)), self.sizes)

    def positions(self, epoch: int) -> Int64Array:
        return np.arange(len(self.lists[epoch])) * self.step

    def placed(self, epoch: int, known: int | None = None, memory_bytes: int | None = None) -> PlacedOrder:
        memory_bytes = self.planned_bytes if memory_bytes is None else memory_bytes
        local, positions = self.lists[epoch][:known], self.positions(epoch)[:known]
        return placed_list(local, positions, self.chunk_of, self.lengths, memory_bytes)


@st.composite
def shares(draw: st.DrawFn) -> Listed:
    largest = draw(st.sampled_from([1, 2, 5, 16]))
    sizes = draw(st.lists(st.integers(1, largest), min_size=1, max_size=draw(st.sampled_from([1, 3, 40]))))
    num_samples, random_state = sum(sizes), np.random.default_rng(draw(st.integers(0, 2**20)))
    lengths = random_state.integers(draw(st.integers(0, 1)), draw(st.sampled_from([2, 100])), num_samples)
    lists = [_drawn(draw(st.sampled_from(KINDS)), num_samples, random_state) for _ in range(3)]
    planned_bytes = int(lengths.sum() * draw(st.sampled_from([0, 0.05, 0.1, 0.3, 1, 3])))
    return Listed(sizes, lengths, lists, planned_bytes, draw(st.sampled_from([1, 3])))


KINDS = ("each once", "with replacement", "a few, often", "in order", "none")


def _drawn(kind: str, num_samples: int, generator: np.random.Generator) -> Int64Array:
    found: Int64Array = {
        "each once": generator.permutation(num_samples),
        "with replacement": generator.integers(0, num_samples, 2 * num_samples),
        "a few, often": generator.integers(0, max(1, num_samples // 8), num_samples),
        "in order": np.arange(num_samples),
        "none": np.empty(0, dtype=np.int64),
    }[kind].astype(np.int64)
    return found


def even(num_samples: int, chunk_size: int, planned: int, lists: list[Any]) -> Listed:
    """Samples of one byte."""
    sizes = [chunk_size] * (num_samples // chunk_size)
    return Listed(sizes, np.ones(num_samples, dtype=np.int64), [np.asarray(each) for each in lists], planned)


@dataclass(eq=False)
class Pod:
    """Carries out what the memory of a share decides. Whom it has a sample of is told by it, as by the bytes."""

    share: Listed
    capacity_bytes: int
    num_askers: int = 1
    slow: bool = False
    here: dict[int, Int64Array] = field(default_factory=dict)
    """By epoch, the sample of the share that each entry in memory is; -1: it is not there."""
    under_way: list[ChunkRead] = field(default_factory=list)
    log: list[ChunkRead] = field(default_factory=list)
    misses: int = 0
    """Positions whose sample was not in memory when it was asked for."""

    def __post_init__(self) -> None:
        self.memory = ShareMemory(
            self.share.starts, self.share.lengths, self.share.planned_bytes, num_askers=self.num_askers
        )
        self.memory_is(self.capacity_bytes)

    def memory_is(self, capacity_bytes: int) -> None:
        self.memory.memory_is(capacity_bytes)
        self.go_on()

    def go_on(self) -> None:
        reads: list[ChunkRead] = []
        while (more := self.memory.read_ahead()) is not None:
            reads += more
        self._order(reads)

    def learn(self, epoch: int, known: int | None = None, *, from_start: bool = False) -> None:
        self._drop(self.memory.grown(epoch, self.share.placed(epoch, known), from_start=from_start))
        self.memory.warmed(epoch, 0)
        self.go_on()

    def ask(self, epoch: int, positions: Int64Array) -> None:
        wanted = self.share.lists[epoch][positions // self.share.step]
        places = self.memory.places_of(epoch, positions, wanted)
        self.misses += int(np.count_nonzero(places < 0))
        if not (places >= 0).any():
            return
        asked = self.memory.asked(epoch, places[places >= 0])
        assert asked.local.tolist() == wanted[places >= 0].tolist(), "each position gets the list's sample"
        here = self._here(epoch)
        different = set(zip(asked.samples.tolist(), asked.local.tolist(), asked.stay.tolist(), strict=True))
        for entry, local, stays in different:
            assert here[entry] in (-1, local)
            self.misses += int(here[entry] < 0)
            if not stays:
                here[entry] = -1
        self._drop(asked.dropped)
        self._order(asked.reads)
        self.go_on()

    def forget(self) -> None:
        self._drop(self.memory.forget())
        assert not any((here >= 0).any() for here in self.here.values())
        assert not self.memory.held_bytes

    def arrive_all(self) -> None:
        while self.under_way:
            self.arrive(self.under_way[0])

    def arrive(self, read: ChunkRead) -> None:
        self.under_way.remove(read)
        stay = self.memory.arrived(read)
        here, entries = self._here(read.epoch), read.samples[stay]
        assert (here[entries] < 0).all()
        here[entries] = read.local[stay]
        self._check()

    def fail(self, read: ChunkRead) -> None:
        self.under_way.remove(read)
        self.memory.failed(read)
        self._check()

    def _order(self, reads: list[ChunkRead]) -> None:
        for read in reads:
            assert (np.diff(read.local) > 0).all()
            assert len(set(self.share.chunk_of[read.local].tolist())) == 1
        self.under_way += reads
        self.log += reads
        if not self.slow:
            self.arrive_all()
        self._check()

    def _drop(self, dropped: list[tuple[int, Int64Array]]) -> None:
        for epoch, entries in dropped:
            here = self._here(epoch)
            assert (here[entries] >= 0).all()
            here[entries] = -1

    def _check(self) -> None:
        memory, held_bytes = self.memory, 0
        for at in memory.epochs:
            assert at.here[self._here(at.number)[: len(at.here)] >= 0].all(), "what is given up is dropped"
            held_bytes += int(at.placed.lengths[(at.here | at.coming) & (at.to_come > 0)].sum())
            assert at.num_to_come == np.count_nonzero(at.to_come)
        assert memory.held_bytes == held_bytes

    def _here(self, epoch: int) -> Int64Array:
        """A list has at most as many entries as positions."""
        if epoch not in self.here:
            self.here[epoch] = np.full(len(self.share.lists[epoch]), -1)
        return self.here[epoch]

    def bytes_read(self, epoch: int) -> int:
        """The span from the first to the last of each read."""
        lengths = self.share.lengths
        return sum(int(lengths[read.local[0] : read.local[-1] + 1].sum()) for read in self.log if read.epoch == epoch)


def in_order(pod: Pod, epoch: int, most: int, draws: random.Random, first: int = 0) -> None:
    positions = pod.share.positions(epoch)[first:]
    while len(positions):
        size = draws.randint(1, most)
        for _ in range(pod.num_askers):
            pod.ask(epoch, positions[:size])
        positions = positions[size:]


def peak_bytes(placed: PlacedOrder) -> int:
    """What has been read and is still to be asked for, if each part is read when it is first used."""
    held, most, left = 0, 0, np.bincount(placed.order, minlength=len(placed.lengths))
    read: set[int] = set()
    for entry in placed.order.tolist():
        part = int(placed.part_of[entry])
        if part not in read:
            read.add(part)
            held += int(placed.lengths[placed.starts[part] : placed.starts[part + 1]].sum())
        most = max(most, held)
        left[entry] -= 1
        held -= int(placed.lengths[entry]) * (not left[entry])
    return most


@given(shares(), st.sampled_from([0, 0.02, 0.1, 0.5, 1]))
def test_parts_of_chunks_are_as_large_as_memory_allows(share: Listed, part: float) -> None:
    memory_bytes = int(part * share.lengths.sum())
    for epoch, wanted in enumerate(share.lists):
        placed = share.placed(epoch, memory_bytes=memory_bytes)
        whole = share.placed(epoch, memory_bytes=2**60)
        assert placed.local(placed.order.astype(np.int64)).tolist() == wanted.tolist()
        assert len(whole.starts) - 1 == len(np.unique(share.chunk_of[wanted])), "each chunk once where all of it fits"
        if peak_bytes(whole) <= memory_bytes:
            assert len(placed.starts) == len(whole.starts)
        elif len(placed.starts) < len(share.placed(epoch, memory_bytes=0).starts):
            assert peak_bytes(placed) <= memory_bytes
        for first, end in pairwise(placed.starts.tolist()):
            of_part = placed.local(np.arange(first, end))
            assert (np.diff(of_part) > 0).all()
            assert len(set(share.chunk_of[of_part].tolist())) == 1


@given(shares(), st.integers(1, 40), st.integers(1, 3), st.randoms(use_true_random=False))
def test_nothing_is_missing_and_bytes_are_read_once_where_memory_holds_what_is_live(
    share: Listed, most: int, num_askers: int, draws: random.Random
) -> None:
    """A batch more, since all of one is asked for before any of it leaves."""
    room = most * int(share.lengths.max(initial=0))
    peaks = [peak_bytes(share.placed(epoch, memory_bytes=2**60)) for epoch in range(3)]
    share.planned_bytes = max(peaks)
    pod = Pod(share, 2 * share.planned_bytes + room, num_askers)
    for epoch, wanted in enumerate(share.lists):
        pod.learn(epoch)
        in_order(pod, epoch, most, draws)
        if len(wanted):
            chunks = np.unique(share.chunk_of[wanted])
            assert len([read for read in pod.log if read.epoch == epoch]) == len(chunks)
            assert pod.bytes_read(epoch) <= sum(int(share.lengths[share.chunk_of == chunk].sum()) for chunk in chunks)
    assert not pod.misses
    assert not pod.memory.held_bytes


FACTS = ("ask next", "ask next", "ask next", "ask any", "ask again", "arrives", "arrives", "arrives", "fails")
RARE = ("memory", "forget", "learn more", "learn anew", "next epoch")


@given(shares(), st.integers(1, 3), st.integers(20, 100), st.booleans(), st.randoms(use_true_random=False))
def test_whatever_is_asked_for_and_known(
    share: Listed, num_askers: int, num_facts: int, slow: bool, draws: random.Random
) -> None:
    """Checks are those of :class:`Pod`: what comes is the list's, and no byte is counted twice."""
    pod, epoch, place = Pod(share, share.planned_bytes, num_askers, slow), 0, 0
    known = [0, 0, 0]
    last = 0, np.empty(0, dtype=np.int64)
    for each in range(3):
        pod.learn(each, 0)
    for _ in range(num_facts):
        fact = draws.choice(FACTS * 3 + RARE)
        read = draws.choice(pod.under_way) if pod.under_way else None
        positions = share.positions(epoch)
        if fact == "ask next":
            last = epoch, positions[place : place + draws.randint(1, 40)]
            place += len(last[1])
            pod.ask(*last)
        elif fact == "ask any" and len(positions):
            last = epoch, np.array(draws.sample(positions.tolist(), draws.randint(1, min(len(positions), 40))))
            pod.ask(*last)
        elif fact == "ask again":
            pod.ask(*last)
        elif fact == "arrives" and read is not None:
            pod.arrive(read)
        elif fact == "fails" and read is not None:
            pod.fail(read)
        elif fact == "memory":
            memory_bytes = int(draws.choice([0, 0.3, 1, 2]) * share.planned_bytes)
            pod.memory_is(memory_bytes)
        elif fact == "forget":
            pod.forget()
        elif fact in ("learn more", "learn anew"):
            which = min(2, epoch + draws.randint(0, 1))
            known[which] = draws.randint(known[which], len(share.lists[which]))
            pod.learn(which, known[which], from_start=fact == "learn anew")
        elif fact == "next epoch":
            epoch, place = (epoch + 1) % 3, 0
    pod.arrive_all()
    pod.slow = False
    pod.forget()
    pod.memory_is(2**60)
    for each in range(3):
        pod.learn(each)
    misses = pod.misses
    in_order(pod, 0, 16, draws)
    assert pod.misses - misses <= 2 * 16 + pod.memory.most_stray, "a loop that begins then has what it asks for"


def test_a_list_that_grows_is_read_from_where_it_is_asked_for() -> None:
    """Ranks' lists come one after another, while the first asks already."""
    share = even(4096, 8, 400, [np.random.default_rng(1).permutation(4096)])
    pod = Pod(share, 500)
    for number, known in enumerate((64, 1000, 4096)):
        pod.learn(0, known)
        pod.ask(0, np.arange(32 * number, 32 * number + 32))
        assert not pod.misses
    in_order(pod, 0, 32, random.Random(1), first=96)
    assert not pod.misses
    assert len(pod.log) <= 1.1 * (len(share.placed(0).starts) - 1) + 2 * 500


def test_a_pod_that_was_never_told_the_list_has_nothing_in_memory() -> None:
    share = even(64, 8, 32, [np.arange(64)])
    pod = Pod(share, 64)
    pod.learn(0, 0)
    pod.ask(0, np.arange(16))
    assert (pod.misses, pod.log) == (16, [])


def test_another_sample_than_the_list_has_is_not_taken_from_it() -> None:
    """A request says what it wants; a list is a hint."""
    share = even(64, 8, 32, [np.arange(64)])
    pod = Pod(share, 64)
    pod.learn(0)
    places = pod.memory.places_of(0, np.array([3, 4, 99]), np.array([3, 5, 6]))
    assert places.tolist() == [3, -1, -1]


@pytest.mark.parametrize(("chunk_size", "gets_for_64", "bytes_read"), [(8, 30, 1.8), (64, 7, 6)])
def test_what_a_perfect_shuffle_reads_with_memory_for_a_tenth(
    chunk_size: int, gets_for_64: float, bytes_read: float
) -> None:
    n = 16384
    share = even(n, chunk_size, n * 8 // 100, [np.random.default_rng(2).permutation(n)])
    pod = Pod(share, n // 10)
    pod.learn(0)
    in_order(pod, 0, 64, random.Random(1))
    assert not pod.misses
    assert len(pod.log) * 64 / n <= gets_for_64
    assert pod.bytes_read(0) / n <= bytes_read


def test_a_sample_that_comes_often_is_in_memory_once() -> None:
    """A rare class that comes as often as others."""
    generator = np.random.default_rng(3)
    wanted = np.where(generator.random(8192) < 0.5, generator.integers(0, 64, 8192), generator.integers(0, 4096, 8192))
    share = even(4096, 8, 400, [wanted])
    pod = Pod(share, 500)
    pod.learn(0)
    in_order(pod, 0, 32, random.Random(1))
    assert not pod.misses
    reads = [read for read in pod.log if (read.local < 64).any()]
    assert len(reads) <= 8 * 12


def test_memory_that_shrinks_is_kept_to_though_samples_come_again() -> None:
    """What was planned to stay until its second use does not, beyond what a batch asks for."""
    share = even(1024, 8, 1024, [np.tile(np.random.default_rng(4).permutation(1024), 2)])
    pod = Pod(share, 64)
    pod.memory.grown(0, share.placed(0))
    pod.memory.warmed(0, 0)
    pod.go_on()
    for first in range(0, 2048, 32):
        pod.ask(0, np.arange(first, first + 32))
        assert pod.memory.held_bytes <= 64 + 32
    assert not pod.memory.held_bytes
