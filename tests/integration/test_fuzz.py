"""Whatever is sent to a pod: 4xx as the API's description says, counted, and nothing has changed."""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.draws import times
from tests.pod_fixtures import NUM_SAMPLES, metric, rank_of, samples_of, whole_epoch
from tests.waiting import until

from refill.protocol.wire_format import BatchRequest, FrameHeader
from refill_service.demo.local_cluster import LocalCluster
from refill_service.pod.cache_node import CacheNode
from refill_service.serving.app import client_app
from refill_service.settings import load_settings

Packed = tuple[str, dict[str, bytes]]

FULL = 24
"""In full."""
RAW_EXAMPLES = 20


@pytest.fixture(scope="module")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    settings = {"memory_bytes": "4MiB", "pinned_fraction": 0, "wait_seconds": 0.2, "client_timeout_seconds": 2}
    with LocalCluster(1, tmp_path_factory.mktemp("pod"), settings) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def described(pod: LocalCluster) -> Any:
    """What can be asked, by path and method."""
    import schemathesis  # seconds, for every process that collects tests

    return schemathesis.openapi.from_url(f"{pod.pod_urls[0]}/openapi.json")


@pytest.fixture(scope="module")
def half_way(pod: LocalCluster, packed: Packed) -> Iterator[Any]:
    """The state of a pod with a job in the middle of an epoch; after all tests that job goes on, exact."""
    job = {"name": "before", "dataset": packed[0], "chunk_size": 16, "memory_bytes": 600_000, "num_epochs": 2}
    rank = rank_of(pod, job | {"policy": "redox"})
    first = rank.batch(0, np.arange(100)).sample_ids.tolist()
    yield settled(pod.pod_urls[0])
    for epoch in range(2):
        ids = [sample for batch in whole_epoch(rank, epoch) for sample in batch.sample_ids.tolist()]
        assert sorted(ids) == list(range(NUM_SAMPLES)), f"epoch {epoch} is not exactly once any more"
        assert epoch > 0 or ids[:100] == first, "what was delivered before has changed"
    rank.end_job()


@pytest.fixture
def unchanged(pod: LocalCluster, half_way: Any) -> Iterator[str]:
    """Its URL; after the test its state is as before."""
    url = pod.pod_urls[0]
    yield url
    for name in {known["spec"]["name"] for known in httpx.get(f"{url}/v1/jobs").json()} - {"before"}:
        httpx.delete(f"{url}/v1/jobs/{name}")
    until(lambda: state(url) == half_way, "the state of before")
    assert "Traceback" not in pod.log(0), pod.log(0)[-3000:]


def state(url: str) -> Any:
    """All that requests can change, without what they may: counts of exact reads, and time that clients waited."""
    total = httpx.get(f"{url}/v1/jobs/before/epochs/0").json()["total"]
    counts = {name: total[name] for name in ("takes", "misses", "bytes_read", "delivered_bytes", "batches")}
    resident = {labels["kind"]: held for labels, held in samples_of(url, "refill_resident_bytes")}
    of_time = ("idle_seconds", "ranks_alive", "alive")
    jobs = [{name: job[name] for name in job if name not in of_time} for job in httpx.get(f"{url}/v1/jobs").json()]
    return jobs, counts, resident


def settled(url: str) -> Any:
    """The state once chunks that were read ahead have come."""
    seen: list[Any] = []

    def is_settled() -> bool:
        seen.append(state(url))
        return len(seen) > 3 and all(each == seen[-1] for each in seen[-4:])

    until(is_settled, "a state of the pod that stays")
    return seen[-1]


def operations() -> list[str]:
    """Of clients' API, as ``METHOD /path``."""
    paths = client_app(CacheNode(load_settings())).openapi()["paths"]
    return [f"{method.upper()} {path}" for path, methods in paths.items() for method in methods]


@pytest.mark.parametrize("operation", operations())
def test_requests_made_from_the_description_of_the_api(unchanged: str, described: Any, operation: str) -> None:
    """Right ones and wrong ones, to the job that is there and to one that is not: answers are as described, no 5xx."""
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    conformance = (
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_headers_conformance,
        checks.response_schema_conformance,
    )
    method, path = operation.split(" ")
    requests = described[path][method]
    cases = requests.as_strategy(generation_mode=GenerationMode.POSITIVE)
    if "{" in path:
        cases |= requests.as_strategy(generation_mode=GenerationMode.NEGATIVE)
    ends_it = method == "DELETE"
    statuses = []

    @settings(
        max_examples=times(FULL),
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(cases, st.sampled_from(["none", "before", "as drawn"]))
    def send(case: Any, name: str) -> None:
        if name != "as drawn" and "job" in case.path_parameters:
            case.path_parameters["job"] = "none" if ends_it else name
        answer = case.call()
        statuses.append(answer.status_code)
        case.validate_response(answer, checks=[not_a_server_error, *conformance])

    refused_before = metric(unchanged, "refill_refused_requests_total")
    send()
    counted = metric(unchanged, "refill_refused_requests_total") - refused_before
    assert counted == sum(status >= 400 for status in statuses)


def request(way: str, draw: random.Random) -> bytes:
    """Something that is no HTTP request, or not quite."""
    body = BatchRequest(0, 0, np.arange(draw.randint(1, 50))).encode()
    paths = ("/v1/jobs/before/batch", "/v1/jobs/before/samples", "/v1/jobs/before", "/v1/jobs", "/", "*", "//", "/%00")
    head = f"POST {draw.choice(paths)} HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
    right = head.encode() + b"%d\r\n\r\n" % len(body) + body
    if way == "random bytes":
        return draw.randbytes(draw.randint(1, 3000))
    if way == "cut":
        return right[: draw.randint(1, len(right) - 1)]
    if way == "wrong length":
        wrong = draw.choice([b"-1", b"x", b"1e3", b"+5", b"99999999999999999999", b"5 5", b"", b"%d" % (len(body) - 3)])
        return head.encode() + wrong + b"\r\n\r\n" + body
    if way == "pipelined garbage":
        return b"GET /v1/jobs HTTP/1.1\r\nHost: localhost\r\n\r\n" * draw.randint(1, 200) + draw.randbytes(500)
    if way == "two lengths":
        both = b"%d\r\nTransfer-Encoding: chunked\r\nContent-Length: 7\r\n\r\n" % len(body)
        return head.encode() + both + body
    damaged = bytearray(right)
    for _ in range(draw.randint(1, 5)):
        damaged[draw.randrange(len(head))] = draw.randrange(256)
    return bytes(damaged)


WAYS = ("random bytes", "cut", "wrong length", "pipelined garbage", "damaged", "two lengths")


@pytest.mark.parametrize("port", ["clients", "pods"])
def test_bytes_that_are_no_request(unchanged: str, pod: LocalCluster, port: str) -> None:
    number = (pod.ports if port == "clients" else pod.peer_ports)[0]
    for way in WAYS:
        draw = random.Random(f"{way} {port}")
        for _ in range(RAW_EXAMPLES):
            # The pod may hang up at any time, which the next call sees as one error or another.
            with socket.create_connection(("127.0.0.1", number), 10) as connection, contextlib.suppress(OSError):
                connection.sendall(request(way, draw) if port == "clients" else http2(way, draw))
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(10)
                while piece := connection.recv(1 << 16):
                    assert b"HTTP/1.1 5" not in piece, piece[:500]
    assert pod.processes[0].poll() is None
    assert httpx.get(f"{unchanged}/healthz").status_code == 200


def http2(way: str, draw: random.Random) -> bytes:
    """The preface of HTTP/2 and frames of any kind; or HTTP/1.1, which is not spoken there."""
    if way in ("wrong length", "two lengths"):
        return request(way, draw)
    frames = [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", frame(4, 0, 0, b"")]
    for _ in range(draw.randint(1, 20)):
        payload = draw.randbytes(draw.choice([0, 4, 5, 8, 100, 5000]))
        frames.append(frame(draw.randint(0, 12), draw.randrange(256), draw.choice([0, 1, 2, 3, 2**31 - 1]), payload))
    sent = b"".join(frames)
    return sent[: draw.randint(24, len(sent))] if way == "cut" else sent + draw.randbytes(50)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def test_what_is_no_http_is_answered_in_one_line_and_counted(unchanged: str, pod: LocalCluster) -> None:
    before = metric(unchanged, "refill_refused_requests_total", status="400")
    with socket.create_connection(("127.0.0.1", pod.ports[0]), 10) as connection:
        connection.sendall(b"no request at all\r\n\r\n")
        answer = connection.makefile("rb").read()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 Bad Request\r\nconnection: close")
    assert json.loads(body) == {"error": "InvalidInput", "message": "that is no HTTP request", "details": {}}
    assert metric(unchanged, "refill_refused_requests_total", status="400") == before + 1


def test_garbage_behind_a_request_does_not_spoil_its_answer(unchanged: str, pod: LocalCluster) -> None:
    body = np.arange(100).tobytes()
    head = b"POST /v1/jobs/before/samples HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    answer = b""

    def answered() -> bool:
        """Not as by a pod that has not read the samples within its 0.2 s, on a machine that is busy."""
        nonlocal answer
        with socket.create_connection(("127.0.0.1", pod.ports[0]), 10) as connection:
            connection.sendall(head + body + b"\x00garbage\r\n\r\n")
            answer = connection.makefile("rb").read()
        return not answer.startswith(b"HTTP/1.1 503")

    until(answered, "an answer with the samples")
    found = answer.partition(b"\r\n\r\n")[2]
    assert FrameHeader.decode(found).total_bytes == len(found), "the answer is not whole, or something follows it"
