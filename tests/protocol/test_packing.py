"""Which documents are packed into which sequence?"""

from __future__ import annotations

import hashlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill.errors import InvalidInput
from refill.protocol.packing import METHODS, packed_epoch

Lengths = st.lists(st.integers(0, 90), max_size=120).map(lambda given: np.array(given, dtype=np.int64))


@given(Lengths, st.integers(1, 40), st.sampled_from(METHODS), st.integers(1, 50), st.integers(0, 2**60))
def test_each_token_is_in_one_sequence_and_none_has_more_than_it_holds(
    lengths: np.ndarray, length: int, method: str, window: int, key: int
) -> None:
    packed = packed_epoch(lengths, length, method, window, key)
    had: Counter[tuple[int, int]] = Counter()
    for sequence in range(packed.num_sequences):
        pieces = [
            (int(packed.positions[each]), int(packed.offsets[each]), int(packed.lengths[each]))
            for each in packed.pieces(sequence)
        ]
        assert 0 < sum(size for _, _, size in pieces) <= length
        for position, offset, size in pieces:
            had.update((position, token) for token in range(offset, offset + size))
    expected = Counter((position, token) for position, of in enumerate(lengths.tolist()) for token in range(of))
    assert had == expected


@given(Lengths, st.integers(1, 40), st.integers(1, 50))
def test_documents_that_fit_are_never_cut_by_best_fit_and_contiguous_sequences_are_full(
    lengths: np.ndarray, length: int, window: int
) -> None:
    best = packed_epoch(lengths, length, "best_fit", window, 1)
    whole = Counter(best.positions.tolist())
    assert all(whole[place] == -(-of // length) for place, of in enumerate(lengths.tolist()))
    row = packed_epoch(lengths, length, "contiguous", window, 1)
    sizes = np.add.reduceat(row.lengths, row.firsts[:-1]) if row.num_sequences else np.empty(0)
    assert (sizes[:-1] == length).all()


@given(Lengths, st.integers(1, 40), st.sampled_from(METHODS), st.data())
def test_what_was_had_before_a_sequence_is_what_no_later_one_needs(
    lengths: np.ndarray, length: int, method: str, data: st.DataObject
) -> None:
    packed = packed_epoch(lengths, length, method, 20, 1)
    sequence = data.draw(st.integers(0, packed.num_sequences))
    first, had = packed.had_before(sequence)
    ahead = set(packed.positions[int(packed.firsts[sequence]) :].tolist())
    before = set(packed.positions.tolist()) - ahead
    assert before == {place for place in set(packed.positions.tolist()) if place < first} | set(had.tolist())


def first_fit_decreasing(lengths: np.ndarray, length: int) -> int:
    """Sequences that the packer of textbooks needs (Johnson, "Near-optimal bin packing algorithms", 1973)."""
    room: list[int] = []
    for size in sorted(lengths.tolist(), reverse=True):
        for place, left in enumerate(room):
            if left >= size:
                room[place] -= size
                break
        else:
            room.append(length - size)
    return len(room)


@pytest.mark.parametrize("seed", range(3))
def test_sequences_are_as_full_as_first_fit_decreasing_has_them_in_the_same_windows(seed: int) -> None:
    lengths = np.minimum(np.random.default_rng(seed).lognormal(6, 1, 4096).astype(np.int64) + 1, 2048)
    packed = packed_epoch(lengths, 2048, "best_fit", 1024, 0)
    known = sum(first_fit_decreasing(lengths[first : first + 1024], 2048) for first in range(0, 4096, 1024))
    assert packed.num_sequences <= 1.002 * known
    assert lengths.sum() / (packed.num_sequences * 2048) > 0.97


def test_packing_is_the_same_on_every_machine() -> None:
    """Whoever changes it raises the version of PackedSequences: states are of one."""
    lengths = (np.arange(3000, dtype=np.int64) * 7919) % 613
    found = [packed_epoch(lengths, 512, method, 256, 5) for method in METHODS]
    digests = [
        hashlib.blake2b(np.concatenate(each).astype("<i8").tobytes(), digest_size=8).hexdigest() for each in found
    ]
    assert digests == ["5a528e3ecf731df4", "17ba9a8fb6d3388b"]


def test_what_can_not_be_packed_is_refused() -> None:
    with pytest.raises(InvalidInput, match="method must be best_fit or contiguous"):
        packed_epoch(np.array([1]), 5, "random", 8, 0)
    with pytest.raises(InvalidInput, match="negative number of tokens"):
        packed_epoch(np.array([-1]), 5, "best_fit", 8, 0)
