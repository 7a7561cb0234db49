"""Orders of classes: each sample once, batches as composed, the same on each rank, and spread over the epoch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.draws import draws

from refill.errors import InvalidInput
from refill.protocol.class_order import (
    balanced_order,
    bucket_boundaries,
    bucket_order,
    in_turns,
    positions_of_rank,
    rank_part,
    samples_for,
)


def random_of(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@draws(60)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=200), st.integers(1, 4), st.integers(1, 9), st.booleans())
def test_each_sample_comes_once_and_steps_are_of_one_bucket(
    numbers: list[int], world_size: int, batch_size: int, drop_last: bool
) -> None:
    classes = np.unique(numbers, return_inverse=True)[1]
    step_size, counts = world_size * batch_size, np.bincount(classes)
    order = bucket_order(classes, step_size, random_of(1))
    assert np.bincount(order).tolist() == counts.tolist()
    steps = order[: len(order) // step_size * step_size].reshape(-1, step_size)
    whole = (steps == steps[:, :1]).all(axis=1)
    assert np.count_nonzero(whole) >= (counts // step_size).sum(), "more steps are mixed than must be"
    assert (np.diff(steps) >= 0).all(), "neighbouring buckets are not together"
    samples = samples_for(order, classes, random_of(2).permutation(len(classes)), random_of(2))
    assert sorted(samples.tolist()) == list(range(len(classes)))
    assert (classes[samples] == order).all()
    parts = [rank_part(samples, rank, world_size, batch_size, drop_last=drop_last) for rank in range(world_size)]
    assert {len(part) for part in parts} == {positions_of_rank(len(samples), world_size, drop_last=drop_last)}
    came = np.bincount(np.concatenate(parts), minlength=len(classes))
    if drop_last:
        assert came.max() == 1 or len(classes) < world_size
        assert np.count_nonzero(came == 0) < world_size
    else:
        assert came.min() >= 1
        assert came.sum() - len(classes) < world_size


def test_what_fills_no_step_is_of_other_buckets_in_each_epoch() -> None:
    """A loop that leaves the last batch out leaves out no bucket for ever."""
    classes = np.repeat(np.arange(6), [95, 80, 64, 47, 31, 18])
    last = [bucket_order(classes, 40, random_of(epoch))[-(len(classes) % 40) :] for epoch in range(40)]
    of_class = np.bincount(np.concatenate(last), minlength=6)
    assert np.count_nonzero(of_class) >= 4
    assert of_class[5] < 40 * 18 / 2, "the longest ones are mostly not the last"


def test_steps_of_a_bucket_are_spread_over_the_epoch() -> None:
    """So that memory has what comes: no part of the epoch has two steps more of a bucket than its share, and one."""
    order = bucket_order(np.arange(12_000) % 4, 10, random_of(3))
    steps = order.reshape(-1, 10)[:, 0]
    for bucket in range(4):
        came = np.cumsum(steps == bucket)
        assert np.abs(came - np.arange(1, len(steps) + 1) / 4).max() < 3
    assert (bucket_order(np.arange(12_000) % 4, 10, random_of(4)) != order).any()


def test_buckets_have_the_same_sum_of_lengths() -> None:
    lengths = random_of(1).lognormal(5, 1, 10_000).astype(np.int64)
    bucket = np.searchsorted(bucket_boundaries(lengths, 8), lengths, side="right")
    sums = np.bincount(bucket, weights=lengths)
    assert len(sums) == 8
    assert sums.max() / sums.min() < 1.1
    assert bucket_boundaries(np.full(9, 7), 4).tolist() == [7], "all are equally long"


def test_classes_are_balanced_in_every_batch() -> None:
    equal = balanced_order(np.full(5, 40), random_of(1))
    assert all(np.bincount(batch).tolist() == [4] * 5 for batch in equal.reshape(-1, 20))
    counts = np.array([700, 200, 90, 10])
    for batch in balanced_order(counts, random_of(1)).reshape(-1, 100):
        assert np.abs(np.bincount(batch, minlength=4) - counts / 10).max() < 2.5


def test_classes_with_too_few_samples_come_again() -> None:
    classes = np.array([0, 1, 1, 1, 1])
    order = balanced_order(np.array([3, 3]), random_of(1))
    samples = samples_for(order, classes, np.arange(5), random_of(1))
    assert sorted(samples[order == 0].tolist()) == [0, 0, 0]
    assert len(set(samples[order == 1].tolist())) == 3
    with pytest.raises(InvalidInput, match="positions ask for class 2, which no sample has"):
        samples_for(np.array([2]), classes, np.arange(5), random_of(1))


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=120),
    st.lists(st.integers(0, 20), min_size=5, max_size=5),
    st.integers(0, 99),
)
def test_samples_of_a_class_come_in_their_turn(numbers: list[int], wanted: list[int], seed: int) -> None:
    """Whatever part of them is asked for, or however often."""
    classes, turns = np.array(numbers), random_of(seed).permutation(len(numbers))
    wanted = [count if there else 0 for count, there in zip(wanted, np.bincount(classes, minlength=5), strict=True)]
    order = random_of(seed).permutation(np.repeat(np.arange(5), wanted))
    samples = samples_for(order, classes, turns, random_of(seed))
    assert classes[samples].tolist() == order.tolist()
    turn_of = np.argsort(turns)
    for each in range(5):
        there, came = np.count_nonzero(classes == each), turn_of[samples[order == each]]
        assert len(set(came.tolist())) == min(there, len(came)), "all are different as far as there are so many"
        for first in range(0, len(came), max(1, int(there))):
            assert (np.diff(came[first : first + there]) > 0).all()


def test_a_part_of_a_class_is_from_all_of_the_epoch() -> None:
    samples = samples_for(np.zeros(100, dtype=np.int64), np.zeros(1000, dtype=np.int64), np.arange(1000), random_of(1))
    assert set(np.diff(samples).tolist()) == {10}
    others = samples_for(np.zeros(100, dtype=np.int64), np.zeros(1000, dtype=np.int64), np.arange(1000), random_of(2))
    assert set(samples.tolist()) != set(others.tolist())


@given(st.integers(1, 300), st.data())
def test_samples_in_turns_are_the_same_samples_and_what_comes_once_is_in_that_order(
    size: int, data: st.DataObject
) -> None:
    turns = np.array(data.draw(st.permutations(range(size))), dtype=np.int64)
    samples = np.array(data.draw(st.lists(st.integers(0, size - 1), max_size=400)), dtype=np.int64)
    found = in_turns(samples, turns)
    assert sorted(found.tolist()) == sorted(samples.tolist())
    once = np.unique(samples)
    assert in_turns(once, turns).tolist() == [sample for sample in turns.tolist() if sample in set(once.tolist())]


def test_copies_of_a_sample_come_apart() -> None:
    turns = np.random.default_rng(1).permutation(6400)
    found = in_turns(np.concatenate([turns, np.full(3, turns[10])]), turns)
    assert np.diff(np.flatnonzero(found == turns[10])).tolist() == pytest.approx([101, 101, 101], abs=2)
