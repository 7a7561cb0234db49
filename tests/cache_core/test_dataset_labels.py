"""What a label is, and how labels tell whether a dataset is stored by class."""

from __future__ import annotations

import json

import numpy as np
import pytest

from refill_service.cache_core.dataset_labels import LabelCounts, LabelSummary, label_of, summary_in
from refill_service.cache_core.policies.registry import kind_of


@pytest.mark.parametrize(
    ("content", "label"),
    [(b"3", 3), (b" 12\n", 12), (b"0", 0), (b"-1", -1), (b"cat", -1), (b"", -1), (b"9" * 30, -1), (b"1048576", -1)],
)
def test_what_a_label_is(content: bytes, label: int) -> None:
    assert label_of(content) == label


def summary_of(labels: np.ndarray, pieces: int = 3) -> LabelSummary:
    counts = LabelCounts()
    for piece in np.array_split(labels.astype(np.int32), pieces):
        counts.add(piece)
    return counts.summary()


def test_an_order_by_class_is_recognised() -> None:
    labels = np.repeat(np.arange(10), 200)
    stored = summary_of(labels)
    assert (stored.classes, stored.least, stored.most) == (10, 200, 200)
    assert stored.by_class
    assert stored.same_neighbours > 0.99
    shuffled = summary_of(np.random.default_rng(2).permutation(labels))
    assert not shuffled.by_class
    assert abs(shuffled.same_neighbours - shuffled.same_by_chance) < 0.05
    in_runs = summary_of(np.repeat(np.random.default_rng(3).integers(0, 10, 500), 4))
    assert in_runs.by_class, "runs of four"
    assert not summary_of(np.zeros(100)).by_class, "one class is in no order"
    skewed = np.random.default_rng(4).permutation(np.repeat([0, 1], [1900, 100]))
    assert not summary_of(skewed).by_class, "a rare class alone makes no order"


def test_what_an_index_says_is_not_believed_blindly() -> None:
    right = summary_of(np.arange(5)).to_dict()
    assert summary_in(json.loads(json.dumps({"labels": right}))) == summary_of(np.arange(5))
    assert summary_in({}) is None
    for name, value in (("same_neighbours", 2), ("classes", "many"), ("least", None)):
        assert summary_in({"labels": right | {name: value}}) is None, name
    assert summary_in({"labels": [1]}) is None


def test_datasets_stored_by_class_are_read_in_smaller_chunks() -> None:
    for policy, mixed, by_class in (("planned", 64, 8), ("redox", 64, 64), ("exact", 64, 64)):
        choose = kind_of(policy).default_chunk_size
        assert (choose(10**6, 3_000, 10**5, False), choose(10**6, 3_000, 10**5, True)) == (mixed, by_class), policy
    assert kind_of("planned").default_chunk_size(10**6, 5_000_000, 100, True) == 2, "still no larger than a request"
