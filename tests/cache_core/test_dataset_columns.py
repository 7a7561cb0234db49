"""Columns beside an index, from values to bytes and back, and what is none."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill.errors import IndexDamaged
from refill.protocol.column_values import (
    BLOCK_VALUES,
    MOST_TEXT_BYTES,
    decode_values,
    encode_values,
    is_column_name,
    joined_values,
)
from refill_service.cache_core import dataset_columns

WHOLE = st.lists(st.integers(-(2**63), 2**63 - 1)).map(lambda each: np.array(each, np.int64))
NUMBERS = st.lists(st.floats(allow_nan=True)).map(lambda each: np.array(each, np.float64))
TEXTS = st.lists(st.text(st.characters(exclude_categories=("Cs",)), max_size=MOST_TEXT_BYTES // 4))


@given(WHOLE | NUMBERS | TEXTS)
def test_values_come_back_as_they_were(values: Any) -> None:
    found = decode_values(memoryview(encode_values(values)), len(values))
    if isinstance(values, list):
        assert found == values
    else:
        assert isinstance(found, np.ndarray)
        assert found.dtype == values.dtype
        np.testing.assert_array_equal(found, values)


@given(st.binary(max_size=60) | st.binary(max_size=60).map(b"tx".__add__), st.integers(0, 5))
def test_bytes_of_strangers_are_values_or_a_value_error(data: bytes, count: int) -> None:
    with contextlib.suppress(ValueError):
        assert len(decode_values(memoryview(data), count)) == count


@pytest.mark.parametrize("num_samples", [1, BLOCK_VALUES, 2 * BLOCK_VALUES + 7])
def test_each_block_is_found_by_the_table_and_damage_in_any_byte_is_seen(num_samples: int) -> None:
    values = [f"key {number}" for number in range(num_samples)]
    parts = [values[first : first + BLOCK_VALUES] for first in range(0, num_samples, BLOCK_VALUES)]
    blocks = [dataset_columns.encode_block(encode_values(part), number, 7) for number, part in enumerate(parts)]
    head = dataset_columns.encode_head([len(block) for block in blocks], num_samples, 7)
    whole = head + b"".join(blocks)
    assert len(head) == dataset_columns.head_bytes(num_samples)
    table = dataset_columns.decode_table(head, num_samples, 7, "x")
    assert int(table[-1]) == len(whole)
    found = []
    for number, part in enumerate(parts):
        data = memoryview(whole)[table[number] : table[number + 1]]
        found.append(decode_values(dataset_columns.block_body(data, number, 7, "x"), len(part)))
        for wrong in (number + 1, number - 1):
            with pytest.raises(IndexDamaged, match="is damaged in its block"):
                dataset_columns.block_body(data, wrong, 7, "x")
    assert joined_values(found) == values
    for place in (0, 9, 17, 30, 39, len(head) - 1):
        damaged = bytearray(head)
        damaged[place] ^= 1
        with pytest.raises(IndexDamaged):
            dataset_columns.decode_table(bytes(damaged), num_samples, 7, "x")
    with pytest.raises(IndexDamaged, match="no column of this index"):
        dataset_columns.decode_table(head, num_samples, 8, "x")


def test_names_are_parts_of_names_of_objects() -> None:
    assert all(map(is_column_name, ["__key__", "json.score", "a-b", "9", "x" * 64]))
    assert not any(map(is_column_name, ["", ".x", "-x", "a/b", "..", "a b", "x" * 65, "a\n", "é"]))


def test_blocks_of_several_kinds_are_no_column() -> None:
    with pytest.raises(ValueError, match="several kinds"):
        joined_values([np.zeros(3, np.int64), ["a"]])
    with pytest.raises(ValueError, match="several kinds"):
        joined_values([np.zeros(3, np.int64), np.zeros(3)])
