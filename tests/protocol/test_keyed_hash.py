"""Numbers from a key: the same everywhere and for ever, any part alone, and no two purposes alike."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from refill.protocol.keyed_hash import key_of, numbers


def one_by_one(key: int, place: int) -> int:
    """splitmix64 as its authors wrote it, in integers of any size."""
    state = (key + (place + 1) * 0x9E3779B97F4A7C15) % 2**64
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    state = (state ^ state >> 27) * 0x94D049BB133111EB % 2**64
    return state ^ state >> 31


def test_the_numbers_never_change() -> None:
    """The first of splitmix64 seeded with 0 and 1234567, as other programs have them."""
    assert numbers(0, 3).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert numbers(1234567, 2).tolist() == [6457827717110365317, 3203168211198807973]
    assert key_of("shares", 8) == 17835581492600315924


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(0, 20))
def test_any_part_of_a_stream_can_be_had_alone(key: int, first: int, count: int) -> None:
    assert numbers(key, count, first).tolist() == [one_by_one(key, first + each) for each in range(count)]


def test_keys_of_other_purposes_differ() -> None:
    keys = [
        key_of("a", 1, 2),
        key_of("a", 12),
        key_of("a1", 2),
        key_of("a", "1", 2),
        key_of("a", 1, 2, 0),
        key_of("a", 2, 1),
        key_of("a", -1, 2),
        key_of("a\0int:1:1", 2),
    ]
    assert len(set(keys)) == len(keys)


def test_numbers_are_even() -> None:
    """Each bit is set in half of them, and bits of neighbours do not go together."""
    found = numbers(key_of("even"), 1 << 16)
    bits = (found[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
    assert abs(bits.mean(axis=0) - 0.5).max() < 0.01
    assert abs((bits[1:] ^ bits[:-1]).mean(axis=0) - 0.5).max() < 0.01
