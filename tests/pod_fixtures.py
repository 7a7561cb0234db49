"""What do tests with real pods share? Datasets made by `refill pack`, clusters of processes, a rank that asks."""

from __future__ import annotations

import asyncio
import gc
import random
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest

from refill.pods.planned_connection import PlannedConnection
from refill.pods.pod_connection import PodConnection
from refill.pods.received_batch import ReceivedBatch
from refill.protocol.job_spec import JobSpec
from refill_service.datasets.pack import pack
from refill_service.demo.local_cluster import LocalCluster
from tests.conftest import S3Server
from tests.waiting import until

NUM_SAMPLES = 1000


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, bytes]]:
    """A dataset of 1,000 samples of 100 to 4,000 bytes: its URL, and the bytes by key."""
    source, store = tmp_path_factory.mktemp("files"), tmp_path_factory.mktemp("store")
    content = write_files(source, NUM_SAMPLES)
    asyncio.run(pack(str(source), store.as_uri(), blob_bytes=300_000))
    return store.as_uri(), content


@pytest.fixture(scope="session")
def three_pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Three pods with 4 MiB each: a part of the dataset, so that the protocol has choices to make."""
    settings = {"memory_bytes": "4MiB", "pinned_fraction": 0, "wait_seconds": 1}
    with LocalCluster(3, tmp_path_factory.mktemp("pods"), settings) as cluster:
        yield cluster
        for url in cluster.pod_urls:
            _until_nothing_is_held(url)


def _until_nothing_is_held(url: str) -> None:
    """Of samples and requests, once all jobs have ended, whatever hundreds of tests have done there."""
    held: dict[str, float] = {}

    def is_nothing() -> bool:
        _end_jobs(url, _names_of_jobs(url))  # a thread that still asked when its test was over has registered it again
        kinds = ((labels["kind"], value) for labels, value in samples_of(url, "refill_resident_bytes"))
        held.update({kind: value for kind, value in kinds if kind != "pinned"})
        held.update(jobs=metric(url, "refill_jobs"), requests=metric(url, "refill_requests_under_way"))
        return not any(held.values())

    try:
        until(is_nothing, f"the end of what {url} holds")
    except AssertionError as error:
        raise AssertionError(f"{error}: {held}") from None


@pytest.fixture(autouse=True)
def leaves_no_jobs(request: pytest.FixtureRequest) -> Iterator[None]:
    """The pods are those of many tests: jobs of one that go on take the memory of the next one's."""
    if "three_pods" not in request.fixturenames:
        yield
        return
    url = request.getfixturevalue("three_pods").pod_urls[0]
    before = _names_of_jobs(url)
    yield
    _end_jobs(url, _names_of_jobs(url) - before)


@pytest.fixture(scope="module", autouse=True)
def leaves_no_ranks() -> Iterator[None]:
    """Those that lie in circles tell pods that they are there, until they are collected. What stays then, modules that
    were imported meanwhile above all, is looked through no more: that was an eighth of the CPU of all tests."""
    yield
    gc.collect()
    gc.freeze()


def _end_jobs(url: str, names: Iterable[str]) -> None:
    for name in names:
        httpx.delete(f"{url}/v1/jobs/{name}").raise_for_status()


def _names_of_jobs(url: str) -> set[str]:
    return {each["spec"]["name"] for each in httpx.get(f"{url}/v1/jobs").raise_for_status().json()}


@pytest.fixture
def job(three_pods: LocalCluster, packed: tuple[str, dict[str, bytes]]) -> Iterator[dict[str, Any]]:
    """Settings of a job of the test's own, which is ended after it."""
    name = f"job-{uuid.uuid4().hex[:8]}"
    yield {"name": name, "dataset": packed[0], "chunk_size": 16, "memory_bytes": 600_000}
    httpx.delete(f"{three_pods.pod_urls[0]}/v1/jobs/{name}")


@pytest.fixture(scope="session")
def in_s3(s3_server: S3Server, packed: tuple[str, dict[str, bytes]]) -> str:
    """The packed dataset, copied into a bucket."""
    bucket, folder = s3_server.new_bucket(), Path(urlsplit(packed[0]).path)
    for path in folder.rglob("*"):
        if path.is_file():
            s3_server.client().put_object(
                Bucket=bucket, Key=path.relative_to(folder).as_posix(), Body=path.read_bytes()
            )
    return f"s3://{bucket}"


def settings_of(dataset: str, **more: Any) -> dict[str, Any]:
    """Of a job of one epoch, by a name that no other has."""
    return {
        "name": f"job-{uuid.uuid4().hex[:8]}",
        "dataset": dataset,
        "chunk_size": 16,
        "memory_bytes": 600_000,
        "num_epochs": 1,
    } | more


def write_files(folder: Path, count: int, least: int = 100, most: int = 4000, seed: int = 1) -> dict[str, bytes]:
    generator = random.Random(seed)
    content = {f"sample{i:05d}": generator.randbytes(generator.randint(least, most)) for i in range(count)}
    for key, data in content.items():
        (folder / f"{key}.bin").write_bytes(data)
    return content


def rank_of(cluster: LocalCluster, settings: dict[str, Any], rank: int = 0, timeout_seconds: float = 30) -> Any:
    """A rank's connection to the pods, of the kind that its job has."""
    spec = JobSpec.from_dict(settings)
    return kind_of(spec)(cluster.pod_urls[0], spec, rank, None, timeout_seconds)


def kind_of(spec: JobSpec) -> Any:
    """Of a rank's connection to pods."""
    return PlannedConnection if spec.is_planned else PodConnection


def whole_epoch(rank: PodConnection | PlannedConnection, epoch: int, batch: int = 100) -> list[ReceivedBatch]:
    length = rank.info()["samples_per_rank"]
    return [
        rank.batch(epoch, np.arange(start, min(start + batch, length), dtype=np.int64))
        for start in range(0, length, batch)
    ]


def metric(url: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have these labels."""
    return sum(value for found, value in samples_of(url, name) if labels.items() <= found.items())


def samples_of(url: str, name: str) -> list[tuple[dict[str, str], float]]:
    """The samples of a metric: labels and value of each."""
    from prometheus_client.parser import text_string_to_metric_families

    answer = httpx.get(f"{url}/metrics", verify=False).text
    lines = [line for line in answer.splitlines() if line.startswith(name)]  # parsing all takes its time
    families = text_string_to_metric_families("\n".join(lines))
    return [(sample.labels, sample.value) for family in families for sample in family.samples if sample.name == name]
