"""What ranks went on without: each damaged sample counts once in an epoch, whoever tells of it and how often."""

from __future__ import annotations

import pytest

from refill_service.cache_core.home_machine import MOST_EPOCHS, MOST_NAMED, DamagedSamples
from refill_service.cache_core.receipt import EpochReceipt


def test_each_counts_once_and_epochs_are_apart() -> None:
    damaged = DamagedSamples()
    damaged.rank_goes_without(3, 0, [7, 5])
    damaged.rank_goes_without(3, 0, [5])  # asked again after a lost answer
    damaged.rank_goes_without(3, 1, [9])
    damaged.rank_goes_without(4, 1, [5])
    assert (damaged.by_rank(3), damaged.named(3)) == ({0: 2, 1: 1}, [5, 7, 9])
    assert (damaged.by_rank(4), damaged.named(4), damaged.total) == ({1: 1}, [5], 4)
    damaged.forget(3)
    assert (damaged.by_rank(3), damaged.named(3), damaged.total) == ({}, [], 4)


def test_names_are_bounded_and_counts_are_not() -> None:
    damaged = DamagedSamples()
    damaged.rank_goes_without(0, 2, range(MOST_NAMED + 50))
    assert damaged.by_rank(0) == {2: MOST_NAMED + 50}
    assert len(damaged.named(0)) == MOST_NAMED


def test_epochs_are_bounded() -> None:
    damaged = DamagedSamples()
    for epoch in range(100):
        damaged.rank_goes_without(epoch, 0, [1])
    assert [epoch for epoch in range(100) if damaged.named(epoch)] == list(range(100 - MOST_EPOCHS, 100))


WHOLE = EpochReceipt(requests=20, delivered=20, ranks={0: 10, 1: 10}, samples_digest=1, digest=2)


def test_a_receipt_tells_what_came_from_what_was_damaged() -> None:
    found = WHOLE.with_damaged([{0: 2}, {1: 1}], [[3, 4], [8]])
    assert (found.delivered, found.damaged, found.damaged_samples) == (17, 3, (3, 4, 8))
    assert found.requests == found.delivered + found.missing + found.damaged
    assert found.exact, "the rest came exactly once"
    assert found.ranks == {0: 8, 1: 9}


def test_a_rank_that_reported_to_two_homes_counts_once() -> None:
    found = WHOLE.with_damaged([{0: 2}, {0: 1}], [[3, 4], [4]])
    assert (found.delivered, found.damaged, found.damaged_samples) == (18, 2, (3, 4))


@pytest.mark.parametrize("parts", [([], []), ([{}, {}], [[], []])])
def test_nothing_damaged_changes_nothing(parts: tuple[list[dict[int, int]], list[list[int]]]) -> None:
    assert WHOLE.with_damaged(*parts) == WHOLE
