"""What a team may take, beside others that take as much as they can."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill.errors import NotAllowed
from refill_service.cache_core.team_quotas import TeamQuotas

TEAMS = ("speech", "text", "vision", "video")


def quotas(teams: tuple[str, ...] = TEAMS, reserved: float = 0.5) -> TeamQuotas:
    return TeamQuotas(lambda: teams, reserved, most_jobs=3)


@pytest.mark.parametrize("teams", [(), ("",), ("vision",)])
def test_one_team_has_everything(teams: tuple[str, ...]) -> None:
    alone = quotas(teams)
    assert alone.left_for("vision", 100, {}) == 100
    assert alone.left_for("vision", 100, {"vision": 99}) == 1
    alone.check_jobs("vision", 10_000)


def test_what_others_are_sure_of_is_kept_for_them() -> None:
    assert quotas().left_for("vision", 800, {}) == 500, "a hundred for each of the others"
    assert quotas().left_for("vision", 800, {"vision": 450}) == 50
    assert quotas().left_for("vision", 800, {"speech": 300}) == 300
    assert quotas().left_for("speech", 800, {"vision": 500}) == 100
    assert quotas(reserved=0).left_for("vision", 800, {}) == 800


def test_jobs_of_a_token_that_was_taken_away_count() -> None:
    assert quotas().left_for("vision", 800, {"gone": 400}) == 100


@given(st.lists(st.tuples(st.sampled_from(TEAMS), st.integers(0, 1000)), max_size=40), st.sampled_from(TEAMS))
def test_whatever_others_take_a_team_gets_its_part(taken: list[tuple[str, int]], late: str) -> None:
    shared, used = quotas(), Counter[str]()
    for team, wanted in taken:
        if team != late:
            used[team] += min(wanted, shared.left_for(team, 800, used))
    assert used.total() <= 800
    assert shared.left_for(late, 800, used) >= 100


def test_jobs_have_a_number() -> None:
    quotas().check_jobs("vision", 2)
    with pytest.raises(NotAllowed, match="team_max_jobs"):
        quotas().check_jobs("vision", 3)
