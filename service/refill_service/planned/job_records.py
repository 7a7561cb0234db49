"""Which records of its dataset's index does a planned job hold at one pod? Those of its shares, and of what it stands
in for.

Of a small dataset it holds all: then whoever stands in for a pod that is gone reads nothing of the index first. So it
does where ranks have the order in lists, which the whole plan is made for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from refill_service.cache_core.dataset_index import SampleRecords
from refill_service.cache_core.planned.shares import Shares
from refill_service.cache_core.record_pieces import RecordPieces, Records
from refill_service.cache_core.sample_mapping import ChunkLayout, Int64Array
from refill_service.datasets.dataset_reader import Dataset


class JobRecords:
    """The index's records that a planned job has at this pod, and those it loads to answer for others.

    :param own: the records of all of this pod's shares, or of all samples.
    """

    def __init__(
        self, dataset: Dataset, layout: ChunkLayout, shares: Shares, own_shares: Sequence[int], own: Records
    ) -> None:
        self.shares, self.own = shares, own
        self._dataset, self._layout = dataset, layout
        self._own_shares = frozenset(own_shares)
        self._holds_all = len(own) == layout.num_samples
        self.of_others: dict[int, RecordPieces] = {}
        self._loading = asyncio.Lock()

    @classmethod
    async def load(
        cls, dataset: Dataset, layout: ChunkLayout, shares: Shares, own_shares: Sequence[int], *, whole: bool
    ) -> JobRecords:
        """Errors as of :meth:`Dataset.load_records`."""
        own: Records
        if whole:
            own = await dataset.load_records(0, dataset.num_samples)
        else:
            own = await dataset.load_pieces(*await asyncio.to_thread(shares.pieces, own_shares))
        return cls(dataset, layout, shares, own_shares, own)

    def of_own_shares(self) -> Records:
        """What the pinned tier may keep: bytes that nobody asks of another pod."""
        if not self._holds_all or len(self._own_shares) == self.shares.num_shares:
            return self.own
        found = RecordPieces(*self.shares.pieces(sorted(self._own_shares)), has_checksums=self.own.has_checksums)
        if isinstance(self.own, SampleRecords):
            found.put(self.own)
        return found

    def largest_reach(self) -> int:
        """Bytes of its blob that the largest chunk of this pod's shares takes, from its first sample to its last,
        whatever lies between them."""
        largest = 0
        for number in self._own_shares:
            chunks = self.shares.share(number).chunks
            if len(chunks):
                first, last = (
                    self.own.places(samples)
                    for samples in (self._layout.starts(chunks), self._layout.starts(chunks + 1) - 1)
                )
                reach = self.own.offset[last] + self.own.length[last] - self.own.offset[first]
                if self._dataset.index.header.overlaps:  # what is kept of it may be more
                    ends = np.concatenate([[0], np.cumsum(self.own.length)])
                    reach = np.maximum(reach, ends[last + 1] - ends[first])
                largest = max(largest, int(reach.max()))
        return largest

    async def hold(self, number: int) -> None:
        """Have the records of a share. Errors as of :meth:`Dataset.load_records`."""
        async with self._loading:
            if not self._holds(number):
                pieces = await asyncio.to_thread(self.shares.pieces, [number])
                self.of_others[number] = await self._dataset.load_pieces(*pieces)

    def forget(self, number: int) -> None:
        """Fact: this pod stands in for a share no more."""
        if (records := self.of_others.pop(number, None)) is not None:
            self._dataset.records_left(len(records))

    def of_share(self, number: int) -> Records:
        """Of a share that is held, and perhaps of others."""
        return self.of_others.get(number, self.own)

    def lengths_of(self, samples: Int64Array) -> Int64Array:
        """Bytes of samples ``(n,)`` of one share that is held."""
        if self._holds_all:
            return self.own.length[samples]
        if not len(samples):
            return np.empty(0, dtype=np.int64)
        number = int(self.shares.share_of(self._layout.locate(samples[:1])[0])[0])
        records = self.of_share(number)
        return records.length[records.places(samples)]

    async def of_samples(self, samples: Int64Array) -> Records:
        """Of any samples of the dataset, ``(n,)``: read for one answer, unless they are all here."""
        if self._holds_all:
            return self.own
        first = np.unique(samples)
        return await self._dataset.load_pieces(first, first + 1, kept=False)

    def _holds(self, number: int) -> bool:
        return self._holds_all or number in self._own_shares or number in self.of_others
