"""Which pod has each share of a planned job, and which one stands in for it?

A function of the two numbers, so that pods and clients need not agree on anything else. Whoever is asked answers all
the same: a share is read where it is asked for.
"""

from __future__ import annotations

from collections.abc import Container
from functools import lru_cache
from heapq import heappush, heapreplace

import numpy as np

from refill.protocol.wire_format import Int64Array


@lru_cache(maxsize=64)
def share_owners(num_shares: int, num_pods: int) -> Int64Array:
    """``(shares,)`` ordinals: each pod has as many shares as any other, or one less. With one more pod, that one gets
    its shares from those that have most, and no other share moves."""
    of_pods = [list(range(num_shares))]
    fullest = [(-num_shares, 0)]
    """``(-shares, -pod)``, a heap."""
    for pod in range(1, num_pods):
        given = []
        for _ in range(num_shares // (pod + 1)):
            count, giver = fullest[0]
            given.append(of_pods[-giver].pop())
            heapreplace(fullest, (count + 1, giver))
        of_pods.append(sorted(given))
        heappush(fullest, (-len(given), -pod))
    owners = np.empty(num_shares, dtype=np.int64)
    for pod, shares in enumerate(of_pods):
        owners[shares] = pod
    owners.flags.writeable = False
    return owners


def stand_in(share: int, num_shares: int, num_pods: int, away: Container[int]) -> int:
    """The pod that answers for a share whose owner is away: each of the others has as many of the owner's shares, or
    one less, unless it is away, too. The owner itself, where all are away."""
    owners = share_owners(num_shares, num_pods)
    owner = int(owners[share])
    number = int(np.count_nonzero(owners[:share] == owner))
    for step in range(num_pods - 1):
        pod = (owner + 1 + (number + step) % (num_pods - 1)) % num_pods
        if pod not in away:
            return pod
    return owner
