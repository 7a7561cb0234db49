"""``refill cost``: what does a training run cost? Requests, storage and machines, in dollars."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import Any

from refill_service.commands.amounts import number, whole
from refill_service.planning.run_cost import PRICES_AS_OF, PROVIDERS, run_cost


def add_commands(commands: Any) -> None:
    parser = commands.add_parser(
        "cost",
        description="Print what a training run costs: GETs, a month of the bucket, and machines. refill analyze and "
        "refill simulate say how many GETs an epoch takes; refill analyze --epochs prints this cost for each chunk "
        "size, without the bucket.",
        epilog="example: refill cost --provider s3 --nodes 4 --vm-price 1.20 --run-seconds 36000 --epochs 10 --gets "
        "20000 --data-gb 150",
    )
    parser.add_argument(
        "--run-seconds", type=number(0), required=True, metavar="S", help="how long the run takes, all epochs together"
    )
    parser.add_argument(
        "--vm-price", type=number(0), required=True, metavar="USD", help="dollars for an hour of one machine"
    )
    parser.add_argument("--nodes", type=whole(1), default=1, metavar="N", help="how many machines (default: 1)")
    parser.add_argument("--epochs", type=whole(1), default=1, metavar="E", help="how many epochs (default: 1)")
    parser.add_argument(
        "--gets", type=whole(0), default=0, metavar="G", help="GETs of an epoch, of all machines together (default: 0)"
    )
    parser.add_argument(
        "--data-gb",
        type=number(0),
        default=0.0,
        metavar="GB",
        help="gigabytes of the dataset in the bucket (default: 0)",
    )
    parser.add_argument(
        "--provider",
        choices=sorted(PROVIDERS),
        default="s3",
        help=f"whose prices hold where none are given; as of {PRICES_AS_OF} (default: s3)",
    )
    parser.add_argument("--class-b-price", type=number(0), metavar="USD", help="dollars for one GET")
    parser.add_argument("--bucket-price", type=number(0), metavar="USD", help="dollars for a GB in the bucket, a month")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(func=_run)


def _run(args: argparse.Namespace) -> int:
    given = {"class_b": args.class_b_price, "bucket_gb": args.bucket_price}
    prices = replace(PROVIDERS[args.provider], **{name: price for name, price in given.items() if price is not None})
    cost = run_cost(
        prices,
        epochs=args.epochs,
        gets=args.gets,
        run_seconds=args.run_seconds,
        machines=args.nodes,
        vm_hour=args.vm_price,
        data_gb=args.data_gb,
    )
    if args.json:
        print(json.dumps(cost.to_dict() | {"provider": args.provider, "prices_as_of": PRICES_AS_OF}))
        return 0
    print(f"requests  {cost.requests:12,.2f} USD")
    print(f"storage   {cost.storage:12,.2f} USD a month")
    print(f"machines  {cost.machines:12,.2f} USD")
    print(
        f"together  {cost.total:12,.2f} USD, with prices of {args.provider} as of {PRICES_AS_OF} where none were given"
    )
    return 0
