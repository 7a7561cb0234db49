"""Which samples does a cache keep that reads them one by one, and looks at the past only?

``never`` evicts nothing (CoorDL, section 4.1): in a random order in which each sample comes once an epoch no other rule
hits more. ``fifo`` is DELI's, ``lru`` a yardstick.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Set

import numpy as np
from numpy.typing import NDArray

from refill_service.cache_core.exact.chunk_caches import ChunkRead
from refill_service.cache_core.exact.known_uses import Uses
from refill_service.cache_core.sample_mapping import Int64Array

__all__ = ["FifoCache", "LruCache", "NeverEvictCache", "SampleCache"]


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

    def steps(self, sample: int) -> int:
        """The work of a request for a sample; 1 where there is nothing to decide."""
        return 1 if sample in self._held else _STEPS_OF_READ

    def planning(self, sample: int, time: int, uses: Uses) -> Iterator[None]:
        """As of :class:`ExactCache`."""
        return iter(())

    def holds(self, sample: int) -> bool:
        return sample in self._held

    def held(self, samples: Int64Array) -> NDArray[np.bool_]:
        """:meth:`holds` of each."""
        return np.fromiter(map(self._held.__contains__, samples.tolist()), dtype=bool, count=len(samples))

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
        evicted = []
        for sample in [each for each in self._held if each not in spared]:
            if self.held_bytes <= self.capacity_bytes:
                break
            evicted.append(self._evict(sample))
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
            self.held_bytes += int(self._lengths[sample])
        return evicted

    @abstractmethod
    def _make_room(self, sample: int) -> list[int] | None:
        """What was evicted for a sample; None: it is not taken in."""

    def _fits(self, sample: int) -> bool:
        return self.held_bytes + int(self._lengths[sample]) <= self.capacity_bytes

    def _evict(self, sample: int) -> int:
        del self._held[sample]
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
