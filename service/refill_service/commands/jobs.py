"""``refill jobs`` and ``refill end``: which jobs do the pods hold, who uses them, and away with one."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import httpx

from refill.errors import PodUnreachable
from refill.protocol.position_set import PositionSet
from refill_service.commands.receipt import SHOWN_OF_RUN
from refill_service.commands.service_arguments import add_service_arguments, ask, client_of, job_name

_TIMEOUT_SECONDS = 20
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"))


def add_commands(commands: Any) -> None:
    listing = commands.add_parser(
        "jobs",
        description="List the jobs that the pods hold: those of your token, and those that were registered without "
        "one.",
        epilog="example: refill jobs --url http://refill:8000",
    )
    add_service_arguments(listing, "--url")
    listing.add_argument(
        "--ended", action="store_true", help="list runs that have ended and whose receipts are still kept"
    )
    listing.add_argument("--json", action="store_true", help="print them as JSON")
    listing.set_defaults(func=_list)
    end = commands.add_parser(
        "end",
        description="End a job on all pods, and free its memory. Its receipts are kept for a while: refill jobs "
        "--ended.",
        epilog="example: refill end run-1 --url http://refill:8000",
    )
    end.add_argument("job", type=job_name, metavar="JOB", help="name of the job")
    add_service_arguments(end, "--url")
    end.set_defaults(func=_end)


def _list(args: argparse.Namespace) -> int:
    with client_of(args, _TIMEOUT_SECONDS) as client:
        pods = ask(client, "GET", args.url, "/v1/pods")["pods"] or [args.url]
        lists: list[list[dict[str, Any]]] = []
        away: PodUnreachable | None = None
        for url in pods:
            try:
                lists.append(ask(client, "GET", url, "/v1/runs") if args.ended else _jobs_at(client, url))
            except PodUnreachable as error:  # as while pods are updated: the others know the jobs, too
                print(f"refill: without what that pod knows: {error}", file=sys.stderr)
                away = error
    if away is not None and not lists:
        raise away
    found = _ended(lists) if args.ended else _of_all_pods(lists)
    shown = _shown_ended if args.ended else _shown
    print(json.dumps(found, indent=2) if args.json else shown(found))
    return 0


def _jobs_at(client: httpx.Client, url: str) -> list[dict[str, Any]]:
    """All of a pod, which lists so many at once."""
    found: list[dict[str, Any]] = []
    while listed := ask(client, "GET", url, f"/v1/jobs?after={_last_of(found)}"):
        found += listed
    return found


def _last_of(jobs: list[dict[str, Any]]) -> str:
    return quote(jobs[-1]["spec"]["name"], safe="") if jobs else ""


def _end(args: argparse.Namespace) -> int:
    with client_of(args, _TIMEOUT_SECONDS) as client:
        ended = ask(client, "DELETE", args.url, f"/v1/jobs/{quote(args.job, safe='')}")
    print(ended.get("warning") or f"job {args.job} was ended")
    return 0


def _of_all_pods(lists: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One entry for each job, from what each pod says of it."""
    jobs: dict[str, dict[str, Any]] = {}
    for of_pod in lists:
        for info in of_pod:
            name = info["spec"]["name"]
            job = jobs.setdefault(
                name,
                {
                    "name": name,
                    "dataset": info["spec"]["dataset"],
                    "policy": info["spec"]["policy"],
                    "world_size": info["spec"]["world_size"],
                    "epoch": None,
                    "alive": PositionSet(),
                    "memory_bytes": 0,
                    "idle_seconds": info["idle_seconds"],
                },
            )
            if info["epoch"] is not None:
                job["epoch"] = max(info["epoch"], -1 if job["epoch"] is None else job["epoch"])
            job["alive"].add_spans(info.get("alive", []))  # a rank of a planned job asks many pods
            job["memory_bytes"] += info["memory_bytes"]
            job["idle_seconds"] = min(job["idle_seconds"], info["idle_seconds"])
    for job in jobs.values():
        job["ranks_alive"] = job.pop("alive").count
    return sorted(jobs.values(), key=lambda job: (job["idle_seconds"], job["name"]))


def _ended(lists: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One entry for each run, the newest first."""
    runs: dict[tuple[str, str], dict[str, Any]] = {}
    for run in (run for of_pod in lists for run in of_pod):
        known = runs.setdefault((run["job"], run["run"]), run)
        known["first_epoch"] = min(known["first_epoch"], run["first_epoch"])
        known["last_epoch"] = max(known["last_epoch"], run["last_epoch"])
    return sorted(runs.values(), key=lambda run: -float(run["ended_at"]))


def _shown_ended(runs: list[dict[str, Any]]) -> str:
    if not runs:
        return "no runs that have ended"
    rows = [("JOB", "RUN", "EPOCHS", "ENDED", "POLICY", "DATASET")]
    for run in runs:
        first, last = run["first_epoch"], run["last_epoch"]
        epochs, ago = str(first) if first == last else f"{first} to {last}", _ago(time.time() - run["ended_at"])
        rows.append((run["job"], run["run"][:SHOWN_OF_RUN], epochs, ago, run["policy"], run["dataset"]))
    return _table(rows)


def _shown(jobs: list[dict[str, Any]]) -> str:
    if not jobs:
        return "no jobs"
    rows = [("JOB", "EPOCH", "RANKS", "MEMORY", "LAST ASKED", "POLICY", "DATASET")]
    for job in jobs:
        epoch = "-" if job["epoch"] is None else str(job["epoch"])
        ranks = f"{job['ranks_alive']}/{job['world_size']}"
        memory = f"{job['memory_bytes'] / (1 << 20):,.1f} MiB"
        asked = _ago(job["idle_seconds"])
        rows.append((job["name"], epoch, ranks, memory, asked, job["policy"], job["dataset"]))
    return _table(rows)


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _ago(seconds: float) -> str:
    for size, unit in _UNITS:
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago" if seconds >= 1 else "now"
