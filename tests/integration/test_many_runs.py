"""Runs in a row on one pod, each under a name of its own, none of them ended: the last one is as good as the first."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests import forked_processes
from tests.pod_fixtures import NUM_SAMPLES, rank_of, whole_epoch, write_files

import refill
from refill_service.datasets.pack import pack
from refill_service.demo.local_cluster import LocalCluster

POD_BYTES = 2 << 20
SHORT_RUN = Path(__file__).with_name("short_run.py")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A dataset of ten times a pod's memory: its URL."""
    source, store = tmp_path_factory.mktemp("files"), tmp_path_factory.mktemp("store")
    content = write_files(source, 3000, 7000, 7000)
    assert sum(map(len, content.values())) >= 10 * POD_BYTES
    asyncio.run(pack(str(source), store.as_uri()))
    return store.as_uri()


@pytest.fixture
def pod(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(1, tmp_path, {"memory_bytes": POD_BYTES}) as cluster:
        yield cluster


def short_run(pods: LocalCluster, dataset: str, name: str, *, is_killed: bool = False, **more: Any) -> dict[str, Any]:
    """What a process that trains for a few batches was given, once it has ended."""
    settings = {
        "url": pods.pod_urls[0],
        "arguments": {"dataset": dataset, "job": name, "decode": False, "timeout_seconds": 0} | more,
        "num_workers": 0 if is_killed else 1,
        "batches": 4,
        "is_killed": is_killed,
    }
    process, to_it, from_it = forked_processes.start_rank(SHORT_RUN, json.dumps(settings))
    with to_it, from_it:
        said = from_it.readline()
        process.wait(60)
    assert said, "the run ended without a word; what it says is above"
    found: dict[str, Any] = json.loads(said)
    return found


def jobs_of(pods: LocalCluster) -> dict[str, dict[str, Any]]:
    return {job["spec"]["name"]: job for job in httpx.get(f"{pods.pod_urls[0]}/v1/jobs").json()}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("num_runs", "is_killed"),
    [
        pytest.param(3, False, id="3 end"),
        pytest.param(100, False, id="100 end", marks=pytest.mark.variant),
        pytest.param(3, True, id="3 are killed"),
    ],
)
def test_runs_on_a_dataset_larger_than_memory_all_get_the_same(
    pod: LocalCluster, large: str, num_runs: int, is_killed: bool
) -> None:
    """Those that end say goodbye, with loader workers, too. Of those that are killed the pod sees connections close.
    None waits: ``timeout_seconds`` is 0."""
    given = [short_run(pod, large, f"run-{number}", is_killed=is_killed) for number in range(num_runs)]
    assert [run for run in given if run != given[0]] == []
    assert given[0]["samples"] == 4 * 32
    assert given[0]["memory_bytes"] == POD_BYTES - int(0.2 * POD_BYTES), "one alone has not all but what is pinned"


@pytest.mark.parametrize("num_pods", [pytest.param(1, marks=pytest.mark.variant), 3])
def test_what_a_run_leaves_is_there_for_who_goes_on(tmp_path: Path, large: str, num_pods: int) -> None:
    """A run that said goodbye in the middle of an epoch, and whose memory another one has used, is taken up again."""
    with LocalCluster(num_pods, tmp_path, {"memory_bytes": "2MiB"}) as pods:
        for policy in ("planned", "redox"):
            job = {"name": policy, "dataset": large, "policy": policy}
            assert "error" not in short_run(pods, large, policy, policy=policy)
            assert jobs_of(pods)[policy]["ranks_alive"] == 0
            other = short_run(pods, large, f"after-{policy}")
            assert other["memory_bytes"] == POD_BYTES - int(0.2 * POD_BYTES), "others don't get what nobody asks for"
            rank = rank_of(pods, job)
            samples = [sample for batch in whole_epoch(rank, 0) for sample in batch.sample_ids.tolist()]
            assert sorted(samples) == list(range(3000))
            receipt = httpx.get(f"{pods.pod_urls[0]}/v1/jobs/{policy}/epochs/0/receipt").json()
            assert receipt["exact"] or (policy == "planned" and receipt["running"]), "received is reported now and then"
            rank.end_job()


@pytest.mark.parametrize(
    "more", [{"memory_bytes": 1_500_000}, pytest.param({"policy": "exact"}, marks=pytest.mark.variant)], ids=str
)
def test_memory_that_can_not_change_is_given_back_too(pod: LocalCluster, large: str, more: dict[str, Any]) -> None:
    given = [short_run(pod, large, f"run-{number}", **more) for number in range(3)]
    assert [run for run in given if run != given[0]] == []
    again = short_run(pod, large, "run-0", **more)
    assert again == given[0], "it goes on with less than it had"


def test_who_is_refused_learns_who_holds_what(pod: LocalCluster, large: str) -> None:
    """Memory that is in use is not given to others. What nobody asks for is not what is in the way."""
    assert "error" not in short_run(pod, large, "left", memory_bytes=1_500_000)
    trains = rank_of(pod, {"name": "trains", "dataset": large, "memory_bytes": 1_500_000})
    whole_epoch(trains, 0, 1000)
    refused = short_run(pod, large, "refused", memory_bytes=1_500_000)
    assert refused["error"] == "MemoryTooSmall"
    assert "taken: trains 1,500,000 (asked for))" in refused["message"]
    assert "refill end NAME" in refused["message"]


@pytest.mark.variant
def test_two_at_a_time_share_memory_that_is_small(pod: LocalCluster, large: str) -> None:
    """Of 128 chunks, which would shuffle well, it holds a fourth: the first one keeps a half, and no more."""
    first, second = (rank_of(pod, {"name": name, "dataset": large}) for name in ("first", "second"))
    for_jobs = POD_BYTES - int(0.2 * POD_BYTES)
    first.batch(0, np.arange(100))
    assert jobs_of(pod)["first"]["memory_bytes"] == for_jobs
    second.batch(0, np.arange(100))
    for name in ("first", "second"):
        assert jobs_of(pod)[name]["memory_bytes"] == pytest.approx(for_jobs / 2, abs=2)
    for rank in (first, second):
        samples = [sample for batch in whole_epoch(rank, 0) for sample in batch.sample_ids.tolist()]
        assert sorted(samples) == list(range(3000))
    second.end_job()
    assert jobs_of(pod)["first"]["memory_bytes"] > 0.9 * for_jobs, "what the second one had"


def test_all_pods_learn_that_a_run_has_ended(tmp_path: Path, large: str) -> None:
    """Two of three pods are nobody's home. On each of them a run gets what those before had."""
    with LocalCluster(3, tmp_path, {"memory_bytes": "1MiB"}) as pods:
        for name in ("first", "second"):
            assert "error" not in short_run(pods, large, name)
        rank = rank_of(pods, {"name": "third", "dataset": large})
        rank.batch(0, np.arange(100))
        for url in pods.pod_urls:
            memory = {job["spec"]["name"]: job["memory_bytes"] for job in httpx.get(f"{url}/v1/jobs").json()}
            assert memory == {"first": 0, "second": 0, "third": (1 << 20) - int(0.2 * (1 << 20))}, url


def test_short_runs_on_a_small_dataset_fit_beside_each_other(
    packed: tuple[str, dict[str, bytes]], tmp_path: Path
) -> None:
    """Their processes live on, as a notebook's does: half of what is free, again and again, would leave the twentieth
    run a millionth of the pod."""
    dataset, files = packed
    with LocalCluster(1, tmp_path, {"memory_bytes": "1GiB", "pinned_fraction": 0}) as cluster:
        memory = []
        for number in range(100):
            rank = rank_of(cluster, {"name": f"run-{number}", "dataset": dataset}, 0)
            info = rank.info()
            memory.append(info["memory_bytes"])
            assert info["memory_bytes"] >= info["total_bytes"], f"run {number} does not fit into memory any more"
            if number in (0, 99):
                samples = [sample for batch in whole_epoch(rank, 0) for sample in batch.sample_ids.tolist()]
                assert sorted(samples) == list(range(NUM_SAMPLES))
    assert set(memory) == {memory[0]}
    assert memory[0] < 4 * sum(map(len, files.values())) + (4 << 20), "far more than the dataset needs"


@pytest.mark.parametrize("policy", ["planned", "redox"])
def test_what_a_notebook_registered_and_let_go_of_holds_no_memory(large: str, tmp_path: Path, policy: str) -> None:
    """A cell that prints ``len(loader)``, run again and again: nobody has asked for a sample, so there are no
    connections by which pods would know."""
    with LocalCluster(2, tmp_path, {"memory_bytes": POD_BYTES}) as pods:
        for number in range(8):
            dataset = refill.CacheDataset(pods.pod_urls[0], dataset=large, job=f"cell-{number}", policy=policy)
            assert len(refill.EpochSampler(dataset)) == 3000
