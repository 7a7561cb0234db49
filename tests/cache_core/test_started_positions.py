"""A rank's batches come out of order, from anywhere in its trace: what has it asked for?"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from refill_service.cache_core.home_machine import StartedPositions


@given(st.lists(st.lists(st.integers(0, 40), max_size=8), max_size=12))
def test_runs_are_the_set_of_what_was_asked(batches: list[list[int]]) -> None:
    started, known = StartedPositions(), set[int]()
    for batch in batches:
        started.started(np.array(batch, dtype=np.int64))
        known |= set(batch)
        assert [position in started for position in range(42)] == [position in known for position in range(42)]
        assert started.end == max(known, default=-1) + 1
        assert started.below == next(position for position in range(42) if position not in known)


def test_a_rank_that_begins_in_the_middle_is_not_kept_position_by_position() -> None:
    started = StartedPositions()
    for first in range(10_000, 100_000, 100):
        started.started(np.arange(first, first + 100))
    assert (started.below, started.end) == (0, 100_000)
    assert started.first_gap() is None
