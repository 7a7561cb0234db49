"""Which dataset does each position of a mixture have, and which sample of it in its own order? Plain arithmetic.

An epoch of a mixture has so many samples of each dataset (``mixture_weights.py``). They are woven in *blocks* of
positions in a row, each of which has every dataset in its proportion, to one sample:

- Lay all samples of the epoch out on a line, dataset after dataset, and cut it into as many equal parts as a block has
  positions. Each of T blocks has one sample of each part, all at the same place of it. So it has a T-th of each
  dataset, rounded up or down.
- Which place that is follows a golden lattice: a multiple of the number next to T / 1.618, which has no divisor in
  common with T. So any blocks in a row are even, too, and so are positions in a row within a block.

Samples of a dataset are numbered in the order of positions, so the positions of a batch have samples of a dataset that
follow each other. How many there are before a block is a sum of floors, which Euclid's algorithm finds.

A dataset's own order goes on from epoch to epoch. It has passes: in each, every sample comes once. Where a pass has not
as many samples left as an epoch asks for, the epoch begins the next one (:class:`MemberPlace`), so that no sample comes
more often in it than its repeats, rounded up.

All of it is in integers. Whatever changes an order is a new version, with golden digests in
tests/protocol/test_mixture_order.py.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from math import gcd
from typing import NamedTuple

import numpy as np

from refill.protocol.keyed_hash import key_of
from refill.protocol.wire_format import Int64Array

MIXTURE_VERSION = 1
BLOCK = 256
"""Positions in a row in which proportions hold to one sample, unless a mixture says otherwise."""
_GOLDEN = 0x9E3779B97F4A7C15
_KEPT_BLOCKS = 16


class MemberPlace(NamedTuple):
    """Where a dataset stands in its own order."""

    number: int = 0
    """Of the pass."""
    position: int = 0
    """The next one of it."""

    def begins(self, num_samples: int, count: int) -> MemberPlace:
        """Where an epoch begins that has so many samples of it: here, or with the next pass, so that none comes more
        often than ``count / num_samples``, rounded up."""
        if self.position and self.position + count > num_samples:
            return MemberPlace(self.number + 1, 0)
        return self

    def after(self, num_samples: int, count: int) -> MemberPlace:
        """So many samples later."""
        passes, position = divmod(self.position + count, max(1, num_samples))
        return MemberPlace(self.number + passes, position)


class _Block(NamedTuple):
    """``(positions,)`` each: the dataset of each position, and which of its samples in this epoch it is."""

    members: Int64Array
    nth: Int64Array


class MixtureEpoch:
    """One epoch of a mixture.

    :param counts: how many samples it has of each dataset.
    :param block: positions in a row in which each dataset has its part, to one sample. The last block is shorter.
    :param seed, epoch: what else the order follows from.
    """

    def __init__(self, counts: Sequence[int], block: int, seed: int, epoch: int) -> None:
        self.counts = [int(count) for count in counts]
        self.num_positions = sum(self.counts)
        self._block = block
        self._key = key_of("refill mixture", MIXTURE_VERSION, seed, epoch)
        self._num_blocks, rest = divmod(self.num_positions, block)
        shift = key_of("rest", self._key) % max(1, self.num_positions)
        ends = [shift * rest // max(1, self.num_positions)]
        for count in self.counts:
            shift += count
            ends.append(shift * rest // max(1, self.num_positions))
        self._in_rest = [end - first for first, end in pairwise(ends)]
        ends = [0]
        for count, last in zip(self.counts, self._in_rest, strict=True):
            ends.append(ends[-1] + count - last)
        self._ends = ends
        """Of each dataset's samples on the line of all that are in whole blocks, behind a 0."""
        self._step = _step(self._num_blocks)
        self._first = key_of("first", self._key) % max(1, self._num_blocks)
        self._kept: OrderedDict[int, _Block] = OrderedDict()

    def samples_at(self, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """``(datasets, nth)`` of positions ``0 <= position < num_positions``, ``(n,)`` each: which dataset each has,
        and which of that one's samples of this epoch."""
        members, nth = np.empty((2, len(positions)), dtype=np.int64)
        blocks, within = np.divmod(positions, self._block)
        by_block = np.argsort(blocks, kind="stable")
        numbers, firsts = np.unique(blocks[by_block], return_index=True)
        for number, at in zip(numbers.tolist(), np.split(by_block, firsts[1:]), strict=False):  # of none one empty part
            block = self._at(number)
            members[at], nth[at] = block.members[within[at]], block.nth[within[at]]
        return members, nth

    def num_before(self, position: int) -> list[int]:
        """How many samples of each dataset come before a position."""
        number, within = divmod(position, self._block)
        found = self._before(number)
        if within:
            block = self._at(number)
            more = np.bincount(block.members[:within], minlength=len(found)).tolist()
            found = [one + other for one, other in zip(found, more, strict=True)]
        return found

    def _at(self, number: int) -> _Block:
        block = self._kept.get(number)
        if block is None:
            block = self._kept[number] = self._made(number)
            while len(self._kept) > _KEPT_BLOCKS:
                try:
                    self._kept.popitem(last=False)
                except KeyError:  # another thread has done it
                    break
        return block

    def _made(self, number: int) -> _Block:
        size = self._block if number < self._num_blocks else self.num_positions - number * self._block
        turns = _lattice(size, key_of("block", self._key, number))
        if number < self._num_blocks:
            places = turns * self._num_blocks + (self._step * number + self._first) % self._num_blocks
            members = np.searchsorted(np.array(self._ends[1:]), places, side="right")
        else:
            members = np.repeat(np.arange(len(self.counts)), self._in_rest)[turns]
        by_member = np.argsort(members, kind="stable")
        here = np.bincount(members, minlength=len(self.counts))
        nth = np.empty(size, dtype=np.int64)
        nth[by_member] = np.arange(size) - np.repeat(np.cumsum(here) - here, here)
        return _Block(members, nth + np.array(self._before(number), dtype=np.int64)[members])

    def _before(self, number: int) -> list[int]:
        """How many samples of each dataset come before a block."""
        if number >= self._num_blocks:
            return [end - first for first, end in pairwise(self._ends)]
        up_to = [self._below(end, number) for end in self._ends]
        return [end - first for first, end in pairwise(up_to)]

    def _below(self, end: int, number: int) -> int:
        """How many of the first blocks' samples lie before this place of the line."""
        whole, part = divmod(end, self._num_blocks)
        # Block s has the place (step s + first) % T of each part: is it below this one?
        return whole * number + (
            _sum_of_floors(number, self._num_blocks, self._step, self._first)
            - _sum_of_floors(number, self._num_blocks, self._step, self._first - part)
        )


def _step(size: int) -> int:
    """Next to ``size`` over the golden ratio, and without a divisor in common with it."""
    near = size * _GOLDEN >> 64
    return (
        next(
            step
            for apart in range(size + 1)
            for step in (near + apart, near - apart)
            if step > 0 and gcd(step, size) == 1
        )
        if size > 1
        else 1
    )


def _lattice(size: int, first: int) -> Int64Array:
    """``(size,)``, each number below it once, so that any in a row lie evenly."""
    return (np.arange(size, dtype=np.int64) * _step(size) + first % size) % size


def _sum_of_floors(count: int, divisor: int, factor: int, first: int) -> int:
    """The sum of ``(factor * i + first) // divisor`` for ``0 <= i < count``."""
    found = 0
    while count > 0:
        whole, factor = divmod(factor, divisor)
        found += whole * count * (count - 1) // 2
        whole, first = divmod(first, divisor)
        found += whole * count
        last = factor * count + first
        if last < divisor:
            break
        count, first = divmod(last, divisor)
        divisor, factor = factor, divisor
    return found
