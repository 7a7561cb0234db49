"""Which ranks share a batch? Those of one group in tensor, context or pipeline parallel training."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from refill.errors import InvalidInput


class BatchGroups(NamedTuple):
    """The places of a rank in the dimensions of a mesh within which batches are shared."""

    dimensions: tuple[tuple[int, int], ...] = ()
    """``(size, apart)`` of each, the farthest apart first: so many ranks, so far from each other. 2 ranks 4 apart are 0
    and 4, 1 and 5, ..., 8 and 12."""

    @classmethod
    def in_a_row(cls, size: int) -> BatchGroups:
        return cls(((size, 1),) if size > 1 else ())

    @property
    def size(self) -> int:
        """Ranks of a group."""
        return math.prod(size for size, _ in self.dimensions)

    def number(self, rank: int) -> int:
        """Of the group of a rank, which asks for batches as if it were a rank."""
        for size, apart in self.dimensions:
            rank = rank // (size * apart) * apart + rank % apart
        return rank

    def member(self, rank: int) -> int:
        """Which one of its group a rank is."""
        found = 0
        for size, apart in self.dimensions:
            found = found * size + rank // apart % size
        return found


def batch_groups(given: Any) -> BatchGroups:
    """
    :param given: how many ranks in a row share a batch; or the dimensions of a ``torch.distributed`` DeviceMesh whose
        ranks do, ``mesh["tp"]`` or ``mesh["pp", "tp"]``. Raises :class:`InvalidInput`.
    """
    if isinstance(given, int | np.integer) and not isinstance(given, bool) and given >= 1:
        return BatchGroups.in_a_row(int(given))
    ranks = getattr(given, "mesh", None)
    if ranks is None or not hasattr(ranks, "flatten"):
        raise InvalidInput(f"batch_group must be a number of ranks or dimensions of a DeviceMesh, got {given!r:.100}")
    places = np.asarray(ranks.tolist())
    found = []
    first, expected = int(places.flat[0]), np.zeros(1, dtype=np.int64)
    for dimension, size in enumerate(places.shape):
        if size == 1:
            continue
        apart = int(np.take(places, 1, axis=dimension).flat[0]) - first
        found.append((size, apart))
        expected = np.add.outer(expected, np.arange(size) * apart).reshape(-1)
    nested = all(outer % (size * apart) == 0 for (_, outer), (size, apart) in pairwise(found))
    if any(apart < 1 for _, apart in found) or not nested or (expected + first).tolist() != places.flatten().tolist():
        raise InvalidInput(
            f"the ranks of batch_group must be equally far apart in each dimension, got {places.tolist()}"[:300]
        )
    return BatchGroups(tuple(found))
