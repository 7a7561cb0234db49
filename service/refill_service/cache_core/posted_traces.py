"""Which traces have the ranks of a job posted, and how much of its memory do they take?

They are the one thing that a pod keeps for each position, of all ranks and for as long as an epoch can be asked for. So
a job whose order is explicit sets memory aside for them, and a trace that does not fit there is refused before it has
come: a trace is as long as a client says, not as the dataset is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from refill.errors import MemoryTooSmall, PodBusy
from refill_service.cache_core.epoch_order import IdArray
from refill_service.cache_core.sample_mapping import Int64Array

__all__ = ["PostedTraces", "trace_memory"]

_PART_OF_MEMORY = 4
_LEAST_BYTES = 1 << 20
_EPOCHS = 4
"""The one before, the one that is asked for, the next one; and the one whose traces come."""
_TIMES_DATASET = 2
"""An epoch may ask for each sample so often, on average."""
_ENTRY_BYTES = 256
"""What Python needs for each trace, however short."""


def trace_memory(memory_bytes: int, num_samples: int) -> int:
    """What a job of so many bytes sets aside for traces."""
    wanted = _TIMES_DATASET * _EPOCHS * num_samples * _position_bytes(num_samples)
    return min(memory_bytes // _PART_OF_MEMORY, max(_LEAST_BYTES, wanted))


def _position_bytes(num_samples: int) -> int:
    """The id; the id among the epoch's members, and its place there; whether it repeats one."""
    id_bytes = _dtype(num_samples).itemsize
    return 2 * id_bytes + 4 + 1


def _dtype(num_samples: int) -> np.dtype[np.signedinteger[Any]]:
    return np.dtype(np.int32 if num_samples < 2**31 else np.int64)


class PostedTraces:
    """Of one job at one pod."""

    def __init__(self, num_samples: int, limit_bytes: int) -> None:
        self.used_bytes = 0
        self.dtype = _dtype(num_samples)
        self._limit_bytes = limit_bytes
        self._position_bytes = _position_bytes(num_samples)
        self._arriving_bytes = 0
        self._posted: dict[int, dict[int, IdArray]] = {}

    @property
    def most_positions(self) -> int:
        """Of one trace, if there is no other."""
        return max(0, self._limit_bytes - _ENTRY_BYTES) // self._position_bytes

    @property
    def epochs(self) -> list[int]:
        return sorted(self._posted)

    def of_epoch(self, epoch: int) -> Mapping[int, IdArray]:
        return self._posted.get(epoch, {})

    @contextmanager
    def arriving(self, num_positions: int) -> Iterator[Arriving]:
        """For the time in which a trace of so many positions comes. Raises what :meth:`Arriving.grow` raises."""
        arriving = Arriving(self)
        try:
            arriving.grow(num_positions)
            yield arriving
        finally:
            self._arriving_bytes -= arriving.size_bytes

    def put(self, epoch: int, rank: int, sample_ids: IdArray) -> None:
        """Fact: the rank asks for these."""
        posted = self._posted.setdefault(epoch, {})
        if rank in posted:
            self.used_bytes -= self._size_bytes(len(posted[rank]))
        posted[rank] = sample_ids.astype(self.dtype, copy=sample_ids.base is not None)
        self.used_bytes += self._size_bytes(len(sample_ids))

    def replace(self, epoch: int, traces: Mapping[int, Int64Array]) -> None:
        """Fact: these are all of an epoch."""
        self.forget(epoch)
        for rank, sample_ids in traces.items():
            self.put(epoch, rank, sample_ids)

    def forget(self, epoch: int) -> None:
        for sample_ids in self._posted.pop(epoch, {}).values():
            self.used_bytes -= self._size_bytes(len(sample_ids))

    def _size_bytes(self, num_positions: int) -> int:
        return _ENTRY_BYTES + num_positions * self._position_bytes


class Arriving:
    """The room of a trace that comes."""

    def __init__(self, posted: PostedTraces) -> None:
        self.size_bytes = 0
        self._posted = posted

    def grow(self, num_positions: int) -> None:
        """It has so many positions. Raises :class:`MemoryTooSmall`, or :class:`PodBusy` when there will be room after
        others have come."""
        posted = self._posted
        size_bytes = posted._size_bytes(num_positions)
        if posted.used_bytes + size_bytes > posted._limit_bytes:
            raise MemoryTooSmall(
                f"a trace of {num_positions:,} positions takes {size_bytes:,} bytes, and the job has "
                f"{max(0, posted._limit_bytes - posted.used_bytes):,} of {posted._limit_bytes:,} left for traces: give "
                "it more memory_bytes, or post shorter traces",
                limit_bytes=posted._limit_bytes,
                used_bytes=posted.used_bytes,
            )
        others_bytes = posted._arriving_bytes - self.size_bytes
        if posted.used_bytes + others_bytes + size_bytes > posted._limit_bytes:
            raise PodBusy(f"other traces of the job are coming, {others_bytes:,} bytes of them: post it again")
        posted._arriving_bytes += size_bytes - self.size_bytes
        self.size_bytes = size_bytes
