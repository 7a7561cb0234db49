"""DeepIO: how random an order is, by its randomization level RL, that shuffles a share R or blocks of samples.

    python -m benchmarks.papers.deepio

The paper's two experiments fit no one number of samples: R = .5 and .25 give its figures for 7,600, blocks for 8,448.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.papers.page import Row, print_rows

from refill_service.planning.plan_measures import block_randomization_level, randomization_level

__all__ = ["BLOCKS", "SHARES", "rows"]

SHARES = ((0.5, 98.54), (0.25, 96.96))
BLOCKS = ((4, 73.0), (16, 49.0), (256, 16.0))


def rows() -> Iterator[Row]:
    for share, level in SHARES:
        yield Row(f"RL, R = {share:g}, percent", f"{level:.2f}", f"{100 * randomization_level(7600, share):.2f}")
    for size, level in BLOCKS:
        yield Row(
            f"RL, blocks of {size}, percent", f"{level:.0f}", f"{100 * block_randomization_level(8448, size):.2f}"
        )


if __name__ == "__main__":
    print_rows("DeepIO", rows())
