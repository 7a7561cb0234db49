"""What of the papers comes out here: each table and figure that is reproduced, in docs/PAPERS.md.

make papers                                          # all of it; Redox Table 6 at its full size: PAPERS_FLAGS=--whole
make papers PAPERS_FLAGS='--only shade deli_sweeps'  # these parts alone, the others as they were made last
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks.papers import (
    accuracy,
    coordl,
    deepio,
    deepio_pipeline,
    deli,
    deli_sweeps,
    end_to_end,
    redox_bound,
    redox_sweeps,
    shade,
    shade_accuracy,
    shade_caches,
    table6,
)
from benchmarks.papers.kept_parts import MadePart, about_now, keep, kept
from benchmarks.papers.page import Part, Row, as_markdown, svg_of

_ROOT = Path(__file__).parents[2]
_DOCS, _KEPT = _ROOT / "docs", _ROOT / "build" / "papers"
_TABLE_6 = 16
"""One part of so many of Table 6's dataset; remote requests with prefetch are then up to a fifth more."""

_INTRODUCTION = """# The papers' tables and figures

Written by `make papers` in {minutes:.0f} minutes. Each part's command prints it, too; beside it stand the day, the
commit and the machine. Where a row's expectation begins with EXACT, an outside simulation of the paper's rules says it;
else it is as printed or measured by the authors, or what the text says of a curve. Circles in a plot are the paper's
points.

**Where ours differs**

- *Redirection pays where requests bind.* On a link that is bound by bytes the order of systems is reversed: redox reads
  each chunk six times (`end_to_end`; [by real pods](#real-pods)). A planned order reads each byte once.
- *End to end*: a small read was fitted to PyTorch's row, computing to Table 1; CoorDL's and redox's rows follow. Here
  loading takes the store's time alone, no network and no decoding: SqueezeNet, which computes least, gains more than
  theirs; the variants of redox take as long as each other; CoorDL reads nothing where memory holds the dataset.
- *Use of remote memory* (Brand Fig. 12) does not end at 1.5 GB, but where the window does, which the papers don't give.
  Nor does an epoch take longer beyond it: here that memory is taken from nobody.
- *DELI*: its service's times were fitted to the first epochs of Fig. 6. Of the runs with a threshold, six of CIFAR-10
  miss .03 to .07 less than was measured, so that it gains 66 % by the threshold of Fig. 8, not 80 %. They are most of
  its rms. Where the outside simulation's is less we did not find: neither in the order drawn, nor in nodes that are not
  in step.
- *SHADE is not faster to an accuracy by epochs* (Fig. 8; [on images](ORDERS.md#important-samples-more-often-shade)),
  and learns less in the end. By time of loading it is faster to what both reach. How much depends on what a miss takes,
  which the paper does not say: here 11 hits. So do its throughput and load times. Hits are of 2,000 samples, a tenth of
  the outside simulation's: some hundredths more.
- *Accuracy*: on this made-up data blocks of 4 and 16 learn as well as a shuffle, and only larger ones worse.

**What needs the authors' hardware** is not here: epoch times but those by the clock; Brand Fig. 9, 11 and Table 1;
SHADE Fig. 1, 3, 4, the deviations of Fig. 10 and Fig. 11's training times; DeepIO Fig. 1 to 6, 9 to 12 and Table I;
DELI Table I, Fig. 3, 4; accuracies of ResNet50 and AlexNet. Real pods are measured in [Performance](PERFORMANCE.md).

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
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(parts_of_page(_TABLE_6)),
        metavar="NAME",
        help="make these parts alone, and take the others as they were made last: %(choices)s (default: all)",
    )
    args = parser.parse_args()
    parts = parts_of_page(1 if args.whole else _TABLE_6)
    wanted = args.only or list(parts)
    if missing := [name for name in parts if name not in wanted and kept(_KEPT, name) is None]:
        parser.error(f"not made yet: {' '.join(missing)}")
    about = about_now()
    for name in wanted:
        began = time.monotonic()
        part = parts[name]()
        keep(_KEPT, name, MadePart(part, about, time.monotonic() - began))
        print(f"\n{part.paper}: {as_markdown(part)}", flush=True)
    write_page([made for name in parts if (made := kept(_KEPT, name)) is not None], _DOCS)


def parts_of_page(table6_part: int) -> dict[str, Callable[[], Part]]:
    """By the name of the program that makes each, in the order of the page."""
    of_table = f"python -m benchmarks.papers.table6 --part {table6_part}"
    return {
        "table6": lambda: _of_rows(
            "Brand and Redox", of_table, table6.rows(table6_part), "Brand Table 5, Redox Table 6"
        ),
        "redox_sweeps": redox_sweeps.part_of_page,
        "end_to_end": end_to_end.part_of_page,
        "redox_bound": redox_bound.part_of_page,
        "accuracy": accuracy.part_of_page,
        "deli": lambda: _of_rows("DELI", "python -m benchmarks.papers.deli", deli.rows(), "section IV"),
        "deli_sweeps": deli_sweeps.part_of_page,
        "shade": lambda: _of_rows("SHADE", "python -m benchmarks.papers.shade", shade.rows(), "section 4"),
        "shade_caches": shade_caches.part_of_page,
        "shade_accuracy": shade_accuracy.part_of_page,
        "deepio": lambda: _of_rows("DeepIO", "python -m benchmarks.papers.deepio", deepio.rows(), "Fig. 7, 8"),
        "deepio_pipeline": deepio_pipeline.part_of_page,
        "coordl": lambda: _of_rows("CoorDL", "python -m benchmarks.papers.coordl", coordl.rows(), "its cache"),
    }


def write_page(made: Sequence[MadePart], folder: Path) -> None:
    """``PAPERS.md`` and its plots."""
    pieces, paper = [_INTRODUCTION.format(minutes=-(-sum(each.seconds for each in made) // 60))], ""
    (folder / "papers").mkdir(exist_ok=True)
    for each in made:
        if each.part.paper != paper:
            paper = each.part.paper
            pieces.append(f"\n## {paper}\n")
        pieces += [f"\n{as_markdown(each.part, each.about)}\n"]
        for curve in each.part.curves:
            (folder / "papers" / f"{curve.name}.svg").write_text(svg_of(curve))
    (folder / "PAPERS.md").write_text("".join(pieces).replace("\n\n\n", "\n\n"))


def _of_rows(paper: str, command: str, rows: Iterable[Row], where: str) -> Part:
    return Part(paper, command, [Row(row.what, row.expected, row.got, row.where or where) for row in rows])


if __name__ == "__main__":
    main()
