"""How fast is an epoch that needs no store: from the pinned tier on a local disk, beside local files?

    python benchmarks/warm_epochs.py [--quick]

The same DataLoader, batches and workers for each row: *local files* opens a file for each sample, as a folder on the
node (hostPath) would be read; *disk tier* asks one pod whose `pinned_dir` holds all of the dataset, over TCP, and *by
Unix socket* over the pod's socket. What is read lies in the kernel's page cache in all cases. Loader, workers and pod
share the machine's cores, so that without computing all are bound by them; *computing* is a loop that sleeps 20 ms a
batch, as a GPU would compute. Rounds alternate; medians, and the ratio to local files in the same round. CPU is of
loader, workers and pod. Two minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import torch.utils.data
from machine import machine
from pod_throughput import cpu_of_pod, written_files

import refill
from refill_service.datasets.pack import pack
from refill_service.demo.local_cluster import LocalCluster

SAMPLE_BYTES, NUM_SAMPLES, BATCH, WORKERS = 100_000, 5120, 64, 2
ROUNDS, COMPUTE_SECONDS = 5, 0.02
_MOST_FILLING = 5
"""Epochs."""
FILES, DISK_TIER, BY_SOCKET = "local files", "disk tier", "by Unix socket"


class Files(torch.utils.data.Dataset[bytes]):
    def __init__(self, folder: Path) -> None:
        self._paths = sorted(folder.iterdir())

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> bytes:
        return self._paths[index].read_bytes()


class Loop:
    """A training loop, which only sleeps.

    :param cluster: whose CPU is counted; None: there is none.
    """

    def __init__(self, loader: Any, sampler: refill.EpochSampler | None, cluster: LocalCluster | None) -> None:
        self._loader, self._sampler, self._cluster = loader, sampler, cluster

    def epoch(self, number: int, compute_seconds: float) -> tuple[float, float]:
        """Samples a second, and CPU seconds."""
        if self._sampler is not None:
            self._sampler.set_epoch(number)
        cpu, began, count = self._cpu(), time.perf_counter(), 0
        for batch in self._loader:
            count += len(batch)
            time.sleep(compute_seconds)
        seconds = time.perf_counter() - began
        return count / seconds, self._cpu() - cpu  # workers have ended, and count

    def _cpu(self) -> float:
        own = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
        pods = 0.0 if self._cluster is None else sum(cpu_of_pod(pod.pid) for pod in self._cluster.processes)
        return sum(used.ru_utime + used.ru_stime for used in own) + pods


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the samples, one round: to see that it runs")
    args = parser.parse_args()
    count, rounds = (NUM_SAMPLES // 10, 1) if args.quick else (NUM_SAMPLES, ROUNDS)
    print(f"{machine()}; {count:,} samples of {SAMPLE_BYTES:,} bytes, batches of {BATCH}, {WORKERS} workers")
    with tempfile.TemporaryDirectory(prefix="refill-bench-") as temporary, ExitStack() as stack:
        loops = dict(_loops(Path(temporary), count, stack))
        print(f"{'':16} {'':>10} {'samples/s':>10} {'to files':>9} {'CPU s / 1,000':>14}")
        number = _MOST_FILLING
        for name, seconds in (("as fast as it goes", 0.0), ("computing", COMPUTE_SECONDS)):
            found: dict[str, list[tuple[float, float]]] = {each: [] for each in loops}
            for _ in range(rounds):
                for each, loop in loops.items():
                    found[each].append(loop.epoch(number, seconds))
                number += 1
            for each, rows in found.items():
                ratio = statistics.median(row[0] / files[0] for row, files in zip(rows, found[FILES], strict=True))
                speed, cpu = (statistics.median(column) for column in zip(*rows, strict=True))
                print(f"{each:16} {name:>18} {speed:10,.0f} {ratio:9.2f} {1000 * cpu / count:14.2f}", flush=True)


def _loops(folder: Path, count: int, stack: ExitStack) -> Iterator[tuple[str, Loop]]:
    files = written_files(folder, SAMPLE_BYTES, count)
    dataset = (folder / "store").as_uri()
    packed = asyncio.run(pack(str(files), dataset)).blob_bytes
    how: dict[str, Any] = {"batch_size": BATCH, "num_workers": WORKERS, "collate_fn": list}
    yield FILES, Loop(torch.utils.data.DataLoader(Files(files), shuffle=True, **how), None, None)
    logs = folder / "logs"
    logs.mkdir()
    settings: dict[str, str | int | float] = {
        "memory_bytes": max(packed // 4, 64 << 20),
        "pinned_fraction": 0,
        "pinned_dir": str(folder / "pinned"),
        "pinned_dir_bytes": 2 * packed,
        "unix_socket": str(folder / "refill.sock"),
    }
    cluster = stack.enter_context(LocalCluster(1, logs, settings))
    for name, url in ((DISK_TIER, cluster.pod_urls[0]), (BY_SOCKET, f"unix:{settings['unix_socket']}")):
        job = name.replace(" ", "-")
        samples = refill.CacheDataset(url, dataset=dataset, job=job)
        sampler = refill.EpochSampler(samples)
        loop = Loop(torch.utils.data.DataLoader(samples, sampler=sampler, **how), sampler, cluster)
        yield name, _warmed(loop, cluster, job)


def _warmed(loop: Loop, cluster: LocalCluster, job: str) -> Loop:
    """When its epochs no longer read the store: a pod does not wait for its disk, and pins what it left out later."""
    for epoch in range(_MOST_FILLING):
        loop.epoch(epoch, COMPUTE_SECONDS)
        counts = httpx.get(f"{cluster.pod_urls[0]}/v1/jobs/{job}/epochs/{epoch}", trust_env=False).json()["total"]
        if not counts["bytes_read"]:
            return loop
    raise SystemExit(f"error: {job}: epoch {_MOST_FILLING - 1} has read {counts['bytes_read']:,} bytes from the store")


if __name__ == "__main__":
    main()
