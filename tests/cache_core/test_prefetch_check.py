"""What does a rank ask of one owner next? Found a block of its trace at a time, however little of it is the owner's."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.draws import draws

from refill_service.cache_core.epoch_order import KeyedTraces
from refill_service.cache_core.prefetch_check import UpcomingRequests
from refill_service.cache_core.sample_mapping import AbstractMapping, ChunkLayout, Int64Array

NUM_SAMPLES, NUM_PODS, MOST_IN_A_PIECE = 90_000, 9, 1 << 14
MAPPING = AbstractMapping(ChunkLayout(np.array([0, NUM_SAMPLES]), 10).share(4, NUM_PODS), 100)


class Counted(KeyedTraces):
    looked_up = 0

    def asked(self, rank: int, positions: Int64Array) -> tuple[Int64Array, NDArray[np.bool_]]:
        self.looked_up += len(positions)
        return super().asked(rank, positions)


def test_a_window_is_found_in_pieces() -> None:
    traces = Counted(NUM_SAMPLES, seed=3)
    upcoming, before = UpcomingRequests(traces, 0, MAPPING), 0
    for _ in upcoming.reading(-1, 8000):
        assert traces.looked_up - before <= MOST_IN_A_PIECE
        before = traces.looked_up
    assert len(upcoming.after(-1, 8000)[0]) == 8000
    assert traces.looked_up == before, "it was not found before it was asked for"


def test_who_begins_late_does_not_have_what_came_before_looked_up() -> None:
    traces = Counted(NUM_SAMPLES, seed=3)
    UpcomingRequests(traces, 0, MAPPING).after(NUM_SAMPLES - 100, 1000)
    assert traces.looked_up < 100


@draws(30)
@given(st.lists(st.tuples(st.integers(-1, NUM_SAMPLES // 2), st.integers(1, 9000), st.booleans(), st.integers(0, 9))))
def test_what_comes_next_is_that_of_the_whole_trace(calls: list[tuple[int, int, bool, int]]) -> None:
    traces = KeyedTraces(NUM_SAMPLES, 2, seed=3)
    share, positions = MAPPING.share, np.arange(NUM_SAMPLES // 2)
    samples, _ = traces.asked(1, positions)
    here = share.holds(samples)
    positions, local = positions[here], samples[here] - share.first_sample
    upcoming = UpcomingRequests(traces, 1, MAPPING)
    for position, count, in_pieces, num_pieces in calls:
        if in_pieces:
            for number, _ in enumerate(upcoming.reading(position, count)):
                if number == num_pieces:
                    break
        found = upcoming.after(position, count)
        expected = slice(start := int(np.searchsorted(positions, position, side="right")), start + count)
        assert found[0].tolist() == positions[expected].tolist()
        assert found[1].tolist() == local[expected].tolist()
        assert found[2].tolist() == MAPPING.locations(local[expected]).tolist()
