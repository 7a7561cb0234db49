"""Ranks that go through an epoch by different dealings are found out; ranks that take others' places are not."""

from __future__ import annotations

from refill.protocol.dealing import Dealing
from refill_service.cache_core.planned.dealings import LIVES_SECONDS, RankDealings

WHOLE, OF_THREE, FROM_40 = Dealing(100, 2), Dealing(100, 3, start=30), Dealing(100, 2, start=40)


def test_ranks_of_one_dealing_are_never_refused() -> None:
    dealings = RankDealings()
    for now in range(100):
        assert dealings.asks(now % 2, now // 20, WHOLE, now) is None


def test_other_ranks_take_the_places_of_those_before() -> None:
    dealings = RankDealings()
    assert all(dealings.asks(rank, 0, WHOLE, 1.0) is None for rank in range(2))
    assert all(dealings.asks(rank, 0, OF_THREE, 1.1 + rank / 10) is None for rank in (2, 0, 1))
    assert all(dealings.asks(rank, 0, OF_THREE, 2.0) is None for rank in range(3))


def test_a_rank_that_goes_on_from_an_earlier_step_than_others_is_found_out() -> None:
    dealings = RankDealings()
    assert dealings.asks(0, 0, WHOLE, 0.0) is None
    assert dealings.asks(1, 0, FROM_40, 1.0) is None, "rank 0 may have ended"
    assert dealings.asks(0, 0, WHOLE, 1.5) == (1, FROM_40)
    assert dealings.asks(1, 0, FROM_40, 2.0) is None, "who was refused has asked for nothing"
    assert dealings.asks(0, 0, WHOLE, 2.0 + LIVES_SECONDS) == (1, FROM_40)
    assert dealings.asks(0, 0, WHOLE, 2.1 + LIVES_SECONDS) is None, "rank 1 is gone"


def test_ranks_in_different_epochs_are_not_compared() -> None:
    dealings = RankDealings()
    assert dealings.asks(0, 0, FROM_40, 0.0) is None
    assert dealings.asks(1, 1, WHOLE, 0.0) is None
    assert dealings.asks(0, 0, FROM_40, 0.1) is None
