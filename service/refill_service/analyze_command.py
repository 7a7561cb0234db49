"""``refill analyze``: arguments in; a table, a recommendation, JSON or a plot out."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from refill.errors import InvalidInput, RefillError
from refill_service.analysis import (
    ENOUGH_CO_BATCH,
    MATES,
    UNIFORM_DISTANCE,
    Analysis,
    Recommendation,
    Store,
    Workload,
    analyze,
    recommend,
)
from refill_service.datasets.commands import add_store_options, store_settings_of
from refill_service.settings import Settings, parse_bytes

__all__ = ["add_command"]

_REDOX_CHUNK_SIZE = 64
_SIMULATED_SAMPLES = 131_072


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "analyze",
        help="which chunk size suits a dataset and its memory: cost, time and quality of the shuffle",
        description="Simulate an epoch for policy redox and for drain at several chunk sizes, compare what they cost"
        " and how well they shuffle, and recommend a chunk size. Times are floors by a simple model: docs/ANALYZE.md.",
        epilog="example: refill analyze s3://datasets/imagenet --memory 12GiB --pods 3 --plot frontier.svg",
    )
    parser.add_argument("dataset", nargs="?", metavar="DATASET", help="s3://bucket/prefix, file:///folder, or a path")
    parser.add_argument("--samples", type=int, metavar="N", help="in place of a dataset: so many samples in one blob")
    parser.add_argument(
        "--sample-bytes", default="100kB", metavar="B", help="with --samples, bytes of a sample (default: 100kB)"
    )
    parser.add_argument(
        "--memory",
        default="10%",
        metavar="B",
        help="memory for chunks, of all pods together: 12GiB, or a part of the dataset (default: 10%%)",
    )
    parser.add_argument("--pods", type=int, default=1, help="pods, each the home of one rank (default: 1)")
    parser.add_argument("--batch-size", type=int, default=256, metavar="B", help="samples of a batch (default: 256)")
    parser.add_argument(
        "--chunk-sizes", default="4,8,16,32,64,128", metavar="K,...", help="for drain (default: 4,8,16,32,64,128)"
    )
    parser.add_argument(
        "--group-order",
        choices=["consecutive", "interleaved"],
        default="consecutive",
        help="which chunks share an abstract chunk (default: consecutive)",
    )
    parser.add_argument("--seed", type=int, default=1, help="(default: 1)")
    parser.add_argument("--json", action="store_true", help="print one JSON object (default: a table)")
    parser.add_argument("--plot", metavar="FILE", help="draw GETs against quality into a .png or .svg file")
    store = parser.add_argument_group("how fast the store is, and what it asks for")
    store.add_argument("--store-latency", type=float, default=25, metavar="MS", help="of a GET (default: 25)")
    store.add_argument(
        "--store-bandwidth", type=float, default=1000, metavar="MB/S", help="of each pod (default: 1000)"
    )
    store.add_argument("--concurrency", type=int, default=32, metavar="N", help="GETs in flight of a pod (default: 32)")
    store.add_argument("--get-price", type=float, default=0.0004, metavar="P", help="of 1,000 GETs (default: 0.0004)")
    store.add_argument(
        "--gb-price", type=float, default=0.0, metavar="P", help="of a GB out of the store (default: 0, same region)"
    )
    add_store_options(parser)
    parser.set_defaults(func=_run)


def _run(args: argparse.Namespace) -> int:
    if args.plot:
        _check_plot(args.plot)
    workload, store = _workload(args), _store(args)
    wanted = [("redox", _REDOX_CHUNK_SIZE), *(("drain", chunk_size) for chunk_size in _chunk_sizes(args.chunk_sizes))]
    rows, left_out = _rows(workload, wanted, store)
    best = recommend(rows)
    if args.json:
        print(json.dumps(_as_json(workload, rows, best)))
    else:
        _print(workload, rows, left_out, best, store)
    if args.plot:
        _plot(args.plot, workload, rows, best)
    return 0


def _workload(args: argparse.Namespace) -> Workload:
    if (args.dataset is None) == (args.samples is None):
        raise InvalidInput("analyze needs a DATASET, or --samples N in its place; see refill analyze --help")
    if args.dataset is not None:
        blob_samples, total_bytes = asyncio.run(_dataset(args))
    else:
        if args.samples < 1:
            raise InvalidInput(f"--samples must be at least 1, got {args.samples}")
        blob_samples = np.array([args.samples], dtype=np.int64)
        total_bytes = args.samples * _bytes("--sample-bytes", args.sample_bytes)
    num_samples = int(blob_samples.sum())
    return Workload(
        blob_samples,
        total_bytes / max(1, num_samples),
        _memory_share(args.memory, total_bytes),
        args.pods,
        args.batch_size,
        args.group_order,
        args.seed,
    )


async def _dataset(args: argparse.Namespace) -> tuple[np.ndarray[Any, np.dtype[np.int64]], int]:
    from refill_service.datasets.commands import url_of
    from refill_service.datasets.dataset_reader import Dataset

    dataset = await Dataset.open(url_of(args.dataset), store_settings_of(args))
    try:
        return np.diff(dataset.blobs.first_sample), dataset.index.sample_bytes
    finally:
        await dataset.close()


def _memory_share(text: str, total_bytes: float) -> float:
    if not text.strip().endswith("%"):
        return float(_bytes("--memory", text) / max(1, total_bytes))
    try:
        return float(text.strip().removesuffix("%")) / 100
    except ValueError:
        raise InvalidInput(f"--memory {text!r} is no part of a dataset; write for example 10% or 12GiB") from None


def _bytes(option: str, text: str) -> int:
    try:
        return int(parse_bytes(text))
    except ValueError as error:
        raise InvalidInput(f"{option}: {error}") from None


def _store(args: argparse.Namespace) -> Store:
    for name in ("store_bandwidth", "concurrency"):
        if not getattr(args, name) > 0:
            raise InvalidInput(f"--{name.replace('_', '-')} must be more than 0, got {getattr(args, name)}")
    for name in ("store_latency", "get_price", "gb_price"):
        if not getattr(args, name) >= 0:
            raise InvalidInput(f"--{name.replace('_', '-')} must not be negative, got {getattr(args, name)}")
    return Store(args.store_latency / 1000, args.store_bandwidth * 1e6, args.concurrency, args.get_price, args.gb_price)


def _chunk_sizes(text: str) -> list[int]:
    try:
        sizes = sorted({int(size) for size in text.split(",")})
    except ValueError:
        raise InvalidInput(f"--chunk-sizes {text!r} are no numbers; write for example 8,16,64") from None
    if sizes[0] < 1:
        raise InvalidInput(f"--chunk-sizes must be at least 1, got {sizes[0]}")
    return sizes


def _rows(
    workload: Workload, wanted: Sequence[tuple[str, int]], store: Store
) -> tuple[list[Analysis], list[tuple[str, int, str]]]:
    """What could be analyzed, and what could not with why. Raises what was wrong when nothing could."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    rows, left_out = [], []
    with (
        ProcessPoolExecutor() as pool,
        Progress(console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        task = bar.add_task("epochs", total=len(wanted))
        runs = [pool.submit(analyze, workload, policy, size, store, _SIMULATED_SAMPLES) for policy, size in wanted]
        for (policy, size), run in zip(wanted, runs, strict=True):
            try:
                rows.append(run.result())
            except RefillError as error:
                left_out.append((policy, size, error.message))
            bar.advance(task)
    if not rows:
        raise InvalidInput(left_out[-1][2])
    return rows, left_out


def _as_json(workload: Workload, rows: list[Analysis], best: Recommendation | None) -> dict[str, Any]:
    return {
        "num_samples": workload.num_samples,
        "sample_bytes": workload.sample_bytes,
        "memory_share": workload.memory_share,
        "pod_memory_bytes": _pod_memory_bytes(workload),
        "rows": [dataclasses.asdict(row) for row in rows],
        "recommended_chunk_size": best.chunk_size if best else None,
        "reason": best.reason if best else None,
    }


def _pod_memory_bytes(workload: Workload) -> float:
    """The ``memory_bytes`` of a job whose part for chunks, at one pod and with default settings, is the workload's."""
    parts = {
        name: Settings.model_fields[f"{name}_fraction"].default for name in ("remote_memory", "in_flight", "recent")
    }
    if workload.num_pods == 1:
        parts["remote_memory"] = 0
    chunks = workload.memory_share * workload.total_bytes / workload.num_pods
    return float(chunks / (1 - sum(parts.values())))


def _print(
    workload: Workload,
    rows: list[Analysis],
    left_out: list[tuple[str, int, str]],
    best: Recommendation | None,
    store: Store,
) -> None:
    from rich.console import Console
    from rich.table import Table

    from refill_service.datasets.progress import bytes_text

    total = workload.total_bytes
    print(
        f"{workload.num_samples:,} samples, {bytes_text(int(total))}; memory for chunks"
        f" {workload.memory_share:.1%} of it over {workload.num_pods} pod{'s' * (workload.num_pods > 1)}"
        f" (memory_bytes of a job {bytes_text(int(_pod_memory_bytes(workload)))} each);"
        f" batches of {workload.batch_size}"
    )
    table = Table(box=None, pad_edge=False)
    for name in (
        "policy",
        "K",
        "GETs",
        f"GETs/{MATES}\nsamples",
        "bytes\nread",
        "cost of\nan epoch",
        "resident\nper pod",
        "mates'\ndistance",
        "co-batch\nratio",
        "DeepIO's\nRL",
        "first\nbatch",
        "epoch\nat least",
    ):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.policy + (" *" if best and (row.policy, row.chunk_size) == ("drain", best.chunk_size) else ""),
            str(row.chunk_size),
            f"{row.gets:,.0f}",
            f"{row.gets_per_sample * MATES:.1f}",
            f"{row.read_amplification:.1f}x",
            f"{row.cost:.4f}",
            bytes_text(int(row.resident_bytes)),
            f"{row.distance:.3f}",
            f"{row.co_batch:.2f}",
            f"{row.randomization_level:.2%}",
            f"{row.first_batch_seconds:.3f} s",
            f"{row.epoch_seconds:,.1f} s",
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    for policy, size, why in left_out:
        print(f"{policy}, K = {size}: left out, {why}")
    single = workload.num_samples / 1000 * store.price_per_1000_gets + total / 1e9 * store.price_per_gb
    print(
        f"one GET a sample would cost {single:.4f}; a uniform shuffle has distance {UNIFORM_DISTANCE:.3f} and"
        " ratio 1.00"
    )
    if workload.num_samples > _SIMULATED_SAMPLES:
        print(f"simulated with {_SIMULATED_SAMPLES:,} samples and the same share of memory, and scaled up")
    if best:
        print(f"* recommended: policy drain, chunk_size={best.chunk_size}: {best.reason}")


def _check_plot(path: str) -> None:
    """Before the work, not after it."""
    if Path(path).suffix not in (".png", ".svg"):
        raise InvalidInput(f"--plot {path}: the name must end in .png or .svg")
    if not Path(path).absolute().parent.is_dir():
        raise InvalidInput(f"--plot {path}: there is no folder {Path(path).absolute().parent}")
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise InvalidInput("--plot needs matplotlib: pip install 'refill[plot]'") from None
    matplotlib.use("Agg")


def _plot(path: str, workload: Workload, rows: list[Analysis], best: Recommendation | None) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for policy, style, colour in (("drain", "o-", "#1f6f8b"), ("redox", "s", "#c8553d")):
        of_policy = sorted((row for row in rows if row.policy == policy), key=lambda row: row.chunk_size)
        axes.plot(
            [row.gets_per_sample * MATES for row in of_policy],
            [row.co_batch for row in of_policy],
            style,
            color=colour,
            label=f"{policy}: reads the dataset {max((r.read_amplification for r in of_policy), default=0):.1f} times",
        )
    axes.axhline(ENOUGH_CO_BATCH, color="#999999", linewidth=1, linestyle=":", label=f"{ENOUGH_CO_BATCH:g}: close")
    axes.axhline(1, color="#777777", linewidth=1, linestyle="--", label="1: uniform shuffle")
    for row in rows:
        recommended = best is not None and (row.policy, row.chunk_size) == ("drain", best.chunk_size)
        axes.annotate(
            f"K = {row.chunk_size}" + (", recommended" if recommended else ""),
            (row.gets_per_sample * MATES, row.co_batch),
            xytext=(7, 6),
            textcoords="offset points",
            fontsize=9,
            fontweight="bold" if recommended else None,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_yticks([tick for tick in (1, 1.5, 2, 3, 5, 10, 20, 50) if tick <= 1.5 * max(row.co_batch for row in rows)])
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.15, y=0.1)
    axes.set_xlabel(f"GETs for {MATES} samples (fewer cost less)")
    axes.set_ylabel("co-batch ratio of chunk-mates (lower shuffles better)")
    axes.legend(fontsize=9)
    figure.suptitle(
        f"{workload.num_samples:,} samples, memory for {workload.memory_share:.0%},"
        f" {workload.num_pods} pod{'s' * (workload.num_pods > 1)}, batches of {workload.batch_size}",
        fontsize=10,
    )
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise InvalidInput(f"--plot {path} can't be written: {error.strerror}") from error
