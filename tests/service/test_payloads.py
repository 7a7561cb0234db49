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


def test_where_nearly_all_are_taken_over_they_are_not_moved_one_by_one() -> None:
    """A hundred thousand of them would stop a pod for a tenth of a second, where an epoch ends."""
    moved = []

    class Counted(Payloads):
        def put(self, sample: int, payload: bytes | memoryview) -> None:
            moved.append(sample)
            super().put(sample, payload)

    before, after = Payloads(), Counted()
    before.put_all(list(range(10_000)), [b"x"] * 10_000)
    after.take_over(before, np.arange(5, 10_000))
    assert (len(before), len(after), moved) == (5, 9_995, [])


def test_some_are_dropped_at_a_time_until_none_is_left() -> None:
    payloads = Payloads()
    payloads.put_all(list(range(10)), [b"", *([b"xy"] * 9)])
    left = []
    while payloads:
        payloads.drop_some(4)
        left.append((len(payloads), payloads.num_bytes))
    assert left == [(6, 12), (2, 4), (0, 0)]
