"""The smallest form of ``make bench-two-jobs``: real pods, and what they read of the store."""

from __future__ import annotations

import pytest
from benchmarks.two_jobs import Row, Sizes, measure


@pytest.mark.variant
def test_jobs_with_one_read_seed_read_the_store_about_once() -> None:
    # Small batches: what the first job keeps for the second one does not run out before that one's first reads end.
    sizes = Sizes(num_samples=3000, sample_bytes=2000, memory_bytes=2_000_000, num_epochs=1, batch=16)
    alone, together = measure(sizes, [Row(2, 0.0, None), Row(2, 0.05, 0)])
    assert alone.each_once
    assert together.each_once
    assert 1.95 <= alone.times <= 2.1
    assert together.times <= 1.1
