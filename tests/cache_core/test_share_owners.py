"""Which pod has a share, and which one stands in: evenly, few shares move, and nobody is asked who is away."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill.protocol.share_owners import share_owners, stand_in

numbers_of_shares = st.one_of(st.integers(1, 300), st.sampled_from([512, 1024, 8192]))


@given(numbers_of_shares, st.integers(1, 70))
def test_each_pod_has_as_many_as_any_other_or_one_less(num_shares: int, num_pods: int) -> None:
    owners = share_owners(num_shares, num_pods)
    counts = np.bincount(owners, minlength=num_pods)
    assert len(owners) == num_shares
    assert len(counts) == num_pods
    assert counts.max() == -(-num_shares // num_pods)
    assert counts.min() == num_shares // num_pods


@given(numbers_of_shares, st.integers(1, 70))
def test_one_more_pod_gets_its_shares_and_no_other_moves(num_shares: int, num_pods: int) -> None:
    before, after = share_owners(num_shares, num_pods), share_owners(num_shares, num_pods + 1)
    moved = before != after
    assert (after[moved] == num_pods).all()
    assert np.count_nonzero(moved) == num_shares // (num_pods + 1)


def test_who_has_what_never_changes() -> None:
    """Pods of two versions serve the same job while they are updated."""
    assert share_owners(8, 3).tolist() == [0, 0, 0, 2, 1, 1, 1, 2]
    assert share_owners(16, 5).tolist() == [0, 0, 0, 0, 3, 3, 2, 2, 1, 1, 1, 4, 3, 2, 4, 4]
    assert share_owners(4, 6).tolist() == [0, 3, 1, 2]
    with pytest.raises(ValueError, match="read-only"):
        share_owners(8, 3)[0] = 1


@given(numbers_of_shares, st.integers(2, 70), st.data())
def test_shares_of_a_pod_that_is_away_go_to_all_others(num_shares: int, num_pods: int, data: st.DataObject) -> None:
    away = data.draw(st.integers(0, num_pods - 1))
    owned = np.flatnonzero(share_owners(num_shares, num_pods) == away).tolist()
    found = [stand_in(share, num_shares, num_pods, {away}) for share in owned]
    counts = np.delete(np.bincount(np.array(found, dtype=np.int64), minlength=num_pods), away)
    assert len(counts) == num_pods - 1
    assert away not in found
    assert counts.max() - counts.min() <= 1


@given(numbers_of_shares, st.integers(1, 20), st.data())
def test_who_stands_in_is_not_away(num_shares: int, num_pods: int, data: st.DataObject) -> None:
    share = data.draw(st.integers(0, num_shares - 1))
    owner = int(share_owners(num_shares, num_pods)[share])
    away = data.draw(st.sets(st.integers(0, num_pods - 1))) | {owner}
    found = stand_in(share, num_shares, num_pods, away)
    if len(away) == num_pods:
        assert found == owner
    else:
        assert 0 <= found < num_pods
        assert found not in away
