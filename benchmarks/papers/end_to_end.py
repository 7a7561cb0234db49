"""Brand Table 4 and Fig. 10, Redox Table 6 and Fig. 4: epochs of PyTorch without a cache, CoorDL, redox and No-I/O, by
the clock, on a store that is bound by requests and on one that is bound by bytes.

    python -m benchmarks.papers.end_to_end [--part 100]

Three nodes, ImageNet-1k, ResNet50 in batches of 128, memory for 8 % of the dataset on each. What the papers' store and
GPUs take is not given: a small read takes as long as PyTorch's epoch says that it did (eight at once), and computing as
long as Table 1's overhead leaves. Everything else follows. Times are scaled up from the part that is simulated.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.papers.loop_clock import FetchService, LoopClock
from benchmarks.papers.ordered_reads import OrderedRun, keyed_orders, simulate_orders
from benchmarks.papers.page import Part, Row, print_rows
from benchmarks.papers.table6 import NUM_PODS, NUM_SAMPLES, WINDOW

__all__ = ["BYTES", "PAPER_HOURS", "REQUESTS", "epoch_hours", "part_of_page"]

BATCH, SAMPLE_BYTES, NODE_MEMORY, REMOTE_SAMPLES = 128, 1e5, 0.08, 10_000
PAPER_HOURS = {"PyTorch": 1.61, "CoorDL": 1.40, "redox": 0.71}
STEPS = -(-NUM_SAMPLES // (NUM_PODS * BATCH))
COMPUTE_HOURS = 0.58
"""Brand Table 1: ResNet50 takes 1.65 h, of which 1.07 are I/O (on P100)."""
PARALLEL = 8
REQUESTS = FetchService(
    parallel=PARALLEL, latency=PAPER_HOURS["PyTorch"] * 3600 * PARALLEL * NUM_PODS / NUM_SAMPLES, size=SAMPLE_BYTES,
    bandwidth=0.38e9,
)  # fmt: skip
"""A network file system: a small read takes .11 s."""
BYTES = FetchService(parallel=64, latency=0.01, size=SAMPLE_BYTES, bandwidth=0.38e9)
LINK = 35e6
"""Bytes a second of all nodes where these bind: so many that PyTorch's epoch takes about an hour."""
_PART = 100


def epoch_hours(system: str, service: FetchService, link: float, part: int) -> float:
    """Of an epoch after the first, of the whole dataset."""
    num_samples, compute = NUM_SAMPLES // part, COMPUTE_HOURS * 3600 / STEPS
    if system == "No-I/O":
        return COMPUTE_HOURS
    memory = int(NODE_MEMORY * num_samples) if system != "PyTorch" else 1
    clock = LoopClock(comp=compute, ahead=2, svc=service, link=link)
    common: dict[str, Any] = {"num_pods": NUM_PODS, "batch_size": BATCH, "clock": clock}
    if system == "redox":
        run = OrderedRun(
            num_samples, memory, policy="redox", window=WINDOW // part, remote_memory_samples=REMOTE_SAMPLES // part,
            **common,
        )  # fmt: skip
    else:
        run = OrderedRun(num_samples, memory, eviction="never", **common)
    _, second = simulate_orders(run, keyed_orders(run, 2), 2)
    steps = -(-num_samples // (NUM_PODS * BATCH))
    return (second.run_seconds or 0.0) * STEPS / steps / 3600


def _rows(hours: dict[str, float], expected: dict[str, str], store: str, where: str) -> Sequence[Row]:
    return [Row(f"{store}: {system}, hours", expected[system], f"{got:.2f}", where) for system, got in hours.items()]


def part_of_page(part: int = _PART) -> Part:
    systems = ("PyTorch", "CoorDL", "redox", "No-I/O")
    by_requests = {system: epoch_hours(system, REQUESTS, float("inf"), part) for system in systems}
    by_bytes = {system: epoch_hours(system, BYTES, LINK, part) for system in systems}
    told = {system: f"{hours:.2f}" for system, hours in PAPER_HOURS.items()} | {"No-I/O": "-"}
    where = "Brand Table 4, Redox Table 6"
    rows = [*_rows(by_requests, told, "bound by requests", where)]
    for other, claim in (("PyTorch", "2.27x (up to 4.57x)"), ("CoorDL", "1.97x (up to 1.96x)")):
        got = f"{by_requests[other] / by_requests['redox']:.2f}x"
        rows.append(Row(f"bound by requests: redox beside {other}", claim, got, "Brand Fig. 10, Redox Fig. 4"))
    rows += _rows(by_bytes, dict.fromkeys(systems, "-"), "bound by bytes (35 MB/s)", "not in the papers")
    got = f"{by_bytes['PyTorch'] / by_bytes['redox']:.2f}x"
    rows.append(Row("bound by bytes: redox beside PyTorch", "not shown", got, "not in the papers"))
    return Part("Brand and Redox", f"python -m benchmarks.papers.end_to_end --part {part}", rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, default=_PART, choices=range(1, 401), metavar="N")
    print_rows("End to end, by the clock", part_of_page(parser.parse_args().part).rows)
