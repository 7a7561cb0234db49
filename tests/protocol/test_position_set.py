"""Spans of positions hold what a plain set would, whatever comes in which order."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from refill.protocol.position_set import PositionSet, spans_of

MOST = 40
spans = st.tuples(st.integers(0, MOST), st.integers(0, MOST))
added = st.lists(st.one_of(spans, st.lists(st.integers(0, MOST), max_size=8)), max_size=12)


def both(steps: list[tuple[int, int] | list[int]]) -> tuple[PositionSet, set[int]]:
    found, plain = PositionSet(), set()
    for step in steps:
        if isinstance(step, tuple):
            found.add(*step)
            plain |= set(range(*step))
        else:
            found.add_all(np.array(step, dtype=np.int64))
            plain |= set(step)
    return found, plain


@given(added)
def test_it_holds_what_was_added_in_as_few_spans_as_can_be(steps: list[tuple[int, int] | list[int]]) -> None:
    found, plain = both(steps)
    listed = [position for first, end in found for position in range(first, end)]
    assert listed == sorted(plain)
    assert found.count == len(plain)
    assert found.end == max(plain, default=-1) + 1
    between = [position for position in range(min(plain, default=0), found.end) if position not in plain]
    gap = found.first_gap()
    assert (gap is None) == (not between)
    assert gap is None or (gap[0] == between[0] and set(range(*gap)) <= set(between) and gap[1] in plain)
    assert len(found) == sum(position - 1 not in plain for position in plain), "spans touch each other"
    assert list(PositionSet(found)) == list(found), "spans that are sent are the same where they arrive"


@given(added, spans)
def test_it_says_what_is_missing(steps: list[tuple[int, int] | list[int]], within: tuple[int, int]) -> None:
    found, plain = both(steps)
    start, end = within
    missing = [position for position in range(start, end) if position not in plain]
    first = found.first_missing(start, end)
    assert (first is None) == (not missing)
    if first is not None:
        assert first[0] == missing[0]
        assert set(range(*first)) <= set(missing), "of what it says, some is there"
        assert first[1] == end or first[1] in plain, "more is missing than it says"
    assert found.has_any(start, end) == any(position in plain for position in range(start, end))


@given(st.lists(st.integers(0, 300), max_size=60) | st.lists(st.integers(0, 300), min_size=65, max_size=200))
def test_positions_are_as_few_spans_as_can_be(positions: list[int]) -> None:
    """A few are taken one by one, many by numpy."""
    found = spans_of(np.array(positions, dtype=np.int64))
    assert [position for first, end in found for position in range(first, end)] == sorted(set(positions))
    assert all(end < first for (_, end), (first, _) in itertools.pairwise(found)), "spans touch each other"


many_spans = st.lists(st.tuples(st.integers(0, 900), st.integers(0, 12)), min_size=65, max_size=150)


@given(many_spans, st.lists(many_spans, max_size=3), st.booleans())
def test_many_spans_at_once_are_those_one_by_one(
    first: list[tuple[int, int]], more: list[list[tuple[int, int]]], as_array: bool
) -> None:
    found, one_by_one = PositionSet(), PositionSet()
    for piece in (first, *more):
        spans = [(begin, begin + length) for begin, length in piece]
        found.add_spans(np.array(spans, dtype=np.int64) if as_array else spans)
        for span in spans:
            one_by_one.add(*span)
        assert list(found) == list(one_by_one)
        assert found.count == one_by_one.count == sum(end - begin for begin, end in found)
