"""Jobs share memory by what they use now: all fit, none gets more than it can use, and the next one finds room."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill_service.cache_core.memory_shares import Claim, memory_shares

MB = 1 << 20
claims_of = st.lists(
    st.builds(Claim, st.sampled_from(["", "a", "b"]), st.integers(0, 1 << 32), st.integers(0, 1 << 40)), max_size=12
)
fractions = st.floats(0.05, 1.0)


@given(st.integers(0, 1 << 41), claims_of, fractions, st.booleans())
def test_they_fit_and_get_what_they_can_use(total: int, claims: list[Claim], fraction: float, teams: bool) -> None:
    reserved = dict.fromkeys(["", "a", "b", "c"], total // 10) if teams else None
    shares = memory_shares(total, claims, fraction, reserved)
    assert len(shares) == len(claims)
    assert sum(shares) <= total
    for share, claim in zip(shares, claims, strict=True):
        assert 0 <= share <= claim.most_bytes
    if not teams and sum(min(claim.least_bytes, claim.most_bytes) for claim in claims) < total:
        for share, claim in zip(shares, claims, strict=True):
            assert share >= min(claim.least_bytes, claim.most_bytes), "its shuffle suffers, and there is room"


@given(st.integers(MB, 1 << 41), st.integers(1, 20), fractions)
def test_equal_jobs_get_equal_shares_and_the_next_one_finds_room(total: int, count: int, fraction: float) -> None:
    claim = Claim("", 0, 1 << 50)
    before = memory_shares(total, [claim] * count, fraction)
    assert max(before) - min(before) <= 1
    after = memory_shares(total, [claim] * (count + 1), fraction)
    assert after[0] <= before[0] + 1
    if fraction <= 0.5:
        assert after[-1] <= total - sum(before) + count + 1, "it would have to wait until others have given back"


def test_one_two_three() -> None:
    claim = Claim("", 0, 1 << 50)
    assert [share // MB for share in memory_shares(1200 * MB, [claim], 0.5)] == [600]
    assert {round(share / MB) for share in memory_shares(1200 * MB, [claim] * 2, 0.5)} == {400}
    assert {round(share / MB) for share in memory_shares(1200 * MB, [claim] * 3, 0.5)} == {300}


def test_what_small_jobs_leave_goes_to_the_others() -> None:
    small, large = Claim("", 0, 10 * MB), Claim("", 0, 1 << 50)
    shares = memory_shares(1000 * MB, [small] * 9 + [large], 0.5)
    assert shares[:9] == [10 * MB] * 9
    assert shares[9] > 800 * MB, "ten jobs leave an eleventh of the memory free"


def test_a_floor_is_kept_while_others_come() -> None:
    """What one needs to shuffle well is not taken from it; the others have what is left."""
    needs, others = Claim("", 500 * MB, 1 << 50), [Claim("", 0, 1 << 50)] * 20
    shares = memory_shares(1000 * MB, [needs, *others], 0.5)
    assert shares[0] == 500 * MB
    assert sum(shares) <= 1000 * MB
    assert min(shares[1:]) > 20 * MB


def test_a_team_with_many_jobs_has_as_much_as_one_with_one() -> None:
    claims = [Claim("a", 0, 1 << 50)] * 9 + [Claim("b", 0, 1 << 50)]
    shares = memory_shares(1000 * MB, claims, 0.5, {"a": 0, "b": 0})
    assert shares[9] == pytest.approx(sum(shares[:9]), rel=0.01)


def test_what_is_reserved_for_a_team_without_jobs_stays_free() -> None:
    shares = memory_shares(1000 * MB, [Claim("a", 0, 1 << 50)], 1.0, {"a": 250 * MB, "b": 250 * MB})
    assert shares == [pytest.approx(750 * MB, rel=0.01)]
