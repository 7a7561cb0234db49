"""DELI's published measurements, 148 cells: by how much are misses by the clock other?

    python -m benchmarks.papers.deli_cells

``deli_cells.csv`` has the miss rates of Fig. 6, 7 and 8 and of the runs behind them, means over three trials of three
nodes, from the authors' data (https://github.com/cake-lab/DELI, MIT licence); a cache of 0 has no limit. Beside what
the clock says with all that the service was fitted with (``deli_sweeps.WORKLOADS``): the same where fetches under way
do not slow each other down, and where putting samples into the cache takes no time.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from benchmarks.papers.deli_sweeps import UNLIMITED, WORKLOADS, Workload, missed
from benchmarks.papers.page import Part, Row, print_rows

__all__ = ["Cell", "cells", "part_of_page", "rms_of"]

TOLD = {"MNIST": ".014", "CIFAR-10": ".018"}
"""By the outside simulation that fitted the service."""


@dataclass(frozen=True)
class Cell:
    """Two of the 148: of the first and of the second epoch."""

    figure: str
    workload: str
    batch: int
    fetch_size: int
    threshold: int
    cache: int
    measured: tuple[float, float]


def cells() -> Iterator[Cell]:
    with Path(__file__).with_name("deli_cells.csv").open(newline="") as file:
        for figure, workload, *numbers, first, second in list(csv.reader(file))[1:]:
            batch, fetch_size, threshold, cache = map(int, numbers)
            yield Cell(
                figure, workload, batch, fetch_size, threshold, cache or UNLIMITED, (float(first), float(second))
            )


def rms_of(some: Sequence[Cell], workload: Workload, part: int = 1) -> float:
    """Root of the mean square by which misses are other than measured, as parts of the accesses.

    :param part: of so many of the workload's samples.
    """
    found = [
        np.subtract(missed(workload, each.fetch_size, each.threshold, each.cache, part, each.batch), each.measured)
        for each in some
    ]
    return float(np.sqrt(np.mean(np.square(found))))


def part_of_page() -> Part:
    rows = []
    for name, workload in WORKLOADS.items():
        service = workload.clock.svc
        of_name = [each for each in cells() if each.workload == name]
        for what, other in (
            ("", service),
            (", fetches that do not share workers", replace(service, workers=math.inf)),
            (", no cost of insertion", replace(service, insert=0.0)),
        ):
            found = rms_of(of_name, Workload(workload.num_samples, replace(workload.clock, svc=other)))
            told = "-" if what else TOLD[name]
            rows.append(Row(f"{name}: rms of {2 * len(of_name)} miss rates{what}", told, f"{found:.4f}", "Fig. 6 to 8"))
    return Part("DELI", "python -m benchmarks.papers.deli_cells", rows)


if __name__ == "__main__":
    print_rows("DELI's published measurements", part_of_page().rows)
