"""What does a sampler yield in place of an index? The name of one request of a rank."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from refill.errors import InvalidInput

_NO_BATCH = (
    "a sampler of refill yields positions one by one, and batches of them are the DataLoader's: give it sampler= and "
    "batch_size=, not batch_sampler="
)
_NO_INDEX = (
    "a position of refill's samplers is no index: make the sampler of what the DataLoader reads, the CacheDataset or "
    "the Subset of it. A ConcatDataset can't be read by one: give each dataset a DataLoader of its own, or make one "
    "Subset of parts of one dataset"
)


class Position(NamedTuple):
    """What a sampler yields in place of an index: the name of one request of the rank.

    The epoch is part of it, so that persistent workers need not be told of a new one.
    """

    epoch: int
    position: int
    """-1: none; it fills up a batch that another process is left with."""
    iteration: int = 0
    """Of which iteration of the sampler (:mod:`refill.loops.hole_guard`); 0: not known."""
    rank: int = -1
    """Whose position it is; -1: that of the dataset's own rank."""
    job: int = 0
    """The number of its job (:func:`job_number`); 0: not known."""
    sample: int = -1
    """Which sample is wanted there; -1: pods know."""

    def __index__(self) -> int:
        raise InvalidInput(_NO_INDEX)

    def __iter__(self) -> Iterator[Any]:
        # A loader that takes it for a batch would read samples by the numbers that it is made of.
        raise InvalidInput(_NO_BATCH)

    def __reduce__(self) -> tuple[Any, ...]:
        return Position, self[:]

    def __lt__(self, other: object) -> bool:
        if isinstance(other, int):  # as a ConcatDataset compares an index
            raise InvalidInput(_NO_INDEX)
        return tuple.__lt__(self, other)  # type: ignore[operator]  # says itself what it can't compare with

    def __eq__(self, other: object) -> bool:
        """Whether both name the same request, in whichever iteration."""
        return isinstance(other, Position) and self._request == other._request

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._request)

    @property
    def _request(self) -> tuple[int, int, int]:
        return self.epoch, self.position, self.rank


def job_number(job: str) -> int:
    """Of a job's name: positions carry it, so that none is asked of another job than its sampler's."""
    return 1 + zlib.crc32(job.encode())
