"""What has a home pod been sent ahead, and how much more may it be sent? (Redox 3.8, Brand 3.4)

The remote abstract memory: samples that owners sent ahead, each kept for the request that it answers. Room is
*granted* to an owner with each request and stays reserved until its answer is settled, so that owners who answer
at the same time can't exceed the limit together.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable
from typing import Generic, TypeVar

import numpy as np

from refill_service.cache_core.sample_mapping import Int64Array

__all__ = ["RemoteMemory", "StartedPositions"]

Payload = TypeVar("Payload")
Request = tuple[int, int, int]
"""``(epoch, rank, position)``"""


class RemoteMemory(Generic[Payload]):
    """Samples sent ahead for the ranks of one job at one home pod.

    ``used + granted <= capacity`` always holds. A payload is whatever the caller keeps for a sample.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used = 0
        self.granted = 0
        self._held: dict[Request, tuple[int, Payload]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def grant(self, owners_left: int = 1) -> int:
        """Reserve an even part of the free room for one of ``owners_left`` owners that are asked together."""
        room = max(0, self.capacity - self.used - self.granted) // max(1, owners_left)
        self.granted += room
        return room

    def settle(self, room: int, received: Iterable[tuple[Request, int, Payload]] = ()) -> int:
        """The answer that ``room`` was granted for has ended, well or badly; returns how many samples were kept.

        :param received: ``(request, bytes, payload)`` of each sample sent ahead. Raises ValueError when they
            exceed the grant: the owner broke the protocol.
        """
        self.granted -= room
        kept = 0
        for request, size, payload in received:
            room -= size
            if room < 0:
                raise ValueError("an owner sent more ahead than it was granted room for")
            if request not in self._held:
                self._held[request] = (size, payload)
                self.used += size
                kept += 1
        return kept

    def take(self, request: Request) -> Payload | None:
        """The payload that answers a request, which leaves the memory; None when it is not here."""
        entry = self._held.pop(request, None)
        if entry is None:
            return None
        self.used -= entry[0]
        return entry[1]

    def forget(self, rank: int, before_epoch: int) -> Counter[int]:
        """Fact: the rank has left every epoch before this one, so nothing will be asked of them again. Returns how many
        samples of each were never asked for."""
        left = [held for held in self._held if held[1] == rank and held[0] < before_epoch]
        for request in left:
            self.take(request)
        return Counter(epoch for epoch, _, _ in left)

    def held(self, epoch: int) -> Counter[int]:
        """How many samples are here for each rank."""
        return Counter(rank for of_epoch, rank, _ in self._held if of_epoch == epoch)


class StartedPositions:
    """Up to where a rank has asked for every position; batches of several workers come out of order.

    Kept as runs, since a rank may begin anywhere: after a resume, or where it left another home.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    @property
    def below(self) -> int:
        """Every position below this one was asked for."""
        return self._ends[0] if self._starts and self._starts[0] == 0 else 0

    @property
    def end(self) -> int:
        """No position from this one on was asked for."""
        return self._ends[-1] if self._ends else 0

    @property
    def count(self) -> int:
        """How many positions were asked for."""
        return sum(self._ends) - sum(self._starts)

    def first_gap(self) -> tuple[int, int] | None:
        """``(start, end)`` of the first run that was not asked for, while something below and above it was."""
        return (self._ends[0], self._starts[1]) if len(self._starts) > 1 else None

    def missing(self, start: int, end: int) -> tuple[int, int] | None:
        """The first part of ``[start, end)`` that was not asked for."""
        run = bisect_right(self._starts, start) - 1
        if run >= 0:
            start = max(start, self._ends[run])
        following = self._starts[run + 1] if run + 1 < len(self._starts) else end
        return (start, min(end, following)) if start < min(end, following) else None

    @property
    def first(self) -> int:
        """The first position that was asked for; 0 when none was."""
        return self._starts[0] if self._starts else 0

    def __contains__(self, position: int) -> bool:
        run = bisect_right(self._starts, position) - 1
        return run >= 0 and position < self._ends[run]

    def started(self, positions: Int64Array) -> None:
        ordered = np.unique(positions)
        breaks = np.flatnonzero(np.diff(ordered) != 1)
        starts = ordered[np.concatenate([[0], breaks + 1])] if len(ordered) else ordered
        ends = ordered[np.concatenate([breaks, [-1]])] + 1 if len(ordered) else ordered
        for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
            self._add(start, end)

    def _add(self, start: int, end: int) -> None:
        """Joined with all runs that it overlaps or touches."""
        first = bisect_left(self._ends, start)
        last = bisect_right(self._starts, end)
        if first < last:
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
