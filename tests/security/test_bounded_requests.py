"""What one request may cost: ids, bytes, traces and reports are bounded, however they are asked for."""

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

from refill.errors import MemoryTooSmall
from refill.protocol.dealing import MOST_LISTED
from refill.protocol.wire_format import MAX_BATCH, MAX_LISTED, MAX_SAMPLES, BatchRequest
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


@pytest.fixture(scope="module")
def unequal(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A few samples are a hundred times as large as the mean."""
    source, store = tmp_path_factory.mktemp("unequal"), tmp_path_factory.mktemp("unequal-store")
    for number in range(1000):
        (source / f"{number:04}.bin").write_bytes(bytes([number % 256]) * (1_000_000 if number < 5 else 5_000))
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


class Listed:
    """A rank of a job whose ranks have lists of their own, and whoever asks by hand for what is its."""

    def __init__(self, pods: LocalCluster, settings: dict[str, Any]) -> None:
        self.rank = rank_of(pods, {"order": "explicit"} | settings)
        self.is_planned = settings["policy"] == "planned"
        self._lists: dict[int, Any] = {}
        self.url = f"{pods.pod_urls[0]}/v1/jobs/{settings['name']}" + "/planned" * self.is_planned
        info = self.rank.info()
        self.of_plan = {"plan": info["plan_id"]} if self.is_planned else {}

    def post(self, epoch: int, samples: Any) -> None:
        self._lists[epoch] = np.asarray(samples, dtype=np.int64)
        (self.rank.post_list if self.is_planned else self.rank.post_trace)(epoch, self._lists[epoch])

    def batch(self, epoch: int, positions: Any) -> Any:
        return self.rank.batch(epoch, positions, *self._wanted(epoch, positions))

    def send(self, what: str, content: Any) -> httpx.Response:
        return httpx.post(f"{self.url}/{what}", params=self.of_plan, content=content, timeout=30)

    def send_batch(self, epoch: int, positions: Any) -> httpx.Response:
        named = dict(zip(["sample_ids"], self._wanted(epoch, positions), strict=False))
        return self.send("batch", BatchRequest(epoch, 0, positions, **named).encode())

    def _wanted(self, epoch: int, positions: Any) -> list[Any]:
        return [self._lists[epoch][positions]] if self.is_planned else []


@pytest.fixture(params=["redox", "planned"])
def job(request: pytest.FixtureRequest, two_pods: LocalCluster, large: str) -> Iterator[Listed]:
    """Its samples are large."""
    settings = {"name": "large", "dataset": large, "policy": request.param, "memory_bytes": 20_000_000}
    found = Listed(two_pods, settings | {"chunk_size": 4})
    yield found
    found.rank.end_job()


@pytest.fixture(scope="module")
def url(two_pods: LocalCluster, large: str) -> Iterator[str]:
    """Of a job of a live policy."""
    settings = {"name": "live", "dataset": large, "policy": "redox", "memory_bytes": 20_000_000, "chunk_size": 4}
    found = Listed(two_pods, settings)
    yield found.url
    found.rank.end_job()


def refused(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]


def reads(pods: LocalCluster) -> float:
    """Of the store, for samples."""
    return sum(metric(url, "refill_store_requests_total", operation="read_range") for url in pods.pod_urls)


def test_a_sample_that_is_named_often_is_read_once(two_pods: LocalCluster, large: str, job: Listed) -> None:
    before = reads(two_pods)
    ids = np.array([3, 499, 3, 3, 499] * 60)
    answer = job.send("samples", ids.tobytes())
    assert answer.status_code == 200, answer.text
    assert reads(two_pods) - before <= 2
    samples = samples_of(large)
    assert answer.content.endswith(b"".join(samples[each] for each in (3, 499, 3, 3, 499)))


def test_a_sample_that_is_named_ten_thousand_times_is_refused(two_pods: LocalCluster, job: Listed) -> None:
    before = reads(two_pods)
    assert refused(job.send("samples", np.zeros(MAX_SAMPLES, dtype=np.int64).tobytes())) == (413, "RequestTooLarge")
    assert refused(job.send("samples", np.zeros(10_000, dtype=np.int64).tobytes())) == (413, "RequestTooLarge")
    assert reads(two_pods) - before <= 1


def test_samples_of_more_bytes_than_an_answer_has_are_refused_before_they_are_read(
    two_pods: LocalCluster, job: Listed
) -> None:
    """Each pod owns a half of them, which would do; the home sees to the sum."""
    resident = metric(two_pods.pod_urls[0], "process_resident_memory_bytes")
    answer = job.send("samples", np.arange(LARGE_SAMPLES).tobytes())
    assert refused(answer) == (413, "RequestTooLarge")
    assert "ask for fewer at once" in answer.json()["message"]
    assert metric(two_pods.pod_urls[0], "process_resident_memory_bytes") - resident < 80_000_000


@pytest.mark.variants("redox")
def test_the_client_asks_for_any_number_of_samples_in_parts(job: Listed, large: str) -> None:
    ids = np.random.default_rng(1).permutation(LARGE_SAMPLES)
    received = job.rank.samples(ids)
    assert received.sample_ids.tolist() == ids.tolist()
    content = samples_of(large)
    assert received.payloads == [content[sample] for sample in ids.tolist()]


@pytest.mark.variants("redox")
@pytest.mark.parametrize("policy", ["redox", "planned"])
def test_more_ids_than_a_request_has_are_several_requests(
    two_pods: LocalCluster, packed: tuple[str, Any], policy: str
) -> None:
    rank = rank_of(two_pods, {"name": "small", "dataset": packed[0], "policy": policy, "memory_bytes": 1_000_000})
    ids = np.random.default_rng(2).integers(0, 1000, 2 * MAX_SAMPLES + 10)
    received = rank.samples(ids)
    content = samples_of(packed[0])
    assert received.payloads == [content[sample] for sample in ids.tolist()]
    assert rank.samples(ids[:0]).payloads == []
    rank.end_job()


def test_a_batch_has_a_number_of_positions_and_of_bytes(job: Listed) -> None:
    too_many = b"RFQ2" + bytes(16 * MAX_BATCH + 1000)
    assert refused(job.send("batch", too_many)) == (413, "RequestTooLarge")
    job.post(1, np.arange(LARGE_SAMPLES))
    answer = job.send_batch(1, np.arange(400))
    assert refused(answer) == (413, "RequestTooLarge")
    assert "ask for fewer at once, or raise sending_bytes" in answer.json()["message"]
    assert len(job.batch(1, np.arange(20)).payloads) == 20


def test_a_batch_of_repeats_is_no_way_around_that(job: Listed) -> None:
    """A list of one's own may name one sample as often as it likes."""
    job.post(2, np.repeat(np.arange(5), 100))
    assert refused(job.send_batch(2, np.arange(500))) == (413, "RequestTooLarge")


def test_the_largest_samples_many_times_are_bounded_by_their_own_lengths(two_pods: LocalCluster, unequal: str) -> None:
    """As often as they are named here, samples of mean length would be no more than 1 MB."""
    settings = {"name": "unequal", "dataset": unequal, "policy": "planned", "memory_bytes": 20_000_000}
    job = Listed(two_pods, settings | {"chunk_size": 1})
    largest = np.argsort([len(each) for each in samples_of(unequal)])[-5:]
    job.post(0, largest.repeat(20))
    resident = metric(two_pods.pod_urls[0], "process_resident_memory_bytes")
    answer = job.send_batch(0, np.arange(100))
    assert refused(answer) == (413, "RequestTooLarge")
    assert "ask for fewer at once, or raise sending_bytes" in answer.json()["message"]
    assert metric(two_pods.pod_urls[0], "process_resident_memory_bytes") - resident < 40_000_000
    assert len(job.batch(0, np.arange(10)).payloads) == 10
    job.rank.end_job()


def test_a_batch_that_names_one_sample_often_reads_it_once(two_pods: LocalCluster, packed: tuple[str, Any]) -> None:
    """No list of it was posted, so that nothing is read ahead; both pods are asked by way of the first."""
    settings = {"name": "repeats", "dataset": packed[0], "policy": "planned", "memory_bytes": 1_000_000}
    job = Listed(two_pods, settings)
    ids = np.resize([3, 999, 3, 500], 2000)
    before = reads(two_pods)
    request = BatchRequest(0, 0, np.arange(len(ids)), sample_ids=ids).encode()
    answer = job.send("batch", request)
    assert answer.status_code == 200, answer.text
    assert reads(two_pods) - before <= 3
    content = samples_of(packed[0])
    assert answer.content.endswith(b"".join(content[sample] for sample in ids.tolist()))
    job.rank.end_job()


def test_a_trace_longer_than_the_job_has_memory_for_is_refused_before_it_comes(
    two_pods: LocalCluster, url: str
) -> None:
    resident = metric(two_pods.pod_urls[0], "process_resident_memory_bytes")

    def pieces() -> Iterator[bytes]:
        yield from [bytes(1 << 20)] * 80

    trace = f"{url}/epochs/9/ranks/0/trace"
    assert refused(httpx.put(trace, content=pieces(), timeout=60))[0] in (413, 400)
    announced = http.client.HTTPConnection(urlsplit(url).netloc, timeout=30)
    announced.putrequest("PUT", urlsplit(trace).path)
    announced.putheader("Content-Length", str(80 << 20))
    announced.endheaders()
    assert announced.getresponse().status in (413, 400), "all of it has to come before it is refused"
    announced.close()
    assert metric(two_pods.pod_urls[0], "process_resident_memory_bytes") - resident < 20_000_000


def test_lists_of_planned_jobs_are_hints_that_memory_is_never_grown_for(
    two_pods: LocalCluster, packed: tuple[str, Any]
) -> None:
    """Longer pieces than a request may have, lists that say they are very long, those of many epochs and ranks: what is
    not kept is read when it is asked for."""
    settings = {"name": "hints", "dataset": packed[0], "policy": "planned", "memory_bytes": 1_000_000}
    job = Listed(two_pods, settings)
    piece = np.zeros(MAX_LISTED, dtype="<i8").tobytes()

    def put(epoch: int, rank: int, content: Any, **about: int) -> httpx.Response:
        path = f"{job.url}/epochs/{epoch}/ranks/{rank}/list"
        return httpx.put(path, params=job.of_plan | about, content=content, timeout=60)

    assert put(0, 0, piece, num_ranks=1, length=MAX_LISTED).status_code == 200
    before = [metric(url, "process_resident_memory_bytes") for url in two_pods.pod_urls]
    too_long = put(1, 0, iter([bytes(1 << 20)] * 80), num_ranks=1, length=80 << 17)
    assert refused(too_long) == (413, "RequestTooLarge")
    assert put(1, 0, piece, num_ranks=1, length=MOST_LISTED).status_code == 200
    for epoch in range(2, 60):
        assert put(epoch, 0, piece[: 80 * epoch], num_ranks=1, length=10 * epoch).status_code == 200
    for rank in range(60):
        dealt = put(60, rank, piece[:800], num_ranks=2**20, length=100)
        assert dealt.status_code in (200, 400), dealt.text
    assert put(60, 2**20, piece[:8], num_ranks=2**20, length=1).status_code == 400
    assert put(60, 0, piece[:16], num_ranks=1, length=1).status_code == 400
    for url, had in zip(two_pods.pod_urls, before, strict=True):
        assert metric(url, "process_resident_memory_bytes") - had < 20_000_000
    known = httpx.get(job.url, params=job.of_plan | {"rank": 0, "list_of": 0}).json()["lists"]
    assert len(known) <= 3
    assert job.rank.batch(1, np.arange(3), np.array([7, 7, 999])).sample_ids.tolist() == [7, 7, 999]
    job.rank.end_job()


def test_a_list_that_is_posted_again_costs_nothing_and_another_one_takes_its_place(
    two_pods: LocalCluster, packed: tuple[str, Any]
) -> None:
    settings = {"name": "posted-again", "dataset": packed[0], "policy": "planned", "memory_bytes": 1_000_000}
    job = Listed(two_pods, settings)
    samples = np.random.default_rng(3).permutation(1000)[:700]
    for _ in range(30):
        job.post(0, samples)
    for other in (samples[::-1], samples[:-1], np.append(samples, 1), samples):
        job.post(0, other)
        assert job.batch(0, np.arange(600, len(other))).sample_ids.tolist() == other[600:].tolist()
    assert job.batch(0, np.arange(700)).sample_ids.tolist() == samples.tolist()
    job.rank.end_job()


def test_traces_of_many_epochs_are_refused_when_there_is_no_memory_left_for_them(
    two_pods: LocalCluster, packed: tuple[str, Any]
) -> None:
    """The second rank never posts, so that none of them is over."""
    settings = {
        "name": "many",
        "dataset": packed[0],
        "order": "explicit",
        "policy": "redox",
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
        {"name": "again", "dataset": packed[0], "order": "explicit", "policy": "redox", "memory_bytes": 1_000_000},
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


def test_reports_of_many_epochs_are_forgotten_the_oldest_first(two_pods: LocalCluster, packed: tuple[str, Any]) -> None:
    """Of a planned job, for receipts."""
    settings = {"name": "epochs", "dataset": packed[0], "policy": "planned", "memory_bytes": 1_000_000}
    rank = rank_of(two_pods, settings)
    of_plan, path = {"plan": rank.info()["plan_id"]}, "/v1/jobs/epochs"
    with httpx.Client(base_url=two_pods.pod_urls[0], timeout=30) as client:
        for epoch in range(320):
            report = {"epoch": epoch, "rank": 0, "num_ranks": 1, "spans": [[0, 3]]}
            assert client.put(f"{path}/planned/received", params=of_plan, json=report).status_code == 200
        last = client.put(f"{path}/planned/received", params=of_plan, json=report | {"epoch": 2**31 - 1})
        assert last.status_code == 200
        known = [client.get(f"{path}/epochs/{epoch}/receipt").status_code for epoch in (0, 10, 319, 2**31 - 1)]
    assert known == [404, 404, 200, 200]
    rank.end_job()


def test_positions_of_a_job_do_not_change_by_how_they_are_bounded(job: Listed) -> None:
    """After what was refused, an epoch is delivered: each sample of its list once."""
    job.post(1, np.arange(LARGE_SAMPLES))
    assert job.send_batch(1, np.arange(LARGE_SAMPLES)).status_code == 413
    assert job.send_batch(1, np.arange(20)).status_code == 200
    ids = [i for start in range(0, 500, 50) for i in job.batch(1, np.arange(start, start + 50)).sample_ids]
    assert sorted(ids) == list(range(LARGE_SAMPLES))
