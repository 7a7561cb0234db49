"""``refill warm``: memory of the pods is filled before the GPUs come."""

from __future__ import annotations

import argparse
import time
from typing import Any
from urllib.parse import quote

from refill.protocol.job_spec import JobSpec
from refill_service.commands.amounts import size, whole
from refill_service.commands.service_arguments import add_service_arguments, ask, client_of, job_name

_TIMEOUT_SECONDS = 60
_LOOK_SECONDS = 0.5


def add_commands(commands: Any) -> None:
    parser = commands.add_parser(
        "warm",
        description="Register a job whose order is planned, and have the pods read what an epoch begins with, as much "
        "as the job's memory holds. The training then names the same job, with the same settings, and finds its first "
        "batches in memory. Exit status 0 when memory is full.",
        epilog="example: refill warm s3://datasets/imagenet --job run-1 --url http://refill:8000",
    )
    parser.add_argument("dataset", metavar="URL", help="URL of the dataset, as the pods reach it")
    parser.add_argument("--job", required=True, type=job_name, metavar="NAME", help="name of the job that will train")
    parser.add_argument("--epoch", type=whole(0), default=0, help="which epoch (default: 0)")
    parser.add_argument(
        "--position",
        type=whole(0),
        default=0,
        metavar="P",
        help="from which position of it on, of all ranks (default: 0)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the job (default: 0)")
    parser.add_argument("--read-seed", type=int, metavar="S", help="of the job (default: it has none)")
    parser.add_argument(
        "--chunk-size", type=whole(0), default=0, metavar="K", help="of the job (default: the pods choose)"
    )
    parser.add_argument(
        "--memory-bytes",
        type=size(0),
        default=0,
        metavar="SIZE",
        help="of the job on each pod, such as 4GiB (default: the pods choose)",
    )
    add_service_arguments(parser, "--url")
    parser.set_defaults(func=_run)


def _run(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    spec = JobSpec(
        args.job,
        args.dataset,
        seed=args.seed,
        read_seed=args.read_seed,
        chunk_size=args.chunk_size,
        memory_bytes=args.memory_bytes,
        policy="planned",
    )
    path = f"/v1/jobs/{quote(args.job, safe='')}/planned"
    console = Console(stderr=True)
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn()
    with (
        client_of(args, _TIMEOUT_SECONDS) as client,
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar,
    ):
        plan_id = ask(client, "PUT", args.url, path, {"settings": spec.to_dict()})["plan_id"]
        task = bar.add_task("in memory", total=None)
        where = f"plan={plan_id}&epoch={args.epoch}&position={args.position}"
        while True:
            found = ask(client, "POST", args.url, f"{path}/warm?{where}")
            bar.update(task, completed=found["in_memory_bytes"], total=found["wanted_bytes"])
            if not found["is_planning"] and found["in_memory_bytes"] >= found["wanted_bytes"]:
                break
            time.sleep(_LOOK_SECONDS)
    print(
        f"job {args.job}: {found['in_memory_bytes']:,} bytes of samples are in memory, on {found['pods']} pods; plan "
        f"{plan_id}"
    )
    return 0
