"""What of the papers comes out here: each table and figure that is reproduced, in docs/PAPERS.md.

make papers          # some ten minutes on two cores; PAPERS_FLAGS=--whole: Redox Table 6 at its full size
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

from benchmarks.machine import machine
from benchmarks.papers import (
    accuracy,
    coordl,
    deepio,
    deepio_pipeline,
    deli,
    deli_cells,
    deli_sweeps,
    end_to_end,
    redox_bound,
    redox_sweeps,
    shade,
    shade_caches,
    table6,
)
from benchmarks.papers.page import Part, Row, as_markdown, svg_of

_DOCS = Path(__file__).parents[2] / "docs"
_TABLE_6 = 16
"""One part of so many of Table 6's dataset; remote requests with prefetch are then up to a fifth more."""

_INTRODUCTION = """# The papers' tables and figures

Written by `make papers` ({machine}). Each row's command prints it. Where a row's expectation begins
with EXACT, an outside simulation of the paper's rules says it; else it is as printed, or what the text says of a curve.
Circles in a plot are the paper's points.

**Where ours differs**

- *Redirection pays where requests bind.* On a link that is bound by bytes the order of systems is reversed: redox reads
  each chunk six times (`end_to_end`; [by real pods](#real-pods)). A planned order reads each byte once.
- *SHADE is not three times faster to an accuracy* (Fig. 8, [measured](ORDERS.md#important-samples-more-often-shade)).
  Its throughput beside LRU and NoPFS follows from what a miss takes, which the paper does not say: here it is 11 hits.
- *SHADE's hits* are of 2,000 samples, a tenth of the outside simulation's: some hundredths more.
- *Use of remote memory* (Brand Fig. 12) does not end at 1.5 GB, but where the window does. The papers don't give that.
- *DELI Fig. 8*: CIFAR-10 gains 66 % by the threshold, not 80 %. In six of its sixteen runs with one misses are .03 to
  .07 fewer than measured: most of the rms of `deli_cells`. *Fig. 9*: the second epoch depends on the order drawn.
- *Accuracy*: on this made-up data blocks of 4 and 16 learn as well as a shuffle, and only larger ones worse.
- *End to end*: a small read was fitted to PyTorch's row, computing to Table 1. CoorDL's and redox's rows follow.

**What needs the authors' hardware** is not here: epoch times but those of `end_to_end`; Brand Fig. 9, 11, 15 and Table
1; SHADE Fig. 1, 3, 4 and Fig. 11's training times; DeepIO Fig. 1 to 6, 9 to 12 and Table I; DELI Table I, Fig. 3, 4;
accuracies of ResNet50 and AlexNet. Real pods are measured in [Performance](PERFORMANCE.md).

## Real pods

Three pods before a store that is bound by requests: it holds each GET for 0.3 s, and a pod has eight under way; 1,024
samples of 50 KB in batches of 128, memory for a fifth, one rank whose computing takes 4.6 s an epoch. Second epoch,
counted at the store (`python benchmarks/orders.py --requests`, as root; AMD EPYC, 2 cores, busy with other work). Real
pods put neighbouring reads together. Redox is 2.7 times as fast as PyTorch, and 1.9 times as CoorDL:

| | GETs of 64 | bytes | seconds | by the clock: GETs | bytes | seconds |
| --- | --- | --- | --- | --- | --- | --- |
| PyTorch without a cache | 64.0 | 1.00x | 19.0 | 64.0 | 1.00x | 12.8 (no clock: GETs x 0.3 s / 24) |
| CoorDL (`exact`, never) | 47.3 | 0.82x | 13.9 | 51.6 | 0.81x | 12.9 |
| redox, K=8 | 13.3 | 2.22x | 7.2 | 18.1 | 2.27x | 6.4 |
| planned, K=8 | 8.0 | 1.01x | - | - | - | - |

Pods behind a link that is slow enough for this machine, 50 Mbit/s: 2,048 samples of 50 KB, `exact` with K=8, second
epoch (`python benchmarks/orders.py --pods 1 2 3 --mbit 50 --only "exact, K=8"`). The clock's loader asks for one batch
after another, real workers at once:

| pods | seconds | by the clock | GETs of 64 | by the clock |
| --- | --- | --- | --- | --- |
| 1 | 27.4 | 32.3 | 12.4 | 13.1 |
| 2 | 29.7 | 32.6 | 13.3 | 13.0 |
| 3 | 29.7 | 33.1 | 13.4 | 13.3 |
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--whole", action="store_true", help="Redox Table 6 at its full size: some minutes")
    args = parser.parse_args()
    write_page(all_parts(1 if args.whole else _TABLE_6), _DOCS)


def all_parts(table6_part: int) -> Iterable[Part]:
    """One after another, as they are run."""
    of_table = f"python -m benchmarks.papers.table6 --part {table6_part}"
    made: list[Callable[[], Part]] = [
        lambda: _of_rows("Brand and Redox", of_table, table6.rows(table6_part), "Brand Table 5, Redox Table 6"),
        redox_sweeps.part_of_page,
        end_to_end.part_of_page,
        redox_bound.part_of_page,
        accuracy.part_of_page,
        lambda: _of_rows("DELI", "python -m benchmarks.papers.deli", deli.rows(), "Fig. 5, section IV, Table II"),
        deli_sweeps.part_of_page,
        deli_cells.part_of_page,
        lambda: _of_rows("SHADE", "python -m benchmarks.papers.shade", shade.rows(), "section 4"),
        shade_caches.part_of_page,
        lambda: _of_rows("DeepIO", "python -m benchmarks.papers.deepio", deepio.rows(), "Fig. 7, 8"),
        deepio_pipeline.part_of_page,
        lambda: _of_rows("CoorDL", "python -m benchmarks.papers.coordl", coordl.rows(), "its cache"),
    ]
    for each in made:
        yield each()


def write_page(parts: Iterable[Part], folder: Path) -> None:
    """``PAPERS.md`` and its plots; each part is printed when it is there."""
    pieces, paper = [_INTRODUCTION.format(machine=machine())], ""
    (folder / "papers").mkdir(exist_ok=True)
    for part in parts:
        text = as_markdown(part)
        print(f"\n{part.paper}: {text}", flush=True)
        if part.paper != paper:
            paper = part.paper
            pieces.append(f"\n## {paper}\n")
        pieces += [f"\n{text}\n"]
        for curve in part.curves:
            (folder / "papers" / f"{curve.name}.svg").write_text(svg_of(curve))
    (folder / "PAPERS.md").write_text("".join(pieces).replace("\n\n\n", "\n\n"))


def _of_rows(paper: str, command: str, rows: Iterable[Row], where: str) -> Part:
    return Part(paper, command, [Row(row.what, row.expected, row.got, row.where or where) for row in rows])


if __name__ == "__main__":
    main()
