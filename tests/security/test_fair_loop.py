"""How long does a team wait for its batches while others do their worst? By the CPU that the pod uses meanwhile.

That does not depend on how busy the machine is.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from tests.security.clocked_pod import CPU_HEADER
from tests.security.floods import Flood, flooded
from tests.security.hostile_datasets import write_many_samples
from tests.waiting import until

from refill.protocol.wire_format import BatchRequest
from refill_service.datasets.pack import pack
from refill_service.demo.local_cluster import PortClaims

TOKENS = {"vision": "vision-0123456789abcdef", "speech": "speech-0123456789abcdef"}
VICTIM = {"authorization": f"Bearer {TOKENS['speech']}"}
GREEDY = {"authorization": f"Bearer {TOKENS['vision']}"}
SHOWN = f"Authorization: Bearer {TOKENS['vision']}\r\n"
SAMPLES, SAMPLE_BYTES, BATCH = 640, 100_000, 32
BATCHES = 200
LONGEST = float(os.environ.get("LONGEST", 15))
ONLY = os.environ.get("ONLY", "")
AT_ONCE_SECONDS = 0.0003
"""The victim was stopped itself, if the pod has gone on for longer while it sent its request: that says nothing."""


def request(method: str, path: str, shown: str = SHOWN, body: bytes = b"", kind: str = "application/json") -> bytes:
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: pod\r\n{shown}Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def settings_of(size_bytes: int) -> bytes:
    """JSON with very many settings that no job has."""
    return json.dumps({f"prefetch_windw_{number}": number for number in range(size_bytes // 30)}).encode()


FLOODS = {
    "404s on 200 connections": Flood((request("GET", "/v1/nothing"),)),
    "401s without any token": Flood((request("GET", "/v1/jobs", shown=""),)),
    "JSON of 15 KB": Flood((request("PUT", "/v1/jobs/x", body=settings_of(15_000)),)),
    "JSON of 1 MiB": Flood((request("PUT", "/v1/jobs/x", body=settings_of(1 << 20)),)),
    "4,096 samples of a byte": Flood(
        (request("POST", "/v1/jobs/bytes/samples", body=np.arange(4_096, dtype="<i8").tobytes()),)
    ),
    "the same registration": Flood((request("PUT", "/v1/jobs/bytes", body=b'{"dataset": "%s"}'),)),
    "/metrics": Flood((request("GET", "/metrics"),)),
    "401s before the answer": Flood((request("GET", "/v1/jobs", shown=""),), at_once=50),
}


class Pod:
    def __init__(self, port: int, pid: int) -> None:
        self.port, self.pid = port, pid

    def cpu_seconds(self) -> float:
        """Of the process, now: the clock that the pod's own header shows."""
        return time.clock_gettime(((~self.pid) << 3) | 2)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    source, store = tmp_path_factory.mktemp("files"), tmp_path_factory.mktemp("store")
    for number in range(SAMPLES):
        (source / f"{number:06}.bin").write_bytes(bytes([number % 256]) * SAMPLE_BYTES)
    asyncio.run(pack(str(source), store.as_uri()))
    return store.as_uri()


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory, large: str) -> Iterator[Pod]:
    folder = tmp_path_factory.mktemp("pod")
    (folder / "tokens").mkdir()
    for team, token in TOKENS.items():
        (folder / "tokens" / team).write_text(token)
    claims = PortClaims()
    port, peer_port = claims.take(2)
    settings: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": port,
        "peer_port": peer_port,
        "memory_bytes": "1GiB",
        "dataset_urls": "file:///",
        "client_tokens": folder / "tokens",
    }
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REFILL_")}
    environment |= {f"REFILL_{name.upper()}": str(value) for name, value in settings.items()}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.security.clocked_pod"], env=environment, stdout=log, stderr=log
        )
    try:
        yield begun(Pod(port, process.pid), write_many_samples(folder / "bytes", 4_096), large)
    finally:
        process.kill()
        process.wait()
        claims.give_back()
        print((folder / "log").read_text()[-300:])


def begun(pod: Pod, small: str, large: str) -> Pod:
    url = f"http://127.0.0.1:{pod.port}"

    def is_ready() -> bool:
        try:
            return httpx.get(f"{url}/readyz").status_code == 200
        except httpx.TransportError:
            return False

    until(is_ready, "the pod is ready")
    for name, dataset, headers in (("bytes", small, GREEDY), ("victim", large, VICTIM)):
        found = httpx.put(f"{url}/v1/jobs/{name}", json={"dataset": dataset}, headers=headers, timeout=60)
        assert found.status_code == 200, found.text
    global registration
    registration = json.dumps({"dataset": small}).encode()
    victim = Victim(pod)
    for _ in range(2 * SAMPLES // BATCH):  # all of it is in memory then
        victim.batch()
    return pod


class Victim:
    next_position = 0

    def __init__(self, pod: Pod) -> None:
        self._pod = pod
        self._connection = http.client.HTTPConnection("127.0.0.1", pod.port, timeout=60)
        self._connection.connect()

    def batch(self) -> float | None:
        """CPU seconds of the pod from before the request is sent until its answer begins."""
        epoch, position = divmod(Victim.next_position, SAMPLES)
        Victim.next_position += BATCH
        body = BatchRequest(epoch, 0, np.arange(position, position + BATCH)).encode()
        head = f"POST /v1/jobs/victim/batch HTTP/1.1\r\nHost: pod\r\nAuthorization: {VICTIM['authorization']}\r\n"
        sent = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        before = self._pod.cpu_seconds()
        self._connection.sock.sendall(sent)
        after = self._pod.cpu_seconds()
        with http.client.HTTPResponse(self._connection.sock, method="POST") as answer:
            answer.begin()
            answered = int(answer.headers[CPU_HEADER]) / 1e9
            assert answer.status == 200, answer.read()
            assert len(answer.read()) > BATCH * SAMPLE_BYTES
        return answered - before if after - before < AT_ONCE_SECONDS else None


def waits(pod: Pod) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Of so many batches, in milliseconds."""
    victim, found = Victim(pod), list[float]()
    victim.batch()  # a stranger's, so far
    ends = time.monotonic() + LONGEST
    while len(found) < BATCHES and (time.monotonic() < ends or len(found) < 5):
        if (took := victim.batch()) is not None:
            found.append(1e3 * took)
    return np.array(found)


def attacked(pod: Pod, floods: list[Flood]) -> np.ndarray[Any, np.dtype[np.float64]]:
    with flooded(pod.port, floods) as asked:
        until(lambda: asked.value >= sum(flood.connections for flood in floods), "the attack has begun")
        found = waits(pod)
        print(f"asked {asked.value} times")
    return found


@pytest.mark.slow_attack
@pytest.mark.timeout(600)
def test_attacks(pod: Pod) -> None:
    floods = {
        name: Flood(
            tuple(
                each.replace(b'{"dataset": "%s"}', registration).replace(
                    b"Length: 17\r", b"Length: %d\r" % len(registration)
                )
                for each in flood.requests
            ),
            flood.connections,
            flood.at_once,
        )
        for name, flood in FLOODS.items()
    }
    waits(pod)
    alone = waits(pod)
    print(f"alone: {np.percentile(alone, [50, 99])}")
    for name, flood in floods.items():
        if not any(each in name for each in ONLY.split(",")):
            continue
        found = attacked(pod, [flood])
        print(f"{name}: {np.percentile(found, [50, 99])}, n={len(found)}", flush=True)
    if ONLY and "all" not in ONLY:
        return
    found = attacked(pod, list(floods.values()))
    print(f"all: {np.percentile(found, [50, 99])}, n={len(found)}", flush=True)
