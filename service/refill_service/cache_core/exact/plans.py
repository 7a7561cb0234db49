"""Which samples of a chunk that is read now stay in memory, and until when?

A chunk costs one GET, whatever is kept of it. Keeping a sample until its next use saves that use a GET of the whole
chunk, and costs memory for as long. With a *price* for memory (GETs for each byte and unit of time), the cheapest plan
for one chunk can be told without looking at the others; what ties them together is the price, which moves until the
plans of all chunks just fill memory. Both plans below keep every known use before a planned time, the chunk's next GET.

Here ``uses``, ``(m,)`` and ascending, are the times at which samples of the chunk are used after the GET; ``since``,
``(m,)``, from when on the sample of each is held for it if all before are kept: its use before, or the time of the GET;
``sizes``, ``(m,)``, are bytes.
"""

from __future__ import annotations

import numpy as np

from refill_service.cache_core.sample_mapping import Int64Array

__all__ = ["held_from", "renewal", "rolling"]

_CELLS = 1 << 13
"""Of the table of costs that is made at a time."""
_LEAST_ROWS = 1 << 5
"""Of it, about."""


def held_from(samples: Int64Array, uses: Int64Array, time: int) -> Int64Array:
    """Since when each use's sample is held for it, where ``samples``, ``(m,)``, are those used: each sample's use
    before, or ``time``."""
    since = np.full(len(uses), time, dtype=np.int64)
    by_sample = np.argsort(samples, kind="stable")
    again = samples[by_sample[1:]] == samples[by_sample[:-1]]
    since[by_sample[1:][again]] = uses[by_sample[:-1][again]]
    return since


def renewal(
    time: int, ends_at: int | None, uses: Int64Array, since: Int64Array, sizes: Int64Array, price: float
) -> int:
    """How many of the uses to keep, so that the cost for each unit of time until the next GET is least.

    The next GET is at the first use that is not kept.

    :param ends_at: when the run ends, so that all may be kept; None: it goes on beyond what is known. Then the last
        known use is not kept, since nobody can say until when that would save a GET.
    """
    holding = np.concatenate([[0.0], np.cumsum((uses - since) * sizes)])
    if ends_at is not None:
        ends = np.append(uses, ends_at)
    elif len(uses):
        ends, holding = uses, holding[:-1]
    else:
        return 0
    return int(np.argmin((1 + price * holding) / np.maximum(1, ends - time)))


def rolling(time: int, uses: Int64Array, since: Int64Array, sizes: Int64Array, price: float) -> int:
    """How many of the uses to keep up to the next GET of the cheapest schedule over all that is known of the chunk.

    A schedule is a set of GETs, each at a use; its cost the GETs and the price of what is held between them. Nothing is
    paid for what comes when nothing is known any more.

    What a use adds to what is held falls with the GET before it. So of an earlier GET the next one is no later than of
    a later GET (Monge; Wilber, *The concave least-weight subsequence problem revisited*, 1988), and no others are
    looked at: O(m l), where l uses are kept between two GETs at most.
    """
    num_uses = len(uses)
    cheapest = np.zeros(num_uses + 1)
    """From a GET at each use on, that GET included; the last: nothing is known any more."""
    end, latest = num_uses, num_uses
    while end:
        start = max(0, end - max(1, _CELLS // (latest - end + _LEAST_ROWS)))
        costs = price * _held_from_each(start, end, latest, uses, since, sizes)
        for each in range(end - 1, start - 1, -1):
            found = cheapest[each + 1 : latest + 1] + costs[each - start, each - start : latest - start]
            best = int(found.argmin())
            cheapest[each], latest = 1 + found[best], each + 1 + best
        end = start
    cheapest[1:] += price * np.cumsum((uses - since) * sizes)
    return int(np.argmin(cheapest))


def _held_from_each(
    start: int, end: int, latest: int, uses: Int64Array, since: Int64Array, sizes: Int64Array
) -> Int64Array:
    """``(end - start, latest - start)``: with GETs at uses ``start + i`` and, as the next one, ``start + j + 1``, what
    is held between them; nothing where j <= i."""
    from_each, to_each = uses[start:end, None], np.arange(start, latest)
    held = (uses[start:latest] - np.maximum(from_each, since[start:latest])) * sizes[start:latest]
    held[to_each <= np.arange(start, end)[:, None]] = 0
    return np.cumsum(held, axis=1)
