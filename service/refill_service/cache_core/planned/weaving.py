"""At which position of the global order is each sample of each share?

The shares go round: in every round each one delivers its next run, about ``run`` samples, in an order of the shares
that is the round's own. A share's runs are as large as what it has, so that all come to their ends together. So a batch
needs a few shares, however many there are, and both ways between a position and the place in a share are arithmetic.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from refill.protocol.keyed_hash import numbers_at
from refill_service.cache_core.sample_mapping import Int64Array

__all__ = ["Weaving"]

_CELLS = 1 << 20
"""Of the table of runs that is made at once."""


class Weaving:
    """
    :param sizes: ``(shares,)`` samples of each share.
    :param run: about how many samples of a share follow each other: at least so many where all shares are equal.
    :param key: orders the shares in each round.
    """

    def __init__(self, sizes: Int64Array, run: int, key: int) -> None:
        self._sizes = np.asarray(sizes, dtype=np.int64)
        self._key = key
        self.num_positions = int(self._sizes.sum())
        there = max(1, int(np.count_nonzero(self._sizes)))
        self.num_rounds = max(1, self.num_positions // there // run)

    @cached_property
    def _starts(self) -> Int64Array:
        """``(rounds + 1,)`` the first position of each round."""
        rounds = np.arange(self.num_rounds + 1, dtype=np.int64)
        starts = np.zeros(self.num_rounds + 1, dtype=np.int64)
        for size in self._sizes.tolist():
            starts += rounds * size // self.num_rounds
        return starts

    def places(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """``(shares, places)`` of positions ``0 <= position < num_positions``, each ``(n,)``."""
        if not len(positions):
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        guess = positions * self.num_rounds // self.num_positions
        # A share is never ahead of its part of a round, and less than a sample behind: the guess is right, or one low.
        rounds = guess + (positions >= self._starts[guess + 1])
        wanted, row = _distinct(rounds)
        shares, places = np.empty((2, len(positions)), dtype=np.int64)
        block = max(1, _CELLS // len(self._sizes))
        for first in range(0, len(wanted), block):
            of_rounds = wanted[first : first + block]
            here = np.flatnonzero((row >= first) & (row < first + block)) if len(wanted) > block else slice(None)
            order, ends = self._runs(of_rounds)
            # Rounds ascend, and so do the ends of their runs.
            run = np.searchsorted(ends.reshape(-1), positions[here], side="right")
            shares[here] = found = order.reshape(-1)[run]
            to_end = ends.reshape(-1)[run] - positions[here]
            places[here] = (rounds[here] + 1) * self._sizes[found] // self.num_rounds - to_end
        return shares, places

    def positions(self, share: int, places: Int64Array) -> Int64Array:
        """The positions of places ``0 <= place < size`` of a share, ``(n,)``."""
        size = int(self._sizes[share])
        rounds = ((places + 1) * self.num_rounds - 1) // max(1, size)
        wanted, row = _distinct(rounds)
        found = np.empty(len(places), dtype=np.int64)
        block = max(1, _CELLS // len(self._sizes))
        for first in range(0, len(wanted), block):
            of_rounds = wanted[first : first + block]
            here = np.flatnonzero((row >= first) & (row < first + block)) if len(wanted) > block else slice(None)
            order, ends = self._runs(of_rounds)
            end_of_run = ends[order == share]
            to_end = (rounds[here] + 1) * size // self.num_rounds - places[here]
            found[here] = end_of_run[row[here] - first] - to_end
        return found

    def _runs(self, rounds: Int64Array) -> tuple[Int64Array, Int64Array]:
        """``(rounds, shares)`` each: the shares in the order of each round, and the position at which each run ends."""
        num_shares = len(self._sizes)
        names = rounds[:, None] * num_shares + np.arange(num_shares, dtype=np.int64)
        order = np.argsort(numbers_at(self._key, names.astype(np.uint64)), axis=1, kind="stable")
        ends = (rounds[:, None] + 1) * self._sizes // self.num_rounds
        ends -= rounds[:, None] * self._sizes // self.num_rounds
        return order, self._starts[rounds][:, None] + np.cumsum(np.take_along_axis(ends, order, axis=1), axis=1)


def _distinct(rounds: Int64Array) -> tuple[Int64Array, NDArray[np.intp]]:
    """The rounds, ascending, and which of them each is."""
    return np.unique(rounds, return_inverse=True)
