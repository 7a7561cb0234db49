"""What a pod answers to whatever is sent to it: one JSON line and a 4xx for nonsense, and nothing has changed."""

from __future__ import annotations

import http.client
import random
import re
import struct
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tests.draws import draws
from tests.pod_fixtures import NUM_SAMPLES, metric, rank_of, settings_of, whole_epoch

import refill
from refill.errors import EpochNotReady, InvalidInput, MemoryTooSmall, UnknownJob
from refill.protocol.wire_format import MAX_BATCH, BatchRequest
from refill_service.demo.local_cluster import LocalCluster

Packed = tuple[str, dict[str, bytes]]
REQUEST = struct.Struct("<4sIIIQQQ")


@pytest.fixture(scope="class")
def running(three_pods: LocalCluster, packed: Packed) -> Iterator[str]:
    """URL of a job with two ranks, in the middle of its first epoch; after the tests the epochs are still whole."""
    job = settings_of(packed[0], policy="redox", world_size=2, num_epochs=0)
    ranks = [rank_of(three_pods, job, rank) for rank in range(2)]
    first = [rank.batch(0, np.arange(100)).sample_ids.tolist() for rank in ranks]
    yield f"{three_pods.pod_urls[0]}/v1/jobs/{job['name']}"
    for epoch in range(2):
        ids = [[x for b in whole_epoch(rank, epoch) for x in b.sample_ids.tolist()] for rank in ranks]
        assert sorted(ids[0] + ids[1]) == list(range(NUM_SAMPLES)), f"epoch {epoch} is not exactly once any more"
        if epoch == 0:
            assert [each[:100] for each in ids] == first, "what was delivered before has changed"
    ranks[0].end_job()


def refused(answer: httpx.Response, statuses: tuple[int, ...] = (400,)) -> str:
    """The message of a refusal, which is JSON and one line."""
    assert answer.status_code in statuses, f"{answer.request.url}: {answer.status_code} {answer.text[:300]}"
    body = answer.json()
    assert set(body) == {"error", "message", "details"}, f"{answer.request.url}: {body}"
    assert body["message"]
    assert "\n" not in body["message"]
    assert len(body["message"]) < 1000
    return str(body["message"])


def request(epoch: int = 0, rank: int = 0, positions: Any = (0,), **fields: Any) -> bytes:
    return BatchRequest(epoch, rank, np.array(positions, dtype=np.int64), **fields).encode()


BAD_BATCHES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "shorter than its 40-byte header"),
    "text": (b"{}" * 100, "not a request of this version"),
    "truncated head": (request()[:20], "shorter than"),
    "truncated positions": (request(positions=range(10))[:-3], "can't hold the 10 positions"),
    "one too many": (request() + b"\0" * 8, "can't hold the 1 positions"),
    "no positions": (REQUEST.pack(b"RFQ2", 0, 0, 0, 0, 0, 0), "can't hold the 0 positions"),
    "counts more than it holds": (REQUEST.pack(b"RFQ2", 0, 0, 2**32 - 1, 0, 0, 0), "can't hold"),
    "of another version": (b"RFQ9" + request()[4:], "not a request of this version"),
    "negative position": (request(positions=[3, -1]), "position -1; positions start at 0"),
    "position twice": (request(positions=[3, 3]), "a position twice"),
    "position past the end": (request(positions=[500]), "rank 0 asks for position 500, but epoch 0"),
    "largest position": (request(positions=[2**63 - 1]), "rank 0 asks for position"),
    "past the end, later epoch": (request(1, positions=[500]), "rank 0 asks for position 500, but epoch 1"),
    "wrong rank": (request(rank=2), "rank 2 asks, but job"),
    "largest rank": (request(rank=2**32 - 1), "world_size 2"),
    "too long": (b"RFQ2" + bytes(8 * MAX_BATCH + 100), "longer than"),
}


def test_a_refused_request_does_not_move_its_rank_on(three_pods: LocalCluster, job: dict[str, Any]) -> None:
    """A position past the end, in a later epoch: owners must still wait for the rank in the epoch that it is in."""
    job |= {"policy": "redox", "world_size": 2}
    ranks = [rank_of(three_pods, job, rank, timeout_seconds=0) for rank in range(2)]
    for rank in ranks:
        rank.batch(0, np.arange(100))  # what is left of the epoch is more than the pods have memory for
    with pytest.raises(InvalidInput, match="has 500 positions"):
        ranks[0].batch(1, np.array([500]))
    with pytest.raises(EpochNotReady, match="waits for rank 0 to finish epoch 0"):
        ranks[1].batch(1, np.arange(10))
    assert len(ranks[0].batch(0, np.arange(100, 500)).payloads) == 400, "the rank can't finish its epoch"


@pytest.mark.variants("1-explicit", "2-keyed")
@pytest.mark.parametrize("order", ["keyed", "explicit"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_epoch_far_beyond_the_running_one_is_refused(
    three_pods: LocalCluster, job: dict[str, Any], world_size: int, order: str
) -> None:
    """It would be the epoch that the job is in, and the running one would be over. A job may begin anywhere, though."""
    job |= {"policy": "redox", "world_size": world_size, "order": order, "memory_bytes": 3 * 2**20}
    ranks = [rank_of(three_pods, job, rank) for rank in range(world_size)]
    length = NUM_SAMPLES // world_size

    def post(epoch: int) -> None:
        for rank in ranks if order == "explicit" else []:
            rank.post_trace(epoch, np.arange(NUM_SAMPLES)[rank.rank :: world_size])

    post(7)
    first = [rank.batch(7, np.arange(100)).sample_ids.tolist() for rank in ranks]
    for far in (10_000, 2**31 - 1):
        with pytest.raises(InvalidInput, match=f"{far} while job .* is in epoch 7: at most 1,000 may be") as said:
            ranks[0].batch(far, np.arange(10))
        assert "\n" not in str(said.value)
        if order == "explicit":
            with pytest.raises(InvalidInput, match=f"asks for epoch {far}"):
                ranks[0].post_trace(far, np.arange(length))
    for url in three_pods.pod_urls:
        (found,) = (each for each in httpx.get(f"{url}/v1/jobs").json() if each["spec"]["name"] == job["name"])
        assert found["epoch"] == 7, f"{url} takes it to be in another epoch"
    for epoch in (7, 12):
        if epoch == 12:  # all ranks leave out the same ones
            post(12)
        with ThreadPoolExecutor() as threads:
            batches = threads.map(lambda rank, epoch=epoch: rank.batch(epoch, np.arange(length)), ranks)
            ids = [batch.sample_ids.tolist() for batch in batches]
        had = sorted(sample for each in ids for sample in each)
        assert had == list(range(NUM_SAMPLES)), f"epoch {epoch} is not exactly once any more"
        assert epoch == 12 or [each[:100] for each in ids] == first, "what was delivered before has changed"


class PriorKnowledge:
    """One HTTP/2 request at a time, as pods send them."""

    def __init__(self) -> None:
        from pyreqwest.client import SyncClientBuilder

        self._client = SyncClientBuilder().http2_prior_knowledge().build()

    def send(self, method: str, url: str, body: bytes) -> tuple[int, bytes]:
        kind = "application/octet-stream" if "?" in url else "application/json"
        response = self._client.request(method, url).header("content-type", kind).body_bytes(body).build().send()
        return response.status, bytes(response.bytes())

    def close(self) -> None:
        self._client.close()


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"{", b'{"spec": 1}', b'{"spec": {"name": 1}}', b"\xff"])
def test_bad_registrations_between_pods(three_pods: LocalCluster, body: bytes) -> None:
    url = f"http://127.0.0.1:{three_pods.peer_ports[1]}/peer/v1/jobs/x"
    status, answer = PriorKnowledge().send("PUT", url, body)
    assert status == 400, f"{status} {answer[:200]!r}"


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"\xff\xfe", "body"),
        (b"[1]", "body"),
        (b"null", "body"),
        (b'{"dataset": 7}', "job setting dataset must be str, got 7"),
        (b"{}", "job setting dataset is missing"),
        (
            b'{"dataset": "file:///x", "chunks": 1}',
            "unknown job setting 'chunks'; there are: batch_group, chunk_size",
        ),
        (b'{"dataset": "file:///x", "chunk_size": "64"}', "job setting chunk_size must be int, got '64'"),
        (b'{"dataset": "file:///x", "chunk_size": 64.0}', "job setting chunk_size must be int"),
        (b'{"dataset": "file:///x", "chunk_size": -1}', "job setting chunk_size must be 0 to 65536, got -1"),
        (b'{"dataset": "file:///x", "world_size": -1}', "job setting world_size must be 1 to"),
        (b'{"dataset": "file:///x", "shuffle": 1}', "job setting shuffle must be bool"),
        (b'{"dataset": "file:///x", "seed": ' + b"9" * 5000 + b"}", ""),
        (b'{"dataset": "file:///x", "policy": "lru2"}', "job setting policy must be"),
        (b'{"dataset": "file:///x", "name": "other"}', "the URL names job 'bad' and the body 'other'"),
        (b'{"dataset": "file:///a\\u0000b"}', ""),
        (b'{"dataset": "file:///\\ud800"}', ""),
        (b'{"dataset": "ftp://x/y"}', "is not a URL of a store"),
        (b'{"dataset": "file://x/y"}', "a file URL has three slashes"),
        (b'{"dataset": "s3://"}', "names no bucket"),
        (b'{"dataset": ""}', "is not a URL of a store"),
    ],
    ids=lambda value: value[:60].decode("latin-1") if isinstance(value, bytes) else "",
)
@pytest.mark.parametrize("pod", [0, pytest.param(1, marks=pytest.mark.variant)])
def test_bad_registrations(three_pods: LocalCluster, sent: bytes, message: str, pod: int) -> None:
    answer = httpx.put(
        f"{three_pods.pod_urls[pod]}/v1/jobs/bad", content=sent, headers={"content-type": "application/json"}
    )
    assert message in refused(answer, (400, 404))
    for url in three_pods.pod_urls:
        assert all(known["spec"]["name"] != "bad" for known in httpx.get(f"{url}/v1/jobs").json())


@pytest.mark.parametrize("name", ["-x", "a b", "%3F", "%00", "%2e%2e%2fx", "é", "x" * 129])
def test_bad_names(three_pods: LocalCluster, packed: Packed, name: str) -> None:
    url = f"{three_pods.pod_urls[0]}/v1/jobs/{name}"
    refused(httpx.put(url, json={"dataset": packed[0]}), (400, 404))
    refused(httpx.get(url), (400, 404))
    refused(httpx.delete(url), (400, 404))
    refused(httpx.post(f"{url}/batch", content=request()), (400, 404))


def test_unknown_jobs_paths_and_methods(three_pods: LocalCluster) -> None:
    url = three_pods.pod_urls[0]
    for answer in (
        httpx.get(f"{url}/v1/jobs/none"),
        httpx.delete(f"{url}/v1/jobs/none"),
        httpx.post(f"{url}/v1/jobs/none/batch", content=request()),
        httpx.post(f"{url}/v1/jobs/none/samples", content=b""),
        httpx.put(f"{url}/v1/jobs/none/epochs/0/ranks/0/trace", content=b""),
        httpx.get(f"{url}/v1/jobs/none/epochs/0"),
    ):
        assert "none" in refused(answer, (404,))
        assert answer.json()["error"] == UnknownJob.__name__
    refused(httpx.get(f"{url}/v2/jobs"), (404,))
    refused(httpx.post(f"{url}/v1/jobs"), (405,))


BAD_REPORTS: list[dict[str, Any]] = [
    {},
    {"rank": -1, "data_wait_seconds": 1, "samples": 1, "bytes": 1},
    {"rank": 2, "data_wait_seconds": 1, "samples": 1, "bytes": 1},
    {"rank": 0, "data_wait_seconds": -1, "samples": 1, "bytes": 1},
    {"rank": 0, "data_wait_seconds": 1, "samples": "many", "bytes": 1},
]


def test_openapi_lists_every_client_route(three_pods: LocalCluster) -> None:
    from refill_service.pod.cache_node import CacheNode
    from refill_service.serving.app import ROUTES_FOR_CLIENTS, client_app
    from refill_service.serving.door import asks_for_batches
    from refill_service.settings import load_settings

    url = three_pods.pod_urls[0]
    paths = httpx.get(f"{url}/openapi.json").json()["paths"]
    node = CacheNode(load_settings())
    routes = {
        (route.path, method.lower())  # type: ignore[attr-defined]
        for router in ROUTES_FOR_CLIENTS
        for route in router.routes
        for method in route.methods  # type: ignore[attr-defined]
    }
    assert routes == {(path, method) for path, methods in paths.items() for method in methods}
    assert len(routes) >= 12
    batches = {path for path, _ in routes if asks_for_batches(path)}
    assert batches == {"/v1/batches", "/v1/jobs/{job}/batch", "/v1/jobs/{job}/planned/batch"}, "what goes first"
    assert all(answer.get("summary") for methods in paths.values() for answer in methods.values())
    assert client_app(node).title == "refill"
    docs = httpx.get(f"{url}/docs")
    assert docs.status_code == 200
    assert 'href="openapi.json"' in docs.text
    assert all(f"{method.upper()}</b> {path}<" in docs.text for path, method in routes)
    assert not re.findall(r"""(?:src|href)=["']?(?:https?:)?//|<script""", docs.text), "it loads from elsewhere"


def test_health(three_pods: LocalCluster) -> None:
    for ordinal, url in enumerate(three_pods.pod_urls):
        said = httpx.get(f"{url}/healthz").json()
        assert said == {"status": "ok", "version": refill.__version__, "commit": said["commit"]}
        about = f'refill_build_info{{commit="{said["commit"]}",version="{refill.__version__}"}} 1.0'
        assert about in httpx.get(f"{url}/metrics").text
        assert httpx.get(f"{url}/readyz").json() == {"status": "ready", "ordinal": ordinal, "pods": 3}


def test_every_pod_names_all_pods(three_pods: LocalCluster) -> None:
    for ordinal, url in enumerate(three_pods.pod_urls):
        assert httpx.get(f"{url}/v1/pods").json() == {"ordinal": ordinal, "pods": three_pods.pod_urls}


def test_memory_of_a_job_is_held_and_freed(three_pods: LocalCluster, job: dict[str, Any]) -> None:
    url, big = three_pods.pod_urls[0], job | {"memory_bytes": 3 * 2**20}
    figures = ("refill_jobs", "refill_resident_bytes")
    before = [metric(pod, figure) for pod in three_pods.pod_urls for figure in figures]  # of other tests' jobs
    first, second = rank_of(three_pods, big), rank_of(three_pods, big | {"name": big["name"] + "-2"})
    whole_epoch(first, 0)
    with pytest.raises(MemoryTooSmall, match=rf"memory too small: .*{job['name']} 3,145,728") as caught:
        second.info()
    assert "\n" not in str(caught.value)
    assert httpx.delete(f"{url}/v1/jobs/{job['name']}").json() == {"removed": True}
    after = [metric(pod, figure) for pod in three_pods.pod_urls for figure in figures]
    assert after == before, f"{figures} of each pod: bytes are kept of a job that has ended"
    second.info()
    second.end_job()


def test_a_refused_registration_leaves_nothing_behind(packed: Packed, tmp_path: Path) -> None:
    """One pod has less memory: the others must not keep the job, so that it can be tried with other settings."""
    with LocalCluster(2, tmp_path, {"memory_bytes": "4MiB", "pinned_fraction": 0}) as cluster:
        cluster.kill(1)
        cluster.restart(1, settings={"memory_bytes": "1MiB"})
        job = {"name": "large", "dataset": packed[0], "policy": "redox", "chunk_size": 16, "memory_bytes": 2_000_000}
        for pod in range(2):
            assert "pod 1" in refused(httpx.put(f"{cluster.pod_urls[pod]}/v1/jobs/large", json=job, timeout=30))
            for url in cluster.pod_urls:
                assert httpx.get(f"{url}/v1/jobs").json() == [], "a pod keeps a job that another has refused"
        smaller = rank_of(cluster, job | {"memory_bytes": 500_000})
        assert len(smaller.batch(0, np.arange(10)).payloads) == 10


def test_registering_at_once_from_many_ranks(three_pods: LocalCluster, job: dict[str, Any]) -> None:
    """Through different pods: one job, one incarnation."""
    settings_sent = job | {"world_size": 24}

    def register(rank: int) -> Any:
        return httpx.put(f"{three_pods.pod_urls[rank % 3]}/v1/jobs/{job['name']}", json=settings_sent, timeout=30)

    with ThreadPoolExecutor(24) as pool:
        answers = list(pool.map(register, range(24)))
    assert {answer.status_code for answer in answers} == {200}, [answer.text for answer in answers]
    assert len({answer.json()["incarnation"] for answer in answers}) == 1, "ranks got different incarnations"
    known = [httpx.get(f"{url}/v1/jobs/{job['name']}").json()["incarnation"] for url in three_pods.pod_urls]
    assert set(known) == {answers[0].json()["incarnation"]}


@pytest.mark.parametrize("policy", ["planned", "redox"])
def test_who_registers_a_job_is_told_which_version_the_pods_run(
    three_pods: LocalCluster, packed: tuple[str, dict[str, bytes]], policy: str
) -> None:
    rank = rank_of(three_pods, settings_of(packed[0], policy=policy))
    assert rank.info()["refill"] == refill.__version__
    rank.end_job()


class TestARunningJob:
    """One job for all of them: each leaves it as it was."""

    def test_bad_batches(self, running: str) -> None:
        for name, (body, message) in BAD_BATCHES.items():
            said = refused(httpx.post(f"{running}/batch", content=body), (413,) if name == "too long" else (400,))
            assert message in said, f"{name}: {said}"

    def test_random_bytes_to_every_bulk_route(self, running: str, three_pods: LocalCluster) -> None:
        name = running.rpartition("/")[2]
        incarnation = httpx.get(running).json()["incarnation"]
        peer = f"http://127.0.0.1:{three_pods.peer_ports[1]}/peer/v1/jobs/{name}"
        query = f"?incarnation={incarnation}&pod=0"
        http1, http2 = httpx.Client(), PriorKnowledge()
        good = request(positions=range(20))

        @st.composite
        def damaged(draw: Callable[..., Any]) -> bytes:
            body = bytearray(good)
            for _ in range(draw(st.integers(1, 3))):
                body[draw(st.integers(0, len(body) - 1))] = draw(st.integers(0, 255))
            return bytes(body[: draw(st.integers(0, len(body)))])

        @draws(25, suppress_health_check=list(HealthCheck))
        @given(st.binary(max_size=100) | damaged(), st.sampled_from(["batch", "samples", "epochs/0/ranks/0/trace"]))
        def send(body: bytes, route: str) -> None:
            try:
                BatchRequest.decode(body)
            except Exception:
                pass
            else:
                return  # happens to be a request
            if route == "samples" and len(body) % 8 == 0:
                return
            method = "PUT" if route.endswith("trace") else "POST"
            refused(http1.request(method, f"{running}/{route}", content=body))
            status, answer = http2.send(method, f"{peer}/{route.replace('batch', 'take')}{query}", body)
            assert 400 <= status < 500, f"peer route {route}: {status} {answer[:200]!r}"

        send()
        for name_of, (body, _) in BAD_BATCHES.items():
            status, answer = http2.send("POST", f"{peer}/take{query}", body)
            assert status == (413 if name_of == "too long" else 400), f"{name_of}: {status} {answer[:200]!r}"
        http2.close()

    def test_numbers_between_pods_that_do_not_fit(self, running: str, three_pods: LocalCluster) -> None:
        peer = f"http://127.0.0.1:{three_pods.peer_ports[1]}/peer/v1/jobs/{running.rpartition('/')[2]}"
        incarnation = httpx.get(running).json()["incarnation"]
        for field in ("ahead_from", "room_bytes", "started_below"):
            status, answer = PriorKnowledge().send(
                "POST", f"{peer}/take?incarnation={incarnation}&pod=0", request(positions=[400], **{field: 2**64 - 1})
            )
            assert status == 400, f"{field}: {status} {answer[:200]!r}"

    def test_exact_samples(self, running: str) -> None:
        assert "not a list of 8-byte integers" in refused(httpx.post(f"{running}/samples", content=b"123"))
        for wrong in (-1, NUM_SAMPLES, 2**63 - 1, -(2**63)):
            message = refused(httpx.post(f"{running}/samples", content=np.array([0, wrong]).tobytes()))
            assert message == f"there is no sample {wrong}; the dataset has samples 0 to {NUM_SAMPLES - 1}"
        assert httpx.post(f"{running}/samples", content=b"").status_code == 200

    def test_traces(self, running: str) -> None:
        body = np.arange(5).tobytes()
        assert "order 'keyed'" in refused(httpx.put(f"{running}/epochs/0/ranks/0/trace", content=body))
        for path in (
            "epochs/-1/ranks/0",
            "epochs/0/ranks/-1",
            "epochs/x/ranks/0",
            f"epochs/{2**31}/ranks/0",
            "epochs/1.5/ranks/0",
        ):
            refused(httpx.put(f"{running}/{path}/trace", content=body))
        for epoch in ("-1", "x", str(2**40)):
            assert "epoch" in refused(httpx.get(f"{running}/epochs/{epoch}"))

    def test_bad_reports(self, running: str, three_pods: LocalCluster) -> None:
        for report in BAD_REPORTS:
            refused(httpx.post(f"{running}/report", json=report))
        refused(
            httpx.post(f"{running}/report", content=b'{"rank": 0, "data_wait_seconds": NaN, "samples": 1, "bytes": 1}')
        )
        assert (
            metric(three_pods.pod_urls[0], "refill_client_samples_total", training_job=running.rpartition("/")[2]) == 0
        )

    def test_a_connection_that_is_cut_in_the_middle_of_a_request(self, running: str) -> None:
        parts = urlsplit(running)
        for _ in range(5):
            connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=5)
            connection.putrequest("POST", f"{parts.path}/batch")
            connection.putheader("Content-Length", "1000")
            connection.endheaders(random.randbytes(random.randint(0, 999)))
            connection.close()
        assert httpx.get(running).status_code == 200

    def test_another_incarnation_is_refused(self, running: str) -> None:
        for answer in (
            httpx.post(f"{running}/batch?incarnation={uuid.uuid4().hex}", content=request()),
            httpx.post(f"{running}/samples?incarnation=", content=b""),
        ):
            refused(answer, (404, 409))
            assert answer.json()["error"] in ("JobLost", "UnknownJob")
