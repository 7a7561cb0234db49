"""When will samples be used again? What is known of it: the order of this epoch, and of the next one.

A *use* is a request for a sample. Its *time* counts the requests of all epochs: epoch * requests of an epoch + place.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from refill_service.cache_core.sample_mapping import Int64Array

__all__ = ["KnownUses"]


class KnownUses:
    """The times at which each sample is used, for orders in which a sample may come never, once or often.

    :param num_samples: of the share; samples are counted from its start.
    :param orders: by epoch, ``(requests,)`` the samples asked for, in their order.
    :param first_time: of the first request of the first of these epochs.
    """

    def __init__(self, num_samples: int, orders: Sequence[Int64Array], first_time: int = 0) -> None:
        asked = np.concatenate(orders) if len(orders) else np.empty(0, dtype=np.int64)
        by_sample = np.argsort(asked, kind="stable")
        self._times = by_sample.astype(np.int64) + first_time
        self._starts = np.searchsorted(asked[by_sample], np.arange(num_samples + 1))
        self.end = first_time + len(asked)
        """Nothing is known of what comes from this time on."""

    def after(self, first: int, end: int, time: int, known_until: int) -> tuple[Int64Array, Int64Array]:
        """``(times, samples)``, in the order of their times: the uses of the samples ``first <= sample < end`` with
        ``time < use < known_until``."""
        starts = self._starts[first : end + 1]
        times = self._times[starts[0] : starts[-1]]
        samples = np.repeat(np.arange(first, end), np.diff(starts))
        known = (times > time) & (times < known_until)
        times, samples = times[known], samples[known]
        order = np.argsort(times)
        return times[order], samples[order]

    def next(self, sample: int, time: int, known_until: int) -> int | None:
        """The first use of a sample after ``time`` and before ``known_until``."""
        start, end = int(self._starts[sample]), int(self._starts[sample + 1])
        place = bisect_right(self._times, time, start, end)
        if place == end:
            return None
        use = int(self._times[place])
        return use if use < known_until else None
