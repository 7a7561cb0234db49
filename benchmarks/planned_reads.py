"""What do planned epochs read where requests come out of order, ranks are out of step, or memory is short?
The tables of docs/PLANNED.md; each figure is the mean of several epochs after the first.

    make bench-planned
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import numpy as np
from loaders import PlannedRun, simulate_planned
from machine import machine

from refill.protocol.job_spec import JobSpec
from refill_service.cache_core.sample_mapping import ChunkLayout
from refill_service.planning.planned_pods import PlannedPods, made_up_plan

CHUNK_SIZES = (16, 64)
WORKERS = (0, 2, 4, 8, 12, 25, 51, 82)
PLANNED_PARTS = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
PARTS_OF_LOADERS = (0.31, 0.49, 0.63, 1.0, 1.6)
OUT_OF_STEP = (0.1, 0.2, 0.5, 0.7, 1.0)
MEMORY_OVER_PLANNED = (1.25, 1.0, 0.9, 0.67)
LOST_AT = (0.1, 0.5, 0.9)
"""Parts of an epoch."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=131_072)
    parser.add_argument("--memory", type=float, default=0.1, help="part of the samples that memory holds")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--workers", type=lambda text: [int(each) for each in text.split(",")], default=list(WORKERS))
    parser.add_argument(
        "--tables", default="W,out of step,memory over planned", help="which; there is planned part, too"
    )
    args = parser.parse_args()
    print(f"{machine()}; {args.samples:,} samples, mean of {args.epochs} epochs after the first")
    base = PlannedRun(args.samples, int(args.memory * args.samples), num_shares=8, run=32)
    two = replace(base, num_ranks=2, batch_size=128)
    tables = {
        "W": [(str(workers), replace(base, num_workers=workers)) for workers in args.workers],
        "out of step": [(f"{behind:g}", replace(two, out_of_step=behind)) for behind in OUT_OF_STEP],
        "memory over planned": [
            (f"{part:g}", replace(base, plan_samples=int(base.memory_samples / part))) for part in MEMORY_OVER_PLANNED
        ],
        "planned part": [
            (
                f"{asked:g}, {part:g}",
                replace(
                    base,
                    batch_size=128,
                    num_workers=round(asked * base.memory_samples / 128),
                    plan_samples=int(part * base.memory_samples),
                ),
            )
            for asked in PARTS_OF_LOADERS
            for part in PLANNED_PARTS
        ],
    }
    tables = {title: tables[title] for title in args.tables.split(",")}
    with ProcessPoolExecutor() as pool:
        for title, rows in tables.items():
            heads = "".join(f" | K={chunk_size}: GETs for 64 | bytes | misses" for chunk_size in CHUNK_SIZES)
            ratio = " | W x B x R / memory" if title == "W" else ""
            print(f"\n| {title}{ratio}{heads} |")
            print("| --- " * (1 + bool(ratio) + 3 * len(CHUNK_SIZES)) + "|")
            runs = [replace(run, chunk_size=chunk_size) for _, run in rows for chunk_size in CHUNK_SIZES]
            found = pool.map(_row, runs, [args.epochs] * len(runs))
            for name, run in rows:
                cells = [next(found) for _ in CHUNK_SIZES]
                under_way = run.num_workers * run.batch_size * run.num_ranks / run.memory_samples
                more = [f"{under_way:.2f}"] if ratio else []
                print(f"| {' | '.join([name, *more, *cells])} |", flush=True)
        _print_lost(base, pool)


def _print_lost(base: PlannedRun, pool: ProcessPoolExecutor) -> None:
    heads = "".join(f" | K={chunk_size}: read again | GETs from there on" for chunk_size in CHUNK_SIZES)
    print(f"\n| memory is lost at{heads} |")
    print("| --- " * (1 + 2 * len(CHUNK_SIZES)) + "|")
    cells = pool.map(_lost, *zip(*((base, size, part) for part in LOST_AT for size in CHUNK_SIZES), strict=True))
    for part in LOST_AT:
        print(f"| {' | '.join([f'{part:g}', *(next(cells) for _ in CHUNK_SIZES)])} |", flush=True)


def _lost(run: PlannedRun, chunk_size: int, part: float) -> str:
    """Pods go through an epoch, and others that begin with nothing go on from a part of it."""
    n, batch = run.num_samples, run.batch_size
    layout = ChunkLayout(np.array([0, n], dtype=np.int64), chunk_size)
    lengths = np.ones(n, dtype=np.int64)
    settings = {"shares": run.num_shares, "run": run.run}
    spec = JobSpec("simulated", "memory://simulated", seed=run.seed, policy_settings=settings)
    plan = made_up_plan(spec, layout, lengths, run.memory_samples, 1)
    lost_at = int(part * n) // batch * batch
    samples_read = 0
    for spans in ([(0, 0, n), (1, 0, lost_at)], [(1, lost_at, n)]):
        pods = PlannedPods(plan, layout, lengths, run.memory_samples, 1)
        for epoch, first, end in spans:
            for start in range(first, end, batch):
                pods.ask(epoch, np.arange(start, min(start + batch, end)))
        samples_read += pods.counts[1].samples_read
    return f"{(samples_read - n) / plan.memory_bytes:.2f}x M | {pods.counts[1].gets:,}"


def _row(run: PlannedRun, num_epochs: int) -> str:
    _, epochs = simulate_planned(run, num_epochs + 1)
    _, *later = epochs
    if any(each.delivered != run.num_samples for each in later):
        raise RuntimeError("an epoch did not deliver all samples")
    figures: Sequence[float] = np.mean(
        [[each.gets_for_64, each.bytes_read, 100 * each.misses / run.num_samples] for each in later], axis=0
    ).tolist()
    return f"{figures[0]:.2f} | {figures[1]:.3f}x | {figures[2]:.1f} %"


if __name__ == "__main__":
    main()
