"""Which samples does a cache keep that reads them one by one, and looks at the past only?

``never`` evicts nothing (CoorDL, section 4.1): in a random order in which each sample comes once an epoch no other rule
hits more. ``fifo`` is DELI's, ``lru`` a yardstick, ``importance`` SHADE's (its Algorithm 1, APP with a ghost cache).
``MinCache`` knows all that comes, and is the bound for any of them.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterable

from refill_service.cache_core.exact.known_uses import KnownUses

__all__ = ["FifoCache", "ImportanceCache", "LruCache", "MinCache", "NeverEvictCache", "SampleCache"]


class SampleCache(ABC):
    """Of ``capacity`` samples."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._held: OrderedDict[int, None] = OrderedDict()
        """The next to be evicted first, of caches with such an order."""

    def holds(self, sample: int) -> bool:
        return sample in self._held

    def __len__(self) -> int:
        return len(self._held)

    def samples(self) -> list[int]:
        return sorted(self._held)

    def used(self, sample: int) -> None:  # noqa: B027 -- most look at what comes only
        """Fact: a sample in memory was used."""

    @abstractmethod
    def came(self, sample: int) -> None:
        """Fact: a sample that is not in memory was read."""


class NeverEvictCache(SampleCache):
    def came(self, sample: int) -> None:
        if len(self._held) < self.capacity:
            self._held[sample] = None


class FifoCache(SampleCache):
    """A hit changes nothing."""

    def came(self, sample: int) -> None:
        if self.capacity:
            if len(self._held) >= self.capacity:
                self._held.popitem(last=False)
            self._held[sample] = None

    def renew(self, sample: int) -> None:
        """Fact: a fetch wanted a sample that is in memory. It is left out, and must not be evicted before its use."""
        self._held.move_to_end(sample)


class LruCache(FifoCache):
    def used(self, sample: int) -> None:
        self._held.move_to_end(sample)


class MinCache:
    """Keeps the samples with the earliest next use; what would come latest is not even taken in (Belady's MIN)."""

    def __init__(self, capacity: int, uses: KnownUses) -> None:
        self.capacity = capacity
        self._uses = uses
        self._next_uses: dict[int, int] = {}
        self._latest: list[tuple[int, int]] = []

    def holds(self, sample: int) -> bool:
        return sample in self._next_uses

    def requested(self, sample: int, time: int) -> bool:
        """Fact: a sample was asked for. Returns whether it was in memory."""
        hit = self._next_uses.pop(sample, None) is not None
        if (again := self._uses.next(sample, time)) is not None:
            self._next_uses[sample] = again
            heapq.heappush(self._latest, (-again, sample))
        while len(self._next_uses) > self.capacity:
            use, latest = heapq.heappop(self._latest)
            if self._next_uses.get(latest) == -use:
                del self._next_uses[latest]
        return hit


class ImportanceCache(SampleCache):
    """SHADE's adaptive priority-aware prediction. Scores are those of the last time that a sample was trained with.

    A batch has two phases: its samples are fetched one by one, and then it is scored, since the scores of this visit
    exist only after the fetch. What was taken in before it had a score is not evicted until it has one.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._ghost: dict[int, float] = {}
        """The last score of every sample that has one, in memory or not."""
        self._least: list[tuple[float, int]] = []
        """A heap of (score, sample) of those in memory; outdated ones stay in it until they come up."""

    def came(self, sample: int) -> None:
        if len(self._held) < self.capacity:
            self._keep(sample)
            return
        score = self._ghost.get(sample)
        least = self._least_important()
        if score is None or least is None or score < least[0]:
            return  # read past memory
        del self._held[heapq.heappop(self._least)[1]]
        self._keep(sample)

    def scored(self, samples: Iterable[int], scores: Iterable[float]) -> None:
        """Fact: a batch was trained with, and these are its scores; see ``importance.rank_scores``."""
        for sample, score in zip(samples, scores, strict=True):
            self._ghost[sample] = score
            if sample in self._held:
                heapq.heappush(self._least, (score, sample))

    def _keep(self, sample: int) -> None:
        self._held[sample] = None
        if sample in self._ghost:
            heapq.heappush(self._least, (self._ghost[sample], sample))

    def _least_important(self) -> tuple[float, int] | None:
        """The smaller id among equals."""
        while self._least:
            score, sample = self._least[0]
            if sample in self._held and self._ghost[sample] == score:
                return score, sample
            heapq.heappop(self._least)
        return None
