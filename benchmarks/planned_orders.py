"""How good are planned orders? A row for each part of the dataset in memory and each chunk size, as docs/PLANNED.md has
them; each figure is the mean of several epochs.

    make bench-planned

--stretches: the same of a simpler construction, which the planned order has to beat. The dataset has as many stretches
as memory holds chunks; each round reads a chunk of every stretch, and the samples of a chunk stay for as long as the
mean of a uniform and an exponential distribution says, one in each of as many equal parts.
"""

from __future__ import annotations

import argparse
import heapq
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise, product

import numpy as np
from machine import machine

from refill.protocol.plan_settings import PlanSettings
from refill_service.cache_core.planned.epoch_plan import EpochPlan
from refill_service.cache_core.planned.shares import Shares
from refill_service.cache_core.sample_mapping import ChunkLayout, Int64Array
from refill_service.planning.plan_measures import class_counts, spread_of

MEMORY_PARTS = (0.05, 0.10, 0.25)
CHUNK_SIZES = (8, 16, 32, 64)
NUM_CLASSES = 100


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=131_072)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--shares", type=int, default=1)
    parser.add_argument("--run", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--first", action="store_true", help="the job's first epoch, of as many seeds")
    parser.add_argument("--stretches", action="store_true", help="of the simpler construction; one share")
    args = parser.parse_args()
    print(f"{machine()}; {args.samples:,} samples, {args.shares} shares, {args.epochs} epochs\n")
    print(
        "| memory, K (GETs for 64) | co-batch of chunk-mates: all, first 5 %, last 5 % | of 64 neighbours "
        "| their distance | classes |"
    )
    print("| --- | --- | --- | --- | --- |")
    rows = list(product(MEMORY_PARTS, CHUNK_SIZES))
    with ProcessPoolExecutor() as pool:
        for line in pool.map(_row, [args] * len(rows), rows):
            print(line, flush=True)


def _row(args: argparse.Namespace, row: tuple[float, int]) -> str:
    memory_part, chunk_size = row
    n = args.samples
    first_sample = np.array([0, n], dtype=np.int64)
    shares = Shares(ChunkLayout(first_sample, chunk_size), args.shares)
    classes = np.arange(n, dtype=np.int64) * NUM_CLASSES // n
    found = []
    for each in range(args.epochs):
        if args.stretches:
            order = _in_stretches(n, chunk_size, int(n * memory_part), np.random.default_rng(each))
        else:
            seed, epoch = (each, 0) if args.first else (0, each + 1)
            settings = PlanSettings("one blob", n, chunk_size, args.shares, int(n * memory_part), args.run, seed)
            plan = EpochPlan(settings, shares, np.ones(n, dtype=np.int64).__getitem__, epoch, ramped=args.first)
            order = plan.whole()
        measured = spread_of(order, first_sample, chunk_size, args.batch, args.batch)
        mates = measured["cobatch_rank_mates"]
        found.append(
            [mates["all"], mates["first"], mates["last"], measured["cobatch_rank"]["all"], measured["distance"]["all"]]
            + [class_counts(order, classes, args.batch)[steps] for steps in ("16", "64")]
        )
    mean = np.mean(np.array(found, dtype=float), axis=0)
    mates = ", ".join(f"{value:.2f}" for value in mean[:3])
    counts = ", ".join(f"{value:.1f}" for value in mean[5:])
    name = f"{memory_part:.0%}, {chunk_size} ({64 / chunk_size:.0f})"
    return f"| {name} | {mates} | {mean[3]:.2f} | {mean[4]:.2f} | {counts} |"


def _in_stretches(n: int, chunk_size: int, memory: int, draws: np.random.Generator) -> Int64Array:
    """Always the sample of memory that is to leave first."""
    num_chunks, num_stretches = n // chunk_size, memory // chunk_size
    bounds = np.arange(num_stretches + 1) * num_chunks // num_stretches
    stretches = [draws.permutation(np.arange(*each)) for each in pairwise(bounds)]
    chunks: list[int] = []
    for turn in range(max(map(len, stretches))):
        chunks += draws.permutation([each[turn] for each in stretches if turn < len(each)]).tolist()
    leaves: list[tuple[float, int]] = []
    delivered: list[int] = []
    now, num_read = 0.0, 0
    while len(delivered) < n:
        while num_read < num_chunks and (num_read + 1) * chunk_size - memory <= len(delivered):
            part = (draws.permutation(chunk_size) + draws.random(chunk_size)) / chunk_size
            times = now + memory * (2 * part - np.log(1 - part)) / 2
            for place, time in enumerate(times.tolist()):
                heapq.heappush(leaves, (time, chunks[num_read] * chunk_size + place))
            num_read += 1
        now, sample = heapq.heappop(leaves)
        delivered.append(sample)
    return np.array(delivered, dtype=np.int64)


if __name__ == "__main__":
    main()
