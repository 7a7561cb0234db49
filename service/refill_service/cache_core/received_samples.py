"""Which samples came for the positions of a home pod's ranks? Its records for an owner that has lost its memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refill_service.cache_core.sample_mapping import Int64Array

__all__ = ["ReceivedSamples"]


class ReceivedSamples:
    """By epoch, rank and position: 4 bytes a position (8 in datasets of more than 2**31 samples)."""

    def __init__(self) -> None:
        self._received: dict[tuple[int, int], NDArray[np.signedinteger[Any]]] = {}

    def put(self, epoch: int, rank: int, length: int, positions: Int64Array, samples: Int64Array) -> None:
        """Fact: these samples came for these positions. ``length`` is that of the rank's trace."""
        table = self._received.get((epoch, rank))
        wide = len(samples) > 0 and int(samples.max()) >= 2**31 - 1
        if table is None:
            table = np.zeros(length, dtype=np.int64 if wide else np.int32)  # memory comes with its first use
        elif wide and table.dtype != np.int64:
            table = table.astype(np.int64)
        self._received[epoch, rank] = table
        table[positions] = samples + 1

    def epochs(self, rank: int) -> set[int]:
        """The epochs of which the rank has received something."""
        return {epoch for epoch, of_rank in self._received if of_rank == rank}

    def forget(self, before_epoch: int) -> None:
        for key in [key for key in self._received if key[0] < before_epoch]:
            del self._received[key]

    def of_samples(self, first: int, end: int) -> Iterator[tuple[int, int, Int64Array, Int64Array]]:
        """``(epoch, rank, positions, samples)`` of what came of the samples ``[first, end)``."""
        for (epoch, rank), table in self._received.items():
            positions = np.flatnonzero((table > first) & (table <= end))
            yield epoch, rank, positions, table[positions].astype(np.int64) - 1
