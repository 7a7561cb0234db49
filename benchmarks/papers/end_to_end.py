"""Brand Table 4 and Fig. 10, Redox Table 6 and Fig. 4: epochs of PyTorch without a cache, CoorDL, redox and No-I/O, by
the clock, on a store that is bound by requests and on one that is bound by bytes.

    python -m benchmarks.papers.end_to_end [--part 100]

ImageNet-1k; three nodes with memory for 8 % of the dataset each, and ResNet50 in batches of 128, where it does not say
otherwise. What the papers' store and GPUs take is not given: a small read takes as long as PyTorch's epoch says that it
did (eight at once), and computing as long as Table 1's overhead leaves. Everything else follows. Times are scaled up
from the part that is simulated. The network between nodes takes no time.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.papers.loop_clock import FetchService, LoopClock
from benchmarks.papers.ordered_reads import EpochReads, OrderedRun, keyed_orders, simulate_orders
from benchmarks.papers.page import Part, Row, print_rows
from benchmarks.papers.table6 import NUM_PODS, NUM_SAMPLES, WINDOW

__all__ = [
    "BYTES",
    "LINK",
    "REQUESTS",
    "RESNET50",
    "SAMPLE_BYTES",
    "SQUEEZENET",
    "Model",
    "Setup",
    "epoch",
    "epoch_hours",
    "part_of_page",
    "scaled_hours",
]

SAMPLE_BYTES, REMOTE_SAMPLES = 1e5, 10_000
PAPER_HOURS = {"PyTorch": 1.61, "CoorDL": 1.40, "redox": 0.71}
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


@dataclass(frozen=True)
class Model:
    """Of Brand Table 1, on three nodes: computing is an epoch without its I/O (on P100)."""

    compute_hours: float
    batch: int

    @property
    def step_seconds(self) -> float:
        return self.compute_hours * 3600 / -(-NUM_SAMPLES // (NUM_PODS * self.batch))


RESNET50, SQUEEZENET = Model(1.65 - 1.07, 128), Model(1.40 - 1.27, 512)


@dataclass(frozen=True)
class Setup:
    nodes: int = NUM_PODS
    memory: float = 0.08
    """Of the dataset, on each."""
    model: Model = RESNET50

    def num_steps(self, part: int = 1) -> int:
        return -(-NUM_SAMPLES // part // (self.nodes * self.model.batch))


def epoch(system: str, service: FetchService, link: float, part: int, setup: Setup, **of_redox: Any) -> EpochReads:
    """One after the first, of so small a part of the dataset.

    :param of_redox: other settings than the papers'.
    """
    num_samples = NUM_SAMPLES // part
    memory = int(setup.memory * num_samples) if system != "PyTorch" else 1
    clock = LoopClock(comp=setup.model.step_seconds, ahead=2, svc=service, link=link)
    common: dict[str, Any] = {"num_pods": setup.nodes, "batch_size": setup.model.batch, "clock": clock}
    if system == "redox":
        window = WINDOW // part if setup.nodes > 1 else 0  # one node has nobody to send ahead to
        papers = {"window": window, "remote_memory_samples": REMOTE_SAMPLES // part}
        run = OrderedRun(num_samples, memory, policy="redox", **common, **papers | of_redox)
    else:
        run = OrderedRun(num_samples, memory, eviction="never", **common)
    _, second = simulate_orders(run, keyed_orders(run, 2), 2)
    return second


def epoch_hours(
    system: str, service: FetchService, link: float, part: int, setup: Setup | None = None, **of_redox: Any
) -> float:
    """Of an epoch after the first, of the whole dataset; parameters as of :func:`epoch`."""
    setup = setup or Setup()
    if system == "No-I/O":
        return setup.num_steps() * setup.model.step_seconds / 3600
    return scaled_hours(epoch(system, service, link, part, setup, **of_redox), part, setup)


def scaled_hours(found: EpochReads, part: int, setup: Setup) -> float:
    """Of the whole dataset, if so small a part of it takes as long."""
    return (found.run_seconds or 0.0) * setup.num_steps() / setup.num_steps(part) / 3600


def part_of_page(part: int = _PART) -> Part:
    systems = ("PyTorch", "CoorDL", "redox", "No-I/O")
    by_requests = {system: epoch_hours(system, REQUESTS, math.inf, part) for system in systems}
    by_bytes = {system: epoch_hours(system, BYTES, LINK, part) for system in systems}
    told = {system: f"{hours:.2f}" for system, hours in PAPER_HOURS.items()} | {"No-I/O": "-"}
    where = "Brand Table 4, Redox Table 6"
    rows = [*_rows(by_requests, told, "bound by requests", where)]
    for what, expected, of_redox in (
        ("random selection", "0.76", {"refill": "random"}),
        ("no prefetching", "0.87", {"window": 0}),
        ("no optimization", "0.93", {"refill": "random", "window": 0}),
    ):
        hours = epoch_hours("redox", REQUESTS, math.inf, part, **of_redox)
        rows.append(Row(f"bound by requests: redox, {what}, hours", expected, f"{hours:.2f}", where))
    rows += _speedups(part)
    rows += _rows(by_bytes, dict.fromkeys(systems, "-"), "bound by bytes (35 MB/s)", "not in the papers")
    got = f"{by_bytes['PyTorch'] / by_bytes['redox']:.2f}x"
    rows.append(Row("bound by bytes: redox beside PyTorch", "not shown", got, "not in the papers"))
    return Part("Brand and Redox", f"python -m benchmarks.papers.end_to_end --part {part}", rows)


def _rows(hours: dict[str, float], expected: dict[str, str], store: str, where: str) -> Sequence[Row]:
    return [Row(f"{store}: {system}, hours", expected[system], f"{got:.2f}", where) for system, got in hours.items()]


def _speedups(part: int) -> list[Row]:
    """Of ResNet50, which computes most, and SqueezeNet, which computes least."""
    rows = []
    for nodes, memory, beside_pytorch, beside_coordl in (
        (3, 0.08, "2.26x", "1.96x"),
        (5, 0.08, "2.47x", "1.69x"),
        (1, 0.35, "2.13x", "1.45x"),
        (3, 0.35, "4.57x", "1.32x"),
    ):
        setups = [Setup(nodes, memory, model) for model in (RESNET50, SQUEEZENET)]
        hours = {
            system: [epoch_hours(system, REQUESTS, math.inf, part, setup) for setup in setups]
            for system in ("PyTorch", "CoorDL", "redox")
        }
        for other, told in (("PyTorch", beside_pytorch), ("CoorDL", beside_coordl)):
            got = ", ".join(f"{a / b:.2f}x" for a, b in zip(hours[other], hours["redox"], strict=True))
            what = f"{nodes} nodes" if nodes > 1 else "1 node"
            what += f", memory for {memory:.0%} each: redox beside {other}; ResNet50, SqueezeNet"
            rows.append(Row(what, f"up to {told}", got, "Brand Fig. 10, Redox Fig. 4"))
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, default=_PART, choices=range(1, 401), metavar="N")
    print_rows("End to end, by the clock", part_of_page(parser.parse_args().part).rows)
