"""Which pod has each share of a planned job, and which one stands in for it?

A function of the two numbers, so that pods and clients need not agree on anything else. Whoever is asked answers all
the same: a share is read where it is asked for.
"""

from __future__ import annotations

from collections.abc import Container
from functools import lru_cache

import numpy as np

from refill_service.cache_core.sample_mapping import Int64Array

__all__ = ["share_owners", "stand_in"]


@lru_cache(maxsize=64)
def share_owners(num_shares: int, num_pods: int) -> Int64Array:
    """``(shares,)`` ordinals: each pod has as many shares as any other, or one less. With one more pod, that one gets
    its shares from those that have most, and no other share moves."""
    owners = np.zeros(num_shares, dtype=np.int64)
    counts = [num_shares]
    for pod in range(1, num_pods):
        counts.append(0)
        least = num_shares // (pod + 1)
        of_pod = [np.flatnonzero(owners == each).tolist() for each in range(pod)]
        while counts[pod] < least:
            giver = max(range(pod), key=lambda each: (counts[each], each))
            owners[of_pod[giver].pop()] = pod
            counts[giver] -= 1
            counts[pod] += 1
    owners.flags.writeable = False
    return owners


def stand_in(share: int, owner: int, num_pods: int, away: Container[int]) -> int:
    """The pod that answers for a share whose owner is away: shares of one pod go to all others. The owner itself, where
    all are away."""
    for step in range(num_pods - 1):
        pod = (owner + 1 + (share + step) % (num_pods - 1)) % num_pods
        if pod not in away:
            return pod
    return owner
