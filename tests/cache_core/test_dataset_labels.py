"""Labels come back as they were written, or are refused; and they tell whether a dataset is stored by class."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.draws import draws

from refill.errors import IndexDamaged
from refill_service.cache_core import dataset_labels
from refill_service.cache_core.dataset_labels import BLOCK_LABELS, LabelCounts, label_of, summary_in
from refill_service.cache_core.policies.registry import kind_of


def written(labels: np.ndarray, item_bytes: int, fingerprint: int = 7) -> bytes:
    data = dataset_labels.encode_header(item_bytes, len(labels), fingerprint)
    for block, start in enumerate(range(0, len(labels), BLOCK_LABELS)):
        part = labels[start : start + BLOCK_LABELS]
        data += dataset_labels.encode_block(part, block=block, item_bytes=item_bytes, fingerprint=fingerprint)
    return data


def read(data: bytes, num_samples: int, first: int, end: int, item_bytes: int, fingerprint: int = 7) -> np.ndarray:
    start, stop = dataset_labels.blocks_range(first, end, item_bytes, num_samples)
    assert stop <= len(data)
    return dataset_labels.decode_labels(
        data[: dataset_labels.HEADER_BYTES],
        memoryview(data)[start:stop],
        first,
        end,
        item_bytes=item_bytes,
        num_samples=num_samples,
        fingerprint=fingerprint,
        source="labels",
    )


@draws(30)
@given(st.integers(1, 3 * BLOCK_LABELS), st.sampled_from([1, 2, 4]), st.data())
def test_any_range_comes_back(num_samples: int, item_bytes: int, data: st.DataObject) -> None:
    most = min(1 << 8 * item_bytes, dataset_labels.MOST_LABELS)
    labels = np.random.default_rng(1).integers(0, most, num_samples).astype(np.int32)
    first = data.draw(st.integers(0, num_samples - 1))
    end = data.draw(st.integers(first + 1, num_samples))
    found = read(written(labels, item_bytes), num_samples, first, end, item_bytes)
    np.testing.assert_array_equal(found, labels[first:end])


def test_bytes_of_today() -> None:
    """What other versions of refill read."""
    expected = bytes.fromhex(
        "52454649 4c4c4c42 01000000 02000000 03000000 00000000 07000000 00000000 0100 2c01 0000 e221d6cdbe1a35a0"
    )
    assert written(np.array([1, 300, 0], np.int32), 2).hex() == expected.hex(), "raise the version if that is meant"


def test_damage_and_labels_of_another_index_are_refused() -> None:
    data = written(np.arange(200, dtype=np.int32), 1)
    for place in range(len(data)):
        wrong = bytearray(data)
        wrong[place] ^= 1
        with pytest.raises(IndexDamaged):
            read(bytes(wrong), 200, 0, 200, 1)
    with pytest.raises(IndexDamaged, match="no labels of this index"):
        read(data, 200, 0, 200, 1, fingerprint=8)


@pytest.mark.parametrize(
    ("content", "label"),
    [(b"3", 3), (b" 12\n", 12), (b"0", 0), (b"-1", -1), (b"cat", -1), (b"", -1), (b"9" * 30, -1), (b"1048576", -1)],
)
def test_what_a_label_is(content: bytes, label: int) -> None:
    assert label_of(content) == label


def summary_of(labels: np.ndarray, pieces: int = 3) -> dataset_labels.LabelSummary:
    counts = LabelCounts()
    for piece in np.array_split(labels.astype(np.int32), pieces):
        counts.add(piece)
    return counts.summary()


def test_an_order_by_class_is_recognised() -> None:
    labels = np.repeat(np.arange(10), 200)
    stored = summary_of(labels)
    assert (stored.classes, stored.least, stored.most, stored.item_bytes) == (10, 200, 200, 1)
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
    for name, value in (("item_bytes", 3), ("same_neighbours", 2), ("classes", "many"), ("least", None)):
        assert summary_in({"labels": right | {name: value}}) is None, name
    assert summary_in({"labels": [1]}) is None


def test_datasets_stored_by_class_are_read_in_smaller_chunks() -> None:
    for policy, mixed, by_class in (("planned", 64, 8), ("redox", 64, 64), ("exact", 64, 64)):
        choose = kind_of(policy).default_chunk_size
        assert (choose(10**6, 3_000, 10**5, False), choose(10**6, 3_000, 10**5, True)) == (mixed, by_class), policy
    assert kind_of("planned").default_chunk_size(10**6, 5_000_000, 100, True) == 2, "still no larger than a request"
