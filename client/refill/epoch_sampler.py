"""In which order does a rank ask? Positions of its trace, which pods know from the seed or are told."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch.utils.data

from refill.errors import InvalidInput

if TYPE_CHECKING:
    from refill.torch_dataset import CacheDataset

__all__ = ["EpochSampler", "Position", "TraceSampler"]


class Position(NamedTuple):
    """What a sampler yields in place of an index: it names one request of the rank, in every process."""

    epoch: int
    position: int


class EpochSampler(torch.utils.data.Sampler[Position]):
    """Takes the place of ``DistributedSampler(dataset, ...)``, with the same arguments.

    What is given is set on the dataset, which registers its job at the first use, so give it before; what is left
    out stays as the dataset has it. Call ``set_epoch`` before each epoch, as there.
    """

    def __init__(
        self,
        dataset: CacheDataset,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool | None = None,
        seed: int | None = None,
        drop_last: bool | None = None,
    ) -> None:
        dataset.configure(
            world_size=num_replicas, rank=rank, shuffle=shuffle, seed=seed, drop_last=drop_last, order="keyed"
        )
        self.dataset = dataset
        self.epoch = 0

    def __iter__(self) -> Iterator[Position]:
        return map(Position, _forever(self.epoch), range(len(self)))

    def __len__(self) -> int:
        """Positions of this rank in an epoch."""
        return self.dataset.samples_per_rank

    def set_epoch(self, epoch: int) -> None:
        self.epoch = _checked_epoch(epoch)


class TraceSampler(torch.utils.data.Sampler[Position]):
    """Any sampler of sample ids: a subset, weights, an order of one's own.

    At the start of each epoch the ids are listed and posted to the pods, which then hand out samples of those ids
    only, each as often as it was asked for, in an order of their own.

    :param sampler: yields sample ids, ``0 <= id < len(dataset)``. With several ranks each wraps its own.
    """

    def __init__(self, dataset: CacheDataset, sampler: Iterable[int]) -> None:
        dataset.configure(order="explicit")
        self.dataset = dataset
        self.sampler = sampler
        self.epoch = 0

    def __iter__(self) -> Iterator[Position]:
        ids = np.fromiter((int(index) for index in self.sampler), dtype=np.int64)
        self.dataset.connection.post_trace(self.epoch, ids)
        return map(Position, _forever(self.epoch), range(len(ids)))

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]  # a sampler without a length has none here either

    def set_epoch(self, epoch: int) -> None:
        self.epoch = _checked_epoch(epoch)
        inner: Any = self.sampler
        if hasattr(inner, "set_epoch"):
            inner.set_epoch(epoch)


def _forever(epoch: int) -> Iterator[int]:
    while True:
        yield epoch


def _checked_epoch(epoch: int) -> int:
    if not 0 <= epoch < 2**31:
        raise InvalidInput(f"epoch must be 0 to {2**31 - 1}, got {epoch}")
    return epoch
