"""Random-looking numbers that follow from a key: the same on every machine, in every version of Python and numpy.

A *stream* is splitmix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014), whose i-th
number is a hash of ``key + i``, so that any part of it can be had alone. Keys are BLAKE2b of what they are for, so that
two purposes, epochs or seeds never share a stream.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

UInt64Array = NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLY = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFT = (np.uint64(30), np.uint64(27), np.uint64(31))


def key_of(*parts: str | int) -> int:
    """``0 <= key < 2**64``. Texts and integers are told apart, and so is where one ends and the next begins."""
    text = "\0".join(f"{type(part).__name__}:{len(str(part))}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def numbers(key: int, count: int, first: int = 0) -> UInt64Array:
    """Numbers ``first <= i < first + count`` of the stream, ``(count,)``, each of 64 bits."""
    return numbers_at(key, np.arange(first, first + count, dtype=np.uint64))


def numbers_at(key: int, places: UInt64Array) -> UInt64Array:
    """Numbers of the stream at these places, ``(n,)``."""
    state = places + np.uint64(1)
    state *= _GOLDEN
    state += np.uint64(key)
    state ^= state >> _SHIFT[0]
    state *= _MULTIPLY[0]
    state ^= state >> _SHIFT[1]
    state *= _MULTIPLY[1]
    state ^= state >> _SHIFT[2]
    return state
