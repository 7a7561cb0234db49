"""datasets' IterableDataset over planned epochs on real pods: each sample once, with workers, and on from its state."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from tests.trainers.launching import NUM_SAMPLES, Place, check_exact
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import refill
from refill.errors import InvalidInput

pytestmark = pytest.mark.skipif(find_spec("datasets") is None, reason="datasets is not installed")


def numbered(sample: dict[str, Any]) -> dict[str, Any]:
    return {"id": sample["__id__"], "x": np.frombuffer(sample["bin"][:10], np.uint8), "key": sample["__key__"]}


def stream_of(place: Place, job: str, epochs: int = 1, **more: Any) -> Any:
    dataset = refill.CacheDataset(place.url, dataset=place.dataset, job=job, transform=numbered, **more)
    return refill.huggingface_stream(dataset, epochs=epochs, stretch=16)


def test_it_goes_on_within_a_stretch_and_each_sample_comes_once_an_epoch(place: Place) -> None:
    job = place.new_job()
    stream = stream_of(place, job, epochs=2)
    had = []
    for sample in stream:
        had.append(sample["id"])
        if len(had) == 100:  # in the midst of a stretch
            break
    state = stream.state_dict()
    again = stream_of(place, job, epochs=2)  # as another process would
    again.load_state_dict(state)
    had += [sample["id"] for sample in again]
    assert len(had) == 2 * NUM_SAMPLES
    for epoch in range(2):
        check_exact(place, job, epoch, had[epoch * NUM_SAMPLES : (epoch + 1) * NUM_SAMPLES])


@pytest.mark.parametrize("workers", [0, 3])
def test_columns_formats_and_workers(place: Place, workers: int) -> None:
    job = place.new_job()
    stream = stream_of(place, job).select_columns(["id", "x"]).with_format("torch")
    batches = list(DataLoader(stream, batch_size=20, num_workers=workers))
    assert set(batches[0]) == {"id", "x"}
    assert isinstance(batches[0]["x"], torch.Tensor)
    assert batches[0]["x"].shape == (20, 10)
    check_exact(place, job, 0, [number for batch in batches for number in batch["id"].tolist()])


def test_a_stateful_loader_with_workers_goes_on(place: Place) -> None:
    job = place.new_job()

    def loader_of() -> StatefulDataLoader[Any]:
        return StatefulDataLoader(stream_of(place, job).with_format("torch"), batch_size=10, num_workers=2)

    loader = loader_of()
    had: list[int] = []
    for count, batch in enumerate(loader, 1):
        had += batch["id"].tolist()
        if count == 11:
            break
    state = loader.state_dict()
    again = loader_of()
    again.load_state_dict(state)
    had += [number for batch in again for number in batch["id"].tolist()]
    check_exact(place, job, 0, had)


def test_ranks_divide_an_epoch_and_what_is_no_stream_is_refused(place: Place) -> None:
    job = place.new_job()
    ranks = [stream_of(place, job, rank=rank, world_size=2) for rank in range(2)]
    check_exact(place, job, 0, [sample["id"] for stream in ranks for sample in stream])
    for wrong in ({"epochs": 0}, {"stretch": 0.5}):
        with pytest.raises(InvalidInput, match="must be a whole number"):
            refill.huggingface_stream(refill.CacheDataset(place.url, dataset=place.dataset, job=job), **wrong)
