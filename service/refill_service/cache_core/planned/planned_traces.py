"""What does each rank ask for, where the epoch has one global order?

Positions are dealt one by one: rank r asks for the places r, r + R, r + 2R, ... of the order. So the samples of a
global step are the same for any number of ranks whose global batch is the same.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from refill.protocol.dealing import Dealing
from refill_service.cache_core.sample_mapping import Int64Array

__all__ = ["PlannedTraces"]


class PlannedTraces:
    """As :class:`~refill_service.cache_core.epoch_order.Traces` are asked. Where the ranks do not divide the order, its
    first places are repeated, or with ``drop_last`` its last ones left out. Takes 16 bytes a sample of the dataset.

    :param order: ``(n,)`` samples of the dataset, all different.
    :param num_samples: of the dataset; those that are not in the order are not asked for.
    """

    def __init__(self, order: Int64Array, num_samples: int, num_ranks: int, *, drop_last: bool = False) -> None:
        self.num_ranks = num_ranks
        self._order = order
        self._num_samples = num_samples
        self._dealing = Dealing(len(order), num_ranks, drop_last=drop_last)
        self._place = np.full(num_samples, -1, dtype=np.int64)
        self._place[order] = np.arange(len(order), dtype=np.int64)

    def before(self, position: int) -> Int64Array:
        """The samples that ranks have had when each of them has come to this position."""
        return self._order[: position * self.num_ranks]

    def length(self, rank: int) -> int:
        return self._dealing.per_rank

    def asked(self, rank: int, positions: Int64Array) -> tuple[Int64Array, NDArray[np.bool_]]:
        places = self._dealing.positions(rank, positions)
        return self._order[places % max(1, len(self._order))], places >= len(self._order)

    def members(self, first: int, end: int) -> NDArray[np.bool_] | None:
        return None if len(self._order) == self._num_samples else self._place[first:end] >= 0

    def classes(self, first: int, end: int) -> Int64Array | None:
        return None

    def position_of(self, samples: Int64Array) -> tuple[Int64Array, Int64Array]:
        return self._dealing.places(self._place[samples])

    def repeats_of(self, first: int, end: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        num_dealt = self._dealing.per_rank * self.num_ranks
        places = np.arange(len(self._order), max(len(self._order), num_dealt), dtype=np.int64)
        samples = self._order[places % max(1, len(self._order))]
        inside = (samples >= first) & (samples < end)
        return samples[inside], *self._dealing.places(places[inside])

    @property
    def num_requests(self) -> int:
        return min(len(self._order), self._dealing.per_rank * self.num_ranks)
