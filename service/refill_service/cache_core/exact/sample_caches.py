"""Which samples does a cache keep that reads them one by one, and looks at the past only?

``never`` evicts nothing (CoorDL, section 4.1): in a random order in which each sample comes once an epoch no other rule
hits more. ``fifo`` is DELI's, ``lru`` a yardstick.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Container, Iterator, Set

import numpy as np
from numpy.typing import NDArray

from refill_service.cache_core.exact.chunk_caches import ChunkRead, Uses
from refill_service.cache_core.sample_mapping import Int64Array

_STEPS_OF_READ = 6


class SampleCache(ABC):
    """Decides which single samples of one owner stay in memory, over all epochs. ``lengths``, ``(samples,)``, are
    bytes."""

    def __init__(self, lengths: Int64Array, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.held_bytes = 0
        self._lengths = lengths
        self._held: OrderedDict[int, None] = OrderedDict()
        """The next to be evicted first, of caches with such an order."""
        self._is_held = np.zeros(len(lengths), dtype=bool)

    def steps(self, sample: int) -> int:
        """The work of a request for a sample; 1 where there is nothing to decide."""
        return 1 if sample in self._held else _STEPS_OF_READ

    def planning(self, sample: int, time: int, uses: Uses) -> Iterator[None]:
        """As of :class:`ExactCache`."""
        return iter(())

    def holds(self, sample: int) -> bool:
        return sample in self._held

    def held(self, samples: Int64Array | slice) -> NDArray[np.bool_]:
        """:meth:`holds` of each."""
        return self._is_held[samples]

    def used(self, sample: int, time: int, uses: Uses) -> bool:
        """Fact: a sample in memory was used. It stays."""
        return True

    def missed(self, sample: int, time: int, uses: Uses) -> ChunkRead:
        """Fact: a sample that is not in memory is asked for; it is read alone."""
        evicted = self._taken_in(sample)
        if evicted is None:
            return ChunkRead(sample, sample + 1, np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
        return ChunkRead(sample, sample + 1, np.array([sample]), np.array(sorted(evicted), dtype=np.int64))

    def shrink(self, spared: Set[int] = frozenset()) -> Int64Array:
        """Evict what there is no room for since ``capacity_bytes`` became less; returns it.

        :param spared: is not evicted, however little room there is.
        """
        over_bytes, evicted = self.held_bytes - self.capacity_bytes, []
        if over_bytes > 0:  # only as many are looked at as it takes: those in memory may be very many
            for sample in self._held:
                if sample in spared:
                    continue
                evicted.append(sample)
                over_bytes -= int(self._lengths[sample])
                if over_bytes <= 0:
                    break
        for sample in evicted:
            self._evict(sample)
        return np.array(sorted(evicted), dtype=np.int64)

    def forget(self, samples: Int64Array) -> None:
        """Fact: these are not in memory any more, or never came."""
        for sample in samples.tolist():
            if sample in self._held:
                self._evict(sample)

    def epoch_over(self, end: int) -> None:  # noqa: B027 (they look at no times)
        """Fact: times count from ``end`` on."""

    def _taken_in(self, sample: int) -> list[int] | None:
        """What was evicted for it; None: there is no room for it."""
        evicted = self._make_room(sample)
        if evicted is not None:
            self._held[sample] = None
            self._is_held[sample] = True
            self.held_bytes += int(self._lengths[sample])
        return evicted

    @abstractmethod
    def _make_room(self, sample: int) -> list[int] | None:
        """What was evicted for a sample; None: it is not taken in."""

    def _fits(self, sample: int) -> bool:
        return self.held_bytes + int(self._lengths[sample]) <= self.capacity_bytes

    def _evict(self, sample: int) -> int:
        del self._held[sample]
        self._is_held[sample] = False
        self.held_bytes -= int(self._lengths[sample])
        return sample


class NeverEvictCache(SampleCache):
    """CoorDL's rule: what is in memory stays for good; what finds no room is not kept."""

    def _make_room(self, sample: int) -> list[int] | None:
        return [] if self._fits(sample) else None


class FifoCache(SampleCache):
    """DELI's rule: the sample that came first gives way. A hit changes nothing."""

    def _make_room(self, sample: int) -> list[int] | None:
        if int(self._lengths[sample]) > self.capacity_bytes:
            return None
        evicted = []
        while not self._fits(sample):
            evicted.append(self._evict(next(iter(self._held))))
        return evicted

    def fetched(self, sample: int) -> list[int]:
        """Fact: a sample that was fetched before it is asked for has come. Returns what is evicted for it."""
        if self.holds(sample):
            self.renewed(sample)
            return []
        return self._taken_in(sample) or []

    def renewed(self, sample: int) -> None:
        """Fact: a fetch leaves out this sample, since it is here. It counts as if it came now: else it might be evicted
        before it is asked for."""
        self._held.move_to_end(sample)


class LruCache(FifoCache):
    """The sample that was used longest ago gives way."""

    def used(self, sample: int, time: int, uses: Uses) -> bool:
        self.renewed(sample)
        return True


class ImportanceCache(SampleCache):
    """SHADE's, which learns how important each sample is (Algorithm 1, in two phases: the score of a visit exists only
    after the fetch). The *ghost cache* is the score of each sample that was trained with, in memory or not.

    What is in memory leaves for a sample that is at least as important. What was taken in before it had a score
    stays until it has one; what has none is read past a full memory.
    """

    def __init__(self, lengths: Int64Array, capacity_bytes: int) -> None:
        super().__init__(lengths, capacity_bytes)
        self._ghost = np.full(len(lengths), np.nan, dtype=np.float32)
        self._least: list[tuple[float, int]] = []
        """A heap of ``(score, sample)`` of those in memory. Outdated ones stay in it until they come up."""

    def scored(self, samples: Int64Array, scores: NDArray[np.floating]) -> None:
        """Fact: these were trained with, and have these scores from now on."""
        self._ghost[samples] = scores
        for sample in samples[self._is_held[samples]].tolist():
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
            held = np.flatnonzero(self._is_held & ~np.isnan(self._ghost))
            held = held[np.argsort(self._ghost[held], kind="stable")]
            self._least = list(zip(self._ghost[held].tolist(), held.tolist(), strict=True))

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
