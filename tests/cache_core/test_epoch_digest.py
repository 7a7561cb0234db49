"""What loops had beside what the plan says, over the same positions, whoever says it, however often."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill.protocol.dealing import Dealing
from refill.protocol.receipt_digest import DigestPart, sample_hashes, shown_digest, sum_of_hashes
from refill_service.cache_core.planned.epoch_digest import epoch_digest, planned_digest

PLAN = "a plan"


def part_of(order: Any, dealing: Dealing, rank: int, *spans: tuple[int, int]) -> DigestPart:
    """As the loop of a rank counts it that was given these of its positions."""
    places = np.concatenate([np.arange(*span) for span in spans])
    positions = dealing.positions(rank, places)
    positions = positions[positions < len(order)]
    digest = sum_of_hashes(sample_hashes(PLAN, 2, positions, order[positions]))
    name = dealing.num_ranks, dealing.batch, dealing.start, dealing.drop_last
    return DigestPart(*name, rank, spans, digest)


@given(
    st.integers(1, 300),
    st.integers(1, 7),
    st.integers(1, 20),
    st.booleans(),
    st.lists(st.integers(1, 7), max_size=2),
    st.randoms(),
)
def test_any_ranks_make_up_the_whole(
    num_positions: int, num_ranks: int, batch: int, drop_last: bool, resumed: list[int], random: Any
) -> None:
    """Each number of ranks goes on from a checkpoint of the one before, which had gone on a little after it; what pods
    were told on the way is told several times, in any order."""
    order = np.random.default_rng(1).permutation(num_positions)
    parts, start = [], 0
    for place, ranks in enumerate([num_ranks, *resumed]):
        dealing = Dealing(num_positions, ranks, batch, start, drop_last)
        is_last = place == len(resumed)
        had = dealing.per_rank if is_last else random.randint(0, dealing.per_rank // batch) * batch
        if had:
            parts += [part_of(order, dealing, rank, (0, had)) for rank in range(ranks)]
            parts += [part_of(order, dealing, rank, (0, random.randint(1, had))) for rank in range(ranks)]
        start += 0 if is_last else had * ranks
        if start >= num_positions:
            break
    random.shuffle(parts)
    found = epoch_digest(parts, num_positions, PLAN, 2, order)
    assert found["digest_as_planned"] is True
    if not drop_last:
        assert found["digested"] == num_positions
        assert found["digest"] == shown_digest(planned_digest(PLAN, 2, order))
        whole = planned_digest(PLAN, 2, order)
        assert epoch_digest(parts, num_positions, PLAN, 2, None, whole) == found, "kept for a job that has ended"


def test_what_ranks_had_beyond_a_checkpoint_does_not_hide_what_they_had_before_it() -> None:
    """A pod has heard of the ranks before alone, which went on after their states; another one has what is in these."""
    order = np.random.default_rng(1).permutation(400)
    parts = []
    for start, ranks, had, beyond in ((0, 2, 50, 90), (100, 5, 20, 33), (200, 4, 50, 50)):
        dealing = Dealing(400, ranks, 10, start)
        parts += [part_of(order, dealing, rank, (0, end)) for rank in range(ranks) for end in {had, beyond}]
    found = epoch_digest(parts, 400, PLAN, 2, order)
    assert (found["digested"], found["digest_as_planned"]) == (400, True)


def test_another_sample_shows() -> None:
    order, dealing = np.arange(100), Dealing(100, 2, 10)
    parts = [part_of(order, dealing, 0, (0, 50)), part_of(order[::-1], dealing, 1, (0, 50))]
    found = epoch_digest(parts, 100, PLAN, 2, order)
    assert (found["digested"], found["digest_as_planned"]) == (100, False)
    assert found["digest"] != found["digest_planned"]


def test_members_of_a_group_that_differ_show() -> None:
    order, dealing = np.arange(100), Dealing(100, 1, 10)
    right, wrong = part_of(order, dealing, 0, (0, 50)), part_of(order[::-1], dealing, 0, (0, 50))
    assert epoch_digest([right, right], 100, PLAN, 2, order)["digest_as_planned"] is True
    for parts in ([right, wrong], [wrong, right]):
        found = epoch_digest(parts, 100, PLAN, 2, order)
        assert (found["digested"], found["digest_as_planned"]) == (50, False)


def test_what_can_not_be_is_left_out() -> None:
    """Parts that somebody sends of positions that there are not."""
    order = np.arange(100)
    for part in (DigestPart(1, 1, 101, False, 0, ((0, 1),), 5), DigestPart(1, 1, 0, False, 0, ((0, 1 << 40),), 5)):
        assert epoch_digest([part], 100, PLAN, 2, order)["digested"] == 0


def test_nobody_knows_the_plan_any_more() -> None:
    order, dealing = np.arange(100), Dealing(100, 1, 10)
    found = epoch_digest([part_of(order, dealing, 0, (0, 50))], 100, PLAN, 2, None, planned_digest(PLAN, 2, order))
    assert (found["digested"], found["digest_planned"], found["digest_as_planned"]) == (50, None, None)


def test_whoever_says_very_much_is_not_listened_to_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part overlaps with what came before it, and would be looked at in all of its length."""
    looked_at = 0
    dealing_of = DigestPart.dealing

    def counted(part: DigestPart, num_positions: int) -> Dealing:
        nonlocal looked_at
        looked_at += part.num_places
        return dealing_of(part, num_positions)

    monkeypatch.setattr(DigestPart, "dealing", counted)
    order = np.random.default_rng(1).permutation(500)
    parts = [DigestPart(1, batch, 0, False, 0, ((0, 500),), batch) for batch in range(1, 2000)]
    found = epoch_digest(parts, 500, PLAN, 2, order)
    assert found["digest_as_planned"] is False
    assert 500 <= looked_at <= 64 * 500
