"""What a pod reads of one share: each asked place gets the order's sample, nothing that is asked for is lost, each
chunk is read once where memory holds what was planned for; whatever is asked, and whatever becomes of reads."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from refill.protocol.keyed_hash import key_of
from refill_service.cache_core.planned import share_memory
from refill_service.cache_core.planned.share_memory import ChunkRead, ShareMemory
from refill_service.cache_core.planned.share_order import order_share
from refill_service.cache_core.sample_mapping import Int64Array

Sample = tuple[int, int]
"""``(epoch, sample)``"""
EPOCHS = 4


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


# Where memory holds what was planned for.


@given(
    shares(any_order=False),
    st.integers(0, 3),
    st.sampled_from([1, 7, 300]),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_each_chunk_is_read_once_an_epoch(
    share: MadeUp, more: int, most: int, slow: bool, draws: random.Random
) -> None:
    pod = Pod(share, share.planned_bytes * (4 + more) // 4, slow=slow)
    for epoch in range(EPOCHS):
        for call in in_calls(epoch, range(share.num_samples), most, draws):
            assert not pod.ask(*call)
            for read in draws.sample(list(pod.under_way), len(pod.under_way) // 2):
                pod.arrive(read)
        assert pod.gets(epoch) == dict.fromkeys(range(share.num_chunks), 1)
    pod.arrive_all()
    assert pod.is_all_here
    assert not pod.alone
    assert not pod.dropped
    assert pod.epochs_here() <= {EPOCHS}


def test_the_next_epoch_is_read_before_this_one_ends() -> None:
    share = even(4096, 8, 400)
    pod = Pod(share, 500)
    in_order(pod, 0, 32)
    for epoch in range(1, EPOCHS):
        for first in range(0, 4096, 32):
            assert pod.here[epoch][share.order(epoch)[first : first + 32]].all(), "nobody waits"
            assert 500 - 500 // 16 < pod.num_here <= 500, "memory is as good as full, over the end of an epoch, too"
            pod.ask(epoch, range(first, first + 32))
        assert pod.epochs_here() == {epoch + 1}
        assert not pod.gets(epoch + 2)


@pytest.mark.parametrize(
    ("chunk_size", "least_together"), [(8, 16 * 8), (512, 512)], ids=["of sixteen chunks", "of a large one"]
)
def test_full_memory_is_read_into_in_portions(chunk_size: int, least_together: int) -> None:
    share = even(8_192, chunk_size, 1_600)
    pod = Pod(share, 2_048)
    in_order(pod, 0, 32)
    together = []
    for first in range(0, 4_096, 32):
        before = len(pod.log)
        assert not pod.ask(1, range(first, first + 32)), "nobody waits"
        together.append(sum(len(read.samples) for read in pod.log[before:]))
    assert sum(together) > 2_048
    assert min(filter(None, together)) >= least_together
    assert not pod.gets(2), "each chunk is read once"


def test_an_epoch_is_planned_when_half_of_the_one_before_is_read() -> None:
    pod = Pod(even(1000, 10, 100), 100)
    assert pod.memory.next_wanted() is None, "nobody has asked for anything"
    wanted = []
    for first in range(0, 1000, 10):
        pod.ask(3, range(first, first + 10), may_plan_ahead=False)
        wanted.append(pod.memory.next_wanted())
    first = wanted.index(4)
    assert 350 <= 10 * first <= 500
    assert wanted == [None] * first + [4] * (100 - first)
    pod.plan(4)
    assert pod.memory.next_wanted() is None
    assert pod.num_here == 100, "what is known of late is read at once"


def test_the_orders_that_were_planned_last_are_known() -> None:
    pod = Pod(even(100, 10, 10), 10)
    for epoch in (0, 1, 2, 0, 3):
        pod.plan(epoch)
    assert [epoch for epoch in range(5) if pod.memory.knows(epoch)] == [0, 2, 3]


@given(
    shares(any_order=False, least_samples=4),
    st.sampled_from([1, 5, 40]),
    st.randoms(use_true_random=False),
)
def test_nothing_is_lost_of_what_is_asked_for_nearly_in_order(share: MadeUp, most: int, draws: random.Random) -> None:
    """Reads come late, in any order, fail, or bring damaged samples; memory changes; orders are planned late."""
    pod = Pod(share, share.planned_bytes, slow=True)
    did_not_come: set[Sample] = set()
    for epoch, places in nearly_in_order(share, pod.memory.planned_places // 2, most, draws):
        assert not pod.ask(epoch, places, may_plan_ahead=draws.random() < 0.3), "is in memory, coming, or ordered"
        for _ in range(draws.randint(0, 6)):
            if not pod.under_way:
                break
            read, what = draws.choice(list(pod.under_way)), draws.random()
            if what < 0.1:
                did_not_come |= {(read.epoch, sample) for sample in read.samples.tolist()}
                pod.fail(read)
            elif what < 0.2:
                damaged = np.array([each for each in read.samples.tolist() if draws.random() < 0.5], dtype=np.int64)
                did_not_come |= {(read.epoch, sample) for sample in damaged.tolist()}
                pod.arrive(read, damaged)
            else:
                pod.arrive(read)
        if draws.random() < 0.05:
            pod.memory_is(draws.choice([0, share.planned_bytes // 3, share.planned_bytes, 2 * share.planned_bytes]))
            pod.give_back()
    pod.arrive_all()
    assert pod.is_all_here
    assert set(pod.alone) <= did_not_come
    assert not any(at.num_to_come for at in pod.memory.epochs if at.number < EPOCHS)


@given(shares(least_samples=4), st.sampled_from([0, 0.2, 0.5, 0.9]), st.sampled_from([1, 5, 40]), st.data())
def test_with_less_memory_more_is_read_and_nothing_is_lost(
    share: MadeUp, part: float, most: int, data: st.DataObject
) -> None:
    draws = data.draw(st.randoms(use_true_random=False))
    pod = Pod(share, int(part * share.planned_bytes))
    for epoch, places in nearly_in_order(share, pod.memory.planned_places // 2, most, draws):
        assert not pod.ask(epoch, places)
    assert not pod.alone
    for epoch in range(EPOCHS):
        gets = pod.gets(epoch)
        assert set(gets) == set(range(share.num_chunks))
        assert sum(gets.values()) <= 2 * share.num_samples, "alone, and for what gives way to it, at worst"


@given(
    shares(any_order=False, least_samples=4, least_bytes=0),
    st.sampled_from([0.5, 1, 2]),
    st.sampled_from([1, 5, 40]),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_samples_that_are_longer_than_the_mean_are_counted_when_they_come(
    share: MadeUp, part: float, most: int, slow: bool, draws: random.Random
) -> None:
    """What is expected of each is the mean of its chunk. Orders are planned by that, and memory holds what there is."""
    real = share.lengths
    means = np.add.reduceat(real, share.starts[:-1]) // np.array(share.sizes)
    expected = MadeUp(share.sizes, np.repeat(means, share.sizes), share.planned_bytes, share.seed)
    pod = Pod(expected, int(part * share.planned_bytes), slow=slow, real=real)
    for epoch, places in nearly_in_order(expected, pod.memory.planned_places // 2, most, draws):
        assert not pod.ask(epoch, places)
        for read in draws.sample(list(pod.under_way), len(pod.under_way) // 2):
            pod.arrive(read)
    pod.arrive_all()
    assert pod.is_all_here
    assert not pod.alone


# Whatever is asked for.

FACTS = (
    *("ask", "ask", "ask", "ask", "ask next", "ask next", "ask next", "ask again", "ask far"),
    *("arrives", "arrives", "arrives", "arrives", "fails", "damaged", "memory", "give back", "plan", "forget", "warm"),
)


@given(
    shares(least_bytes=0),
    st.booleans(),
    st.sampled_from([1, 1, 2, 3]),
    st.integers(20, 120),
    st.randoms(use_true_random=False),
)
def test_whatever_is_asked_for(
    share: MadeUp, slow: bool, num_askers: int, num_facts: int, draws: random.Random
) -> None:
    """Checks are those of :class:`Pod`."""
    pod = Pod(share, share.planned_bytes, slow=slow, num_askers=num_askers)
    n, epoch, place = share.num_samples, 0, 0
    last = 0, [0]
    for _ in range(num_facts):
        fact = draws.choice(FACTS)
        read = draws.choice(list(pod.under_way)) if pod.under_way else None
        if fact == "ask next":
            last = epoch, list(range(place, min(n, place + draws.randint(1, 40))))
            pod.ask(*last, may_plan_ahead=draws.random() < 0.7)
            place += len(last[1])
            if place == n or draws.random() < 0.05:
                epoch, place = epoch + 1, 0
        elif fact in ("ask", "ask far"):
            away = draws.randint(-1, 1) if fact == "ask" else draws.randint(-5, 5)
            last = max(0, epoch + away), draws.sample(range(n), draws.randint(1, min(n, 40)))
            pod.ask(*last, may_plan_ahead=draws.random() < 0.7)
        elif fact == "ask again":
            pod.ask(*last)
        elif fact == "arrives" and read is not None:
            pod.arrive(read)
        elif fact == "fails" and read is not None:
            pod.fail(read)
        elif fact == "damaged" and read is not None:
            pod.arrive(read, read.samples[: draws.randint(1, len(read.samples))])
        elif fact == "memory":
            pod.memory_is(int(draws.choice([0, 0.3, 1, 2]) * share.planned_bytes))
        elif fact == "plan":
            pod.plan(max(0, epoch + draws.randint(-2, 3)))
        elif fact == "give back":
            pod.give_back()
        elif fact == "forget":
            pod.forget()
        elif fact == "warm":
            pod.warm(max(0, epoch + draws.randint(-1, 1)), draws.randrange(n))
    pod.arrive_all()
    assert pod.is_all_here
    # A loop that goes on from here has what it asks for.
    pod.slow = False
    pod.memory_is(2 * share.planned_bytes)
    at = epoch + 7
    stray = in_order(pod, at, 16) + in_order(pod, at + 1, 16)
    assert stray <= pod.memory.most_stray + 2 * 16
    assert not in_order(pod, at + 2, 16)
    assert pod.is_all_here


def test_what_is_given_back_is_read_again_when_its_turn_comes() -> None:
    """What will be asked for last goes first, so that the next requests find their samples."""
    share = even(256, 8, 64)
    pod = Pod(share, 128)
    for at in (0, 16):
        pod.ask(0, range(at, at + 16))
    pod.memory_is(64)
    assert pod.num_here == 128, "until somebody wants it"
    pod.give_back()
    assert 0 < pod.num_here <= 64
    order = share.order(0)
    here = [bool(pod.here[0][order[place]]) for place in range(32, 256)]
    read = [place for place, is_here in enumerate(here) if is_here]
    assert here[: len(read) // 2] == [True] * (len(read) // 2), "what comes next is gone"
    assert not in_order(pod, 0, 16, first=32)
    assert sum(pod.gets(0).values()) < 2 * 32, "chunks are read once more at most"


# Where reads do not come.


def test_a_read_that_failed_is_read_again_ahead_of_need() -> None:
    share = even(64, 8, 32)
    pod = Pod(share, 64, slow=True)
    pod.ask(0, [0], may_plan_ahead=False)
    assert len(pod.under_way) == 8
    failed = list(pod.under_way)
    for read in failed:
        pod.fail(read)
    assert not pod.memory.held_bytes
    pod.memory_is(64)
    again = {sample for read in pod.under_way for sample in read.samples.tolist()}
    assert again == set(range(64)) - {int(share.order(0)[0])}
    assert [read.chunk for read in pod.under_way] == [read.chunk for read in failed], "in the order of their use"
    pod.slow = False
    pod.arrive_all()
    assert not in_order(pod, 0, 4, first=1)
    assert pod.gets(0) == dict.fromkeys(range(8), 2)


def test_a_read_that_failed_is_read_again_when_it_is_asked_for() -> None:
    share = even(64, 8, 32)
    pod = Pod(share, 8, slow=True)
    pod.ask(0, [0])
    (read,) = pod.under_way
    pod.fail(read)
    assert pod.alone == [(0, int(share.order(0)[0]))], "whom it was read for"
    mate = next(place for place in range(1, 64) if share.chunk_of[share.order(0)[place]] == read.chunk)
    pod.memory_is(0)
    assert not pod.under_way
    assert not pod.ask(0, [mate])
    (again,) = pod.under_way
    assert again.samples.tolist() == sorted(set(read.samples.tolist()) - {int(share.order(0)[0])})


def test_a_damaged_sample_is_read_again_by_who_asks_for_it() -> None:
    share = even(64, 8, 32)
    pod = Pod(share, 64, slow=True)
    pod.ask(0, [0], may_plan_ahead=False)
    for read in list(pod.under_way):
        pod.arrive(read, read.samples[-1:])
    assert pod.num_here == 64 - 8 - (int(share.order(0)[0]) % 8 != 7)
    pod.memory_is(64)
    assert not pod.under_way, "nobody reads ahead what is damaged"
    last = int(np.flatnonzero(share.order(0) == 63)[0])
    if last:
        assert not pod.ask(0, [last], may_plan_ahead=False)
        assert [read.samples.tolist() for read in pod.under_way] == [[63]]


def test_what_arrives_for_an_epoch_that_was_begun_anew_is_not_taken_for_what_is_read_now() -> None:
    """A read of a part of a chunk, ordered before, arrives while all of it is on its way."""
    share = even(64, 8, 32)
    pod = Pod(share, 0, slow=True)
    pod.ask(0, [0])
    (whole,) = pod.under_way
    mates = [place for place in range(1, 64) if share.chunk_of[share.order(0)[place]] == whole.chunk]
    pod.fail(whole)
    other = next(place for place in range(1, 64) if share.chunk_of[share.order(0)[place]] != whole.chunk)
    pod.ask(0, [other])
    pod.ask(0, mates[:1])
    part = next(read for read in pod.under_way if read.chunk == whole.chunk)
    assert len(part.samples) == 1, "there is no room for more"
    pod.forget()
    pod.memory_is(64)
    pod.ask(0, [0])
    pod.arrive(part)
    pod.arrive_all()
    assert not in_order(pod, 0, 4, first=1)
    pod.arrive_all()
    assert pod.is_all_here


def test_what_is_left_of_a_chunk_is_read_ahead_though_its_next_sample_is_left_out() -> None:
    share = MadeUp([8] * 32, np.ones(256, dtype=np.int64), 16, any_order=True)
    pod = Pod(share, 64, slow=True)
    pod.ask(0, [0], may_plan_ahead=False)
    places = np.argsort(share.order(0))
    read = next(read for read in pod.under_way if places[read.samples].min() > 0 and places[read.samples].max() > 100)
    pod.fail(read)
    pod.memory_is(0)
    pod.ask(0, [int(places[read.samples].min()) + 30], may_plan_ahead=False)
    assert not pod.open_epoch(0).to_come[read.samples].all(), "who asks for the first of it is late"
    pod.memory_is(256)
    at = pod.open_epoch(0)
    assert not ((at.to_come > 0) & ~at.here & ~at.coming).any()


# A pod that starts, and runs that go back.


@given(shares(any_order=False), st.floats(0, 1), st.integers(1, 40), st.randoms(use_true_random=False))
def test_who_begins_in_mid_epoch_has_all_from_there_on(
    share: MadeUp, part: float, most: int, draws: random.Random
) -> None:
    n, epoch = share.num_samples, draws.randint(0, 2)
    first = min(n - 1, int(part * n))
    pod = Pod(share, share.planned_bytes)
    assert not ask_all(pod, in_calls(epoch, range(first, n), most, draws))
    planned = pod.memory.planned_places
    before = first if first < planned // 2 else planned // 8
    read = [sample for each in pod.log if each.epoch == epoch for sample in each.samples.tolist()]
    assert sorted(read) == sorted(set(read)), "read once"
    assert set(read) <= set(share.order(epoch)[first - before :].tolist())
    assert set(read) >= set(share.order(epoch)[first:].tolist())
    # What was read for workers that may be behind is left of that epoch, and may be in the way of the next one.
    for later in (epoch + 1, epoch + 2):
        assert not ask_all(pod, in_calls(later, range(n), most, draws))
    assert pod.gets(epoch + 2) == dict.fromkeys(range(share.num_chunks), 1)


def test_a_thread_may_have_begun_an_epoch_in_its_midst() -> None:
    """Which takes a while in a large share, and decides nothing."""
    pods = [Pod(even(num_samples, 8, 800), 1000, slow=True) for num_samples in (4095, 4095)]
    places = np.arange(2000, 2040)
    begun = pods[0].memory.to_prepare(1, places) if pods[0].memory.knows(1) else None
    assert begun is None, "nobody knows the order"
    for pod in pods:
        pod.plan(1)
    to_prepare = pods[0].memory.to_prepare(1, places)
    assert to_prepare is not None
    prepared = to_prepare()
    pods[0].memory.prepared(prepared)
    answers = [pod.memory.asked(1, places) for pod in pods]
    assert pods[0].open_epoch(1) is prepared
    assert pods[1].open_epoch(1) is not prepared
    assert [(read.chunk, read.samples.tolist()) for read in answers[0].reads] == [
        (read.chunk, read.samples.tolist()) for read in answers[1].reads
    ]
    assert pods[0].memory.to_prepare(1, places + 100) is None, "it has begun"


def test_what_was_begun_for_another_place_or_epoch_is_not_taken() -> None:
    for epoch, place in ((1, 3000), (2, 2000)):
        pod = Pod(even(4095, 8, 800), 1000, slow=True)
        pod.plan(1)
        pod.plan(2)
        to_prepare = pod.memory.to_prepare(1, np.array([2000]))
        assert to_prepare is not None
        pod.memory.prepared(to_prepare())
        asked = pod.memory.asked(epoch, np.arange(place, place + 10))
        at = pod.open_epoch(epoch)
        assert at is not None
        assert (at.number, at.first_place) == (epoch, place - 800 // 8)
        assert asked.samples.tolist() == pod.share.order(epoch)[place : place + 10].tolist()


def test_workers_may_be_a_little_behind_where_a_pod_begins() -> None:
    pod = Pod(even(4096, 8, 800), 1000)
    assert not pod.ask(2, range(2000, 2064))
    assert not pod.ask(2, range(1936, 2000))
    assert pod.ask(2, range(1800, 1840)) == 40, "these are taken as gone"
    assert pod.gets(2) == {chunk: 1 for chunk in pod.gets(2)}


BATCH = 32


@pytest.mark.variants("(0, 4096)")
@pytest.mark.parametrize(
    "stop_at",
    [(0, 4096), (2, 8192), *(pytest.param(at, marks=pytest.mark.variant) for at in ((0, 8192), (1, 2048)))],
    ids=str,
)
def test_a_run_that_goes_back_is_served_anew(stop_at: tuple[int, int]) -> None:
    share = even(8192, 16, 819)
    pod = Pod(share, 1024)
    last, places = stop_at
    for epoch in range(last + 1):
        in_order(pod, epoch, BATCH) if epoch < last else ask_all(
            pod, ((epoch, range(at, at + BATCH)) for at in range(0, places, BATCH))
        )
    already = len(pod.log)
    assert not pod.alone
    assert in_order(pod, 0, BATCH) <= share_memory.MOST_STRAY
    again = Counter(read.chunk for read in pod.log[already:] if read.epoch == 0)
    assert set(again.values()) == {1}
    assert not in_order(pod, 1, BATCH)
    assert all(read.epoch in (0, 1, 2) for read in pod.log[already:])
    assert len(pod.log) - already <= 512 * 2.2


def test_a_run_that_goes_on_in_another_epoch_is_served_there() -> None:
    pod = Pod(even(8192, 16, 819), 1024)
    in_order(pod, 0, BATCH)
    assert in_order(pod, 7, BATCH, first=4000) <= share_memory.MOST_STRAY
    assert not in_order(pod, 8, BATCH)
    assert set(pod.gets(8).values()) == {1}


def test_a_pod_that_others_stood_in_for_goes_on_where_they_are() -> None:
    pod = Pod(even(8192, 16, 819), 1024)
    ask_all(pod, ((1, range(at, at + BATCH)) for at in range(0, 320, BATCH)))
    already = len(pod.log)
    assert not in_order(pod, 1, BATCH, first=5024)
    read = [sample for each in pod.log[already:] if each.epoch == 1 for sample in each.samples.tolist()]
    assert len(read) <= 8192 - 5024 + 1024 + (1024 - 819), "and what lies behind by no more than memory"
    assert not in_order(pod, 2, BATCH)
    assert set(pod.gets(2).values()) == {1}


@pytest.mark.variants("9-32")
@pytest.mark.parametrize(
    ("epoch", "count"),
    [(9, 32), (3, 2000), *(pytest.param(epoch, 2000, marks=pytest.mark.variant) for epoch in (0, 9))],
    ids=str,
)
def test_a_request_that_nobody_expects_changes_nothing_for_others(epoch: int, count: int) -> None:
    """It is of an epoch that is far away, or asked again; there may be many places in it."""
    one, other = (Pod(even(8192, 16, 819), 1024) for _ in range(2))
    for pod in (one, other):
        in_order(pod, 2, BATCH)
        ask_all(pod, ((3, range(at, at + BATCH)) for at in range(0, 4000, BATCH)))
    assert other.ask(epoch, range(count)) == count
    for pod in (one, other):
        in_order(pod, 3, BATCH, first=4000)
        in_order(pod, 4, BATCH)
    of_one, of_other = ([(read.epoch, read.samples.tolist()) for read in pod.log] for pod in (one, other))
    assert of_other == of_one
    assert len(other.alone) == count


def test_the_epoch_after_one_that_was_only_read_ahead_is_far_away() -> None:
    pod = Pod(even(4096, 16, 4096), 5000)
    ask_all(pod, ((0, range(at, at + BATCH)) for at in range(0, 2016, BATCH)))
    assert {read.epoch for read in pod.log} == {0, 1}
    assert pod.ask(2, range(BATCH)) == BATCH
    assert not in_order(pod, 0, BATCH, first=2016)
    assert not in_order(pod, 1, BATCH)


# Who comes before anybody asks, and ranks that share their batches.


def test_what_is_read_before_anybody_asks_is_what_will_be_asked_for() -> None:
    pod = Pod(even(4096, 8, 400), 500)
    pod.warm(2, 1000)
    assert pod.memory.next_wanted() is None
    assert 500 - 8 < pod.num_here <= 500
    assert pod.here[2][pod.share.order(2)[1000:1032]].all()
    pod.warm(0, 0)
    assert pod.epochs_here() == {2}
    assert not in_order(pod, 2, 32, first=1000)
    assert not in_order(pod, 3, 32)
    assert max((pod.gets(2) + pod.gets(3)).values()) == 2


@pytest.mark.variants("0-0", "2-0")
@pytest.mark.parametrize(("epoch", "place"), [(0, 0), (2, 0), (3, 0), (9, 2000)])
def test_a_job_that_begins_elsewhere_than_was_thought_begins_there(epoch: int, place: int) -> None:
    pod = Pod(even(4096, 8, 400), 500)
    pod.warm(2, 1000)
    assert not in_order(pod, epoch, 32, first=place)
    assert not in_order(pod, epoch + 1, 32)
    assert pod.epochs_here() == {epoch + 2}


def test_each_chunk_is_read_once_for_all_ranks_that_share_a_batch() -> None:
    pod = Pod(even(4096, 8, 400), 500, num_askers=3)
    for epoch in range(EPOCHS):
        for first in range(0, 4096, 32):
            for _ in range(3):
                assert not pod.ask(epoch, range(first, first + 32))
            assert not pod.here[epoch][pod.share.order(epoch)[: first + 32]].any(), "all have it"
        assert pod.gets(epoch) == dict.fromkeys(range(512), 1)


@given(shares(), st.sampled_from([0, 0.3, 1, 2]), st.integers(2, 4), st.randoms(use_true_random=False))
def test_ranks_that_share_batches_get_them_with_any_memory(
    share: MadeUp, part: float, num_askers: int, draws: random.Random
) -> None:
    """Each asks in its own time, a few calls before or behind the others. Checks are those of :class:`Pod`."""
    pod = Pod(share, int(part * share.planned_bytes), num_askers=num_askers)
    calls = [call for epoch in range(3) for call in in_calls(epoch, range(share.num_samples), 8, draws)]
    turns = [(number + draws.uniform(0, 2), number) for number in range(len(calls)) for _ in range(num_askers)]
    for _, number in sorted(turns):
        pod.ask(*calls[number])
    pod.forget()
    for _ in range(num_askers):
        assert not pod.ask(7, range(share.num_samples))
    assert 7 not in pod.epochs_here()


def test_a_batch_of_every_worker_may_take_as_much_as_memory_holds() -> None:
    """Who is behind by no more than memory holds is waited for: of what comes that late, little is read alone, where
    memory is twice what was planned for."""
    share = even(8192, 16, 400)
    pod = Pod(share, 800)
    workers = np.arange(8192 // 800 * 800).reshape(-1, 25, BATCH)
    alone = 0
    for epoch in range(3):
        for turn in workers:  # the first of 25 is the last to ask
            alone += sum(pod.ask(epoch, batch.tolist()) for batch in turn[::-1])
        alone += in_order(pod, epoch, BATCH, first=workers.size)
    assert alone <= 3 * 8192 // 20


# Ranks that leave positions out, and many epochs.


@pytest.mark.parametrize(("num_samples", "planned"), [(4096, 409), (1024, 1024), (500, 50), (500, 500)])
def test_what_nobody_asks_for_does_not_stay(num_samples: int, planned: int) -> None:
    share = even(num_samples, 8, planned)
    memory = planned * 3 // 2
    pod = Pod(share, memory)
    asked = [place for place in range(num_samples) if place % 8]
    for epoch in range(5):
        for at in range(0, len(asked), BATCH):
            assert not pod.ask(epoch, asked[at : at + BATCH])
            far_behind = share.order(epoch)[: max(0, int(asked[at] - 1.2 * memory))]
            assert not pod.here[epoch][far_behind].any()
        assert pod.gets(epoch) == dict.fromkeys(range(share.num_chunks), 1)
        assert min(pod.epochs_here()) >= epoch - (planned == num_samples)
    assert not pod.alone


def test_the_last_of_an_epoch_that_is_left_out_gives_room() -> None:
    """Ranks that do not divide the epoch, with ``drop_last``."""
    pod = Pod(even(1000, 8, 100), 125)
    for epoch in range(6):
        assert not ask_all(pod, ((epoch, range(at, at + 30)) for at in range(0, 990, 30)))
        assert pod.epochs_here() <= {epoch, epoch + 1}
        assert all(count == 1 for count in pod.gets(epoch).values())


def test_a_loop_that_breaks_off_each_epoch_reads_memory_anew_and_no_more() -> None:
    share = even(4096, 8, 400)
    pod = Pod(share, 500)
    for epoch in range(6):
        assert not ask_all(pod, ((epoch, range(at, at + 20)) for at in range(0, 1000, 20)))
        assert sum(pod.gets(epoch).values()) <= (1000 + 2 * 500) / 8
        assert all(len(read.samples) > 1 for read in pod.log if read.epoch == epoch)


@given(shares(), st.sampled_from([0, 0.5, 1, 3]), st.randoms(use_true_random=False))
def test_many_epochs_do_not_add_up(share: MadeUp, part: float, draws: random.Random) -> None:
    """Also where each is broken off, or leaves positions out."""
    pod = Pod(share, int(part * share.planned_bytes))
    for epoch in range(12):
        end = draws.randint(1, share.num_samples) if draws.random() < 0.5 else share.num_samples
        places = [place for place in range(end) if draws.random() < 0.9] or [0]
        ask_all(pod, in_calls(epoch, places, 40, draws))
        assert all(len(at.again) <= share.num_samples for at in pod.memory.epochs)
        assert pod.epochs_here() <= {epoch - 1, epoch, epoch + 1}, epoch


# The smallest ones.


def test_a_share_without_samples_is_asked_for_nothing() -> None:
    pod = Pod(MadeUp([], np.empty(0, dtype=np.int64), 0), 100)
    pod.plan(0)
    pod.memory_is(0)
    pod.forget()
    assert not pod.log
    assert pod.memory.next_wanted() is None


@pytest.mark.parametrize("num_samples", [1, 2, 3])
@pytest.mark.parametrize("chunk_size", [1, 2, 8])
@pytest.mark.parametrize("planned", [0, 1, 2, 9])
def test_shares_of_a_few_samples(num_samples: int, chunk_size: int, planned: int) -> None:
    share = even(num_samples, min(chunk_size, num_samples), planned)
    pod = Pod(share, planned)
    for epoch in range(5):
        assert not in_order(pod, epoch, 1)
    for epoch in range(5, 10):
        assert not in_order(pod, epoch, num_samples)
        assert pod.gets(epoch) == dict.fromkeys(range(share.num_chunks), 1)


def test_a_chunk_that_nobody_has_read_is_read_by_one_get_though_all_of_it_is_asked_for_at_once() -> None:
    pod = Pod(even(64, 16, 64), 64)
    assert not pod.ask(0, range(64))
    assert pod.gets(0) == dict.fromkeys(range(4), 1)


def test_without_memory_each_sample_comes() -> None:
    share = even(256, 16, 64)
    pod = Pod(share, 0)
    for epoch in range(3):
        assert not in_order(pod, epoch, 8)
        assert max(pod.gets(epoch).values()) <= 16
    assert not pod.alone


# What a pod reads first, when it begins.


@pytest.mark.parametrize(("chunk_size", "memory"), [(8, 400), (64, 1600), (64, 400)])
def test_who_begins_in_mid_epoch_leaves_out_what_nobody_wants_of_chunks_in_use(chunk_size: int, memory: int) -> None:
    share = even(8192, chunk_size, memory)
    pod = Pod(share, memory)
    first = 4096
    assert not ask_all(pod, ((1, range(at, at + BATCH)) for at in range(first, 8192, BATCH)))
    begins = first - memory // 8
    in_use = np.unique(share.chunk_of[share.order(1)[:begins]])
    reads = [read for read in pod.log if read.epoch == 1 and read.chunk in in_use]
    wanted = sum(len(read.samples) for read in reads)
    read_bytes = sum(int(read.local[-1] + 1 - read.local[0]) for read in reads)
    assert wanted < read_bytes <= 2 * wanted


def test_what_a_request_waits_for_is_due_and_what_is_read_ahead_is_not() -> None:
    pod = Pod(even(4096, 8, 400), 400, slow=True)
    for first in (64, 1000):
        before = len(pod.log)
        pod.ask(0, range(first, first + 32))
        wanted = set(pod.share.order(0)[first : first + 32].tolist())
        is_due = [not wanted.isdisjoint(read.samples.tolist()) for read in pod.log[before:]]
        assert [read.due for read in pod.log[before:]] == [first if due else None for due in is_due]
        assert any(is_due)


def test_what_is_read_says_where_somebody_will_ask_for_it_first() -> None:
    """So that a pod reads for all of its shares what is needed soonest."""
    pod = Pod(even(4096, 8, 400), 400, slow=True)
    pod.ask(0, range(32))
    place_of = np.argsort(pod.share.order(0))
    ahead = [read for read in pod.log if read.epoch == 0 and read.due is None and read.place > 0]
    assert len(ahead) > 20
    assert [read.place for read in ahead] == [int(place_of[read.samples].min()) for read in ahead]


def test_first_batches_are_read_alone_where_their_chunks_are_much() -> None:
    """Until something has come; those of other workers are read with their chunks."""
    share = even(4096, 64, 1600)
    for most, is_alone in ((10_000, False), (100, True)):
        pod = Pod(share, 1600, slow=True)
        pod.memory.num_ranks, pod.memory.most_at_first_bytes = 2, most
        pod.ask(0, range(32))
        pod.ask(0, range(32, 64))
        of_first = [read for read in pod.log if read.due is not None]
        assert (max(len(read.samples) for read in of_first) < 32) == is_alone
        if is_alone:
            first = {sample for read in of_first for sample in read.samples.tolist()}
            assert first <= set(share.order(0)[:64].tolist())
        before = len(pod.log)
        pod.ask(0, range(512, 544))
        later = [read for read in pod.log[before:] if read.due is not None]
        assert not later or max(len(read.samples) for read in later) > 32
