"""What has just left: kept up to a limit in bytes, the oldest goes first."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill_service.memory.payload import RecentlySent


def test_keeps_what_left_last_up_to_the_limit() -> None:
    recent = RecentlySent(10)
    recent.put(0, [1, 2, 3], [b"aaaa", b"bbbb", b"cccc"])
    assert recent.get(0, 1) is None, "12 bytes were kept under a limit of 10"
    assert (recent.get(0, 2), recent.get(0, 3)) == (b"bbbb", b"cccc")
    assert recent.used_bytes == 8


def test_epochs_are_told_apart() -> None:
    recent = RecentlySent(100)
    recent.put(0, [1], [b"old"])
    recent.put(1, [1], [b"new"])
    assert (recent.get(0, 1), recent.get(1, 1), recent.get(2, 1)) == (b"old", b"new", None)


def test_put_twice_is_counted_once() -> None:
    recent = RecentlySent(100)
    for _ in range(3):
        recent.put(0, [1], [b"sample"])
    assert recent.get(0, 1) == b"sample"
    assert recent.used_bytes == 6


def test_a_list_that_was_given_may_be_emptied() -> None:
    recent, payloads = RecentlySent(100), [b"sample"]
    recent.put(0, [1], payloads)
    payloads.clear()
    assert recent.get(0, 1) == b"sample"


def test_larger_than_the_limit_is_not_kept() -> None:
    recent = RecentlySent(5)
    recent.put(0, [1], [b"longer than that"])
    assert recent.get(0, 1) is None
    assert recent.used_bytes == 0


def test_clear() -> None:
    recent = RecentlySent(100)
    recent.put(0, [1, 2], [b"a", b"b"])
    recent.clear()
    assert recent.used_bytes == 0
    assert recent.get(0, 1) is None


@given(
    st.integers(0, 50),
    st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 5), max_size=4, unique=True), st.booleans())),
    st.lists(st.integers(0, 30), min_size=18, max_size=18),
)
def test_limit_holds_and_the_count_is_right(
    limit: int, puts: list[tuple[int, list[int], bool]], sizes: list[int]
) -> None:
    """:param puts: epoch, samples, and whether all is looked up then."""
    recent = RecentlySent(limit)
    keys = [(epoch, sample) for epoch in range(3) for sample in range(6)]
    size_of = dict(zip(keys, sizes, strict=True))
    for epoch, samples, looks in puts:
        recent.put(epoch, samples, [b"x" * size_of[epoch, sample] for sample in samples])
        assert 0 <= recent.used_bytes <= limit
        if looks:
            found = {key: recent.get(*key) for key in keys}
            assert all(payload is None or len(payload) == size_of[key] for key, payload in found.items())
            kept = sum(len(payload or b"") for payload in found.values())
            assert kept == recent.used_bytes, f"{kept} bytes kept, {recent.used_bytes} counted, limit {limit}"
    recent.limit(0)
    assert recent.used_bytes == 0


@pytest.mark.parametrize("is_known", [False, True])
def test_much_is_forgotten_in_pieces(is_known: bool) -> None:
    """Where memory shrinks: others have their turns meanwhile."""

    async def left() -> list[int]:
        recent, found = RecentlySent(1 << 20), list[int]()
        for first in range(0, 20_000, 100):
            recent.put(0, list(range(first, first + 100)), [b"x"] * 100)
        assert not is_known or recent.get(0, 0) == b"x"
        found.append(recent.used_bytes)
        recent.limit(50)
        found.append(recent.used_bytes)
        while recent.used_bytes > 50:
            await asyncio.sleep(0)
            found.append(recent.used_bytes)
        return found

    found = asyncio.run(left())
    assert max(-np.diff(found)) < 1 << 11


def test_where_very_many_samples_are_is_found_out_in_pieces() -> None:
    """When the first of them is asked for again."""
    recent, num_pieces = RecentlySent(1 << 20), 0
    recent.put(0, list(range(20_000)), [b"x"] * 20_000)
    while recent.has_new:
        recent.find_out_some()
        num_pieces += 1
    assert num_pieces > 15
    assert recent.get(0, 19_999) == b"x"
