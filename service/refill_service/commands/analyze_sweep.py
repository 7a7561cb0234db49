"""``--sweep`` of ``refill analyze`` and ``refill simulate``: what jobs with one ``read_seed`` read together."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING

from refill.errors import InvalidInput

if TYPE_CHECKING:
    from refill_service.planning.analysis import Analysis
    from refill_service.planning.simulated_job import EpochReads
    from refill_service.planning.swept_jobs import Sweep

_LATER_EPOCH = 1
"""The first one begins with little memory."""


def add_sweep_options(parser: argparse.ArgumentParser, instead: str) -> None:
    """:param instead: of what the command says else."""
    group = parser.add_argument_group("a sweep", "Planned jobs with one read_seed and other seeds, side by side.")
    group.add_argument(
        "--sweep", type=int, metavar="JOBS", help=f"what so many read together, {instead}, each with its own memory"
    )
    group.add_argument(
        "--behind",
        type=float,
        metavar="PART",
        help="how far each is behind the one before it: a part of M, what memory holds for the order (default: 0)",
    )


def sweep_of(args: argparse.Namespace) -> Sweep | None:
    """What was given of these options, if anything was. Raises :class:`InvalidInput`."""
    from refill_service.planning.swept_jobs import Sweep

    if args.sweep is None:
        if args.behind is not None:
            raise InvalidInput("--behind goes with --sweep: how far its jobs are apart")
        return None
    sweep = Sweep(args.sweep, args.behind or 0.0)
    sweep.check()
    return sweep


def print_sweep(args: argparse.Namespace, analysis: Analysis, chunk_sizes: list[int], sweep: Sweep) -> int:
    """For each chunk size."""
    from refill_service.commands.fitting_sizes import of_those_that_fit

    if args.pod_memory is not None:
        raise InvalidInput("--sweep goes with --chunk-memory, of each job, and not with --pod-memory")
    rows, left_out = of_those_that_fit(analysis, chunk_sizes, lambda chunk_size: _reads(analysis, chunk_size, sweep))
    if args.json:
        each = [{"chunk_size": chunk_size} | dataclasses.asdict(reads) for chunk_size, reads in rows.items()]
        print(json.dumps({"sweep": sweep.num_jobs, "behind": sweep.behind, "rows": each, "left_out": left_out}))
    else:
        _print(rows, left_out, analysis, sweep)
    return 0


def _reads(analysis: Analysis, chunk_size: int, sweep: Sweep) -> EpochReads:
    """Of the whole dataset, where only some of it was simulated."""
    from refill_service.planning.swept_jobs import swept_epochs

    shape = analysis.shape
    spec, pods = analysis.simulated_job("planned", chunk_size)
    of_jobs = swept_epochs(
        sweep,
        spec,
        shape.first_sample,
        shape.lengths,
        pods,
        _LATER_EPOCH + 1,
        batch_size=max(1, analysis.batch_size * shape.simulated // shape.num_samples // analysis.num_pods),
    )[_LATER_EPOCH]
    times = shape.num_samples / shape.simulated
    return dataclasses.replace(
        of_jobs, gets=round(of_jobs.gets * times), bytes_read=round(of_jobs.bytes_read * analysis.scale)
    )


def _print(rows: dict[int, EpochReads], left_out: list[str], analysis: Analysis, sweep: Sweep) -> None:
    from rich.console import Console
    from rich.table import Table

    from refill_service.datasets.progress import bytes_text

    shape = analysis.shape
    print(
        f"{sweep.num_jobs} jobs with one read_seed, each {sweep.behind:g} M behind the one before it; "
        f"{shape.num_samples:,} samples, {bytes_text(shape.total_bytes)}; memory for chunks of each job "
        f"{bytes_text(analysis.memory_bytes)} over {analysis.num_pods} pod{'s' * (analysis.num_pods > 1)}\n"
    )
    table = Table(box=None, pad_edge=False)
    for name in ("K", "GETs", "read", "x dataset", "cost"):
        table.add_column(name, justify="left" if name == "K" else "right")
    for chunk_size, reads in rows.items():
        table.add_row(
            str(chunk_size),
            f"{reads.gets:,}",
            bytes_text(reads.bytes_read),
            f"{reads.bytes_read / shape.total_bytes:.2f}x",
            f"${analysis.store.dollars(reads.gets, reads.bytes_read):,.3g}",
        )
    Console().print(table)
    print()
    for line in left_out:
        print(f"left out: {line}")
    print("all of one epoch of each job, all jobs together; K is their chunk_size")
