"""Real pods in real trouble: every sample exactly once, or an error that says what broke; never a wrong epoch."""

from __future__ import annotations

import http.client
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from tests.chaos.store_relay import store_relay
from tests.conftest import S3Server
from tests.pod_fixtures import NUM_SAMPLES, kind_of, metric, rank_of, settings_of, whole_epoch
from tests.running_gate import gate

from refill.errors import JobLost, PodUnreachable, RefillError, SampleDamaged
from refill.protocol.job_spec import JobSpec
from refill.protocol.wire_format import BatchRequest
from refill_service.demo.local_cluster import LocalCluster

Packed = tuple[str, dict[str, bytes]]


@pytest.fixture
def damaged(packed: Packed, tmp_path: Path) -> Path:
    """A copy of the dataset to damage: the path of its first blob."""
    folder = Path(urlsplit(packed[0]).path)
    for path in folder.rglob("*"):
        if path.is_file():
            target = tmp_path / "dataset" / path.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return min((tmp_path / "dataset").rglob("*.tar"))


def ids_of(batches: list[Any]) -> list[int]:
    return [sample for batch in batches for sample in batch.sample_ids.tolist()]


def end(cluster: LocalCluster, job: dict[str, Any]) -> None:
    httpx.delete(f"{cluster.pod_urls[0]}/v1/jobs/{job['name']}")


def test_a_store_that_fails_and_cuts_answers(s3_server: S3Server, in_s3: str, packed: Packed, tmp_path: Path) -> None:
    with gate(s3_server.endpoint_url, "--fail-first", "15", "--cut-first", "10") as endpoint:
        environment = s3_server.environment | {
            "AWS_ENDPOINT_URL": endpoint,
            "REFILL_STORE_FIRST_BACKOFF_SECONDS": "0.01",
            "REFILL_STORE_MAX_BACKOFF_SECONDS": "0.1",
            "REFILL_STORE_MAX_RETRIES": "30",
        }
        with LocalCluster(2, tmp_path, {"memory_bytes": "4MiB", "pinned_fraction": 0}, environment) as cluster:
            batches = whole_epoch(rank_of(cluster, settings_of(in_s3)), 0)
            assert sorted(ids_of(batches)) == list(range(NUM_SAMPLES)), "not every sample came exactly once"
            payload_bytes = sum(batch.num_bytes for batch in batches)
            assert payload_bytes > sum(map(len, packed[1].values())), "bytes are missing"


def test_bytes_that_were_damaged_on_their_way_are_read_again(
    s3_server: S3Server, in_s3: str, packed: Packed, tmp_path: Path
) -> None:
    """Each range of the store is wrong the first time: the index, single samples, whole chunks."""
    with store_relay(s3_server.endpoint_url, seed=1) as store:
        store.wrong = 1.0
        environment = s3_server.environment | {"AWS_ENDPOINT_URL": store.url}
        with LocalCluster(1, tmp_path, {"memory_bytes": "4MiB", "pinned_fraction": 0}, environment) as cluster:
            rank = rank_of(cluster, settings_of(in_s3))
            rank.info()
            assert store.counts["damaged"] >= 1, "the index came as it is"
            before = store.counts["damaged"]
            assert rank.samples(np.arange(3)).sample_ids.tolist() == [0, 1, 2]
            assert store.counts["damaged"] == before + 3, "single samples came as they are"
            batches = whole_epoch(rank, 0)
            assert sorted(ids_of(batches)) == list(range(NUM_SAMPLES)), "not every sample came exactly once"
            assert store.counts["damaged"] > before + 20, "chunks came as they are"
            came = b"".join(payload.tobytes() for batch in batches for payload in batch.payloads)
            assert all(content in came for content in packed[1].values()), "a sample came with wrong bytes"


@pytest.mark.parametrize(("policy", "most_reads"), [("redox", 1), ("planned", 8)])
def test_concurrent_requests_share_refills(
    s3_server: S3Server, in_s3: str, tmp_path: Path, policy: str, most_reads: int
) -> None:
    """264 samples are asked for, with a store that takes 0.3 s an answer. ``redox`` reads neighbours together and once.
    Where an epoch is planned, what a cold job's first batches ask for comes ahead of whole chunks."""
    with gate(s3_server.endpoint_url, "--delay-seconds", "0.3") as endpoint:
        environment = s3_server.environment | {"AWS_ENDPOINT_URL": endpoint}
        with LocalCluster(1, tmp_path, {"memory_bytes": "16MiB", "pinned_fraction": 0}, environment) as cluster:
            # In order: the first 64 positions are the first 4 chunks of 16.
            job = settings_of(in_s3, policy=policy, shuffle=False, prefetch_window=0, memory_bytes=8_000_000)
            ranks = [rank_of(cluster, job) for _ in range(6)]
            ranks[0].info()
            before = metric(cluster.pod_urls[0], "refill_store_requests_total", operation="read_range")
            positions = [np.arange(64), np.arange(64), np.arange(8, 56), np.arange(0, 64, 2), np.arange(63, -1, -1)]
            with ThreadPoolExecutor(len(positions)) as pool:
                answers = list(pool.map(lambda rank, asked: rank.batch(0, asked), ranks[1:], positions))
            reads = metric(cluster.pod_urls[0], "refill_store_requests_total", operation="read_range") - before
            for asked, answer in zip(positions, answers, strict=True):
                assert answer.sample_ids.tolist() == asked.tolist()
            # What two askers want at once goes to the first; the other one reads single samples again only when
            # they have left the recent memory, which holds 400 kB here.
            assert 0 < reads <= most_reads, (
                f"4 neighbours were asked for by 5 at once, and the store was asked {reads:.0f} times"
            )


def damage_in(rank: Any, length: int) -> tuple[list[SampleDamaged], list[int]]:
    """Ask for the whole epoch, and where a batch fails, for its positions one by one: (errors, samples that came)."""
    errors, ids = [], []
    for start in range(0, length, 10):
        positions = np.arange(start, min(start + 10, length))
        try:
            ids += rank.batch(0, positions).sample_ids.tolist()
            continue
        except SampleDamaged:
            pass
        for position in positions:
            try:
                ids += rank.batch(0, np.array([position])).sample_ids.tolist()
            except SampleDamaged as error:
                errors.append(error)
    return errors, ids


@pytest.mark.parametrize(("home", "policy"), [pytest.param(1, "redox", marks=pytest.mark.variant), (2, "planned")])
def test_flipped_bytes_are_named_and_the_rest_comes(
    three_pods: LocalCluster, damaged: Path, home: int, policy: str
) -> None:
    data = bytearray(damaged.read_bytes())
    for place in (1000, len(data) // 2):
        data[place] ^= 0xFF
    damaged.write_bytes(data)
    job = settings_of(dataset_url(damaged), policy=policy)
    spec, url = JobSpec.from_dict(job), three_pods.pod_urls[home]
    rank = kind_of(spec)(url, spec, 0, url, 5)
    errors, ids = damage_in(rank, NUM_SAMPLES)
    try:
        assert len(errors) == 2, f"2 samples are damaged, and {len(errors)} errors came"
        for error, place in zip(
            sorted(errors, key=lambda error: error.details["start"]), (1000, len(data) // 2), strict=True
        ):
            assert error.details["start"] <= place < error.details["end"], "the byte range does not hold the damage"
            assert damaged.name in error.message
            assert f"sample {error.details['sample']}, bytes {error.details['start']}-{error.details['end']}" in str(
                error
            )
        assert len(ids) == len(set(ids)), "a sample came twice"
        lost = {error.details["sample"] for error in errors}
        assert set(ids) == set(range(NUM_SAMPLES)) - lost, "a sample that is not damaged did not come"
        assert metric(three_pods.pod_urls[0], "refill_resident_bytes", kind="in_flight") == 0
        assert sum(metric(url, "refill_resident_bytes", kind="abstract") for url in three_pods.pod_urls) == 0
    finally:
        end(three_pods, job)


def test_a_truncated_blob(three_pods: LocalCluster, damaged: Path) -> None:
    size = damaged.stat().st_size
    with damaged.open("r+b") as file:
        file.truncate(size // 2)
    job = settings_of(dataset_url(damaged), policy="planned")
    rank = rank_of(three_pods, job)
    errors, ids = damage_in(rank, NUM_SAMPLES)
    try:
        assert errors
        assert all(error.details["end"] > size // 2 for error in errors), "an error names bytes that are there"
        assert f"the blob ends at byte {size // 2}" in errors[0].message
        lost = {error.details["sample"] for error in errors}
        assert len(lost) == len(errors), "one sample was refused twice"
        assert sorted(ids) == sorted(set(range(NUM_SAMPLES)) - lost), "a sample that is there did not come once"
    finally:
        end(three_pods, job)


@pytest.mark.parametrize("policy", ["redox", "planned"])
def test_a_batch_with_a_damaged_sample_loses_no_memory(three_pods: LocalCluster, damaged: Path, policy: str) -> None:
    data = bytearray(damaged.read_bytes())
    data[1000] ^= 0xFF
    damaged.write_bytes(data)
    job = settings_of(dataset_url(damaged), policy=policy)
    rank = rank_of(three_pods, job)
    failed = []
    for start in range(0, NUM_SAMPLES, 50):
        try:
            rank.batch(0, np.arange(start, start + 50))
        except SampleDamaged as error:
            failed.append((start, error))
    try:
        assert len(failed) == 1, "one sample is damaged: one batch fails"
        start, first = failed[0]
        with pytest.raises(SampleDamaged) as again:
            rank.batch(0, np.arange(start, start + 50))
        assert again.value.details == first.details, "asked again, another sample was named"
        resident = sum(metric(url, "refill_resident_bytes", kind="abstract") for url in three_pods.pod_urls)
        assert resident == 0, f"{resident:.0f} bytes are counted as resident after the epoch"
    finally:
        end(three_pods, job)


def test_a_killed_pod_is_named_after_the_timeout(packed: Packed, tmp_path: Path) -> None:
    with LocalCluster(3, tmp_path, {"memory_bytes": "4MiB", "pinned_fraction": 0}) as cluster:
        job = settings_of(packed[0], policy="redox")
        rank = rank_of(cluster, job, timeout_seconds=1)
        ids = ids_of([rank.batch(0, np.arange(start, start + 50)) for start in range(0, 400, 50)])
        cluster.kill(2)
        started, lost = time.monotonic(), None
        for start in range(400, NUM_SAMPLES, 50):
            try:
                ids += rank.batch(0, np.arange(start, start + 50)).sample_ids.tolist()
            except PodUnreachable as error:
                lost = error
                break
        assert lost is not None, "a third of the dataset is on a killed pod, and nobody noticed"
        assert "pod 2" in lost.message
        assert cluster_peer_url(cluster, 2) in lost.message
        assert time.monotonic() - started < 60, "far longer than the client's timeout"
        assert len(ids) == len(set(ids)), "samples came twice"
        cluster.kill(0)
        with pytest.raises(PodUnreachable, match=cluster.pod_urls[0]):
            rank.batch(0, np.arange(10))


def test_an_answer_that_is_lost_is_given_again(three_pods: LocalCluster, packed: Packed) -> None:
    """The client goes away while the pod works for it; asked again it gets the same, and the epoch is whole."""
    job = settings_of(packed[0], policy="redox")
    rank = rank_of(three_pods, job)
    home = rank.home
    parts = urlsplit(home)
    for start in range(0, 500, 50):
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
        body = BatchRequest(0, 0, np.arange(start, start + 50)).encode()
        connection.request("POST", f"/v1/jobs/{job['name']}/batch", body)
        connection.close()
    first = ids_of(whole_epoch(rank, 0))
    assert sorted(first) == list(range(NUM_SAMPLES)), "not every sample exactly once"
    assert ids_of(whole_epoch(rank, 0, batch=50)) == first
    end(three_pods, job)


def test_a_job_ended_under_its_ranks(three_pods: LocalCluster, packed: Packed) -> None:
    """Ended by somebody while ranks ask: an error of ours for each, no hang, no status 500."""
    job = settings_of(packed[0])
    begun = threading.Barrier(4)

    def run(_: int) -> Exception | None:
        rank = rank_of(three_pods, job, timeout_seconds=2)
        rank.batch(0, np.arange(10))
        begun.wait(10)
        try:
            for epoch in range(100):
                whole_epoch(rank, epoch)
        except RefillError as error:
            return error
        return None

    with ThreadPoolExecutor(3) as pool:
        ends = [pool.submit(run, i) for i in range(3)]
        begun.wait(10)
        end(three_pods, job)
        errors = [each.result(30) for each in ends]
    assert all(isinstance(error, JobLost) for error in errors), errors
    assert metric(three_pods.pod_urls[0], "refill_resident_bytes", kind="in_flight") == 0
    end(three_pods, job)


def dataset_url(blob: Path) -> str:
    """The URL of the dataset that a copied blob belongs to."""
    folder = next(parent for parent in blob.parents if parent.name == "dataset")
    return folder.as_uri()


def cluster_peer_url(cluster: LocalCluster, pod: int) -> str:
    return f"http://127.0.0.1:{cluster.peer_ports[pod]}"
