"""What has a rank asked of an epoch so far? Its loader's workers ask out of order, and from anywhere in its trace."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np

from refill_service.cache_core.sample_mapping import Int64Array

__all__ = ["StartedPositions"]


class StartedPositions:
    """Kept as runs, since a rank may begin anywhere: after a resume, or where it left another home."""

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
        """Fact: the rank has asked for these. In any order; most come as one run."""
        if len(positions) == 1:
            position = positions.item()
            if self._ends and self._ends[-1] == position:
                self._ends[-1] += 1
            else:
                self._add(position, position + 1)
            return
        if len(positions) and bool((positions[1:] - positions[:-1] == 1).all()):
            self._add(int(positions[0]), int(positions[-1]) + 1)
            return
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
