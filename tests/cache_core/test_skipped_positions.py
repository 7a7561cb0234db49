"""When has a rank left positions out for good?"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill_service.cache_core.remote_memory import StartedPositions
from refill_service.cache_core.skipped_positions import asked_for, skipped_for_good


def asked(*ranges: tuple[int, int]) -> StartedPositions:
    found = StartedPositions()
    for start, end in ranges:
        found.started(np.arange(start, end))
    return found


def test_every_second_batch_of_a_long_epoch_is_found() -> None:
    batches = [(start, start + 8) for start in range(0, 3000, 16)]
    assert skipped_for_good(asked(*batches), 8) == (8, 16)


def test_a_whole_epoch_and_its_beginning_leave_nothing_out() -> None:
    assert skipped_for_good(asked((0, 1000)), 8) is None
    assert skipped_for_good(asked(), 8) is None


def test_batches_that_were_in_flight_when_a_loop_was_broken_off_are_no_hole() -> None:
    assert skipped_for_good(asked((0, 800), (808, 816), (840, 848)), 8) is None


def test_what_lies_before_the_first_position_is_another_homes_perhaps() -> None:
    assert skipped_for_good(asked((500, 5000)), 8) is None


def test_what_a_rank_has_told_of_before_a_restart_is_no_hole() -> None:
    told = np.concatenate([np.arange(0, 64), np.arange(72, 80)])
    assert skipped_for_good(asked_for(asked((64, 72), (80, 5000)), told), 8) is None
    assert skipped_for_good(asked_for(None, told), 8) is None


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(1, 20)), max_size=30), st.lists(st.integers(0, 250)))
def test_gaps_are_what_was_not_asked_for_between_what_was(runs: list[tuple[int, int]], told: list[int]) -> None:
    found = asked_for(asked(*((start, start + size) for start, size in runs)), np.array(told, dtype=np.int64))
    known = {position for start, size in runs for position in range(start, start + size)} | set(told)
    expected = {position for position in range(min(known, default=0), max(known, default=0)) if position not in known}
    assert {position for start, end in found.gaps() for position in range(start, end)} == expected
    assert found.count == len(known)
    assert found.first == min(known, default=0)


@pytest.mark.parametrize("largest", [1, 8])
def test_the_hole_has_to_lie_64_batches_below_the_last_position(largest: int) -> None:
    assert skipped_for_good(asked((0, 10), (11, 11 + 64 * largest)), largest) == (10, 11)
    assert skipped_for_good(asked((0, 10), (11, 10 + 64 * largest)), largest) is None
