"""Training loops of policy ``planned`` on real pods: while pods stand still or are gone, what commands and metrics say
of them, and once more under the same name."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.integration.job_ranks import cluster_of, exact_receipt, receipt, settings_of
from tests.integration.test_top import rows, top
from tests.pod_fixtures import NUM_SAMPLES, metric, rank_of
from tests.waiting import until
from torch.utils.data import DataLoader

import refill
from refill.pods.planned_connection import PlannedConnection
from refill.protocol.job_spec import JobSpec
from refill_service.cli import main
from refill_service.demo.local_cluster import LocalCluster

Packed = tuple[str, dict[str, bytes]]
BATCH = 50


def dataset_at(cluster: LocalCluster, job: dict[str, Any], form: Any = refill.CacheDataset, **more: Any) -> Any:
    arguments = {"job": job["name"], "policy": "planned", "rank": 0, "world_size": 1}
    return form(cluster.pod_urls[0], **(arguments | {name: job[name] for name in job if name != "name"} | more))


def ids_of(batches: Any) -> list[int]:
    return [sample["__id__"] for batch in batches for sample in batch]


def shown(capsys: pytest.CaptureFixture[str], *command: str) -> tuple[int, str]:
    status = main(list(command))
    return status, capsys.readouterr().out


def test_loops_go_on_while_a_pod_stands_still_and_when_it_is_gone(
    packed: Packed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks, two loader workers each. The home of rank 1 is paused in epoch 0, and killed in epoch 1."""
    job = settings_of(packed[0], num_epochs=2, seed=3)
    with cluster_of(tmp_path, 3) as cluster:
        datasets = [dataset_at(cluster, job, rank=rank, world_size=2) for rank in range(2)]
        loaders = [
            DataLoader(each, BATCH, sampler=refill.EpochSampler(each), num_workers=2, collate_fn=list)
            for each in datasets
        ]
        for epoch, (away, back) in enumerate([(cluster.pause, cluster.resume), (cluster.kill, None)]):
            loops = [iter(loader) for loader in loaders]
            came = [ids_of(islice(loop, 4)) for loop in loops]
            away(1)
            for loop, ids in zip(loops, came, strict=True):
                ids += ids_of(loop)  # all of it, while the pod is away
            assert sorted(came[0] + came[1]) == list(range(NUM_SAMPLES)), f"epoch {epoch}"
            if back is not None:
                back(1)
            exact_receipt(cluster, job, epoch)
        for pod in (0, 2):
            found = receipt(cluster, job, 0, pod)
            assert (found["received"], found["ranks"]) == (NUM_SAMPLES, {"0": 500, "1": 500}), f"pod {pod}"
        url = cluster.pod_urls[2]
        status, text = shown(capsys, "receipt", job["name"], "1", "--url", url)
        assert status == 0, text
        lines = [line.split()[:2] for line in text.splitlines()]
        assert text.splitlines()[0].endswith(": exact")
        assert "policy planned, seed 3" in text.splitlines()[0]
        expected = {"planned": "1,000", "received": "1,000", "unconfirmed": "0", "repeats": "0"}
        assert expected.items() <= dict(lines[1:]).items()
        assert [line.split() for line in text.splitlines()[-2:]] == [["rank", "0", "500"], ["rank", "1", "500"]]
        assert rows(top(url), "job")[job["name"]][2] == "100%"


@pytest.mark.parametrize("paused", [0, 2])
def test_a_job_begins_and_ends_while_a_pod_stands_still(packed: Packed, tmp_path: Path, paused: int) -> None:
    """It is not waited for as long as another pod may take for an answer, though it be the first."""
    job = JobSpec.from_dict(settings_of(packed[0], policy="planned", world_size=1))
    with cluster_of(tmp_path, 3, peer_timeout_seconds=600) as cluster:
        cluster.pause(paused)
        rank = PlannedConnection(cluster.pod_urls[1], job, 0, None, 40)
        assert len(rank.batch(0, np.arange(100)).sample_ids) == 100
        rank.end_job()
        cluster.resume(paused)


def test_what_commands_and_metrics_say_of_a_job_that_goes_on_from_a_checkpoint(
    three_pods: LocalCluster, packed: Packed, capsys: pytest.CaptureFixture[str]
) -> None:
    job = settings_of(packed[0], num_epochs=2, policy="planned", world_size=2)
    rank = rank_of(three_pods, job)
    rank.batch(0, np.arange(100))
    url = three_pods.pod_urls[1]
    until(lambda: receipt(three_pods, job, 0)["received"] == 100, "what was received")
    status, text = shown(capsys, "receipt", job["name"], "0", "--url", url)
    assert (status, ": still running" in text) == (1, True)
    rank.deals(0, 200, 0)
    rank.batch(0, np.arange(400))
    until(lambda: receipt(three_pods, job, 0)["received"] == 600, "what the checkpoint has, and what came since")
    _, text = shown(capsys, "receipt", job["name"], "0", "--url", url)
    assert any(line.split()[:2] == ["checkpoint", "200"] for line in text.splitlines()), text
    rank.batch(1, np.arange(20))
    _, text = shown(capsys, "receipt", job["name"], "0", "--url", url)
    assert ": NOT ALL CONFIRMED" in text.splitlines()[0]
    assert any(line.split()[:2] == ["unconfirmed", "400"] for line in text.splitlines()), text

    listed = {each["name"]: each for each in json.loads(shown(capsys, "jobs", "--json", "--url", url)[1])}
    found = listed[job["name"]]
    assert (found["policy"], found["epoch"], found["world_size"]) == ("planned", 1, 2)
    rank.report(0.5, 520, 1000)
    labels = {"training_job": job["name"]}
    for name in ("refill_takes_total", "refill_bytes_read_total", "refill_share_bytes", "refill_job_memory_bytes"):
        assert all(metric(pod, name, **labels) > 0 for pod in three_pods.pod_urls), name
    total = sum(metric(pod, "refill_takes_total", **labels) for pod in three_pods.pod_urls)
    assert total == 520, "each position is taken once"
    assert metric(rank.home, "refill_client_samples_total", rank="0", **labels) == 520
    assert max(metric(pod, "refill_epoch", **labels) for pod in three_pods.pod_urls) == 1
    rank.end_job()
    assert job["name"] not in shown(capsys, "jobs", "--json", "--url", url)[1]
    status, text = shown(capsys, "receipt", job["name"], "0", "--url", url)
    assert (status, ", ended): NOT ALL CONFIRMED" in text) == (1, True), "its receipt stays"
    assert metric(url, "refill_takes_total", **labels) == 0
    runs = json.loads(shown(capsys, "jobs", "--ended", "--json", "--url", url)[1])
    (run,) = (each for each in runs if each["job"] == job["name"])
    assert (run["run"], run["first_epoch"], run["last_epoch"]) == (rank.plan_id, 0, 1)
    again = rank_of(three_pods, job | {"seed": 5})
    again.batch(0, np.arange(20))
    status, text = shown(capsys, "receipt", job["name"], "0", "--url", url, "--run", rank.plan_id[:8])
    assert (status, f"run {rank.plan_id[:8]}, ended)" in text) == (1, True), "a new run has hidden the receipt"
    again.end_job()


def test_a_cell_that_is_run_twice(three_pods: LocalCluster, packed: Packed) -> None:
    """By objects of their own, the first of which live on: each epoch is whole, and the same again."""
    job, kept = settings_of(packed[0], num_epochs=2, world_size=1), []

    def run() -> list[list[int]]:
        kept.append(dataset_at(three_pods, job))
        loader = DataLoader(kept[-1], BATCH, sampler=refill.EpochSampler(kept[-1]), num_workers=2, collate_fn=list)
        found = []
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            found.append(ids_of(loader))
        return found

    first, second = run(), run()
    assert first == second
    assert [sorted(each) for each in first] == [list(range(NUM_SAMPLES))] * 2
    kept[0].end_job()
