"""Which chunk of its group refills an abstract chunk? (Brand 3.3 "Refill Policy"; Redox Algorithm 3, FindReplacePC)"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

__all__ = ["REFILL_CHOICES", "RefillChoice", "choose_best", "choose_random"]

RefillChoice = Callable[[NDArray[np.bool_], int, random.Random], int]
"""``(fillable, slot, generator) -> row``.

``fillable``, shape ``(chunks of the group, K)``, is true where a chunk's sample is unconsumed and its slot vacant.
The row chosen is fillable at the wanted ``slot``; -1 when no chunk is.
"""


def choose_best(fillable: NDArray[np.bool_], slot: int, generator: random.Random) -> int:
    """The chunk that fills most slots, ties at random."""
    able = fillable[:, slot].nonzero()[0]
    if len(able) < 2:
        return able.item() if len(able) else -1
    filled = fillable.sum(axis=1, dtype=np.int32)[able]
    best = able[filled == filled.max()]
    return int(best[0] if len(best) == 1 else best[generator.randrange(len(best))])


def choose_random(fillable: NDArray[np.bool_], slot: int, generator: random.Random) -> int:
    """Any chunk that can answer the wanted slot."""
    able = fillable[:, slot].nonzero()[0]
    return int(able[generator.randrange(len(able))]) if len(able) else -1


REFILL_CHOICES: dict[str, RefillChoice] = {"best": choose_best, "random": choose_random}
