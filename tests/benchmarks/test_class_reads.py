"""What an order that is planned within classes reads."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.class_reads import ClassRun, equal_classes, simulate_classes

from refill.errors import InvalidInput


@pytest.mark.parametrize(("order", "gets"), [("buckets", 9), ("balanced", 8.1), ("random", 8.5), ("sorted", 35)])
def test_a_plans_samples_of_each_class_in_turn(order: str, gets: float) -> None:
    found = simulate_classes(equal_classes(4800, 4, 0), ClassRun(400, order, chunk_size=8, num_pods=2, batch_size=40))
    assert found.composed == found.batches == 120
    assert (found.duplicates, found.missing, found.misses) == (0, 0, 0)
    assert order == "sorted" or found.co_batch < 2
    assert 8 <= 64 * found.gets / 4800 <= gets
    assert found.read_amplification <= 1.1 or order == "sorted"


def test_classes_of_any_size() -> None:
    """Numbers are names; one class has a single sample. Nothing divides: a sample pads the ranks."""
    classes = np.array([10**6 * (sample % 3) - 7 if sample else 5 for sample in range(1001)])
    found = simulate_classes(classes, ClassRun(34, num_pods=3, chunk_size=8, batch_size=64))
    assert found.composed == found.batches
    assert (found.delivered, found.duplicates, found.missing) == (1002, 1, 0)


@pytest.mark.parametrize("name", ["memory_samples", "num_pods"])
def test_what_cannot_be_is_refused(name: str) -> None:
    given = {"memory_samples": 100} | {name: 0}
    with pytest.raises(InvalidInput, match=f"{name} must be at least 1, got 0"):
        ClassRun(**given)


def test_padding_is_what_fills_batches_up() -> None:
    """Batches of one class pad nothing where its samples have one width, and half where widths are 1 and 3 by turns."""
    classes, widths = np.arange(640) % 2, np.array([1, 3] * 320)
    of_one, mixed = (
        simulate_classes(classes, ClassRun(320, order, chunk_size=8, batch_size=32), widths)
        for order in ("buckets", "balanced")
    )
    assert of_one.padding == 0
    assert mixed.padding == pytest.approx(1 - (16 * 1 + 16 * 3) / (32 * 3))
