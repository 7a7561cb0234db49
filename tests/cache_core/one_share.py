"""One share with the orders of its epochs, made up, and the memory of a pod that serves it: each request and each read
is checked, whatever the test asks for."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from refill.protocol.keyed_hash import key_of
from refill_service.cache_core.planned import share_memory
from refill_service.cache_core.planned.placed_order import ChunkRead
from refill_service.cache_core.planned.share_memory import ShareMemory
from refill_service.cache_core.planned.share_order import order_share
from refill_service.cache_core.sample_mapping import Int64Array

Sample = tuple[int, int]
"""``(epoch, sample)``"""
EPOCHS, BATCH = 4, 32


@dataclass(eq=False)
class MadeUp:
    """A share, and the order of each of its epochs."""

    sizes: list[int]
    """Samples of each chunk."""
    lengths: Int64Array
    planned_bytes: int
    seed: int = 0
    any_order: bool = False
    """Whether orders are any, not planned ones."""

    def __post_init__(self) -> None:
        self.starts = np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)
        self.num_samples, self.num_chunks = int(self.starts[-1]), len(self.sizes)
        self.chunk_of = np.repeat(np.arange(self.num_chunks), self.sizes)
        self.orders: dict[int, Int64Array] = {}

    def order(self, epoch: int) -> Int64Array:
        """The local sample at each place."""
        if epoch not in self.orders:
            key = key_of("made up", self.seed, epoch)
            self.orders[epoch] = (
                np.random.default_rng(key).permutation(self.num_samples)
                if self.any_order
                else order_share(self.starts, self.lengths, self.planned_bytes, key, ramped=epoch == 0).samples
            )
        return self.orders[epoch]

    def bytes_of(self, samples: Any) -> int:
        return int(self.lengths[np.fromiter(samples, dtype=np.int64)].sum())


def even(num_samples: int, chunk_size: int, planned_samples: int, seed: int = 0) -> MadeUp:
    """Samples of one byte, so that memory is in samples."""
    whole, rest = divmod(num_samples, chunk_size)
    sizes = [chunk_size] * whole + [rest] * bool(rest)
    return MadeUp(sizes, np.ones(num_samples, dtype=np.int64), planned_samples, seed)


@st.composite
def shares(draw: st.DrawFn, *, any_order: bool | None = None, least_samples: int = 1, least_bytes: int = 1) -> MadeUp:
    largest = draw(st.sampled_from([1, 2, 5, 16]))
    sizes = draw(st.lists(st.integers(1, largest), min_size=1, max_size=draw(st.sampled_from([1, 3, 40]))))
    if sum(sizes) < least_samples:
        sizes.append(least_samples - sum(sizes))
    seed = draw(st.integers(0, 2**20))
    longest = draw(st.sampled_from([1, 100]))
    lengths = np.random.default_rng(seed).integers(least_bytes, longest + 1, sum(sizes))
    planned_bytes = int(lengths.sum() * draw(st.sampled_from([0, 0.05, 0.1, 0.3, 1, 3])))
    return MadeUp(sizes, lengths, planned_bytes, seed, draw(st.booleans()) if any_order is None else any_order)


class Pod:
    """Carries out what the memory of a share decides, with bytes that are counted and not kept. Reads arrive at once
    unless they are ``slow``, and orders are planned when they are needed.

    :param real: what samples take, where the share has no more than means.
    """

    def __init__(
        self,
        share: MadeUp,
        capacity_bytes: int,
        *,
        slow: bool = False,
        num_askers: int = 1,
        real: Int64Array | None = None,
    ) -> None:
        self.share, self.slow, self.real = share, slow, real
        self.memory = ShareMemory(
            share.starts, share.lengths, share.planned_bytes, num_askers, are_means=real is not None
        )
        self.here: dict[int, NDArray[np.bool_]] = {}
        """By epoch, which samples are in memory."""
        self.under_way: dict[ChunkRead, Any] = {}
        """With the open epoch that each was ordered for: it may be given up, and begun anew."""
        self.waiting: set[Sample] = set()
        """Asked for, and on their way."""
        self.alone: list[Sample] = []
        """Read alone, since they were nowhere, or did not come."""
        self.log: list[ChunkRead] = []
        """All reads."""
        self.dropped: list[Sample] = []
        self.memory_is(capacity_bytes)

    # Facts.

    def memory_is(self, capacity_bytes: int) -> None:
        before = self.memory.held_bytes
        self.memory.memory_is(capacity_bytes)
        self._go_on()
        self._check(before)

    def plan(self, epoch: int) -> None:
        before = self.memory.held_bytes
        self.memory.planned(epoch, self.memory.placed(self.share.order(epoch)))
        self._go_on()
        assert self.memory.knows(epoch)
        self._check(before)

    def warm(self, epoch: int, place: int) -> None:
        if not self.memory.knows(epoch):
            self.plan(epoch)
        before = self.memory.held_bytes
        self.memory.warmed(epoch, place)
        self._go_on()
        self._check(before)

    def plan_ahead(self) -> None:
        while (wanted := self.memory.next_wanted()) is not None:
            self.plan(wanted)

    def ask(self, epoch: int, places: Sequence[int], *, may_plan_ahead: bool = True) -> int:
        """Returns how many of these samples were neither in memory, nor on their way, nor ordered."""
        if not self.memory.knows(epoch):
            self.plan(epoch)
        before, was_here = self.memory.held_bytes, self._here(epoch).copy()
        at, is_first = self.open_epoch(epoch), not self.memory.epochs
        to_come = (at.to_come > 0) if at is not None else self._none() | is_first
        begun = None
        if self.share.num_samples % 2 and (to_prepare := self.memory.to_prepare(epoch, np.array(places))) is not None:
            begun = to_prepare()
            self.memory.prepared(begun)
        asked = self.memory.asked(epoch, np.array(places, dtype=np.int64))
        assert begun in (None, self.open_epoch(epoch)), "a thread has done it in vain"
        assert asked.samples.tolist() == self.share.order(epoch)[list(places)].tolist()
        for number, samples in asked.dropped:
            assert self._here(number)[samples].all(), "what is dropped was in memory"
            self._here(number)[samples] = False
            self.dropped += [(number, sample) for sample in samples.tolist()]
        self._here(epoch)[asked.samples[~asked.stay]] = False
        self._order(asked.reads)
        self._read_ahead()
        missing = asked.samples[~was_here[asked.samples]].tolist()
        coming = {sample for read in self.under_way if read.epoch == epoch for sample in read.samples.tolist()}
        alone = [(epoch, sample) for sample in missing if sample not in coming]
        assert not any(to_come[sample] for _, sample in alone), "asked for the first time, and nowhere"
        self.alone += alone
        self.waiting |= {(epoch, sample) for sample in missing if sample in coming}
        if not self.slow:
            self.arrive_all()
        self._check(before)
        if may_plan_ahead:
            self.plan_ahead()
        return len(alone)

    def arrive(self, read: ChunkRead, damaged: Int64Array = share_memory.NO_SAMPLES) -> None:
        before, is_live = self.memory.held_bytes, self._is_live(read)
        at = self.under_way.pop(read)
        to_come = at.to_come[read.samples] > 0 if is_live else np.zeros(len(read.samples), dtype=bool)
        stay = self.memory.arrived(read, damaged, None if self.real is None else self.real[read.samples])
        intact = ~np.isin(read.samples, damaged)
        assert stay.tolist() == (to_come & intact).tolist()
        self._here(read.epoch)[read.samples[stay]] = True
        self.waiting -= {(read.epoch, sample) for sample in read.samples[intact].tolist()}
        self._read_what_does_not_come(read)
        if self.real is None:
            self._check(before)
        else:
            self.give_back()  # whatever has come is longer than was expected

    def fail(self, read: ChunkRead) -> None:
        before = self.memory.held_bytes
        del self.under_way[read]
        self.memory.failed(read)
        self._read_what_does_not_come(read)
        self._check(before)

    def give_back(self) -> None:
        """Others wait for what is beyond the capacity, which is less than before."""
        coming_bytes = self.memory.held_bytes - sum(
            int(at.placed.lengths[self._here(at.number)].sum()) for at in self.memory.epochs
        )
        before = self.memory.held_bytes
        for epoch, samples in self.memory.gives_back():
            assert self._here(epoch)[samples].all()
            self._here(epoch)[samples] = False
        assert self.memory.held_bytes <= max(self.memory.capacity_bytes, coming_bytes), "not at once"
        self._check(before)

    def forget(self) -> None:
        for epoch, samples in self.memory.forget():
            assert self._here(epoch)[samples].all()
            self._here(epoch)[samples] = False
        assert not self.num_here
        assert not self.memory.held_bytes
        self._check(0)

    # What comes of them.

    def arrive_all(self) -> None:
        for read in list(self.under_way):
            self.arrive(read)

    def _go_on(self) -> None:
        self._read_ahead()
        if not self.slow:
            self.arrive_all()

    def _read_ahead(self) -> None:
        while (reads := self.memory.read_ahead()) is not None:
            assert len(reads) <= share_memory.AT_ONCE
            self._order(reads)

    def _order(self, reads: list[ChunkRead]) -> None:
        on_their_way = {epoch: self._on_their_way(epoch) for epoch in {read.epoch for read in reads}}
        for read in reads:
            assert len(read.samples)
            assert (np.diff(read.samples) > 0).all()
            assert (self.share.chunk_of[read.samples] == read.chunk).all()
            assert not self._here(read.epoch)[read.samples].any(), "is in memory"
            assert not on_their_way[read.epoch][read.samples].any(), "is on its way"
            on_their_way[read.epoch][read.samples] = True
            self.under_way[read] = self.open_epoch(read.epoch)
            self.log.append(read)

    def _read_what_does_not_come(self, read: ChunkRead) -> None:
        """Who waits for it has it read alone."""
        left = {sample for sample in read.samples.tolist() if (read.epoch, sample) in self.waiting}
        for other in self.under_way:
            if left and other.epoch == read.epoch:
                left -= set(other.samples.tolist())
        self.alone += [(read.epoch, sample) for sample in left]
        self.waiting -= {(read.epoch, sample) for sample in left}

    def _check(self, before: int) -> None:
        """:param before: bytes held before the last fact."""
        memory = self.memory
        held_bytes, chunks = 0, set()
        for at in memory.epochs:
            here, on_their_way, lengths = self._here(at.number), self._on_their_way(at.number), at.placed.lengths
            if self.real is None:
                assert (lengths == self.share.lengths).all()
            else:
                assert (lengths[here] == self.real[here]).all()
            held = here | (on_their_way & (at.to_come > 0))
            held_bytes += int(lengths[held].sum())
            chunks |= {(at.number, chunk) for chunk in np.unique(self.share.chunk_of[held & (lengths > 0)]).tolist()}
            assert not (here & (at.to_come == 0)).any()
            assert not (here & on_their_way).any()
            assert (on_their_way == at.coming).all()
            assert (here == at.here).all()
            assert at.num_to_come == np.count_nonzero(at.to_come)
        assert self.epochs_here() <= {at.number for at in memory.epochs}
        assert memory.held_bytes == held_bytes
        if held_bytes > max(memory.capacity_bytes, before) and memory.num_askers == 1 and self.real is None:
            assert len(chunks) == 1, "only a chunk that is larger than memory is read beyond it, and alone"
        assert len(memory.epochs) <= 3
        assert len(memory.orders) <= share_memory.KEPT_ORDERS

    def _none(self) -> NDArray[np.bool_]:
        return np.zeros(self.share.num_samples, dtype=bool)

    def _here(self, epoch: int) -> NDArray[np.bool_]:
        return self.here.setdefault(epoch, self._none())

    def _on_their_way(self, epoch: int) -> NDArray[np.bool_]:
        found = self._none()
        for read in self.under_way:
            if read.epoch == epoch and self._is_live(read):
                found[read.samples] = True
        return found

    def _is_live(self, read: ChunkRead) -> bool:
        return self.under_way[read] is not None and self.under_way[read] is self.open_epoch(read.epoch)

    # What tests look at.

    def open_epoch(self, number: int) -> Any:
        """None: there is none of that number."""
        return next((at for at in self.memory.epochs if at.number == number), None)

    @property
    def is_all_here(self) -> bool:
        """Whether whoever has asked has the bytes."""
        return not self.waiting and not self.under_way

    @property
    def num_here(self) -> int:
        """Samples in memory."""
        return sum(int(here.sum()) for here in self.here.values())

    def epochs_here(self) -> set[int]:
        return {epoch for epoch, here in self.here.items() if here.any()}

    def gets(self, epoch: int) -> Counter[int]:
        """How often each chunk was read."""
        return Counter(read.chunk for read in self.log if read.epoch == epoch)


def in_calls(epoch: int, places: Any, most: int, draws: random.Random) -> Iterator[tuple[int, list[int]]]:
    places = list(places)
    while places:
        size = draws.randint(1, most)
        yield epoch, places[:size]
        places = places[size:]


def nearly_in_order(share: MadeUp, window: float, most: int, draws: random.Random) -> Iterator[tuple[int, list[int]]]:
    """Every place of all epochs once, each up to a window late."""
    n = share.num_samples
    late = sorted(range(EPOCHS * n), key=lambda position: position + draws.uniform(0, window))
    for epoch, positions in groupby(late, lambda position: position // n):
        yield from in_calls(epoch, (position % n for position in positions), most, draws)


def ask_all(pod: Pod, calls: Any) -> int:
    """Returns how many samples were nowhere."""
    return sum(pod.ask(epoch, places) for epoch, places in calls)


def in_order(pod: Pod, epoch: int, size: int, first: int = 0) -> int:
    n = pod.share.num_samples
    return ask_all(pod, ((epoch, range(at, min(n, at + size))) for at in range(first, n, size)))
