"""How long does a sample stay in memory before it is delivered, and when, on that clock, is each chunk read?

Of an infinite stream of chunks, each sample draws the time that it stays from a distribution with mean 1 (times are in
units of memory: 1 is the time in which as much is delivered as memory holds), and whoever's time is over first is
delivered. Then memory is just full. The distribution is mixed of two: three quarters of a time are exponential, which
spreads a chunk widest and leaves at the end of an epoch what looks like all of memory; a quarter is even over [0, 2),
which lets go of a chunk sooner, so that its samples meet less.

The clock of those times, *virtual time*, does not run evenly in the samples delivered: at the beginning of an epoch all
of memory has just been read, and few of the times are over. ``VirtualClock`` is its expected course, from the renewal
equation: what is delivered up to a time is what was read before and whose time is over, and each delivery makes room
for a read. Everything is in integers, 2**32 for 1, since processors differ in the last bit of a logarithm.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np

from refill.protocol.keyed_hash import UInt64Array
from refill.protocol.wire_format import Int64Array

ONE = 1 << 32
"""Fixed point."""

RAMP_START = 5
RAMP_PART = 4
"""In its first epoch a job begins with a fifth of memory, and adds a sample for every four delivered, until memory is
full: a link that only just feeds the loop is not asked for all of memory at once."""
_MIXED_CHUNKS, _MIXED_IN_A_SHARE, _MIXED_IN_A_RUN = 1024, 128, 2
"""Samples of one chunk hardly meet in a batch if all shares together hold so many chunks, each share so many, and for
each position of a run so many."""

_CELLS = 1 << 12
_CELL_BITS = 20
_STEPS = 64
"""Of the clock's table, in each unit of time."""
_LEAST_START = 1 << 18
"""Of 2**28: from so little memory grows in a few thousand steps."""
_SETTLED = 8
"""Units of time after which the clock runs evenly, since the longest stay is over."""


@cache
def _quantiles() -> Int64Array:
    """``(4097,)``: x / 2 - 3/4 ln(1 - x) for x = 0, 1/4096, ..., and for x = 1 its value half a cell before."""
    unit = 1 << 64
    logarithms = [0]  # -ln(1 - i/4096) is the sum of ln(j / (j - 1)) over j = 4096 - i + 1 .. 4096
    for j in range(_CELLS, 1, -1):
        logarithms.append(logarithms[-1] + _logarithm_of_step(j, unit))
    logarithms.append(logarithms[-1] + _logarithm_of_step(2, unit))
    found = [(i << 31) // _CELLS + (3 * logarithm >> 34) for i, logarithm in enumerate(logarithms)]
    return np.array(found, dtype=np.int64)


def _logarithm_of_step(j: int, unit: int) -> int:
    """ln(j / (j - 1)) = 2 artanh(1 / (2 j - 1)), as an integer of so many to 1."""
    base = 2 * j - 1
    power, total, k = unit // base, 0, 0
    while power:
        total += power // (2 * k + 1)
        power //= base * base
        k += 1
    return 2 * total


def stays(parts: UInt64Array) -> Int64Array:
    """How long samples stay, ``(n,)``, for their places among all, ``0 <= part < 2**32``, the soonest first."""
    table = _quantiles()
    cells = (parts >> np.uint64(_CELL_BITS)).astype(np.int64)
    within = (parts & np.uint64((1 << _CELL_BITS) - 1)).astype(np.int64)
    low = table[cells]
    found: Int64Array = low + ((table[cells + 1] - low) * within >> _CELL_BITS)
    return found


@cache
def _over_in_steps() -> Int64Array:
    """Of everything that is read at once, what part is delivered in each step after it: sums to 2**28."""
    table = _quantiles()
    ends = np.arange(1, int(table[-1]) * _STEPS // ONE + 2, dtype=np.int64) * (ONE // _STEPS)
    cells = np.minimum(np.searchsorted(table, ends, side="right") - 1, _CELLS - 1)
    low, high = table[cells], table[cells + 1]
    over = (cells << 16) + np.minimum(((ends - low) << 16) // (high - low), 1 << 16)
    return np.diff(np.concatenate([[0], over]))


class Ramp(NamedTuple):
    """What a share may hold in a job's first epoch."""

    start_bytes: int
    """At its beginning."""
    part: int
    """One more byte for so many delivered, until memory is full."""


def ramp_of(memory_bytes: int, chunk_bytes: int, num_shares: int, run: int) -> Ramp:
    """Where memory holds more chunks than mix well, it begins with those, and grows a quarter as fast; half as fast
    with half of them. The loop waits for what is read before its second batch, and for each byte that memory grows by
    if the link only just feeds it.

    :param memory_bytes: of one share.
    :param chunk_bytes: of a chunk, on average.
    :param run: positions of the share that follow each other.
    """
    mixed_bytes = max(_MIXED_IN_A_SHARE, _MIXED_CHUNKS // num_shares, _MIXED_IN_A_RUN * run) * chunk_bytes
    part = RAMP_PART * (1 if 2 * memory_bytes < mixed_bytes else 2 if memory_bytes < mixed_bytes else 4)
    return Ramp(min(memory_bytes // RAMP_START, mixed_bytes), part)


@lru_cache(maxsize=64)
def _delivered(start: int, part: int) -> Int64Array:
    """What is delivered up to the end of each step, in units of memory of 2**28, as is what there is at the start."""
    unit = 1 << 28
    over, memory = _over_in_steps(), start
    read, delivered = [memory], [0]
    settled = 0
    while settled < _SETTLED * _STEPS:
        recent = np.array(read[-len(over) :], dtype=np.int64)[::-1]
        now = int((recent * over[: len(recent)]).sum()) >> 28
        delivered.append(delivered[-1] + now)
        wanted = min(unit, start + delivered[-1] // part)
        read.append(now + wanted - memory)
        memory = wanted
        settled += memory == unit
    return np.array(delivered, dtype=np.int64)


class VirtualClock:
    """Virtual time for what has been delivered.

    :param start: what there is of memory at the beginning, in 2**-28; a job's first epoch begins with less than all.
    :param part: it grows by a byte for so many delivered.
    """

    def __init__(self, start: int = 1 << 28, part: int = 1) -> None:
        self._delivered = _delivered(max(start, _LEAST_START), part)

    def times(self, delivered: Int64Array) -> Int64Array:
        """``(m,)``, times in 2**-32 of a unit, when so many units of memory, in 2**-28, have been delivered."""
        table = self._delivered
        step = ONE // _STEPS
        cells = np.minimum(np.searchsorted(table, delivered, side="right") - 1, len(table) - 2)
        low, high = table[cells], table[cells + 1]
        inside = np.minimum(delivered, high) - low
        found = cells * step + inside * step // np.maximum(1, high - low)
        # Beyond the table time runs as deliveries do.
        beyond: Int64Array = found + (np.maximum(delivered - table[-1], 0) << 4)
        return beyond
