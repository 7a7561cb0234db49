"""Which positions are there? Spans of positions in a row, which loops ask for mostly in order."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from refill.protocol.wire_format import Int64Array

_FEW = 64
"""Of so many Python is done before numpy is."""
_FEW_OF = 128
"""Or of this part of those that there are."""


class PositionSet:
    """Positions as spans ``[first, end)``, ascending, none beside another."""

    def __init__(self, spans: Iterable[tuple[int, int]] = ()) -> None:
        self._firsts: list[int] = []
        self._ends: list[int] = []
        self.count = 0
        """Positions that are there."""
        for first, end in spans:
            self.add(first, end)

    def copy(self) -> PositionSet:
        found = PositionSet()
        found._firsts, found._ends, found.count = self._firsts.copy(), self._ends.copy(), self.count
        return found

    def to_array(self) -> Int64Array:
        """``(n, 2)``: the spans."""
        return np.stack([np.array(part, dtype=np.int64) for part in (self._firsts, self._ends)], axis=1)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._firsts, self._ends, strict=True)

    def __len__(self) -> int:
        """How many spans."""
        return len(self._firsts)

    @property
    def end(self) -> int:
        """Behind the last position; 0: there is none."""
        return self._ends[-1] if self._ends else 0

    def first_gap(self) -> tuple[int, int] | None:
        """The first positions ``[start, end)`` that are not there, between others that are; None: there are none."""
        return (self._ends[0], self._firsts[1]) if len(self) > 1 else None

    def add(self, first: int, end: int) -> None:
        if first >= end:
            return
        low, high = bisect_left(self._ends, first), bisect_right(self._firsts, end)
        if low < high:
            first, end = min(first, self._firsts[low]), max(end, self._ends[high - 1])
            self.count -= sum(self._ends[low:high]) - sum(self._firsts[low:high])
        self.count += end - first
        self._firsts[low:high], self._ends[low:high] = [first], [end]

    def add_all(self, positions: Int64Array) -> None:
        """``(n,)`` in any order."""
        self.add_spans(spans_of(positions))

    def add_spans(self, spans: Sequence[tuple[int, int]] | Int64Array) -> None:
        """``(n, 2)`` spans ``[first, end)``, in any order. Many are put in at once: one by one each would move all that
        lie behind it."""
        if len(spans) <= max(_FEW, len(self) // _FEW_OF):
            for first, end in spans.tolist() if isinstance(spans, np.ndarray) else spans:
                self.add(first, end)
            return
        new = np.asarray(spans, dtype=np.int64)
        new = new[new[:, 1] > new[:, 0]]
        firsts, ends = (
            np.concatenate([np.array(known, dtype=np.int64), new[:, column]])
            for column, known in enumerate((self._firsts, self._ends))
        )
        in_order = np.argsort(firsts, kind="stable")
        firsts, ends = firsts[in_order], np.maximum.accumulate(ends[in_order])
        begins = np.flatnonzero(np.append(True, firsts[1:] > ends[:-1])) if len(firsts) else in_order
        firsts, ends = firsts[begins], ends[np.append(begins[1:] - 1, -1)] if len(begins) else ends
        self._firsts, self._ends = firsts.tolist(), ends.tolist()
        self.count = int((ends - firsts).sum())

    def keep_last(self, num_spans: int) -> None:
        """Forget all but so many."""
        del self._firsts[:-num_spans], self._ends[:-num_spans]
        self.count = sum(self._ends) - sum(self._firsts)

    def first_missing(self, start: int, end: int) -> tuple[int, int] | None:
        """The first span of ``[start, end)`` that is not there; None: all of it is."""
        place = bisect_right(self._ends, start)
        if place < len(self._firsts) and self._firsts[place] <= start:
            start = self._ends[place]
            place += 1
        if start >= end:
            return None
        return start, min(end, self._firsts[place]) if place < len(self._firsts) else end

    def has_any(self, start: int, end: int) -> bool:
        place = bisect_right(self._ends, start)
        return start < end and place < len(self._firsts) and self._firsts[place] < end


def spans_of(positions: Int64Array) -> list[tuple[int, int]]:
    """``(n,)`` in any order, some perhaps twice, as spans ``[first, end)``, ascending."""
    first, last = (int(positions[0]), int(positions[-1])) if len(positions) else (0, -1)
    if last - first == len(positions) - 1 and (positions[1:] > positions[:-1]).all():  # as most are
        return [(first, last + 1)] if len(positions) else []
    if len(positions) > _FEW:
        found = np.sort(positions)
        breaks = np.flatnonzero(found[1:] > found[:-1] + 1)
        firsts, ends = found[np.append(0, breaks + 1)], found[np.append(breaks, -1)] + 1
        return list(zip(firsts.tolist(), ends.tolist(), strict=True))
    spans: list[tuple[int, int]] = []
    for position in sorted(set(positions.tolist())):
        if spans and spans[-1][1] == position:
            spans[-1] = spans[-1][0], position + 1
        else:
            spans.append((position, position + 1))
    return spans
