"""How much do DELI's two workloads miss by the clock, and how much did its authors measure?

Three nodes. The times are the paper's where it prints them (computing 14.7 and 147.2 s an epoch, in batches of 512).
What its service takes was fitted, by an outside simulation, to the first epochs of Fig. 6 alone: see ``WORKLOADS``.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.papers.loop_clock import FetchService, LoopClock
from benchmarks.papers.ordered_reads import OrderedRun, keyed_orders, simulate_orders

from refill_service.cache_core.policies.fetching_exact import Fetching

__all__ = ["UNLIMITED", "WORKLOADS", "Cell", "Workload", "cells", "missed"]

_BATCH = 512
"""Of the times that the paper prints."""


@dataclass(frozen=True)
class Workload:
    num_samples: int
    clock: LoopClock


def _service(fixed: float, per: float) -> FetchService:
    """The fixed part is the listing of the bucket; all fetches under way share 1.4 workers."""
    return FetchService(fixed, per, workers=1.4, insert=0.00009)


WORKLOADS = {
    "MNIST": Workload(42_000, LoopClock(g=0.050, h=0.0017, comp=14.7 / 28, svc=_service(7.45, 0.00439))),
    "CIFAR-10": Workload(35_000, LoopClock(g=0.054, h=0.0017, comp=147.2 / 23, svc=_service(6.47, 0.00397))),
}
UNLIMITED = 1_000_000


@dataclass(frozen=True)
class Cell:
    """Miss rates of Fig. 6, 7 and 8 and of the runs behind them, means over three trials of three nodes, from the
    authors' data (https://github.com/cake-lab/DELI, MIT licence)."""

    figure: str
    workload: str
    batch: int
    fetch_size: int
    threshold: int
    cache: int
    """``UNLIMITED``: in the file 0."""
    measured: tuple[float, float]
    """Of the first and the second epoch."""


def cells() -> Iterator[Cell]:
    with Path(__file__).with_name("deli_cells.csv").open(newline="") as file:
        for figure, workload, *numbers, first, second in list(csv.reader(file))[1:]:
            batch, fetch_size, threshold, cache = map(int, numbers)
            yield Cell(
                figure, workload, batch, fetch_size, threshold, cache or UNLIMITED, (float(first), float(second))
            )


def missed(
    workload: Workload, size: int | str, threshold: int | str, memory: int, part: int = 1, batch: int = _BATCH
) -> tuple[float, float]:
    """Of the accesses of the first and the second epoch, as parts. What a fetch leaves out stays as old as it is.

    :param part: of so many of the workload's samples.
    """
    clock = replace(workload.clock, comp=workload.clock.comp * batch / _BATCH)
    run = OrderedRun(
        workload.num_samples // part,
        memory,
        num_pods=3,
        batch_size=batch,
        eviction="fifo",
        private=True,
        fetching=Fetching.of(size, threshold, memory),
        renews=False,
        clock=clock,
    )
    first, second = (
        epoch.misses / (epoch.hits + epoch.misses) for epoch in simulate_orders(run, keyed_orders(run, 2), 2)
    )
    return first, second
