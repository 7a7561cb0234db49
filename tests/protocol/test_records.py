"""Records: what is written is read again, whole, up to where a stream was cut or damaged."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from refill.protocol.records import Kind, Record, RecordReader, encode_records

NUMBERS = st.integers(-(2**63), 2**63 - 1)


@st.composite
def records(draw: st.DrawFn) -> Record:
    kind = draw(st.sampled_from(list(Kind)))
    count = draw(st.integers(0, 5))
    columns = 2 if kind in (Kind.ANSWERED, Kind.RECEIVED, Kind.DAMAGED) else 1
    arrays = [np.array(draw(st.lists(NUMBERS, min_size=count, max_size=count)), dtype=np.int64) for _ in range(columns)]
    return Record(kind, draw(st.integers(0, 2**32 - 1)), draw(st.integers(0, 2**32 - 1)), tuple(arrays))


def same(first: Record, second: Record) -> bool:
    facts = first[:3] == second[:3]
    return facts and all(np.array_equal(a, b) for a, b in zip(first.columns, second.columns, strict=True))


@given(st.lists(records(), max_size=6))
def test_round_trip(written: list[Record]) -> None:
    reader = RecordReader(encode_records(written))
    assert all(same(a, b) for a, b in zip(written, reader, strict=True))
    assert not reader.damaged
    assert reader.intact_bytes == len(reader.stream)


@given(st.lists(records(), min_size=1, max_size=4), st.data())
def test_a_cut_stream_gives_what_came_before(written: list[Record], data: st.DataObject) -> None:
    stream = encode_records(written)
    cut = data.draw(st.integers(0, len(stream) - 1))
    reader = RecordReader(stream[:cut])
    found = list(reader)
    assert not reader.damaged, "a stream that ends early is not damaged"
    assert all(same(a, b) for a, b in zip(written, found, strict=False))
    assert encode_records(found) == stream[: reader.intact_bytes]


@given(st.lists(records(), min_size=1, max_size=4), st.data())
def test_a_flipped_bit_is_never_believed(written: list[Record], data: st.DataObject) -> None:
    stream = bytearray(encode_records(written))
    place, bit = data.draw(st.integers(0, len(stream) - 1)), data.draw(st.integers(0, 7))
    stream[place] ^= 1 << bit
    reader = RecordReader(bytes(stream))
    found = list(reader)
    assert len(found) < len(written), "a damaged record was believed"
    assert reader.damaged, "damage was taken for the end of the stream"
    assert all(same(a, b) for a, b in zip(written, found, strict=False))


@given(st.binary(max_size=200))
def test_anything_at_all(stream: bytes) -> None:
    reader = RecordReader(stream)
    assert encode_records(reader) == stream[: reader.intact_bytes]
