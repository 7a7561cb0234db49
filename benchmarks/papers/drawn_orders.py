"""Which orders do ranks draw when important samples are to come more often (SHADE)? As ``refill.ImportanceSampler``
draws them, from losses that are known beforehand."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from refill.errors import InvalidInput
from refill.protocol.importance import order_of_rank
from refill_service.cache_core.epoch_order import ExplicitTraces, Traces
from refill_service.cache_core.sample_mapping import Int64Array

__all__ = ["DrawnOrders"]


class DrawnOrders:
    """Of one run, whose epochs are drawn one after another.

    :param losses: ``(epochs, samples)``: what training finds when it comes to a sample.
    :param repetition: how often a draw comes that is in memory.
    :param improving: whether validation improves, in all epochs.
    """

    def __init__(
        self, losses: NDArray[np.float64], num_ranks: int, *, seed: int, repetition: float, improving: bool
    ) -> None:
        if not 1 <= repetition < 1000:
            raise InvalidInput(f"repetition must be at least 1 and less than 1000, got {repetition:g}")
        self.repetition, self.improving = repetition, improving
        self._losses = losses
        self._num_ranks = num_ranks
        self._seed = seed
        self._scores = np.full(losses.shape[1], np.nan, dtype=np.float32)

    def scored(self, samples: Int64Array, scores: NDArray[np.floating]) -> None:
        """Fact: a batch was trained with."""
        self._scores[samples] = scores

    def draw(self, epoch: int, in_memory: Iterable[Int64Array]) -> tuple[Traces, list[NDArray[np.float64]]]:
        """``(the order of the epoch, the losses of each rank's positions)``.

        :param in_memory: ids of samples that pods keep.
        """
        cached = np.zeros(len(self._scores), dtype=bool)
        for samples in in_memory:
            cached[samples] = True
        of_ranks = {
            rank: order_of_rank(
                self._scores,
                cached,
                rank,
                self._num_ranks,
                seed=self._seed,
                epoch=epoch,
                repetition=self.repetition,
                improving=self.improving,
            )
            for rank in range(self._num_ranks)
        }
        return ExplicitTraces(len(cached), of_ranks), [self._losses[epoch][ids] for ids in of_ranks.values()]
