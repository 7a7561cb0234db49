"""A trainer that divides what something else makes of one rank's samples is told so: the others would be lost."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from tests.trainers.launching import NUM_SAMPLES, Place
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import refill
from refill.errors import InvalidInput

HAS_DATASETS = pytest.mark.skipif(find_spec("datasets") is None, reason="datasets is not installed")

Made = Callable[[dict[str, Any]], Any]


class Wrapped(IterableDataset[Any]):
    """What people write around a loop, to tokenize or to filter."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        yield from self.inner


def number(sample: dict[str, Any]) -> dict[str, Any]:
    return {"__id__": sample["__id__"]}


def samples(job: dict[str, Any]) -> Any:
    return Wrapped(refill.CacheIterableDataset(batch_size=16, **job))


def loader_inside(job: dict[str, Any]) -> Any:
    dataset = refill.CacheDataset(**job)
    return Wrapped(DataLoader(dataset, batch_size=None, sampler=refill.EpochSampler(dataset)))


def generator(job: dict[str, Any]) -> Any:
    import datasets

    dataset = refill.CacheIterableDataset(batch_size=16, **job)
    return datasets.IterableDataset.from_generator(lambda: iter(dataset))


def stream(job: dict[str, Any]) -> Any:
    return refill.huggingface_stream(refill.CacheDataset(**job))


MADE = [samples, loader_inside, *(pytest.param(each, marks=HAS_DATASETS) for each in (generator, stream))]


@pytest.fixture
def job(place: Place) -> dict[str, Any]:
    ranks = {"rank": 0, "world_size": 2}
    return ranks | {"service_url": place.url, "dataset": place.dataset, "job": place.new_job(), "transform": number}


@pytest.fixture
def two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Accelerate sees them, in process 0."""
    from accelerate import PartialState

    monkeypatch.setattr(PartialState(cpu=True), "num_processes", 2)


def prepared(loader: DataLoader[Any], dispatch: bool) -> Any:
    from accelerate.data_loader import prepare_data_loader

    of_two = {"num_processes": 2, "process_index": 0, "put_on_device": True, "device": torch.device("cpu")}
    return prepare_data_loader(loader, dispatch_batches=dispatch, **of_two)


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("dispatch", [True, False])
def test_accelerate_divides_what_is_made_of_one_ranks_samples(
    job: dict[str, Any], two_processes: None, made: Made, dispatch: bool
) -> None:
    loader = prepared(DataLoader(made(job), 8), dispatch)
    with pytest.raises(InvalidInput, match=r"Accelerate divides .* among 2 processes.* those of the others would be"):
        list(loader)


@pytest.mark.parametrize(
    "how", [{}, {"num_workers": 1}, {"num_workers": 1, "multiprocessing_context": "spawn"}], ids=str
)
@pytest.mark.parametrize("dispatch", [True, False])
def test_accelerate_divides_what_torchs_sampler_has_divided(
    job: dict[str, Any], two_processes: None, how: dict[str, Any], dispatch: bool
) -> None:
    """Each process would have half of its half. Samples of plain integers have no receipt that would say so."""
    dataset = refill.CacheDataset(**job)
    loader = DataLoader(dataset, 8, sampler=DistributedSampler(dataset, 2, 0), **how)
    with pytest.raises(InvalidInput, match=r"what a DistributedSampler yields among 2 processes.* would be lost"):
        list(prepared(loader, dispatch))
    undivided = DataLoader(dataset, 8, sampler=DistributedSampler(dataset, 2, 0))
    assert len(list(undivided)) == NUM_SAMPLES // 2 // 8


@HAS_DATASETS
def test_datasets_divides_it(job: dict[str, Any]) -> None:
    from datasets.distributed import split_dataset_by_node

    for made in (generator, stream):
        part = split_dataset_by_node(made(job), rank=0, world_size=2)
        with pytest.raises(InvalidInput, match="datasets divides what a IterableDataset yields among 2 processes"):
            list(part)


def test_a_worker_that_is_spawned_finds_it_when_it_is_started(job: dict[str, Any], two_processes: None) -> None:
    loader = prepared(DataLoader(samples(job), 8, num_workers=1, multiprocessing_context="spawn"), dispatch=True)
    with pytest.raises(InvalidInput, match="Accelerate divides what a Wrapped yields among 2 processes"):
        next(iter(loader))


@pytest.mark.parametrize("more", [{"world_size": 1}, {"allow_skipped": True}], ids=str)
def test_one_rank_that_has_everything_may_be_divided_and_what_is_allowed(
    job: dict[str, Any], more: dict[str, Any]
) -> None:
    from accelerate.data_loader import IterableDatasetShard

    shards = [
        IterableDatasetShard(samples(job | more), batch_size=8, num_processes=2, process_index=process)
        for process in range(2)
    ]
    ids = [sample["__id__"] for shard in shards for sample in shard]
    assert len(set(ids)) == NUM_SAMPLES // (job | more)["world_size"]


class TestSkipping:
    """Where process 0 reads for all, Accelerate skips single batches, and takes one for each process in a step."""

    @pytest.fixture
    def loader(self, job: dict[str, Any], two_processes: None) -> Any:
        dataset = refill.CacheDataset(**job)
        return prepared(DataLoader(dataset, 8, sampler=refill.EpochSampler(dataset)), dispatch=True)

    def test_what_is_no_whole_step_is_an_error(self, loader: Any) -> None:
        from accelerate import skip_first_batches

        with pytest.raises(InvalidInput, match="3 batches are to be skipped, and where process 0 reads for all"):
            next(iter(skip_first_batches(loader, 3)))

    def test_a_trainer_counts_steps(self, loader: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from accelerate import skip_first_batches

        trainer = types.ModuleType("transformers.trainer")
        exec("def train(batches): return next(iter(batches))", trainer.__dict__)
        monkeypatch.setitem(sys.modules, "transformers.trainer", trainer)
        with pytest.raises(InvalidInput, match=r"4 batches are to be skipped.* Go on without dispatch_batches"):
            trainer.train(skip_first_batches(loader, 4))
