"""Of which class will an owner run out first, and when? Known from the traces, as long as ranks keep about in step.

The requests of each class are put in the order in which ranks come to them: position by position, over all ranks. An
owner that has had, has in memory or has on its way ``n`` samples of a class is *short* of it at the class's request
``n``. Giving a sample changes nothing about that, only reading does; so it takes a look at a heap to know what to read
next.
"""

from __future__ import annotations

import heapq

import numpy as np

from refill_service.cache_core.sample_mapping import Int64Array

__all__ = ["ClassDemand"]

_NEVER = 2**62


class ClassDemand:
    """Of one owner in one epoch.

    :param classes: ``(n,)`` the class of each request that is left, ``0 <= class < num_classes``.
    :param ranks, positions: ``(n,)`` whose request it is, and where in that rank's trace.
    """

    def __init__(
        self, classes: Int64Array, num_classes: int, ranks: Int64Array, positions: Int64Array, num_ranks: int
    ) -> None:
        self._num_ranks = num_ranks
        times = self.times(ranks, positions)
        if int(times.max(initial=0)) < 2**31:
            times = times.astype(np.int32)
        self.counts = np.bincount(classes, minlength=num_classes)
        """``(num_classes,)`` requests that are left of each."""
        ends = np.cumsum(self.counts)
        self._ends: list[int] = ends.tolist()
        self._next: list[int] = (ends - self.counts).tolist()
        """By class, the place in ``_of_classes`` of the first request that nothing is there for."""
        self._of_classes = times[np.lexsort((times, classes))]
        """Times of the requests, class by class, ascending in each."""
        self._in_order = np.sort(times)
        self.short_at = np.full(num_classes, _NEVER, dtype=np.int64)
        """``(num_classes,)`` when the owner runs out of each."""
        self._shortest: list[tuple[int, int]] = []
        for each in range(num_classes):
            self._look(each)

    def times(self, ranks: Int64Array | int, positions: Int64Array) -> Int64Array:
        """When ranks that keep in step come to these positions."""
        return positions * self._num_ranks + ranks

    def covered(self, of_class: int, count: int) -> None:
        """Fact: so many more samples of a class come into memory."""
        self._next[of_class] += count
        self._look(of_class)

    def _look(self, of_class: int) -> None:
        place = self._next[of_class]
        at = int(self._of_classes[place]) if place < self._ends[of_class] else _NEVER
        self.short_at[of_class] = at
        if at != _NEVER:
            heapq.heappush(self._shortest, (at, of_class))

    def shortest(self) -> tuple[int, int] | None:
        """``(time, class)`` of the first request that nothing is there for; None: there is something for all."""
        while self._shortest:
            at, of_class = self._shortest[0]
            if self.short_at[of_class] == at:
                return at, of_class
            heapq.heappop(self._shortest)
        return None

    def is_among_next(self, at: int, num_answered: int, count: int) -> bool:
        """Whether a request is one of the next ``count``, when so many of those that were left have been answered."""
        if not len(self._in_order):
            return False
        return at <= int(self._in_order[min(num_answered + count, len(self._in_order) - 1)])
