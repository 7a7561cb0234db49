"""``refill simulate --classes``: what does an epoch read whose positions ask for classes? Arguments in, a table or JSON
out."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

import numpy as np

from refill.errors import InvalidInput
from refill_service.cache_core.sample_mapping import Int64Array
from refill_service.planning.class_reads import CLASS_ORDERS, ClassRun, equal_classes, simulate_classes
from refill_service.planning.simulation import LOOP_BATCH

__all__ = ["add_options", "classes_of", "run_classes"]

_DEFAULT_SAMPLES = 131_072
_OF_OTHERS = (
    "epochs",
    "clock",
    "paper",
    "eviction",
    "trace",
    "read_ahead",
    "caches",
    "fetch_size",
    "fetch_threshold",
    "losses",
    "prefetch",
    "window",
    "remote_memory_samples",
)


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("policy planned within classes")
    group.add_argument(
        "--classes",
        metavar="C",
        help="positions ask for classes: C of them, equally large and at random places of the dataset, or those of a "
        "file, the class of a sample in each line",
    )
    group.add_argument(
        "--class-order",
        choices=CLASS_ORDERS,
        help="with --classes: each batch of one class (BucketSampler), with all of them (ClassBalancedSampler), as a "
        "shuffled order has them, or one class after another (default: buckets)",
    )


def run_classes(args: argparse.Namespace) -> int:
    if args.classes is None:
        raise InvalidInput("--class-order goes with --classes")
    if args.policy != "planned":
        raise InvalidInput(f"--classes goes with --policy planned, not with {args.policy}")
    for name in _OF_OTHERS:
        if (given := getattr(args, name)) is not None and given is not False:
            raise InvalidInput(f"--{name.replace('_', '-')} does not go with --classes")
    seed = args.seed or 0
    classes = classes_of(args.classes, args.samples, seed)
    run = ClassRun(
        memory_samples=len(classes) // (10 * max(1, args.pods)) + 1
        if args.memory_samples is None
        else args.memory_samples,
        order=args.class_order or CLASS_ORDERS[0],
        chunk_size=args.chunk_size,
        num_pods=args.pods,
        batch_size=args.batch or LOOP_BATCH,
        seed=seed,
    )
    found = dataclasses.asdict(simulate_classes(classes, run))
    found["gets_for_64"] = 64 * found["gets"] / len(classes)
    if args.json:
        print(json.dumps(found))
        return 0
    for name, value in found.items():
        print(f"{name.replace('_', ' '):20} {value:,}" if isinstance(value, int) else f"{name:20} {value:.2f}")
    return 0


def classes_of(given: str, num_samples: int | None, seed: int) -> Int64Array:
    """The class of each sample, for a number of classes, or the path of a file with those of all samples."""
    if given.isascii() and given.isdigit():
        num_samples = _DEFAULT_SAMPLES if num_samples is None else num_samples
        if not 1 <= int(given) <= num_samples:
            raise InvalidInput(f"--classes must be 1 to the number of samples, {num_samples}, got {given}")
        return equal_classes(num_samples, int(given), seed)
    try:
        lines = Path(given).read_text().split()
        found = np.array([int(line) for line in lines], dtype=np.int64)
    except (OSError, ValueError, OverflowError) as error:
        raise InvalidInput(f"--classes must be a number, or a file with one in each line: {error}") from error
    if not len(found) or num_samples not in (None, len(found)):
        raise InvalidInput(f"{given} has the classes of {len(found)} samples, and --samples says {num_samples}")
    return found
