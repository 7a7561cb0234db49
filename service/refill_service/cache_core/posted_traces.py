"""Which traces have the ranks of a job posted, and how much of its memory do they take?

They are the one thing that a pod keeps for each position, of all ranks and for as long as an epoch can be asked for. So
a job whose order is explicit sets memory aside for them, and a trace that does not fit there is refused before it has
come: a trace is as long as a client says, not as the dataset is. Several epochs of them are kept at once: a job without
room for so many of the size of its first is refused then, not when it has trained for hours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from refill.errors import MemoryTooSmall, PodBusy
from refill_service.cache_core.epoch_order import IdArray

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
    return min(memory_bytes // _PART_OF_MEMORY, _most_memory(num_samples))


def memory_with_traces(memory_bytes: int, num_samples: int) -> int:
    """With what memory a job has so many bytes left, and all that it can use for traces."""
    for_traces = _most_memory(num_samples)
    return max(memory_bytes + for_traces, _PART_OF_MEMORY * for_traces)


def _most_memory(num_samples: int) -> int:
    """More is not set aside, however much the job has."""
    return max(_LEAST_BYTES, _TIMES_DATASET * _EPOCHS * num_samples * _position_bytes(num_samples))


def _position_bytes(num_samples: int) -> int:
    """The id; the id among the epoch's members, and its place there; whether it repeats one."""
    return 2 * _dtype(num_samples).itemsize + 4 + 1


def _dtype(num_samples: int) -> np.dtype[np.signedinteger[Any]]:
    return np.dtype(np.int32 if num_samples < 2**31 else np.int64)


class PostedTraces:
    """Holds the traces that the ranks of one job have posted to a pod, within a bound of memory.

    :param num_epochs: of the whole job; 0: nobody knows.
    """

    def __init__(
        self,
        num_samples: int,
        limit_bytes: int,
        *,
        world_size: int = 1,
        num_epochs: int = 0,
    ) -> None:
        self.used_bytes = 0
        self.make_room: Callable[[], None] = lambda: None
        """Forgets epochs that nobody can ask for any more."""
        self.dtype = _dtype(num_samples)
        self._limit_bytes = limit_bytes
        self._most_bytes = _most_memory(num_samples)
        self._world_size = world_size
        self._kept_epochs = min(_EPOCHS, num_epochs or _EPOCHS)
        self._first_epoch = -1
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
    def arriving(self, num_positions: int, new_epoch: int) -> Iterator[Arriving]:
        """For the time in which a trace of so many positions comes. Raises what :meth:`grow` raises.

        :param new_epoch: for which it is posted.
        """
        if not self._posted:
            self._first_epoch = new_epoch
        arriving = Arriving(self, is_first=new_epoch == self._first_epoch)
        try:
            arriving.grow(num_positions)
            yield arriving
        finally:
            self._arriving_bytes -= arriving.size_bytes

    def grow(self, arriving: Arriving, num_positions: int) -> None:
        """Fact: a trace that comes has so many positions. Raises :class:`MemoryTooSmall`, or :class:`PodBusy` when
        there will be room after others have come."""
        size_bytes = self._size_bytes(num_positions)
        if self.used_bytes + size_bytes > self._limit_bytes:
            self.make_room()
        if arriving.is_first:
            used_bytes = sum(self._size_bytes(len(ids)) for ids in self.of_epoch(self._first_epoch).values())
            limit_bytes = self._limit_bytes // self._kept_epochs
        else:
            used_bytes, limit_bytes = self.used_bytes, self._limit_bytes
        if used_bytes + size_bytes > limit_bytes:
            raise MemoryTooSmall(
                self._epochs_do_not_fit(num_positions, used_bytes + size_bytes)
                if arriving.is_first
                else f"a trace of {num_positions:,} positions takes {size_bytes:,} bytes, and the job has "
                f"{max(0, limit_bytes - used_bytes):,} of {limit_bytes:,} left for traces: give it more memory_bytes, "
                "or post shorter traces",
                limit_bytes=self._limit_bytes,
                used_bytes=self.used_bytes,
            )
        others_bytes = self._arriving_bytes - arriving.size_bytes
        if used_bytes + others_bytes + size_bytes > limit_bytes:
            raise PodBusy(f"other traces of the job are coming, {others_bytes:,} bytes of them: post it again")
        self._arriving_bytes += size_bytes - arriving.size_bytes
        arriving.size_bytes = size_bytes

    def _epochs_do_not_fit(self, num_positions: int, epoch_bytes: int) -> str:
        """:param epoch_bytes: of the epoch's traces that have come, and this one."""
        # Ranks usually ask for as many each.
        likely_bytes = max(epoch_bytes, self._world_size * self._size_bytes(num_positions))
        needed_bytes = self._kept_epochs * likely_bytes
        help_ = (
            f"give it {_PART_OF_MEMORY * needed_bytes:,} memory_bytes"
            if needed_bytes <= self._most_bytes
            else f"post shorter traces, of {self._most_bytes // self._kept_epochs // self._position_bytes:,} "
            "positions an epoch at most"
        )
        return (
            f"a trace of {num_positions:,} positions for each of {self._world_size} ranks takes {likely_bytes:,} "
            f"bytes an epoch, {self._kept_epochs} epochs are kept at once, and the job has "
            f"{self._limit_bytes:,} for traces: {help_}"
        )

    def put(self, epoch: int, rank: int, sample_ids: IdArray) -> None:
        """Fact: the rank asks for these."""
        posted = self._posted.setdefault(epoch, {})
        if rank in posted:
            self.used_bytes -= self._size_bytes(len(posted[rank]))
        posted[rank] = sample_ids.astype(self.dtype, copy=sample_ids.base is not None)
        self.used_bytes += self._size_bytes(len(sample_ids))

    def forget(self, epoch: int) -> None:
        for sample_ids in self._posted.pop(epoch, {}).values():
            self.used_bytes -= self._size_bytes(len(sample_ids))

    def _size_bytes(self, num_positions: int) -> int:
        return _ENTRY_BYTES + num_positions * self._position_bytes


class Arriving:
    """The room of a trace that comes.

    :param is_first: it is of the job's first epoch.
    """

    def __init__(self, posted: PostedTraces, *, is_first: bool) -> None:
        self.size_bytes = 0
        self._posted = posted
        self.is_first = is_first

    def grow(self, num_positions: int) -> None:
        """It has so many positions. Errors as those of :meth:`PostedTraces.grow`."""
        self._posted.grow(self, num_positions)
