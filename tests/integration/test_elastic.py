"""A job that goes on from a checkpoint with other ranks, or on other pods: the rest of the epoch, dealt anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch.utils.data
from tests.integration.job_ranks import cluster_of, receipt, settings_of
from tests.pod_fixtures import NUM_SAMPLES, rank_of
from tests.waiting import until

import refill
from refill.errors import EpochEnded, InvalidInput, JobConflict, JobLost, MemoryTooSmall
from refill.pod_connection import PodConnection
from refill_service.demo.local_cluster import LocalCluster

Packed = tuple[str, dict[str, bytes]]
BATCH = 20


def ask(ranks: list[PodConnection], epoch: int, first: int, end: int) -> list[int]:
    """Batch by batch, one rank after the other, as training steps do; the samples in the order in which they came."""
    samples: list[int] = []
    for start in range(first, end, BATCH):
        positions = np.arange(start, min(start + BATCH, end))
        for rank in ranks:
            samples += rank.batch(epoch, positions).sample_ids.tolist()
    return samples


def resumed(
    cluster: LocalCluster, job: dict[str, Any], incarnation: str, epoch: int, position: int
) -> list[PodConnection]:
    ranks = [rank_of(cluster, job, rank) for rank in range(job["world_size"])]
    for rank in ranks:
        rank.resume(incarnation, epoch, position)
    return ranks


def rest_of(rank: PodConnection) -> int:
    return int(rank.info()["resumed"]["samples_per_rank"])


@pytest.mark.parametrize("policy", ["drain", "redox"])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (4, 1), (1, 2)])
def test_other_ranks(three_pods: LocalCluster, packed: Packed, before: int, after: int, policy: str) -> None:
    """What was delivered after the checkpoint was consumed by nobody, and comes again."""
    job = settings_of(packed[0], world_size=before, policy=policy)
    ranks = [rank_of(three_pods, job, rank) for rank in range(before)]
    consumed = ask(ranks, 0, 0, 100)
    ask(ranks, 0, 100, 160)  # in flight, or trained on after the checkpoint was saved
    job |= {"world_size": after}
    again = resumed(three_pods, job, ranks[0].info()["incarnation"], 0, 100)
    length = rest_of(again[0])
    rest = ask(again, 0, 0, length)
    repeats = after * length - (NUM_SAMPLES - len(consumed))
    assert len(rest) == NUM_SAMPLES - len(consumed) + repeats
    assert set(rest).isdisjoint(consumed), "a sample came twice"
    assert len(set(rest) | set(consumed)) == NUM_SAMPLES, "samples are missing"
    found = receipt(three_pods, job, 0)
    assert (found["delivered"], found["duplicates"], found["unknown"], found["exact"]) == (NUM_SAMPLES, 0, 0, True)
    following = ask(again, 1, 0, again[0].info()["samples_per_rank"])
    assert len(set(following)) == NUM_SAMPLES, "the next epoch is whole"
    with pytest.raises(JobLost, match="was ended"):
        ranks[0].batch(0, np.arange(160, 180))  # left over from before
    httpx.delete(f"{three_pods.pod_urls[0]}/v1/jobs/{job['name']}")


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (3, 1)])
def test_other_pods(packed: Packed, tmp_path: Path, before: int, after: int) -> None:
    """All pods end in order and others start, on their volumes: what those that are gone had delivered is known."""
    job = settings_of(packed[0], policy="drain", world_size=2)
    with cluster_of(tmp_path, before, journal=True) as cluster:
        ranks = [rank_of(cluster, job, rank) for rank in range(2)]
        consumed = ask(ranks, 0, 0, 200)
        ask(ranks, 0, 200, 240)
        incarnation = ranks[0].info()["incarnation"]
        for pod in reversed(range(before)):  # as a StatefulSet does
            cluster.processes[pod].terminate()
            cluster.processes[pod].wait(30)
    with cluster_of(tmp_path, after, journal=True) as cluster:
        with pytest.raises(JobLost, match=f"ran on {before} pods, and there are {after} now"):
            rank_of(cluster, job).info()
        again = resumed(cluster, job, incarnation, 0, 200)
        rest = ask(again, 0, 0, rest_of(again[0]))
        assert set(rest).isdisjoint(consumed), "a sample came twice"
        assert len(set(rest) | set(consumed)) == NUM_SAMPLES, "samples are missing"
        found = receipt(cluster, job, 0)
        assert (found["delivered"], found["unknown"], found["exact"]) == (NUM_SAMPLES, 0, True)


def test_resumed_twice_and_restarted_in_between(packed: Packed, tmp_path: Path) -> None:
    job = settings_of(packed[0], policy="drain", world_size=2)
    with cluster_of(tmp_path, 2, journal=True) as cluster:
        ranks = [rank_of(cluster, job, rank) for rank in range(2)]
        consumed = ask(ranks, 0, 0, 100)
        first = resumed(cluster, job | {"world_size": 3}, ranks[0].info()["incarnation"], 0, 100)
        consumed += ask(first, 0, 0, 60)
        for pod in range(2):
            cluster.kill(pod)
            cluster.restart(pod)
        ask(first, 0, 60, 80)
        last = resumed(cluster, job | {"world_size": 1}, first[0].info()["incarnation"], 0, 60)
        consumed += ask(last, 0, 0, rest_of(last[0]))
        assert len(consumed) == len(set(consumed)) == NUM_SAMPLES
        assert receipt(cluster, job, 0)["exact"]


def test_the_same_ranks_and_pods_go_on_as_they_were(three_pods: LocalCluster, packed: Packed) -> None:
    job = settings_of(packed[0], policy="drain", world_size=2)
    ranks = [rank_of(three_pods, job, rank) for rank in range(2)]
    first = ask(ranks, 0, 0, 200)
    again = resumed(three_pods, job, ranks[0].info()["incarnation"], 0, 100)
    assert again[0].info()["incarnation"] == ranks[0].info()["incarnation"]
    assert ask(again, 0, 100, 200) == first[200:], "other samples than before the checkpoint was loaded"
    httpx.delete(f"{three_pods.pod_urls[0]}/v1/jobs/{job['name']}")


def test_what_can_not_be(three_pods: LocalCluster, packed: Packed) -> None:
    job = settings_of(packed[0], policy="drain", world_size=2, num_epochs=0)
    ranks = [rank_of(three_pods, job, rank) for rank in range(2)]
    length = ranks[0].info()["samples_per_rank"]
    incarnation = ranks[0].info()["incarnation"]
    for epoch in range(5):
        ask(ranks, epoch, 0, length)
    other = job | {"world_size": 3}
    with pytest.raises(EpochEnded, match="pods keep what they delivered in the running epoch and the one before"):
        rank_of(three_pods, other).resume(incarnation, 0, 100)
    with pytest.raises(InvalidInput, match="resume at position 0 of epoch 5"):
        rank_of(three_pods, other).resume(incarnation, 4, length)
    resumed(three_pods, other, incarnation, 4, 100)
    with pytest.raises(JobConflict, match="all must load states of the same step"):
        rank_of(three_pods, other, 1).resume(incarnation, 4, 120)
    httpx.delete(f"{three_pods.pod_urls[0]}/v1/jobs/{job['name']}")
    with pytest.raises(JobLost, match="no pod knows any more"):
        rank_of(three_pods, other).resume(incarnation, 4, 100)
    with pytest.raises(InvalidInput, match="the same ranks and pods only"):
        rank_of(three_pods, other | {"order": "explicit"}).resume(incarnation, 4, 100)


def loop_of(cluster: LocalCluster, job: dict[str, Any], rank: int, resume: Any = None) -> tuple[Any, Any]:
    """A rank's sampler and loader, as a training script makes them."""
    dataset = refill.CacheDataset(
        cluster.pod_urls[0],
        dataset=job["dataset"],
        job=job["name"],
        rank=rank,
        world_size=job["world_size"],
        chunk_size=16,
        memory_bytes=600_000,
        policy=job["policy"],
        resume=resume,
    )
    sampler = refill.EpochSampler(dataset)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=BATCH, sampler=sampler, num_workers=2, collate_fn=lambda batch: [s["__id__"] for s in batch]
    )
    return sampler, refill.timed(loader, dataset)


@pytest.mark.parametrize("after", [1, 2, 3])
@pytest.mark.parametrize("policy", ["redox", "planned"])
def test_a_training_script_with_other_ranks(three_pods: LocalCluster, packed: Packed, after: int, policy: str) -> None:
    """Loader workers had fetched ahead of the loop when it was stopped; with the same lines it goes on with others, or
    with as many. All load the state of rank 0."""
    job = settings_of(packed[0], policy=policy, world_size=2)
    loops = [loop_of(three_pods, job, rank) for rank in range(2)]
    consumed: list[int] = []
    iterators = [iter(loader) for _, loader in loops]
    for _ in range(9):
        for batches in iterators:
            consumed += next(batches)
    state = loops[0][1].state_dict()
    del iterators, loops

    job |= {"world_size": after}
    again = [loop_of(three_pods, job, rank, resume=state) for rank in range(after)]
    for sampler, loader in again:
        loader.load_state_dict(state)
        assert sampler.epoch == 0
    rest = [[sample for batch in loader for sample in batch] for _, loader in again]
    assert len({len(samples) for samples in rest}) == 1, "ranks have unequal numbers of steps"
    samples = {sample for part in rest for sample in part}
    repeated = samples & set(consumed)
    # A planned epoch is padded by its first samples, as torch's DistributedSampler does.
    assert len(repeated) <= (-(NUM_SAMPLES - len(consumed)) % after if policy == "planned" else 0)
    assert len(samples - repeated) + len(consumed) == NUM_SAMPLES
    until(lambda: receipt(three_pods, job, 0)["exact"], "an exact receipt")
    later = again[0][1].state_dict()
    assert (later["epoch"], later["position"]) == (0, later["length"]), "the epoch is at its end"
    if after != 2 and policy == "redox":
        with pytest.raises(InvalidInput, match="give it to CacheDataset"):
            loop_of(three_pods, job, 0)[1].load_state_dict(state)
    httpx.delete(f"{three_pods.pod_urls[0]}/v1/jobs/{job['name']}")


def test_what_a_pod_is_about_to_be_told_is_waited_for(packed: Packed, tmp_path: Path) -> None:
    """A pod was restarted just before: the ranks that are to go tell it what they have had, and only then it counts."""
    job = settings_of(packed[0], policy="drain", world_size=2)
    with cluster_of(tmp_path, 2, journal=False) as cluster:
        ranks = [rank_of(cluster, job, rank) for rank in range(2)]
        consumed = ask(ranks, 0, 0, 200)
        cluster.kill(1)
        cluster.restart(1)
        incarnation = ranks[0].info()["incarnation"]
        url = f"{cluster.pod_urls[1]}/v1/jobs/{job['name']}"
        assert httpx.put(url, params={"incarnation": incarnation}, json=job, timeout=30).status_code == 200
        again = resumed(cluster, job | {"world_size": 3}, incarnation, 0, 200)
        assert again[0].info()["resumed"]["unknown"] == 0
        assert set(ask(again, 0, 0, rest_of(again[0]))).isdisjoint(consumed), "a sample came twice"


def test_settings_that_can_not_be_do_not_cost_what_was_delivered(three_pods: LocalCluster, packed: Packed) -> None:
    job = settings_of(packed[0], policy="drain", world_size=2)
    ranks = [rank_of(three_pods, job, rank) for rank in range(2)]
    consumed = ask(ranks, 0, 0, 200)
    incarnation = ranks[0].info()["incarnation"]
    with pytest.raises(MemoryTooSmall):
        rank_of(three_pods, job | {"world_size": 3, "memory_bytes": 10**12}).resume(incarnation, 0, 200)
    again = resumed(three_pods, job | {"world_size": 1}, incarnation, 0, 200)
    assert again[0].info()["resumed"]["unknown"] == 0
    assert set(ask(again, 0, 0, rest_of(again[0]))).isdisjoint(consumed), "a sample came twice"
    assert receipt(three_pods, job, 0)["exact"]
    httpx.delete(f"{three_pods.pod_urls[0]}/v1/jobs/{job['name']}")


def test_who_is_left_over_does_not_get_in_the_way_of_the_others(packed: Packed, tmp_path: Path) -> None:
    """It brings back its registration to a pod that has lost all; the others are to come again, not to give up."""
    job = settings_of(packed[0], policy="drain")
    with cluster_of(tmp_path, 2, journal=False) as cluster:
        cluster.kill(0)  # who could say that the registration is over
        url = f"{cluster.pod_urls[1]}/v1/jobs/{job['name']}"
        assert httpx.put(url, params={"incarnation": "old"}, json=job, timeout=30).status_code == 503
        assert httpx.get(url).status_code == 404, "it was believed while the other pod could not contradict"
        cluster.restart(0)
        assert httpx.put(url, params={"incarnation": "old"}, json=job, timeout=30).status_code == 200
        answer = httpx.get(f"{url}/ranks/0", params={"incarnation": "new"})
        assert (answer.status_code, answer.json()["error"]) == (503, "PodRecovering")
