"""DELI Fig. 6 to 9: misses by fetch size, cache size and threshold, of both workloads of the paper.

    python -m benchmarks.papers.deli_sweeps

Three nodes, batches of 512. The times are the paper's where it prints them (computing 14.7 and 147.2 s an epoch). What
its service takes was fitted, by an outside simulation, to the first epochs of Fig. 6 alone: see ``WORKLOADS``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks.papers.loop_clock import FetchService, LoopClock
from benchmarks.papers.ordered_reads import OrderedRun, keyed_orders, simulate_orders
from benchmarks.papers.page import Curve, Part, Row, print_rows

from refill_service.cache_core.exact.fetching import HALF, Fetching

__all__ = ["UNLIMITED", "WORKLOADS", "Workload", "missed", "part_of_page"]

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


def part_of_page() -> Part:
    rows: list[Row] = []
    lines: dict[str, list[tuple[float, float]]] = {}
    for name, workload in WORKLOADS.items():
        by_size = {size: missed(workload, size, 0, UNLIMITED) for size in range(256, 3073, 256)}
        lines |= {f"{name}, epoch 1": [(size, found[0]) for size, found in by_size.items()]}
        lines |= {f"{name}, epoch 2": [(size, found[1]) for size, found in by_size.items()]}
        told = {3072: "-, .105"} if name == "MNIST" else {}
        for size in (512, 1024, 2048, 3072):
            rows.append(_row(f"{name}, F {size}, no limit", told.get(size, "falls with F"), by_size[size], "Fig. 6"))
        for times in (0.5, 1, 2, 3):
            found = missed(workload, 1024, 0, int(1024 * times))
            rows.append(_row(f"{name}, F 1024, cache {times:g}x", "no better after 1x", found, "Fig. 7"))
        half_of_1024 = missed(workload, 1024, 512, 1024)
        for threshold in (512, 1024, 1536):
            found = missed(workload, 1024, threshold, 2048)
            told_by = {"MNIST": "-31 %", "CIFAR-10": "-80 %"}[name] if threshold == 1024 else "-"
            what = f"{name}, F 1024, cache 2048, threshold {threshold}: misses of epoch 1"
            rows.append(
                Row(
                    f"{what} beside a cache of 1024, threshold 512",
                    told_by,
                    f"{found[0] / half_of_1024[0] - 1:+.0%}",
                    "Fig. 8",
                )
            )
        half, twice = missed(workload, HALF, HALF, 2048), missed(workload, 2048, 0, 2048)
        told_half = {"MNIST": ".136, .150", "CIFAR-10": ".0213, .0313"}[name]
        rows.append(_row(f"{name}, 50/50, cache 2048", told_half, half, "Fig. 9"))
        told_by = {"MNIST": "small", "CIFAR-10": "-83 %"}[name]
        rows.append(
            Row(f"{name}, 50/50 beside full fetch, epoch 1", told_by, f"{half[0] / twice[0] - 1:+.0%}", "Fig. 9")
        )
    curve = Curve("deli_fetch_size", "fetch size", "misses", lines)
    return Part("DELI", "python -m benchmarks.papers.deli_sweeps", rows, [curve])


def _row(what: str, expected: str, found: tuple[float, float], where: str) -> Row:
    return Row(f"{what}: misses of epochs 1, 2", expected, f"{found[0]:.3f}, {found[1]:.3f}", where)


if __name__ == "__main__":
    print_rows("DELI, sweeps", part_of_page().rows)
