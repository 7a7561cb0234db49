"""Policy ``exact`` with a fetch size: what is asked for next is fetched together, as DELI does for a node.

Each pod is the service that fetches the requests to its share, in the order in which ranks in step make them: when no
more than the threshold of those that it fetched are left to be asked for, the next ones are fetched. What is fetched
goes into the cache when it comes, and what came first is evicted; what is there already is renewed. Unlike DELI's loop,
who asks for a sample on its way waits for it, and the store is not read twice. What was evicted before it was asked for
is read alone, and does not go into the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from refill_service.cache_core.exact.sample_caches import FifoCache
from refill_service.cache_core.policies import exact
from refill_service.cache_core.policies.interface import (
    NO_ORDERS,
    EpochBegan,
    Orders,
    Policy,
    Read,
)
from refill_service.cache_core.sample_mapping import Int64Array

_MOST_READS = 4096
"""Under way at once: each takes memory of its own beside its bytes."""
_MOST_IN_A_PIECE = 1 << 8
"""Requests of a fetch that are gone through in one piece, some 10 us each with the reads that begin."""


class FetchingExactPolicy(exact.ExactPolicy):
    """Policy ``exact`` with eviction ``fifo``, which may fetch as DELI's service does."""

    _cache: FifoCache | None

    def __init__(self, began: EpochBegan) -> None:
        super().__init__(began)
        self._read_ahead = 0.0
        self._size, self._threshold = began.settings["fetch_size"], began.settings["fetch_threshold"]
        self._fetching: Fetching | None = None
        self._queued: set[int] = set()
        """Samples that were fetched, or left out of a fetch, whose request has yet to be made."""
        self._fetched: set[int] = set()
        """Those on their way that go into the cache."""
        self._left_of_fetch = 0
        """Requests of the last fetch that have yet to be ordered."""
        self._paused = False
        """There are many reads under way: the rest is ordered when half of them have come."""

    def memory_changed(self, capacity_bytes: int) -> Orders:
        mean_bytes = max(1.0, float(self._lengths.mean())) if len(self._lengths) else 1.0
        self._fetching = Fetching.of(self._size, self._threshold, capacity_bytes / mean_bytes)
        return super().memory_changed(capacity_bytes)

    @property
    def nothing_left_to_read(self) -> bool:
        return super().nothing_left_to_read and not self._queued

    @property
    def may_go_on(self) -> bool:
        most = _MOST_READS // 2 if self._paused else _MOST_READS - 1
        under_way = self._cache is not None and self._next is not None and self._left_of_fetch > 0
        return under_way and self._num_on_their_way <= most

    def go_on(self) -> Orders:
        """The fetch that is under way goes on, a little."""
        return self._settled([], [])

    def _answer(self, rank: int, asked: Int64Array) -> tuple[Int64Array, Orders]:
        reads: list[Read] = []
        for sample in asked.tolist():
            if self._cache is not None and self._left_of_fetch and not self._was_through[sample]:
                self._left_of_fetch -= 1
                self._fetch(sample, self._cache, reads)  # it would have been by now, in one piece
            self._was_through[sample] = True  # also of a rank that is ahead of others
            self._queued.discard(sample)
            if self._cache is not None and not self._arrived_here[sample]:
                self.counts.misses += self._ask_for(sample, reads)
                self._awaited.add(sample)
            if not self._left_of_fetch:
                self._fetch_what_is_due(reads)
        return asked, self._settled(reads, [])

    def repeated(self, samples: Int64Array) -> Orders:
        reads: list[Read] = []
        for sample in samples.tolist():
            if self._cache is not None and not self._arrived_here[sample]:
                self.counts.repeats_missed += self._ask_for(sample, reads)
        return self._settled(reads, [])

    def _ask_for(self, sample: int, reads: list[Read]) -> bool:
        """A sample that is not in memory is asked for. Returns whether that is a miss."""
        if not self._here[sample]:
            self._read(sample, reads)
        return not self._at_hand(sample, sample + 1)

    def _may_be_sent(self, sample: int) -> bool:
        return sample in self._queued

    def _leaves(self, sample: int) -> None:
        self._queued.discard(sample)
        super()._leaves(sample)

    def _settled(self, reads: list[Read], drops: list[Int64Array]) -> Orders:
        if self._cache is None:
            return NO_ORDERS
        self._skip_done()
        self._fetch_what_is_due(reads)
        return super()._settled(reads, drops)

    def _fetch_what_is_due(self, reads: list[Read]) -> None:
        cache, fetching = self._cache, self._fetching
        if cache is None or fetching is None:
            return
        if self._num_on_their_way > _MOST_READS // 2 and self._paused:
            return
        self._paused = False
        left_in_piece = _MOST_IN_A_PIECE
        while self._next is not None and (self._left_of_fetch or fetching.is_due(len(self._queued))):
            if self._num_on_their_way >= _MOST_READS:
                self._paused = True
                return
            self._left_of_fetch = self._left_of_fetch or fetching.size
            if not left_in_piece:
                return
            left_in_piece -= 1
            _, sample, repeats = self._next
            self._next = next(self._in_order, None)
            if not repeats:  # who asks for a repeat may do so at another pod's pace, or never
                self._left_of_fetch -= 1
                self._fetch(sample, cache, reads)
            self._skip_done()

    def _fetch(self, sample: int, cache: FifoCache, reads: list[Read]) -> None:
        self._was_through[sample] = True
        self._queued.add(sample)
        if cache.holds(sample):
            cache.renewed(sample)
            return
        self._fetched.add(sample)
        if not self._here[sample]:
            self._read(sample, reads)

    def _read(self, sample: int, reads: list[Read]) -> None:
        self._here[sample] = True
        self.counts.refills += 1
        self._num_on_their_way += 1
        reads.append(Read(sample, sample + 1, np.array([sample], dtype=np.int64)))

    def _arrived(self, read: Read, kept: Int64Array) -> Orders:
        drops: list[Int64Array] = []
        if self._cache is not None:
            for sample in kept.tolist():
                if sample in self._fetched:
                    self._fetched.remove(sample)
                    drops.append(self._gone(np.array(self._cache.fetched(sample), dtype=np.int64)))
        drops.append(super()._arrived(read, kept).drops)
        self._count_bytes()
        reads: list[Read] = []
        if self._paused:
            self._fetch_what_is_due(reads)
        return Orders(reads, np.concatenate(drops))

    def _lost(self, samples: Int64Array) -> None:
        self._fetched.difference_update(samples.tolist())
        super()._lost(samples)


def _new(began: EpochBegan) -> Policy:
    return FetchingExactPolicy(began) if began.settings["fetch_size"] else exact.ExactPolicy(began)


KIND = replace(exact.KIND, new=_new)


HALF = "50/50"
"""In place of a number: half of what memory holds, as DELI recommends for both."""


@dataclass(frozen=True)
class Fetching:
    """How DELI's service fetches (IV-B): so many requests at once, begun when so few are left in its queue. A threshold
    of 0 fetches when that is empty, and one as large as the size fetches twice at first."""

    size: int
    """Requests of one fetch; at least 1."""
    threshold: int
    """The next fetch is made when no more requests than this are left in the queue."""

    @classmethod
    def of(cls, size: int | str, threshold: int | str, memory_samples: float) -> Fetching | None:
        """As settings say it; None: nothing is fetched before it is asked for.

        :param memory_samples: what there is memory for.
        """
        half = max(1, int(memory_samples) // 2)
        if threshold == "auto":
            threshold = HALF if size == HALF else 0
        number = half if isinstance(size, str) else size
        return cls(number, half if isinstance(threshold, str) else threshold) if number else None

    def is_due(self, num_queued: int) -> bool:
        """Asked before each request leaves the queue, and again after a fetch: several may leave at once."""
        return num_queued <= self.threshold
