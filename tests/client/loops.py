"""Loops of one process over either form of the dataset, which tests save and load the state of."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from tests.client.conftest import DatasetOf
from tests.client.fake_pod import FakePod
from torch.utils.data import DataLoader

import refill
from refill import CacheIterableDataset, EpochSampler
from refill.data_wait import TimedLoader
from refill.errors import InvalidInput

__all__ = [
    "FORMS",
    "WORKERS",
    "WORKER_NAMES",
    "DatasetOf",
    "Loader",
    "fails_in_a_worker",
    "ids_of",
    "iterable",
    "mapped",
    "stored",
    "trace_of",
    "worker_places",
]

Loader = TimedLoader[Any]

WORKERS: list[dict[str, Any]] = [
    {"num_workers": 0},
    {"num_workers": 2},
    {"num_workers": 3, "persistent_workers": True, "prefetch_factor": 4},
]
WORKER_NAMES = ["in process", "two workers", "three persistent workers"]


def worker_places(*batches: int) -> list[Any]:
    """Workers, and after how many batches a loop is left: ``(workers, batches)``. ``make test`` has all of them in
    process, the second and the last one for two workers, and the second one for persistent workers."""
    usual = [[count for count in batches if count != 1], [batches[1], batches[-1]], [batches[1]]]
    return [
        pytest.param(workers, count, id=f"{name}-{count}", marks=() if count in counts else pytest.mark.variant)
        for workers, name, counts in zip(WORKERS, WORKER_NAMES, usual, strict=True)
        for count in batches
    ]


def ids_of(batches: Iterable[Any]) -> list[int]:
    return [sample["__id__"] for batch in batches for sample in batch]


def trace_of(pod: FakePod, epoch: int, rank: int = 0) -> list[int]:
    return pod.trace(pod.jobs["job"], epoch, rank).tolist()


def _of_dataset(arguments: dict[str, Any]) -> dict[str, Any]:
    """What is not the loader's, taken out of the arguments for both."""
    names = ("rank", "world_size", "timeout_seconds", "shuffle", "job", "dataset")
    return {name: arguments.pop(name) for name in names if name in arguments}


def mapped(dataset_of: DatasetOf, batch_size: int = 6, **arguments: Any) -> tuple[Loader, EpochSampler]:
    """A loop of a process of its own over the map-style form, and what ``set_epoch`` is called on."""
    dataset = dataset_of(**_of_dataset(arguments))
    sampler = EpochSampler(dataset)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler, collate_fn=list, **arguments)
    return refill.timed(loader, dataset), sampler


def iterable(dataset_of: DatasetOf, batch_size: int = 6, **arguments: Any) -> tuple[Loader, CacheIterableDataset]:
    """The same over the iterable form."""
    settings = {"dataset": "file:///data", "job": "job", "policy": "redox", "timeout_seconds": 10} | _of_dataset(
        arguments
    )
    dataset = CacheIterableDataset(dataset_of.url, batch_size=batch_size, **settings)
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=batch_size, collate_fn=list, **arguments)
    return refill.timed(loader, dataset), dataset


def stored(state: Any) -> Any:
    """As it comes back from a checkpoint file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


FORMS = pytest.mark.parametrize("form", [mapped, iterable], ids=["map-style", "iterable"])


@contextlib.contextmanager
def fails_in_a_worker(says: str = "") -> Iterator[None]:
    """As ``pytest.raises(InvalidInput, match=says)``, and the loader goes at once. One that its error's traceback holds
    is left to the garbage collector, which takes its queues first: torch then waits 5 s for each worker."""
    try:
        yield
    except InvalidInput as error:
        error.__traceback__ = None
        said = str(error)
    else:
        pytest.fail("no error came")
    assert re.search(says, said), said
