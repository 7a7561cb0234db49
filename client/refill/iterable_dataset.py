"""The same data path for those who iterate: samples of a rank's epoch, dealt batch-wise to loader workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.utils.data

from refill.errors import InvalidInput
from refill.torch_dataset import CacheDataset

__all__ = ["CacheIterableDataset"]


class CacheIterableDataset(torch.utils.data.IterableDataset[Any]):
    """Iterates over the samples of a rank's epoch. Takes what :class:`CacheDataset` takes.

    Worker w of W asks for every W-th run of ``batch_size`` positions; give the DataLoader the same ``batch_size`` and
    each of its batches is one request, and ``len(loader)`` is right. Call ``set_epoch`` before each epoch: workers
    can't know by themselves that another one begins.
    """

    def __init__(self, service_url: str, *, batch_size: int = 64, **arguments: Any) -> None:
        if batch_size < 1:
            raise InvalidInput(f"batch_size must be at least 1, got {batch_size}")
        self.batch_size = batch_size
        self.dataset = CacheDataset(service_url, **arguments)
        self.dataset.configure(order="keyed")
        # In shared memory: persistent workers hold a copy of this object and must see the next epoch.
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def set_epoch(self, epoch: int) -> None:
        """Call before each epoch, as with DistributedSampler; it reaches persistent workers, too."""
        if not 0 <= epoch < 2**31:
            raise InvalidInput(f"epoch must be 0 to {2**31 - 1}, got {epoch}")
        self._epoch[0] = epoch

    def __len__(self) -> int:
        """Samples of this rank in an epoch."""
        return self.dataset.samples_per_rank

    def __iter__(self) -> Iterator[Any]:
        # Read here and not in the generator, which starts only when its first sample is taken.
        return self._samples(int(self._epoch[0]))

    def _samples(self, epoch: int) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        length = len(self)
        for start in range(number * self.batch_size, length, workers * self.batch_size):
            positions = np.arange(start, min(start + self.batch_size, length), dtype=np.int64)
            yield from self.dataset.samples_of(epoch, positions)
