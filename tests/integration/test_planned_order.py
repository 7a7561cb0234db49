"""Policy ``planned`` in real pods: what comes is the order that ``refill plan`` says, whatever happens to pods, and for
any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.integration.job_ranks import BATCH, Packed, Ranks, cluster_of, exact_receipt, settings_of
from tests.pod_fixtures import NUM_SAMPLES, rank_of

from refill.errors import JobConflict, JobLost
from refill.protocol.job_spec import JobSpec
from refill.protocol.plan_settings import PlanSettings
from refill_service import cli
from refill_service.demo.local_cluster import LocalCluster

SEED = 11


def trained(cluster: LocalCluster, dataset: str, world_size: int, killed: int | None = None, **settings: Any) -> Ranks:
    """Two epochs; one pod is killed within each and comes back. Receipts are exact."""
    job = settings_of(dataset, policy="planned", seed=SEED, world_size=world_size, **settings)
    ranks = Ranks(cluster, job)
    for epoch in range(2):
        half = ranks.length // 2 // BATCH * BATCH
        ranks.ask(epoch, 0, half)
        if killed is not None:
            cluster.kill(killed)
            cluster.restart(killed)
        ranks.ask(epoch, half, ranks.length)
        ranks.check(epoch)
        exact_receipt(cluster, job, epoch)
    httpx.delete(f"{cluster.pod_urls[0]}/v1/jobs/{job['name']}").raise_for_status()
    return ranks


def in_order(ranks: Ranks, epoch: int) -> list[int]:
    """What ranks in step got, one after another, without what fills the last step up."""
    num_ranks = len(ranks.ranks)
    found = [ranks.samples[epoch, place % num_ranks, place // num_ranks] for place in range(NUM_SAMPLES)]
    assert sorted(found) == list(range(NUM_SAMPLES))
    return found


def of_command(dataset: str, settings: PlanSettings, epoch: int, folder: Path) -> list[int]:
    """What ``refill plan`` writes for the same settings."""
    path = folder / f"order {epoch}"
    arguments = ["plan", "--dataset", dataset, "--chunk-size", str(settings.chunk_size), "--seed", str(settings.seed)]
    arguments += ["--memory-bytes", str(settings.memory_bytes), "--shares", str(settings.num_shares)]
    arguments += ["--run", str(settings.run), "--epoch", str(epoch), "--dump", str(path)]
    assert cli.main([*arguments, *(["--first"] if epoch == 0 else [])]) == 0
    return [int(line) for line in path.read_text().splitlines()]


def plan_of(ranks: Ranks) -> PlanSettings:
    info = ranks.ranks[0].info()
    given = JobSpec.from_dict(info["spec"]).settings_of_policy()
    found = PlanSettings(
        info["fingerprint"],
        NUM_SAMPLES,
        info["chunk_size"],
        given["shares"],
        given["plan_bytes"],
        given["run"],
        SEED,
    )
    assert found.plan_id == info["plan_id"]
    return found


def test_what_comes_is_the_order_that_the_command_says(packed: Packed, tmp_path: Path) -> None:
    with cluster_of(tmp_path, 3) as cluster:
        whole = trained(cluster, packed[0], 2)
        settings = plan_of(whole)
        broken = trained(cluster, packed[0], 2, killed=1)
    for epoch in range(2):
        assert in_order(whole, epoch) == of_command(packed[0], settings, epoch, tmp_path)
    assert whole.samples == broken.samples, "a pod that was killed changed what came"


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.variant), 8])
def test_global_steps_are_the_same_for_any_number_of_ranks(
    three_pods: LocalCluster, packed: Packed, num_ranks: int
) -> None:
    """The same global batch on as many as on one: elastic determinism."""
    of_one, ranks = (trained(three_pods, packed[0], number) for number in (1, num_ranks))
    for epoch in range(2):
        assert in_order(ranks, epoch) == in_order(of_one, epoch), f"epoch {epoch}"


@pytest.mark.variant
def test_all_pods_may_come_back_with_other_memory(packed: Packed, tmp_path: Path) -> None:
    """They would plan otherwise, but clients know what the job's plan is."""
    with cluster_of(tmp_path, 2) as cluster:
        job = settings_of(packed[0], policy="planned", seed=SEED, world_size=2, memory_bytes=0)
        ranks = Ranks(cluster, job)
        plan_id = ranks.ranks[0].info()["plan_id"]
        ranks.ask(0, 0, 100)
        for pod in range(2):
            cluster.kill(pod)
        for pod in range(2):
            cluster.restart(pod, wait=pod == 1, settings={"memory_bytes": "2MiB"})
        ranks.ask(0, 0, ranks.length)  # what had come comes again, the same
        ranks.check(0)
        exact_receipt(cluster, job, 0)
        others = rank_of(cluster, job).info()
        assert others["plan_id"] == plan_id
        assert rank_of(cluster, job | {"name": "another"}).info()["plan_id"] != plan_id


def test_what_contradicts_a_plan_is_refused(three_pods: LocalCluster, packed: Packed) -> None:
    job = settings_of(packed[0], policy="planned")
    first = rank_of(three_pods, job)
    chosen = first.info()["spec"]["policy_settings"]
    other = job | {"policy_settings": {"plan_bytes": chosen["plan_bytes"] + 1}}
    with pytest.raises(JobConflict, match="policy_settings plan_bytes: yours is"):
        rank_of(three_pods, other).info()
    same = job | {"policy_settings": {"plan_bytes": chosen["plan_bytes"]}}
    assert rank_of(three_pods, same).info()["plan_id"] == first.info()["plan_id"]
    first.end_job()


def test_who_goes_on_after_the_end_of_its_job_reads_one_error(three_pods: LocalCluster, packed: Packed) -> None:
    rank = rank_of(three_pods, settings_of(packed[0], policy="planned"))
    rank.batch(0, np.arange(10))
    rank.end_job()
    with pytest.raises(JobLost, match="was ended") as lost:
        rank.batch(0, np.arange(10, 20))
    # That no pod knows the job any more is not told as an error of its own.
    assert lost.value.__context__ is None or lost.value.__suppress_context__


def test_what_loaders_ask_for_at_once_is_left_beside_the_plan(
    three_pods: LocalCluster, packed: Packed, caplog: pytest.LogCaptureFixture
) -> None:
    """Known with the registration: the plan is for less. Known later: the plan stays, and a warning says so. Neither
    changes the plan for who comes later."""
    job = settings_of(packed[0], policy="planned")
    late, early = (rank_of(three_pods, job | {"name": f"{job['name']}-{when}"}) for when in ("late", "early"))
    memory = late.info()["plan_memory"]
    assert 0.7 * memory["samples_bytes"] < memory["planned_bytes"] <= 0.8 * memory["samples_bytes"]
    sample_bytes = late.info()["total_bytes"] / NUM_SAMPLES
    batch = round(0.35 * memory["samples_bytes"] * 3 / job["world_size"] / sample_bytes / 4)
    early.asks_in_batches(batch, 4)
    found = early.info()["plan_memory"]
    assert found["planned_bytes"] < 0.6 * found["samples_bytes"]
    assert "loaders ask for" not in caplog.text
    plan_id = late.info()["plan_id"]
    late.asks_in_batches(batch, 4)
    (said,) = [record.message for record in caplog.records if "loaders ask for" in record.message]
    assert said.startswith(f"job {job['name']}-late: loaders ask for ")
    assert "give it plan_bytes for" in said
    again = rank_of(three_pods, job | {"name": f"{job['name']}-late"})
    again.asks_in_batches(1)
    assert again.info()["plan_id"] == plan_id == late.info()["plan_id"]
    for each in (late, early):
        each.end_job()


def test_a_job_that_names_no_chunk_size_has_what_its_memory_allows(three_pods: LocalCluster, packed: Packed) -> None:
    """Small datasets: 8. What a job names stands."""
    job = settings_of(packed[0], policy="planned")
    for given, expected in ((0, 8), (16, 16)):
        rank = rank_of(three_pods, job | {"name": f"{job['name']}-{given}", "chunk_size": given})
        assert rank.info()["chunk_size"] == rank.info()["plan"]["chunk_size"] == expected
        rank.end_job()


def test_without_shuffling_samples_come_as_they_are_stored(packed: Packed, tmp_path: Path) -> None:
    with cluster_of(tmp_path, 3) as cluster:
        ranks = trained(cluster, packed[0], 2, killed=1, shuffle=False)
    for epoch in range(2):
        assert in_order(ranks, epoch) == list(range(NUM_SAMPLES))
