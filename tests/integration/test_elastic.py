"""A job that goes on from a checkpoint with other ranks: the rest of the epoch, dealt anew."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import torch.utils.data
from tests.integration.job_ranks import receipt, settings_of
from tests.pod_fixtures import NUM_SAMPLES
from tests.waiting import until
from torchdata.stateful_dataloader import StatefulDataLoader

import refill
from refill.errors import InvalidInput, JobLost
from refill_service.demo.local_cluster import LocalCluster

Packed = tuple[str, dict[str, bytes]]
BATCH = 50


def loop_of(
    cluster: LocalCluster, job: dict[str, Any], rank: int, resume: Any = None, batch: int = BATCH, workers: int = 2
) -> tuple[Any, Any]:
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
        dataset, batch, sampler=sampler, num_workers=workers, collate_fn=lambda batch: [s["__id__"] for s in batch]
    )
    return sampler, refill.timed(loader, dataset)


@pytest.mark.parametrize("after", [*(pytest.param(after, marks=pytest.mark.variant) for after in (1, 2)), 3])
def test_a_training_script_with_other_ranks(three_pods: LocalCluster, packed: Packed, after: int) -> None:
    """Loader workers had fetched ahead of the loop when it was stopped; with the same lines it goes on with others, or
    with as many. All load the state of rank 0."""
    job = settings_of(packed[0], policy="planned", world_size=2)
    loops = [loop_of(three_pods, job, rank) for rank in range(2)]
    consumed: list[int] = []
    iterators = [iter(loader) for _, loader in loops]
    for _ in range(5):
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
    assert len(repeated) <= -(NUM_SAMPLES - len(consumed)) % after
    assert len(samples - repeated) + len(consumed) == NUM_SAMPLES
    until(lambda: receipt(three_pods, job, 0)["exact"], "an exact receipt")
    later = again[0][1].state_dict()
    assert (later["epoch"], later["position"]) == (0, later["length"]), "the epoch is at its end"
    httpx.delete(f"{three_pods.pod_urls[0]}/v1/jobs/{job['name']}")


def test_other_batches_within_an_epoch_and_then_other_ranks(three_pods: LocalCluster, packed: Packed) -> None:
    """What one rank had is one run from the epoch's start, whatever its batches. Several had other ones by turns."""
    job = settings_of(packed[0], policy="planned", world_size=1)
    had, state = [], None
    for batch in (16, 12):
        loader = loop_of(three_pods, job, 0, state, batch, 0)[1]
        if state is not None:
            loader.load_state_dict(state)
        had += next(iter(loader))
        state = loader.state_dict()
    job |= {"world_size": 2}
    again = [loop_of(three_pods, job, rank, state, BATCH, 0) for rank in range(2)]
    for _, loader in again:
        loader.load_state_dict(state)
    sampler, loader = again[0]
    had += next(iter(loader))
    with pytest.raises(InvalidInput, match=r"2 ranks that had 12 .* dealt 50 at a time: .* are 3; save .* of 50,"):
        loop_of(three_pods, job | {"world_size": 3}, 0, sampler.state_after(12))
    for _, loader in again:
        loader.load_state_dict(state)
    rest = [sample for _, loader in again for batch in loader for sample in batch]
    assert len(had) == 16 + 12 + BATCH
    assert sorted({*had[:28], *rest}) == list(range(NUM_SAMPLES))
    assert len(rest) - (NUM_SAMPLES - 28) in (0, 1)
    until(lambda: receipt(three_pods, job, 0)["exact"], "an exact receipt")


@pytest.mark.parametrize(("before", "after"), [(2, 4), (2, 1)])
def test_a_state_of_the_workers_of_other_ranks_is_refused(
    three_pods: LocalCluster, packed: Packed, before: int, after: int
) -> None:
    """What a worker has yielded of one rank's part says nothing of another one's: torchtitan's loader keeps such."""
    job = settings_of(packed[0], policy="planned")

    def loader_of(world_size: int) -> StatefulDataLoader[Any]:
        dataset = refill.CacheIterableDataset(
            three_pods.pod_urls[0],
            dataset=job["dataset"],
            job=job["name"],
            rank=0,
            world_size=world_size,
            batch_size=50,
        )
        return StatefulDataLoader(dataset, batch_size=50, collate_fn=list)

    loader = loader_of(before)
    next(iter(loader))
    state = loader.state_dict()
    loader = loader_of(after)
    loader.load_state_dict(state)
    with pytest.raises(
        InvalidInput, match=f"with {before} ranks, and needs as many again, not {after}; that of refill"
    ):
        next(iter(loader))
    httpx.delete(f"{three_pods.pod_urls[0]}/v1/jobs/{job['name']}")


@pytest.mark.parametrize("given", [True, False], ids=["to the dataset", "to the loader"])
def test_other_ranks_of_a_live_policy_are_told_to_begin_the_epoch_anew(
    three_pods: LocalCluster, packed: Packed, given: bool
) -> None:
    job = settings_of(packed[0], policy="redox", world_size=2)
    _, loader = loop_of(three_pods, job, 0)
    next(iter(loader))
    state = loader.state_dict()
    other = job | {"world_size": 3}
    if not given:  # as long as the job is there, its settings stand
        httpx.delete(f"{three_pods.pod_urls[0]}/v1/jobs/{job['name']}")
    with pytest.raises((InvalidInput, JobLost), match=r"set_epoch\(0\)"):
        loop_of(three_pods, other, 0, resume=state if given else None)[1].load_state_dict(state)
    httpx.delete(f"{three_pods.pod_urls[0]}/v1/jobs/{job['name']}")
