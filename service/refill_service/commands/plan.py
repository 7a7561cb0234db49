"""``refill plan``: the order of an epoch, as a file; and how good it is, as a table or JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from refill.errors import InvalidInput
from refill_service.commands.amounts import size, whole

if TYPE_CHECKING:
    from refill_service.cache_core.planned.epoch_plan import EpochPlan
    from refill_service.cache_core.sample_mapping import Int64Array

_CLASSES = 100
_CHUNK_SIZE = 16
_LINES = 1 << 20
"""Written at once."""


def add_commands(commands: Any) -> None:
    from refill_service.commands.datasets import add_store_options

    parser = commands.add_parser(
        "plan",
        description="Compute the order of one epoch of a planned job: which sample is at each position. It follows "
        "from these arguments alone. Print what it reads, the memory it takes, and where neighbours and classes go. "
        "docs/PLANNED.md explains the figures.",
        epilog="example: refill plan --samples 131072 --chunk-size 16 --memory-samples 13107 --dump order.txt",
    )
    parser.add_argument(
        "--samples", type=whole(1), metavar="N", help="a made-up dataset: N samples of one size in one blob"
    )
    parser.add_argument("--dataset", metavar="URL", help="in place of --samples: a dataset, whose index is read")
    parser.add_argument("--chunk-size", type=whole(1), metavar="K", help="samples read together (default: 16)")
    parser.add_argument(
        "--memory-samples",
        type=whole(1),
        metavar="M",
        help="memory that is planned for, in samples of mean size, of all pods together (default: a tenth of them)",
    )
    parser.add_argument(
        "--memory-bytes",
        type=size(1),
        metavar="M",
        help="in place of --memory-samples: the same in bytes, as jobs have it",
    )
    parser.add_argument(
        "--shares", type=whole(1), default=1, metavar="V", help="parts with plans of their own (default: 1)"
    )
    parser.add_argument(
        "--run",
        type=whole(1),
        default=64,
        metavar="S",
        help="about how many positions in a row are of one share (default: 64)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the job (default: 0)")
    parser.add_argument(
        "--read-seed", type=int, metavar="S", help="read_seed of the job, of a sweep (default: the job has none)"
    )
    parser.add_argument("--epoch", type=whole(0), default=0, metavar="E", help="which epoch (default: 0)")
    parser.add_argument(
        "--first",
        action="store_true",
        help="it is the job's first: memory fills up while it runs, in place of before it",
    )
    parser.add_argument("--ranks", type=whole(1), default=1, metavar="R", help="ranks that share a step (default: 1)")
    parser.add_argument(
        "--batch", type=whole(1), default=256, metavar="B", help="samples of a rank in a step (default: 256)"
    )
    parser.add_argument(
        "--classes",
        metavar="FILE",
        help=f"the class of a sample in each line, a number; how evenly they come (default: {_CLASSES} stored sorted)",
    )
    parser.add_argument("--dump", metavar="FILE", help="write the sample at each position here, one a line")
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object (default: a table): seconds to plan all shares on one core, and with the index; "
        "gets, bytes_read in datasets, and peak_samples, the most in memory at once; lead, positions from a chunk's "
        "read to its use; cobatch_rank and cobatch_step, of 64 neighbours in a rank's batch and in a step: all, first "
        "and last 5 %%; distance; what ends in _mates is of a chunk's samples; class_counts in windows of 1, 16 and "
        "64 steps",
    )
    add_store_options(parser)
    parser.set_defaults(func=_run)


def _run(args: argparse.Namespace) -> int:
    from refill_service.planning.plan_measures import class_counts, reads_of, spread_of

    started = time.process_time()
    plan, first_sample, lengths = _planned(args)
    classes = _classes(args.classes, plan.num_positions)
    began = time.process_time()
    order = plan.whole()
    seconds = time.process_time() - began
    if args.dump:
        _write(Path(args.dump), order)
    step = args.ranks * args.batch
    found: dict[str, Any] = {
        "plan_id": plan.settings.plan_id,
        "settings": plan.settings.to_dict(),
        "seconds": seconds,
        "seconds_with_index": began - started + seconds,
        **reads_of(plan, lengths),
    }
    if len(order):
        found |= spread_of(order, first_sample, plan.settings.chunk_size, args.batch, step)
        found["class_counts"] = class_counts(order, classes, step)
    if args.json:
        print(json.dumps(found))
    else:
        _print(found, len(order))
    return 0


def _planned(args: argparse.Namespace) -> tuple[EpochPlan, Int64Array, Int64Array]:
    """The plan; the first sample of each blob; and the bytes of each sample."""
    import numpy as np

    from refill.protocol.plan_settings import PlanSettings
    from refill_service.cache_core.planned.epoch_plan import EpochPlan
    from refill_service.cache_core.planned.shares import Shares
    from refill_service.cache_core.sample_mapping import ChunkLayout

    if (args.dataset is None) == (args.samples is None):
        raise InvalidInput("give --samples N or --dataset URL, one of them; see refill plan --help")
    if args.samples is not None:
        first_sample = np.array([0, args.samples], dtype=np.int64)
        lengths = np.ones(args.samples, dtype=np.int64)
        name = f"{args.samples} samples of one size"
        chunk_size = _CHUNK_SIZE if args.chunk_size is None else args.chunk_size
    else:
        first_sample, lengths, name, chunk_size = asyncio.run(_of_dataset(args))
    num_samples = len(lengths)
    memory_samples = num_samples // 10 if args.memory_samples is None else args.memory_samples
    memory_bytes = memory_samples * int(lengths.sum()) // num_samples
    if args.memory_bytes is not None:
        if args.memory_samples is not None:
            raise InvalidInput("give --memory-samples or --memory-bytes, one of them")
        memory_bytes = args.memory_bytes
    settings = PlanSettings(
        name,
        num_samples,
        chunk_size,
        args.shares,
        memory_bytes,
        run=args.run,
        seed=args.seed,
        read_seed=args.read_seed,
    )
    # A chunk is of one blob: larger than that, it is all of it.
    layout = ChunkLayout(first_sample, min(chunk_size, int(np.diff(first_sample).max())))
    shares = Shares(layout, args.shares)
    plan = EpochPlan(settings, shares, lengths.__getitem__, args.epoch, ramped=args.first)
    return plan, first_sample, lengths


async def _of_dataset(args: argparse.Namespace) -> tuple[Int64Array, Int64Array, str, int]:
    """The first sample of each blob, the bytes of each sample, the plan's name of the dataset, and K."""
    from refill_service.commands.datasets import dataset_url, store_settings_of
    from refill_service.datasets.dataset_reader import Dataset

    dataset = await Dataset.open(dataset_url(args.dataset), store_settings_of(args))
    try:
        if not dataset.num_samples:
            raise InvalidInput(f"{args.dataset} has no samples")
        records = await dataset.load_records(0, dataset.num_samples)
        dataset.check_chunk_size(args.chunk_size or 0)
        chunk_size = args.chunk_size if args.chunk_size is not None else dataset.group_samples or _CHUNK_SIZE
        return dataset.blobs.first_sample, records.length, f"{dataset.index.fingerprint:016x}", chunk_size
    finally:
        await dataset.close()


def _classes(path: str | None, num_samples: int) -> Int64Array:
    import numpy as np

    if path is None:
        return np.arange(num_samples, dtype=np.int64) * min(_CLASSES, num_samples) // max(1, num_samples)
    try:
        found = np.array([int(line) for line in Path(path).read_text().split()], dtype=np.int64)
    except (OSError, ValueError, OverflowError) as error:
        raise InvalidInput(f"--classes must be a file with a number in each line: {error}") from error
    if len(found) != num_samples or (len(found) and int(found.min()) < 0):
        raise InvalidInput(
            f"{path} must have the classes of {num_samples} samples, 0 or more; it has {len(found)} lines"
        )
    return found


def _write(path: Path, order: Int64Array) -> None:
    try:
        with path.open("w") as file:
            for first in range(0, len(order), _LINES):
                file.write("\n".join(map(str, order[first : first + _LINES].tolist())) + "\n")
    except OSError as error:
        raise InvalidInput(f"--dump: {error}") from error


def _print(found: dict[str, Any], num_samples: int) -> None:
    settings = found["settings"]
    print(
        f"plan {found['plan_id']}: {num_samples:,} samples, K={settings['chunk_size']}, {settings['num_shares']} shares"
        f", runs of {settings['run']}, planned in {found['seconds']:.2f} s of one core"
    )
    print(
        f"{found['gets']:,} GETs ({found['gets'] * 64 / max(1, num_samples):.2f} for 64 samples), "
        f"{found['bytes_read']:.2f}x bytes, at most {found['peak_samples']:,} samples in memory, a chunk is used "
        f"{found['lead']:,.0f} positions after its read (at least {found['lead_least']:,})"
    )
    if "class_counts" not in found:
        return
    print(f"{'':32}{'all':>8}{'first 5%':>10}{'last 5%':>9}")
    for name, title in (
        ("cobatch_rank_mates", "co-batch of chunk-mates"),
        ("cobatch_rank", "co-batch of 64 neighbours"),
        ("cobatch_step_mates", "  in a step: chunk-mates"),
        ("cobatch_step", "  in a step: 64 neighbours"),
        ("distance_mates", "distance of chunk-mates"),
        ("distance", "distance of 64 neighbours"),
    ):
        cells = [found[name][part] for part in ("all", "first", "last")]
        print(
            f"{title:32}"
            + "".join(
                f"{'-' if cell is None else f'{cell:.2f}':>{w}}" for cell, w in zip(cells, (8, 10, 9), strict=True)
            )
        )
    counts = ", ".join(
        f"{'-' if value is None else f'{value:.2f}'} in {steps}" for steps, value in found["class_counts"].items()
    )
    print(f"classes, chi2/df in windows of steps: {counts} (uniform: 1)")
