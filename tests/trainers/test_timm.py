"""Does timm's own loader train on every picture once an epoch, with its transforms and on its device?"""

from __future__ import annotations

import asyncio
import io

import pytest
import torch
from PIL import Image
from tests.trainers.launching import Place

import refill
from refill_service.datasets.pack import pack

NUM_PICTURES = 64


@pytest.fixture(scope="module")
def photos(place: Place) -> str:
    """A dataset of photos of several sizes; the class of each is its number."""
    folder, store = place.folder / "photos", place.folder / "timm"
    store.mkdir()
    folder.mkdir()
    for number in range(NUM_PICTURES):
        size = (40 + number, 90 - number)
        Image.new("RGB", size, (4 * number, 255 - 4 * number, 128)).save(folder / f"{number:04}.jpg")
        (folder / f"{number:04}.cls").write_text(str(number))
    asyncio.run(pack(str(folder), store.as_uri()))
    return store.as_uri()


def to_picture(content: bytes) -> Image.Image:
    return Image.open(io.BytesIO(content)).convert("RGB")


@pytest.mark.parametrize(("is_training", "num_workers"), [(True, 2), (False, 0)], ids=["training", "validation"])
def test_each_picture_comes_once_an_epoch(place: Place, photos: str, is_training: bool, num_workers: int) -> None:
    dataset = refill.CacheIterableDataset(
        place.url,
        dataset=photos,
        job=place.new_job(),
        batch_size=8,
        shuffle=is_training,
        decode={"jpg": to_picture, "cls": int},
        as_tuple=("jpg", "cls"),
    )
    timm_data = pytest.importorskip("timm.data", exc_type=ImportError)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loader = timm_data.create_loader(
        dataset,
        input_size=(3, 32, 32),
        batch_size=8,
        is_training=is_training,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        use_prefetcher=device.type == "cuda",
        device=device,
    )
    epochs = []
    for epoch in range(2):
        dataset.set_epoch(epoch)  # as timm's own training does
        epochs.append(list(loader))
    for pictures, numbers in (batch for epoch in epochs for batch in epoch):
        assert tuple(pictures.shape) == (8, 3, 32, 32)
        assert {pictures.device.type, numbers.device.type} == {device.type}
    first, second = ([number for _, numbers in epoch for number in numbers.tolist()] for epoch in epochs)
    assert sorted(first) == sorted(second) == list(range(NUM_PICTURES))
    assert (first == second) == (not is_training), "shuffled anew, or in the order in which they are stored"
