"""What does more memory buy, under each policy? GETs and bytes of an epoch, by `refill simulate`, as a plot.

    python benchmarks/order_frontier.py --plot docs/orders.svg      # some three minutes on two cores

An epoch after the first, of one pod; a sample of the dataset counts as one, so that bytes are in datasets.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from machine import machine

MEMORY = (0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5)
"""Parts of the dataset."""


@dataclass(frozen=True)
class Shown:
    label: str
    options: str
    colour: str
    style: str = "o-"


POLICIES = (
    Shown("bucket alone", "", "#555555", ":"),
    Shown("exact, lru", "--policy exact --set eviction=lru --set read_ahead=0 --chunk-size 1", "#bcbd22", "o--"),
    Shown(
        "exact, never: the bound of bytes in order",
        "--policy exact --set eviction=never --set read_ahead=0 --chunk-size 1",
        "#2ca02c",
    ),
    Shown("exact, K=8", "--policy exact --set read_ahead=0 --chunk-size 8", "#9467bd"),
    Shown("exact, K=64", "--policy exact --set read_ahead=0 --chunk-size 64", "#8c564b"),
    Shown("redox, K=64", "--policy redox --chunk-size 64", "#d62728", "s-"),
    Shown("planned, K=8", "--policy planned --chunk-size 8", "#1f77b4", "^--"),
    Shown("planned, K=16", "--policy planned --chunk-size 16", "#ff7f0e", "^:"),
    Shown("planned, K=32", "--policy planned --chunk-size 32", "#e377c2", "^-"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=16_384)
    parser.add_argument("--plot", type=Path, help="a .png or .svg")
    args = parser.parse_args()
    print(f"{machine()}; {args.samples:,} samples; GETs for 64 samples and bytes in datasets, of the second epoch")
    jobs = [(shown, part) for shown in POLICIES if shown.options for part in MEMORY]
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(jobs, pool.map(lambda job: simulated(job[0], job[1], args.samples), jobs), strict=True))
    found |= {(POLICIES[0], part): (64.0, 1.0) for part in MEMORY}
    print(f"{'memory':44}" + "".join(f"{part:>15.1%}" for part in MEMORY))
    for shown in POLICIES:
        cells = (found[shown, part] for part in MEMORY)
        print(f"{shown.label:44}" + "".join(f"{gets:8.2f} {data:5.2f}x" for gets, data in cells))
    if args.plot:
        draw(args.plot, found, args.samples)


def simulated(shown: Shown, part: float, samples: int) -> tuple[float, float]:
    """GETs for 64 samples, and datasets read."""
    if "exact" not in shown.options:  # ends of an epoch weigh in few chunks; and these take little time
        samples *= 8
    options = f"--samples {samples} --memory-samples {int(samples * part)} --pods 1 --epochs 2 --json"
    argv = [sys.executable, "-m", "refill_service.cli", "simulate", *shown.options.split(), *options.split()]
    epoch = json.loads(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)["epochs"][1]
    return epoch["gets"] / samples * 64, epoch["samples_read"] / samples


def draw(path: Path, found: dict[tuple[Shown, float], tuple[float, float]], samples: int) -> None:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter, StrMethodFormatter

    matplotlib.rcParams["svg.hashsalt"] = "refill"  # the same figures, the same file
    figure = Figure(figsize=(10, 5.4), dpi=150, layout="constrained")
    panels = figure.subplots(1, 2)
    titles = ("requests: GETs for 64 samples", "bytes: datasets read in an epoch")
    ticks = ((1, 2, 4, 8, 16, 32, 64), (0.5, 1, 2, 4, 8, 16))
    for which, (axes, title, marks) in enumerate(zip(panels, titles, ticks, strict=True)):
        for shown in POLICIES:
            values = [found[shown, part][which] for part in MEMORY]
            axes.plot(MEMORY, values, shown.style, color=shown.colour, label=shown.label, markersize=4)
        axes.set_title(title, fontsize=10)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xticks(MEMORY)
        axes.set_yticks(marks)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda part, _: f"{part * 100:g}%"))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_formatter(NullFormatter())
        axes.tick_params(axis="x", labelsize=8)
        axes.set_xlabel("memory of all pods, part of the dataset")
        axes.grid(True, which="major", alpha=0.25)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8)
    figure.suptitle(
        f"An epoch after the first; refill simulate, one pod, {samples:,} samples (not exact: {8 * samples:,})",
        fontsize=11,
    )
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
