"""Protobuf, as far as formats have it: fields of a message, and numbers in seven bits a byte. No library, no schema.

All raise :class:`ValueError` or :class:`IndexError` for what is none.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

_VARINT, _FIXED_64, _LENGTH, _FIXED_32 = 0, 1, 2, 5


def fields(data: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """``(number, value)`` of each field: bytes, also of numbers of a fixed size; or an integer."""
    place, end = 0, len(data)
    while place < end:
        tag, place = varint(data, place)
        wire = tag & 7
        if wire == _VARINT:
            number, place = varint(data, place)
            yield tag >> 3, number
            continue
        size = 4 if wire == _FIXED_32 else 8
        if wire == _LENGTH:
            size, place = varint(data, place)
        elif wire not in (_FIXED_32, _FIXED_64):
            raise ValueError(f"a field of wire type {wire}")
        if place + size > end:
            raise ValueError(f"a field ends at byte {place + size} of {end}")
        yield tag >> 3, data[place : place + size]
        place += size


def message(value: memoryview | int) -> memoryview:
    """A field that has to be bytes."""
    if type(value) is not memoryview:
        raise ValueError("a number where bytes should be")
    return value


def varint(data: memoryview, place: int) -> tuple[int, int]:
    """``(number, place behind it)``."""
    found = data[place]
    if found < 128:
        return found, place + 1
    found &= 127
    for shift in range(7, 70, 7):
        place += 1
        byte = data[place]
        found |= (byte & 127) << shift
        if byte < 128:
            return found & 0xFFFFFFFFFFFFFFFF, place + 1
    raise ValueError("a number of more than ten bytes")


def varints(data: memoryview) -> NDArray[np.uint64]:
    """All of them, one after another."""
    digits = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(digits < 128)
    if not len(digits):
        return np.zeros(0, np.uint64)
    if not len(ends) or int(ends[-1]) != len(digits) - 1:
        raise ValueError("it ends within a number")
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    longest = int(lengths.max())
    if longest > 10:
        raise ValueError("a number of more than ten bytes")
    found = np.zeros(len(ends), np.uint64)
    for place in range(longest):
        there = lengths > place
        found[there] |= (digits[starts[there] + place] & 127).astype(np.uint64) << np.uint64(7 * place)
    return found
