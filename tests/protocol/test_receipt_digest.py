"""Digests of what loops have had: the same everywhere and for ever, in any order, and of any parts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill.errors import InvalidInput
from refill.protocol.keyed_hash import key_of
from refill.protocol.receipt_digest import DigestPart, merged_parts, sample_hashes, shown_digest, sum_of_hashes

PLAN = "0123456789abcdef"


def one_by_one(epoch: int, position: int, sample: int) -> int:
    """In integers of any size."""

    def mixed(key: int, place: int) -> int:
        state = (key + (place + 1) * 0x9E3779B97F4A7C15) % 2**64
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
        return state ^ state >> 31

    high, low = (key_of("refill receipt 1", half, PLAN, epoch) for half in ("high", "low"))
    return (mixed(high, mixed(high, position) ^ sample) << 64) + mixed(low, mixed(low, position) ^ sample)


def digest_of(epoch: int, positions: list[int], samples: list[int]) -> int:
    return sum_of_hashes(sample_hashes(PLAN, epoch, np.array(positions, np.int64), np.array(samples, np.int64)))


def test_digests_never_change() -> None:
    assert shown_digest(digest_of(0, [0], [0])) == "e67c6091e9d39dfcc5aa943d26239d80"
    assert shown_digest(digest_of(3, [5, 1 << 40, 7], [9, 8, 1 << 35])) == "12798d5939675a3f30a028367998e8a0"


@given(st.integers(0, 2**31 - 1), st.lists(st.tuples(st.integers(0, 2**40), st.integers(0, 2**40)), max_size=50))
def test_it_is_the_sum_of_the_hashes(epoch: int, came: list[tuple[int, int]]) -> None:
    found = digest_of(epoch, [position for position, _ in came], [sample for _, sample in came])
    assert found == sum(one_by_one(epoch, *each) for each in came) % 2**128


def test_order_and_parts_do_not_matter_and_everything_else_does() -> None:
    positions, samples = list(range(1000)), list(np.random.default_rng(1).permutation(1000))
    whole = digest_of(0, positions, samples)
    parts = [digest_of(0, positions[first::3], samples[first::3]) for first in (2, 0, 1)]
    assert sum(parts) % 2**128 == whole
    exchanged = [samples[1], samples[0], *samples[2:]]
    others = [
        digest_of(1, positions, samples),
        digest_of(0, positions, exchanged),
        digest_of(0, positions[:-1], samples[:-1]),
    ]
    assert len({whole, *others}) == 4


def test_parts_are_kept_once() -> None:
    def part(rank: int, *spans: tuple[int, int], start: int = 0) -> DigestPart:
        return DigestPart(2, 4, start, False, rank, spans, 1)

    parts = [
        part(0, (0, 8)),
        part(0, (0, 12)),
        part(1, (0, 4)),
        part(0, (12, 16)),
        part(0, (0, 8), start=8),
        part(0, (8, 14)),
    ]
    kept = [part(0, (0, 12)), part(0, (0, 8), start=8), part(0, (12, 16)), part(1, (0, 4))]
    assert set(merged_parts(parts)) == set(kept), "the larger of two that share positions"


@pytest.mark.parametrize(
    "said",
    [
        None,
        [],
        [2, 4, 0, False, 2, [], "00"],
        [2, 4, 0, False, 0, [[4, 4]], "00"],
        [2, 4, 0, False, 0, [[4, 8], [2, 3]], "00"],
        [2, 4, 0, False, 0, [[-1, 8]], "00"],
        [2, 0, 0, False, 0, [], "00"],
        [2, 4, -1, False, 0, [], "00"],
        [2, 4, 0, False, 0, [[0, 1 << 63]], "00"],
        [2, 4, 0, False, 0, [], "1" + 32 * "0"],
        [2, 4, 0, False, 0, [], 7],
        "a text",
    ],
)
def test_what_is_no_part_is_refused(said: object) -> None:
    with pytest.raises(InvalidInput, match="no part of a digest"):
        DigestPart.from_list(said)


def test_a_part_comes_back_as_it_was() -> None:
    part = DigestPart(3, 4, 10, True, 2, ((0, 8), (12, 13)), (1 << 127) + 5)
    assert DigestPart.from_list(part.to_list()) == part


SPANS = st.lists(st.integers(0, 40), max_size=12, unique=True).map(
    lambda ends: tuple(zip(*[iter(sorted(ends))] * 2, strict=False))
)


@given(st.lists(SPANS, max_size=6))
def test_what_parts_cover_is_left_out(all_spans: list[tuple[tuple[int, int], ...]]) -> None:
    """Of each two that have a position in common, unless they are of the same positions."""
    parts = [DigestPart(1, 1, 0, False, 0, spans, number) for number, spans in enumerate(all_spans)]
    kept = merged_parts(parts)
    places = {part: {place for span in part.spans for place in range(*span)} for part in parts}
    for part in parts:
        meets = [other for other in kept if other is not part and places[other] & places[part]]
        if part in kept:
            assert all(other.spans == part.spans for other in meets)
        else:
            assert any(part.num_places <= other.num_places and other.spans != part.spans for other in meets)
    assert merged_parts(parts, 2) == kept[:2]


def test_parts_of_very_many_spans_are_compared_all_the_same() -> None:
    """Each with each other took hours, in which a pod did nothing else."""
    spans = tuple((4 * place, 4 * place + 1) for place in range(100_000))
    parts = [DigestPart(1, 1, 0, False, 0, spans, 1)]
    parts.append(DigestPart(1, 1, 0, False, 0, tuple((first + 2, end + 2) for first, end in spans), 2))
    parts += [DigestPart(1, 1, 0, False, 0, ((4 * place + 1, 4 * place + 2),), 3) for place in range(1000)]
    assert len(merged_parts(parts, 8)) == 8
