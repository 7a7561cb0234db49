"""``refill demo``: pack real data, start three pods, train twice, show what happened.

Everything is below one temporary folder and every process is a child of this one; both are gone at the end, however
it comes: done, failed, Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from refill.errors import InvalidInput, RefillError
from refill_service.datasets.pack import pack
from refill_service.demo.digits import NUM_TEST, write_digits
from refill_service.demo.local_cluster import LocalCluster, PortClaims
from refill_service.interrupts import interrupts_after

NUM_PODS = 3
NUM_RANKS = 2
MEMORY_BYTES = 2**21
JOB = "digits"
FEEDS = {"files": "plain PyTorch, from files", "refill": f"refill, {NUM_PODS} pods"}
"""By what the ranks name them, in their order."""


def run(epochs: int, as_json: bool) -> int:
    """Returns the exit status: 0 when every sample came exactly once in each epoch."""
    if epochs < 1:
        raise InvalidInput(f"epochs must be at least 1, got {epochs}")
    console = Console(stderr=True)
    with _sigterm_as_interrupt(), tempfile.TemporaryDirectory(prefix="refill-demo-") as folder:
        started = time.monotonic()
        rows = _demo(Path(folder), epochs, console)
        took = time.monotonic() - started
    if as_json:
        for row in rows:
            print(json.dumps(row))
    else:
        _print_table(rows, took)
    return 0 if all(row["duplicates"] == row["missing"] == 0 for row in rows) else 1


def _demo(folder: Path, epochs: int, console: Console) -> list[dict[str, Any]]:
    train, test = write_digits(folder / "digits", several_sizes=True)
    dataset = (folder / "store" / "digits").as_uri()
    packed = asyncio.run(pack(str(train), dataset, blob_bytes=128 * 1024, classes="yes"))
    console.print(
        f"packed {packed.num_samples:,} digits into {packed.num_blobs} blobs ({packed.blob_bytes / 1e6:.1f} MB); "
        f"{NUM_TEST} more are for testing"
    )
    settings: dict[str, str | int | float] = {"memory_bytes": MEMORY_BYTES, "dataset_urls": dataset}
    with LocalCluster(NUM_PODS, folder, settings) as cluster:
        pod = cluster.pod_urls[0]
        console.print(f"{NUM_PODS} pods with {MEMORY_BYTES / 2**20:.0f} MiB of memory each: {pod}/docs")
        options = ["--train", str(train), "--test", str(test), "--service", pod, "--dataset", dataset, "--job", JOB]
        results = _train(folder, epochs, options, console)
        counts = [_counts(pod, epoch) for epoch in range(epochs)]
        info = httpx.get(f"{pod}/v1/jobs/{JOB}", timeout=10, trust_env=False).json()
    return [
        _row(plain, cached, total, info["total_bytes"])
        for plain, cached, total in zip(results["files"], results["refill"], counts, strict=True)
    ]


def _train(folder: Path, epochs: int, options: list[str], console: Console) -> dict[str, list[dict[str, Any]]]:
    """Run the ranks to their end; returns what rank 0 said of each epoch, by what fed it."""
    results: dict[str, list[dict[str, Any]]] = {feed: [] for feed in FEEDS}
    with _progress(console) as bar, started_ranks(folder, [*options, "--epochs", str(epochs)]) as processes:
        tasks = {feed: bar.add_task(what, total=epochs, start=feed == "files") for feed, what in FEEDS.items()}
        output = processes[0].stdout
        assert output is not None
        for line in output:
            result = json.loads(line)
            feed = result["feed"]
            results[feed].append(result)
            bar.update(tasks[feed], advance=1, description=f"{FEEDS[feed]}: accuracy {result['accuracy']:.1%}")
            if len(results["files"]) == epochs:
                bar.start_task(tasks["refill"])
        statuses = [process.wait(timeout=60) for process in processes]
    if any(statuses) or any(len(of_feed) != epochs for of_feed in results.values()):
        raise RefillError(f"training ended early, exit status of its ranks: {statuses}")
    return results


@contextlib.contextmanager
def started_ranks(folder: Path, options: list[str]) -> Iterator[list[subprocess.Popen[str]]]:
    claim = PortClaims()
    (port,) = claim.take(1)
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank in range(NUM_RANKS):
            place = {"RANK": rank, "WORLD_SIZE": NUM_RANKS, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            with interrupts_after():
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "refill_service.demo.train", *options],
                        # torch makes its compiler's folder even when nothing is compiled: below the demo's own.
                        env={
                            **os.environ,
                            "TORCHINDUCTOR_CACHE_DIR": str(folder / "torch"),
                            **{name: str(value) for name, value in place.items()},
                        },
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                        text=True,
                        # A session of its own: its loader workers are ended with it, by their process group.
                        start_new_session=True,
                    )
                )
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        claim.give_back()


def _counts(pod_url: str, epoch: int) -> dict[str, Any]:
    path = f"/v1/jobs/{JOB}/epochs/{epoch}"
    answer = httpx.get(f"{pod_url}{path}", timeout=10, trust_env=False).raise_for_status().json()
    total: dict[str, Any] = answer["total"]
    return total


def _row(plain: dict[str, Any], cached: dict[str, Any], total: dict[str, Any], dataset_bytes: int) -> dict[str, Any]:
    return {
        "epoch": cached["epoch"],
        "accuracy_files": plain["accuracy"],
        "accuracy_refill": cached["accuracy"],
        "delivered": cached["delivered"],
        "duplicates": cached["duplicates"],
        "missing": cached["missing"],
        "miss_rate": total["misses"] / total["takes"],
        "waste": total["bytes_wasted"] / max(1, total["bytes_read"]),
        "read_amplification": total["bytes_read"] / dataset_bytes,
        "data_wait_seconds_files": plain["data_wait_seconds"],
        "data_wait_seconds_refill": cached["data_wait_seconds"],
    }


def _print_table(rows: list[dict[str, Any]], took: float) -> None:
    table = Table(
        title="handwritten digits, two ranks: plain PyTorch from files, and through refill", title_justify="left"
    )
    for name in (
        "epoch",
        "accuracy\nfiles",
        "accuracy\nrefill",
        "delivered",
        "dupli-\ncates",
        "missing",
        "miss\nrate",
        "waste",
        "read\nampl.",
        "wait\nfiles",
        "wait\nrefill",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            str(row["epoch"]),
            f"{row['accuracy_files']:.1%}",
            f"{row['accuracy_refill']:.1%}",
            f"{row['delivered']:,}",
            str(row["duplicates"]),
            str(row["missing"]),
            f"{row['miss_rate']:.1%}",
            f"{row['waste']:.0%}",
            f"{row['read_amplification']:.2f}x",
            f"{row['data_wait_seconds_files']:.2f} s",
            f"{row['data_wait_seconds_refill']:.2f} s",
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    exact = all(row["duplicates"] == row["missing"] == 0 for row in rows)
    print(f"every sample {'exactly once' if exact else 'NOT exactly once'} in each epoch; {took:.0f} s in all")
    print(f"accuracy: of {NUM_TEST} digits in one run each, so a few points of difference are chance (try --epochs 10)")
    print("wait: mean time of a rank's loop blocked on data")


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description:46}"), BarColumn(), MofNCompleteColumn(), TextColumn("epochs"))
    return Progress(*columns, TimeElapsedColumn(), console=console)


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM ends the demo as Ctrl-C does, through every ``finally``."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
