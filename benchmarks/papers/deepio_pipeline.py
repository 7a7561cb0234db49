"""DeepIO Fig. 13: how long does training take whose data are read meanwhile? By the clock.

    python -m benchmarks.papers.deepio_pipeline

Eight nodes, batches of 128 elements of 256 KB, 8 GB, 2526.25 MB/s for all nodes, as in the paper; eight elements are
read as one, which takes as long. R = 0: a loop that
reads a batch when it wants it; R < 1: batches are read while it trains; R = 1: nothing is read.
"""

from __future__ import annotations

from benchmarks.papers.loop_clock import FetchService, LoopClock
from benchmarks.papers.ordered_reads import OrderedRun, keyed_orders, simulate_orders
from benchmarks.papers.page import Curve, Part, Row, print_rows

__all__ = ["epoch_seconds", "part_of_page"]

NODES, BATCH, ELEMENT, LINK, STEPS = 8, 16, 8 * 256e3, 2526.25e6, 32
NUM_SAMPLES = NODES * BATCH * STEPS
READ = NODES * BATCH * ELEMENT / LINK
"""Seconds that a step's elements take."""
MODES = ("R = 0", "R < 1", "R = 1")


def epoch_seconds(mode: str, training: float) -> float:
    """:param training: seconds of a step."""
    if mode == "R = 1":
        clock = LoopClock(comp=training, svc=FetchService())
    else:
        service = FetchService(parallel=BATCH, size=ELEMENT, bandwidth=1e12)
        clock = LoopClock(comp=training, svc=service, link=LINK, ahead=2 if mode == "R < 1" else 0)
    run = OrderedRun(NUM_SAMPLES, 1, num_pods=NODES, batch_size=BATCH, eviction="never", clock=clock)
    (epoch,) = simulate_orders(run, keyed_orders(run, 1), 1)
    return epoch.run_seconds or 0.0


def part_of_page() -> Part:
    rows: list[Row] = []
    lines: dict[str, list[tuple[float, float]]] = {mode: [] for mode in MODES}
    for training in (0.005, 0.01, 0.05, 0.1):
        expected = {
            "R = 0": STEPS * (training + READ),
            "R < 1": READ + (STEPS - 1) * max(training, READ) + training,
            "R = 1": STEPS * training,
        }
        for mode in MODES:
            got = epoch_seconds(mode, training)
            lines[mode].append((training * 1000, got))
            what = f"{mode}, {training * 1000:g} ms a step: seconds of an epoch, by the paper's bandwidth"
            rows.append(Row(what, f"{expected[mode]:.2f}", f"{got:.2f}", "Fig. 13"))
    curve = Curve("deepio_pipeline", "ms of a step's training", "seconds", lines)
    return Part("DeepIO", "python -m benchmarks.papers.deepio_pipeline", rows, [curve])


if __name__ == "__main__":
    print_rows("DeepIO, pipelining", part_of_page().rows)
