"""Neighbouring chunks of one blob that are wanted at once are read together; nothing else is, and nothing is lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from refill_service.cache_core.policies.interface import NO_SAMPLES, Read
from refill_service.jobs.chunk_reader import coalesced

BLOB = 10
"""Chunks of a blob."""


def together(chunks: list[int], size: int = 1, limit: int = 4) -> list[list[int]]:
    groups = coalesced(
        [Read(chunk, chunk + 1, NO_SAMPLES) for chunk in chunks],
        lambda read, following: following.first == read.end and following.first % BLOB != 0,
        lambda first, end: size * (end - first),
        limit,
    )
    return [[read.first for read in group] for group in groups]


def test_neighbours_are_read_together() -> None:
    assert together([5, 3, 4, 8]) == [[3, 4, 5], [8]]


def test_what_was_ordered_first_comes_first() -> None:
    assert together([8, 1, 7, 3]) == [[7, 8], [1], [3]]


def test_the_end_of_a_blob_ends_a_group() -> None:
    assert together([9, 10, 11]) == [[9], [10, 11]]


def test_a_group_keeps_to_its_limit() -> None:
    assert together([0, 1, 2, 3, 4, 5]) == [[0, 1, 2, 3], [4, 5]]
    assert together([0, 1], size=9) == [[0], [1]], "what is larger than the limit is read alone"


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 5), st.integers(1, 12))
def test_every_refill_is_in_one_group(chunks: list[int], size: int, limit: int) -> None:
    groups = together(chunks, size, limit)
    assert sorted(chunk for group in groups for chunk in group) == sorted(chunks)
    for group in groups:
        assert group == list(range(group[0], group[-1] + 1))
        assert len(group) == 1 or len(group) * size <= limit
        assert group[0] // BLOB == group[-1] // BLOB
