"""Requests and frames: what is written is read, and damaged bytes are refused with one line."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.draws import draws

from refill.errors import InvalidInput
from refill.protocol.wire_format import (
    FRAME_HEADER_BYTES,
    MAX_BATCH,
    MAX_EPOCHS,
    BatchRequest,
    FrameHeader,
    Int64Array,
    decode_frame_arrays,
    encode_frame_head,
)

int64s = st.integers(-(2**63), 2**63 - 1)
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**63 - 1)  # larger ones are refused: they are counts and positions
position_lists = st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=30, unique=True)
requests = st.builds(
    BatchRequest,
    st.integers(0, MAX_EPOCHS - 1),
    u32,
    position_lists.map(lambda values: np.array(values, dtype=np.int64)),
    u64,
    u64,
    u64,
    st.none(),
)


def array(values: list[int]) -> Int64Array:
    return np.array(values, dtype=np.int64)


def decode_frame(frame: bytes) -> list[Int64Array]:
    header = FrameHeader.decode(frame)
    return decode_frame_arrays(header, memoryview(frame)[FRAME_HEADER_BYTES : FRAME_HEADER_BYTES + header.arrays_bytes])


@given(requests)
def test_a_request_is_read_as_written(request: BatchRequest) -> None:
    found = BatchRequest.decode(request.encode())
    for read, written in zip(found, request, strict=True):
        np.testing.assert_array_equal(read, written)


@given(requests, st.data())
def test_a_request_that_names_its_samples_is_read_as_written(request: BatchRequest, data: st.DataObject) -> None:
    count = len(request.positions)
    named = request._replace(sample_ids=array(data.draw(st.lists(int64s, min_size=count, max_size=count))))
    found = BatchRequest.decode(named.encode())
    assert found.sample_ids is not None
    np.testing.assert_array_equal(found.sample_ids, named.sample_ids)
    assert found._replace(sample_ids=None).encode() == request.encode()
    with pytest.raises(InvalidInput):
        BatchRequest.decode(named.encode()[:-8])


@given(requests, st.data())
def test_a_request_of_another_length_is_refused(request: BatchRequest, data: st.DataObject) -> None:
    body = request.encode()
    cut = data.draw(st.integers(0, len(body) - 1))
    with pytest.raises(InvalidInput):
        BatchRequest.decode(body[:cut])
    with pytest.raises(InvalidInput):
        BatchRequest.decode(body + data.draw(st.binary(min_size=1, max_size=20)))


@draws(200)
@given(requests, st.data())
def test_a_damaged_request_is_refused_or_one_that_could_be_made(request: BatchRequest, data: st.DataObject) -> None:
    body = bytearray(request.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = BatchRequest.decode(bytes(body))
    except InvalidInput:
        return
    assert 1 <= len(found.positions) <= MAX_BATCH
    assert (found.positions >= 0).all()
    assert found.epoch < MAX_EPOCHS


@pytest.mark.parametrize("epoch", [MAX_EPOCHS, 2**32 - 1])
def test_an_epoch_that_no_other_request_can_name_is_refused(epoch: int) -> None:
    """It would end all epochs before it."""
    with pytest.raises(InvalidInput, match=f"there is no epoch {epoch}"):
        BatchRequest.decode(BatchRequest(epoch, 0, array([1])).encode())


@pytest.mark.parametrize("positions", [[-1], [3, 3], []])
def test_positions_that_no_batch_can_have_are_refused(positions: list[int]) -> None:
    with pytest.raises(InvalidInput):
        BatchRequest.decode(BatchRequest(0, 0, array(positions)).encode())


@given(st.lists(st.tuples(int64s, int64s, st.integers(0, 2**40)), max_size=30))
def test_a_frame_is_read_as_written(rows: list[tuple[int, int, int]]) -> None:
    columns = [array([row[i] for row in rows]) for i in range(3)]
    head = encode_frame_head(*columns)
    header = FrameHeader.decode(head)
    assert len(head) == FRAME_HEADER_BYTES + header.arrays_bytes
    assert header.total_bytes == len(head) + sum(row[2] for row in rows)
    for found, written in zip(decode_frame(head), columns, strict=True):
        np.testing.assert_array_equal(found, written)


@draws(200)
@given(st.lists(st.integers(0, 2**40), max_size=8), st.data())
def test_a_damaged_frame_is_refused_or_adds_up(lengths: list[int], data: st.DataObject) -> None:
    head = bytearray(encode_frame_head(array(lengths), array(lengths), array(lengths)))
    for _ in range(data.draw(st.integers(1, 4))):
        head[data.draw(st.integers(0, len(head) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(head)), st.integers(0, len(head))))
    try:
        found = decode_frame(bytes(head[:cut]))
    except InvalidInput:
        return
    payload_bytes = FrameHeader.decode(head).payload_bytes
    assert sum(found[2].tolist()) == payload_bytes
    assert all(length >= 0 for length in found[2].tolist())


def test_lengths_whose_sum_wraps_around_are_refused() -> None:
    wrapping = array([2**62] * 4)
    head = encode_frame_head(wrapping, wrapping, wrapping)
    assert FrameHeader.decode(head).payload_bytes == 0
    with pytest.raises(InvalidInput, match="do not add up"):
        decode_frame(head)


def test_a_payload_without_samples_is_refused() -> None:
    head = bytearray(encode_frame_head(array([]), array([]), array([])))
    head[16] = 5
    with pytest.raises(InvalidInput, match="do not add up"):
        decode_frame(bytes(head))
