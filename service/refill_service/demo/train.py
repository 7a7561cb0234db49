"""One data-parallel rank of the demo, which trains twice: fed from files, then through refill.

Started as ``python -m refill_service.demo.train OPTIONS`` with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, as
a launcher does. Rank 0 prints one JSON object for each epoch. What differs between the two feeds is in ``_loader``.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
from PIL import Image
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import refill
from refill_service.demo.digits import SIZE

BATCH = 32
FEEDS = ("files", "refill")


def alike(sample: dict[str, Any]) -> dict[str, Any]:
    """Pictures have sizes of their own, and those of a batch must be alike."""
    return sample | {"png": np.array(Image.fromarray(sample["png"]).resize((SIZE, SIZE)))}


class DigitFiles(Dataset[dict[str, Any]]):
    """The PNG files of class folders, as any PyTorch tutorial reads them."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*/*.png"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path = self.paths[index]
        with Image.open(path) as image:
            return alike({"__id__": index, "png": np.array(image), "cls": int(path.parent.name)})


class SmallNet(nn.Module):
    """A small convolutional network for handwritten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 16, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--train", type=Path, required=True)
    parser.add_argument("--test", type=Path, required=True)
    parser.add_argument("--service", required=True, help="what is read through refill comes from here")
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--job", required=True)
    parser.add_argument("--epochs", type=int, required=True)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    for feed in FEEDS:
        _train(feed, args)
    torch.distributed.destroy_process_group()


def _train(feed: str, args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(SmallNet())
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
    loader, sampler, dataset = _loader(feed, args)
    timed = refill.timed(loader, dataset) if isinstance(dataset, refill.CacheDataset) else _Untimed(loader)
    for epoch in range(args.epochs):
        waited = timed.wait_seconds
        sampler.set_epoch(epoch)
        ids: list[int] = []
        for batch in timed:
            loss = nn.functional.cross_entropy(model(_images(batch)), batch["cls"])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            ids += batch["__id__"].tolist()
        result = _gathered(ids, timed.wait_seconds - waited, len(dataset))
        if torch.distributed.get_rank() == 0:
            result |= {"feed": feed, "epoch": epoch, "accuracy": _accuracy(model.module, args.test)}
            print(json.dumps(result), flush=True)


def _loader(feed: str, args: argparse.Namespace) -> tuple[DataLoader[Any], Any, Any]:
    """The loader, its sampler and its dataset: the lines that change when training moves to refill."""
    sampler: Any
    dataset: Any
    if feed == "refill":
        # 500 samples for each pod are few: memory for half of them is good for a shuffle where chunks are this small.
        dataset = refill.CacheDataset(
            args.service, dataset=args.dataset, job=args.job, decode=True, transform=alike, chunk_size=2
        )
        sampler = refill.EpochSampler(dataset)
    else:
        dataset = DigitFiles(args.train)
        sampler = DistributedSampler(dataset)
    return DataLoader(dataset, BATCH, sampler=sampler, num_workers=1, persistent_workers=True), sampler, dataset


class _Untimed:
    """The same measurement for a loader that refill has no part in."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self.wait_seconds = 0.0

    def __iter__(self) -> Any:
        started = time.perf_counter()
        for batch in self._loader:
            self.wait_seconds += time.perf_counter() - started
            yield batch
            started = time.perf_counter()


def _images(batch: dict[str, Any]) -> Tensor:
    images: Tensor = batch["png"]
    return images.float().unsqueeze(1) / 255 - 0.5


def _gathered(ids: list[int], waited: float, num_samples: int) -> dict[str, Any]:
    """What all ranks together received in an epoch, counted by true sample ids."""
    everyone: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, (ids, waited))
    counts = Counter(sample for rank_ids, _ in everyone for sample in rank_ids)
    return {
        "delivered": sum(counts.values()),
        "duplicates": sum(times - 1 for times in counts.values()),
        "missing": num_samples - len(counts),
        "data_wait_seconds": sum(rank_waited for _, rank_waited in everyone) / len(everyone),
    }


def _accuracy(model: nn.Module, folder: Path) -> float:
    files = DigitFiles(folder)
    batch = next(iter(DataLoader(files, len(files))))
    model.eval()
    with torch.no_grad():
        right = (model(_images(batch)).argmax(1) == batch["cls"]).float().mean()
    model.train()
    return float(right)


if __name__ == "__main__":
    main()
