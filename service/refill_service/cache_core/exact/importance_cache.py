"""Which samples does a cache keep that learns how important each is? SHADE's adaptive priority-aware prediction.

Algorithm 1, in two phases (it can't be meant as printed: the score of a visit exists only after the fetch). A batch is
fetched sample by sample; then it was trained with, and its score is reported. The *ghost cache* is the score of each
sample that was trained with, in memory or not.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Container, Set

import numpy as np
from numpy.typing import NDArray

from refill_service.cache_core.exact.sample_caches import SampleCache
from refill_service.cache_core.sample_mapping import Int64Array

__all__ = ["ImportanceCache"]


class ImportanceCache(SampleCache):
    """What is in memory leaves for a sample that is at least as important. What was taken in before it had a score
    stays until it has one; what has none is read past a full memory."""

    def __init__(self, lengths: Int64Array, capacity_bytes: int) -> None:
        super().__init__(lengths, capacity_bytes)
        self._ghost = np.full(len(lengths), np.nan, dtype=np.float32)
        self._least: list[tuple[float, int]] = []
        """A heap of ``(score, sample)`` of those in memory. Outdated ones stay in it until they come up."""

    def scored(self, samples: Int64Array, scores: NDArray[np.floating]) -> None:
        """Fact: these were trained with, and have these scores from now on."""
        self._ghost[samples] = scores
        for sample in samples.tolist():
            self._has_score(sample)

    def shrink(self, spared: Set[int] = frozenset()) -> Int64Array:
        """What has no score leaves last."""
        evicted, stay = [], []
        while self.held_bytes > self.capacity_bytes and (least := self._least_important()) is not None:
            heapq.heappop(self._least)
            if least[1] in spared:
                stay.append(least)
            else:
                evicted.append(self._evict(least[1]))
        for entry in stay:
            heapq.heappush(self._least, entry)
        return np.array(sorted([*evicted, *super().shrink(spared).tolist()]), dtype=np.int64)

    def _taken_in(self, sample: int) -> list[int] | None:
        evicted = super()._taken_in(sample)
        if evicted is not None:
            self._has_score(sample)
        return evicted

    def _has_score(self, sample: int) -> None:
        score = float(self._ghost[sample])
        if sample not in self._held or math.isnan(score):
            return
        heapq.heappush(self._least, (score, sample))
        if len(self._least) > 2 * len(self._held) + 1024:
            current = ((float(self._ghost[each]), each) for each in self._held)
            self._least = [entry for entry in current if not math.isnan(entry[0])]
            heapq.heapify(self._least)

    def _make_room(self, sample: int) -> list[int] | None:
        score, length = float(self._ghost[sample]), int(self._lengths[sample])
        if length > self.capacity_bytes:
            return None
        less: dict[int, float] = {}
        over = self.held_bytes + length - self.capacity_bytes
        while over > 0:
            least = self._least_important(but=less)
            if least is None or not score >= least[0]:  # a score that is not known is NaN
                for each, its_score in less.items():
                    heapq.heappush(self._least, (its_score, each))
                return None
            heapq.heappop(self._least)
            less[least[1]] = least[0]
            over -= int(self._lengths[least[1]])
        return [self._evict(each) for each in less]

    def _least_important(self, but: Container[int] = ()) -> tuple[float, int] | None:
        """``(score, sample)`` on top of the heap, the smaller id among equals; None: none in memory has a score."""
        while self._least:
            score, sample = self._least[0]
            if sample in self._held and sample not in but and float(self._ghost[sample]) == score:
                return score, sample
            heapq.heappop(self._least)
        return None
