"""DELI Fig. 6 to 9: misses by fetch size, cache size and threshold, of both workloads, beside what was measured.

    python -m benchmarks.papers.deli_sweeps [--part 1]

All 148 miss rates that the authors published of these figures and the runs behind them are computed. Beside what the
clock says with all that the service was fitted with (``deli_workloads.WORKLOADS``), by how much it is other: the same
where fetches under way do not slow each other down, and where putting samples into the cache takes no time.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from benchmarks.papers.deli_workloads import UNLIMITED, WORKLOADS, Cell, Workload, cells, missed
from benchmarks.papers.page import Curve, Part, Row, print_rows

from refill_service.cache_core.policies.fetching_exact import HALF

__all__ = ["missed_in", "part_of_page", "rms_of"]

Missed = Mapping[Cell, tuple[float, float]]
"""By the clock: of the first and the second epoch."""
_TOLD_RMS = {"MNIST": ".014", "CIFAR-10": ".018"}
"""By the outside simulation that fitted the service."""
_TOLD_BY_THRESHOLD = {"MNIST": "-31%", "CIFAR-10": "-80%"}
_TOLD_BY_HALVES = {"MNIST": "small", "CIFAR-10": "-83%"}
_FEW, _MANY = 512, 1024
"""Samples of a batch."""


def missed_in(some: Iterable[Cell], workload: Workload, part: int = 1) -> Missed:
    """:param part: of so many of the workload's samples."""
    return {each: missed(workload, each.fetch_size, each.threshold, each.cache, part, each.batch) for each in some}


def rms_of(found: Missed) -> float:
    """Root of the mean square by which misses are other than measured, as parts of the accesses."""
    return float(np.sqrt(np.mean(np.square([np.subtract(got, each.measured) for each, got in found.items()]))))


def part_of_page(part: int = 1) -> Part:
    rows: list[Row] = []
    curves: list[Curve] = []
    for name, workload in WORKLOADS.items():
        of_name = [each for each in cells() if each.workload == name]
        found = missed_in(of_name, workload, part)
        curves += _curves(name, found)
        for batch in (_FEW, _MANY):
            rows += _by_size(name, [each for each in of_name if (each.figure, each.batch) == ("6", batch)], found)
            rows += _by_cache(name, [each for each in of_name if (each.figure, each.batch) == ("7", batch)], found)
        for cache in (512, 1024, 2048, 3072):
            rows += _by_threshold(name, [each for each in of_name if (each.figure, each.cache) == ("8", cache)], found)
        rows += _halves(name, workload, found, part)
        rows += _rms(name, workload, found, part)
    command = "python -m benchmarks.papers.deli_sweeps" + f" --part {part}" * (part > 1)
    return Part("DELI", command, rows, curves)


def _by_size(name: str, some: Sequence[Cell], found: Missed) -> Iterator[Row]:
    if some:
        sizes = ", ".join(str(each.fetch_size) for each in some)
        yield from _rows(f"{name}, batches of {some[0].batch}, no limit, F {sizes}", some, found, "Fig. 6")


def _by_cache(name: str, some: Sequence[Cell], found: Missed) -> Iterator[Row]:
    caches = ", ".join(str(each.cache) for each in some)
    yield from _rows(f"{name}, batches of {some[0].batch}, F 1024, cache {caches}", some, found, "Fig. 7")


def _by_threshold(name: str, some: Sequence[Cell], found: Missed) -> Iterator[Row]:
    thresholds = ", ".join(str(each.threshold) for each in some)
    yield from _rows(f"{name}, F 1024, cache {some[0].cache}, threshold {thresholds}", some, found, "Fig. 8")


def _rows(what: str, some: Sequence[Cell], found: Missed, where: str) -> Iterator[Row]:
    for epoch in (0, 1):
        measured, got = (
            " ".join(f"{each:.3f}"[1:] for each in values)
            for values in ([each.measured[epoch] for each in some], [found[each][epoch] for each in some])
        )
        yield Row(f"{what}: misses of epoch {epoch + 1}", measured, got, where)


def _halves(name: str, workload: Workload, found: Missed, part: int) -> Iterator[Row]:
    """A threshold of half of the cache, which doubles what may be fetched, and a fetch as large as the cache."""
    by_setting = {(each.cache, each.threshold): each for each in found if each.figure == "8"}
    half, smaller = by_setting[2048, 1024], by_setting[1024, 512]
    yield Row(
        f"{name}, cache 2048 beside 1024, threshold half of it: misses of epoch 1",
        _TOLD_BY_THRESHOLD[name],
        f"{found[half][0] / found[smaller][0] - 1:+.0%}",
        "Fig. 8",
    )
    fifty = missed(workload, HALF, HALF, 2048, part)
    yield Row(
        f"{name}, 50/50, cache 2048: misses of epochs 1, 2",
        " ".join(f"{each:.4f}"[1:] for each in half.measured),
        " ".join(f"{each:.4f}"[1:] for each in fifty),
        "Fig. 9",
    )
    full = missed(workload, 2048, 0, 2048, part)[0]
    what = f"{name}, 50/50 beside a fetch of 2048, cache 2048: misses of epoch 1"
    yield Row(what, _TOLD_BY_HALVES[name], f"{fifty[0] / full - 1:+.0%}", "Fig. 9")


def _rms(name: str, workload: Workload, found: Missed, part: int) -> Iterator[Row]:
    service = workload.clock.svc
    for what, other in (
        ("", service),
        (", fetches that do not share workers", replace(service, workers=math.inf)),
        (", no cost of insertion", replace(service, insert=0.0)),
    ):
        otherwise = Workload(workload.num_samples, replace(workload.clock, svc=other))
        rms = rms_of(missed_in(found, otherwise, part) if what else found)
        told = "-" if what else _TOLD_RMS[name]
        yield Row(f"{name}: rms of {2 * len(found)} miss rates{what}", told, f"{rms:.4f}", "Fig. 6 to 8")


def _curves(name: str, found: Missed) -> Iterator[Curve]:
    """Of batches of 512; and of Fig. 8 of the cache that the paper speaks of."""
    few = [each for each in found if each.batch == _FEW]
    word = name.partition("-")[0].lower()
    by_size = {each.fetch_size: each for each in few if each.cache == UNLIMITED}
    yield _beside(f"deli_fetch_size_{word}", "fetch size", by_size, found)
    yield _beside(f"deli_cache_{word}", "cache", {each.cache: each for each in few if each.figure == "7"}, found)
    of_cache = {each.threshold: each for each in few if each.figure in "78" and each.cache == 2048}
    yield _beside(f"deli_threshold_{word}", "threshold", of_cache, found)


def _beside(name: str, x: str, by_x: Mapping[int, Cell], found: Missed) -> Curve:
    lines = {}
    for epoch in (0, 1):
        lines[f"epoch {epoch + 1}"] = [(float(at), found[each][epoch]) for at, each in sorted(by_x.items())]
        lines[f"epoch {epoch + 1}, paper"] = [(float(at), each.measured[epoch]) for at, each in sorted(by_x.items())]
    return Curve(name, x, "misses", lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--part", type=int, default=1, choices=range(1, 21), metavar="N", help="of so many of the samples"
    )
    print_rows("DELI, sweeps", part_of_page(parser.parse_args().part).rows)
