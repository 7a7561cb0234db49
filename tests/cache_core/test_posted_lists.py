"""What pods know of the lists of ranks: whole ones only, merged place by place and rank by rank, in the memory there
is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill.errors import InvalidInput
from refill_service.cache_core.planned import posted_lists
from refill_service.cache_core.planned.posted_lists import AboutList, PostedLists, list_memory, merged

N = 1000


def posted(lists: PostedLists, epoch: int, rank: int, samples: list[int], num_ranks: int = 2, start: int = 0) -> bool:
    about = AboutList(num_ranks, len(samples), start, f"{epoch} {rank} {samples}")
    return lists.post(epoch, rank, about, start, np.array(samples[start:], dtype=np.int64))


def order_of(lists: PostedLists, epoch: int) -> tuple[list[int], list[int]]:
    positions, samples = merged(lists.of_epoch(epoch))
    return positions.tolist(), samples.tolist()


@given(
    st.lists(st.lists(st.integers(0, N - 1), max_size=20), min_size=1, max_size=4),
    st.randoms(use_true_random=False),
    st.integers(1, 7),
)
def test_lists_of_all_ranks_are_merged_place_by_place(samples: list[list[int]], draws: object, piece: int) -> None:
    """In whatever pieces they come, ranks among each other."""
    lists, left = PostedLists(N, 10**6), {}
    for rank, of_rank in enumerate(samples):
        about = AboutList(len(samples), len(of_rank), 0, "")
        left[rank] = [(about, first, of_rank[first : first + piece]) for first in range(0, max(1, len(of_rank)), piece)]
    while left:
        rank = draws.choice(list(left))  # type: ignore[attr-defined]
        about, first, part = left[rank].pop(0)
        is_whole = lists.post(0, rank, about, first, np.array(part, dtype=np.int64))
        assert is_whole is (not left[rank])
        assert lists.is_whole(0) is (is_whole and len(left) == 1)
        if is_whole:
            del left[rank]
    expected = sorted(
        (place * len(samples) + rank, sample)
        for rank, of_rank in enumerate(samples)
        for place, sample in enumerate(of_rank)
    )
    assert list(zip(*order_of(lists, 0), strict=True)) == expected
    assert lists.num_positions(0) == len(expected)


def test_what_was_had_is_not_asked_for() -> None:
    lists = PostedLists(N, 10**6)
    assert posted(lists, 3, 1, [5, 6, 7, 8], start=2)
    assert order_of(lists, 3) == ([5, 7], [7, 8])
    assert lists.num_positions(3) == 4


def test_more_is_known_by_another_version() -> None:
    lists = PostedLists(N, 10**6)
    assert lists.version(0) == 0
    assert posted(lists, 0, 0, [1, 2])
    assert not posted(lists, 0, 0, [1, 2]), "nothing new"
    assert (lists.version(0), lists.begun_anew(0), lists.is_whole(0)) == (1, 0, False)
    assert posted(lists, 0, 1, [])
    assert not posted(lists, 0, 1, [])
    assert (lists.version(0), lists.begun_anew(0), lists.is_whole(0)) == (2, 0, True)
    assert posted(lists, 0, 0, [2, 1]), "another list of that rank takes its place"
    assert (lists.version(0), lists.begun_anew(0)) == (3, 3)
    assert order_of(lists, 0) == ([0, 2], [2, 1])
    assert posted(lists, 0, 0, [9], num_ranks=1), "so does a run of another number of ranks"
    assert (order_of(lists, 0), lists.begun_anew(0), lists.is_whole(0)) == (([0], [9]), 4, True)
    assert lists.of_rank(0) == {0: "0 0 [9]"}


def test_a_piece_that_was_lost_leaves_the_list_unknown() -> None:
    lists, about = PostedLists(N, 10**6), AboutList(1, 4, 0, "")
    assert not lists.post(0, 0, about, 2, np.array([7, 8]))
    assert not lists.post(0, 0, about, 0, np.array([5, 6]))
    assert not lists.of_epoch(0)
    assert lists.post(0, 0, about, 2, np.array([7, 8]))
    assert order_of(lists, 0)[1] == [5, 6, 7, 8]


def test_a_piece_of_no_such_list_is_refused() -> None:
    with pytest.raises(InvalidInput, match="places 3 to 4 of a list of 4 from place 0 on"):
        PostedLists(N, 10**6).post(0, 0, AboutList(1, 4, 0, ""), 3, np.array([1, 2]))


def test_memory_is_for_the_lists_that_come() -> None:
    """What was posted first gives way; a list for which there is none is known of, and not kept."""
    lists = PostedLists(N, 4 * 100)
    for epoch in range(3):
        assert posted(lists, epoch, 0, [epoch] * 40, num_ranks=1)
    assert lists.epochs == [1, 2]
    assert posted(lists, 7, 0, [1] * 101, num_ranks=1)
    assert (lists.epochs, lists.of_epoch(7)) == ([7], [])
    assert lists.is_whole(7)
    assert posted(lists, 8, 0, [1] * 100, num_ranks=1)
    for epoch in range(9, 20):
        posted(lists, epoch, 0, [1], num_ranks=1)
    assert lists.epochs == [17, 18, 19]


def test_lists_of_any_number_of_ranks_are_no_use_of_memory() -> None:
    lists = PostedLists(N, 10**6)
    known = sum(posted(lists, 0, rank, [], num_ranks=2**20) for rank in range(posted_lists.MOST_RANKS + 10))
    assert known == posted_lists.MOST_RANKS
    assert posted(lists, 1, 0, [1])


def test_memory_of_lists_is_a_part_of_the_jobs() -> None:
    assert list_memory(10**9, N) == 3 * 2 * 4 * N
    assert list_memory(4000, N) == 1000
