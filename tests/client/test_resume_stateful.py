"""Checkpoints by torchdata's StatefulDataLoader."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from tests.client.conftest import NUM_SAMPLES
from tests.client.fake_pod import FakePod
from tests.client.loops import (
    WORKER_NAMES,
    WORKERS,
    DatasetOf,
    Loader,
    fails_in_a_worker,
    ids_of,
    iterable,
    stored,
    trace_of,
    worker_places,
)
from torch.utils.data import RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import BatchSampler as StatefulBatchSampler

import refill
from refill import CacheIterableDataset, EpochSampler, TraceSampler
from refill.errors import InvalidInput


def stateful(dataset_of: DatasetOf, **arguments: Any) -> tuple[StatefulDataLoader, EpochSampler]:
    dataset = dataset_of()
    sampler = EpochSampler(dataset)
    arguments = {"batch_size": 6, "sampler": sampler, "collate_fn": list} | arguments
    return StatefulDataLoader(dataset, **arguments), sampler


def stateful_iterable(
    dataset_of: DatasetOf, batch_size: int = 6, **arguments: Any
) -> tuple[StatefulDataLoader, CacheIterableDataset]:
    _, dataset = iterable(dataset_of)
    return StatefulDataLoader(dataset, batch_size=batch_size, collate_fn=list, **arguments), dataset


STATEFUL_FORMS = pytest.mark.parametrize("form", [stateful, stateful_iterable], ids=["map-style", "iterable"])


@pytest.mark.variants(
    "two workers-8-iterable",
    "two workers-4-iterable",
    "two workers-4-map-style",
    "three persistent workers-4-map-style",
)
@STATEFUL_FORMS
@pytest.mark.parametrize(("workers", "batches"), worker_places(0, 4, 1, 7, 8))
def test_a_stateful_loader_goes_on(
    pod: FakePod, dataset_of: DatasetOf, form: Any, workers: dict[str, Any], batches: int
) -> None:
    """8 batches: the loop is over, 7: it has the last batch."""
    loader, epochs = form(dataset_of, **workers)
    epochs.set_epoch(3)
    consumed = ids_of(islice(loader, batches))
    state = stored(loader.state_dict())
    del loader

    loader, epochs = form(dataset_of, **workers)
    loader.load_state_dict(state)
    if batches < 8:
        epochs.set_epoch(3)
        assert consumed + ids_of(loader) == trace_of(pod, 3)
    for epoch in (4, 5):
        epochs.set_epoch(epoch)
        assert ids_of(loader) == trace_of(pod, epoch)


@pytest.mark.variants("two workers")
@pytest.mark.parametrize("workers", WORKERS, ids=WORKER_NAMES)
def test_a_stateful_loader_needs_no_set_epoch(pod: FakePod, dataset_of: DatasetOf, workers: dict[str, Any]) -> None:
    for batches, epoch in ((4, 1), (8, 2)):
        loader, sampler = stateful(dataset_of, **workers)
        sampler.set_epoch(1)
        consumed = ids_of(islice(loader, batches))
        state = loader.state_dict()
        loader, sampler = stateful(dataset_of, **workers)
        loader.load_state_dict(state)
        rest = ids_of(loader)
        assert (consumed if epoch == 1 else []) + rest == trace_of(pod, epoch)
        assert ids_of(loader) == trace_of(pod, epoch + 1)


@STATEFUL_FORMS
@pytest.mark.parametrize("every", [3, pytest.param(100, marks=pytest.mark.variant)])
def test_a_stateful_loader_with_rare_snapshots(pod: FakePod, dataset_of: DatasetOf, form: Any, every: int) -> None:
    loader, _ = form(dataset_of, num_workers=2, snapshot_every_n_steps=every)
    consumed = ids_of(islice(loader, 5))
    state = loader.state_dict()
    loader, _ = form(dataset_of, num_workers=2, snapshot_every_n_steps=every)
    loader.load_state_dict(state)
    assert consumed + ids_of(loader) == trace_of(pod, 0)


def test_a_stateful_loader_whose_batches_are_other_than_the_runs(pod: FakePod, dataset_of: DatasetOf) -> None:
    loader, _ = stateful_iterable(dataset_of, batch_size=4, num_workers=3)
    whole = ids_of(loader)
    assert sorted(whole) == list(range(NUM_SAMPLES))
    for batches in (1, 6, 10):
        loader, _ = stateful_iterable(dataset_of, batch_size=4, num_workers=3)
        consumed = ids_of(islice(loader, batches))
        state = loader.state_dict()
        loader, _ = stateful_iterable(dataset_of, batch_size=4, num_workers=3)
        loader.load_state_dict(state)
        assert consumed + ids_of(loader) == whole


def test_a_stateful_loader_and_its_batch_sampler(pod: FakePod, dataset_of: DatasetOf) -> None:
    def begin() -> StatefulDataLoader:
        dataset = dataset_of()
        batches = StatefulBatchSampler(EpochSampler(dataset), 6, False)
        return StatefulDataLoader(dataset, batch_sampler=batches, collate_fn=list, num_workers=2)

    loader = begin()
    consumed = ids_of(islice(loader, 3))
    state = loader.state_dict()
    loader = begin()
    loader.load_state_dict(state)
    assert consumed + ids_of(loader) == trace_of(pod, 0)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_batch_sampler_without_a_state_goes_on_in_the_epoch_that_is_set(
    pod: FakePod, dataset_of: DatasetOf, num_workers: int
) -> None:
    """torch's own: its loader keeps the number of batches, and would pass over those of epoch 0."""

    def begin() -> tuple[StatefulDataLoader, EpochSampler]:
        dataset = dataset_of()
        sampler = EpochSampler(dataset)
        batches = torch.utils.data.BatchSampler(sampler, 6, False)
        return StatefulDataLoader(dataset, batch_sampler=batches, collate_fn=list, num_workers=num_workers), sampler

    loader, _ = begin()
    ids_of(loader)
    consumed = ids_of(islice(loader, 3))  # of epoch 1
    state = loader.state_dict()
    loader, _ = begin()
    loader.load_state_dict(state)
    with fails_in_a_worker(r"does not say in which: .* Call set_epoch\(epoch\)"):
        next(iter(loader))
    loader, sampler = begin()
    loader.load_state_dict(state)
    sampler.set_epoch(1)
    assert consumed + ids_of(loader) == trace_of(pod, 1)


@pytest.mark.variants("8-2", "0-2")
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("batches", [0, 3, 8])
def test_a_stateful_loader_and_an_order_of_ones_own(
    pod: FakePod, dataset_of: DatasetOf, num_workers: int, batches: int
) -> None:
    def begin() -> StatefulDataLoader:
        dataset = dataset_of(order="explicit")
        sampler = TraceSampler(dataset, RandomSampler(range(NUM_SAMPLES), generator=torch.Generator()))
        return StatefulDataLoader(dataset, batch_size=6, sampler=sampler, collate_fn=list, num_workers=num_workers)

    loader = begin()
    consumed = ids_of(islice(loader, batches))
    state = loader.state_dict()
    loader = begin()
    loader.load_state_dict(state)
    rest = ids_of(loader)
    assert sorted(rest if batches == 8 else consumed + rest) == list(range(NUM_SAMPLES))
    assert (("job", 1, 0) in pod.traces) == (batches == 8)


def test_a_stateful_loader_is_timed_with_its_own_state(pod: FakePod, dataset_of: DatasetOf) -> None:
    def begin() -> Loader:
        loader, sampler = stateful(dataset_of, num_workers=2)
        return refill.timed(loader, sampler.dataset)

    loader = begin()
    consumed = ids_of(islice(loader, 3))
    state = loader.state_dict()
    assert "_snapshot" in state
    loader = begin()
    loader.load_state_dict(state)
    assert consumed + ids_of(loader) == trace_of(pod, 0)


def test_a_stateful_iterable_loader_goes_on_with_as_many_workers_only(dataset_of: DatasetOf) -> None:
    loader, _ = stateful_iterable(dataset_of, num_workers=2)
    next(iter(loader))
    state = loader.state_dict()
    loader, _ = stateful_iterable(dataset_of, num_workers=1)
    loader.load_state_dict(state)
    with fails_in_a_worker("of a StatefulDataLoader with 2 workers, and needs as many again"):
        next(iter(loader))


def test_a_stateful_loader_refuses_the_state_of_another_job(dataset_of: DatasetOf) -> None:
    loader, _ = stateful(dataset_of)
    next(iter(loader))
    state = loader.state_dict()
    dataset = dataset_of(job="another")
    other = StatefulDataLoader(dataset, batch_size=6, sampler=EpochSampler(dataset), collate_fn=list)
    other.load_state_dict(state)
    with pytest.raises(InvalidInput, match="the state is of job 'job', not 'another'"):
        next(iter(other))
