"""Three real pods: every sample exactly once an epoch, byte for byte, and asked again the same again."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import httpx
import numpy as np
import pytest
from tests.pod_fixtures import NUM_SAMPLES, metric, rank_of, whole_epoch
from tests.waiting import until

from refill.errors import EpochEnded, EpochNotReady, InvalidInput
from refill.formats.tar_samples import parse_members
from refill.pods.pod_connection import PodConnection
from refill.protocol.job_spec import JobSpec
from refill_service.demo.local_cluster import LocalCluster

Packed = tuple[str, dict[str, bytes]]


@pytest.fixture
def job(job: dict[str, Any]) -> dict[str, Any]:
    """Of a policy that decides as it is asked: for planned jobs see ``test_planned_order.py``."""
    return job | {"policy": "redox"}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param(
            {"refill": "random", "group_order": "interleaved", "prefetch_window": 0}, marks=pytest.mark.variant
        ),
        pytest.param({"policy": "exact", "memory_bytes": 200_000}, marks=pytest.mark.variant),
        {"memory_bytes": 200_000, "chunk_size": 8},
    ],
    ids=str,
)
def test_every_sample_once_by_concurrent_ranks(
    three_pods: LocalCluster, job: dict[str, Any], packed: Packed, settings: dict[str, Any]
) -> None:
    job |= settings | {"world_size": 3}
    received: dict[int, list[Any]] = {}

    def run(rank: int) -> None:
        received[rank] = [whole_epoch(rank_of(three_pods, job, rank), epoch) for epoch in range(2)]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for epoch in range(2):
        ids: Counter[int] = Counter()
        for rank in range(3):
            for batch in received[rank][epoch]:
                for sample_id, payload in zip(batch.sample_ids.tolist(), batch.payloads, strict=True):
                    key, members = parse_members(payload, sample_id)
                    assert bytes(members["bin"]) == packed[1][key], f"sample {sample_id} ({key}) came with other bytes"
                    ids[sample_id] += 1
        # 1,000 samples over three ranks: two positions are padding, which repeats two samples.
        assert len(ids) == NUM_SAMPLES, f"epoch {epoch}: {NUM_SAMPLES - len(ids)} samples missing"
        assert sum(ids.values()) == NUM_SAMPLES + 2
        total = httpx.get(f"{three_pods.pod_urls[1]}/v1/jobs/{job['name']}/epochs/{epoch}").json()["total"]
        assert total["takes"] == NUM_SAMPLES
        assert total["repeats"] == 2
        assert total["bytes_filled"] + total["bytes_wasted"] == total["bytes_read"]
        assert total["local"] + total["remote_memory"] + total["remote_on_demand"] == NUM_SAMPLES


def test_unshuffled_comes_in_the_order_of_the_dataset(three_pods: LocalCluster, job: dict[str, Any]) -> None:
    rank = rank_of(three_pods, job | {"shuffle": False})
    batches = whole_epoch(rank, 0)
    assert np.concatenate([batch.sample_ids for batch in batches]).tolist() == list(range(NUM_SAMPLES))
    receipt = httpx.get(f"{three_pods.pod_urls[0]}/v1/jobs/{job['name']}/epochs/0/receipt").json()
    assert (receipt["policy"], rank.info()["policy"]) == ("redox", "redox"), "another policy is named than runs"
    metrics = httpx.get(f"{three_pods.pod_urls[0]}/metrics").text
    assert f'refill_job_policy{{policy="redox",training_job="{job["name"]}"}} 1.0' in metrics


def test_drop_last_leaves_the_tail_out(three_pods: LocalCluster, job: dict[str, Any]) -> None:
    job |= {"world_size": 3, "drop_last": True}
    ids = [b.sample_ids for r in range(3) for b in whole_epoch(rank_of(three_pods, job, r), 0)]
    assert len(np.unique(np.concatenate(ids))) == len(np.concatenate(ids)) == 999


def test_asked_again_the_same_again(three_pods: LocalCluster, job: dict[str, Any]) -> None:
    """Whatever was lost: the same positions get the same samples, from another batch size or home pod too."""
    rank = rank_of(three_pods, job)
    first = whole_epoch(rank, 0)
    again = whole_epoch(rank, 0, batch=50)
    ids, payloads = ([x for b in first for x in b.sample_ids.tolist()], [bytes(p) for b in first for p in b.payloads])
    assert [x for b in again for x in b.sample_ids.tolist()] == ids
    assert [bytes(p) for b in again for p in b.payloads] == payloads
    elsewhere = PodConnection(three_pods.pod_urls[0], JobSpec.from_dict(job), 0, three_pods.pod_urls[2], 30)
    assert elsewhere.batch(0, np.arange(10)).sample_ids.tolist() == ids[:10]
    whole_epoch(rank, 1)
    assert rank.batch(0, np.arange(5)).sample_ids.tolist() == ids[:5], "the epoch before can still be asked again"
    assert three_pods_total(three_pods, job, 0)["takes"] == NUM_SAMPLES


def test_a_batch_asked_twice_at_the_same_time(three_pods: LocalCluster, job: dict[str, Any]) -> None:
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda: answers.append(rank_of(three_pods, job).batch(0, np.arange(200))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(answers) == 4
    assert len({tuple(answer.sample_ids.tolist()) for answer in answers}) == 1
    assert len({b"".join(answer.payloads) for answer in answers}) == 1


def test_a_rank_that_changes_its_home(three_pods: LocalCluster, job: dict[str, Any]) -> None:
    """There and back, in the middle of an epoch. What was sent ahead to one home comes by way of the other."""
    spec = JobSpec.from_dict(job)
    by_way_of = [PodConnection(url, spec, 0, url, timeout_seconds=30) for url in three_pods.pod_urls]
    ids: list[int] = []
    for i, home in enumerate([0, 1, 0, 2, 1]):
        positions = np.arange(i * 200, (i + 1) * 200, 20)
        for start in positions.tolist():
            ids += by_way_of[home].batch(0, np.arange(start, start + 20)).sample_ids.tolist()
    assert sorted(ids) == list(range(NUM_SAMPLES))
    found = httpx.get(f"{three_pods.pod_urls[0]}/v1/jobs/{job['name']}/epochs/0/receipt").json()
    assert found["exact"], found
    assert found["delivered"] == NUM_SAMPLES


def test_leaving_an_epoch_early(three_pods: LocalCluster, job: dict[str, Any]) -> None:
    """A loop that breaks off goes on with a whole next epoch; the one it left can't be taken up with new samples."""
    rank = rank_of(three_pods, job)
    rank.batch(0, np.arange(100))
    assert len(np.unique(np.concatenate([b.sample_ids for b in whole_epoch(rank, 1)]))) == NUM_SAMPLES
    with pytest.raises(EpochEnded, match="left epoch 0"):
        rank.batch(0, np.arange(200, 300))
    for epoch in (2, 3):
        whole_epoch(rank, epoch)
    with pytest.raises(EpochEnded, match="is at epoch 3, epoch 0 has ended"):
        rank.batch(0, np.arange(10))


def test_a_rank_ahead_waits_for_the_others(three_pods: LocalCluster, job: dict[str, Any]) -> None:
    job |= {"world_size": 2}
    first, second = (rank_of(three_pods, job, rank, timeout_seconds=0) for rank in range(2))
    whole_epoch(first, 0)
    with pytest.raises(EpochNotReady, match=r"epoch 1 .* waits for rank 1 to finish epoch 0"):
        first.batch(1, np.arange(32))
    whole_epoch(second, 0)
    assert len(first.batch(1, np.arange(32)).payloads) == 32


def test_explicit_traces(three_pods: LocalCluster, job: dict[str, Any]) -> None:
    """Two ranks with samplers of their own: subset and repeats are delivered as asked for, never another sample."""
    job |= {"world_size": 2, "order": "explicit"}
    traces = [np.arange(0, 600, 2), np.array([1, 3, 5, 7, 7, 7, 0])]
    ranks = [rank_of(three_pods, job, rank, timeout_seconds=0) for rank in range(2)]
    ranks[0].post_trace(0, traces[0])
    with pytest.raises(EpochNotReady, match="waits for the trace of rank 1"):
        ranks[0].batch(0, np.arange(10))
    ranks[1].post_trace(0, traces[1])
    with pytest.raises(InvalidInput, match="posted another trace"):
        ranks[1].post_trace(0, traces[0])
    received = Counter(
        sample
        for rank, trace in zip(ranks, traces, strict=True)
        for start in range(0, len(trace), 50)
        for sample in rank.batch(0, np.arange(start, min(start + 50, len(trace)))).sample_ids.tolist()
    )
    assert received == Counter(np.concatenate(traces).tolist())


def test_metrics_agree_with_what_happened(three_pods: LocalCluster, job: dict[str, Any]) -> None:
    rank = rank_of(three_pods, job)
    batches = whole_epoch(rank, 0)
    rank.report(1.5, NUM_SAMPLES, 12345)
    name, urls = job["name"], three_pods.pod_urls
    assert sum(metric(url, "refill_requests_total", training_job=name) for url in urls) == NUM_SAMPLES
    assert sum(metric(url, "refill_takes_total", training_job=name) for url in urls) == NUM_SAMPLES
    total = three_pods_total(three_pods, job, 0)
    for metric_name, count in (
        ("refill_misses_total", "misses"),
        ("refill_refills_total", "misses"),
        ("refill_bytes_read_total", "bytes_read"),
        ("refill_bytes_wasted_total", "bytes_wasted"),
    ):
        assert sum(metric(url, metric_name, training_job=name) for url in urls) == total[count] > 0, metric_name
    assert sum(metric(url, "refill_epoch_positions", training_job=name) for url in urls) == NUM_SAMPLES
    assert sum(metric(url, "refill_epoch_answered", training_job=name) for url in urls) == NUM_SAMPLES
    assert sum(metric(url, "refill_share_bytes", training_job=name) for url in urls) == rank.info()["total_bytes"]
    assert metric(urls[0], "refill_bytes_delivered_total", training_job=name) == sum(b.num_bytes for b in batches)
    used = sum(metric(url, "refill_prefetched_samples_total", training_job=name, outcome="used") for url in urls)
    assert used == total["remote_memory"] > 0
    assert metric(urls[0], "refill_client_data_wait_seconds_total", training_job=name, rank="0") == 1.5
    assert metric(urls[0], "refill_client_bytes_total", training_job=name, rank="0") == 12345
    delivered = sum(batch.num_bytes for batch in batches)
    sent = sum(metric(url, "refill_peer_sent_bytes_total", peer="0") for url in urls)
    assert sent >= delivered / 2, "what pod 0 has of others' shares"
    for kind in ("abstract", "remote", "in_flight", "recent"):
        used_bytes = sum(metric(url, "refill_resident_bytes", kind=kind) for url in urls)
        assert used_bytes <= 3 * 4 * 2**20
        if kind != "recent":
            assert used_bytes == 0, f"{kind} memory is not empty after the epoch"
    assert metric(urls[0], "refill_store_requests_total", operation="read_range") > 0
    assert metric(urls[0], "refill_store_request_seconds_count", operation="read_range") > 0


def test_receipts_of_epochs_that_are_over_are_counted(three_pods: LocalCluster, job: dict[str, Any]) -> None:
    """An epoch is over for good when the next but two begins. Of all but the first one, half was asked for."""
    rank = rank_of(three_pods, job)
    half = np.arange(NUM_SAMPLES // 2)

    def counted(outcome: str) -> float:
        labels = {"training_job": job["name"], "outcome": outcome}
        return sum(metric(url, "refill_receipt_requests_total", **labels) for url in three_pods.pod_urls)

    rank.batch(0, np.arange(NUM_SAMPLES))
    for epoch in range(1, 5):
        assert counted("missing") == 0
        rank.batch(epoch, half)
    # Receipts are made beside the requests that end their epoch.
    until(lambda: counted("missing") >= NUM_SAMPLES // 2, "the receipt of an epoch that is over")
    assert counted("missing") == NUM_SAMPLES // 2
    assert counted("delivered") >= NUM_SAMPLES * 3 // 2
    assert counted("duplicates") == 0


def three_pods_total(cluster: LocalCluster, job: dict[str, Any], epoch: int) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{cluster.pod_urls[0]}/v1/jobs/{job['name']}/epochs/{epoch}").json()["total"]
    return answer
