"""``refill simulate --policy planned``: what do epochs of a planned order read? Arguments in, a table or JSON out."""

from __future__ import annotations

import argparse
import json
from typing import Any

from refill.errors import InvalidInput
from refill_service.planning.planned_reads import PREFETCH_FACTOR, PlannedReads, PlannedRun, simulate_planned
from refill_service.planning.simulation import LOOP_BATCH

__all__ = ["add_options", "refuse_options", "run_planned"]

_DEFAULT_SAMPLES = 131_072
_DEFAULT_EPOCHS = 3
_OPTIONS = ("ranks", "workers", "out_of_step", "plan_samples", "shares", "run")
_OF_OTHERS = ("clock", "eviction", "trace", "read_ahead", "caches", "fetch_size", "fetch_threshold", "losses",
              "repetition", "improving", "paper", "prefetch", "window",
              "remote_memory_samples")  # fmt: skip


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "policy planned", "Ranks ask for batches as torch's loaders do, and reads arrive at once."
    )
    group.add_argument("--ranks", type=int, metavar="R", help="number of ranks (default: one for each pod)")
    group.add_argument(
        "--workers",
        type=int,
        metavar="W",
        help=f"workers of each rank's loader: batches of different workers come out of order, up to {PREFETCH_FACTOR} "
        "of each are under way (default: 0, the loop asks itself)",
    )
    group.add_argument(
        "--out-of-step",
        type=float,
        metavar="D",
        help="how far the last rank is behind the first, in the memory that is planned for (default: 0)",
    )
    group.add_argument(
        "--plan-samples",
        type=int,
        metavar="M",
        help="how many samples of memory the order is planned for, of all pods together (default: as jobs, "
        "0.8 of what there is or less)",
    )
    group.add_argument(
        "--shares", type=int, metavar="V", help="parts of the dataset that have plans of their own (default: as jobs)"
    )
    group.add_argument(
        "--run", type=int, metavar="S", help="about how many positions in a row are of one share (default: as jobs)"
    )


def refuse_options(args: argparse.Namespace) -> None:
    """Raises :class:`InvalidInput` for options that nothing comes of."""
    for name in _OPTIONS:
        if getattr(args, name) is not None:
            raise InvalidInput(f"{_option(name)} is an option of --policy planned")


def run_planned(args: argparse.Namespace) -> int:
    for name in _OF_OTHERS:
        if (given := getattr(args, name)) is not None and given is not False:
            raise InvalidInput(f"{_option(name)} does not go with --policy planned")
    for name in ("ranks", "plan_samples", "shares", "run", "memory_samples"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise InvalidInput(f"{_option(name)} must be at least 1, got {getattr(args, name)}")
    num_samples = _DEFAULT_SAMPLES if args.samples is None else args.samples
    run = PlannedRun(
        num_samples=num_samples,
        memory_samples=args.memory_samples or max(1, num_samples // 10 // max(1, args.pods)),
        chunk_size=args.chunk_size,
        num_pods=args.pods,
        num_ranks=args.pods if args.ranks is None else args.ranks,
        batch_size=args.batch or LOOP_BATCH,
        num_workers=args.workers or 0,
        out_of_step=args.out_of_step or 0.0,
        plan_samples=args.plan_samples or 0,
        num_shares=args.shares or 0,
        run=args.run or 0,
        seed=args.seed or 0,
    )
    head, epochs = _with_progress(run, _DEFAULT_EPOCHS if args.epochs is None else args.epochs)
    if args.json:
        print(json.dumps(head | {"epochs": [epoch.to_dict() for epoch in epochs]}))
        return 0
    print(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in head.items()))
    print("epoch       GETs  of 64 samples  bytes read      misses  of one sample  held at most   delivered")
    for each in epochs:
        print(
            f"{each.epoch:5} {each.gets:10,} {each.gets_for_64:14.3f} {each.bytes_read:10.4f}x {each.misses:11,} "
            f"{each.single_reads:14,} {each.held_peak:13,} {each.delivered:11,}"
        )
    return 0


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _with_progress(run: PlannedRun, num_epochs: int) -> tuple[dict[str, Any], list[PlannedReads]]:
    """What was simulated, and what each epoch reads."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("batches")
        plan, epochs = simulate_planned(
            run, num_epochs, lambda done, total: bar.update(task, completed=done, total=total)
        )
        found = list(epochs)
    under_way = run.num_workers * run.batch_size * run.num_ranks
    head = {
        "policy": "planned",
        "samples": run.num_samples,
        "memory_samples": run.memory_samples,
        "plan_samples": plan.memory_bytes,
        "chunk_size": run.chunk_size,
        "pods": run.num_pods,
        "ranks": run.num_ranks,
        "batch_size": run.batch_size,
        "shares": plan.num_shares,
        "run": plan.run,
        "workers": run.num_workers,
        # Of all workers, in the memory that is planned for: W x B x R / M.
        "under_way": round(under_way / plan.memory_bytes, 3),
        "out_of_step": run.out_of_step,
    }
    return head, found
