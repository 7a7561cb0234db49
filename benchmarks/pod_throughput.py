"""How near are pods to the floor? Samples in memory, moved to a client and to another pod, beside raw sockets.

    python benchmarks/pod_throughput.py

One run, rounds alternating, medians. *raw socket*: one process sends a batch's bytes with sendall, another receives
them into one buffer. *client <- pod*: ``PodConnection.batch`` of 256 samples from one pod that has them in memory.
*pod <- pod*: the same batches over HTTP/2, asked by ``Peers`` as a home pod asks an owner. Both ends, the S3-free
file store and this process share the machine's cores. CPU is of pod and asker together. About 40 s.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import httpx
import numpy as np
from machine import machine
from targets import target

from refill.pod_connection import PodConnection
from refill.protocol.job_spec import JobSpec
from refill.protocol.wire_format import BatchRequest
from refill_service.datasets.pack import pack
from refill_service.demo.local_cluster import LocalCluster
from refill_service.peers import Peers

BATCH = 256
ROUNDS = 5
SHAPES = ((100_000, 2560), (3_000, 25_600))
"""``(bytes of a sample, samples)``"""

Measure = tuple[float, float]
"""``(seconds, CPU seconds)`` to move all samples once."""


def main() -> None:
    print(f"{machine()}; medians of {ROUNDS} rounds")
    print(f"{'':16} {'sample':>8} {'MB/s':>7} {'of raw':>7} {'samples/s':>10} {'CPU s/GB':>9}")
    for size, count in SHAPES:
        with tempfile.TemporaryDirectory(prefix="refill-bench-") as folder:
            _measure(Path(folder), size, count)


def _measure(folder: Path, size: int, count: int) -> None:
    dataset = (folder / "store").as_uri()
    total = asyncio.run(pack(str(written_files(folder, size, count)), dataset)).blob_bytes
    settings = {"memory_bytes": 3 * total, "job_memory_fraction": 0.9, "recent_fraction": 0}
    with LocalCluster(1, folder, settings) as cluster:
        pid = cluster.processes[0].pid
        peer_url = f"http://127.0.0.1:{cluster.peer_ports[0]}"
        ways: dict[str, Callable[[], Measure]] = {
            "raw socket": lambda: _raw(total, total * BATCH // count),
            "client <- pod": lambda: _client(cluster.pod_urls[0], dataset, count, pid),
            "pod <- pod": lambda: _peer(cluster.pod_urls[0], peer_url, dataset, count, pid),
        }
        rounds = {way: [] for way in ways}
        for _ in range(ROUNDS):
            for way, measure in ways.items():
                rounds[way].append(measure())
    raw = statistics.median(seconds for seconds, _ in rounds["raw socket"])
    for way, measures in rounds.items():
        seconds = statistics.median(taken for taken, _ in measures)
        cpu = statistics.median(used for _, used in measures)
        print(
            f"{way:16} {size:8,} {total / seconds / 1e6:7,.0f} {raw / seconds:7.2f} {count / seconds:10,.0f}"
            f" {cpu / total * 1e9:9.2f}",
            flush=True,
        )


def written_files(folder: Path, size: int, count: int) -> Path:
    """A folder of files to pack."""
    files = folder / "files"
    files.mkdir()
    generator = random.Random(1)
    for number in range(count):
        (files / f"{number:06}.bin").write_bytes(generator.randbytes(size))
    return files


def print_resident(what: str, pid: int, memory_bytes: int) -> None:
    """The most that a pod's process has held since it started, against what Kubernetes is told."""
    status = Path(f"/proc/{pid}/status").read_text()
    most = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM"))
    allowed = 1.15 * memory_bytes + 150e6
    target(f"{what}: resident set / (memory_bytes + 15 % + 150 MB)", most / allowed, at_most=1)


def _job(pod_url: str, dataset: str) -> PodConnection:
    """A job of one epoch, begun, with every sample in memory."""
    spec = JobSpec(f"bench-{uuid.uuid4().hex[:8]}", dataset, chunk_size=64, policy="drain", prefetch_window=0)
    rank = PodConnection(pod_url, spec, 0, pod_url, 60)
    rank.batch(0, np.array([0]))
    deadline = time.monotonic() + 30
    while _resident_bytes(pod_url) < 0.999 * rank.info()["total_bytes"] - BATCH:
        if time.monotonic() > deadline:
            raise TimeoutError("the pod did not load the dataset within 30 s")
        time.sleep(0.05)
    return rank


def _resident_bytes(pod_url: str) -> float:
    lines = httpx.get(f"{pod_url}/metrics").text.splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith('refill_resident_bytes{kind="abstract"}'))


def _client(pod_url: str, dataset: str, count: int, pid: int) -> Measure:
    rank = _job(pod_url, dataset)
    cpu, started = cpu_of(pid), time.perf_counter()
    for start in range(1, count, BATCH):
        rank.batch(0, np.arange(start, min(start + BATCH, count)))
    taken = time.perf_counter() - started, cpu_of(pid) - cpu
    rank.end_job()
    return taken


def _peer(pod_url: str, peer_url: str, dataset: str, count: int, pid: int) -> Measure:
    rank = _job(pod_url, dataset)
    path = f"/peer/v1/jobs/{rank.spec.name}/take?incarnation={rank.info()['incarnation']}&pod=0"

    async def ask() -> Measure:
        peers = Peers((peer_url,), 60)
        cpu, started = cpu_of(pid), time.perf_counter()
        for start in range(1, count, BATCH):
            body = BatchRequest(0, 0, np.arange(start, min(start + BATCH, count))).encode()
            async with peers.frames(0, path, body) as frames:
                for _ in range(3):
                    await frames.frame()
        taken = time.perf_counter() - started, cpu_of(pid) - cpu
        await peers.close()
        return taken

    taken = asyncio.run(ask())
    rank.end_job()
    return taken


def _raw(total: int, batch: int) -> Measure:
    with socket.create_server(("127.0.0.1", 0)) as server:
        child = os.fork()
        if child == 0:
            with socket.create_connection(server.getsockname()) as sender:
                data = bytes(batch)
                for _ in range(total // batch):
                    sender.sendall(data)
            os._exit(0)
        receiver, _ = server.accept()
        buffer = memoryview(bytearray(batch))
        cpu, started = time.process_time(), time.perf_counter()
        while received := receiver.recv_into(buffer):
            del received
        taken = time.perf_counter() - started
        receiver.close()
        _, _, usage = os.wait4(child, 0)
        return taken, time.process_time() - cpu + usage.ru_utime + usage.ru_stime


def cpu_of(pid: int) -> float:
    """CPU seconds of the pod and of this process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = os.times()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") + own.user + own.system


if __name__ == "__main__":
    main()
