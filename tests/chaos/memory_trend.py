"""Does a process grow? A straight line through its memory over time, with an interval that says how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Trend", "trend_of"]

_BLOCKS = 12
_STUDENT_T = 2.228
"""95 %, two sides, for as many degrees of freedom as there are blocks less two."""


@dataclass(frozen=True)
class Trend:
    """Bytes an hour: the slope, and its 95 % interval."""

    slope: float
    low: float
    high: float

    def verdict(self, bound: float) -> str:
        """``flat``: surely below the bound; ``grows``: surely above it; else ``open``: watch it for longer."""
        return "flat" if self.high < bound else "grows" if self.low > bound else "open"


def trend_of(seconds: Sequence[float], values: Sequence[float]) -> Trend:
    """Of the last two thirds of the time; what comes before is warming up.

    Neighbouring values are much alike, so the line goes through the means of blocks of time, which are less so; how
    much alike neighbouring blocks still are widens the interval. Raises ValueError for fewer than two values a block.
    """
    at, value = np.asarray(seconds, dtype=float), np.asarray(values, dtype=float)
    late = at >= at[0] + (at[-1] - at[0]) / 3
    if np.count_nonzero(late) < 2 * _BLOCKS:
        raise ValueError(f"{len(at)} values are too few for a trend")
    hours = np.array([block.mean() for block in np.array_split(at[late] / 3600, _BLOCKS)])
    means = np.array([block.mean() for block in np.array_split(value[late], _BLOCKS)])
    from_middle = hours - hours.mean()
    spread = float((from_middle**2).sum())
    slope = float((from_middle * means).sum()) / spread
    rest = means - means.mean() - slope * from_middle
    alike = max(0.0, float((rest[1:] * rest[:-1]).sum() / (rest**2).sum())) if rest.any() else 0.0
    independent = (1 - alike) / (1 + alike)  # share of the blocks, for a first-order autoregressive process
    error = float(np.sqrt((rest**2).sum() / (_BLOCKS - 2) / spread / independent))
    return Trend(slope, slope - _STUDENT_T * error, slope + _STUDENT_T * error)
