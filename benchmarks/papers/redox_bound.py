"""Redox, section 4: how many orders are left when requests are redirected? Counted for all orders of a few files.

    python -m benchmarks.papers.redox_bound

One virtual chunk of K slots, into which P chunks go. By theorem 2 at most (P!)^K orders become one, so that at least
(PK)! / (P!)^K of the (PK)! are left. The policy of pods is asked in each of the (PK)! orders.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import permutations

import numpy as np
from benchmarks.papers.page import Part, Row, print_rows

from refill.protocol.policies import terms_of
from refill_service.cache_core.epoch_order import ExplicitTraces
from refill_service.cache_core.sample_mapping import AbstractMapping, ChunkLayout
from refill_service.planning.lockstep import LocalOwner

__all__ = ["SHAPES", "orders_left", "part_of_page"]

SHAPES = ((2, 2), (2, 3), (3, 2))
"""``(K, P)``."""


def orders_left(chunk_size: int, num_chunks: int) -> tuple[int, int]:
    """``(different orders that come, the most orders that become one of them)``."""
    num_samples = chunk_size * num_chunks
    layout = ChunkLayout(np.array([0, num_samples], dtype=np.int64), chunk_size)
    mapping = AbstractMapping(layout.share(0, 1), 1, "consecutive")
    settings = terms_of("redox").settings_with("redox", {})
    came: Counter[tuple[int, ...]] = Counter()
    for order in permutations(range(num_samples)):
        asked = np.array(order, dtype=np.int64)
        owner = LocalOwner(
            "redox",
            mapping,
            [ExplicitTraces(num_samples, {0: asked})],
            1,
            np.ones(num_samples, dtype=np.int64),
            chunk_size,
            key="bound",
            settings=settings,
        )
        came[tuple(int(owner.requested(0, asked[place : place + 1])[0]) for place in range(num_samples))] += 1
    return len(came), max(came.values())


def part_of_page() -> Part:
    rows = []
    for chunk_size, num_chunks in SHAPES:
        left, most = orders_left(chunk_size, num_chunks)
        into_one = math.factorial(num_chunks) ** chunk_size
        all_orders = math.factorial(chunk_size * num_chunks)
        what = f"K = {chunk_size}, {num_chunks} chunks"
        rows.append(
            Row(f"{what}: orders left of {all_orders}", f"{all_orders // into_one} or more", str(left), "section 4")
        )
        rows.append(Row(f"{what}: orders that become one", f"{into_one} or fewer", str(most), "Theorem 2"))
    return Part("Brand and Redox", "python -m benchmarks.papers.redox_bound", rows)


if __name__ == "__main__":
    print_rows("Redox, section 4", part_of_page().rows)
