"""What do batches of classes read, and how often do chunk-mates meet? The tables of docs/ORDERS.md.

    python benchmarks/class_plans.py [--samples 131072] [--pods 1] [--batch 256] [--memory .05 .1 .25]

Stored mixed: each class at random places. Sorted: one class after another. Rare: 28 classes of about one size, one with
1 % of the samples, and one with 20 samples, at random places. Chunk-mates meet in a step against a uniform shuffle: 1.
"""

from __future__ import annotations

import argparse
import time
from unittest.mock import patch

import class_reads
import numpy as np
from class_reads import CLASS_ORDERS, ClassReads, ClassRun, equal_classes, simulate_classes

from refill.protocol.class_order import bucket_order
from refill.protocol.class_plan import StoredSamples, plan_within_classes


def classes_stored(stored: str, num_samples: int, num_classes: int) -> np.ndarray:
    if stored == "rare":
        draws = np.random.default_rng(5)
        classes, places = draws.integers(0, 28, num_samples), draws.permutation(num_samples)
        classes[places[: num_samples // 100]] = 28
        classes[places[num_samples // 100 : num_samples // 100 + 20]] = 29
        return classes
    found = equal_classes(num_samples, num_classes, 0)
    return np.sort(found) if stored == "sorted" else found


def mates_meet(place_of: np.ndarray, chunk_size: int, step: int) -> float:
    """:param place_of: ``(samples,)`` the place of each in the epoch."""
    num_samples = len(place_of)
    places = np.argsort(np.argsort(place_of, kind="stable"), kind="stable")
    together = places // step * num_samples + np.arange(num_samples) // chunk_size
    counts = np.unique(together, return_counts=True)[1]
    by_chance = num_samples * (step - 1) / 2 * (chunk_size - 1) / (num_samples - 1)
    return float((counts * (counts - 1) // 2).sum() / by_chance)


def measured(classes: np.ndarray, run: ClassRun) -> tuple[ClassReads, float]:
    places = []
    counted = class_reads._Delivered.counted

    def noted(of: class_reads._Delivered, *args: object, **named: int) -> ClassReads:
        places.append(of._place_of.copy())
        return counted(of, *args, **named)  # type: ignore[arg-type]

    with patch.object(class_reads._Delivered, "counted", noted):
        found = simulate_classes(classes, run)
    return found, mates_meet(places[0], run.chunk_size, run.num_pods * run.batch_size)


def planning_seconds(num_samples: int, chunk_size: int) -> float:
    """CPU seconds, with memory for a tenth of the samples, and 8 shares."""
    classes = np.random.default_rng(1).integers(0, 10, num_samples)
    asked = bucket_order(classes, 256, np.random.default_rng(2))
    chunks = np.arange(num_samples) // chunk_size
    stored = StoredSamples(chunks, chunks % 8, np.ones(num_samples, np.int64))
    started = time.process_time()
    plan_within_classes(asked, classes, stored, num_samples // 10, 8, 1)
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=131_072)
    parser.add_argument("--pods", type=int, default=1)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--memory", type=float, nargs="+", default=[0.05, 0.1, 0.25], help="parts of the dataset")
    parser.add_argument("--chunk-sizes", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--stored", nargs="+", default=["mixed", "sorted", "rare"])
    parser.add_argument("--classes", type=int, default=10, help="where none is rare")
    parser.add_argument("--orders", nargs="+", choices=CLASS_ORDERS, default=["buckets"])
    parser.add_argument("--planning", action="store_true", help="only how long a client plans an epoch of 10 classes")
    args = parser.parse_args()
    if args.planning:
        for chunk_size in args.chunk_sizes:
            seconds = planning_seconds(args.samples, chunk_size)
            print(f"{args.samples:,} samples, K={chunk_size}: {seconds:.1f} s of a core")
        return
    print("| stored, order | memory | K | GETs for 64 | bytes | mates | 64 neighbours | composed | seconds |")
    print("| --- " * 9 + "|")
    for stored in args.stored:
        classes = classes_stored(stored, args.samples, args.classes)
        for order in args.orders:
            for memory in args.memory:
                for chunk_size in args.chunk_sizes:
                    run = ClassRun(int(memory * args.samples) // args.pods, order, chunk_size, args.pods, args.batch)
                    started = time.process_time()
                    found, mates = measured(classes, run)
                    seconds = time.process_time() - started
                    assert not found.missing
                    print(
                        f"| {stored}, {order} | {memory:.0%} | {chunk_size} "
                        f"| {found.gets * 64 / args.samples:.2f} | {found.read_amplification:.3f}x | {mates:.2f} "
                        f"| {found.co_batch:.2f} | {found.composed} of {found.batches} | {seconds:.1f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
