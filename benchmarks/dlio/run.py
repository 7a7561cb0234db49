"""DLIO with the shapes of MLPerf Storage, open, no submission: how well does refill feed simulated accelerators?

    make bench-dlio                                  # as root, over half an hour; see shaped_network.py
    make bench-dlio DLIO_FLAGS='--only retinanet'
    make bench-dlio DLIO_FLAGS=--smallest            # a few samples: no figures

Sizes of samples and batches, workers and the computing of a batch are those of MLPerf Storage; how many samples,
accelerators and steps there are is cut so far that a small machine does it. Its store is 25 ms away behind a link that
these cores can fill, and that is far too narrow for accelerators as fast as MLPerf's. So time is stretched: computing
takes so many times as long that all accelerators together need a part of the link, the *load*.

- *refill*: packed blobs, two pods with memory for all, DLIO with ``refill.dlio``.
- *DLIO, store*: DLIO's own loader of torch, one GET for each sample's object.
- *DLIO, files*: the same from files of this machine, which the link does not limit.

At load 0.95 the link is just enough for a cold epoch. At 1.9 it is half of enough; from the second epoch on refill has
all in memory. AU is DLIO's, its first step left out; samples/s are of whole epochs. GETs and bytes are counted in the
store, between the epochs' beginnings by DLIO's clock. Receipts are the pods'.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
from dlio.workloads import (
    OBJECTS_VARIABLE,
    WORKLOADS,
    Epoch,
    Workload,
    configuration,
    dlio_argv,
    epochs_of,
    write_samples,
)
from machine import machine
from peers.store_counts import open_counts
from shaped_network import ShapedNetwork
from targets import target

RTT_MS = 25.0
NUM_PODS = 2
EPOCHS = 2
COLD, WARM = 0.95, 1.9
"""Loads: what all accelerators need, of what the link carries."""
BUCKET = "bench"
MEMORY_OF_DATASET, PINNED = 2.2, 0.55
"""Of all pods together; and the part of it that keeps samples from epoch to epoch. The rest has room for what all
workers ask for at once, which is a good part of so small a dataset."""
RECEIPT_SECONDS = 60
STORE_PORT, POD_PORT, PEER_PORT = 9000, 8000, 8001


class Counted(NamedTuple):
    """By the store, of an epoch."""

    gets: float
    read_bytes: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--smallest", action="store_true", help="few steps of small samples: no figures")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(f"{machine()}; DLIO with the shapes of MLPerf Storage, open, no submission", flush=True)
    for name in args.only:
        workload = WORKLOADS[name]
        if args.smallest:
            workload = replace(
                workload, sample_bytes=20_000, batch=4, steps=3, read_threads=1, resized_bytes=10_000, store_mbit=50
            )
        if (needed := _memory_needed(workload)) > (free := _free_bytes()):
            print(
                f"\n{name}: not run, since it needs some {needed / 1e9:.0f} GB of memory, and {free / 1e9:.0f} are free"
            )
            continue
        hosts = ("store", *(f"pod{pod}" for pod in range(NUM_PODS)), "trainer")
        with (
            tempfile.TemporaryDirectory(prefix="refill-dlio-") as folder,
            ShapedNetwork(hosts, store_mbit=workload.store_mbit, rtt_ms=RTT_MS) as network,
        ):
            _measure(Bed(network, Path(folder), workload), workload)


def _measure(bed: Bed, workload: Workload) -> None:
    link = bed.link_bytes_per_second
    print(
        f"\n{workload.name}: {workload.num_samples} {workload.format} of {workload.sample_bytes:,} bytes, one a file; "
        f"{workload.ranks} accelerators with {workload.read_threads} workers each, batches of {workload.batch}, "
        f"{workload.steps} steps an epoch, {EPOCHS} epochs\n"
        f"link of {workload.store_mbit:g} Mbit/s, {RTT_MS:g} ms away: {link / 1e6:.1f} MB/s by plain sockets; an "
        f"accelerator needs {workload.bytes_per_second / 1e6:,.0f} MB/s, so time is stretched "
        f"{_stretch(workload, link, COLD):.1f} times at load {COLD}"
    )
    print(f"{'':14} {'load':>5} {'epoch':>6} {'AU, %':>7} {'samples/s':>10} {'GETs for 64':>12} {'bytes':>7}   receipt")
    aus: dict[tuple[str, float], list[float]] = {}
    for way, load in (
        ("refill", COLD),
        ("DLIO, store", COLD),
        ("DLIO, files", COLD),
        ("refill", WARM),
        ("DLIO, store", WARM),
    ):
        epochs, counted, receipts = bed.run(way, load)
        aus[way, load] = [epoch.au for epoch in epochs]
        for number, (epoch, counts) in enumerate(zip(epochs, counted, strict=True)):
            receipt = receipts[number] if receipts else "-"
            gets, read = counts.gets * 64 / workload.num_samples, counts.read_bytes / bed.dataset_bytes
            print(
                f"{way:14} {load:5} {number:6} {epoch.au:7.1f} {workload.num_samples / epoch.seconds:10.1f} "
                f"{gets:12.1f} {read:6.2f}x   {receipt}",
                flush=True,
            )
    target(f"{workload.name}: AU of a cold epoch, load {COLD}", aus["refill", COLD][0], at_least=workload.least_au)
    target(f"{workload.name}: AU of the next epoch, load {WARM}", aus["refill", WARM][1], at_least=workload.least_au)


def _memory_needed(workload: Workload) -> float:
    """The store has the data twice, and each worker a batch, which it decodes."""
    dataset = workload.num_samples * workload.sample_bytes
    workers = workload.ranks * workload.read_threads * (workload.batch + 1) * workload.sample_bytes
    return (2 + MEMORY_OF_DATASET) * dataset + workers + 1e9


def _free_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _stretch(workload: Workload, link: float, load: float) -> float:
    return workload.ranks * workload.bytes_per_second / (link * load)


class Bed:
    """The store with both forms of the data, and pods for each run. Processes end with the network."""

    def __init__(self, network: ShapedNetwork, folder: Path, workload: Workload) -> None:
        self._network, self._folder, self._workload = network, folder, workload
        self._runs = 0
        self.link_bytes_per_second = network.measure({"trainer": 4}, 2).payload_bytes_per_second
        self.dataset_bytes = workload.num_samples * workload.sample_bytes
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "REFILL_"))}
        self._environment = kept | {
            "AWS_ENDPOINT_URL": f"http://{network.address('store')}:{STORE_PORT}",
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "OMP_NUM_THREADS": "1",
            "NO_PROXY": "*",
            "PYTHONPATH": str(Path(__file__).parents[1]),
            OBJECTS_VARIABLE: f"{BUCKET}/files",
        }
        self._files = folder / "files"
        self._files.mkdir()
        write_samples(workload, self._files)
        self._start_store()

    def run(self, way: str, load: float) -> tuple[list[Epoch], list[Counted], list[str]]:
        """Also what the receipt of each epoch says, where there is one."""
        self._runs += 1
        folder = self._folder / f"run-{self._runs}"
        (folder / "data").mkdir(parents=True)
        if way == "DLIO, files":
            (folder / "data" / "train").symlink_to(self._files)
        else:  # DLIO lists the files that it will ask for
            (folder / "data" / "train").mkdir()
            for path in self._files.iterdir():
                (folder / "data" / "train" / path.name).touch()
        job = f"run-{self._runs}"
        pods: list[subprocess.Popen[bytes]] = []
        urls: list[str] = []
        reader: dict[str, Any] = {}
        options: dict[str, Any] = {}
        if way == "refill":
            pods, urls = self._start_pods(folder)
            reader = {"data_loader_classname": "refill.dlio.RefillDataLoader", "data_loader_sampler": "index"}
            options = {
                "refill_url": urls[0],
                "refill_dataset": f"s3://{BUCKET}/blobs",
                "refill_job": job,
            }
        elif way == "DLIO, store":
            reader = {"reader_classname": f"dlio.store_reader.{self._workload.format.capitalize()}OfStore"}
        compute_seconds = self._workload.compute_seconds * _stretch(self._workload, self.link_bytes_per_second, load)
        configuration(
            self._workload, folder, epochs=EPOCHS, compute_seconds=compute_seconds, reader=reader, options=options
        )
        with CountRecord(self._folder / "counts") as record:
            trainer = self._start("trainer", folder / "dlio.log", dlio_argv(folder, self._workload.ranks))
            code = trainer.wait()
        if code:
            raise SystemExit(f"error: {way}: DLIO ended with {code}: {(folder / 'dlio.log').read_text()[-2000:]}")
        epochs = epochs_of(folder)
        receipts = [self._receipt(urls[0], job, epoch) for epoch in range(EPOCHS)] if pods else []
        for pod in pods:
            pod.terminate()
            pod.wait()
        return epochs, record.of_epochs(epochs), receipts

    def _start_store(self) -> None:
        address = self._network.address("store")
        server = {"BIND_HOST": address, "GATEWAY_PORT": str(STORE_PORT), "LOG_LEVEL": "WARNING"}
        counts = str(self._folder / "counts")
        self._start("store", self._folder / "store.log", [sys.executable, "-m", "peers.store", counts], server)
        self._network.wait_for("store", f"http://{address}:{STORE_PORT}/", self._folder / "store.log")
        put = (
            "import boto3, pathlib, sys; client = boto3.client('s3'); client.create_bucket(Bucket=sys.argv[2]); "
            "[client.put_object(Bucket=sys.argv[2], Key=f'files/{file.name}', Body=file.read_bytes()) "
            "for file in pathlib.Path(sys.argv[1]).iterdir()]"
        )
        pack = ["-m", "refill_service.cli", "pack", str(self._files), f"s3://{BUCKET}/blobs", "--quiet"]
        log = self._folder / "pack.log"
        for argv in (["-c", put, str(self._files), BUCKET], pack):
            if self._start("store", log, [sys.executable, *argv]).wait():
                raise SystemExit(f"error: the data was not written: {log.read_text()[-2000:]}")

    def _start_pods(self, folder: Path) -> tuple[list[subprocess.Popen[bytes]], list[str]]:
        hosts = [f"pod{pod}" for pod in range(NUM_PODS)]
        urls, peer_urls = (
            [f"http://{self._network.address(host)}:{port}" for host in hosts] for port in (POD_PORT, PEER_PORT)
        )
        pods = []
        for pod, host in enumerate(hosts):
            settings = {
                "REFILL_POD_URLS": ",".join(urls),
                "REFILL_PEER_URLS": ",".join(peer_urls),
                "REFILL_ORDINAL": str(pod),
                "REFILL_PORT": str(POD_PORT),
                "REFILL_PEER_PORT": str(PEER_PORT),
                "REFILL_MEMORY_BYTES": str(max(16 << 20, int(self.dataset_bytes * MEMORY_OF_DATASET / NUM_PODS))),
                "REFILL_PINNED_FRACTION": str(PINNED),
                "REFILL_JOB_MEMORY_FRACTION": "1",
            }
            argv = [sys.executable, "-m", "refill_service.cli", "serve"]
            pods.append(self._start(host, folder / f"{host}.log", argv, settings))
        for host, url in zip(hosts, urls, strict=True):
            self._network.wait_for(host, f"{url}/readyz", folder / f"{host}.log")
        return pods, urls

    def _receipt(self, url: str, job: str, epoch: int) -> str:
        """Ranks report what they had a moment later, which is waited for."""
        deadline = time.monotonic() + RECEIPT_SECONDS
        with self._network.inside("trainer"):
            while True:
                answer = httpx.get(f"{url}/v1/jobs/{job}/epochs/{epoch}/receipt", trust_env=False)
                found: dict[str, Any] = answer.json()
                if found.get("exact"):
                    return f"exact, {found['received']} of {self._workload.num_samples}"
                if time.monotonic() > deadline:
                    raise SystemExit(f"error: epoch {epoch} is not exact: {json.dumps(found)[:500]}")
                time.sleep(0.2)

    def _start(
        self, host: str, log: Path, argv: list[str], environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            variables = self._environment | dict(environment or {})
            return self._network.run(host, argv, variables, stdout=output, stderr=subprocess.STDOUT)


class CountRecord:
    """What the store has counted, looked at ten times a second in a thread of its own."""

    def __init__(self, counts: Path) -> None:
        self._counts = open_counts(str(counts))
        self._seen: list[tuple[float, int, int]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._record)

    def __enter__(self) -> CountRecord:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def of_epochs(self, epochs: list[Epoch]) -> list[Counted]:
        """The first one from the job's beginning on, the last one until its end."""
        times, *counts = np.array(self._seen).T
        bounds = [times[0], *(epoch.began for epoch in epochs[1:]), times[-1]]
        return [Counted(*each) for each in np.diff([np.interp(bounds, times, of) for of in counts], axis=1).T.tolist()]

    def _record(self) -> None:
        is_last = False
        while True:
            self._seen.append((time.time(), int(self._counts[0]), int(self._counts[2])))
            if is_last:
                return
            is_last = self._ended.wait(0.1)


if __name__ == "__main__":
    main()
