"""What may an owner send ahead to a rank? (Redox 3.6 and Algorithm 5; Brand 3.4 "Prefetch Check List")

Opportunistic: only samples that lie in memory already. A sample is sent for a later request of the rank when that
request's (abstract chunk, slot) is vacant on the rank's side. It is not vacant when it belongs to the requests
just answered, to an earlier request in the window that is sent now, or to a sample sent before that the rank has
not come to yet: overlapping windows remember those.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from refill_service.cache_core.epoch_order import Traces
from refill_service.cache_core.sample_mapping import AbstractMapping, Int64Array

_BLOCK = 1 << 14


class HeldByRank:
    """Knows which slots of an owner are occupied at one rank, by samples sent ahead that it has not come to."""

    def __init__(self, num_locations: int) -> None:
        self.occupied = np.zeros(num_locations, dtype=bool)
        self._positions = np.empty(0, dtype=np.int64)
        self._locations = np.empty(0, dtype=np.int64)

    def sent(self, positions: Int64Array, locations: Int64Array) -> None:
        self.occupied[locations] = True
        self._positions = np.concatenate([self._positions, positions])
        self._locations = np.concatenate([self._locations, locations])

    @contextmanager
    def also(self, locations: Int64Array) -> Iterator[None]:
        """Within: these locations are occupied too, by requests that are being answered."""
        vacant = locations[~self.occupied[locations]]
        self.occupied[vacant] = True
        try:
            yield
        finally:
            self.occupied[vacant] = False

    def started_below(self, position: int) -> None:
        """Fact: the rank has asked for every position below this one, so it holds nothing for them."""
        done = self._positions < position
        if done.any():
            self.occupied[self._locations[done]] = False
            self._positions = self._positions[~done]
            self._locations = self._locations[~done]


class UpcomingRequests:
    """A rank's requests to one owner, in order: the part of its trace that falls into the owner's share.

    Reads the trace in blocks and keeps what lies ahead, so memory follows the window, not the epoch.
    """

    def __init__(self, traces: Traces, rank: int, mapping: AbstractMapping) -> None:
        self._traces = traces
        self._rank = rank
        self._mapping = mapping
        self._length = traces.length(rank)
        self._restart(0)

    def after(self, position: int, count: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        """``(positions, asked, locations)`` of the next ``count`` requests after ``position``, fewer at the end.

        ``asked`` are local sample ids. The arrays are views: valid until the next call.
        """
        if not self._from <= position + 1 <= self._until:
            self._restart(position + 1)
        start = int(np.searchsorted(self._positions, position, side="right"))
        while len(self._positions) - start < count and self._until < self._length:
            self._extend(start, count)
            start = int(np.searchsorted(self._positions, position, side="right"))
        part = slice(start, start + count)
        return self._positions[part], self._asked[part], self._locations[part]

    def reading(self, position: int, count: int) -> Iterator[None]:
        """What :meth:`after` reads for these, a block with each step: where there are many pods, hardly anything of a
        trace is of one owner. Who does not go through it waits for all of it then."""
        if not self._from <= position + 1 <= self._until:  # else a rank that begins late has all before it read
            self._restart(position + 1)
        while self._until < self._length:
            start = int(np.searchsorted(self._positions, position, side="right"))
            if len(self._positions) - start >= count:
                return
            self._extend(start, 0)
            yield

    def _restart(self, position: int) -> None:
        self._from = self._until = position
        self._positions = self._asked = self._locations = np.empty(0, dtype=np.int64)

    def _extend(self, start: int, count: int) -> None:
        """Read more of the trace and drop the entries before ``start``."""
        end = min(self._until + max(_BLOCK, count), self._length)
        positions = np.arange(self._until, end, dtype=np.int64)
        samples, repeats = self._traces.asked(self._rank, positions)
        here = np.flatnonzero(self._mapping.share.holds(samples) & ~repeats)
        asked = samples[here] - self._mapping.share.first_sample
        if start:
            self._from = int(self._positions[start - 1]) + 1
        self._until = end
        self._positions = np.concatenate([self._positions[start:], positions[here]])
        self._asked = np.concatenate([self._asked[start:], asked])
        self._locations = np.concatenate([self._locations[start:], self._mapping.locations(asked)])


def first_of_each(values: Int64Array) -> NDArray[np.intp]:
    """Where each value occurs first, ascending."""
    return np.sort(np.unique(values, return_index=True)[1])
