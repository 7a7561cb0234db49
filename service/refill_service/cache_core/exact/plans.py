"""Which samples of a chunk that is read now stay in memory, and until when?

A chunk costs one GET, whatever is kept of it. Keeping a sample until its next use saves that use a GET of the whole
chunk, and costs memory for as long. With a *price* for memory (GETs for each byte and unit of time), the cheapest plan
for one chunk can be told without looking at the others; what ties them together is the price, which moves until the
plans of all chunks just fill memory. Both plans below keep every known use before a planned time, the chunk's next GET.

Here ``uses``, ``(m,)`` and ascending, are the times at which samples of the chunk are used after the GET; ``before``,
``(m,)``, the place among them of the same sample's use before, -1 where there is none; ``sizes``, ``(m,)``, are bytes.
If all uses are kept, the sample of each is held for it since the use before, or the time of the GET.
"""

from __future__ import annotations

import numpy as np

from refill_service.cache_core.sample_mapping import Int64Array

__all__ = ["RollingPlan", "renewal", "uses_before"]

_CELLS = 1 << 13
"""Of the table of costs that is made at a time."""
_LEAST_ROWS = 1 << 5
"""Of it, about."""
_FAR = 1 << 8
"""Uses that may be kept from a GET on: beyond, it is first told which can be the next GET of many."""
_MANY = 1 << 6
"""Of these, looked at together."""
_MOST_CELLS = 1 << 17
"""Of work in one piece: 1 to 2 ms."""


def uses_before(samples: Int64Array) -> Int64Array:
    """``(m,)``, ``before`` of uses of these samples, ``(m,)``, in the order of their times."""
    before = np.full(len(samples), -1, dtype=np.int64)
    by_sample = np.argsort(samples, kind="stable")
    again = samples[by_sample[1:]] == samples[by_sample[:-1]]
    before[by_sample[1:][again]] = by_sample[:-1][again]
    return before


def renewal(
    time: int, ends_at: int | None, uses: Int64Array, before: Int64Array, sizes: Int64Array, price: float
) -> int:
    """How many of the uses to keep, so that the cost for each unit of time until the next GET is least.

    The next GET is at the first use that is not kept.

    :param ends_at: when the run ends, so that all may be kept; None: it goes on beyond what is known. Then the last
        known use is not kept, since nobody can say until when that would save a GET.
    """
    holding = np.concatenate([[0.0], np.cumsum((uses - _held_since(time, uses, before)) * sizes)])
    if ends_at is not None:
        ends = np.append(uses, ends_at)
    elif len(uses):
        ends, holding = uses, holding[:-1]
    else:
        return 0
    return int(np.argmin((1 + price * holding) / np.maximum(1, ends - time)))


class RollingPlan:
    """How many of the uses to keep up to the next GET of the cheapest schedule over all that is known of the chunk.

    A schedule is a set of GETs, each at a use; its cost the GETs and the price of what is held between them. Nothing is
    paid for what comes when nothing is known any more. It is found in pieces, so that who has other things to do can do
    them between two.

    What a use adds to what is held falls with the GET before it. So of an earlier GET the next one is no later than of
    a later GET (Monge; Wilber, *The concave least-weight subsequence problem revisited*, 1988), and no others are
    looked at. Where l uses are kept between two GETs and l is large, that is not all of l for each: the next GETs of
    ``_MANY`` uses in a row lie between those of the first and of the last. O(m l / ``_MANY`` + m ``_MANY``).
    """

    def __init__(self, time: int, uses: Int64Array, before: Int64Array, sizes: Int64Array, price: float) -> None:
        self._uses, self._before, self._sizes, self._price = uses, before, sizes, price
        self._since = _held_since(time, uses, before)
        num_uses = len(uses)
        again = before >= 0
        self._after = np.full(num_uses, num_uses, dtype=np.int64)
        """The place of the same sample's next use; the number of uses where there is none."""
        self._after[before[again]] = np.flatnonzero(again)
        self._cheapest = np.zeros(num_uses + 1)
        """From a GET at each use on, that GET included; the last: nothing is known any more."""
        self._end = num_uses
        """From this use on it is known."""
        self._latest = num_uses
        """The next GET of a use before is not later."""

    def go_on(self, most_cells: int = _MOST_CELLS) -> bool:
        """Find a part of it. Returns whether there is more to be found."""
        while self._end and most_cells > 0:
            most_cells -= self._from_near() if self._latest - self._end < _FAR else self._from_far()
        return self._end > 0

    def num_kept(self) -> int:
        """So many of the uses, the first ones. What was not found yet is found first."""
        while self.go_on():
            pass
        costs = self._cheapest.copy()
        costs[1:] += self._price * np.cumsum((self._uses - self._since) * self._sizes)
        return int(np.argmin(costs))

    def _from_near(self) -> int:
        """The cheapest from some more uses on, by the costs of all next GETs of each. Returns the work of it."""
        cheapest, end, latest = self._cheapest, self._end, self._latest
        start = max(0, end - max(1, _CELLS // (latest - end + _LEAST_ROWS)))
        costs = self._price * np.cumsum(self._held(start, end, start, latest), axis=1)
        for each in range(end - 1, start - 1, -1):
            found = cheapest[each + 1 : latest + 1] + costs[each - start, each - start : latest - start]
            best = int(found.argmin())
            cheapest[each], latest = 1 + found[best], each + 1 + best
        self._end, self._latest = start, latest
        return costs.size + (end - start) * _LEAST_ROWS

    def _from_far(self) -> int:
        """The same, if hardly one of them has its next GET among them."""
        cheapest, end, latest = self._cheapest, self._end, self._latest
        start, work = max(0, end - _MANY), 0
        while True:
            from_start = np.cumsum(self._held(start, start + 1, start + 1, latest)[0])
            """To each next GET from the use behind the next one on."""
            work += latest - start
            first = end
            if end - start > 1:
                first += int((cheapest[end : latest + 1] + self._price * from_start[end - start - 2 :]).argmin())
            if end - start == 1 or (end - start) * (latest - first) <= _CELLS:
                break
            start = end - (end - start) // 2

        held = np.empty((end - start, latest - first + 1), dtype=np.int64)
        held[:, 0] = self._held_until(first, start, end, int(from_start[first - start - 2]) if first > start + 1 else 0)
        held[:, 1:] = self._held(start, end, first, latest)
        costs = cheapest[first : latest + 1] + self._price * np.cumsum(held, axis=1)
        found = costs.min(axis=1)

        among = self._price * np.cumsum(self._held(start, end, start, end), axis=1)
        cheapest[start:end] = 1 + found
        latest = first + int(costs[0].argmin())
        if bool(np.triu(cheapest[start + 1 : end] + among[:, :-1] < found[:, None]).any()):
            for each in range(end - 2, start - 1, -1):
                nearest = cheapest[each + 1 : end] + among[each - start, each - start : -1]
                if (best := nearest.min()) < found[each - start]:
                    cheapest[each] = 1 + best
                    latest = each + 1 + int(nearest.argmin()) if each == start else latest
        self._end, self._latest = start, latest
        return work + costs.size + among.size

    def _held(self, start: int, end: int, first: int, latest: int) -> Int64Array:
        """``(end - start, latest - first)``: with the GET before at use ``start + i``, what use ``first + j`` adds to
        what is held; nothing where it is not behind that."""
        from_each, to_each = self._uses[start:end, None], slice(first, latest)
        held = (self._uses[to_each] - np.maximum(from_each, self._since[to_each])) * self._sizes[to_each]
        if first < end:
            held[np.arange(first, latest) <= np.arange(start, end)[:, None]] = 0
        return held

    def _held_until(self, first: int, start: int, end: int, from_start: int) -> Int64Array:
        """``(end - start,)`` what is held from a GET at each of these uses until one at ``first``, behind them.

        :param from_start: from that at the first one.
        """
        uses, before, sizes = self._uses, self._before, self._sizes
        at, after = np.arange(start, end - 1), self._after[start : end - 1]
        # From a GET to one a use later, what had its use before at the first or before it is held for less long.
        shorter = np.empty(end - start, dtype=np.int64)
        shorter[0] = sizes[start + 1 : first][before[start + 1 : first] < start].sum()
        comes = (after > at + 1) & (after < first)
        shorter[1:] = np.where(comes, sizes[np.where(comes, after, 0)], 0)
        shorter[1:] -= np.where(before[at + 1] < at, sizes[at + 1], 0)
        own = (uses[at + 1] - np.maximum(uses[at], self._since[at + 1])) * sizes[at + 1]
        less = np.cumsum(np.cumsum(shorter)[1:] * (uses[at + 1] - uses[at]) + own)
        return np.concatenate([[from_start], from_start - less])


def _held_since(time: int, uses: Int64Array, before: Int64Array) -> Int64Array:
    return np.where(before < 0, time, uses[before]) if len(uses) else uses
