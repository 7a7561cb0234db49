"""Which is the n-th of the samples in memory? Found without a look at all of them, which may be millions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from refill_service.cache_core.sample_mapping import Int64Array

__all__ = ["BlockCounts", "nth_of"]

_BITS = 10
"""Of a sample's number within its block."""


class BlockCounts:
    """How many of the samples of each block there are."""

    def __init__(self, num_samples: int) -> None:
        self.in_block = np.zeros((num_samples >> _BITS) + 1, dtype=np.int64)

    def add(self, samples: Int64Array) -> None:
        """Fact: these came, ``(n,)``, all different."""
        self._count(samples, 1)

    def remove(self, samples: Int64Array) -> None:
        """Fact: these have left, ``(n,)``, all different."""
        self._count(samples, -1)

    def _count(self, samples: Int64Array, sign: int) -> None:
        if len(samples) == 1:
            self.in_block[int(samples[0]) >> _BITS] += sign
        elif len(samples):
            blocks = samples >> _BITS
            first = int(blocks.min())
            counts = np.bincount(blocks - first)
            self.in_block[first : first + len(counts)] += sign * counts


def nth_of(in_block: Int64Array, are_there: Callable[[int, int], NDArray[np.bool_]], place: int) -> int:
    """The sample with so many before it.

    :param in_block: as of :class:`BlockCounts`.
    :param are_there: which of the samples ``first <= sample < end`` these counts are of.
    """
    ends = np.cumsum(in_block)
    block = int(np.searchsorted(ends, place, side="right"))
    first = block << _BITS
    there = np.flatnonzero(are_there(first, first + (1 << _BITS)))
    return first + int(there[place - int(ends[block]) + len(there)])
