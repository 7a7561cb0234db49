"""``refill receipt``: what an epoch of a running job delivered, and whether it was every sample exactly once."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any
from urllib.parse import quote

import httpx

from refill.credentials import CA_FILE_VARIABLE, TOKEN_FILE_VARIABLE, Credentials
from refill.errors import InvalidInput, PodUnreachable, error_from_wire

__all__ = ["add_commands"]

_URL_VARIABLE = "REFILL_URL"
_DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT_SECONDS = 60
_SHOWN_RANKS = 16


def add_commands(commands: Any) -> None:
    parser = commands.add_parser(
        "receipt",
        help="what an epoch delivered: duplicates, missing, per rank",
        description="Print the receipt of an epoch, counted from the pods' tables of who got what. Exit status 0 when "
        "every sample was delivered exactly once, 1 when not, or not yet.",
        epilog="example: refill receipt run-1 3 --url http://refill:8000",
    )
    parser.add_argument("job", metavar="JOB", help="name of the job")
    parser.add_argument("epoch", metavar="EPOCH", type=int, help="number of the epoch, from 0")
    parser.add_argument(
        "--url",
        default=os.environ.get(_URL_VARIABLE, _DEFAULT_URL),
        help=f"the service or any pod (default: {_URL_VARIABLE}, else {_DEFAULT_URL})",
    )
    parser.add_argument(
        "--token-file", metavar="FILE", help=f"holds the service's token (default: {TOKEN_FILE_VARIABLE})"
    )
    parser.add_argument(
        "--ca-file",
        metavar="FILE",
        help=f"certificates that an https service's is signed by (default: {CA_FILE_VARIABLE})",
    )
    parser.add_argument("--json", action="store_true", help="print the receipt as JSON")
    parser.set_defaults(func=_run)


def _run(args: argparse.Namespace) -> int:
    receipt = _fetch(args.url, args.job, args.epoch, Credentials(args.token_file, args.ca_file))
    print(json.dumps(receipt, indent=2) if args.json else _shown(receipt))
    return 0 if receipt["exact"] else 1


def _fetch(url: str, job: str, epoch: int, credentials: Credentials) -> dict[str, Any]:
    path = f"{url.rstrip('/')}/v1/jobs/{quote(job, safe='')}/epochs/{epoch}/receipt"
    try:
        verify = credentials.ssl_context() if url.startswith("https:") else False
        answer = httpx.get(
            path, timeout=_TIMEOUT_SECONDS, trust_env=False, headers=credentials.headers(), verify=verify
        )
        content = answer.json()
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise InvalidInput(f"--url {url!r} is not the URL of a service, like http://refill:8000") from error
    except httpx.HTTPError as error:
        raise PodUnreachable(f"{url} does not answer: {str(error) or type(error).__name__}", url=url) from error
    except ValueError:
        content = answer.text
    if answer.status_code != 200:
        raise error_from_wire(content, status=answer.status_code, source=url)
    found: dict[str, Any] = content
    return found


def _shown(receipt: dict[str, Any]) -> str:
    verdict = "exact" if receipt["exact"] else "still running" if receipt["running"] else "NOT EXACT"
    of_what = f"job {receipt['job']}, epoch {receipt['epoch']} (policy {receipt['policy']}, seed {receipt['seed']})"
    lines = [
        f"{of_what}: {verdict}",
        f"  delivered   {receipt['delivered']:>14,} of {receipt['requests']:,} requests",
        f"  duplicates  {receipt['duplicates']:>14,}",
        f"  missing     {receipt['missing']:>14,}",
        f"  unknown     {receipt['unknown']:>14,}",
        f"  redirected  {receipt['redirected']:>14,}",
        f"  repeats     {receipt['repeats']:>14,}  positions that repeat a sample (padding, replacement)",
    ]
    ranks = list(receipt["ranks"].items())
    lines += [f"  rank {rank:<6} {count:>14,}" for rank, count in ranks[:_SHOWN_RANKS]]
    if len(ranks) > _SHOWN_RANKS:
        lines.append(f"  and {len(ranks) - _SHOWN_RANKS} more ranks (--json shows all)")
    lines.append(f"  digest {receipt['digest']}, of the samples alone {receipt['samples_digest']}")
    return "\n".join(lines)
