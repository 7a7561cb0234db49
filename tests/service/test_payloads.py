"""What an epoch hands on to the next one is moved as a whole, and is what was said, sample by sample."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from refill_service.memory.payload import Payloads


@given(st.dictionaries(st.integers(0, 50), st.binary(max_size=5)), st.sets(st.integers(0, 50)))
def test_what_is_taken_over_is_there_and_the_rest_stays(there: dict[int, bytes], wanted: set[int]) -> None:
    before, after = Payloads(), Payloads()
    before.put_all(list(there), list(there.values()))
    after.take_over(before, np.array(sorted(wanted), dtype=np.int64))
    for sample in range(51):
        payload = there.get(sample)
        assert after.get(sample) == (payload if sample in wanted else None)
        assert before.get(sample) == (None if sample in wanted else payload)
    assert after.num_bytes == sum(len(each) for sample, each in there.items() if sample in wanted)
    assert before.num_bytes + after.num_bytes == sum(map(len, there.values()))


@given(
    st.dictionaries(st.integers(0, 50), st.binary(max_size=5)),
    st.sets(st.integers(0, 50)),
    st.lists(st.tuples(st.booleans(), st.sampled_from(["get", "pop", "put", "drop"]), st.integers(0, 50))),
)
def test_what_is_being_moved_is_as_if_it_was_moved_at_once(
    there: dict[int, bytes], wanted: set[int], asked: list[tuple[bool, str, int]]
) -> None:
    samples, found = np.array(sorted(wanted), dtype=np.int64), list[object]()
    for at_once in (True, False):
        before, after = Payloads(), Payloads()
        before.put_all(list(there), list(there.values()))
        moving = after.take_over(before, samples)
        while at_once and moving.some():
            pass
        for of_before, what, sample in asked:
            payloads = before if of_before else after
            if what == "put":
                payloads.put(sample, b"another")
            elif what == "drop":
                payloads.drop([sample])
            else:
                found.append(getattr(payloads, what)(sample))
        while moving.some():
            pass
        for payloads in (before, after):
            found.append([payloads.get(sample) for sample in range(51)])
            found.append(payloads.num_bytes)
    assert found[: len(found) // 2] == found[len(found) // 2 :]


def test_what_is_taken_over_is_moved_a_little_at_a_time() -> None:
    """A hundred thousand samples would stop a pod for a tenth of a second, where an epoch ends."""
    before, after = Payloads(), Payloads()
    before.put_all(list(range(10_000)), [b"x"] * 10_000)
    moving, moved = after.take_over(before, np.arange(5, 10_000)), [len(after)]
    while moving.some():
        moved.append(len(after))
    moved.append(len(after))
    assert (len(before), len(after), moved[0]) == (5, 9_995, 0)
    assert max(np.diff(moved)) <= 1024


def test_what_was_being_moved_is_there_when_the_others_are_forgotten() -> None:
    before, after = Payloads(), Payloads()
    before.put_all(list(range(5000)), [b"x"] * 5000)
    after.take_over(before, np.arange(10, 5000))
    before.clear()
    assert (len(before), before.num_bytes, len(after), after.num_bytes) == (0, 0, 4990, 4990)


def test_some_are_dropped_at_a_time_until_none_is_left() -> None:
    payloads = Payloads()
    payloads.put_all(list(range(10)), [b"", *([b"xy"] * 9)])
    left = []
    while payloads:
        payloads.drop_some(4)
        left.append((len(payloads), payloads.num_bytes))
    assert left == [(6, 12), (2, 4), (0, 0)]
