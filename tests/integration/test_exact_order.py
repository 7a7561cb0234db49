"""Policy ``exact`` in real pods: each position gets the sample of its order, in every run, and receipts say so."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest
from tests.integration.job_ranks import Packed, Ranks, settings_of
from tests.pod_fixtures import NUM_SAMPLES

from refill_service.cache_core.epoch_order import KeyedTraces
from refill_service.demo.local_cluster import LocalCluster

SEED = 11
Run = tuple[Ranks, list[dict[str, Any]]]


def check_order(ranks: Ranks, epoch: int) -> None:
    traces = KeyedTraces(NUM_SAMPLES, len(ranks.ranks), seed=SEED, epoch=epoch)
    for rank in range(len(ranks.ranks)):
        wanted, _ = traces.asked(rank, np.arange(ranks.length))
        assert [ranks.samples[epoch, rank, position] for position in range(ranks.length)] == wanted.tolist()


def trained(cluster: LocalCluster, dataset: str, **settings: Any) -> Run:
    """Two epochs: what came, and the receipts."""
    job = settings_of(dataset, policy="exact", seed=SEED, **settings)
    ranks = Ranks(cluster, job)
    for epoch in range(2):
        ranks.ask(epoch, 0, ranks.length)
    url = f"{cluster.pod_urls[0]}/v1/jobs/{job['name']}"
    receipts = [httpx.get(f"{url}/epochs/{epoch}/receipt").raise_for_status().json() for epoch in range(2)]
    httpx.delete(url).raise_for_status()
    return ranks, receipts


def test_runs_are_equal(three_pods: LocalCluster, packed: Packed) -> None:
    """Whatever the chunks are and however large memory is."""
    runs = [trained(three_pods, packed[0], **other) for other in ({}, {"chunk_size": 8, "memory_bytes": 300_000})]
    for ranks, receipts in runs:
        for epoch in range(2):
            check_order(ranks, epoch)
            assert receipts[epoch]["exact"], receipts[epoch]
    (one, _), (other, _) = runs
    assert one.samples == other.samples, "by epoch, rank and position"
    first, second = ([receipts[epoch]["digest"] for _, receipts in runs] for epoch in range(2))
    assert first[0] == first[1], "the receipts say so, too"
    assert second[0] == second[1]
    assert first[0] != second[0], "another epoch, another order"


@pytest.mark.parametrize(
    "own",
    [
        pytest.param({"eviction": "renewal"}, id="renewal", marks=pytest.mark.variant),
        pytest.param({"eviction": "never"}, id="never", marks=pytest.mark.variant),
        pytest.param({"eviction": "fifo", "fetch_size": "50/50"}, id="fifo 50/50", marks=pytest.mark.variant),
    ],
)
def test_every_eviction_keeps_the_order(three_pods: LocalCluster, packed: Packed, own: dict[str, Any]) -> None:
    ranks, receipts = trained(three_pods, packed[0], policy_settings=own)
    for epoch in range(2):
        check_order(ranks, epoch)
        assert receipts[epoch]["exact"], receipts[epoch]


def test_an_epoch_after_the_first_reads_less(three_pods: LocalCluster, packed: Packed) -> None:
    """Memory outlives the epoch: it has room for half of the dataset, less what ranks that are behind wait for."""
    total = sum(map(len, packed[1].values()))
    job = settings_of(
        packed[0],
        policy="exact",
        seed=SEED,
        chunk_size=1,
        memory_bytes=total // 4,
        policy_settings={"eviction": "never"},
    )
    ranks = Ranks(three_pods, job)
    for epoch in range(2):
        ranks.ask(epoch, 0, ranks.length)
    first, second = (ranks.ranks[0].epoch_counts(epoch)["total"] for epoch in range(2))
    ranks.ranks[0].end_job()
    for epoch in range(2):
        check_order(ranks, epoch)
    assert first["refills"] == NUM_SAMPLES
    assert second["refills"] < 0.95 * NUM_SAMPLES
