"""Which records of a dataset's index does a pod hold that serves a few shares of it? Those of some pieces alone.

A piece is a range of samples. Which blocks of the index hold them, and in which requests these are read, is decided
here, too.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from refill.errors import InvalidInput
from refill_service.cache_core.dataset_index import Int64Array, SampleRecords, UInt64Array

HELD_WHOLE_SAMPLES = 1 << 21
"""Of a dataset with no more than that, a pod holds the records of all: 50 MB."""


def holds_all(num_samples: int, *, is_listed: bool) -> bool:
    """Whether each pod holds the records of all samples of a planned job's dataset: so whoever stands in for a pod that
    is gone reads nothing of the index first. Where ranks have the order in lists, those are made of the whole plan."""
    return is_listed or num_samples <= HELD_WHOLE_SAMPLES


class RecordPieces:
    """Records of the samples ``first[i] <= sample < end[i]``, ascending, one piece after another in the same arrays.

    :param records: offsets, lengths and checksums ``(n,)``; None: :meth:`put` fills them in.
    :param has_checksums: as of :class:`SampleRecords`.

    Raises :class:`InvalidInput` for pieces that overlap.
    """

    def __init__(
        self,
        first: Int64Array,
        end: Int64Array,
        records: tuple[Int64Array, Int64Array, UInt64Array] | None = None,
        *,
        has_checksums: bool = True,
    ) -> None:
        self.has_checksums = has_checksums
        there = end > first
        first, end = first[there], end[there]
        if bool((first[1:] < end[:-1]).any()):
            raise InvalidInput("pieces of an index must not overlap")
        begins = np.concatenate([np.ones(min(1, len(first)), dtype=bool), first[1:] > end[:-1]])
        ends = np.concatenate([begins[1:], np.ones(min(1, len(first)), dtype=bool)])
        self.first, self.end = first[begins], end[ends]
        """``(pieces,)``; neighbours are one."""
        self.starts = np.concatenate([[0], np.cumsum(self.end - self.first)]).astype(np.int64)
        """``(pieces + 1,)`` where each piece begins in the arrays."""
        num_samples = int(self.starts[-1])
        self.offset: Int64Array
        self.length: Int64Array
        self.checksum: UInt64Array
        if records is None:
            self.offset, self.length = (np.empty(num_samples, dtype=np.int64) for _ in range(2))
            self.checksum = np.zeros(num_samples, dtype=np.uint64)
        else:
            self.offset, self.length, self.checksum = records

    def __len__(self) -> int:
        return len(self.offset)

    def put(self, records: SampleRecords) -> None:
        """What is wanted of these."""
        low = int(np.searchsorted(self.end, records.first_sample, side="right"))
        high = int(np.searchsorted(self.first, records.end_sample, side="left"))
        for piece in range(low, high):
            first = max(int(self.first[piece]), records.first_sample)
            end = min(int(self.end[piece]), records.end_sample)
            start = int(self.starts[piece]) + first - int(self.first[piece])
            here, found = slice(start, start + end - first), records.part(first, end)
            self.offset[here], self.length[here] = found.offset, found.length
            if found.has_checksums:  # else memory for them is never touched
                self.checksum[here] = found.checksum

    def part(self, first: int, end: int) -> SampleRecords:
        """The records of samples ``[first, end)``, by id, as views. Raises :class:`InvalidInput` unless all of them are
        of one piece."""
        if not self.covers(first, end):
            raise InvalidInput(f"samples {first}-{end} are not of one piece of the index")
        start = self.place(first) if end > first else 0
        here = slice(start, start + max(0, end - first))
        return SampleRecords(first, self.offset[here], self.length[here], self.checksum[here], self.has_checksums)

    def place(self, sample: int) -> int:
        """Of a sample in the arrays. Raises :class:`InvalidInput` for one that is not there."""
        piece = int(np.searchsorted(self.end, sample, side="right"))
        if piece == len(self.first) or sample < int(self.first[piece]):
            raise InvalidInput(f"sample {sample} is of another piece of the index")
        return int(self.starts[piece]) + sample - int(self.first[piece])

    def places(self, samples: Int64Array) -> Int64Array:
        """The same of samples ``(n,)`` that are all there."""
        piece = np.searchsorted(self.end, samples, side="right")
        found: Int64Array = self.starts[piece] + samples - self.first[piece]
        return found

    def covers(self, first: int, end: int) -> bool:
        """Whether all samples ``[first, end)`` are there."""
        piece = int(np.searchsorted(self.end, first, side="right"))
        return first >= end or (
            piece < len(self.first) and int(self.first[piece]) <= first and end <= int(self.end[piece])
        )

    def between(self, start: int, stop: int) -> RecordPieces:
        """Those at places ``start <= place < stop``, as views."""
        low, high = np.maximum(self.starts[:-1], start), np.minimum(self.starts[1:], stop)
        there = high > low
        first = (self.first + low - self.starts[:-1])[there]
        here = slice(start, stop)
        return RecordPieces(
            first,
            first + (high - low)[there],
            (self.offset[here], self.length[here], self.checksum[here]),
            has_checksums=self.has_checksums,
        )

    def ids(self, start: int, stop: int) -> Int64Array:
        """The samples at places ``start <= place < stop``."""
        places = np.arange(start, stop, dtype=np.int64)
        piece = np.searchsorted(self.starts, places, side="right") - 1
        found: Int64Array = self.first[piece] + places - self.starts[piece]
        return found


Records = SampleRecords | RecordPieces
"""Of all samples between two, or of pieces."""


def block_runs(
    first: Int64Array, end: Int64Array, block_samples: int, most_blocks: int, gap_blocks: int
) -> Iterator[tuple[int, int]]:
    """The blocks ``first <= block < end`` of each request that together read all samples ``[first, end)`` of some
    pieces, ascending.

    :param most_blocks: of one request.
    :param gap_blocks: so many that nobody wants are read rather than that another request is made.
    """
    if not len(first):
        return
    low, high = first // block_samples, -(-end // block_samples)
    high = np.maximum.accumulate(high)
    apart = np.flatnonzero(low[1:] - high[:-1] > gap_blocks) + 1
    bounds: tuple[NDArray[np.int64], ...] = (np.concatenate([[0], apart]), np.concatenate([apart, [len(first)]]) - 1)
    for start, stop in zip(low[bounds[0]].tolist(), high[bounds[1]].tolist(), strict=True):
        for begin in range(start, stop, most_blocks):
            yield begin, min(stop, begin + most_blocks)
