"""The cache that keeps what was used most often, to compare SHADE with: counts are never forgotten, and of those used
equally often the one leaves that was used longest ago."""

from __future__ import annotations

import heapq

__all__ = ["LfuCache"]


class LfuCache:
    """Of samples of one size.

    :param capacity: samples.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._counts: dict[int, int] = {}
        """Of all samples that were ever used."""
        self._held: dict[int, tuple[int, int]] = {}
        """``(count, time of the last use)`` of those in memory."""
        self._least: list[tuple[int, int, int]] = []
        """A heap of these with the sample; outdated ones stay in it until they come up."""
        self._time = 0

    def asked(self, sample: int) -> bool:
        """Whether it was in memory; it is then."""
        self._time += 1
        self._counts[sample] = self._counts.get(sample, 0) + 1
        hit = sample in self._held
        if not hit and len(self._held) >= self._capacity:
            self._evict()
        self._held[sample] = (self._counts[sample], self._time)
        heapq.heappush(self._least, (*self._held[sample], sample))
        return hit

    def _evict(self) -> None:
        while True:
            count, time, sample = heapq.heappop(self._least)
            if self._held.get(sample) == (count, time):
                del self._held[sample]
                return
