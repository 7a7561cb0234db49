"""``refill simulate``: arguments in, a table or JSON out."""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from refill.errors import InvalidInput
from refill.protocol.job_spec import JobSpec
from refill.protocol.policies import POLICIES
from refill_service.commands import simulate_classes, simulate_orders, simulate_planned
from refill_service.planning.simulation import (
    LOOP_BATCH,
    PAPER_SEED,
    PAPER_VARIANTS,
    PaperVariant,
    SimulationResult,
    SimulationSettings,
    simulate,
)

__all__ = ["add_commands"]

_MOST_PARTS = 100
"""Of less, remote memory and the window are too small to be like the whole."""
_SAMPLES = 131_072
_REMOTE_SAMPLES, _WINDOW = 10_000, 20_000


def add_commands(commands: Any) -> None:
    parser = commands.add_parser(
        "simulate",
        description="Simulate one epoch with the code that decides in pods, without a store or a network, one rank "
        "for each pod, and print what it would cost; of policies exact and planned, or with --epochs, --memory-samples "
        "or --clock, several epochs, whose memory outlives them. "
        "docs/GLOSSARY.md explains the words.",
        epilog="examples: refill simulate --samples 131072 --chunk-size 64 --group-size 10 --pods 3; "
        "refill simulate --policy exact --samples 131072 --memory-samples 13107 --pods 1 --epochs 3",
    )
    parser.add_argument(
        "--samples",
        type=int,
        help=f"number of samples of the dataset (default: {_SAMPLES}; with --trace as its largest id says)",
    )
    parser.add_argument(
        "--chunk-size", type=int, default=64, metavar="K", help="samples that are read together (default: 64)"
    )
    parser.add_argument(
        "--group-size",
        type=int,
        default=10,
        metavar="S",
        help="chunks that are read, one after another, into the same part of memory (default: 10)",
    )
    parser.add_argument("--pods", type=int, default=3, help="number of pods, each the home of one rank (default: 3)")
    parser.add_argument(
        "--remote-memory-samples",
        type=int,
        metavar="L",
        help=f"how many samples a home pod can hold of those that other pods send ahead (default: {_REMOTE_SAMPLES})",
    )
    parser.add_argument(
        "--window",
        type=int,
        metavar="P",
        help="how far ahead a pod looks for samples to send: this many of a rank's next requests to it; 0: it sends "
        f"none (default: {_WINDOW})",
    )
    parser.add_argument(
        "--batch",
        type=int,
        default=0,
        metavar="B",
        help=f"positions that a rank asks for at once (default: {LOOP_BATCH}, about what training loops ask pods for; "
        f"with --paper 1, as the papers' requests, and {LOOP_BATCH} beside it)",
    )
    parser.add_argument(
        "--policy",
        choices=sorted(POLICIES),
        help="; ".join(f"{name}: {terms.label}" for name, terms in sorted(POLICIES.items()))
        + f" (default: {JobSpec.policy})",
    )
    parser.add_argument(
        "--refill",
        choices=["best", "random"],
        default="best",
        help="of redox: read the chunk that fills most of memory, or any (default: best)",
    )
    parser.add_argument(
        "--prefetch",
        choices=["on", "off"],
        help="whether pods send samples ahead; off is the same as --window 0 (default: on; policy planned never does)",
    )
    parser.add_argument(
        "--group-order",
        choices=["consecutive", "interleaved"],
        default="consecutive",
        help="which chunks are read into the same part of memory: neighbours, or chunks far apart (default: "
        "consecutive)",
    )
    parser.add_argument(
        "--seed", type=int, default=None, help=f"seed of the simulated epoch (default: 0; with --paper {PAPER_SEED})"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object; with --paper a list of them")
    parser.add_argument(
        "--paper",
        action="store_true",
        help="the four variants of the papers' table (ImageNet-1k, three pods) beside the papers' values: some minutes",
    )
    parser.add_argument(
        "--part",
        type=int,
        default=1,
        metavar="N",
        help="with --paper: take only an Nth of its dataset, remote memory and window (default: 1, all of it)",
    )
    simulate_orders.add_options(parser)
    simulate_classes.add_options(parser)
    simulate_planned.add_options(parser)
    parser.set_defaults(func=_run)


def _run(args: argparse.Namespace) -> int:
    args.policy = args.policy or ("redox" if args.paper else JobSpec.policy)
    if args.batch < 0:
        raise InvalidInput(f"--batch must be at least 1, got {args.batch}")
    if args.part != 1 and not (args.paper and 1 <= args.part <= _MOST_PARTS):
        raise InvalidInput(f"--part goes with --paper, and must be from 1 to {_MOST_PARTS}, got {args.part}")
    asks_for_classes = args.classes is not None or args.class_order is not None
    if args.policy == "planned" and not asks_for_classes:
        return simulate_planned.run_planned(args)
    simulate_planned.refuse_options(args)
    if asks_for_classes:
        return simulate_classes.run_classes(args)
    _fill_in(args)
    if not args.paper and (args.policy == "exact" or simulate_orders.are_epochs_asked_for(args)):
        return simulate_orders.run_orders(args)
    simulate_orders.refuse_options(args)
    return _paper(args) if args.paper else _one(args)


def _fill_in(args: argparse.Namespace) -> None:
    """Sending ahead, where nothing was said of it: an order that is planned refuses what was said."""
    args.prefetch = args.prefetch or "on"
    args.window = _WINDOW if args.window is None else args.window
    args.remote_memory_samples = _REMOTE_SAMPLES if args.remote_memory_samples is None else args.remote_memory_samples


def _one(args: argparse.Namespace) -> int:
    settings = SimulationSettings(
        batch_size=args.batch or LOOP_BATCH,
        num_samples=_SAMPLES if args.samples is None else args.samples,
        chunk_size=args.chunk_size,
        group_size=args.group_size,
        num_pods=args.pods,
        remote_memory_samples=args.remote_memory_samples,
        window=args.window if args.prefetch == "on" else 0,
        refill=args.refill,
        group_order=args.group_order,
        seed=args.seed or 0,
    )
    result = _with_progress(settings)
    found = {"batch_size": settings.batch_size} | result.to_dict()
    if args.json:
        print(json.dumps(found))
        return 0
    for name, value in found.items():
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
    batch, unit = args.batch or LOOP_BATCH, args.part / 1e5
    rows: list[dict[str, Any]] = []
    if not args.json:
        print("ImageNet-1k: 1,281,167 samples, K=64, S=10, 3 pods, remote memory 10,000 samples; counts in 1e5")
        if args.part > 1:
            print(f"1 part of {args.part} of it was simulated, and counts are multiplied by {args.part}")
        print(f"requests one by one, as the papers', and what it is in batches of {batch}, as loops ask pods")
        print(
            f"variant                misses  paper  in {batch:<4} remote requests  paper  in {batch:<4} "
            "read x  dup.  missing"
        )
    runs = [(variant, seed, size, args.part) for variant in PAPER_VARIANTS for size in (1, batch)]
    with ProcessPoolExecutor() as pool:
        results = pool.map(_variant, *zip(*runs, strict=True))
        for variant, result, in_batches in zip(PAPER_VARIANTS, results, results, strict=False):
            rows.append(
                {
                    "variant": variant.name,
                    "batch_size": 1,
                    "part": args.part,
                    "paper_misses": variant.paper_misses * 1e5,
                    "paper_remote_requests": variant.paper_remote_requests * 1e5,
                }
                | result.to_dict()
                | {"in_batches": {"batch_size": batch} | in_batches.to_dict()}
            )
            if not args.json:
                print(
                    f"{variant.name:20} {result.misses * unit:8.3f} {variant.paper_misses:6.2f} "
                    f"{in_batches.misses * unit:8.3f} {result.remote_requests * unit:14.3f} "
                    f"{variant.paper_remote_requests:6.2f} {in_batches.remote_requests * unit:8.3f} "
                    f"{result.read_amplification:6.2f} {result.duplicates:5} {result.missing:8}"
                )
                sys.stdout.flush()
    if args.json:
        print(json.dumps(rows))
    return 0


def _variant(variant: PaperVariant, seed: int, batch_size: int, part: int) -> SimulationResult:
    return simulate(variant.settings(seed, batch_size, part))
