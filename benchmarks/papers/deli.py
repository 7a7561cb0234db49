"""DELI: what its cache misses without and with its sampler, how long its loop takes, and what its machines cost.

    python -m benchmarks.papers.deli

Three nodes. Orders are random and the figures do not depend on them, or by a hundredth.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.papers.deli_cost import Run, run_cost
from benchmarks.papers.loop_clock import FetchService, LoopClock
from benchmarks.papers.ordered_reads import EpochReads, OrderedRun, keyed_orders, simulate_orders
from benchmarks.papers.page import Row, print_rows

from refill_service.cache_core.policies.fetching_exact import HALF, Fetching
from refill_service.planning.run_cost import ProviderPrices

__all__ = ["CACHE_ONLY", "FETCHED", "TABLE_2", "cache_only", "fetched", "machines", "rows"]

NODES = 3
CACHE_ONLY = ((0.25, 0.9890), (0.5, 0.9528), (0.75, 0.8874), (3.0, 0.6675))
"""The cache, in parts of a node's partition, and the misses that the paper prints for MNIST's second epoch."""
FETCHED: tuple[tuple[int | str, int | str, int, float, int, float], ...] = (
    (400, 0, 12_000, 0.5, 520, 44.0),
    (400, 0, 200, 0.5, 2000, 118.0),
    (800, 0, 800, 0.5, 378, 36.9),
    (HALF, HALF, 800, 0.5, 125, 24.25),
    (400, 400, 800, 4, 52, 90.6),
)
"""Fetch size and threshold, cache, seconds of a batch's computing; misses and seconds of a node's first epoch, as an
outside simulation of the paper's rules says."""
TABLE_2 = (
    *((223.91, 0.10), (1581.37, 0.72), (358.87, 0.16), (267.07, 0.12), (245.11, 0.11)),
    *((609.03, 0.28), (1587.02, 0.72), (557.71, 0.25), (502.87, 0.23), (365.85, 0.17)),
)
"""Seconds of two epochs, and dollars of Table II: MNIST, then CIFAR."""


def cache_only(part: float, of_node: int = 1500) -> float:
    """Misses of the second epoch, as a part."""
    run = OrderedRun(
        NODES * of_node, int(part * of_node), num_pods=NODES, batch_size=256, eviction="fifo", private=True
    )
    _, second = simulate_orders(run, keyed_orders(run, 2), 2)
    return second.misses / (NODES * of_node)


def fetched(size: int | str, threshold: int | str, memory: int, computing_seconds: float) -> EpochReads:
    """The first epoch of three nodes with 4,000 samples each."""
    run = OrderedRun(
        12_000,
        memory,
        num_pods=NODES,
        batch_size=200,
        eviction="fifo",
        private=True,
        fetching=Fetching.of(size, threshold, memory),
        clock=LoopClock(g=0.05, h=0.002, comp=computing_seconds, svc=FetchService(1.5, 0.003)),
    )
    return next(iter(simulate_orders(run, keyed_orders(run, 1), 1)))


def machines(seconds: float) -> float:
    """Dollars."""
    return run_cost(Run(ProviderPrices(0.0, 0.0, 0.0), seconds, vm_hour=0.545, nodes=NODES, epochs=2)).vms


def rows() -> Iterator[Row]:
    for part, missed in CACHE_ONLY:
        what = f"cache of {part:.0%} of a partition, no sampler: misses"
        yield Row(what, f"{missed:.4f}", f"{cache_only(part):.4f}", "Fig. 5")
    for size, threshold, memory, computing, misses, seconds in FETCHED:
        found = fetched(size, threshold, memory, computing)
        name = f"F {size}, Q {threshold}, C {memory}, {computing:g} s a batch"
        yield Row(f"EXACT {name}: misses of a node", str(misses), f"{found.misses / NODES:g}", "section IV")
        yield Row(f"EXACT {name}: seconds", f"{seconds:.2f}", f"{found.run_seconds or 0:.2f}", "section IV")
    for seconds, dollars in TABLE_2:
        yield Row(f"{seconds:.2f} s of three machines", f"${dollars:.2f}", f"${machines(seconds):.2f}", "Table II")


if __name__ == "__main__":
    print_rows("DELI", rows())
