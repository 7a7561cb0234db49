"""Do all ranks draw an epoch from the same scores, whenever they come, and what do receipts of such epochs say?"""

from __future__ import annotations

from typing import Any

import numpy as np

from refill_service.cache_core.epoch_order import ExplicitTraces
from refill_service.cache_core.receipt import draws_of, positions_of, receipt_of, sum_of_parts
from refill_service.cache_core.score_book import ScoreBook


def nobody(rank: int) -> bool:
    return False


def nothing_cached() -> np.ndarray:
    return np.zeros(4, dtype=bool)


def test_all_ranks_draw_from_what_is_known_when_the_last_one_comes() -> None:
    book = ScoreBook(4, 2)
    book.scored(np.array([0, 1]), np.array([2.5, 3.5]))
    book.draws(1, 0)
    assert book.waits_for(1, nobody) == [1]
    book.scored(np.array([1, 2]), np.array([3.0, 4.0]))
    book.draws(1, 1)
    assert book.waits_for(1, nobody) == []
    first = book.drawn_from(1, nothing_cached)
    book.scored(np.array([3]), np.array([9.0]))
    again = book.drawn_from(1, lambda: np.ones(4, dtype=bool))
    for found in (first, again):
        np.testing.assert_array_equal(found.scores, [2.5, 3.0, 4.0, np.nan])
        assert not found.cached.any()
    assert book.known()[0].tolist() == [0, 1, 2, 3]


def test_who_has_drawn_before_is_not_waited_for() -> None:
    book = ScoreBook(4, 3)
    book.draws(5, 1)
    assert book.waits_for(5, lambda rank: rank == 0) == [2]


def test_of_old_epochs_nothing_is_kept() -> None:
    book = ScoreBook(4, 1)
    for epoch in range(5):
        book.draws(epoch, 0)
        book.drawn_from(epoch, nothing_cached)
    assert book.waits_for(2, nobody) == [0]
    assert [book.waits_for(epoch, nobody) for epoch in (3, 4)] == [[], []]


def part_of(traces: ExplicitTraces, first: int, end: int, asked: list[int], repeats: int) -> dict[str, Any]:
    answered = np.array([sample for sample in asked if first <= sample < end], dtype=np.int64)
    receipt = receipt_of(answered, answered, first, end, traces)
    part = {"receipt": receipt.to_dict(), "unused_ahead": {}, "repeats": repeats}
    return part | {"draws": draws_of(traces, first, end)}


def test_a_receipt_counts_positions() -> None:
    traces = ExplicitTraces(8, {0: np.array([1, 1, 1, 5]), 1: np.array([1, 5, 2, 7])})
    parts = [part_of(traces, 0, 4, [1, 2], 3), part_of(traces, 4, 8, [5, 7], 1)]
    total = sum_of_parts(parts)
    assert positions_of(parts, total) == {
        "positions": {"posted": 8, "delivered": 8, "duplicates": 0, "missing": 0},
        "draws": {"distinct": 4, "never_drawn": 4, "drawn_once": 2, "drawn_twice": 1, "drawn_more": 1, "most_often": 4},
        "exact": True,
    }
    parts = [part_of(traces, 0, 4, [1], 2), part_of(traces, 4, 8, [5, 7], 1)]
    found = positions_of(parts, sum_of_parts(parts))
    assert found["positions"] == {"posted": 8, "delivered": 6, "duplicates": 0, "missing": 2}
    assert not found["exact"]


def test_other_jobs_count_samples_alone() -> None:
    traces = ExplicitTraces(8, {0: np.array([1, 5])})
    parts = [part_of(traces, 0, 8, [1, 5], 0)]
    del parts[0]["draws"]
    assert positions_of(parts, sum_of_parts(parts)) == {}
