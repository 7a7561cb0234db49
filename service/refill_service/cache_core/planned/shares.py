"""Which chunks has each share?

The dataset is cut into pieces of neighbouring chunks, up to 4,096 for each share, and each round of pieces is dealt to
all shares, one each: so each share looks like the whole dataset, also where that is stored sorted. It follows from the
dataset, the chunk size and the number of shares alone, so that all jobs of a dataset, whatever their seed, read a chunk
at the same pod.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from refill.protocol.keyed_hash import key_of, numbers
from refill_service.cache_core.sample_mapping import ChunkLayout, Int64Array

_MOST_PIECES = 4096
"""Of each share: where there are more chunks, so many parts of the index are read for it."""


class Share(NamedTuple):
    """Chunks and samples are *local*: they count within the share, in the order of the dataset."""

    chunks: Int64Array
    """``(chunks,)`` of the dataset, ascending."""
    starts: Int64Array
    """``(chunks + 1,)`` first local sample of each, then their number."""
    samples: Int64Array
    """``(n,)`` of the dataset, ascending."""


class Shares:
    """Divides a dataset into shares: pieces of neighbouring chunks, dealt to the shares in turn.

    :param num_shares: V. With fewer chunks than that, some shares are empty.
    """

    def __init__(self, layout: ChunkLayout, num_shares: int) -> None:
        self.layout = layout
        self.num_shares, self.num_chunks = num_shares, layout.num_chunks
        self._num_rounds = max(1, min(_MOST_PIECES, layout.num_chunks // num_shares))
        key = key_of("shares", num_shares)
        self._turns = (numbers(key, self._num_rounds) >> np.uint64(32)).astype(np.int64) % num_shares
        pieces = np.arange(self._num_pieces + 1, dtype=np.int64)
        self._first_chunk = pieces * layout.num_chunks // self._num_pieces
        of_pieces = np.diff(layout.starts(self._first_chunk))
        self.sizes = np.zeros(num_shares, dtype=np.int64)
        """``(shares,)`` samples of each."""
        np.add.at(self.sizes, self._share_of_piece(pieces[:-1]), of_pieces)

    @property
    def _num_pieces(self) -> int:
        return self._num_rounds * self.num_shares

    def share_of(self, chunks: Int64Array) -> Int64Array:
        """The share of each chunk of the dataset."""
        return self._share_of_piece(((chunks + 1) * self._num_pieces - 1) // max(1, self.layout.num_chunks))

    def share(self, number: int) -> Share:
        pieces = self._pieces_of(number)
        chunks = _ranges(self._first_chunk[pieces], self._first_chunk[pieces + 1])
        first, end = self.layout.starts(chunks), self.layout.starts(chunks + 1)
        starts = np.concatenate([[0], np.cumsum(end - first)])
        return Share(chunks, starts, _ranges(first, end))

    def places(self, samples: Int64Array) -> tuple[Int64Array, Int64Array]:
        """``(shares, local samples)`` of samples of the dataset, each ``(n,)``."""
        pieces = np.searchsorted(self._first_sample, samples, side="right") - 1
        return self._share_of_piece(pieces), samples - self._first_sample[pieces] + self._before[pieces]

    def samples(self, number: int, local: Int64Array) -> Int64Array:
        """The samples of the dataset that local samples ``(n,)`` of a share are."""
        pieces = self._pieces_of(number)
        found = pieces[np.searchsorted(self._before[pieces], local, side="right") - 1]
        return self._first_sample[found] + local - self._before[found]

    def _pieces_of(self, number: int) -> Int64Array:
        """Ascending."""
        rounds = np.arange(self._num_rounds, dtype=np.int64)
        found: Int64Array = rounds * self.num_shares + (number + self._turns) % self.num_shares
        return found

    @cached_property
    def _first_sample(self) -> Int64Array:
        """``(pieces,)`` of the dataset."""
        return self.layout.starts(self._first_chunk[:-1])

    @cached_property
    def _before(self) -> Int64Array:
        """``(pieces,)`` samples of the same share before each."""
        sizes = np.diff(self.layout.starts(self._first_chunk))
        found = np.empty(self._num_pieces, dtype=np.int64)
        for number in range(self.num_shares):
            pieces = self._pieces_of(number)
            found[pieces] = np.cumsum(sizes[pieces]) - sizes[pieces]
        return found

    def pieces(self, numbers: Sequence[int]) -> tuple[Int64Array, Int64Array]:
        """``(first sample, end)`` of each piece of some shares, ascending."""
        of_shares = [self._pieces_of(number) for number in numbers]
        pieces = np.sort(np.concatenate(of_shares)) if of_shares else np.empty(0, dtype=np.int64)
        return self.layout.starts(self._first_chunk[pieces]), self.layout.starts(self._first_chunk[pieces + 1])

    def _share_of_piece(self, pieces: Int64Array) -> Int64Array:
        rounds, turns = np.divmod(pieces, self.num_shares)
        found: Int64Array = (turns - self._turns[rounds]) % self.num_shares
        return found


def _ranges(first: Int64Array, end: Int64Array) -> Int64Array:
    """``first[0] .. end[0] - 1, first[1] .. end[1] - 1, ...``"""
    sizes = end - first
    before = np.cumsum(sizes) - sizes
    found: Int64Array = np.repeat(first - before, sizes)
    found += np.arange(len(found), dtype=np.int64)
    return found
