"""Where ranks are: what can still be asked for, by whom, and who is behind."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill_service.cache_core.rank_places import LONGEST_STEP, NOT_BEGUN, RankPlaces


def test_what_another_rank_may_be_in_is_needed_whatever_one_asks_for() -> None:
    ranks = RankPlaces(2)
    ranks.enters(0, 0)
    ranks.enters(1, 0)
    ranks.enters(0, 1)
    ranks.enters(0, 2)
    assert ranks.oldest_needed <= 0, "rank 1 is in epoch 0"
    assert ranks.behind(1) == [1]
    ranks.enters(1, 2)
    assert ranks.oldest_needed == 1


def test_who_has_nothing_to_ask_is_not_waited_for() -> None:
    ranks = RankPlaces(2, asks_nothing=lambda epoch, rank: rank == 1 and epoch < 2)
    ranks.enters(0, 1)
    assert ranks.all_entered(1)
    ranks.enters(0, 2)
    assert ranks.behind(2) == [1]


@pytest.mark.parametrize("begins", [0, 7])
def test_who_asks_nothing_in_any_epoch_holds_none_back(begins: int) -> None:
    """Though its traces are known for some epochs only, and posted when others are there already."""
    posted: set[int] = set()
    ranks = RankPlaces(3, asks_nothing=lambda epoch, rank: rank == 2 and epoch in posted)
    for epoch in range(begins, begins + 20):
        ranks.enters(0, epoch)
        ranks.enters(1, epoch)
        posted = {epoch - 1, epoch}
        if epoch >= begins + 4:
            assert epoch - 5 <= ranks.oldest_needed < epoch
    assert list(ranks) == [(0, begins + 19), (1, begins + 19)], "it has entered none all the same"


def test_an_epoch_that_a_rank_can_still_be_served_in_is_needed_whatever_it_asks_later() -> None:
    ranks = RankPlaces(2, asks_nothing=lambda epoch, rank: rank == 1 and epoch > 3)
    ranks.enters(0, 3)
    ranks.enters(1, 3)
    for epoch in (4, 5):  # it is served 3 while the owner has 3, 4 and 5 open
        ranks.enters(0, epoch)
        assert ranks.oldest_needed <= 2
    for epoch in range(6, 12):
        ranks.enters(0, epoch)
    assert ranks.oldest_needed == 7
    ranks.enters(1, 12)
    assert ranks.oldest_needed == 10


def test_a_job_begins_anywhere_and_goes_on_in_steps() -> None:
    ranks = RankPlaces(2)
    assert all(ranks.may_ask(epoch) for epoch in (0, 7, 2**31 - 1))
    ranks.enters(0, 7)
    assert all(ranks.may_ask(epoch) for epoch in (0, 8, 12, 7 + LONGEST_STEP))
    assert not ranks.may_ask(8 + LONGEST_STEP)


@given(
    st.integers(1, 5).flatmap(
        lambda size: st.lists(st.tuples(st.integers(0, size - 1), st.integers(0, 6)), max_size=40).map(
            lambda asks: (size, asks)
        )
    )
)
def test_as_a_list_of_epochs_would_say(asked: tuple[int, list[tuple[int, int]]]) -> None:
    size, asks = asked
    ranks, epochs = RankPlaces(size), [NOT_BEGUN] * size
    for rank, epoch in asks:
        assert ranks.enters(rank, epoch) == (epoch > epochs[rank])
        epochs[rank] = max(epochs[rank], epoch)
        assert (ranks.newest, ranks.oldest) == (max(epochs), min(epochs))
        assert list(ranks) == [(each, at) for each, at in enumerate(epochs) if at > NOT_BEGUN]
        assert all(ranks.all_entered(each) == (min(epochs) >= each) for each in range(8))
