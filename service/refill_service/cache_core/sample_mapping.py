"""Where does a sample live? Sample <-> chunk <-> abstract chunk and slot, and the pod that owns it.

A chunk is K consecutive samples of one blob; the last chunk of a blob may be shorter. The chunks of a dataset
are dealt to the pods in contiguous shares, so that a pod loads one contiguous share of the index and every pod
can find a sample's owner from the blob table alone. Within its share an owner groups chunks into abstract chunks
(Brand 3.2, "Mapping from Chunk to Abstract Chunk"); how many it forms is its own business, since nobody else
needs to know.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from refill.errors import InvalidInput

Int64Array = NDArray[np.int64]


class ChunkLayout:
    """The chunks of a dataset for one chunk size.

    :param first_sample: ``(num_blobs + 1,)``, the first sample id of each blob, then the number of samples.
    :param chunk_size: K. Raises :class:`InvalidInput` when no blob holds that many samples.
    """

    def __init__(self, first_sample: Int64Array, chunk_size: int) -> None:
        per_blob = np.diff(first_sample)
        largest = int(per_blob.max(initial=0))
        if chunk_size > largest:
            raise InvalidInput(
                f"chunk size {chunk_size} is larger than every blob (the largest holds {largest} samples): "
                f"choose chunk_size <= {largest}, or pack again with a larger --blob-size"
            )
        self.chunk_size = chunk_size
        self.first_sample = np.ascontiguousarray(first_sample, dtype=np.int64)
        self.first_chunk = np.concatenate([[0], np.cumsum(-(-per_blob // chunk_size))]).astype(np.int64)
        self.num_samples = int(first_sample[-1])
        self.num_chunks = int(self.first_chunk[-1])

    def locate(self, samples: Int64Array) -> tuple[Int64Array, Int64Array]:
        """``(chunk, slot)`` of each sample; slots are ``0 <= slot < K``."""
        if len(self.first_sample) == 2:  # one blob: no search
            return samples // self.chunk_size, samples % self.chunk_size
        blob = np.searchsorted(self.first_sample, samples, side="right") - 1
        in_blob = samples - self.first_sample[blob]
        return self.first_chunk[blob] + in_blob // self.chunk_size, in_blob % self.chunk_size

    def starts(self, chunks: Int64Array) -> Int64Array:
        """First sample id of each chunk; ``num_chunks`` gives the number of samples."""
        blob = np.searchsorted(self.first_chunk, chunks, side="right") - 1
        blob = np.minimum(blob, len(self.first_sample) - 2)
        start = self.first_sample[blob] + (chunks - self.first_chunk[blob]) * self.chunk_size
        return np.minimum(start, self.num_samples)

    def owner_bounds(self, num_pods: int) -> Int64Array:
        """``(num_pods + 1,)`` sample ids: pod p owns ``bounds[p] <= sample < bounds[p + 1]``, in whole chunks."""
        return self.starts(np.arange(num_pods + 1, dtype=np.int64) * self.num_chunks // num_pods)

    def share(self, pod: int, num_pods: int) -> OwnerShare:
        """The share of pod ``pod``; empty when there are fewer chunks than pods."""
        first, end = pod * self.num_chunks // num_pods, (pod + 1) * self.num_chunks // num_pods
        starts = self.starts(np.arange(first, end + 1, dtype=np.int64))
        return OwnerShare(self, first, end, starts)


@dataclass(frozen=True)
class OwnerShare:
    """The chunks ``first_chunk <= chunk < end_chunk`` that one pod owns.

    *Local* ids count from the start of the share: local sample 0 is sample ``first_sample``.
    """

    layout: ChunkLayout
    first_chunk: int
    end_chunk: int
    starts: Int64Array
    """``(num_chunks + 1,)`` first sample id of each chunk of the share, then the end of the last."""

    @property
    def num_chunks(self) -> int:
        return self.end_chunk - self.first_chunk

    @property
    def first_sample(self) -> int:
        return int(self.starts[0])

    @cached_property
    def local_starts(self) -> Int64Array:
        """``(num_chunks + 1,)`` the same as ``starts``, local."""
        return self.starts - self.first_sample if self.first_sample else self.starts

    @property
    def end_sample(self) -> int:
        return int(self.starts[-1])

    @property
    def num_samples(self) -> int:
        return self.end_sample - self.first_sample

    @property
    def last_of_blobs(self) -> Int64Array:
        """Of the share's chunks, counted from its first one, those that are the last of their blobs: no others may have
        fewer than K samples. One may be named twice."""
        last = self.layout.first_chunk[1:] - 1 - self.first_chunk
        return last[(last >= 0) & (last < self.num_chunks)]

    def holds(self, samples: Int64Array) -> NDArray[np.bool_]:
        return (samples >= self.first_sample) & (samples < self.end_sample)


class AbstractMapping:
    """Says which slot of which abstract chunk each local sample of a share maps to.

    The share's C chunks form M groups of almost equal size, so that every abstract chunk is asked equally often.

    :param num_abstract_chunks: M, ``1 <= M <= C`` (0 for an empty share).
    :param group_order: ``consecutive`` chunks share an abstract chunk, or ``interleaved`` ones.
    """

    def __init__(self, share: OwnerShare, num_abstract_chunks: int, group_order: str = "consecutive") -> None:
        self.share = share
        self.chunk_size = share.layout.chunk_size
        self._num_chunks = max(1, share.num_chunks)
        self.num_abstract_chunks = num_abstract_chunks
        self.interleaved = group_order == "interleaved"

    @property
    def group_size(self) -> int:
        """S, chunks of the largest group."""
        return -(-self.share.num_chunks // max(1, self.num_abstract_chunks))

    def locations(self, local_samples: Int64Array) -> Int64Array:
        """``abstract chunk * K + slot`` of each local sample."""
        chunks, slots = self.share.layout.locate(local_samples + self.share.first_sample)
        return self.abstract_chunks_of(chunks - self.share.first_chunk) * self.chunk_size + slots

    def abstract_chunk_of(self, chunk: int) -> int:
        if self.interleaved:
            return chunk % self.num_abstract_chunks
        return chunk * self.num_abstract_chunks // self._num_chunks

    def abstract_chunks_of(self, chunks: Int64Array) -> Int64Array:
        """The abstract chunk of each chunk, counted from the start of the share."""
        if self.interleaved:
            return chunks % self.num_abstract_chunks
        return chunks * self.num_abstract_chunks // self._num_chunks

    def group(self, abstract_chunk: int) -> slice:
        """The chunks of a group, as a slice over the share's chunks: a view, never a copy."""
        num_chunks, num_groups = self.share.num_chunks, self.num_abstract_chunks
        if self.interleaved:
            return slice(abstract_chunk, num_chunks, num_groups)
        return slice(-(-abstract_chunk * num_chunks // num_groups), -(-(abstract_chunk + 1) * num_chunks // num_groups))


def abstract_chunks_for_budget(num_chunks: int, chunk_bytes: float, budget_bytes: int) -> int:
    """M such that one chunk of every group fits: budget / chunk bytes, at most ``num_chunks`` (Brand 3.2).

    :param chunk_bytes: mean bytes of a chunk. Returns 0 when the budget does not hold one.
    """
    return min(num_chunks, int(budget_bytes // max(chunk_bytes, 1.0)))
