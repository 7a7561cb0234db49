"""What does it cost to mix many datasets? As one loop sees it, and the pods: ``python -m benchmarks.mixtures``.

The same samples lie in 1, in 4 and in 35 datasets. Three pods, one rank, batches of 256. It prints how near proportions
are in windows of an epoch, too, which is arithmetic.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import numpy as np

import refill
from refill.pods.pod_channel import PodChannel
from refill.protocol.mixture_order import MixtureEpoch
from refill_service.datasets.pack import pack
from refill_service.demo.local_cluster import LocalCluster

BATCH = 256
_requests = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=14_000, help="in all datasets together (default: %(default)s)")
    parser.add_argument("--bytes", type=int, default=4000, help="of a sample (default: %(default)s)")
    arguments = parser.parse_args()
    _windows()
    _count_requests()
    print("\ndatasets  requests a batch  client CPU ms a batch  threads  open sockets  pods' bytes held  samples read")
    with tempfile.TemporaryDirectory() as folder:
        for count in (1, 4, 35):
            urls = asyncio.run(_datasets(Path(folder), count, arguments.samples // count, arguments.bytes))
            (logs := Path(folder) / f"pods-{count}").mkdir()
            with LocalCluster(3, logs, {"memory_bytes": "16MiB", "pinned_fraction": 0}) as pods:
                _run(pods, urls)


def _windows() -> None:
    print("the farthest that a dataset is from its proportion, in samples, in batches of an epoch at any place")
    print("datasets                       32    64   128   256  1024")
    for said, counts in (
        ("70, 20, 9 and 1 %", [70_000, 20_000, 9_000, 1_000]),
        ("35 of equal size", [3_000] * 35),
        ("10,000 : 1,000 : 100 : 10 : 1", [90_000, 9_000, 900, 90, 9]),
    ):
        members, _ = MixtureEpoch(counts, BATCH, 11, 2).samples_at(np.arange(sum(counts)))
        had = np.zeros((len(members) + 1, len(counts)))
        np.cumsum(members[:, None] == np.arange(len(counts)), axis=0, out=had[1:])
        found = []
        for window in (32, 64, 128, 256, 1024):
            apart = np.abs(had[window:] - had[:-window] - window * np.array(counts) / sum(counts))
            found.append(apart[:: min(window, BATCH)].max())
        print(f"{said:30}" + " ".join(f"{each:5.1f}" for each in found))


async def _datasets(folder: Path, count: int, size: int, num_bytes: int) -> dict[str, str]:
    found = {}
    for number in range(count):
        source, store = folder / f"files-{count}-{number}", folder / f"store-{count}-{number}"
        source.mkdir()
        store.mkdir()
        generator = random.Random(number)
        for sample in range(size):
            (source / f"{sample:06d}.bin").write_bytes(generator.randbytes(num_bytes))
        await pack(str(source), store.as_uri())
        found[f"set{number}"] = store.as_uri()
    return found


def _run(pods: LocalCluster, urls: dict[str, str]) -> None:
    mixture = refill.Mixture(pods.pod_urls[0], urls, job="mix", seed=1)
    mixture.asks_in_batches(BATCH)
    length = mixture.positions_in(0)
    held, asked, began = 0, _requests, time.process_time()
    for first in range(0, length, BATCH):
        mixture.samples_of(0, np.arange(first, min(first + BATCH, length)))
        if first // BATCH == length // BATCH // 2:
            held = sum(_held(url) for url in pods.pod_urls)
    batches = -(-length // BATCH)
    spent, asked = time.process_time() - began, _requests - asked
    sockets = sum("socket:" in _link(each) for each in os.listdir("/proc/self/fd"))
    total: dict[str, Any] = mixture.epoch_counts(0)["total"]
    print(
        f"{len(urls):8}  {asked / batches:16.1f}  {1000 * spent / batches:21.1f}  {threading.active_count():7}"
        f"  {sockets:12}  {held:16,}  {total['samples_read'] / total['takes']:11.3f}x"
    )
    mixture.end_job()


def _held(url: str) -> int:
    text = httpx.get(f"{url}/metrics").text
    lines = [line for line in text.splitlines() if line.startswith("refill_resident_bytes")]
    return int(sum(float(line.rpartition(" ")[2]) for line in lines))


def _link(number: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return ""


def _count_requests() -> None:
    """Of this process, for batches."""
    send = PodChannel._begin

    def counted(channel: PodChannel, method: str, pod: str, path: str, *rest: Any) -> Any:
        global _requests
        _requests += "batch" in path
        return send(channel, method, pod, path, *rest)

    PodChannel._begin = counted  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    main()
