"""``refill analyze --part``: what a part of a dataset costs where it lies, and when it is worth packing alone."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from refill.errors import InvalidInput
from refill.protocol.part_choice import Narrowed, checked_ids, in_fraction
from refill.protocol.wire_format import Int64Array

if TYPE_CHECKING:
    from refill_service.planning.analysis import Analysis
    from refill_service.planning.part_reads import PartReads


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--part",
        metavar="PART",
        help="what an epoch of a part of the dataset reads, in place of all else: 0.01, a hundredth at random, as "
        "where(fraction=0.01); or FILE.npy, the ids of the samples",
    )


def print_part(args: argparse.Namespace, analysis: Analysis, chunk_sizes: list[int]) -> int:
    from refill_service.commands.fitting_sizes import of_those_that_fit
    from refill_service.planning.part_reads import part_reads

    ids = _ids(args.part, analysis.shape.num_samples)
    fitting, left_out = of_those_that_fit(analysis, chunk_sizes, partial(part_reads, analysis, ids))
    rows = list(fitting.values())
    if args.json:
        found = [dataclasses.asdict(row) for row in rows]
        print(json.dumps({"part": args.part, "rows": found, "left_out": left_out}))
    else:
        _print(rows, left_out, analysis)
    return 0


def _ids(part: str, num_samples: int) -> Int64Array:
    if not part.endswith(".npy"):
        of_all = Narrowed(num_samples)
        of_all.keep(f"--part {part}", in_fraction(of_all.ids, part, "--part"))  # type: ignore[arg-type]
        return of_all.ids
    try:
        ids = checked_ids(f"the ids in {part}", np.load(part, allow_pickle=False), num_samples)
    except (OSError, ValueError, EOFError) as error:
        raise InvalidInput(f"--part {part} can't be read: {str(error)[:200]}") from error
    if not len(ids):
        raise InvalidInput(f"--part {part} holds no ids")
    return ids


def _print(rows: list[PartReads], left_out: list[str], analysis: Analysis) -> None:
    from rich.console import Console
    from rich.table import Table

    from refill_service.datasets.progress import bytes_text

    shape, first = analysis.shape, rows[0]
    print(
        f"{first.samples:,} of {shape.num_samples:,} samples, {bytes_text(first.part_bytes)} of "
        f"{bytes_text(shape.total_bytes)}; memory for chunks {bytes_text(analysis.memory_bytes)} over "
        f"{analysis.num_pods} pod{'s' * (analysis.num_pods > 1)}\n"
    )
    table = Table(box=None, pad_edge=False)
    for name in ("K", "GETs", "samples/GET", "read", "x wanted", "cost", "pack from epochs"):
        table.add_column(name, justify="left" if name == "K" else "right")
    for row in rows:
        least = row.epochs_until_packed_is_less
        table.add_row(
            str(row.chunk_size),
            f"{row.gets:,}",
            f"{row.samples / max(1, row.gets):.1f}",
            bytes_text(row.bytes_read),
            f"{row.amplification:.2f}x",
            f"${analysis.store.dollars(row.gets, row.bytes_read):,.3g}",
            "-" if math.isinf(least) else f"{least:,.0f}",
        )
    Console().print(table)
    print()
    for line in left_out:
        print(f"left out: {line}")
    print(
        "all of one epoch; x wanted: bytes read for each byte of the part. Packed alone, it is read once an epoch, K "
        "samples a GET;\npacking reads it once as above, and pays from so many epochs on. K is the job's chunk_size"
    )
