"""What does an epoch cost at a node that fetches its loop's requests ahead (DELI), and how long does it take?

The loop and the service that fetches for it run side by side, on one clock. As in the paper, a miss of the loop reads
the store itself, even while a fetch of the sample is under way, and does not go into the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

import numpy as np
from benchmarks.papers.loop_clock import LoopClock

from refill_service.cache_core.exact.fetching import Fetching
from refill_service.cache_core.exact.sample_caches import FifoCache
from refill_service.cache_core.sample_mapping import Int64Array

__all__ = ["FetchingNode"]


class FetchingNode:
    """One node, over all epochs. What is under way when an epoch ends arrives in the next."""

    def __init__(self, num_samples: int, memory_samples: int, fetching: Fetching, clock: LoopClock) -> None:
        self._cache = FifoCache(np.ones(num_samples, dtype=np.int64), memory_samples)
        self._fetching = fetching
        self._clock = clock
        self._now = 0.0
        self._coming: list[tuple[float, int, list[int]]] = []
        """Fetches under way by when they are due, those that began first before others."""
        self._num_fetches = 0
        self.gets = self.misses = 0
        """Of the running epoch."""
        self.load_seconds = self.run_seconds = 0.0

    def epoch(self, order: Int64Array, batch_size: int) -> Iterator[int]:
        """Positions done, a batch at a time."""
        self.gets = self.misses = 0
        self.load_seconds = self.run_seconds = 0.0
        began, asked = self._now, order.tolist()
        queued = drawn = 0
        for start in range(0, len(asked), batch_size):
            batch = asked[start : start + batch_size]
            for _ in batch:
                while drawn < len(asked) and self._fetching.is_due(queued):
                    fetched = asked[drawn : drawn + self._fetching.size]
                    drawn, queued = drawn + len(fetched), queued + len(fetched)
                    self._fetch(fetched)
                queued -= 1
            before = self._now
            for sample in batch:
                self._load(sample)
            self.load_seconds += self._now - before
            self._now += self._clock.comp
            self.run_seconds = self._now - began
            yield len(batch)

    def _fetch(self, samples: list[int]) -> None:
        self._take_in()
        left = []
        for sample in samples:
            if self._cache.holds(sample):
                self._cache.renewed(sample)
            else:
                left.append(sample)
        if left:
            self.gets += len(left)
            self._num_fetches += 1
            due = self._now + self._clock.svc.seconds(len(left))
            heappush(self._coming, (due, self._num_fetches, left))

    def _load(self, sample: int) -> None:
        self._take_in()
        self._now += self._clock.h
        if not self._cache.holds(sample):
            self.misses += 1
            self.gets += 1
            self._now += self._clock.g

    def _take_in(self) -> None:
        """What is due by now. A fetch may be due just when a look-up starts: then it is rounding that decides."""
        while self._coming and self._coming[0][0] <= self._now:
            for sample in heappop(self._coming)[2]:
                self._cache.fetched(sample)
