"""``refill cost``: what does a training run cost? Requests, storage and machines, in dollars."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, replace
from typing import Any

from refill.errors import InvalidInput
from refill_service.commands import cost_compare
from refill_service.planning.provider_prices import PRICES_AS_OF, PROVIDERS, ProviderPrices
from refill_service.planning.run_cost import Run, run_cost

__all__ = ["add_commands"]

_PROVIDER = "s3"


def add_commands(commands: Any) -> None:
    parser = commands.add_parser(
        "cost",
        description="Print what a training run costs: requests to the bucket, a month of storage, and machines (the "
        "cost model of DELI). refill simulate and refill analyze say how many GETs an epoch takes. With --samples, "
        "compare ways to read a dataset.",
        epilog="examples: refill cost --provider s3 --nodes 4 --vm-price 1.20 --run-seconds 36000 --epochs 10 --gets "
        "20000 --data-gb 150; refill cost --samples 1281167 --sample-bytes 110kB --nodes 4 --vm-price 1.20 --epochs 90 "
        "--compute-samples-per-second 5000",
    )
    parser.add_argument("--run-seconds", type=_amount, metavar="S", help="how long the run takes, all epochs together")
    parser.add_argument("--vm-price", type=_amount, metavar="USD", help="dollars for an hour of one machine")
    parser.add_argument("--nodes", type=_count, default=1, metavar="N", help="how many machines (default: 1)")
    parser.add_argument("--epochs", type=_count, default=1, metavar="E", help="how many epochs (default: 1)")
    parser.add_argument(
        "--gets", type=_number, metavar="G", help="GETs of an epoch, of all machines together (default: 0)"
    )
    parser.add_argument(
        "--listed",
        type=_number,
        metavar="L",
        help="objects that a listing of the bucket names, once an epoch, or once for each fetch (default: 0: it is not "
        "listed)",
    )
    parser.add_argument(
        "--fetch-size",
        type=_count,
        metavar="F",
        help="a service fetches so many samples at once, and lists the bucket each time, as DELI's (default: none)",
    )
    parser.add_argument("--page", type=_count, metavar="P", help="objects that one request lists (default: 1000)")
    parser.add_argument(
        "--provider",
        choices=sorted(PROVIDERS),
        help=f"whose prices hold where none are given; as of {PRICES_AS_OF} (default: s3)",
    )
    parser.add_argument("--class-a-price", type=_amount, metavar="USD", help="dollars for one request that lists")
    parser.add_argument("--class-b-price", type=_amount, metavar="USD", help="dollars for one GET")
    parser.add_argument("--bucket-price", type=_amount, metavar="USD", help="dollars for a GB in the bucket, a month")
    parser.add_argument(
        "--disk-price",
        type=_amount,
        default=0.0,
        metavar="USD",
        help="dollars for a GB of a machine's disk, a month (default: 0)",
    )
    for name, what in (
        ("system", "on each machine's disk, beside data"),
        ("cache", "on each machine's disk that caches"),
        ("data", "of the dataset"),
    ):
        parser.add_argument(f"--{name}-gb", type=_amount, metavar="GB", help=f"gigabytes {what} (default: 0)")
    parser.add_argument(
        "--no-bucket", action="store_true", help="each machine has the whole dataset on its disk, and asks no bucket"
    )
    cost_compare.add_options(parser, _amount, _count)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(func=_run)


def _run(args: argparse.Namespace) -> int:
    if args.samples is not None:
        return cost_compare.compare(args)
    cost_compare.refuse_options(args)
    if missing := [name for name in ("run_seconds", "vm_price") if getattr(args, name) is None]:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise InvalidInput(f"the cost of a run needs {names}; or give --samples, which compares ways to read a dataset")
    if args.no_bucket and (args.gets or args.listed or args.fetch_size):
        raise InvalidInput("--no-bucket has no requests: leave out --gets, --listed and --fetch-size")
    run = Run(
        prices=_prices(args),
        run_seconds=args.run_seconds,
        vm_hour=args.vm_price,
        nodes=args.nodes,
        epochs=args.epochs,
        gets=args.gets or 0,
        listed=args.listed or 0,
        fetch_size=args.fetch_size or 0,
        page=args.page or 1000,
        disk_gb=args.disk_price,
        system_gb=args.system_gb or 0.0,
        cache_gb=args.cache_gb or 0.0,
        data_gb=args.data_gb or 0.0,
        bucket=not args.no_bucket,
    )
    cost, provider = run_cost(run), args.provider or _PROVIDER
    if args.json:
        print(json.dumps(cost.to_dict() | {"provider": provider, "prices_as_of": PRICES_AS_OF, "run": asdict(run)}))
        return 0
    print(f"requests  {cost.api:12,.2f} USD")
    print(f"storage   {cost.storage:12,.2f} USD a month")
    print(f"machines  {cost.vms:12,.2f} USD")
    print(f"together  {cost.total:12,.2f} USD, with prices of {provider} as of {PRICES_AS_OF} where none were given")
    return 0


def _prices(args: argparse.Namespace) -> ProviderPrices:
    given = {"class_a": args.class_a_price, "class_b": args.class_b_price, "bucket_gb": args.bucket_price}
    return replace(
        PROVIDERS[args.provider or _PROVIDER], **{name: price for name, price in given.items() if price is not None}
    )


def _amount(text: str) -> float:
    try:
        amount = float(text)
    except ValueError:
        amount = math.nan
    if not 0 <= amount < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, got {text!r}")
    return amount


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, got {text!r}")
    return int(text)


def _count(text: str) -> int:
    if _number(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)
