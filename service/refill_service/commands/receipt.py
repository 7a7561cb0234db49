"""``refill receipt``: what an epoch of a job delivered, and whether it was every sample exactly once."""

from __future__ import annotations

import argparse
import json
from typing import Any
from urllib.parse import quote

from refill_service.commands.amounts import whole
from refill_service.commands.service_arguments import add_service_arguments, ask, client_of, job_name

SHOWN_OF_RUN = 8
"""Letters of its name."""
_TIMEOUT_SECONDS = 60
_SHOWN_RANKS = 16


def add_commands(commands: Any) -> None:
    parser = commands.add_parser(
        "receipt",
        description="Print the receipt of an epoch: how many samples were delivered, how many twice or never, and to "
        "which rank. Exit status 0 when every sample was delivered exactly once, 1 when not, or not yet.",
        epilog="example: refill receipt run-1 3 --url http://refill:8000",
    )
    parser.add_argument("job", type=job_name, metavar="JOB", help="name of the job")
    parser.add_argument("epoch", metavar="EPOCH", type=whole(0), help="number of the epoch, from 0")
    add_service_arguments(parser, "--url")
    parser.add_argument(
        "--run",
        default="",
        metavar="RUN",
        help="which run of this job, if several had its name: its id as refill jobs --ended shows it, or the "
        "beginning of that (default: the one that runs, else the one that ended last)",
    )
    parser.add_argument("--json", action="store_true", help="print the receipt as JSON")
    parser.set_defaults(func=_run)


def _run(args: argparse.Namespace) -> int:
    with client_of(args, _TIMEOUT_SECONDS) as client:
        path = f"/v1/jobs/{quote(args.job, safe='')}/epochs/{args.epoch}/receipt?run={quote(args.run, safe='')}"
        receipt: dict[str, Any] = ask(client, "GET", args.url, path)
    print(json.dumps(receipt, indent=2) if args.json else _shown(receipt))
    return 0 if receipt["exact"] else 1


def _shown(receipt: dict[str, Any]) -> str:
    damaged = receipt["damaged"]
    exact = f"exact but for {damaged:,} damaged" if damaged else "exact"
    wrong = "NOT ALL CONFIRMED" if "planned" in receipt else "NOT EXACT"
    verdict = exact if receipt["exact"] else "still running" if receipt["running"] else wrong
    if receipt["exact"] and "positions" in receipt:
        verdict = "each position was answered once"
    settings = f"policy {receipt['policy']}, seed {receipt['seed']}"
    run = f"run {receipt['run'][:SHOWN_OF_RUN]}{', ended' if receipt['ended'] else ''}"
    head = f"job {receipt['job']}, epoch {receipt['epoch']} ({settings}, {run}): {verdict}"
    if "planned" in receipt:
        return "\n".join([head, *_shown_planned(receipt), *_shown_ranks(receipt["ranks"])])
    lines = [
        head,
        f"  delivered   {receipt['delivered']:>14,} of {receipt['requests']:,} requests",
        f"  duplicates  {receipt['duplicates']:>14,}",
        f"  missing     {receipt['missing']:>14,}",
        f"  redirected  {receipt['redirected']:>14,}",
        f"  repeats     {receipt['repeats']:>14,}  positions that repeat a sample (padding, replacement)",
    ]
    if damaged:
        lines.insert(5, _shown_damaged(damaged, receipt["damaged_samples"]))
    if "positions" in receipt:
        lines[1:1] = _shown_draws(receipt["positions"], receipt["draws"])
    lines += _shown_ranks(receipt["ranks"])
    lines.append(
        f"  digest {receipt['digest']} of (rank, position, sample), {receipt['samples_digest']} of the samples alone"
    )
    return "\n".join(lines)


def _shown_planned(receipt: dict[str, Any]) -> list[str]:
    """Of an epoch whose order was planned: each sample has its place, and ranks say what they have received."""
    lines = [
        f"  planned     {receipt['planned']:>14,}  samples, each once, by plan {receipt['plan_id'][:SHOWN_OF_RUN]}"
        + (f", read_seed {receipt['read_seed']}" if "read_seed" in receipt else ""),
        f"  received    {receipt['received']:>14,}  as ranks report, and checkpoints that they went on from",
        f"  unconfirmed {receipt['unconfirmed']:>14,}",
    ]
    if start := receipt["from_checkpoint"]:
        lines.append(f"  checkpoint  {start:>14,}  of those received: before the rest was dealt to the ranks below")
    if damaged := receipt["damaged"]:
        lines.append(_shown_damaged(damaged, receipt["damaged_samples"]))
    if dropped := receipt["dropped"]:
        lines.append(f"  dropped     {dropped:>14,}  for drop_last")
    lines.append(f"  repeats     {receipt['repeats']:>14,}  that fill the last step up")
    if receipt.get("digested"):  # nobody counts what some loops had
        lines.append(f"  loops had   {receipt['digested']:>14,}  digest {receipt['digest']}{_beside_plan(receipt)}")
    if given_up := receipt["given_up_bytes"]:
        lines.append(f"  read again  {given_up:>14,}  bytes that memory had no room for until they were asked for")
    return lines


def _beside_plan(receipt: dict[str, Any]) -> str:
    is_planned = receipt["digest_as_planned"]
    if is_planned is None:
        return ""
    return ", as planned" if is_planned else f", AND PLANNED IS {receipt['digest_planned']}"


def _shown_damaged(damaged: int, named: list[int]) -> str:
    more = f" and {damaged - len(named):,} more" if damaged > len(named) else ""
    return f"  damaged     {damaged:>14,}  ranks went on without: {', '.join(map(str, named))}{more}"


def _shown_ranks(ranks: dict[str, int]) -> list[str]:
    lines = [f"  rank {rank:<6} {count:>14,}" for rank, count in list(ranks.items())[:_SHOWN_RANKS]]
    if len(ranks) > _SHOWN_RANKS:
        lines.append(f"  and {len(ranks) - _SHOWN_RANKS} more ranks (--json shows all)")
    return lines


def _shown_draws(positions: dict[str, int], draws: dict[str, int]) -> list[str]:
    """Of an epoch that was drawn by importance: samples come often, or never, as they were drawn."""
    return [
        f"  positions   {positions['delivered']:>14,} of {positions['posted']:,} answered, {positions['duplicates']:,} "
        f"twice, {positions['missing']:,} missing",
        f"  distinct    {draws['distinct']:>14,}  samples: {draws['drawn_once']:,} drawn once, "
        f"{draws['drawn_twice']:,} twice, {draws['drawn_more']:,} more often, {draws['most_often']:,} times at most",
        f"  never drawn {draws['never_drawn']:>14,}  samples; below, each distinct one is one request, and the rest "
        "repeats",
    ]
