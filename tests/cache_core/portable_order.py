"""Random orders that anybody can make again, in any language: a linear congruential generator of 64 bits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["PortableRandom"]


class PortableRandom:
    """Knuth's multiplier; the upper 31 bits of its state are what is used."""

    def __init__(self, seed: int) -> None:
        self._state = seed

    def number(self) -> int:
        self._state = (6364136223846793005 * self._state + 1442695040888963407) % (1 << 64)
        return self._state >> 33

    def permutation(self, length: int) -> NDArray[np.int64]:
        """Fisher and Yates, from the end."""
        order = list(range(length))
        for place in range(length - 1, 0, -1):
            other = self.number() % (place + 1)
            order[place], order[other] = order[other], order[place]
        return np.array(order, dtype=np.int64)

    def skewed(self, num_samples: int, length: int) -> NDArray[np.int64]:
        """Some samples are asked for much more often than others."""
        drawn = [(self.number() * self.number() >> 31) * num_samples >> 31 for _ in range(length)]
        return np.array(drawn, dtype=np.int64)
