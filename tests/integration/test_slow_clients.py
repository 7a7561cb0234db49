"""Clients that are slow, silent, dead or greedy: they hold no memory for ever, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from pyreqwest.client import ClientBuilder
from tests.pod_fixtures import metric, rank_of, write_files
from tests.waiting import until

from refill.errors import PodBusy
from refill.protocol.wire_format import BatchRequest
from refill_service.datasets.pack import pack
from refill_service.demo.local_cluster import LocalCluster

LARGE_BYTES = 200_000
LARGE_SAMPLES = 400
SENDING_BYTES = 16 << 20
TIMEOUT_SECONDS = 1.5


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    """80 MB in samples of 200 KB: an answer of 50 is more than kernel buffers swallow."""

    source, store = tmp_path_factory.mktemp("large"), tmp_path_factory.mktemp("large-store")
    write_files(source, LARGE_SAMPLES, LARGE_BYTES, LARGE_BYTES)
    asyncio.run(pack(str(source), store.as_uri()))
    return store.as_uri()


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    settings = {
        "memory_bytes": "256MiB",
        "pinned_fraction": 0,
        "sending_bytes": SENDING_BYTES,
        "client_timeout_seconds": TIMEOUT_SECONDS,
        "max_connections": 40,
        "wait_seconds": 1,
    }
    with LocalCluster(1, tmp_path_factory.mktemp("pod"), settings) as cluster:
        yield cluster


@pytest.fixture(params=["redox", "planned"])
def job(pod: LocalCluster, large: str, request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Of each kind: their batches have routes of their own."""
    name = f"job-{uuid.uuid4().hex[:8]}"
    yield {"name": name, "dataset": large, "policy": request.param, "memory_bytes": 100_000_000}
    httpx.delete(f"{pod.pod_urls[0]}/v1/jobs/{name}")


def connect(pod: LocalCluster) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", pod.ports[0]), 20)
    return connection


def ask(pod: LocalCluster, rank: Any, positions: range) -> socket.socket:
    """A client that asks for a batch; nothing is read of the answer."""
    rank.info()
    batch = f"planned/batch?plan={rank.plan_id}" if rank.spec.is_planned else "batch"
    body = BatchRequest(0, 0, np.array(positions)).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", pod.ports[0]))
    head = f"POST /v1/jobs/{rank.spec.name}/{batch} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    return connection


def sending(pod: LocalCluster) -> float:
    return metric(pod.pod_urls[0], "refill_resident_bytes", kind="sending")


def ended(connection: socket.socket) -> bytes:
    """What still comes until the pod closes the connection."""
    connection.settimeout(60)
    came = b""
    with contextlib.suppress(ConnectionError):
        while piece := connection.recv(1 << 16):
            came = (came + piece)[-10_000:]
    return came


@pytest.mark.variants("redox")
def test_answers_that_nobody_reads_are_bounded_and_then_freed(pod: LocalCluster, job: dict[str, Any]) -> None:
    url = pod.pod_urls[0]
    rank = rank_of(pod, job)
    rank.info()
    cut_before = metric(url, "refill_connections_cut_total")
    resident_before = metric(url, "process_resident_memory_bytes")
    clients = [ask(pod, rank, range(start, start + 20)) for start in range(0, 400, 20)]
    most = highest = 0.0
    until(lambda: sending(pod) > SENDING_BYTES / 2, "an answer that is not read")

    def all_cut() -> bool:
        nonlocal most, highest
        most = max(most, sending(pod))
        highest = max(highest, metric(url, "process_resident_memory_bytes"))
        return sending(pod) == 0

    until(all_cut, "the end of the last answer")
    assert metric(url, "refill_connections_cut_total") - cut_before >= 3
    assert most <= SENDING_BYTES, f"{most:.0f} bytes are held for clients that read nothing"
    # Beside them the job's memory, which is full then, reads in flight, and what one piece and sockets take.
    assert highest - resident_before < 100_000_000 + SENDING_BYTES + 60_000_000
    for client in clients:
        client.close()
    ids = [sample for start in range(0, 400, 20) for sample in rank.batch(0, np.arange(start, start + 20)).sample_ids]
    assert sorted(ids) == list(range(LARGE_SAMPLES)), "what was cut off must come when it is asked for again"


def test_who_finds_no_room_is_told_in_time_and_has_taken_nothing(pod: LocalCluster, job: dict[str, Any]) -> None:
    rank = rank_of(pod, job, timeout_seconds=0)
    rank.info()
    stuck = ask(pod, rank, range(60))
    until(lambda: sending(pod) > 10_000_000, "an answer that is not read")
    with pytest.raises(PodBusy, match="bytes of answers that are still being sent, as many as it may"):
        rank.batch(0, np.arange(100, 130))
    counts = rank.epoch_counts(0)["total"]
    assert counts["takes"] == 60, "samples were taken for a request that found no room"
    stuck.close()
    assert len(rank_of(pod, job).batch(0, np.arange(100, 130)).payloads) == 30, "a client's retries must be enough"


def test_an_answer_larger_than_the_bound_passes_alone(pod: LocalCluster, job: dict[str, Any]) -> None:
    batch = rank_of(pod, job).batch(0, np.arange(200))
    assert batch.num_bytes > 2 * SENDING_BYTES


def test_a_client_that_reads_slowly_but_reads_is_served(pod: LocalCluster, job: dict[str, Any]) -> None:
    """Over several times the timeout: it is progress that counts."""
    client, came, started = ask(pod, rank_of(pod, job), range(60)), 0, time.monotonic()
    while time.monotonic() < started + 3 * TIMEOUT_SECONDS:
        came += len(client.recv(300_000))
        time.sleep(0.05)
    client.settimeout(60)
    while came < 60 * LARGE_BYTES:
        piece = client.recv(1 << 20)
        assert piece, f"cut off after {came} bytes though it reads"
        came += len(piece)
    client.close()


SILENT: dict[str, bytes] = {
    "nothing": b"",
    "empty lines": b"\r\n\r\n",
    "half a line": b"POST /v1/jo",
    "half the headers": b"GET /v1/jobs HTTP/1.1\r\nHost: localhost\r\nX-A: ",
    "half a body": b"PUT /v1/jobs/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{",
    "half a chunk": b"PUT /v1/jobs/x HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nff\r\nabc",
    "an answered request and half another one": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /heal",
}


@pytest.mark.parametrize("said", SILENT.values(), ids=SILENT)
def test_who_stops_in_the_middle_of_a_request_is_cut_off(pod: LocalCluster, said: bytes) -> None:
    with connect(pod) as connection:
        connection.sendall(said)
        ended(connection)
    until(lambda: metric(pod.pod_urls[0], "refill_resident_bytes", kind="receiving") == 0, "the end of the request")


@pytest.mark.parametrize("before", [b"", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_an_empty_line_before_a_request_is_passed_over(pod: LocalCluster, before: bytes) -> None:
    """As RFC 9112 wants it, section 2.2."""
    with connect(pod) as connection:
        connection.sendall(before)
        came = connection.recv(1 << 16) if before else b""
        connection.sendall(b"\r\n")
        httpx.get(f"{pod.pod_urls[0]}/healthz").raise_for_status()  # meanwhile the pod has read it, alone
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        came += ended(connection)
    assert came.count(b"HTTP/1.1 200") == 1 + bool(before)


def test_a_body_that_comes_byte_by_byte_is_cut_off(pod: LocalCluster) -> None:
    with connect(pod) as connection:
        connection.sendall(b"PUT /v1/jobs/x HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n")
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 1000:
                connection.sendall(b" ")
                sent += 1
                time.sleep(0.05)
    assert sent < 1000, "a byte now and then kept the connection"


def test_an_idle_connection_between_requests_stays(pod: LocalCluster) -> None:
    """A worker may train for longer than the timeout between two batches."""
    connection = http.client.HTTPConnection("127.0.0.1", pod.ports[0], timeout=20)
    connection.connect()
    opened = connection.sock
    for _ in range(2):
        connection.request("GET", "/healthz")
        assert json.loads(connection.getresponse().read())["status"] == "ok"
        assert connection.sock is opened, "the connection was closed in between"
        time.sleep(2.5 * TIMEOUT_SECONDS)
    connection.close()


def test_too_many_connections_are_told_so_and_probes_pass(pod: LocalCluster) -> None:
    url = pod.pod_urls[0]
    with contextlib.ExitStack() as open_ones:
        for number in range(40):  # connections of the tests before may still be closing
            until(lambda: stays_connected(url, open_ones), f"room for connection {number + 1} of 40")
        until(lambda: httpx.get(f"{url}/v1/jobs").status_code == 503, "the limit")
        answer = httpx.get(f"{url}/v1/jobs")
        assert (answer.status_code, answer.json()["error"]) == (503, PodBusy.__name__)
        assert httpx.get(f"{url}/healthz").status_code == 200
        assert httpx.get(f"{url}/readyz").status_code == 200
    until(lambda: httpx.get(f"{url}/v1/jobs").status_code == 200, "room for connections")


def stays_connected(url: str, open_ones: contextlib.ExitStack) -> bool:
    """Whether one more connection is let in; then it stays open."""
    client = httpx.Client()
    if client.get(f"{url}/v1/jobs").status_code != 200:
        client.close()
        return False
    open_ones.callback(client.close)
    return True


def test_a_flood_of_connections_does_not_pile_up(pod: LocalCluster) -> None:
    with contextlib.ExitStack() as open_ones:
        for _ in range(400):
            with contextlib.suppress(ConnectionError):
                open_ones.enter_context(connect(pod))
        until(lambda: metric_or_none(pod) is not None, "an answer to a probe")
    until(lambda: httpx.get(f"{pod.pod_urls[0]}/v1/jobs").status_code == 200, "room for connections")


def metric_or_none(pod: LocalCluster) -> float | None:
    try:
        return metric(pod.pod_urls[0], "process_open_fds")
    except (httpx.TransportError, ValueError):
        return None


@pytest.mark.parametrize(
    ("path", "announced"), [("/v1/jobs/x", False), ("/v1/jobs/x/report", True), ("/v1/jobs/x/batch", False)]
)
def test_a_body_of_100_mb_is_refused_while_it_comes(pod: LocalCluster, path: str, announced: bool) -> None:
    url = pod.pod_urls[0]
    before = metric(url, "process_resident_memory_bytes")
    piece = b" " * 1_000_000

    def body() -> Iterator[bytes]:
        yield from [piece] * 100

    headers = {"content-type": "application/json"} | ({"content-length": "100000000"} if announced else {})
    method = "PUT" if path.endswith("x") else "POST"
    answer = httpx.request(method, url + path, content=body(), headers=headers, timeout=30)
    assert answer.status_code in (413, 404), answer.text
    if not path.endswith("batch"):
        assert answer.json()["error"] == "RequestTooLarge"
    assert metric(url, "process_resident_memory_bytes") - before < 20_000_000


HEADERS: dict[str, bytes] = {
    "one header of 1 MB": b"GET /healthz HTTP/1.1\r\nX-A: " + b"a" * 1_000_000 + b"\r\n\r\n",
    "one header of 100 KB": b"GET /healthz HTTP/1.1\r\nX-A: " + b"a" * 100_000 + b"\r\n\r\n",
    "an address of 1 MB": b"GET /" + b"a" * 1_000_000 + b" HTTP/1.1\r\n\r\n",
    "many headers": b"GET /healthz HTTP/1.1\r\n" + b"".join(b"X-%d: a\r\n" % i for i in range(100_000)) + b"\r\n",
    "a trailer of 1 MB": b"PUT /v1/jobs/x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nX-A: "
    + b"a" * 1_000_000,
}


@pytest.mark.parametrize("sent", HEADERS.values(), ids=HEADERS)
def test_headers_of_any_length_are_refused(pod: LocalCluster, sent: bytes) -> None:
    """And take no memory. What a pod that has just started loads with its first request is not counted."""

    def answer() -> bytes:
        with connect(pod) as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(sent)
            return ended(connection)

    url = pod.pod_urls[0]
    answer()
    before = metric(url, "process_resident_memory_bytes")
    came = answer()
    assert came == b"" or came.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400")), came[:200]
    assert metric(url, "process_resident_memory_bytes") - before < 10_000_000


@pytest.mark.parametrize("job", ["redox"], indirect=True)
def test_a_pod_that_does_not_read_its_answer_is_cut_off(pod: LocalCluster, job: dict[str, Any]) -> None:
    """Over HTTP/2: its connection lives and answers pings, only the stream stands still."""
    info = rank_of(pod, job).info()
    url = f"http://127.0.0.1:{pod.peer_ports[0]}/peer/v1/jobs/{job['name']}/take"
    body = BatchRequest(0, 0, np.arange(200)).encode()

    async def ask_and_read_nothing() -> None:
        client = ClientBuilder().http2_prior_knowledge().build()
        request = client.post(f"{url}?incarnation={info['incarnation']}&pod=0").body_bytes(body)
        async with request.build_streamed() as answer:
            assert answer.status == 200
            assert sending(pod) >= 200 * LARGE_BYTES
            await asyncio.to_thread(until, lambda: sending(pod) == 0, "the end of what is held for it")

    asyncio.run(ask_and_read_nothing())


def test_a_pod_that_does_not_send_its_request_is_told_so(pod: LocalCluster) -> None:
    async def ask() -> tuple[int, str]:
        async def body() -> AsyncIterator[bytes]:
            yield b"{"
            await asyncio.sleep(10 * TIMEOUT_SECONDS)

        url = f"http://127.0.0.1:{pod.peer_ports[0]}/peer/v1/jobs/x"
        client = ClientBuilder().http2_prior_knowledge().build()
        answer = await client.put(url).header("content-type", "application/json").body_stream(body()).build().send()
        return answer.status, await answer.text()

    status, text = asyncio.run(ask())
    assert (status, json.loads(text)["error"]) == (408, "RequestTooSlow")


def test_a_body_of_100_mb_from_a_pod_is_refused(pod: LocalCluster) -> None:
    before = metric(pod.pod_urls[0], "process_resident_memory_bytes")

    async def ask() -> int:
        client = ClientBuilder().http2_prior_knowledge().build()
        url = f"http://127.0.0.1:{pod.peer_ports[0]}/peer/v1/jobs/x"
        request = client.put(url).header("content-type", "application/json").body_bytes(b" " * 100_000_000)
        return (await request.build().send()).status

    assert asyncio.run(ask()) == 413
    # The HTTP/2 server takes in what its window allows before anybody can refuse it.
    assert metric(pod.pod_urls[0], "process_resident_memory_bytes") - before < 60_000_000
