"""What an epoch hands on to the next one is moved as a whole, and is what was said, sample by sample."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill_service.memory.payload import Payloads, RecentlySent


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
    assert left == [(6, 10), (2, 2), (0, 0)]


class Noted(bytes):
    """Counts those that are no more."""

    num_gone = 0

    def __del__(self) -> None:
        Noted.num_gone += 1


def forgotten_payloads(count: int) -> Callable[[], None]:
    payloads = Payloads()
    payloads.put_all(list(range(count)), [Noted(b"x") for _ in range(count)])
    return payloads.clear


def forgotten_answers(count: int, *, are_known: bool) -> Callable[[], None]:
    recent = RecentlySent(count)
    for first in range(0, count, 100):
        recent.put(0, list(range(first, first + 100)), [Noted(b"x") for _ in range(100)])
    if are_known:
        assert recent.get(0, 0) == b"x"
    return recent.clear


@pytest.mark.parametrize(
    "made",
    [forgotten_payloads, partial(forgotten_answers, are_known=False), partial(forgotten_answers, are_known=True)],
    ids=["payloads", "answers", "answers that were looked through"],
)
def test_memory_is_given_back_a_little_in_each_turn_of_the_loop(made: Callable[[int], Callable[[], None]]) -> None:
    """A million samples at once would stop a pod for 35 ms."""
    count = 10_000

    async def run() -> int:
        clear, Noted.num_gone = made(count), 0
        gone = [0]
        clear()
        while Noted.num_gone < count:
            gone.append(Noted.num_gone)
            await asyncio.sleep(0)
        return int(np.diff([*gone, count]).max())

    assert asyncio.run(run()) <= 1024 + 100


def test_an_epoch_that_is_left_while_much_of_it_is_moved_on_holds_nobody_up() -> None:
    """And all that is moved on is there at once for who asks for it."""

    async def run() -> None:
        first, second, third = Payloads(), Payloads(), Payloads()
        first.put_all(list(range(10_000)), [b"x"] * 10_000)
        second.take_over(first, np.arange(10_000))
        third.take_over(second, np.arange(10_000))
        moved = [0]
        for left in (first, second):
            left.clear()
            moved.append(third.num_bytes)
            assert (len(left), left.num_bytes, left.get(9_999)) == (0, 0, None)
        assert third.get(9_999) == b"x"
        while third.num_bytes < 10_000:
            moved.append(third.num_bytes)
            await asyncio.sleep(0)
        assert np.diff([*moved, third.num_bytes]).max() <= 2 * 1024

    asyncio.run(run())
