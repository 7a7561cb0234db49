"""How near are pods to the floor? Samples in memory, moved to a client and to another pod, beside raw sockets.

    python benchmarks/pod_throughput.py

One run, rounds alternating, medians. *raw socket*, *raw Unix*: one process sends a batch's bytes with sendall, another
receives them into one buffer. *memcpy*: the same bytes copied once, by one process. *client <- pod*:
``PlannedConnection.batch`` of 256 samples from one pod that has them in memory; *Unix*: the same over its Unix socket.
*pod <- pod*: the same batches over HTTP/2, asked by ``Peers`` as a home pod asks an
owner, in uvloop as there. Both ends and this process share the machine's cores. CPU of both ends, then of each.
About 30 s.
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
import uvloop
from machine import machine
from targets import target

from refill.pods.credentials import Credentials
from refill.pods.planned_connection import PlannedConnection
from refill.protocol.job_spec import JobSpec
from refill.protocol.wire_format import BatchRequest
from refill_service.datasets.pack import pack
from refill_service.demo.local_cluster import LocalCluster
from refill_service.peers.peers import Peers

BATCH = 256
ROUNDS = 5
WARM_UP = 3 * BATCH
"""Samples that are taken before the clock starts: connections are open then, buffers there."""
SHAPES = ((100_000, 2560), (3_000, 25_600))
"""``(bytes of a sample, samples)``"""

Measure = tuple[float, float, float]
"""``(seconds, CPU seconds of the asking process, of the other)`` to move all samples once."""


def main() -> None:
    print(f"{machine()}; medians of {ROUNDS} rounds")
    print(f"{'':16} {'sample':>8} {'MB/s':>7} {'of raw':>7} {'samples/s':>10} {'CPU s/GB':>9} {'asker':>6} {'pod':>6}")
    for size, count in SHAPES:
        with tempfile.TemporaryDirectory(prefix="refill-bench-") as folder:
            _measure(Path(folder), size, count)


def _measure(folder: Path, size: int, count: int) -> None:
    dataset = (folder / "store").as_uri()
    packed = asyncio.run(pack(str(written_files(folder, size, count + WARM_UP)), dataset)).blob_bytes
    total = packed * count // (count + WARM_UP)
    path = f"{folder}/refill.sock"
    settings: dict[str, str | int | float] = {
        "memory_bytes": 3 * packed,
        "job_memory_fraction": 0.9,
        "unix_socket": path,
    }
    with LocalCluster(1, folder, settings) as cluster:
        pid, pod_url = cluster.processes[0].pid, cluster.pod_urls[0]
        peer_url = f"http://127.0.0.1:{cluster.peer_ports[0]}"
        ways: dict[str, Callable[[], Measure]] = {
            "raw socket": lambda: _raw(total, total * BATCH // count, _tcp_pair),
            "raw Unix": lambda: _raw(total, total * BATCH // count, socket.socketpair),
            "memcpy": lambda: _memcpy(total, total * BATCH // count),
            "client <- pod": lambda: _client(pod_url, pod_url, dataset, count, pid),
            "... Unix": lambda: _client(pod_url, f"unix:{path}", dataset, count, pid),
            "pod <- pod": lambda: _peer(pod_url, peer_url, dataset, count, pid),
        }
        rounds: dict[str, list[Measure]] = {way: [] for way in ways}
        for _ in range(ROUNDS):
            for way, measure in ways.items():
                rounds[way].append(measure())
        medians = {
            way: tuple(statistics.median(column) for column in zip(*measures, strict=True))
            for way, measures in rounds.items()
        }
        raw = medians["raw socket"][0]
        for way, (seconds, asker, other) in medians.items():
            per_gb = 1e9 / total
            print(
                f"{way:16} {size:8,} {total / seconds / 1e6:7,.0f} {raw / seconds:7.2f} {count / seconds:10,.0f}"
                f" {(asker + other) * per_gb:9.2f} {asker * per_gb:6.2f} {other * per_gb:6.2f}",
                flush=True,
            )
        client, peer = (medians[way] for way in ("client <- pod", "pod <- pod"))
        if size >= 100_000:
            target("client <- pod / raw socket", raw / client[0], at_least=0.5)
            target("client <- pod, CPU seconds per GB of both", (client[1] + client[2]) / total * 1e9, at_most=1.5)
            target("pod <- pod / raw socket", raw / peer[0], at_least=0.5)
        else:
            target("client <- pod, samples of 3 KB a second", count / client[0], at_least=60_000)
        print_resident(f"samples of {size:,} bytes", pid, 3 * packed)


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


def _job(pod_url: str, home: str, dataset: str) -> PlannedConnection:
    """A job of one epoch, begun and warm, with every sample in memory that is left."""
    spec = JobSpec(f"bench-{uuid.uuid4().hex[:8]}", dataset, chunk_size=64, num_epochs=1)
    rank = PlannedConnection(pod_url, spec, 0, home, 60)
    rank.batch(0, np.arange(BATCH))  # of each share something: what nobody asks for is not read ahead
    deadline = time.monotonic() + 30
    while resident_bytes(pod_url) < 0.999 * rank.info()["total_bytes"] * (1 - BATCH / rank.info()["num_samples"]):
        if time.monotonic() > deadline:
            raise TimeoutError("the pod did not load the dataset within 30 s")
        time.sleep(0.05)
    for start in range(BATCH, WARM_UP, BATCH):
        rank.batch(0, np.arange(start, start + BATCH))
    return rank


def resident_bytes(pod_url: str) -> float:
    credentials = Credentials()
    verify = credentials.ssl_context() if pod_url.startswith("https:") else False
    lines = httpx.get(f"{pod_url}/metrics", headers=credentials.headers(), verify=verify).text.splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith('refill_resident_bytes{kind="abstract"}'))


def _client(pod_url: str, home: str, dataset: str, count: int, pid: int) -> Measure:
    rank = _job(pod_url, home, dataset)
    cpu, started = _both_cpu(pid), time.perf_counter()
    for start in range(WARM_UP, WARM_UP + count, BATCH):
        rank.batch(0, np.arange(start, start + BATCH))
    taken = _since(started, cpu, pid)
    rank.end_job()
    return taken


def _peer(pod_url: str, peer_url: str, dataset: str, count: int, pid: int) -> Measure:
    rank = _job(pod_url, pod_url, dataset)
    path = f"/peer/v1/jobs/{rank.spec.name}/planned/take?plan={rank.plan_id}&pod=0"

    async def ask() -> Measure:
        peers = Peers((peer_url,), 60)
        cpu, started = _both_cpu(pid), time.perf_counter()
        for start in range(WARM_UP, WARM_UP + count, BATCH):
            body = BatchRequest(0, 0, np.arange(start, start + BATCH)).encode()
            async with peers.frames(0, path, body) as frames:
                await frames.frame()
        taken = _since(started, cpu, pid)
        await peers.close()
        return taken

    taken = uvloop.run(ask())
    rank.end_job()
    return taken


def _raw(total: int, batch: int, pair: Callable[[], tuple[socket.socket, socket.socket]]) -> Measure:
    receiver, sender = pair()
    child = os.fork()
    if child == 0:
        receiver.close()
        data = bytes(batch)
        for _ in range(total // batch):
            sender.sendall(data)
        os._exit(0)
    sender.close()
    buffer = memoryview(bytearray(batch))
    cpu, started = time.process_time(), time.perf_counter()
    while received := receiver.recv_into(buffer):
        del received
    taken = time.perf_counter() - started
    receiver.close()
    _, _, usage = os.wait4(child, 0)
    return taken, time.process_time() - cpu, usage.ru_utime + usage.ru_stime


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
        return receiver, sender


def _memcpy(total: int, batch: int) -> Measure:
    source, buffer = np.ones(total, dtype=np.uint8), np.ones(batch, dtype=np.uint8)
    cpu, started = time.process_time(), time.perf_counter()
    for start in range(0, total - batch + 1, batch):
        buffer[:] = source[start : start + batch]
    return time.perf_counter() - started, time.process_time() - cpu, 0.0


def cpu_of(pid: int) -> float:
    """CPU seconds of the pod and of this process."""
    return sum(_both_cpu(pid))


def cpu_of_pods(pids: list[int]) -> float:
    """CPU seconds of these pods and of this process."""
    own = os.times()
    return own.user + own.system + sum(map(cpu_of_pod, pids))


def cpu_of_pod(pid: int) -> float:
    """CPU seconds of the pod alone."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _both_cpu(pid: int) -> tuple[float, float]:
    """CPU seconds of this process, and of the pod."""
    own = os.times()
    return own.user + own.system, cpu_of_pod(pid)


def _since(started: float, cpu: tuple[float, float], pid: int) -> Measure:
    own, pod = _both_cpu(pid)
    return time.perf_counter() - started, own - cpu[0], pod - cpu[1]


if __name__ == "__main__":
    main()
