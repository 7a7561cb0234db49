"""Jobs share memory by what they use now: all fit, none gets more than it can use, and one alone gets all that."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill_service.cache_core.memory_shares import Claim, memory_shares

MB = 1 << 20
claims_of = st.lists(
    st.builds(Claim, st.sampled_from(["", "a", "b"]), st.integers(0, 1 << 32), st.integers(0, 1 << 40)), max_size=12
)


held_by = st.dictionaries(st.sampled_from(["", "a", "b", "c"]), st.integers(0, 1 << 40))


@given(st.integers(0, 1 << 41), claims_of, st.booleans(), held_by)
def test_they_fit_and_get_what_they_can_use(total: int, claims: list[Claim], teams: bool, held: dict[str, int]) -> None:
    reserved = dict.fromkeys(["", "a", "b", "c"], total // 10) if teams else None
    shares = memory_shares(total, claims, reserved, held)
    assert len(shares) == len(claims)
    assert sum(shares) <= total
    for share, claim in zip(shares, claims, strict=True):
        assert 0 <= share <= claim.most_bytes
    if not teams and sum(min(claim.least_bytes, claim.most_bytes) for claim in claims) < total:
        for share, claim in zip(shares, claims, strict=True):
            assert share >= min(claim.least_bytes, claim.most_bytes), "its shuffle suffers, and there is room"


@given(st.integers(MB, 1 << 41), st.integers(1, 20))
def test_equal_jobs_get_equal_shares_of_all(total: int, count: int) -> None:
    shares = memory_shares(total, [Claim("", 0, 1 << 50)] * count)
    assert max(shares) - min(shares) <= 1
    assert total - sum(shares) <= 2 * count, "memory that nobody uses, and jobs could"


def test_one_two_three() -> None:
    claim = Claim("", 0, 1 << 50)
    assert [round(share / MB) for share in memory_shares(1200 * MB, [claim])] == [1200]
    assert {round(share / MB) for share in memory_shares(1200 * MB, [claim] * 2)} == {600}
    assert {round(share / MB) for share in memory_shares(1200 * MB, [claim] * 3)} == {400}


def test_what_small_jobs_leave_goes_to_the_others() -> None:
    small, large = Claim("", 0, 10 * MB), Claim("", 0, 1 << 50)
    shares = memory_shares(1000 * MB, [small] * 9 + [large])
    assert shares[:9] == [10 * MB] * 9
    assert shares[9] == pytest.approx(910 * MB, rel=1e-6)


def test_a_floor_is_kept_while_others_come() -> None:
    """What one needs to shuffle well is not taken from it; the others have what is left."""
    needs, others = Claim("", 500 * MB, 1 << 50), [Claim("", 0, 1 << 50)] * 20
    shares = memory_shares(1000 * MB, [needs, *others])
    assert shares[0] == 500 * MB
    assert sum(shares) <= 1000 * MB
    assert min(shares[1:]) > 20 * MB


def test_a_team_with_many_jobs_has_as_much_as_one_with_one() -> None:
    claims = [Claim("a", 0, 1 << 50)] * 9 + [Claim("b", 0, 1 << 50)]
    shares = memory_shares(1000 * MB, claims, {"a": 0, "b": 0})
    assert shares[9] == pytest.approx(sum(shares[:9]), rel=0.01)


def test_what_is_reserved_for_a_team_without_jobs_stays_free() -> None:
    shares = memory_shares(1000 * MB, [Claim("a", 0, 1 << 50)], {"a": 250 * MB, "b": 250 * MB})
    assert shares == [pytest.approx(750 * MB, rel=0.01)]


def test_what_a_team_holds_already_is_not_kept_for_it_again() -> None:
    """It has taken all but what is kept for the other, which then has that."""
    claim, reserved = Claim("b", 0, 1 << 50), {"a": 250 * MB, "b": 250 * MB}
    for held, gets in ((0, 0), (100, 100), (250, 250), (750, 250)):
        (share,) = memory_shares(250 * MB, [claim], reserved, {"a": held * MB})
        assert share == pytest.approx(gets * MB, abs=MB), held


def test_what_a_team_holds_already_counts_as_its_part() -> None:
    """Its other jobs get no more than what is left of its part by that, but what they need to shuffle well."""
    claims, reserved = [Claim("a", 5 * MB, 1 << 50), Claim("b", 0, 1 << 50)], {"a": 250 * MB, "b": 250 * MB}
    of_a, of_b = memory_shares(600 * MB, claims, reserved, {"a": 700 * MB})
    assert of_a == 5 * MB
    assert of_b == pytest.approx(595 * MB, abs=MB)
    of_a, of_b = memory_shares(600 * MB, claims, reserved, {"a": 100 * MB})
    assert of_a + 100 * MB == pytest.approx(of_b, abs=MB)
