"""Samplers of one's own on real pods, policy ``planned``: what they list comes in that order, whatever becomes of pods;
and loops go on in the midst of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.job_ranks import Packed, cluster_of, exact_receipt, settings_of
from tests.integration.test_divided_samplers import EverySecond
from tests.integration.test_planned_loops import dataset_at, ids_of
from tests.pod_fixtures import NUM_SAMPLES
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

import refill
from refill.errors import InvalidInput, SamplesSkipped
from refill_service.demo.local_cluster import LocalCluster

BATCH = 50


class Remembers(Sampler[int]):
    """A sampler, and what it has listed: what comes is to be just that."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.lists = inner, list[list[int]]()

    @property
    def generator(self) -> Any:
        return getattr(self.inner, "generator", None)

    def __len__(self) -> int:
        return len(self.inner)

    def __iter__(self) -> Iterator[int]:
        self.lists.append(list(self.inner))
        return iter(self.lists[-1])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


SAMPLERS: dict[str, Callable[[int], Any]] = {
    "weights": lambda seed: WeightedRandomSampler([1.0, 9.0] * (NUM_SAMPLES // 2), 700, generator=seeded(seed)),
    "a subset": lambda seed: SubsetRandomSampler(range(seed, NUM_SAMPLES, 3), generator=seeded(seed)),
    "all": lambda seed: RandomSampler(range(NUM_SAMPLES), generator=seeded(seed)),
    "in order": lambda seed: SequentialSampler(range(NUM_SAMPLES)),
}


def loader_of(cluster: LocalCluster, job: dict[str, Any], inner: Any, make: Any = DataLoader, **more: Any) -> Any:
    dataset = dataset_at(cluster, job, order="explicit", **more)
    sampler = refill.TraceSampler(dataset, inner)
    return make(dataset, batch_size=BATCH, sampler=sampler, num_workers=2, collate_fn=list)


@pytest.mark.parametrize(
    "kind", ["weights", *(pytest.param(kind, marks=pytest.mark.variant) for kind in ("a subset", "all", "in order"))]
)
def test_what_a_sampler_lists_comes_in_its_order(three_pods: LocalCluster, packed: Packed, kind: str) -> None:
    """Two ranks, and two epochs; no order is warned of (warnings are errors)."""
    job = settings_of(packed[0], num_epochs=2)
    inner = [Remembers(SAMPLERS[kind](rank)) for rank in range(2)]
    loaders = [loader_of(three_pods, job, each, rank=rank, world_size=2) for rank, each in enumerate(inner)]
    for epoch in range(2):
        assert [ids_of(loader) for loader in loaders] == [each.lists[epoch] for each in inner]
        assert exact_receipt(three_pods, job, epoch)["planned"] == sum(len(each.lists[epoch]) for each in inner)
    loaders[0].dataset.end_job()


@pytest.mark.parametrize("make", [pytest.param("timed", marks=pytest.mark.variant), "stateful"])
def test_a_loop_goes_on_at_other_pods_that_never_heard_of_its_list(packed: Packed, tmp_path: Path, make: str) -> None:
    """All pods die in the middle of epoch 0, and so does the loop. Another number of pods starts; the epochs are those
    that would have come."""
    job = settings_of(packed[0], num_epochs=2, world_size=1)

    def loader(cluster: LocalCluster) -> Any:
        if make == "stateful":
            return loader_of(cluster, job, SAMPLERS["weights"](4), StatefulDataLoader)
        found = loader_of(cluster, job, SAMPLERS["weights"](4))
        return refill.timed(found, found.dataset)

    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    expected = Remembers(SAMPLERS["weights"](4))
    listed = [list(expected), list(expected)]
    with cluster_of(before, 2) as cluster:
        loop = loader(cluster)
        came = ids_of(islice(loop, 6))
        cluster.kill(0)
        cluster.restart(0)
        state = loop.state_dict()
        torch.save(state, tmp_path / "state")
    with cluster_of(after, 3) as cluster:
        loop = loader(cluster)
        loop.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
        came += ids_of(loop)
        assert came == listed[0]
        assert ids_of(loop) == listed[1]
        exact_receipt(cluster, job, 1)


def test_a_state_has_the_list_of_its_loop_and_not_that_of_a_look(three_pods: LocalCluster, packed: Packed) -> None:
    """A look within the loop has the sampler list others, and so does an epoch that is set there."""
    job = settings_of(packed[0], world_size=1)
    loops, inner = [], Remembers(SAMPLERS["all"](4))
    for each in (inner, SAMPLERS["all"](5)):
        loader = loader_of(three_pods, job, each)
        loops.append(refill.timed(loader, loader.dataset))
    came = []
    for number, batch in enumerate(loops[0]):
        came += ids_of([batch])
        if number == 1:
            next(iter(loops[0]))
            looked = loops[0].state_dict()
            loops[0].sampler.set_epoch(1)
            assert torch.equal(looked["sampler"]["list"], loops[0].state_dict()["sampler"]["list"])
            break
    loops[1].load_state_dict(looked)
    assert len(inner.lists) == 2
    assert came + ids_of(loops[1]) == inner.lists[0]
    loops[1].dataset.end_job()


def test_a_rank_goes_on_from_the_state_of_rank_0(three_pods: LocalCluster, packed: Packed) -> None:
    """It lists its own samples again, as they were."""
    job = settings_of(packed[0], world_size=2)
    state = None
    for take, first in ((3, 0), (None, 3)):
        for rank in (1, 0):
            inner = Remembers(SAMPLERS["a subset"](rank))
            loader = loader_of(three_pods, job, inner, rank=rank)
            loop = refill.timed(loader, loader.dataset)
            if state is not None:
                loop.load_state_dict(state)
            came = ids_of(islice(loop, take))
            whole = list(SAMPLERS["a subset"](rank))
            assert came == whole[first * BATCH : None if take is None else take * BATCH]
            last = loop.state_dict()
        state = last


def test_what_divides_a_list_a_second_time_is_told_so(three_pods: LocalCluster, packed: Packed) -> None:
    job = settings_of(packed[0], world_size=1)
    dataset = dataset_at(three_pods, job, order="explicit")
    sampler = refill.TraceSampler(dataset, SAMPLERS["all"](1))
    batches = EverySecond(torch.utils.data.BatchSampler(sampler, BATCH, drop_last=False))
    with pytest.raises(SamplesSkipped, match="asks for a part of its positions only"):
        ids_of(DataLoader(dataset, batch_sampler=batches, collate_fn=list))


def test_a_state_without_the_list_is_refused(three_pods: LocalCluster, packed: Packed) -> None:
    job = settings_of(packed[0], world_size=1)
    loader = loader_of(three_pods, job, SAMPLERS["all"](1))
    loop = refill.timed(loader, loader.dataset)
    ids_of(islice(loop, 2))
    state = loop.state_dict()
    del state["sampler"]["list"]
    with pytest.raises(InvalidInput, match="it does not list the 1000 samples of epoch 0"):
        loop.load_state_dict(state)


def test_draws_by_importance_come_as_drawn_and_a_loop_goes_on_in_the_midst_of_them(
    three_pods: LocalCluster, packed: Packed
) -> None:
    """Half of the samples has losses that are high, and comes more often from the second epoch on."""
    job = settings_of(packed[0], world_size=1)

    def loop_of() -> tuple[Any, Any]:
        dataset = dataset_at(three_pods, job)
        sampler = refill.ImportanceSampler(dataset)
        return sampler, refill.timed(DataLoader(dataset, BATCH, sampler=sampler, collate_fn=list), dataset)

    sampler, loop = loop_of()
    came: dict[int, list[int]] = {}
    for epoch in range(2):
        sampler.set_epoch(epoch)
        came[epoch] = []
        for number, batch in enumerate(loop):
            ids = ids_of([batch])
            came[epoch] += ids
            sampler.update(ids, losses=torch.tensor([1.0 + (each % 2) for each in ids]))
            if (epoch, number) == (1, 8):
                state = loop.state_dict()
        assert came[epoch] == sampler.listed.tolist()
        exact_receipt(three_pods, job, epoch)
    odd = [sum(each % 2 for each in came[epoch]) / NUM_SAMPLES for epoch in range(2)]
    assert odd[1] > odd[0] + 0.02
    sampler, loop = loop_of()
    loop.load_state_dict(state)
    assert ids_of(loop) == came[1][9 * BATCH :]
    with pytest.raises(InvalidInput, match="the state is of rank 1 in the midst of epoch 1, whose draws"):
        loop_of()[1].load_state_dict(state | {"rank": 1})


def test_a_part_of_the_dataset_is_shuffled_by_the_seed(three_pods: LocalCluster, packed: Packed) -> None:
    """Two ranks divide it, each sample once, others first in each epoch."""
    job, part = settings_of(packed[0], world_size=2), list(range(0, NUM_SAMPLES, 4))
    loaders: list[Any] = []
    for rank in range(2):
        subset = torch.utils.data.Subset(dataset_at(three_pods, job, rank=rank), part)
        sampler = refill.EpochSampler(subset)
        loaders.append(DataLoader(subset, BATCH, sampler=sampler, num_workers=2, collate_fn=list))
    came = []
    for epoch in range(2):
        for loader in loaders:
            loader.sampler.set_epoch(epoch)
        came.append([ids_of(loader) for loader in loaders])
        assert sorted(came[epoch][0] + came[epoch][1]) == part
    assert came[0] != came[1]
