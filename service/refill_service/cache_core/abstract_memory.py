"""What do an owner's slots hold in one epoch, and which samples are consumed?

The local access protocol: take, self-invalidation, refill, never evict (Redox Algorithms 1-3, Brand 3.3). This
file holds state of one byte for each sample of the share and eight for each slot; bytes of samples are elsewhere.
"""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

from refill_service.cache_core.policies.interface import Read
from refill_service.cache_core.refill_policies import RefillChoice
from refill_service.cache_core.sample_mapping import AbstractMapping, Int64Array

__all__ = ["AbstractMemory"]

_EMPTY = -1


class AbstractMemory:
    """The abstract chunks of one owner.

    A sample is *consumed* from the moment that it fills a slot: it will be delivered from there (Redox 3.3).
    A slot may be filled by an order whose bytes are still on their way; ``resident`` says when they are here.

    :param members: which local samples the epoch asks for, ``(num_samples,)``; None for all.
    """

    def __init__(
        self,
        mapping: AbstractMapping,
        choose: RefillChoice,
        generator: random.Random,
        members: NDArray[np.bool_] | None = None,
    ) -> None:
        share, size = mapping.share, mapping.chunk_size
        self.mapping = mapping
        self._choose = choose
        self._generator = generator
        self._starts = share.starts - (share.starts[0] if len(share.starts) else 0)
        self._starts_view = np.ascontiguousarray(self._starts).data
        lengths = np.diff(self._starts)
        # Slots past the end of a short chunk hold nothing, ever: consumed from the start.
        self._consumed = np.arange(size)[None, :] >= lengths[:, None]
        if members is not None:
            self._consumed[~self._consumed] = ~members
        self.sample_at = np.full(mapping.num_abstract_chunks * size, _EMPTY, dtype=np.int64)
        """``(M * K,)`` local sample in each slot, -1 where the slot is invalid."""
        self.resident = np.zeros(mapping.num_abstract_chunks * size, dtype=bool)
        """``(M * K,)`` whether the bytes of the slot's sample have arrived."""
        # Indexing a memoryview costs a third of indexing an array; both see the same memory.
        self._sample_at = self.sample_at.data

    def take_one(self, location: int) -> tuple[int, Read | None]:
        """The sample that answers a request for ``location``, and the read of the refill that this needs, if any."""
        sample = self._sample_at[location]
        refill = None
        if sample < 0:
            refill = self._refill(location)
            sample = self._sample_at[location]
        self._sample_at[location] = _EMPTY
        return sample, refill

    def take_valid(self, locations: Int64Array) -> Int64Array:
        """Samples of ``locations``, -1 where a slot is invalid or was taken earlier in the same call."""
        samples = self.sample_at[locations]
        # The first to ask for a location gets it: write the order in reverse, so that the first one's stays.
        self.sample_at[locations[::-1]] = np.arange(len(locations) - 1, -1, -1)
        first = self.sample_at[locations] == np.arange(len(locations))
        self.sample_at[locations] = _EMPTY
        return np.where(first, samples, _EMPTY)

    def _refill(self, location: int) -> Read:
        size = self.mapping.chunk_size
        abstract_chunk, slot = divmod(location, size)
        group = self.mapping.group(abstract_chunk)
        slots = slice(abstract_chunk * size, abstract_chunk * size + size)
        consumed = self._consumed[group]
        fillable = ~consumed & (self.sample_at[slots] < 0)
        row = self._choose(fillable, slot, self._generator)
        if row < 0:
            raise RuntimeError(
                f"abstract chunk {abstract_chunk} slot {slot}: asked for more often than its group has samples"
            )
        chunk = group.start + row * (group.step or 1)
        filled = fillable[row].nonzero()[0]
        samples = filled + self._starts[chunk]
        locations = filled + slots.start
        consumed[row, filled] = True
        self.sample_at[locations] = samples
        self.resident[locations] = False
        first, end = self._starts_view[chunk], self._starts_view[chunk + 1]
        return Read(first, end, samples, chunk)

    def arrived(self, read: Read, kept: Int64Array) -> NDArray[np.bool_]:
        """Fact: the bytes of a refill are in memory; those of ``kept`` are right. Returns which of them are in their
        slots now; the others were promised already."""
        locations = self._locations(read.chunk, kept)
        # A slot may have been taken meanwhile, and filled again by a refill that is still under way.
        still_there: NDArray[np.bool_] = self.sample_at[locations] == kept
        self.resident[locations[still_there]] = True
        return still_there

    def evicted(self, locations: Int64Array) -> None:
        """Fact: the bytes of what lies in these slots are gone. They keep their samples, for who asks."""
        self.resident[locations] = False

    def failed(self, read: Read) -> None:
        """Fact: the bytes will not come. Samples still in their slots are unconsumed again.

        The others are assigned to requests already and stay so: who asks again gets the same sample.
        """
        locations = self._locations(read.chunk, read.samples)
        waiting = self.sample_at[locations] == read.samples
        self.sample_at[locations[waiting]] = _EMPTY
        row = self._consumed[read.chunk]
        row[(read.samples - self._starts_view[read.chunk])[waiting]] = False

    def _locations(self, chunk: int, samples: Int64Array) -> Int64Array:
        """Of samples of one chunk."""
        start = self.mapping.abstract_chunk_of(chunk) * self.mapping.chunk_size
        return samples + (start - self._starts_view[chunk])
