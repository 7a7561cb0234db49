"""Requests and connections leave nothing behind that holds itself: all of it goes when they end.

What holds itself is garbage until Python looks for it, which holds up everybody, and a pod does so seldom.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import pytest
from tests.waiting import until

from refill.protocol.wire_format import BatchRequest
from refill_service.demo.local_cluster import PortClaims

TOKEN = "vision-0123456789abcdef"
SHOWN = f"Authorization: Bearer {TOKEN}\r\n"
POD = """
import collections, gc, json, signal, sys
from refill_service.serving import serve as serving
from refill_service.settings import load_settings

serving.looked_for_in_pieces = lambda: (gc.collect(), gc.freeze(), gc.disable())

def look(*_):
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    found = collections.Counter(type(each).__qualname__ for each in gc.garbage)
    gc.set_debug(0)
    gc.garbage.clear()
    gc.collect()
    with open(sys.argv[1], "a") as file:
        file.write(json.dumps(found) + "\\n")

signal.signal(signal.SIGUSR1, look)
serving.serve(load_settings())
"""
TIMES = 30


class LookedAt:
    """A pod that looks for garbage only when it is told to."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, said: Path) -> None:
        self.port = port
        self._process, self._said = process, said

    def ask(self, request: bytes, times: int) -> None:
        """On one connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            answers = connection.makefile("rb")
            for _ in range(times):
                connection.sendall(request)
                length = 0
                while (line := answers.readline()) != b"\r\n":
                    assert line, "the pod hung up"
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.partition(b":")[2])
                assert len(answers.read(length)) == length

    def garbage(self) -> dict[str, int]:
        before = self._looks()
        self._process.send_signal(signal.SIGUSR1)
        until(lambda: len(self._looks()) > len(before), "a look for garbage")
        found: dict[str, int] = json.loads(self._looks()[-1])
        return found

    def _looks(self) -> list[str]:
        return self._said.read_text().splitlines()


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LookedAt]:
    folder, claims = tmp_path_factory.mktemp("pod"), PortClaims()
    (folder / "tokens").write_text(TOKEN)
    said = folder / "garbage"
    said.touch()
    port, peer_port = claims.take(2)
    environment = {
        "REFILL_HOST": "127.0.0.1",
        "REFILL_PORT": str(port),
        "REFILL_PEER_PORT": str(peer_port),
        "REFILL_METRICS_PORT": "0",
        "REFILL_MEMORY_BYTES": "64MiB",
        "REFILL_DATASET_URLS": "file:///",
        "REFILL_CLIENT_TOKENS": str(folder / "tokens"),
    }
    process = subprocess.Popen([sys.executable, "-c", POD, str(said)], env=environment)
    try:

        def is_ready() -> bool:
            assert process.poll() is None, "the pod has ended"
            try:
                return httpx.get(f"http://127.0.0.1:{port}/readyz").status_code == 200
            except httpx.TransportError:
                return False

        until(is_ready, "the pod is ready")
        yield LookedAt(process, port, said)
    finally:
        process.kill()
        process.wait()
        claims.give_back()


@pytest.fixture(scope="module")
def requests(pod: LookedAt, packed: tuple[str, dict[str, bytes]]) -> dict[str, bytes]:
    headers, url = {"authorization": f"Bearer {TOKEN}"}, f"http://127.0.0.1:{pod.port}/v1/jobs/job"
    registered = httpx.put(url, json={"dataset": packed[0], "policy": "planned"}, headers=headers, timeout=60)
    assert registered.status_code == 200, registered.text
    plan = registered.json()["plan_id"]
    batch, ids = BatchRequest(0, 0, np.arange(10)).encode(), np.arange(20, dtype="<i8").tobytes()

    def request(method: str, path: str, body: bytes = b"", shown: str = SHOWN) -> bytes:
        head = f"{method} {path} HTTP/1.1\r\nHost: pod\r\n{shown}Content-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    return {
        "a batch": request("POST", f"/v1/jobs/job/planned/batch?plan={plan}", batch),
        "samples": request("POST", f"/v1/jobs/job/planned/samples?plan={plan}", ids),
        "a registration": request("PUT", "/v1/jobs/job", json.dumps({"dataset": packed[0]}).encode()),
        "a wrong registration": request("PUT", "/v1/jobs/x", b'{"what": 1}'),
        "no JSON": request("PUT", "/v1/jobs/x", b"[[[["),
        "404": request("GET", "/v1/nothing"),
        "401": request("GET", "/v1/jobs", shown=""),
        "too large": request("PUT", "/v1/jobs/x", bytes(100_000)),
        "metrics": request("GET", "/metrics"),
    }


WHICH = [
    "a batch",
    "samples",
    "a registration",
    "a wrong registration",
    "no JSON",
    "404",
    "401",
    "too large",
    "metrics",
]


@pytest.mark.parametrize("which", WHICH)
def test_a_request_leaves_no_garbage(pod: LookedAt, requests: dict[str, bytes], which: str) -> None:
    pod.ask(requests[which], 3)  # what the first ones make may be kept
    pod.garbage()
    pod.ask(requests[which], TIMES)
    found = pod.garbage()
    assert sum(found.values()) < TIMES, found


ENDED_EARLY = {
    "no HTTP": b"what?\r\n\r\n",
    "a long address": b"GET /" + b"x" * 60_000,
    "many headers": b"GET / HTTP/1.1\r\n" + b"a:\r\n" * 1000,
    "the next requests before the answer": b"GET /v1/jobs HTTP/1.1\r\n\r\n" * 3,
    "a part of a body": f"PUT /v1/jobs/x HTTP/1.1\r\n{SHOWN}Content-Length: 9\r\n\r\n".encode() + b"{",
}


@pytest.mark.parametrize("sent", ENDED_EARLY.values(), ids=ENDED_EARLY)
def test_a_connection_that_is_refused_or_ends_early_leaves_no_garbage(pod: LookedAt, sent: bytes) -> None:
    """3,000 strangers with long addresses took 110 MB, each time again."""
    pod.garbage()
    for _ in range(TIMES):
        with socket.create_connection(("127.0.0.1", pod.port), timeout=60) as connection, suppress(OSError):
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass
    found = pod.garbage()
    assert sum(found.values()) < TIMES, found


def test_a_connection_leaves_no_garbage(pod: LookedAt, requests: dict[str, bytes]) -> None:
    pod.ask(requests["404"], 1)
    pod.garbage()
    for _ in range(TIMES):
        pod.ask(requests["404"], 1)
    found = pod.garbage()
    assert sum(found.values()) < TIMES, found
