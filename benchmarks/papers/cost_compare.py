"""Which way to read a dataset is cheapest: the bucket alone, copies on disks, DELI, or refill's policies?

python -m benchmarks.papers.cost_compare --samples 1281167 --sample-bytes 110kB --nodes 4 --epochs 90
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from benchmarks.papers.cost_lines import (
    MOST_EPOCHS,
    SAMPLE_SIZES,
    WAYS,
    ComparedRun,
    Line,
    cheapest_by_epochs,
    cheapest_by_memory,
    cheapest_by_sample_size,
    line_of,
    with_memory_parts,
)

from refill.errors import InvalidInput, MemoryTooSmall, RefillError
from refill_service.planning.analysis import StoreTerms
from refill_service.planning.run_cost import PRICES_AS_OF, PROVIDERS

__all__ = ["main"]

_MORE = "; give more memory, or --simulate-samples more"
_ORDERS = ("any_order", "order_kept")
_FROM = {"epochs": "from_epochs", "sample_bytes": "from_bytes", "memory": "from_fraction"}
"""What the lines cross by, and how JSON names the place."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _add_options(parser)
    try:
        return compare(parser.parse_args(argv))
    except RefillError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _add_options(group: argparse.ArgumentParser) -> None:
    amount, count, store = _amount, _count, StoreTerms()
    group.add_argument("--nodes", type=count, default=1, metavar="N", help="how many machines (default: 1)")
    group.add_argument("--epochs", type=count, default=1, metavar="E", help="how many epochs (default: 1)")
    group.add_argument("--vm-price", type=amount, default=0.0, metavar="USD", help="dollars for an hour of one machine")
    group.add_argument(
        "--disk-price", type=amount, default=0.0, metavar="USD", help="dollars for a GB of a machine's disk, a month"
    )
    group.add_argument("--json", action="store_true", help="print one JSON object")
    group.add_argument("--samples", type=count, required=True, metavar="N", help="of the dataset")
    group.add_argument("--sample-bytes", default="100kB", metavar="SIZE", help="how large each one is (default: 100kB)")
    group.add_argument(
        "--memory",
        default="10%",
        metavar="SIZE",
        help="what all machines together have for samples: 64GiB, 500MB, or a part of the dataset (default: 10%%)",
    )
    group.add_argument(
        "--memory-price",
        type=amount,
        default=0.0,
        metavar="USD",
        help="dollars for a GB of that memory, an hour (default: 0, machines have it)",
    )
    group.add_argument(
        "--elsewhere",
        action="store_true",
        help="machines are not at the provider, so that it bills what they read as traffic",
    )
    group.add_argument(
        "--compute-samples-per-second",
        type=amount,
        metavar="RATE",
        help="how fast all machines train when they never wait for data (default: an epoch takes as long as its reads)",
    )
    group.add_argument(
        "--store-latency", type=amount, default=store.latency_seconds * 1000, metavar="MS", help="to the first byte"
    )
    group.add_argument(
        "--store-bandwidth", type=amount, default=store.bytes_per_second / 1e6, metavar="MB/S", help="of one machine"
    )
    group.add_argument("--concurrency", type=count, default=store.concurrency, metavar="C", help="GETs of a machine")
    group.add_argument(
        "--simulate-samples",
        type=count,
        default=8192,
        metavar="N",
        help="of a larger dataset, simulate only N, with the same part of it in memory (default: 8192)",
    )


def compare(args: argparse.Namespace) -> int:
    run = _run_of(args)
    ways = [name for name in WAYS if not _is_chunk_too_large(name, run)]
    by_memory: dict[ComparedRun, list[Line]] = {}
    no_room: dict[str, list[float]] = {}
    """Ways, and the parts of the dataset in which there is no room for a chunk."""
    with ProcessPoolExecutor(2) as pool:
        simulated = [(each, name, pool.submit(line_of, name, each)) for each in with_memory_parts(run) for name in ways]
        for each, name, line in simulated:
            try:
                by_memory.setdefault(each, []).append(line.result())
            except MemoryTooSmall:
                no_room.setdefault(name, []).append(each.memory_fraction)
    left_out = _left_out(run, no_room)
    if args.json:
        print(json.dumps(_found(run, by_memory) | {"left_out": left_out}))
    else:
        _print(run, by_memory)
        if left_out:
            print(f"left out: {', and '.join(left_out)}{_MORE if run.simulated < run.num_samples else ''}")
    return 0


def _left_out(run: ComparedRun, no_room: dict[str, list[float]]) -> list[str]:
    """A text for each reason."""
    found = []
    if larger := [name for name in WAYS if _is_chunk_too_large(name, run)]:
        found.append(f"chunks of more than {run.simulated} samples ({', '.join(larger)})")
    if no_room:
        places = (f"{name} at {_percent(parts)}" for name, parts in no_room.items())
        found.append(f"memory that holds no chunk ({'; '.join(places)})")
    return found


def _is_chunk_too_large(name: str, run: ComparedRun) -> bool:
    return WAYS[name].chunk_size > run.simulated


def _percent(parts: Sequence[float]) -> str:
    return f"{', '.join(f'{100 * part:.3g}' for part in parts)}%"


def _run_of(args: argparse.Namespace) -> ComparedRun:
    from refill_service.commands.amounts import memory_bytes_of, size_of

    if args.samples < 2:
        raise InvalidInput(f"--samples must be at least 2, got {args.samples}")
    for name in ("compute_samples_per_second", "store_bandwidth"):
        if getattr(args, name) == 0:
            raise InvalidInput(f"--{name.replace('_', '-')} must be more than 0")
    sample_bytes = size_of("--sample-bytes", args.sample_bytes)
    data_bytes = args.samples * sample_bytes
    least = 1 / args.samples if args.memory == "10%" else 0.0  # a tenth of a few samples is none
    return ComparedRun(
        num_samples=args.samples,
        sample_bytes=sample_bytes,
        memory_fraction=min(1.0, max(least, memory_bytes_of("--memory", args.memory, data_bytes) / data_bytes)),
        epochs=args.epochs,
        nodes=args.nodes,
        vm_hour=args.vm_price,
        memory_gb_hour=args.memory_price,
        disk_gb=args.disk_price,
        elsewhere=args.elsewhere,
        compute_samples_per_second=args.compute_samples_per_second,
        store=StoreTerms(
            latency_seconds=args.store_latency / 1000,
            bytes_per_second=args.store_bandwidth * 1e6,
            concurrency=args.concurrency,
        ),
        most_simulated=args.simulate_samples,
    )


def _found(run: ComparedRun, by_memory: dict[ComparedRun, list[Line]]) -> dict[str, Any]:
    lines = by_memory[run]
    return {
        "samples": run.num_samples,
        "sample_bytes": run.sample_bytes,
        "memory_fraction": run.memory_fraction,
        "epochs": run.epochs,
        "nodes": run.nodes,
        "elsewhere": run.elsewhere,
        "simulated_samples": run.simulated,
        "prices_as_of": PRICES_AS_OF,
        "ways": [
            {
                "way": line.name,
                "keeps_order": line.way.keeps_order,
                "gets_first_epoch": round(line.first.gets * run.num_samples),
                "gets_later_epochs": round(line.later.gets * run.num_samples),
                "bytes_first_epoch": round(line.first.samples * run.num_samples * run.sample_bytes),
                "bytes_later_epochs": round(line.later.samples * run.num_samples * run.sample_bytes),
                "run_seconds": line.hours(run) * 3600,
                "cost": {provider: line.cost(run, prices).to_dict() for provider, prices in PROVIDERS.items()},
            }
            for line in lines
        ],
        "cheapest": {
            provider: {
                order: {
                    f"by_{what}": [{_FROM[what]: at, "way": way} for at, way in found]
                    for what, found in _crossings(run, by_memory, order, provider).items()
                }
                for order in _ORDERS
            }
            for provider in PROVIDERS
        },
    }


def _crossings(
    run: ComparedRun, by_memory: dict[ComparedRun, list[Line]], order: str, provider: str
) -> dict[str, Sequence[tuple[float, str]]]:
    """By the names of ``_FROM``."""
    of_order = {
        each: [line for line in lines if line.way.keeps_order or order == "any_order"]
        for each, lines in by_memory.items()
    }
    return {
        "epochs": cheapest_by_epochs(of_order[run], run, provider),
        "sample_bytes": cheapest_by_sample_size(of_order[run], run, provider),
        "memory": cheapest_by_memory(of_order, provider),
    }


def _print(run: ComparedRun, by_memory: dict[ComparedRun, list[Line]]) -> None:
    from refill_service.datasets.progress import bytes_text

    lines = by_memory[run]

    def machines(number: int) -> str:
        return f"{number} machine{'s' * (number > 1)}"

    epochs = f"{run.epochs} epoch{'s' * (run.epochs > 1)}"
    print(
        f"{run.num_samples:,} samples, {bytes_text(run.num_samples * run.sample_bytes)}; {run.memory_fraction:.1%} of "
        f"them in memory of {machines(run.nodes)}{', not at the provider' * run.elsewhere}; {epochs}"
    )
    print(f"GETs and bytes are of an epoch after the first; dollars of {epochs}, with prices as of {PRICES_AS_OF}")
    print()
    heads = "".join(f"{provider:>12}" for provider in PROVIDERS)
    print(f"{'':16} {'order':8} {'GETs':>12} {'bytes':>7} {'hours':>9}{heads}")
    for line in lines:
        order = "kept" if line.way.keeps_order else "any"
        dollars = "".join(f"{line.cost(run, prices).total:12,.2f}" for prices in PROVIDERS.values())
        print(
            f"{line.name:16} {order:8} {line.later.gets * run.num_samples:12,.0f} {line.later.samples:6.2f}x "
            f"{line.hours(run):9,.2f}{dollars}"
        )
    titles: dict[str, tuple[str, Callable[[Any], str]]] = {
        "epochs": (f"cheapest, of 1 to {MOST_EPOCHS:,} epochs", lambda at: f"{at:,} epoch{'s' * (at > 1)}"),
        "sample_bytes": (f"cheapest of {epochs}, by the size of a sample", bytes_text),
        "memory": (f"cheapest of {epochs}, by the part of the dataset in memory", lambda at: f"{100 * at:.3g}%"),
    }
    crossings = [
        (provider, order, _crossings(run, by_memory, order, provider)) for order in _ORDERS for provider in PROVIDERS
    ]
    for what, (title, text) in titles.items():
        print()
        print(title)
        agree: dict[tuple[str, str], list[str]] = {}
        """Providers, by the line that is the same for them."""
        for provider, order, of_all in crossings:
            (_, first), *others = of_all[what]
            ways = ", ".join([first, *(f"from {text(at)} {way}" for at, way in others)])
            agree.setdefault((order, ways), []).append(provider)
        width = max(len(", ".join(providers)) for providers in agree.values())
        for (order, ways), providers in agree.items():
            print(f"  {', '.join(providers):{width}}  {order.replace('_', ' '):11} {ways}")
    print()
    print(
        f"sizes are looked at from {bytes_text(SAMPLE_SIZES[0])} to {bytes_text(SAMPLE_SIZES[-1])}, memory at "
        f"{_percent([each.memory_fraction for each in by_memory])}; times are floors"
    )


def _amount(text: str) -> float:
    if not 0 <= (amount := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text!r}")
    return amount


def _count(text: str) -> int:
    if (count := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return count


if __name__ == "__main__":
    raise SystemExit(main())
