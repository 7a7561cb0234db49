"""Bytes of members as they came: views of the buffer that the answer was read into, for decoders of whole batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.client.conftest import NUM_SAMPLES
from tests.client.fake_pod import FakePod
from tests.client.loops import fails_in_a_worker
from torch.utils.data import DataLoader

import refill
from refill import CacheDataset, EpochSampler, Position
from refill.errors import InvalidInput
from refill.formats.decoders import is_viewed
from refill.loops.loader_batch import tensor_of

DatasetOf = Callable[..., CacheDataset]


def pictures_and_classes(samples: list[tuple[torch.Tensor, Any]]) -> tuple[list[torch.Tensor], list[Any]]:
    pictures, classes = zip(*samples, strict=True)
    return list(pictures), list(classes)


def test_all_members_are_views_of_one_buffer(pod: FakePod, dataset_of: DatasetOf) -> None:
    positions = [Position(0, place) for place in range(8)]
    expected = dataset_of().__getitems__(positions)
    found = dataset_of(decode="views").__getitems__(positions)
    for as_bytes, sample in zip(expected, found, strict=True):
        assert sample.keys() == as_bytes.keys()
        for name in sample.keys() - {"__key__", "__id__"}:
            assert (sample[name].dtype, sample[name].dim()) == (torch.uint8, 1)
            assert sample[name].numpy().tobytes() == as_bytes[name]
    span = sum(sum(len(sample[name]) for name in ("txt", "cls")) + 4 * 512 for sample in found)
    starts = [sample["txt"].data_ptr() for sample in found]
    assert max(starts) - min(starts) < span, "samples of an answer were copied out of its buffer"


def test_a_mapping_says_which_members_and_others_are_decoded(pod: FakePod, dataset_of: DatasetOf) -> None:
    [decoded] = dataset_of(decode=True).__getitems__([Position(0, 3)])
    [found] = dataset_of(decode={"txt": refill.as_view}).__getitems__([Position(0, 3)])
    assert found["cls"] == decoded["cls"]
    assert found["txt"].numpy().tobytes().decode() == decoded["txt"]


def test_a_loader_hands_them_over(pod: FakePod, dataset_of: DatasetOf) -> None:
    every = [Position(0, place) for place in range(NUM_SAMPLES)]
    whole = {sample["__id__"]: sample["txt"] for sample in dataset_of().__getitems__(every)}
    dataset = dataset_of(decode={"txt": refill.as_view}, as_tuple=("txt", "__id__"))
    loader = DataLoader(
        dataset,
        batch_size=8,
        sampler=EpochSampler(dataset),
        collate_fn=pictures_and_classes,
    )
    came = []
    for pictures, ids in loader:
        for picture, number in zip(pictures, ids, strict=True):
            assert picture.numpy().tobytes() == whole[number]
            came.append(number)
    assert sorted(came) == list(range(NUM_SAMPLES))


def test_a_view_stays_as_it_is_when_other_batches_come(pod: FakePod, dataset_of: DatasetOf) -> None:
    dataset = dataset_of(decode="views")
    kept = dataset.__getitems__([Position(0, 0)])[0]["txt"]
    before = kept.clone()
    for place in range(1, 9):
        dataset.__getitems__([Position(0, place)])
    assert torch.equal(kept, before)


def test_a_transform_gets_them(pod: FakePod, dataset_of: DatasetOf) -> None:
    dataset = dataset_of(decode="views", transform=lambda sample: {"size": len(sample["txt"])})
    [expected] = dataset_of().__getitems__([Position(0, 3)])
    assert dataset.__getitems__([Position(0, 3)]) == [{"size": len(expected["txt"])}]


@pytest.mark.parametrize("decode", ["views", {"txt": refill.as_view}])
def test_a_worker_does_not_send_them_one_by_one(pod: FakePod, dataset_of: DatasetOf, decode: Any) -> None:
    def loader(**more: Any) -> DataLoader[Any]:
        dataset = dataset_of(decode=decode, **more)
        how = {"num_workers": 1, "multiprocessing_context": "fork", "collate_fn": list}
        return DataLoader(dataset, batch_size=8, sampler=EpochSampler(dataset), **how)

    with fails_in_a_worker(r"num_workers=0, or refill\.iterate"):
        next(iter(loader()))
    lengths = [length for batch in loader(transform=lambda sample: len(sample["txt"])) for length in batch]
    assert len(lengths) == NUM_SAMPLES


def test_which_fields_are_views() -> None:
    assert is_viewed("views", "anything")
    assert is_viewed({"png": refill.as_view}, "seg.png")
    assert is_viewed({".jpg": refill.as_view}, "jpg")
    assert not is_viewed({"png": refill.as_view, "seg.png": bytes}, "seg.png"), "the longer name comes first"
    assert not any(is_viewed(decode, "jpg") for decode in (None, True, "standard", {"png": refill.as_view}))


def test_an_empty_member_and_bytes_that_can_not_be_written_to() -> None:
    assert tensor_of(memoryview(b"")).shape == (0,)
    assert tensor_of(memoryview(b"abc")).tolist() == [97, 98, 99]


def test_what_decode_can_be_is_said(pod: FakePod, dataset_of: DatasetOf) -> None:
    with pytest.raises(InvalidInput, match="'standard', 'views', a mapping"):
        dataset_of(decode="view")
