"""``refill simulate``: arguments in, a table or JSON out."""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from refill_service.planning.simulation import (
    PAPER_SEED,
    PAPER_VARIANTS,
    PaperVariant,
    SimulationResult,
    SimulationSettings,
    simulate,
)

__all__ = ["add_commands"]


def add_commands(commands: Any) -> None:
    parser = commands.add_parser(
        "simulate",
        help="what an epoch would cost: the protocol with ranks in lockstep and no I/O",
        description="Run one epoch of the protocol core with no I/O, one rank for each pod, and print what it cost.",
        epilog="example: refill simulate --samples 131072 --chunk-size 64 --group-size 10 --pods 3",
    )
    parser.add_argument("--samples", type=int, default=131_072, help="samples of the dataset (default: %(default)s)")
    parser.add_argument("--chunk-size", type=int, default=64, metavar="K", help="samples of a chunk (default: 64)")
    parser.add_argument(
        "--group-size", type=int, default=10, metavar="S", help="chunks that share an abstract chunk (default: 10)"
    )
    parser.add_argument("--pods", type=int, default=3, help="pods, each the home of one rank (default: 3)")
    parser.add_argument(
        "--remote-memory-samples",
        type=int,
        default=10_000,
        metavar="L",
        help="samples that a home pod can hold of what owners send ahead, over all owners (default: 10000)",
    )
    parser.add_argument(
        "--window",
        type=int,
        default=20_000,
        metavar="P",
        help="a rank's next requests to one owner that may be sent ahead; 0 sends nothing (default: 20000)",
    )
    parser.add_argument("--policy", choices=["drain", "redox"], default="drain", help="(default: drain)")
    parser.add_argument(
        "--refill", choices=["best", "random"], default="best", help="which chunk refills (default: best)"
    )
    parser.add_argument(
        "--prefetch", choices=["on", "off"], default="on", help="off is the same as --window 0 (default: on)"
    )
    parser.add_argument(
        "--group-order",
        choices=["consecutive", "interleaved"],
        default="consecutive",
        help="which chunks share an abstract chunk (default: consecutive)",
    )
    parser.add_argument("--seed", type=int, default=None, help=f"(default: 0; with --paper {PAPER_SEED})")
    parser.add_argument("--json", action="store_true", help="print one JSON object; with --paper a list of them")
    parser.add_argument(
        "--paper",
        action="store_true",
        help="the four variants of the papers' table (ImageNet-1k, three pods) beside the papers' values; a minute",
    )
    parser.set_defaults(func=_run)


def _run(args: argparse.Namespace) -> int:
    return _paper(args) if args.paper else _one(args)


def _one(args: argparse.Namespace) -> int:
    settings = SimulationSettings(
        num_samples=args.samples,
        chunk_size=args.chunk_size,
        group_size=args.group_size,
        num_pods=args.pods,
        remote_memory_samples=args.remote_memory_samples,
        window=args.window if args.prefetch == "on" else 0,
        policy=args.policy,
        refill=args.refill,
        group_order=args.group_order,
        seed=args.seed or 0,
    )
    result = _with_progress(settings)
    if args.json:
        print(json.dumps(result.to_dict()))
        return 0
    for name, value in result.to_dict().items():
        print(
            f"{name.replace('_', ' '):20} {value:,}"
            if isinstance(value, int)
            else f"{name.replace('_', ' '):20} {value:.4f}"
        )
    return 0


def _with_progress(settings: SimulationSettings) -> SimulationResult:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("requests", total=settings.num_samples)
        return simulate(settings, lambda done, total: bar.update(task, completed=done, total=total))


def _paper(args: argparse.Namespace) -> int:
    seed = PAPER_SEED if args.seed is None else args.seed
    rows: list[dict[str, Any]] = []
    if not args.json:
        print("ImageNet-1k: 1,281,167 samples, K=64, S=10, 3 pods, remote memory 10,000 samples; counts in 1e5")
        print("variant                misses  paper  remote requests  paper  read x  dup.  missing")
    with ProcessPoolExecutor() as pool:
        for variant, result in zip(PAPER_VARIANTS, pool.map(_variant, PAPER_VARIANTS, [seed] * 4), strict=True):
            rows.append(
                {
                    "variant": variant.name,
                    "paper_misses": variant.paper_misses * 1e5,
                    "paper_remote_requests": variant.paper_remote_requests * 1e5,
                }
                | result.to_dict()
            )
            if not args.json:
                print(
                    f"{variant.name:20} {result.misses / 1e5:8.3f} {variant.paper_misses:6.2f} "
                    f"{result.remote_requests / 1e5:16.3f} {variant.paper_remote_requests:6.2f} "
                    f"{result.read_amplification:7.2f} {result.duplicates:5} {result.missing:8}"
                )
                sys.stdout.flush()
    if args.json:
        print(json.dumps(rows))
    return 0


def _variant(variant: PaperVariant, seed: int) -> SimulationResult:
    return simulate(variant.settings(seed))
