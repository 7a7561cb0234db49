"""What do epochs of the papers' caches read, one after another, and how long do they take?

    python -m benchmarks.papers.epochs --eviction fifo --samples 12000 --pods 3 --memory-samples 800 --fetch-size 50/50

Caches of DELI, SHADE and CoorDL, and the policies ``exact`` and ``redox`` by a clock. Without a clock, and with the
memory of all pods as one cache, ``refill simulate`` says the same.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.papers.drawn_orders import DrawnOrders
from benchmarks.papers.loop_clock import LoopClock
from benchmarks.papers.ordered_reads import (
    Losses,
    OrderedRun,
    keyed_orders,
    losses_of_file,
    losses_of_samples,
    simulate_orders,
)

from refill.errors import InvalidInput, RefillError
from refill.protocol.job_spec import JobSpec
from refill.protocol.policies import terms_of
from refill_service.cache_core.epoch_order import Traces
from refill_service.cache_core.policies.fetching_exact import HALF, Fetching
from refill_service.planning.listed_orders import dealt, orders_of_file
from refill_service.planning.simulated_job import LOOP_BATCH

__all__ = ["main"]

_DEFAULT_SAMPLES = 131_072
_DEFAULT_EPOCHS = 3
_OF_EXACT = (
    *("eviction", "trace", "read_ahead", "caches", "fetch_size", "fetch_threshold", "no_renewal"),
    *("losses", "repetition", "improving"),
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _add_options(parser)
    try:
        return _run(parser.parse_args(argv))
    except RefillError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _add_options(parser: argparse.ArgumentParser) -> None:
    eviction, read_ahead = (_setting(name) for name in ("eviction", "read_ahead"))
    group = parser
    exact = parser.add_argument_group("policy exact")
    redox = parser.add_argument_group("policy redox")
    group.add_argument("--policy", choices=["exact", "redox"], default="exact")
    group.add_argument("--samples", type=int, help=f"of the dataset (default: {_DEFAULT_SAMPLES}, or as --trace says)")
    group.add_argument("--chunk-size", type=int, default=64, metavar="K", help="default: %(default)s")
    group.add_argument("--pods", type=int, default=3, help="each the home of one rank (default: %(default)s)")
    group.add_argument(
        "--batch", type=int, default=0, metavar="B", help="positions that a rank asks for at once (default: as --clock)"
    )
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--json", action="store_true", help="print one JSON object")
    redox.add_argument("--group-order", choices=["consecutive", "interleaved"], default=JobSpec.group_order)
    redox.add_argument("--refill", choices=["best", "random"], default=JobSpec.refill)
    redox.add_argument("--window", type=int, default=20_000, metavar="P", help="default: %(default)s")
    redox.add_argument("--remote-memory-samples", type=int, default=10_000, metavar="L", help="default: %(default)s")
    exact.add_argument("--eviction", choices=eviction.choices, help=f"{eviction.about} (default: {eviction.default})")
    group.add_argument(
        "--memory-samples",
        type=int,
        metavar="C",
        help="how many samples each pod has memory for (default: a tenth of the dataset over all pods)",
    )
    group.add_argument(
        "--epochs",
        type=int,
        metavar="E",
        help=f"how many epochs (default: {_DEFAULT_EPOCHS}; with --trace as many as FILE has, if each n lines are a "
        "permutation)",
    )
    exact.add_argument(
        "--trace",
        type=Path,
        metavar="FILE",
        help="the order, one sample id a line: epochs of n lines, dealt to ranks in turn, or one order of any length",
    )
    exact.add_argument(
        "--read-ahead",
        type=float,
        metavar="PART",
        help=f"{read_ahead.about}; it gains nothing where reads arrive at once (default: 0; with a "
        f"--clock whose svc is a store {read_ahead.default})",
    )
    exact.add_argument(
        "--caches",
        choices=["shared", "private"],
        help="whether the memory of all pods is one cache, or each rank has its own, as the nodes of the papers "
        "(default: private with --eviction fifo, which is DELI's, else shared); with --fetch-size pods fetch what is "
        "asked of them, and nodes what their ranks ask for",
    )
    exact.add_argument(
        "--fetch-size",
        type=_fetch_number,
        metavar="F",
        help="of --eviction fifo: fetch the next F requests of a rank together before it asks for them (DELI), or "
        "50/50: half of its memory (default: none is fetched ahead)",
    )
    exact.add_argument(
        "--fetch-threshold",
        type=_fetch_number,
        metavar="Q",
        help="with --fetch-size: fetch when no more than Q of what was fetched are left to be asked for, or 50/50: "
        "half of memory (default: 0; with --fetch-size 50/50 half of memory, too)",
    )
    exact.add_argument(
        "--no-renewal",
        action="store_const",
        const=True,
        help="with --fetch-size and private caches: what a fetch leaves out, since it is in the cache, stays as old as "
        "it is, as in DELI's paper (default: it counts as fetched anew)",
    )
    group.add_argument(
        "--clock",
        type=Path,
        metavar="FILE",
        help="JSON with the times of a loop, in seconds, for load_seconds and run_seconds of each epoch: h a look-up, "
        "g a miss beside it, comp computing a batch, batch its positions (unless --batch is given), and svc fetching L "
        'samples: {"fixed", "per", "workers", "insert"}: fixed + per x L, all fetches under way sharing so many '
        'workers, and insert for each sample that goes into the cache; or {"fixed", "parallel", "latency", "size", '
        '"bandwidth"}: fixed, and then the longer of rounds of so many GETs at once, each with its latency and the '
        "transfer of one, and of one latency and all transfers one after another. With the second form all that pods "
        "read comes from a store, a pod so many GETs at once, each fixed and latency and then its fair part of the "
        "pod's bandwidth and of link, which all pods share; loops wait for it and not for g; ahead is then how many "
        "batches a loader asks for before the loop wants them. Ranks compute each step together, unless in_step is "
        "false",
    )
    exact.add_argument(
        "--losses",
        type=Path,
        metavar="FILE",
        help="of --eviction importance (SHADE): what training finds, one loss a line, by which samples are ranked in "
        "their batch after each one; with --trace for each of its lines, else for each sample by its id, the same in "
        "every epoch or of one epoch after another (default: nothing is known, and memory keeps what came first)",
    )
    exact.add_argument(
        "--repetition",
        type=float,
        metavar="R",
        help="with --losses: each epoch is drawn by what its samples' losses were before, as refill.ImportanceSampler "
        "draws (PADS), and draws that are in memory come R times; 1 repeats none (default: the order is that of the "
        "seed, or of --trace)",
    )
    exact.add_argument(
        "--improving",
        action="store_const",
        const=True,
        help="with --repetition: validation improves, so that each rank draws for itself and takes the draws that came "
        "most often (default: ranks divide one drawing)",
    )


def _fetch_number(text: str) -> int | str:
    if text == HALF:
        return text
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise argparse.ArgumentTypeError(f"must be a number of samples or {HALF}, got {text!r}")
    return int(text)


def _setting(name: str) -> Any:
    return next(setting for setting in terms_of("exact").settings if setting.name == name)


def _run(args: argparse.Namespace) -> int:
    run, orders, num_epochs, losses, drawn = _what_to_run(args)
    epochs = list(simulate_orders(run, orders, num_epochs, losses, drawn))
    head = _head(run)
    if drawn is not None:
        head |= {"repetition": drawn.repetition, "improving": drawn.improving}
    if args.json:
        print(json.dumps(head | {"epochs": [epoch.to_dict() for epoch in epochs]}))
        return 0
    print(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in head.items()))
    titles = ("     distinct" if drawn else "") + ("  load seconds   run seconds" if run.clock else "")
    print(f"epoch       GETs  of 64 samples  samples read  of the dataset         hits       misses{titles}")
    for each in epochs:
        positions = max(1, each.hits + each.misses)
        more = f" {each.distinct:12,}" if drawn else ""
        more += f" {each.load_seconds:13,.2f} {each.run_seconds:13,.2f}" if run.clock else ""
        print(
            f"{each.epoch:5} {each.gets:10,} {each.gets / positions * 64:14.3f} {each.samples_read:13,} "
            f"{each.samples_read / run.num_samples:14.2f}x {each.hits:12,} {each.misses:12,}{more}"
        )
    return 0


def _what_to_run(
    args: argparse.Namespace,
) -> tuple[OrderedRun, list[Traces], int, list[list[Losses]], DrawnOrders | None]:
    """And how many of the orders to run, and the losses of each epoch and rank, if any are known; or what draws the
    orders."""
    for name in _OF_EXACT if args.policy != "exact" else ():
        if getattr(args, name) is not None:
            raise InvalidInput(f"--{name.replace('_', '-')} is an option of --policy exact")
    if args.batch < 0:
        raise InvalidInput(f"--batch must be at least 1, got {args.batch}")
    if args.memory_samples is not None and args.memory_samples < 1:
        raise InvalidInput(f"--memory-samples must be at least 1, got {args.memory_samples}")
    num_samples, of_file = args.samples, None
    if args.trace is not None:
        num_samples, of_file = orders_of_file(args.trace, num_samples, args.epochs)
    elif num_samples is None:
        num_samples = _DEFAULT_SAMPLES
    clock = None if args.clock is None else LoopClock.of_file(args.clock)
    batch_size = args.batch or (clock and clock.batch) or (1 if of_file else LOOP_BATCH)
    if args.policy == "exact":
        run = _ordered(args, num_samples, batch_size, clock)
    else:
        run = _redirected(args, num_samples, batch_size, clock)
    if of_file is not None:
        orders, num_epochs = dealt(of_file, run.num_samples, run.num_pods), len(of_file)
    else:
        num_epochs = _DEFAULT_EPOCHS if args.epochs is None else args.epochs
        orders = keyed_orders(run, num_epochs)
    if (drawn := _drawn(args, run, num_epochs)) is not None:
        return run, [], num_epochs, [], drawn
    losses = [] if args.losses is None else losses_of_file(args.losses, run, num_epochs, of_file)
    return run, orders, num_epochs, losses, None


def _drawn(args: argparse.Namespace, run: OrderedRun, num_epochs: int) -> DrawnOrders | None:
    if args.repetition is None:
        if args.improving:
            raise InvalidInput("--improving goes with --repetition")
        return None
    if args.losses is None:
        raise InvalidInput("--repetition goes with --losses: an epoch is drawn by what training found before")
    if args.trace is not None:
        raise InvalidInput("--repetition draws the order, and does not go with --trace")
    if run.private:
        raise InvalidInput("--repetition does not go with --caches private: all ranks draw from what all pods keep")
    losses = losses_of_samples(args.losses, run, num_epochs)
    improving = bool(args.improving)
    return DrawnOrders(losses, run.num_pods, seed=run.seed, repetition=args.repetition, improving=improving)


def _ordered(args: argparse.Namespace, num_samples: int, batch_size: int, clock: LoopClock | None) -> OrderedRun:
    eviction = args.eviction or _setting("eviction").default
    if args.losses is not None and eviction != "importance":
        raise InvalidInput("--losses goes with --eviction importance")
    read_ahead = args.read_ahead
    if read_ahead is None:
        read_ahead = _setting("read_ahead").default if clock and clock.reads_take_time else 0.0
    _setting("read_ahead").check("exact", read_ahead)
    memory_samples = args.memory_samples or max(1, num_samples // 10 // max(1, args.pods))
    private = (args.caches or ("private" if eviction == "fifo" else "shared")) == "private"
    return OrderedRun(
        num_samples=num_samples,
        memory_samples=memory_samples,
        chunk_size=args.chunk_size,
        num_pods=args.pods,
        batch_size=batch_size,
        eviction=eviction,
        private=private,
        read_ahead=read_ahead,
        seed=args.seed or 0,
        fetching=(fetching := _fetching(args, eviction, private, memory_samples)),
        renews=_renews(args, fetching, private),
        clock=clock,
    )


def _redirected(args: argparse.Namespace, num_samples: int, batch_size: int, clock: LoopClock | None) -> OrderedRun:
    """Of policies that bind requests to a place in memory."""
    memory_samples = args.memory_samples or max(1, num_samples // 10 // max(1, args.pods))
    return OrderedRun(
        num_samples=num_samples,
        memory_samples=memory_samples,
        chunk_size=args.chunk_size,
        num_pods=args.pods,
        batch_size=batch_size,
        seed=args.seed or 0,
        clock=clock,
        policy=args.policy,
        group_order=args.group_order,
        refill=args.refill,
        window=args.window if args.pods > 1 else 0,
        remote_memory_samples=args.remote_memory_samples,
    )


def _fetching(args: argparse.Namespace, eviction: str, private: bool, memory_samples: int) -> Fetching | None:
    if args.fetch_size is None:
        if args.fetch_threshold is not None:
            raise InvalidInput("--fetch-threshold goes with --fetch-size")
        return None
    if args.fetch_size == 0:
        raise InvalidInput("--fetch-size must be at least 1, got 0")
    if eviction != "fifo":
        raise InvalidInput("--fetch-size goes with --eviction fifo")
    fetching = Fetching.of(
        args.fetch_size, "auto" if args.fetch_threshold is None else args.fetch_threshold, memory_samples
    )
    if fetching is not None and not private:  # as pods have it
        _setting("fetch_size").check("exact", fetching.size)
        _setting("fetch_threshold").check("exact", fetching.threshold)
    return fetching


def _renews(args: argparse.Namespace, fetching: Fetching | None, private: bool) -> bool:
    if args.no_renewal and (fetching is None or not private):
        raise InvalidInput("--no-renewal goes with --fetch-size and private caches")
    return not args.no_renewal


def _head(run: OrderedRun) -> dict[str, Any]:
    head: dict[str, Any] = {"policy": run.policy} | ({"eviction": run.eviction} if run.policy == "exact" else {})
    head |= {
        "samples": run.num_samples,
        "memory_samples": run.memory_samples,
        "chunk_size": run.read_size,
        "pods": run.num_pods,
        "batch_size": run.batch_size,
    }
    if run.policy == "exact":
        head |= {"caches": "private" if run.private else "shared", "read_ahead": run.read_ahead}
    if run.fetching is not None:
        head |= {"fetch_size": run.fetching.size, "fetch_threshold": run.fetching.threshold}
    if not run.renews:
        head["renews"] = False
    return head


if __name__ == "__main__":
    raise SystemExit(main())
