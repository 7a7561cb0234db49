"""Members that a caller names and no sample has: one warning, and none for those that only some samples have."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from itertools import chain
from typing import Any

import numpy as np
import pytest
from tests.client.conftest import NUM_SAMPLES
from tests.client.fake_pod import FakePod, serving, tar_range
from torch.utils.data import DataLoader

import refill
from refill import CacheDataset, EpochSampler
from refill.errors import InvalidInput
from refill.formats.asked_members import AskedMembers
from refill.formats.parsed import Coded
from refill.protocol.sample_cut import SampleCut

DatasetOf = Callable[..., CacheDataset]
PHOTO = {"jpg": memoryview(b"photo"), "seg.png": memoryview(b"mask"), "cls": 3, "image": Coded("webp", memoryview(b""))}


def said_of(decode: Any = None, members: Any = None, ranges: Any = None, num_samples: int = 1000) -> list[str]:
    """What is warned of where the photo's like comes 999 times, and the last of 1,000 has a caption, too."""
    asked = AskedMembers(decode, SampleCut.of(members, ranges), lambda count: np.zeros(count, dtype=np.int64))
    asked.begin(num_samples)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for number in range(1000):
            asked.look(PHOTO | ({"caption": memoryview(b"a dog")} if number == 100 else {}))
    return [str(each.message) for each in warned]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"decode": {"jpgg": len}}, "decode names 'jpgg', which none has (is jpg meant?); they have caption, cls"),
        ({"decode": {"jpg": len, "captoin": len}}, "decode names 'captoin', which none has (is caption meant?)"),
        ({"decode": {"picture": len}}, "decode names 'picture', which none has; they have"),
        ({"decode": {"jpg": len, "cls": len}}, "decode names 'cls', which is no bytes, and stays as it is"),
        ({"members": ["jpg", "text"]}, "members names 'text', which none has"),
        ({"ranges": {"jpgg": (0, 3)}}, "ranges names 'jpgg', which none has (is jpg meant?)"),
        ({"decode": {"jpgg": len}, "num_samples": 7}, "of the first 7 samples"),
    ],
)
def test_a_name_that_no_sample_has_is_said_once(arguments: dict[str, Any], said: str) -> None:
    [line] = said_of(**arguments)
    assert said in line
    assert line.startswith(f"of the first {arguments.get('num_samples', 256)} samples: ")


@pytest.mark.parametrize(
    "arguments",
    [
        {"decode": True},
        {"decode": lambda extension, data: data},
        {"decode": {".JPG": len, "png": len, "caption": len, "webp": len}},
        {"decode": {"jpg": len, "jpeg": len, "mp4": len}},
        {"decode": {"image": len}},
        {"members": ["jpg", "caption"], "ranges": {"jpg": (0, 3)}},
        {"decode": {"jpgg": len}, "num_samples": 0},
    ],
)
def test_what_some_samples_have_and_decoders_of_other_formats_are_right(arguments: dict[str, Any]) -> None:
    assert len(said_of(**arguments)) == (arguments.get("num_samples") == 0)


@pytest.mark.filterwarnings("error:of the first")
@pytest.mark.parametrize("workers", [0, 2])
def test_workers_of_a_small_dataset_find_out_together(pod: FakePod, dataset_of: DatasetOf, workers: int) -> None:
    """Each of them sees half of an epoch, and none of them lives longer."""
    dataset = dataset_of(decode={"tx": bytes.upper, "cls": int})
    loader = DataLoader(dataset, batch_size=4, sampler=EpochSampler(dataset), num_workers=workers, collate_fn=list)
    said = rf"of the first {NUM_SAMPLES} samples: decode names 'tx', which none has \(is txt meant\?\)"
    with pytest.raises(UserWarning, match=said):
        list(chain(loader, loader, loader))


@pytest.mark.filterwarnings("error:of the first")
def test_one_of_many_is_enough() -> None:
    samples = [tar_range([(f"{i}.{'mask' if i % 40 == 39 else 'masc'}", b"picture")]) for i in range(400)]
    with serving(FakePod(samples)) as pod:
        found = refill.iterate(pod.url, dataset="file:///data", job="job", policy="redox", decode={"mask": len})
        assert len(list(found)) == 400


def test_names_are_text() -> None:
    with pytest.raises(InvalidInput, match="decode must have names of members"):
        CacheDataset("http://refill:8000", dataset="file:///data", job="job", decode={1: len})  # type: ignore[dict-item]
