"""How long does a team wait for its batches while others do their worst? By the CPU that the pod uses meanwhile.

That hardly depends on how busy the machine is.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from tests.pod_fixtures import metric
from tests.security.clocked_pod import BEGUN_HEADER, SENT_HEADER
from tests.security.floods import Flood, flooded
from tests.security.hostile_datasets import write_many_samples
from tests.waiting import until

from refill.protocol.wire_format import BatchRequest
from refill_service.datasets.pack import pack
from refill_service.demo.local_cluster import PortClaims

TOKENS = {"vision": "vision-0123456789abcdef", "speech": "speech-0123456789abcdef"}
VICTIM = f"Authorization: Bearer {TOKENS['speech']}\r\n"
GREEDY = f"Authorization: Bearer {TOKENS['vision']}\r\n"
NOBODY = ""
SMALL_SAMPLES = 4_096
SAMPLES, SAMPLE_BYTES, BATCH = 640, 100_000, 32
ALL_AT_ONCE = "all at once"
BATCHES, LONGEST_SECONDS = 200, 15
"""So many are asked for, or as many as come in this time, and five at least."""
STRANGERS, LONGEST_CPU_SECONDS = 1_000, 0.05
"""In the turn of strangers it was 80 ms for the one, 150 for the other."""
AT_ONCE_SECONDS = 0.0003
"""The victim itself was stopped, if the pod has gone on for longer while it sent its request: that says nothing."""


def request(method: str, path: str, shown: str, body: bytes = b"") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: pod\r\n{shown}Content-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def unknown_settings(size_bytes: int) -> bytes:
    return json.dumps({f"prefetch_windw_{number}": number for number in range(size_bytes // 30)}).encode()


def floods(small: str, plan: str) -> dict[str, Flood]:
    ids = np.arange(SMALL_SAMPLES, dtype="<i8").tobytes()
    same = json.dumps({"dataset": small}).encode()
    batch = BatchRequest(0, 0, np.arange(BATCH)).encode()
    return {
        "404s": Flood(request("GET", "/v1/nothing", GREEDY)),
        "401s without a token": Flood(request("GET", "/v1/jobs", NOBODY)),
        "JSON of 15 KB": Flood(request("PUT", "/v1/jobs/x", GREEDY, unknown_settings(15_000))),
        "JSON of 1 MiB": Flood(request("PUT", "/v1/jobs/x", GREEDY, unknown_settings(1 << 20))),
        "4,096 samples of a byte": Flood(request("POST", f"/v1/jobs/small/planned/samples?plan={plan}", GREEDY, ids)),
        "the same registration": Flood(request("PUT", "/v1/jobs/small", GREEDY, same)),
        "/metrics": Flood(request("GET", "/metrics", GREEDY)),
        "batches of another team": Flood(request("POST", f"/v1/jobs/small/planned/batch?plan={plan}", GREEDY, batch)),
        "401s, 50 before the answer": Flood(request("GET", "/v1/jobs", NOBODY), at_once=50),
    }


class ClockedPod:
    def __init__(self, port: int, metrics_port: int, pid: int, small: str) -> None:
        self.port, self.metrics_port, self.small = port, metrics_port, small
        self.plans: dict[str, str] = {}
        """Of its jobs, by name."""
        self._clock = (~pid << 3) | 2
        """As the kernel numbers the clock of another process."""

    def cpu_seconds(self) -> float:
        return time.clock_gettime(self._clock)

    def is_idle(self) -> bool:
        """It answers nobody but who asks for this."""
        return metric(f"http://127.0.0.1:{self.metrics_port}", "refill_requests_under_way", asker="client") <= 1


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    source, store = tmp_path_factory.mktemp("files"), tmp_path_factory.mktemp("store")
    for number in range(SAMPLES):
        (source / f"{number:06}.bin").write_bytes(bytes([number % 256]) * SAMPLE_BYTES)
    asyncio.run(pack(str(source), store.as_uri()))
    return store.as_uri()


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory, large: str) -> Iterator[ClockedPod]:
    """With a job of each team. All that the victim's needs is in memory."""
    folder = tmp_path_factory.mktemp("pod")
    (folder / "tokens").mkdir()
    for team, token in TOKENS.items():
        (folder / "tokens" / team).write_text(token)
    claims = PortClaims()
    port, peer_port, metrics_port = claims.take(3)
    settings: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": port,
        "peer_port": peer_port,
        "metrics_port": metrics_port,
        "memory_bytes": "1GiB",
        "dataset_urls": "file:///",
        "client_tokens": folder / "tokens",
    }
    environment = {name: value for name, value in os.environ.items() if not name.startswith("REFILL_")}
    environment |= {f"REFILL_{name.upper()}": str(value) for name, value in settings.items()}
    small = write_many_samples(folder / "small", SMALL_SAMPLES)
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.security.clocked_pod"], env=environment, stdout=log, stderr=log
        )
    try:
        found = ClockedPod(port, metrics_port, process.pid, small)
        register(found, {"small": (small, GREEDY), "victim": (large, VICTIM)})
        victim = Victim(found)
        for _ in range(2 * SAMPLES // BATCH):
            victim.batch()
        yield found
        assert process.poll() is None
        assert "Traceback" not in (folder / "log").read_text()
    finally:
        process.kill()
        process.wait()
        claims.give_back()


def register(pod: ClockedPod, jobs: dict[str, tuple[str, str]]) -> None:
    url = f"http://127.0.0.1:{pod.port}"

    def is_ready() -> bool:
        try:
            return httpx.get(f"{url}/readyz").status_code == 200
        except httpx.TransportError:
            return False

    until(is_ready, "the pod is ready")
    for name, (dataset, shown) in jobs.items():
        headers = {"authorization": shown.partition(": ")[2].strip()}
        found = httpx.put(f"{url}/v1/jobs/{name}", json={"dataset": dataset}, headers=headers, timeout=60)
        assert found.status_code == 200, found.text
        pod.plans[name] = found.json()["plan_id"]


class Waited(NamedTuple):
    """CPU milliseconds of the pod from before a request is sent."""

    begun: float
    """Until its answer begins."""
    sent: float
    """Until all of it has left."""


class Victim:
    """Asks for one batch after another, on one connection."""

    _next_position = 0

    def __init__(self, pod: ClockedPod) -> None:
        self._pod = pod
        self._connection = http.client.HTTPConnection("127.0.0.1", pod.port, timeout=300)
        self._connection.connect()
        self._asked_before, self._begun_before = 0.0, 0.0

    def batch(self) -> Waited | None:
        """Of the batch before; None: not known."""
        epoch, position = divmod(Victim._next_position, SAMPLES)
        Victim._next_position += BATCH
        body = BatchRequest(epoch, 0, np.arange(position, position + BATCH)).encode()
        path = f"/v1/jobs/victim/planned/batch?plan={self._pod.plans['victim']}"
        sent = request("POST", path, VICTIM, body)
        before = self._pod.cpu_seconds()
        self._connection.sock.sendall(sent)
        after = self._pod.cpu_seconds()
        with http.client.HTTPResponse(self._connection.sock, method="POST") as answer:
            answer.begin()
            begun, sent_before = (int(answer.headers[name]) / 1e9 for name in (BEGUN_HEADER, SENT_HEADER))
            assert answer.status == 200, answer.read()
            assert len(answer.read()) > BATCH * SAMPLE_BYTES
        asked = self._asked_before
        found = Waited(1e3 * (self._begun_before - asked), 1e3 * (sent_before - asked)) if asked else None
        self._asked_before, self._begun_before = (before if after - before < AT_ONCE_SECONDS else 0.0), begun
        return found


def waits(pod: ClockedPod) -> Waits:
    victim, found = Victim(pod), list[Waited]()
    victim.batch()  # that of a stranger, so far
    victim.batch()
    ends = time.monotonic() + LONGEST_SECONDS
    while len(found) < BATCHES and (time.monotonic() < ends or len(found) < 5):
        if (took := victim.batch()) is not None:
            found.append(took)
    return Waits(np.array(found))


class Waits:
    """:param of_batches: ``(n, 2)``, as of :class:`Waited`."""

    def __init__(self, of_batches: NDArray[np.float64]) -> None:
        self._begun, self.sent = of_batches.T

    def __str__(self) -> str:
        begun, sent = ("median {:.1f} ms, p99 {:.1f}".format(*np.percentile(each, [50, 99])) for each in self)
        return f"begun {begun}, sent {sent} ({len(self.sent)} batches)"

    def __iter__(self) -> Iterator[NDArray[np.float64]]:
        return iter((self._begun, self.sent))


@pytest.mark.slow_attack
@pytest.mark.timeout(600)
@pytest.mark.parametrize("attack", [*floods("", ""), ALL_AT_ONCE])
def test_a_batch_does_not_wait_for_what_others_ask(pod: ClockedPod, attack: str) -> None:
    """The goal is twice the p99. Of few batches, on a machine that is busy with others, that is luck: held is that nine
    of ten wait no longer than twice the slowest. The rule: ``test_loop_turns.py``."""
    until(pod.is_idle, "what the attack before has asked for was answered")
    alone = waits(pod)
    known = floods(pod.small, pod.plans["small"])
    with flooded(pod.port, list(known.values()) if attack == ALL_AT_ONCE else [known[attack]]) as asked:
        until(lambda: asked.value >= 200, "the attack has begun")
        found = waits(pod)
    begun, sent = (np.percentile(one, 99) / np.percentile(other, 99) for one, other in zip(found, alone, strict=True))
    figures = f"{attack}: p99 {sent:.1f}x until it is sent, {begun:.1f}x until it begins; {found}; without it {alone}"
    print(figures, flush=True)
    assert np.percentile(found.sent, 90) <= 2 * np.percentile(alone.sent, 99), figures


@pytest.mark.slow_attack
def test_who_connects_and_who_looks_after_the_pod_do_not_wait_for_strangers(pod: ClockedPod) -> None:
    """Half of them, at least: of the first ones some wait while all the strangers connect."""
    until(pod.is_idle, "what the attack before has asked for was answered")
    probe = f"http://127.0.0.1:{pod.metrics_port}/healthz"

    def cpu_seconds(ask: Callable[[], object]) -> float:
        before = pod.cpu_seconds()
        ask()
        return pod.cpu_seconds() - before

    with flooded(pod.port, [Flood(request("GET", "/v1/jobs", NOBODY), connections=STRANGERS)]) as asked:
        until(lambda: asked.value >= 2 * STRANGERS, "all of them ask")
        came = [cpu_seconds(lambda: Victim(pod).batch()) for _ in range(15)]
        probed = [cpu_seconds(lambda: httpx.get(probe, timeout=60).raise_for_status()) for _ in range(15)]
    print(f"the pod's CPU: a new connection's batch {np.median(came):.3f} s, a probe {np.median(probed):.3f} s")
    assert max(np.median(came), np.median(probed)) < LONGEST_CPU_SECONDS
