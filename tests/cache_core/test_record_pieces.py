"""Records of some pieces of an index are those of the whole index there, and no block is read that holds none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.draws import draws

from refill.errors import InvalidInput
from refill_service.cache_core.dataset_index import SampleRecords
from refill_service.cache_core.planned.shares import Shares
from refill_service.cache_core.record_pieces import RecordPieces, block_runs
from refill_service.cache_core.sample_mapping import ChunkLayout, Int64Array

COUNT = 500
WHOLE = SampleRecords(
    0, np.arange(COUNT) * 10, np.arange(COUNT) % 7 + 1, np.arange(COUNT, dtype=np.uint64) * np.uint64(3)
)

bounds = st.lists(st.integers(0, COUNT), max_size=12).map(
    lambda drawn: np.array(sorted(drawn)[: len(drawn) // 2 * 2], dtype=np.int64).reshape(-1, 2)
)
"""Pieces; some are empty, some touch."""


def pieces_of(drawn: Int64Array, step: int = 33) -> RecordPieces:
    """As it comes in blocks."""
    found = RecordPieces(drawn[:, 0], drawn[:, 1])
    for first in range(0, COUNT, step):
        found.put(WHOLE.part(first, min(COUNT, first + step)))
    return found


def samples_of(drawn: Int64Array) -> Int64Array:
    return np.array([sample for first, end in drawn.tolist() for sample in range(first, end)], dtype=np.int64)


@given(bounds)
def test_records_are_those_of_the_whole_index(drawn: Int64Array) -> None:
    records, samples = pieces_of(drawn), samples_of(drawn)
    assert records.ids(0, len(records)).tolist() == samples.tolist()
    assert records.places(samples).tolist() == list(range(len(samples)))
    for name in ("offset", "length", "checksum"):
        assert getattr(records, name).tolist() == getattr(WHOLE, name)[samples].tolist(), name
    for first, end in drawn.tolist():
        assert records.covers(first, end)
        part = records.part(first, end)
        assert (part.first_sample, part.offset.tolist()) == (first, WHOLE.part(first, end).offset.tolist())
    there = set(samples.tolist())
    for sample in range(COUNT):
        assert records.covers(sample, sample + 1) == (sample in there), sample
        if sample not in there:
            with pytest.raises(InvalidInput):
                records.part(sample, sample + 1)


@given(bounds, st.data())
def test_some_of_them_by_their_places(drawn: Int64Array, data: st.DataObject) -> None:
    records, samples = pieces_of(drawn), samples_of(drawn)
    start = data.draw(st.integers(0, len(samples)))
    stop = data.draw(st.integers(start, len(samples)))
    found = records.between(start, stop)
    assert found.ids(0, len(found)).tolist() == samples[start:stop].tolist()
    assert found.checksum.tolist() == WHOLE.checksum[samples[start:stop]].tolist()


def test_pieces_that_overlap_are_refused() -> None:
    with pytest.raises(InvalidInput, match="overlap"):
        RecordPieces(np.array([0, 4]), np.array([5, 9]))


@given(bounds, st.integers(1, 60), st.integers(1, 4), st.integers(0, 3))
def test_requests_read_what_is_wanted_and_little_else(drawn: Int64Array, block: int, most: int, gap: int) -> None:
    pieces = RecordPieces(drawn[:, 0], drawn[:, 1])
    runs = list(block_runs(pieces.first, pieces.end, block, most, gap))
    read = [number for start, stop in runs for number in range(start, stop)]
    assert read == sorted(set(read)), "no block twice"
    wanted = set((samples_of(drawn) // block).tolist())
    assert wanted <= set(read)
    assert all(0 < stop - start <= most for start, stop in runs)
    unwanted = "".join("." if number in wanted else "x" for number in range(max(read, default=0) + 1) if number in read)
    assert "x" * (gap + 1) not in unwanted


@given(st.lists(st.integers(0, 60), min_size=1, max_size=6), st.integers(1, 8), st.integers(1, 9))
@draws(50)
def test_pieces_of_shares_hold_their_samples(per_blob: list[int], chunk_size: int, num_shares: int) -> None:
    first_sample = np.concatenate([[0], np.cumsum(per_blob)]).astype(np.int64)
    if chunk_size > max(per_blob):
        return
    shares = Shares(ChunkLayout(first_sample, chunk_size), num_shares)
    all_samples = []
    for number in range(num_shares):
        pieces = RecordPieces(*shares.pieces([number]))
        assert pieces.ids(0, len(pieces)).tolist() == shares.share(number).samples.tolist()
        all_samples += shares.share(number).samples.tolist()
    assert sorted(all_samples) == list(range(int(first_sample[-1])))
    together = RecordPieces(*shares.pieces(list(range(num_shares))))
    assert (together.first.tolist(), len(together)) == ([0] if all_samples else [], len(all_samples))
