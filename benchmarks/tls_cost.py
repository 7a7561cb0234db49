"""What do tokens and TLS cost, for clients and between pods? Beside neither.

    python benchmarks/tls_cost.py

One run, rounds alternating, medians. *open*: two pods and a client without either. *secured*: tokens of clients and
pods, TLS 1.3 for both, certificates of both sides between pods. Batches of 256 samples that lie in the pods' memory;
half of each batch comes from the other pod. All processes share the machine's cores. About a minute.

Tried, and not clearly less CPU at a pod (2 busy cores): ``MemoryBIO`` and reads of 256 KB in the client, 64 KB at once
to OpenSSL or its own writes to the socket in the pod; aiofastnet: 0.1 s/GB less of 1.3, without a pod around it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import statistics
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import trustme
from machine import machine
from pod_throughput import WARM_UP, cpu_of_pods, resident_bytes, written_files
from targets import target

from refill.pods.credentials import CA_FILE_VARIABLE, TOKEN_FILE_VARIABLE
from refill.pods.planned_connection import PlannedConnection
from refill.protocol.job_spec import JobSpec
from refill_service.datasets.pack import pack
from refill_service.demo.local_cluster import LocalCluster

ROUNDS = 9
BATCH = 256
NUM_PODS = 2
SHAPES = ((100_000, 2560), (3_000, 51_200))


def main() -> None:
    print(f"{machine()}; medians of {ROUNDS} rounds, batches of {BATCH}, {NUM_PODS} pods")
    print(f"{'':10} {'sample':>8} {'MB/s':>7} {'samples/s':>10} {'CPU s/GB':>9}")
    for size, count in SHAPES:
        with tempfile.TemporaryDirectory(prefix="refill-bench-") as folder:
            _measure(Path(folder), size, count)


def _measure(folder: Path, size: int, count: int) -> None:
    dataset = (folder / "store").as_uri()
    packed = asyncio.run(pack(str(written_files(folder, size, count + WARM_UP)), dataset)).blob_bytes
    settings: dict[str, Any] = {
        "memory_bytes": 3 * packed,
        "job_memory_fraction": 0.9,
        "pinned_fraction": 0,
    }
    files = _secrets(folder)
    os.environ[CA_FILE_VARIABLE], os.environ[TOKEN_FILE_VARIABLE] = files["peer_tls_ca"], files["client_tokens"]
    clusters: dict[str, LocalCluster] = {}
    try:
        for way, of_way in {"open": settings, "secured": settings | files}.items():
            (folder / way).mkdir()
            environment = {CA_FILE_VARIABLE: files["peer_tls_ca"]}
            clusters[way] = LocalCluster(NUM_PODS, folder / way, of_way, environment).__enter__()
        rounds: dict[str, list[tuple[float, float]]] = {way: [] for way in clusters}
        for number in range(ROUNDS):
            for way in list(clusters) if number % 2 else reversed(list(clusters)):
                rounds[way].append(_measured_epoch(clusters[way], dataset, count))
    finally:
        for cluster in clusters.values():
            cluster.stop()
    total = packed * count / (count + WARM_UP)
    for way, measures in rounds.items():
        seconds, cpu = (statistics.median(column) for column in zip(*measures, strict=True))
        print(f"{way:10} {size:8,} {total / seconds / 1e6:7,.0f} {count / seconds:10,.0f} {cpu / total * 1e9:9.2f}")
    ratios = [plain[0] / secured[0] for plain, secured in zip(rounds["open"], rounds["secured"], strict=True)]
    target(f"throughput secured / open, samples of {size:,} bytes", statistics.median(ratios), at_least=0.6)


def _measured_epoch(cluster: LocalCluster, dataset: str, count: int) -> tuple[float, float]:
    """``(seconds, CPU seconds of all processes)`` to move all samples once, from memory."""
    spec = JobSpec(f"bench-{uuid.uuid4().hex[:8]}", dataset, chunk_size=64, num_epochs=1)
    rank = PlannedConnection(cluster.pod_urls[0], spec, 0, None, 60)
    rank.batch(0, np.arange(BATCH))
    deadline = time.monotonic() + 30
    while sum(map(resident_bytes, cluster.pod_urls)) < 0.999 * rank.info()["total_bytes"] * (1 - BATCH / count) - BATCH:
        if time.monotonic() > deadline:
            raise TimeoutError("the pods did not load the dataset within 30 s")
        time.sleep(0.05)
    for start in range(BATCH, WARM_UP, BATCH):
        rank.batch(0, np.arange(start, min(start + BATCH, WARM_UP)))
    pids = [process.pid for process in cluster.processes]
    cpu, started = cpu_of_pods(pids), time.perf_counter()
    for start in range(WARM_UP, WARM_UP + count, BATCH):
        rank.batch(0, np.arange(start, min(start + BATCH, WARM_UP + count)))
    taken = time.perf_counter() - started, cpu_of_pods(pids) - cpu
    rank.end_job()
    return taken


def _secrets(folder: Path) -> dict[str, str]:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1", common_name="refill")
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    certificate.private_key_pem.write_to_path(str(folder / "key.pem"))
    certificate.cert_chain_pems[0].write_to_path(str(folder / "cert.pem"))
    for name in ("client-token", "peer-token"):
        (folder / name).write_text(secrets.token_hex(32))
    names = {
        "client_tokens": "client-token",
        "peer_token": "peer-token",
        "tls_cert": "cert.pem",
        "tls_key": "key.pem",
        "peer_tls_cert": "cert.pem",
        "peer_tls_key": "key.pem",
        "peer_tls_ca": "ca.pem",
    }
    return {setting: str(folder / name) for setting, name in names.items()}


if __name__ == "__main__":
    main()
