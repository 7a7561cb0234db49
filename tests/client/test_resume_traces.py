"""Checkpoints of a loop whose order is of a sampler of one's own."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch
from tests.client.conftest import NUM_SAMPLES
from tests.client.fake_pod import FakePod
from tests.client.loops import DatasetOf, Loader, ids_of, stored
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import refill
from refill import TraceSampler


def traced(dataset_of: DatasetOf, make: Callable[[], Any]) -> tuple[Loader, TraceSampler]:
    dataset = dataset_of(order="explicit")
    sampler = TraceSampler(dataset, make(), any_order=True)
    loader = DataLoader(dataset, batch_size=6, sampler=sampler, collate_fn=list, num_workers=2)
    return refill.timed(loader, dataset), sampler


ORDERS: dict[str, Callable[[], Any]] = {
    "random": lambda: RandomSampler(range(NUM_SAMPLES), generator=torch.Generator()),
    "weighted": lambda: WeightedRandomSampler([1.0] * NUM_SAMPLES, NUM_SAMPLES, generator=torch.Generator()),
    "distributed": lambda: DistributedSampler(range(NUM_SAMPLES), num_replicas=1, rank=0),  # type: ignore[arg-type]
    "sequential": lambda: SequentialSampler(range(NUM_SAMPLES)),
}
USUAL = [("random", 3), ("distributed", 7)]


@pytest.mark.variants("random-3")
@pytest.mark.parametrize(
    ("order", "batches"),
    [
        pytest.param(order, batches, marks=() if (order, batches) in USUAL else pytest.mark.variant)
        for order in ORDERS
        for batches in (0, 3, 7)
    ],
)
def test_an_order_of_ones_own_goes_on_and_the_next_epochs_are_as_they_would_have_been(
    pod: FakePod, dataset_of: DatasetOf, order: str, batches: int
) -> None:
    make = ORDERS[order]
    loader, sampler = traced(dataset_of, make)
    uninterrupted = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        uninterrupted.append(ids_of(loader))
    pod.traces.clear()

    loader, sampler = traced(dataset_of, make)
    consumed = ids_of(islice(loader, batches))
    state = stored(loader.state_dict())
    loader, sampler = traced(dataset_of, make)
    loader.load_state_dict(state)
    if sampler.epoch == 0:
        sampler.set_epoch(0)
        consumed += ids_of(loader)
    assert consumed == uninterrupted[0]
    for epoch in (1, 2):
        sampler.set_epoch(epoch)
        assert ids_of(loader) == uninterrupted[epoch]


@pytest.mark.parametrize("batches", [0, 2, 4])
def test_samplers_of_all_ranks_go_on_from_rank_0s_state(pod: FakePod, dataset_of: DatasetOf, batches: int) -> None:
    """Each lists what it would have listed: its own draws, and not those of rank 0."""

    def loader_of(rank: int) -> tuple[Loader, TraceSampler]:
        dataset = dataset_of(order="explicit", rank=rank, world_size=2)
        ids = range(rank, NUM_SAMPLES, 2)
        inner = SubsetRandomSampler(ids, generator=torch.Generator().manual_seed(rank))
        sampler = TraceSampler(dataset, inner)
        return refill.timed(DataLoader(dataset, 5, sampler=sampler, collate_fn=list), dataset), sampler

    states = []
    for rank in range(2):
        loader, sampler = loader_of(rank)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            consumed = ids_of(islice(loader, 4 if epoch == 0 else batches))
        states.append((loader.state_dict(), consumed))
    traces = dict(pod.traces)
    for rank in range(2):
        loader, sampler = loader_of(rank)
        loader.load_state_dict(stored(states[0][0]))
        rest = ids_of(loader) if sampler.epoch == 1 else []
        assert sorted(states[rank][1] + rest) == list(range(rank, NUM_SAMPLES, 2))
        sampler.set_epoch(2)
        assert sorted(ids_of(loader)) == list(range(rank, NUM_SAMPLES, 2))
        loader.load_state_dict(stored(states[0][0]))  # it goes back
        assert (ids_of(loader) if sampler.epoch == 1 else []) == rest
    for key, trace in traces.items():
        assert pod.traces[key].tolist() == trace.tolist()


def test_ranks_go_on_from_rank_0s_state_though_nobody_sets_an_epoch(dataset_of: DatasetOf) -> None:
    """torch's sampler lists the same for ever then, on each rank."""

    def loader_of(rank: int) -> Loader:
        dataset = dataset_of(policy="planned", rank=rank, world_size=2)
        inner = DistributedSampler(range(NUM_SAMPLES), num_replicas=2, rank=rank)  # type: ignore[arg-type]
        loader = DataLoader(dataset, 5, sampler=TraceSampler(dataset, inner), collate_fn=list)
        return refill.timed(loader, dataset)

    had, states = [], []
    for rank in range(2):
        loader = loader_of(rank)
        first = ids_of(loader)
        had += ids_of(islice(loader, 2))
        assert first[:10] == had[-10:]
        states.append(stored(loader.state_dict()))
    for rank in range(2):
        loader = loader_of(rank)
        loader.load_state_dict(states[0])
        had += ids_of(loader)
    assert sorted(had) == list(range(NUM_SAMPLES))


def test_an_epoch_under_way_is_not_listed_again(pod: FakePod, dataset_of: DatasetOf) -> None:
    """The wrapped sampler may be unable to give the same ids; the pods have them."""
    loader, _ = traced(dataset_of, lambda: RandomSampler(range(NUM_SAMPLES)))
    consumed = ids_of(islice(loader, 3))
    state = loader.state_dict()
    loader, _ = traced(dataset_of, lambda: RandomSampler(range(NUM_SAMPLES)))
    loader.load_state_dict(state)
    assert sorted(consumed + ids_of(loader)) == list(range(NUM_SAMPLES))
    assert pod.count("PUT trace") == 1


class Curriculum:
    """A sampler that keeps a state: each epoch takes one more sample."""

    def __init__(self) -> None:
        self.level = 7

    def __iter__(self) -> Any:
        self.level += 1
        return iter(range(self.level))

    def state_dict(self) -> dict[str, int]:
        return {"level": self.level}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.level = state["level"]


def test_the_state_of_a_wrapped_sampler_goes_along(dataset_of: DatasetOf) -> None:
    loader, _ = traced(dataset_of, Curriculum)
    next(iter(loader))
    state = loader.state_dict()
    loader, _ = traced(dataset_of, Curriculum)
    loader.load_state_dict(state)
    assert [ids_of(loader), ids_of(loader)] == [[6, 7], list(range(9))]
