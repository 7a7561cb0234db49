"""What does it cost that one process of a machine holds the connections to pods, and what does a TLS ticket save?

    python benchmarks/connection_holder.py

One run, rounds alternating, medians. Two pods, one rank of a planned job, batches of 256 samples that lie in the pods'
memory. *own*: the rank has connections of its own. *held*: its requests go by way of the connection holder. CPU is for
1,000 samples, in milliseconds, of the rank, the holder and both pods. Then connections to one pod are opened anew, each
for one small request, with and without the ticket of an earlier one. All processes share the machine's cores.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from machine import machine
from pod_throughput import written_files
from tls_cost import _secrets

from refill.pods import tls_sessions
from refill.pods.credentials import CA_FILE_VARIABLE, HOLDER_VARIABLE, TOKEN_FILE_VARIABLE, Credentials
from refill.pods.planned_connection import PlannedConnection
from refill.pods.pod_link import PodLink
from refill.protocol.job_spec import JobSpec
from refill_service.datasets.pack import pack
from refill_service.demo.local_cluster import LocalCluster

BATCH = 256
ROUNDS = 5
SHAPES = ((3_000, 10_240), (100_000, 2_560))
"""``(bytes of a sample, samples)``"""
NUM_PODS = 2
CONNECTIONS = 200
_SCHEDULED = 2
"""CPUCLOCK_SCHED, of Linux."""


def main() -> None:
    print(f"{machine()}; medians of {ROUNDS} rounds, batches of {BATCH}, {NUM_PODS} pods")
    print(f"{'':12} {'sample':>8} {'ms/batch':>9} {'CPU: rank':>10} {'holder':>7} {'pods':>7}")
    with tempfile.TemporaryDirectory(prefix="refill-") as tempfile.tempdir:
        _measure_all()


def _measure_all() -> None:
    for is_secured in (False, True):
        for size, count in SHAPES:
            with tempfile.TemporaryDirectory(prefix="refill-bench-") as folder:
                _measure(Path(folder), size, count, is_secured=is_secured)


def _measure(folder: Path, size: int, count: int, *, is_secured: bool) -> None:
    dataset = (folder / "store").as_uri()
    packed = asyncio.run(pack(str(written_files(folder, size, count)), dataset)).blob_bytes
    settings: dict[str, Any] = {"memory_bytes": 4 * packed, "job_memory_fraction": 0.9, "pinned_fraction": 0}
    environment = {}
    if is_secured:
        files = _secrets(folder)
        settings |= files
        os.environ[CA_FILE_VARIABLE], os.environ[TOKEN_FILE_VARIABLE] = files["peer_tls_ca"], files["client_tokens"]
        environment = {CA_FILE_VARIABLE: files["peer_tls_ca"]}
    found: dict[str, list[tuple[float, ...]]] = {"own": [], "held": []}
    with LocalCluster(NUM_PODS, folder, settings, environment) as cluster:
        for number in range(ROUNDS):
            for way in ("own", "held") if number % 2 else ("held", "own"):
                os.environ[HOLDER_VARIABLE] = "on" if way == "held" else "off"
                found[way].append(_epoch(cluster, dataset, count))
        for way, rounds in found.items():
            took, rank, holder, pods = (1000 * statistics.median(column) for column in zip(*rounds, strict=True))
            name = f"{way}, {'TLS' if is_secured else 'open'}"
            print(f"{name:12} {size:8,} {took:9.2f} {rank:10.2f} {holder:7.2f} {pods:7.2f}", flush=True)
        if is_secured and size == SHAPES[-1][0]:
            _measure_handshakes(cluster)


def _epoch(cluster: LocalCluster, dataset: str, count: int) -> tuple[float, ...]:
    """Seconds for a batch, and CPU seconds of rank, holder and pods for 1,000 samples, in an epoch from memory."""
    spec = JobSpec(f"bench-{uuid.uuid4().hex[:8]}", dataset, chunk_size=64, policy="planned", num_epochs=2)
    rank = PlannedConnection(cluster.pod_urls[0], spec, 0, None, 60)
    rank.asks_in_batches(BATCH)
    starts = range(0, count - BATCH + 1, BATCH)
    for start in starts:  # the next epoch is read meanwhile
        rank.batch(0, np.arange(start, start + BATCH))
    rank.batch(1, np.arange(BATCH))
    time.sleep(1)
    pods, holders = [process.pid for process in cluster.processes], _holders()
    before, began = (time.process_time(), _cpu_of(holders), _cpu_of(pods)), time.perf_counter()
    for start in starts[1:]:
        rank.batch(1, np.arange(start, start + BATCH))
    took = time.perf_counter() - began
    after = time.process_time(), _cpu_of(holders), _cpu_of(pods)
    rank.end_job()
    batches = len(starts) - 1
    thousands = batches * BATCH / 1000
    return took / batches, *((end - start) / thousands for start, end in zip(before, after, strict=True))


def _cpu_of(processes: list[int]) -> float:
    """By the kernel's clock of each process, in nanoseconds: ticks would be too coarse for ten batches."""
    return sum(time.clock_gettime((~process << 3) | _SCHEDULED) for process in processes)


def _holders() -> list[int]:
    """Those of this run."""
    found, folder = [], os.fsencode(tempfile.gettempdir())
    for process in Path("/proc").iterdir():
        with suppress(OSError):
            said = (process / "cmdline").read_bytes() if process.name.isdigit() else b""
            if b"refill.holder.connection_holder" in said and folder in said:
                found.append(int(process.name))
    return found


def _measure_handshakes(cluster: LocalCluster) -> None:
    print(f"a connection and a small request, {CONNECTIONS} of them; CPU ms of each")
    found: dict[bool, list[tuple[float, ...]]] = {False: [], True: []}
    pod = [cluster.processes[0].pid]
    for _ in range(ROUNDS):
        for resumes in (False, True):
            before, began = (time.process_time(), _cpu_of(pod)), time.perf_counter()
            for _ in range(CONNECTIONS):
                if not resumes:
                    tls_sessions._sessions.clear()
                _connect(cluster.pod_urls[0])
            took = time.perf_counter() - began
            client, of_pod = time.process_time() - before[0], _cpu_of(pod) - before[1]
            found[resumes].append((took / CONNECTIONS, client / CONNECTIONS, of_pod / CONNECTIONS))
    for resumes, rounds in found.items():
        took, client, of_pod = (1000 * statistics.median(column) for column in zip(*rounds, strict=True))
        name = "with ticket" if resumes else "without"
        print(f"{name:12} {took:6.2f} ms, CPU: client {client:.2f}, pod {of_pod:.2f}", flush=True)


def _connect(url: str) -> None:
    link = PodLink(url, Credentials(), 2)
    link.send_request("GET", "/healthz", b"", {}, 20)
    link.getresponse().read()
    link.has_answered()
    link.close()


if __name__ == "__main__":
    main()
