"""At which position of the global order is each sample of each share?

The shares go round: in every round each one delivers its next run, about ``run`` samples, in an order of the shares
that is the round's own. A share's runs are as large as what it has, so that all come to their ends together. So a batch
needs a few shares, however many there are, and both ways between a position and the place in a share are arithmetic.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from refill.protocol.keyed_hash import key_of, numbers_at
from refill.protocol.plan_settings import PlanSettings
from refill.protocol.wire_format import Int64Array

_CELLS = 1 << 20
"""Of the table of runs that is made at once."""
_CELLS_NEAR = 1 << 12
"""Of the table of runs that is kept."""


def epoch_key(settings: PlanSettings, epoch: int) -> int:
    """What an epoch's order is drawn by."""
    return key_of("refill plan", settings.version, settings.seed, epoch, settings.selection)


def read_key(settings: PlanSettings, epoch: int) -> int:
    """What the order is drawn by in which chunks are read in an epoch: the same for all plans with one ``read_seed``,
    and as without one for the plan whose ``seed`` that is."""
    seed = settings.seed if settings.read_seed is None else settings.read_seed
    return epoch_key(replace(settings, seed=seed), epoch)


def weaving_of(settings: PlanSettings, sizes: Int64Array, epoch: int) -> Weaving:
    """Of an epoch of a plan, whose shares have so many samples ``(shares,)``."""
    return Weaving(sizes, settings.run, key_of("weaving", epoch_key(settings, epoch)))


class _Near(NamedTuple):
    """Runs of some rounds in a row, which take positions ``first <= position < end``."""

    first: int
    end: int
    run_ends: Int64Array
    """``(runs,)`` the position at which each ends."""
    shares: Int64Array
    """``(runs,)``"""
    to_place: Int64Array
    """``(runs,)`` from a position of each to its place in the share."""


class Weaving:
    """Says which share each position of an epoch is of, and which place in it: shares take turns.

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
        self._rounds_near = max(1, _CELLS_NEAR // len(self._sizes))
        self._kept: _Near | None = None

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
        near = self._near(int(positions.min()), int(positions.max()))
        if near is not None:  # a batch
            run = np.searchsorted(near.run_ends, positions, side="right")
            return near.shares[run], positions + near.to_place[run]
        rounds = self._rounds_of(positions)
        wanted, row = np.unique(rounds, return_inverse=True)
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
        wanted, row = np.unique(rounds, return_inverse=True)
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

    def _rounds_of(self, positions: Int64Array) -> Int64Array:
        guess = positions * self.num_rounds // self.num_positions
        # A share is never ahead of its part of a round, and less than a sample behind: the guess is right, or one low.
        return guess + (positions >= self._starts[guess + 1])

    def _near(self, first: int, last: int) -> _Near | None:
        """Of the rounds of these positions and of some around them: the next batch is likely to be of them. None: there
        are too many between them."""
        near = self._kept
        if near is not None and near.first <= first and last < near.end:
            return near
        first_round, last_round = self._rounds_of(np.array([first, last], dtype=np.int64)).tolist()
        if last_round - first_round >= self._rounds_near:
            return None
        start = max(0, first_round - self._rounds_near // 4)
        end = min(self.num_rounds, start + 2 * self._rounds_near)
        rounds = np.arange(start, end, dtype=np.int64)
        order, run_ends = self._runs(rounds)
        place_ends = (rounds[:, None] + 1) * self._sizes[order] // self.num_rounds
        self._kept = near = _Near(
            int(self._starts[start]),
            int(self._starts[end]),
            run_ends.reshape(-1),
            order.reshape(-1),
            (place_ends - run_ends).reshape(-1),
        )
        return near

    def _runs(self, rounds: Int64Array) -> tuple[Int64Array, Int64Array]:
        """``(rounds, shares)`` each: the shares in the order of each round, and the position at which each run ends."""
        num_shares = len(self._sizes)
        names = rounds[:, None] * num_shares + np.arange(num_shares, dtype=np.int64)
        order = np.argsort(numbers_at(self._key, names.astype(np.uint64)), axis=1, kind="stable")
        ends = (rounds[:, None] + 1) * self._sizes // self.num_rounds
        ends -= rounds[:, None] * self._sizes // self.num_rounds
        return order, self._starts[rounds][:, None] + np.cumsum(np.take_along_axis(ends, order, axis=1), axis=1)
