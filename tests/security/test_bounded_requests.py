"""What one request may cost: ids, bytes, traces and records are bounded, however they are asked for."""

from __future__ import annotations

import asyncio
import http.client
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from tests.pod_fixtures import metric, rank_of, write_files

from refill.errors import MemoryTooSmall, RequestTooLarge
from refill.pod_connection import PodConnection
from refill.protocol.records import Kind, Record, encode_records
from refill.protocol.wire_format import MAX_BATCH, MAX_SAMPLES, BatchRequest
from refill_service.datasets.dataset_reader import Dataset
from refill_service.datasets.pack import pack
from refill_service.demo.local_cluster import LocalCluster

LARGE_BYTES = 200_000
LARGE_SAMPLES = 500
"""100 MB; an answer of these pods has 64 MiB at most."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    source, store = tmp_path_factory.mktemp("large"), tmp_path_factory.mktemp("large-store")
    write_files(source, LARGE_SAMPLES, LARGE_BYTES, LARGE_BYTES)
    asyncio.run(pack(str(source), store.as_uri()))
    return store.as_uri()


def samples_of(dataset_url: str) -> list[bytes]:
    """By id, as they lie in the store."""

    async def read() -> list[bytes]:
        dataset = await Dataset.open(dataset_url)
        records = await dataset.load_records(0, dataset.num_samples)
        found = [bytes(await dataset.read_samples(records, each, each + 1)) for each in range(dataset.num_samples)]
        await dataset.close()
        return found

    return asyncio.run(read())


@pytest.fixture(scope="module")
def two_pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(2, tmp_path_factory.mktemp("pods"), {"memory_bytes": "64MiB", "pinned_fraction": 0}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def connection(two_pods: LocalCluster, large: str) -> PodConnection:
    """A rank of a job whose samples are large, with traces of its own."""
    settings = {
        "name": "large",
        "dataset": large,
        "order": "explicit",
        "policy": "drain",
        "memory_bytes": 20_000_000,
        "chunk_size": 4,
    }
    return rank_of(two_pods, settings)


@pytest.fixture(scope="module")
def url(two_pods: LocalCluster, connection: PodConnection) -> str:
    connection.info()
    return f"{two_pods.pod_urls[0]}/v1/jobs/large"


def refused(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]


def exact_reads(pods: LocalCluster) -> float:
    return sum(metric(url, "refill_exact_reads_total") for url in pods.pod_urls)


def test_a_sample_that_is_named_often_is_read_once(
    two_pods: LocalCluster, large: str, connection: PodConnection, url: str
) -> None:
    connection.post_trace(0, np.arange(20))
    connection.batch(0, np.arange(20))  # reads are counted in epochs
    before = exact_reads(two_pods)
    ids = np.array([3, 499, 3, 3, 499] * 60)
    answer = httpx.post(f"{url}/samples", content=ids.tobytes(), timeout=30)
    assert answer.status_code == 200, answer.text
    assert exact_reads(two_pods) - before <= 2
    samples = samples_of(large)
    assert answer.content.endswith(b"".join(samples[each] for each in (3, 499, 3, 3, 499)))


def test_a_sample_that_is_named_ten_thousand_times_is_refused(two_pods: LocalCluster, url: str) -> None:
    before = exact_reads(two_pods)
    many = np.zeros(MAX_SAMPLES, dtype=np.int64)
    assert refused(httpx.post(f"{url}/samples", content=many.tobytes(), timeout=30)) == (413, "RequestTooLarge")
    more = np.zeros(10_000, dtype=np.int64)
    assert refused(httpx.post(f"{url}/samples", content=more.tobytes())) == (413, "RequestTooLarge")
    assert exact_reads(two_pods) - before <= 1


def test_samples_of_more_bytes_than_an_answer_has_are_refused_before_they_are_read(
    two_pods: LocalCluster, url: str
) -> None:
    """Each pod owns a half of them, which would do; the home sees to the sum."""
    resident = metric(two_pods.pod_urls[0], "process_resident_memory_bytes")
    answer = httpx.post(f"{url}/samples", content=np.arange(LARGE_SAMPLES).tobytes(), timeout=30)
    assert refused(answer) == (413, "RequestTooLarge")
    assert "ask for fewer at once" in answer.json()["message"]
    assert metric(two_pods.pod_urls[0], "process_resident_memory_bytes") - resident < 80_000_000


def test_the_client_asks_for_any_number_of_samples_in_parts(connection: PodConnection, large: str) -> None:
    ids = np.random.default_rng(1).permutation(LARGE_SAMPLES)
    received = connection.samples(ids)
    assert received.sample_ids.tolist() == ids.tolist()
    content = samples_of(large)
    assert received.payloads == [content[sample] for sample in ids.tolist()]


def test_more_ids_than_a_request_has_are_several_requests(two_pods: LocalCluster, packed: tuple[str, Any]) -> None:
    rank = rank_of(two_pods, {"name": "small", "dataset": packed[0], "policy": "drain", "memory_bytes": 1_000_000})
    ids = np.random.default_rng(2).integers(0, 1000, 2 * MAX_SAMPLES + 10)
    received = rank.samples(ids)
    content = samples_of(packed[0])
    assert received.payloads == [content[sample] for sample in ids.tolist()]
    assert rank.samples(ids[:0]).payloads == []
    rank.end_job()


def test_a_batch_has_a_number_of_positions_and_of_bytes(connection: PodConnection, url: str) -> None:
    too_many = b"RFQ1" + bytes(8 * MAX_BATCH + 1000)
    assert refused(httpx.post(f"{url}/batch", content=too_many)) == (413, "RequestTooLarge")
    connection.post_trace(1, np.arange(LARGE_SAMPLES))
    with pytest.raises(RequestTooLarge, match="ask for fewer at once, or raise sending_bytes"):
        connection.batch(1, np.arange(400))
    assert len(connection.batch(1, np.arange(20)).payloads) == 20


def test_a_batch_of_repeats_is_no_way_around_that(connection: PodConnection) -> None:
    """A trace of one's own may name one sample as often as it likes."""
    connection.post_trace(2, np.repeat(np.arange(5), 100))
    with pytest.raises(RequestTooLarge):
        connection.batch(2, np.arange(500))


def test_a_trace_longer_than_the_job_has_memory_for_is_refused_before_it_comes(
    two_pods: LocalCluster, url: str
) -> None:
    resident = metric(two_pods.pod_urls[0], "process_resident_memory_bytes")

    def pieces() -> Iterator[bytes]:
        yield from [bytes(1 << 20)] * 600

    trace = f"{url}/epochs/9/ranks/0/trace"
    assert refused(httpx.put(trace, content=pieces(), timeout=60))[0] in (413, 400)
    announced = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    announced.putrequest("PUT", urlsplit(trace).path)
    announced.putheader("Content-Length", str(600 << 20))
    announced.endheaders()
    assert announced.getresponse().status in (413, 400), "all of it has to come before it is refused"
    announced.close()
    assert metric(two_pods.pod_urls[0], "process_resident_memory_bytes") - resident < 20_000_000


def test_traces_of_many_epochs_are_refused_when_there_is_no_memory_left_for_them(
    two_pods: LocalCluster, packed: tuple[str, Any]
) -> None:
    """The second rank never posts, so that none of them is over."""
    settings = {
        "name": "many",
        "dataset": packed[0],
        "order": "explicit",
        "policy": "drain",
        "memory_bytes": 8_000_000,
        "world_size": 2,
    }
    rank, trace = rank_of(two_pods, settings), np.zeros(10_000, dtype=np.int64)
    for epoch in range(6):
        rank.post_trace(epoch, trace)

    def post_more() -> None:
        for epoch in range(6, 100):
            rank.post_trace(epoch, trace)

    with pytest.raises(MemoryTooSmall, match="left for traces: give it more memory_bytes, or post shorter traces"):
        post_more()
    rank.end_job()


def test_a_trace_that_is_posted_again_costs_nothing_and_another_one_is_refused(
    two_pods: LocalCluster, packed: tuple[str, Any]
) -> None:
    rank = rank_of(
        two_pods,
        {"name": "again", "dataset": packed[0], "order": "explicit", "policy": "drain", "memory_bytes": 1_000_000},
        0,
        0,
    )
    trace = np.random.default_rng(3).permutation(1000)[:700]
    for _ in range(30):
        rank.post_trace(0, trace)
    for wrong in (trace[::-1], trace[:-1], np.append(trace, 1)):
        answer = httpx.put(f"{rank.home}/v1/jobs/again/epochs/0/ranks/0/trace", content=wrong.astype("<i8").tobytes())
        assert refused(answer) == (400, "InvalidInput")
        assert "posted another trace" in answer.json()["message"]
    assert sorted(rank.batch(0, np.arange(700)).sample_ids.tolist()) == sorted(trace.tolist())
    rank.end_job()


def test_a_rank_reports_few_epochs_and_samples_that_there_are(
    two_pods: LocalCluster, packed: tuple[str, Any], url: str
) -> None:
    """What it has received is kept for a restart, by epoch."""
    rank = rank_of(two_pods, {"name": "reported", "dataset": packed[0], "policy": "drain", "memory_bytes": 1_000_000})
    rank.info()
    records_url, some = f"{rank.home}/v1/jobs/reported/ranks/0/records", np.arange(3)
    two = encode_records(Record(Kind.RECEIVED, epoch, 0, (some, some)) for epoch in range(2))
    assert httpx.put(records_url, content=two).json() == {"records": 2}
    many = encode_records(Record(Kind.RECEIVED, epoch, 0, (some, some)) for epoch in range(100))
    assert refused(httpx.put(records_url, content=many)) == (400, "InvalidInput")
    large = Record(Kind.RECEIVED, 0, 0, (np.zeros(1 << 20, dtype=np.int64),) * 2).encode()
    assert refused(httpx.put(records_url, content=large)) == (413, "RequestTooLarge")
    damaged = two[:-1] + bytes([two[-1] ^ 1])
    assert "damaged after byte" in httpx.put(records_url, content=damaged).json()["message"]
    rank.end_job()
    foreign = encode_records([Record(Kind.TRACE, 50, 0, (np.array([LARGE_SAMPLES]),))])
    assert refused(httpx.put(f"{url}/ranks/0/records", content=foreign)) == (400, "InvalidInput")


def test_positions_of_a_job_do_not_change_by_how_they_are_bounded(connection: PodConnection, url: str) -> None:
    """After all of that, an epoch is delivered: each sample of its trace once."""
    connection.post_trace(1, np.arange(LARGE_SAMPLES))
    request = BatchRequest(1, 0, np.arange(20)).encode()
    assert httpx.post(f"{url}/batch", content=request, timeout=30).status_code == 200
    ids = [i for start in range(0, 500, 50) for i in connection.batch(1, np.arange(start, start + 50)).sample_ids]
    assert sorted(ids) == list(range(LARGE_SAMPLES))
