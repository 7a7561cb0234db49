"""What does an epoch cost at a node that fetches its loop's requests ahead (DELI), and how long does it take?

The loop and the service that fetches for it run side by side, on one clock. As in the paper, a miss of the loop reads
the store itself, even while a fetch of the sample is under way, and does not go into the cache.
"""

from __future__ import annotations

import math

import numpy as np
from benchmarks.papers.loop_clock import LoopClock
from benchmarks.papers.processor_sharing import SharedWork

from refill_service.cache_core.exact.sample_caches import FifoCache
from refill_service.cache_core.policies.fetching_exact import Fetching
from refill_service.cache_core.sample_mapping import Int64Array

__all__ = ["FetchingNode"]


class FetchingNode:
    """One node, over all epochs. What is under way when an epoch ends arrives in the next.

    For each epoch :meth:`asks_for`; then :meth:`load` and :meth:`compute_from` for each batch.

    :param renews: whether what a fetch leaves out, since it is in the cache, counts as fetched anew. In the paper it
        does not, and may be evicted before it is used.
    """

    def __init__(
        self,
        num_samples: int,
        memory_samples: int,
        fetching: Fetching,
        clock: LoopClock,
        batch_size: int,
        *,
        renews: bool = True,
    ) -> None:
        self._cache = FifoCache(np.ones(num_samples, dtype=np.int64), memory_samples)
        self._fetching, self._clock, self._batch_size, self._renews = fetching, clock, batch_size, renews
        self.now = 0.0
        self._fetches: SharedWork[list[int]] = SharedWork()
        """Under way."""
        self._inserts: list[tuple[float, int]] = []
        """``(when, sample)``, the last one first: what was fetched and is being put into the cache."""
        self._asked: list[int] = []
        self._began = 0.0
        self._position = self._queued = self._drawn = 0
        """Of the epoch: what was loaded; what was fetched for it and not yet yielded; what was drawn to be fetched."""
        self.gets = self.misses = 0
        """Of the running epoch."""
        self.load_seconds = self.run_seconds = 0.0

    def asks_for(self, order: Int64Array) -> None:
        """Fact: an epoch begins in which its rank asks for these, one after another."""
        self._asked, self._began = order.tolist(), self.now
        self._position = self._queued = self._drawn = 0
        self.gets = self.misses = 0
        self.load_seconds = self.run_seconds = 0.0

    def load(self) -> bool:
        """The loop draws a batch and loads it; False: the epoch is over."""
        batch = self._asked[self._position : self._position + self._batch_size]
        for _ in batch:
            while self._drawn < len(self._asked) and self._fetching.is_due(self._queued):
                fetched = self._asked[self._drawn : self._drawn + self._fetching.size]
                self._drawn, self._queued = self._drawn + len(fetched), self._queued + len(fetched)
                self._fetch(fetched)
            self._queued -= 1
        before = self.now
        for sample in batch:
            self._look_up(sample)
        self.load_seconds += self.now - before
        self._position += len(batch)
        return bool(batch)

    def compute_from(self, time: float) -> None:
        """The loop computes what it has loaded, from then on."""
        self.now = time + self._clock.comp
        self.run_seconds = self.now - self._began

    def _fetch(self, samples: list[int]) -> None:
        self._take_in()
        left = []
        for sample in samples:
            if not self._cache.holds(sample):
                left.append(sample)
            elif self._renews:
                self._cache.renewed(sample)
        if left:
            self.gets += len(left)
            self._fetches.begin(self.now, self._clock.svc.seconds(len(left)), left)
            self._share()

    def _look_up(self, sample: int) -> None:
        self._take_in()
        self.now += self._clock.h
        if not self._cache.holds(sample):
            self.misses += 1
            self.gets += 1
            self.now += self._clock.g

    def _take_in(self) -> None:
        """What is due by now. A fetch may be due just when a look-up starts: then it is rounding that decides."""
        while (over_at := self._fetches.next_over_at) <= self.now:
            for samples in self._fetches.over(over_at):
                self._insert(over_at, samples)
            self._share()
        while self._inserts and self._inserts[-1][0] <= self.now:
            self._cache.fetched(self._inserts.pop()[1])

    def _insert(self, fetched_at: float, samples: list[int]) -> None:
        each = self._clock.svc.insert
        free_at = max(fetched_at, self._inserts[0][0] if self._inserts else 0.0)
        due = [(free_at + each * number, sample) for number, sample in enumerate(samples, 1)]
        self._inserts = due[::-1] + self._inserts

    def _share(self) -> None:
        workers = self._clock.svc.workers
        self._fetches.rate = 1.0 if math.isinf(workers) else min(1.0, workers / max(1, self._fetches.num))
