"""When is each sample of one order used next? For caches that are tried without a pod."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from refill_service.cache_core.sample_mapping import Int64Array

__all__ = ["KnownUses"]


class KnownUses:
    """Says when each sample is used next in one order, in which a sample may come never, once or often.

    :param asked: ``(requests,)`` the samples asked for; the time of each is its place.
    :param num_samples: they are ``0 <= sample < num_samples``.
    """

    def __init__(self, asked: Int64Array, num_samples: int) -> None:
        self._times = np.argsort(asked, kind="stable")
        """By sample, and then by time."""
        self._starts = np.searchsorted(asked[self._times], np.arange(num_samples + 1))
        self.known_until = len(asked)
        """May be set to an earlier time."""

    @property
    def goes_on(self) -> bool:
        return self.known_until < len(self._times)

    def after(self, first: int, end: int, time: int) -> tuple[Int64Array, Int64Array]:
        starts = self._starts[first : end + 1]
        times = self._times[starts[0] : starts[-1]]
        samples = np.repeat(np.arange(first, end), np.diff(starts))
        known = (times > time) & (times < self.known_until)
        times, samples = times[known], samples[known]
        order = np.argsort(times)
        return times[order], samples[order]

    def next(self, sample: int, time: int) -> int | None:
        """The first known use of a sample after ``time``."""
        start, end = int(self._starts[sample]), int(self._starts[sample + 1])
        place = bisect_right(self._times, time, start, end)
        if place == end or self._times[place] >= self.known_until:
            return None
        return int(self._times[place])
