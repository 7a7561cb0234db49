"""How a pod ends: readiness first, then new jobs, then new requests; what was begun is answered whole."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
import trustme
from tests.conftest import S3Server, free_port
from tests.pod_fixtures import NUM_SAMPLES, metric, rank_of, settings_of
from tests.refill_command import refill_says
from tests.running_gate import gate
from tests.waiting import until

from refill.errors import EpochNotReady, PodStopping, PodUnreachable, error_from_wire
from refill.protocol.wire_format import BatchRequest
from refill_service.demo.local_cluster import LocalCluster
from refill_service.pod.cache_node import CacheNode, PodPhase
from refill_service.serving.app import client_app
from refill_service.settings import load_settings

Packed = tuple[str, dict[str, bytes]]

SMALL = {"memory_bytes": "4MiB", "pinned_fraction": 0}


def refuses_connections(url: str) -> bool:
    try:
        httpx.get(f"{url}/healthz")
    except httpx.ConnectError:
        return True
    return False


def test_readiness_goes_first_then_new_jobs_while_jobs_go_on(packed: Packed, tmp_path: Path) -> None:
    job = settings_of(packed[0])
    with LocalCluster(1, tmp_path, SMALL | {"drain_seconds": 20}) as cluster:
        url, process = cluster.pod_urls[0], cluster.processes[0]
        rank = rank_of(cluster, job)
        first = rank.batch(0, np.arange(32))
        process.terminate()
        until(lambda: httpx.get(f"{url}/readyz").status_code == 503, "the end of readiness")
        assert httpx.get(f"{url}/readyz").json()["status"] == "stopping"
        assert httpx.get(f"{url}/readyz?ending=ready").status_code == 200, "a kubelet knows that it ends"
        assert httpx.get(f"{url}/healthz").status_code == 200, "a pod that ends lives: nobody has to kill it"
        answer = httpx.put(f"{url}/v1/jobs/new", json=job | {"name": "new"})
        assert (answer.status_code, answer.json()["error"]) == (503, PodStopping.__name__)
        with pytest.raises(PodStopping, match="pod 0 stops"):
            rank_of(cluster, job | {"name": "newer"}, timeout_seconds=0).info()
        rest = [rank.batch(0, np.arange(start, min(start + 32, NUM_SAMPLES))) for start in range(32, NUM_SAMPLES, 32)]
        ids = [sample for batch in [first, *rest] for sample in batch.sample_ids.tolist()]
        assert sorted(ids) == list(range(NUM_SAMPLES)), "the job did not go on while the pod drained"
        process.terminate()
        assert process.wait(5) == -signal.SIGTERM, "a second signal must end it at once"


def test_a_pod_that_starts_ends_though_a_library_swallows_what_is_raised(tmp_path: Path) -> None:
    """SIGTERM comes while a module is imported that goes on whatever is raised there, as some do."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.abc, os, signal, sys\n"
        "class Swallows(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'uvloop':\n"
        "            try:\n"
        "                os.kill(os.getpid(), signal.SIGTERM)\n"
        "            except BaseException:\n"
        "                pass\n"
        "sys.meta_path.insert(0, Swallows())\n"
    )
    ports = [f"--{name}={free_port()}" for name in ("port", "peer-port", "metrics-port")]
    command = [sys.executable, "-m", "refill_service.cli", "serve", *ports]
    pod = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, stderr=subprocess.PIPE, text=True)
    with pod:
        try:
            assert pod.wait(60) == 0
        finally:
            pod.kill()


def test_a_kubelet_that_asks_before_the_pod_is_imported_waits_for_its_answer(tmp_path: Path) -> None:
    """The question is put in the middle of the imports, and answered by the pod."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.abc, os, socket, sys, threading\n"
        "class Asks(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'uvloop':\n"
        "            sys.meta_path.remove(self)\n"
        "            asked = socket.create_connection(('127.0.0.1', int(os.environ['REFILL_METRICS_PORT'])))\n"
        "            asked.sendall(b'GET /healthz HTTP/1.1\\r\\nHost: pod\\r\\n\\r\\n')\n"
        "            threading.Thread(target=lambda: print(asked.recv(15).decode(), flush=True), daemon=True).start()\n"
        "sys.meta_path.insert(0, Asks())\n"
    )
    ports = {name: str(free_port()) for name in ("REFILL_PORT", "REFILL_PEER_PORT", "REFILL_METRICS_PORT")}
    environment = os.environ | ports | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "refill_service.cli", "serve"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as pod:
        try:
            assert pod.stdout is not None
            assert pod.stdout.readline() == "HTTP/1.1 200 OK\n"
        finally:
            pod.kill()


ASKED_WHILE_IT_CLOSES = """
import httpx
from refill_service.pod.cache_node import CacheNode
from refill_service.serving.serve import serve
from refill_service.settings import load_settings

settings, close = load_settings(), CacheNode.close

async def closed_and_asked(node):
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.metrics_port}") as kubelet:
        await close(node)
        for path in ("/readyz?ending=ready", "/healthz", "/metrics"):
            print(path, (await kubelet.get(path)).status_code, flush=True)

CacheNode.close = closed_and_asked
serve(settings)
"""


def test_a_kubelet_is_answered_until_all_else_is_closed() -> None:
    """It asks until the process has ended, and warns of a pod that does not answer."""
    ports = {name: str(free_port()) for name in ("REFILL_PORT", "REFILL_PEER_PORT", "REFILL_METRICS_PORT")}
    environment = os.environ | ports | {"REFILL_DRAIN_SECONDS": "0"}
    command = [sys.executable, "-c", ASKED_WHILE_IT_CLOSES]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as pod:
        try:
            url = f"http://127.0.0.1:{ports['REFILL_METRICS_PORT']}"
            until(lambda: not refuses_connections(url) and httpx.get(f"{url}/readyz").is_success, "the pod's start")
            pod.terminate()
            said, _ = pod.communicate(timeout=60)
        finally:
            pod.kill()
    assert said.splitlines() == ["/readyz?ending=ready 200", "/healthz 200", "/metrics 200"]
    assert pod.returncode == 0


def test_a_request_under_way_is_answered_whole(s3_server: S3Server, in_s3: str, tmp_path: Path) -> None:
    """The store takes a second for each answer: SIGTERM comes in the middle of a batch."""
    with gate(s3_server.endpoint_url, "--delay-seconds", "1") as endpoint:
        environment = s3_server.environment | {"AWS_ENDPOINT_URL": endpoint}
        with LocalCluster(2, tmp_path, SMALL, environment) as cluster, ThreadPoolExecutor(2) as pool:
            job = settings_of(in_s3, world_size=2)
            ranks = [rank_of(cluster, job, rank) for rank in range(2)]
            for rank in ranks:
                rank.info()
            batches = [pool.submit(rank.batch, 0, np.arange(64)) for rank in ranks]
            until(lambda: metric(cluster.pod_urls[0], "refill_requests_under_way", asker="client") > 0, "the request")
            assert not batches[0].done()
            cluster.processes[0].terminate()
            for batch in batches:
                assert len(batch.result(30).payloads) == 64
            assert cluster.processes[0].wait(10) == 0
            assert "broken off" not in cluster.log(0)
            assert "Traceback" not in cluster.log(0)


def tls_of(folder: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Settings of a pod, and variables of those who trust it."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(folder / "cert.pem"))
    return dict.fromkeys(("tls_cert", "tls_key"), str(folder / "cert.pem")), {"REFILL_CA_FILE": str(folder / "ca.pem")}


def connected(cluster: LocalCluster, trusted: dict[str, str]) -> ssl.SSLSocket:
    plain = socket.create_connection(("127.0.0.1", cluster.ports[0]), 30)
    context = ssl.create_default_context(cafile=trusted["REFILL_CA_FILE"])
    return context.wrap_socket(plain, server_hostname="127.0.0.1")


def test_idle_connections_with_tls_do_not_hold_up_the_end(packed: Packed, tmp_path: Path) -> None:
    """Their clients read nothing, so they say no goodbye. An answer under way comes whole, also to one who takes it
    slowly."""
    tls, trusted = tls_of(tmp_path)
    with (
        LocalCluster(1, tmp_path, SMALL | tls | {"drain_seconds": 0}, trusted) as cluster,
        contextlib.ExitStack() as stack,
    ):
        idle, slow = (stack.enter_context(connected(cluster, trusted)) for _ in range(2))
        idle.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert idle.recv(1000).startswith(b"HTTP/1.1 200")
        slow.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = slow.recv(10)
        cluster.processes[0].terminate()
        assert cluster.processes[0].wait(60) == 0
        assert "broken off" not in cluster.log(0), "the pod waited for clients that have nothing to ask"
        while more := slow.recv(1 << 16):
            answer += more
        head, _, body = answer.partition(b"\r\n\r\n")
        assert json.loads(body)["openapi"], head
        while idle.recv(1000):  # to an end in order: else it raises
            pass


def test_what_takes_longer_than_the_grace_is_broken_off(packed: Packed, tmp_path: Path) -> None:
    """A client that stops in the middle of its request. A batch that waits for a rank is answered before: that rank may
    not come as far until the pod's successor is there."""
    with LocalCluster(1, tmp_path, SMALL | {"wait_seconds": 60, "grace_seconds": 1}) as cluster:
        rank = rank_of(cluster, settings_of(packed[0], policy="redox", world_size=2), timeout_seconds=0)
        rank.batch(0, np.arange(10))
        with ThreadPoolExecutor(1) as pool, socket.create_connection(("127.0.0.1", cluster.ports[0])) as half:
            waits = pool.submit(rank.batch, 1, np.arange(10))
            half.sendall(b"POST /v1/jobs/x/report HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{")
            until(lambda: metric(cluster.pod_urls[0], "refill_requests_under_way") == 2, "two requests under way")
            cluster.processes[0].terminate()
            assert cluster.processes[0].wait(10) == 0
            assert isinstance(waits.exception(10), EpochNotReady)
        assert "1 requests are broken off after 1 s" in cluster.log(0)


def test_a_request_that_a_pod_can_not_finish_before_it_ends_may_be_made_again(packed: Packed, tmp_path: Path) -> None:
    """It comes for longer than a pod that ends waits for its requests."""
    with LocalCluster(1, tmp_path, SMALL | {"drain_seconds": 0.5, "grace_seconds": 2}) as cluster:
        job = settings_of(packed[0])
        plan = rank_of(cluster, job).info()["plan_id"]
        waiting = http.client.HTTPConnection("127.0.0.1", cluster.ports[0], timeout=30)
        body = BatchRequest(0, 0, np.arange(20)).encode()
        waiting.putrequest("POST", f"/v1/jobs/{job['name']}/planned/batch?plan={plan}")
        waiting.putheader("content-length", str(len(body)))
        waiting.endheaders(body[:-8])
        until(lambda: metric(cluster.pod_urls[0], "refill_requests_under_way") == 1, "a request under way")
        cluster.processes[0].terminate()
        answer = waiting.getresponse()
        error = error_from_wire(json.loads(answer.read()), status=answer.status, source="the pod")
        assert isinstance(error, PodUnreachable), "clients give up on any other error"
        assert answer.status == error.status
        waiting.close()


def test_a_client_that_loops_sees_nothing_but_errors_that_are_tried_again(packed: Packed, tmp_path: Path) -> None:
    """The pod ends and comes back twice while an epoch is fetched: the client's own retries are all it takes."""
    job = settings_of(packed[0])
    with LocalCluster(2, tmp_path, SMALL | {"drain_seconds": 0.3}) as cluster, ThreadPoolExecutor(1) as pool:
        rank = rank_of(cluster, job)
        rank.info()

        ids: list[int] = []
        ends = {200: threading.Event(), 600: threading.Event()}

        def loop() -> None:
            for position in range(0, NUM_SAMPLES, 4):
                if position in ends:
                    ends[position].wait(100)
                ids.extend(rank.batch(0, np.arange(position, position + 4)).sample_ids.tolist())

        looping = pool.submit(loop)
        for pod, position in enumerate(ends):
            until(lambda position=position: len(ids) == position or looping.done(), "samples")  # type: ignore[misc]
            cluster.processes[pod].terminate()
            ends[position].set()
            assert cluster.processes[pod].wait(20) == 0
            cluster.restart(pod)
        looping.result(100)
        assert sorted(ids) == list(range(NUM_SAMPLES))


def test_a_pod_that_starts_is_not_ready() -> None:
    async def ask(phase: PodPhase) -> httpx.Response:
        node = CacheNode(load_settings())
        node.phase = phase
        async with httpx.AsyncClient(transport=httpx.ASGITransport(client_app(node)), base_url="http://pod") as client:
            return await client.get("/readyz")

    starting, ready = asyncio.run(ask(PodPhase.STARTING)), asyncio.run(ask(PodPhase.READY))
    assert (starting.status_code, starting.json()["status"]) == (503, "starting")
    assert (ready.status_code, ready.json()["status"]) == (200, "ready")


def test_a_pod_is_ready_when_all_its_servers_listen(tmp_path: Path) -> None:
    port, peer_port = free_port(), free_port()
    command = [sys.executable, "-m", "refill_service.cli", "serve", "--host", "127.0.0.1", "--drain-seconds", "0"]
    process = subprocess.Popen([*command, "--port", str(port), "--peer-port", str(peer_port)], stderr=subprocess.PIPE)
    try:
        url = f"http://127.0.0.1:{port}"
        until(lambda: not refuses_connections(url), "the start")
        until(lambda: httpx.get(f"{url}/readyz").status_code == 200, "readiness")
        socket.create_connection(("127.0.0.1", peer_port), 5).close()
    finally:
        process.terminate()
        assert process.wait(10) == 0


def test_settings_that_leave_no_time_to_finish(tmp_path: Path) -> None:
    found = refill_says("serve", "--drain-seconds", "30")
    assert "drain_seconds is 30 and leaves no time of grace_seconds, 25, to finish requests" in found
