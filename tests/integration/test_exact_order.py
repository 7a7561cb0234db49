"""Policy ``exact`` in real pods: each position gets the sample of its order, in every run, whatever happens to pods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.integration.job_ranks import Packed, Ranks, cluster_of, settings_of
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


def trained(cluster: LocalCluster, dataset: str, killed: int | None, **settings: Any) -> Run:
    """Two epochs; one pod is killed within each and comes back. What came, and the receipts."""
    job = settings_of(dataset, policy="exact", seed=SEED, **settings)
    ranks = Ranks(cluster, job)
    for epoch in range(2):
        ranks.ask(epoch, 0, ranks.length // 2)
        if killed is not None:
            cluster.kill(killed)
            cluster.restart(killed)
        ranks.ask(epoch, ranks.length // 2, ranks.length)
    url = f"{cluster.pod_urls[0]}/v1/jobs/{job['name']}"
    receipts = [httpx.get(f"{url}/epochs/{epoch}/receipt").raise_for_status().json() for epoch in range(2)]
    httpx.delete(url).raise_for_status()
    return ranks, receipts


@pytest.mark.parametrize("journal", [True, False])
def test_runs_are_equal_whether_or_not_a_pod_was_killed(packed: Packed, tmp_path: Path, journal: bool) -> None:
    with cluster_of(tmp_path, 3, journal=journal) as cluster:
        runs = [trained(cluster, packed[0], killed) for killed in (None, 1)]
    for ranks, receipts in runs:
        for epoch in range(2):
            check_order(ranks, epoch)
            assert receipts[epoch]["exact"], receipts[epoch]
    (whole, _), (broken, _) = runs
    assert whole.samples == broken.samples, "by epoch, rank and position"
    first, second = ([receipts[epoch]["digest"] for _, receipts in runs] for epoch in range(2))
    assert first[0] == first[1], "the receipts say so, too"
    assert second[0] == second[1]
    assert first[0] != second[0], "another epoch, another order"


@pytest.mark.parametrize(
    "own",
    [
        *({"eviction": eviction} for eviction in ("renewal", "earliest", "never", "fifo", "lru")),
        {"eviction": "fifo", "fetch_size": "50/50"},
    ],
    ids=lambda own: " ".join(own.values()),
)
def test_every_eviction_keeps_the_order(three_pods: LocalCluster, packed: Packed, own: dict[str, Any]) -> None:
    ranks, receipts = trained(three_pods, packed[0], None, policy_settings=own)
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
    assert first["refills"] == NUM_SAMPLES
    assert second["refills"] < 0.95 * NUM_SAMPLES
