"""What does a perfect shuffle cost, with real pods, over a slow link to a far store? And what does any order?

    PYTHONPATH=. python benchmarks/orders.py [--only NAME ...]   # some four minutes; needs root, see shaped_network.py
    PYTHONPATH=. python benchmarks/orders.py --pods 1 2 3 --mbit 50 --only "exact, K=8"
    PYTHONPATH=. python benchmarks/orders.py --requests

Pods have memory for a fifth of the dataset together; one rank asks for all, and computes nothing; an S3 server that
counts is 25 ms away behind a link. Beside them, with no cache: boto3 with 16 threads, and grain with as many, if it is
installed (`pip install grain`); both have an object for each sample. Three epochs each; figures are of the second,
whose memory is full and which another one follows. Beside each: what the clock of benchmarks/papers predicts for this
link, which knows no policy planned, and the least that a policy can read that uses each sample once (1 - memory).

With --requests the store is bound by requests in place of bytes, as a network file system with small files: it holds
each GET for so long that an epoch without a cache takes three times what computing does, and each pod makes eight at a
time. So redox is measured as its paper has it, end to end: PyTorch without a cache (boto3, eight threads for each pod),
CoorDL (`exact`, never), redox, and no I/O at all.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from benchmarks.papers.loop_clock import FetchService, LoopClock
from benchmarks.papers.ordered_reads import EpochReads, OrderedRun, simulate_orders
from machine import machine
from shaped_network import LinkSpeed, ShapedNetwork

from refill.pods.pod_connection import PodConnection
from refill.protocol.job_spec import JobSpec
from refill_service.cache_core.epoch_order import KeyedTraces
from refill_service.cache_core.job_memory import JobMemory, memory_for_chunks
from refill_service.settings import Settings

STORE_MBIT = 200
RTT_MS = 25
NUM_PODS = 3
NUM_SAMPLES = 2048
SAMPLE_BYTES = 50_000
MEMORY = 0.2
BATCH = 16
WORKERS = 2
EPOCHS = 3
SHOWN = 1
"""The epoch that is shown."""
LIMIT_SECONDS = 180
"""Of one loader, all epochs."""
BUCKET = "bench"


@dataclass(frozen=True)
class Store:
    """And who asks it for what."""

    mbit: float = STORE_MBIT
    hold_seconds: float = 0.0
    """Before each GET is answered."""
    at_once: int = 32
    """GETs of a pod; the default as pods have it."""
    threads: int = 16
    """Of who has no pods."""
    num_samples: int = NUM_SAMPLES
    batch: int = BATCH
    compute_seconds: float = 0.0
    """Of the rank, for each batch."""
    in_flight_fraction: float = Settings.model_fields["in_flight_fraction"].default
    """Of a pod's memory: for GETs under way."""


def by_requests(num_pods: int, at_once: int = 8, hold_seconds: float = 0.3, batch: int = 128) -> Store:
    """As ``papers/end_to_end.py`` has it, but that a GET takes three times as long, so that what this machine takes
    counts less. Computing takes 36 % of an epoch without a cache: Brand Table 1 and 4, .58 h of 1.61. Half of memory is
    for GETs under way: it is so small here that the usual part of it would have one chunk at a time."""
    threads = at_once * num_pods
    return Store(0, hold_seconds, at_once, threads, 1024, batch, 0.36 * batch * hold_seconds / threads, 0.5)


@dataclass(frozen=True)
class Contender:
    name: str
    order: str
    loader: str = "refill"
    policy: str = ""
    chunk_size: int = 1
    settings: dict[str, Any] = field(default_factory=dict)


CONTENDERS = (
    Contender("boto3, 16 threads", "kept", "boto3"),
    Contender("grain, 16 threads", "kept", "grain"),
    Contender("exact, never", "kept", policy="exact", settings={"eviction": "never"}),
    Contender("exact, K=8", "kept", policy="exact", chunk_size=8),
    Contender("exact, K=16", "kept", policy="exact", chunk_size=16),
    Contender("planned, K=8", "any", policy="planned", chunk_size=8),
    Contender("redox, K=16", "any", policy="redox", chunk_size=16),
)
END_TO_END = (
    Contender("PyTorch, no cache", "kept", "boto3"),
    Contender("CoorDL", "kept", policy="exact", settings={"eviction": "never"}),
    Contender("redox, K=8", "any", policy="redox", chunk_size=8),
    Contender("planned, K=8", "any", policy="planned", chunk_size=8),
    Contender("no I/O", "any", "none"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [contender.name for contender in CONTENDERS]
    parser.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"of: {'; '.join(names)}")
    parser.add_argument("--pods", nargs="+", type=int, choices=(1, 2, 3), default=[NUM_PODS], help="(default: 3)")
    parser.add_argument("--mbit", type=float, default=STORE_MBIT, help="of the store's link (default: %(default)s)")
    parser.add_argument("--requests", action="store_true", help="a store that is bound by requests; see above")
    parser.add_argument("--samples", type=int, help=f"(default: {NUM_SAMPLES}, with --requests 1024)")
    args = parser.parse_args()
    store = by_requests(max(args.pods)) if args.requests else Store(args.mbit)
    store = replace(store, num_samples=args.samples or store.num_samples)
    with (
        tempfile.TemporaryDirectory(prefix="refill-bench-") as folder,
        ShapedNetwork(store_mbit=store.mbit, rtt_ms=0 if args.requests else RTT_MS) as network,
    ):
        link = network.measure()
        bed = Bed(network, Path(folder), store)
        bed.start()
        print(
            f"{machine()}; load {os.getloadavg()[0]:.1f}; {_told(store, link)}; {store.num_samples} samples of "
            f"{SAMPLE_BYTES:,} bytes, memory for {MEMORY:.0%}; bound of bytes {1 - MEMORY:.2f}x"
        )
        print(f"{'name':17} pods  order  samples/s  GETs of 64   bytes     hits  epoch, s  predicted s  GETs   bytes")
        for num_pods in args.pods:
            bed.start_pods(num_pods)
            for contender in END_TO_END if args.requests else CONTENDERS:
                if args.only and contender.name not in args.only:
                    continue
                if contender.loader == "grain" and importlib.util.find_spec("grain") is None:
                    print(f"{contender.name:18} is not installed: pip install grain")
                    continue
                print(row(contender, bed.run(contender), link, num_pods, store), flush=True)
            bed.end_pods()


def _told(store: Store, link: LinkSpeed) -> str:
    if store.hold_seconds:
        return (
            f"the store holds each GET for {store.hold_seconds} s, and a pod has {store.at_once} under way; computing "
            f"takes {store.compute_seconds * 1000:.0f} ms a batch of {store.batch}"
        )
    return (
        f"store {RTT_MS} ms away behind {store.mbit:g} Mbit/s, of which plain sockets get "
        f"{link.payload_bytes_per_second / 1e6:.1f} MB/s"
    )


def row(contender: Contender, found: dict[str, Any], link: LinkSpeed, num_pods: int, store: Store) -> str:
    began, ended = found["times"][SHOWN]
    gets, _, num_bytes = found["read"][SHOWN + 1] - found["read"][SHOWN]
    seconds, num_samples = ended - began, store.num_samples
    text = (
        f"{contender.name:17} {num_pods:4} {contender.order:>6} {num_samples / seconds:10.0f} "
        f"{gets / num_samples * 64:11.2f} {num_bytes / (num_samples * SAMPLE_BYTES):6.2f}x"
    )
    if contender.loader != "refill":
        return f"{text}        - {seconds:9.2f}"
    if contender.policy == "planned":  # which the virtual clock does not run
        return f"{text} {found['hits']:8.1%} {seconds:9.2f}"
    expected = predicted(contender, link, num_pods, store)
    return (
        f"{text} {found['hits']:8.1%} {seconds:9.2f} {expected.run_seconds:12.2f} "
        f"{expected.gets / num_samples * 64:5.2f} {expected.samples_read / num_samples:6.2f}x"
    )


def predicted(contender: Contender, link: LinkSpeed, num_pods: int, store: Store) -> EpochReads:
    """The epoch that is shown, by the virtual clock."""
    rate = link.payload_bytes_per_second
    service = FetchService(
        parallel=store.at_once,
        latency=link.rtt_seconds + store.hold_seconds,
        size=SAMPLE_BYTES,
        bandwidth=rate,
    )
    run = OrderedRun(
        store.num_samples,
        int(store.num_samples * MEMORY / num_pods),
        contender.chunk_size,
        num_pods=num_pods,
        batch_size=store.batch,
        eviction=contender.settings.get("eviction", "rolling"),
        read_ahead=1 / 32 if contender.policy == "exact" else 0.0,
        clock=LoopClock(comp=store.compute_seconds, ahead=2 * WORKERS, svc=service, link=rate),
        policy=contender.policy,
    )
    orders = [KeyedTraces(store.num_samples, 1, seed=0, epoch=epoch) for epoch in range(EPOCHS)]
    return list(simulate_orders(run, orders, SHOWN + 1))[SHOWN]


class Bed:
    """The store and the pods. Processes end with the network."""

    def __init__(self, network: ShapedNetwork, folder: Path, store: Store) -> None:
        self._network, self._folder, self._store = network, folder, store
        self._urls: list[str] = []
        self._pods: list[subprocess.Popen[bytes]] = []
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "REFILL_"))},
            "AWS_ENDPOINT_URL": f"http://{network.address('store')}:9000",
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def start(self) -> None:
        address = self._network.address("store")
        server = {
            "BIND_HOST": address,
            "GATEWAY_PORT": "9000",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
        }
        held = [str(self._store.hold_seconds)]
        self._start("store", [sys.executable, "-m", "peers.store", str(self._folder / "counts"), *held], server)
        self._network.wait_for("store", f"http://{address}:9000/", self._folder / "store.log")
        files = self._folder / "objects"
        files.mkdir()
        generator = np.random.default_rng(1)
        for sample in range(self._store.num_samples):
            data = sample.to_bytes(8, "big") + generator.bytes(SAMPLE_BYTES - 8)
            (files / f"{sample:06}.bin").write_bytes(data)
        put = (
            "import boto3, pathlib, sys; client = boto3.client('s3'); client.create_bucket(Bucket=sys.argv[2]); "
            "[client.put_object(Bucket=sys.argv[2], Key=f'objects/{file.name}', Body=file.read_bytes()) "
            "for file in pathlib.Path(sys.argv[1]).iterdir()]"
        )
        pack = ["-m", "refill_service.cli", "pack", str(files), f"s3://{BUCKET}/blobs", "--quiet"]
        for argv in (["-c", put, str(files), BUCKET], pack):
            if self._start("store", [sys.executable, *argv], {}, "pack").wait(120) != 0:
                raise SystemExit(f"error: the dataset was not written: {self._log('pack')}")

    def start_pods(self, num_pods: int) -> None:
        self._urls = [f"http://{self._network.address(f'pod{pod}')}:8000" for pod in range(num_pods)]
        fields = Settings.model_fields
        parts = JobMemory(
            0,
            fields["remote_memory_fraction"].default,
            self._store.in_flight_fraction,
            SAMPLE_BYTES,
        )
        memory_bytes = memory_for_chunks(self._store.num_samples * SAMPLE_BYTES * MEMORY / num_pods, parts)
        for pod in range(num_pods):
            peers = ",".join(f"http://{self._network.address(f'pod{each}')}:8001" for each in range(num_pods))
            settings = {
                "REFILL_POD_URLS": ",".join(self._urls),
                "REFILL_PEER_URLS": peers,
                "REFILL_ORDINAL": str(pod),
                "REFILL_PORT": "8000",
                "REFILL_PEER_PORT": "8001",
                "REFILL_MEMORY_BYTES": str(memory_bytes),
                "REFILL_JOB_MEMORY_FRACTION": "1",
                "REFILL_PINNED_FRACTION": "0",
                "REFILL_IN_FLIGHT_FRACTION": str(self._store.in_flight_fraction),
                "REFILL_STORE_MAX_CONNECTIONS": str(self._store.at_once),
            }
            serve = [sys.executable, "-m", "refill_service.cli", "serve"]
            self._pods.append(self._start(f"pod{pod}", serve, settings))
        for pod, url in enumerate(self._urls):
            self._network.wait_for(f"pod{pod}", f"{url}/readyz", self._folder / f"pod{pod}.log")

    def end_pods(self) -> None:
        for pod in self._pods:
            pod.terminate()
        for pod in self._pods:
            pod.wait(60)
        self._pods = []

    def run(self, contender: Contender) -> dict[str, Any]:
        job = contender.name.replace(",", "").replace("/", "").replace(" ", "-").replace("=", "")
        output = self._folder / f"{job}.npz"
        given = {
            "loader": contender.loader,
            "service": self._urls[0],
            "bucket": BUCKET,
            "job": job,
            "policy": contender.policy,
            "chunk_size": contender.chunk_size,
            "settings": contender.settings,
            "num_samples": self._store.num_samples,
            "batch": self._store.batch,
            "workers": WORKERS,
            "threads": self._store.threads,
            "compute_seconds": self._store.compute_seconds,
            "epochs": EPOCHS,
            "counts": str(self._folder / "counts"),
            "output": str(output),
        }
        argv = [sys.executable, str(Path(__file__).with_name("orders_rank.py")), json.dumps(given)]
        rank = self._start("trainer", argv, {}, "rank")
        try:
            status = rank.wait(LIMIT_SECONDS)
        except subprocess.TimeoutExpired:
            rank.kill()
            raise SystemExit(f"error: {contender.name} took more than {LIMIT_SECONDS} s") from None
        if status:
            raise SystemExit(f"error: {contender.name} ended with {status}: {self._log('rank')}")
        found = dict(np.load(output))
        for epoch, ids in enumerate(found["ids"]):
            if (np.sort(ids) != np.arange(self._store.num_samples)).any():
                raise SystemExit(f"error: {contender.name}, epoch {epoch}: not each sample once")
        if contender.loader == "refill":
            found["hits"] = self._hits(job)
            with self._network.inside("trainer"):
                PodConnection(self._urls[0], JobSpec(job, f"s3://{BUCKET}/blobs"), 0, None, 30).end_job()
        return found

    def _hits(self, job: str) -> float:
        """Of all epochs."""
        counted = {"refill_misses_total": 0.0, "refill_takes_total": 0.0}
        for pod, url in enumerate(self._urls):
            with self._network.inside(f"pod{pod}"):
                lines = httpx.get(f"{url}/metrics", timeout=10, trust_env=False).text.splitlines()
            for line in lines:
                name = line.partition("{")[0]
                if name in counted and f'"{job}"' in line:
                    counted[name] += float(line.rpartition(" ")[2])
        return 1 - counted["refill_misses_total"] / max(1.0, counted["refill_takes_total"])

    def _start(self, host: str, argv: list[str], environment: dict[str, str], log: str = "") -> subprocess.Popen[bytes]:
        with (self._folder / f"{log or host}.log").open("ab") as output:
            return self._network.run(
                host, argv, self._environment | environment, stdout=output, stderr=subprocess.STDOUT
            )

    def _log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text(errors="replace")[-2000:]


if __name__ == "__main__":
    main()
