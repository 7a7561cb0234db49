"""CoorDL: a cache that is filled and never evicts, of a node alone and of all nodes together.

python -m benchmarks.papers.coordl
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.papers.ordered_reads import OrderedRun, keyed_orders, simulate_orders
from benchmarks.papers.page import Row, print_rows

__all__ = ["hits", "rows"]


def hits(part: float, nodes: int, *, private: bool, num_samples: int = 6000) -> list[float]:
    """Of the accesses of each of two epochs.

    :param part: of the dataset that each node has memory for.
    """
    run = OrderedRun(
        num_samples, int(part * num_samples), num_pods=nodes, batch_size=256, eviction="never", private=private
    )
    return [epoch.hits / num_samples for epoch in simulate_orders(run, keyed_orders(run, 2), 2)]


def rows() -> Iterator[Row]:
    for nodes, private in ((1, True), (3, True), (3, False)):
        first, second = hits(0.1, nodes, private=private)
        name = f"{nodes} node{'s' * (nodes > 1)} with memory for 10 % each, {'its own' if private else 'all'} caches"
        yield Row(f"{name}: epoch 1", "0.000", f"{first:.3f}")
        yield Row(f"{name}: epoch 2", f"{0.1 if private else 0.1 * nodes:.3f}", f"{second:.3f}")


if __name__ == "__main__":
    print_rows("CoorDL", rows())
