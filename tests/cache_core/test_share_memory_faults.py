"""What a pod reads of one share where memory is short, reads fail, bytes are damaged or anything is asked for: nothing
that is asked for is lost."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.cache_core.one_share import EPOCHS, MadeUp, Pod, Sample, even, in_order, nearly_in_order, shares


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


def test_without_memory_each_sample_comes() -> None:
    share = even(256, 16, 64)
    pod = Pod(share, 0)
    for epoch in range(3):
        assert not in_order(pod, epoch, 8)
        assert max(pod.gets(epoch).values()) <= 16
    assert not pod.alone
