"""When will samples be used again? What is known of it: the order of this epoch, and of the next one.

A *use* is a request for a sample. Its *time* counts the requests of all ranks in turn: position * ranks + rank.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Protocol

import numpy as np

from refill_service.cache_core.sample_mapping import Int64Array

__all__ = ["KnownUses", "Uses"]


class Uses(Protocol):
    """When samples are used next, as far as it is known."""

    known_until: int
    """Nothing is known of what comes from this time on."""

    @property
    def goes_on(self) -> bool:
        """Whether anything is to come then."""
        ...

    def after(self, first: int, end: int, time: int) -> tuple[Int64Array, Int64Array]:
        """``(times, samples)`` in the order of their times: the known uses after ``time`` of the samples
        ``first <= sample < end``."""
        ...


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
