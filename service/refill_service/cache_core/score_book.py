"""How important does training find the samples of an owner, and which scores does an epoch draw from?

Scores come from all ranks while an epoch runs. All ranks draw the next one from the same scores: those that are known
when the last of them has come to draw. The scores are not written down: after a restart of the pod there are none until
ranks have reported them again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from refill_service.cache_core.sample_mapping import Int64Array

_KEPT_EPOCHS = 2
"""A rank that was started again draws the epoch once more that others are in."""


def score_memory(num_samples: int) -> int:
    """What a job sets aside for the scores of an owner's share: those of now, those that the last epochs were drawn
    from, each with what was in memory, and the cache's own."""
    return num_samples * (4 + _KEPT_EPOCHS * 5 + 4)


class DrawnFrom(NamedTuple):
    """What all ranks draw an epoch from."""

    scores: NDArray[np.float32]
    """``(samples,)``; NaN: never trained with, as far as is known."""
    cached: NDArray[np.bool_]
    """``(samples,)`` whether it was in memory."""


class ScoreBook:
    """Keeps the scores of one owner's samples, and what ranks draw an epoch from. Ids count from the start of its
    share."""

    def __init__(self, num_samples: int, num_ranks: int) -> None:
        self._scores = np.full(num_samples, np.nan, dtype=np.float32)
        self._num_ranks = num_ranks
        self._asked: dict[int, set[int]] = {}
        self._drawn_from: dict[int, DrawnFrom] = {}

    def scored(self, samples: Int64Array, scores: NDArray[np.floating]) -> None:
        """Fact: these were trained with."""
        self._scores[samples] = scores

    def known(self) -> tuple[Int64Array, NDArray[np.float32]]:
        """``(samples, scores)`` of those that have one."""
        samples = np.flatnonzero(~np.isnan(self._scores))
        return samples, self._scores[samples]

    def draws(self, epoch: int, rank: int) -> None:
        """Fact: a rank has reported all scores of the epoch before, and is about to draw this one."""
        self._asked.setdefault(epoch, set()).add(rank)
        for old in sorted(self._asked.keys() | self._drawn_from.keys())[:-_KEPT_EPOCHS]:
            self._asked.pop(old, None)
            self._drawn_from.pop(old, None)

    def waits_for(self, epoch: int, has_drawn: Callable[[int], bool]) -> list[int]:
        """Ranks that have yet to come to draw.

        :param has_drawn: whether a rank is known to have drawn the epoch, by way of another run of this pod.
        """
        if epoch in self._drawn_from:
            return []
        asked = self._asked.get(epoch, set())
        return [rank for rank in range(self._num_ranks) if rank not in asked and not has_drawn(rank)]

    def drawn_from(self, epoch: int, cached: Callable[[], NDArray[np.bool_]]) -> DrawnFrom:
        """The same for all ranks of an epoch.

        :param cached: ``(samples,)`` what is in memory now.
        """
        if epoch not in self._drawn_from:
            self._drawn_from[epoch] = DrawnFrom(self._scores.copy(), cached())
        return self._drawn_from[epoch]
