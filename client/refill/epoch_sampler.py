"""In which order does a rank ask? Positions of its trace, which pods know from the seed or are told."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch.utils.data

from refill.errors import InvalidInput
from refill.protocol.wire_format import Int64Array

if TYPE_CHECKING:
    from refill.torch_dataset import CacheDataset

__all__ = ["EpochSampler", "Position", "TraceSampler"]


class Position(NamedTuple):
    """What a sampler yields in place of an index: it names one request of the rank, in every process.

    The epoch is part of it, so that persistent workers need not be told of a new one.
    """

    epoch: int
    position: int


class _Epochs:
    """Which epoch does the next iteration serve? The one that was set; after a whole epoch without a word, the next.

    torch's samplers would repeat the order of the last epoch then. Here its samples are used up, and asking for
    them again means reading them one by one. An epoch that was broken off is served again from its start.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._handed_out = False

    def set_epoch(self, epoch: int) -> None:
        if not 0 <= epoch < 2**31:
            raise InvalidInput(f"epoch must be 0 to {2**31 - 1}, got {epoch}")
        self.epoch = epoch
        self._handed_out = False

    def begin(self) -> int:
        if self._handed_out:
            self.set_epoch(self.epoch + 1)
        return self.epoch

    def positions(self, epoch: int, length: int) -> Iterator[Position]:
        for position in range(length):
            if position + 1 == length and epoch == self.epoch:
                self._handed_out = True
            yield Position(epoch, position)


class EpochSampler(torch.utils.data.Sampler[Position]):
    """Takes the place of ``DistributedSampler(dataset, ...)``, with the same arguments.

    What is left out is as the dataset says, and else as DistributedSampler has it: shuffled, seed 0, padded, ranks
    of torch.distributed. Raises :class:`InvalidInput` for what contradicts the dataset. The job is registered here:
    a wrong setting or an unknown dataset fails in this line, and loader workers inherit the answer.

    ``set_epoch`` before each epoch as there; left out, each full iteration is followed by the next epoch.
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
        self._epochs = _Epochs()
        self._length = dataset.samples_per_rank

    def __iter__(self) -> Iterator[Position]:
        return self._epochs.positions(self._epochs.begin(), self._length)

    def __len__(self) -> int:
        """Positions of this rank in an epoch."""
        return self._length

    @property
    def epoch(self) -> int:
        return self._epochs.epoch

    def set_epoch(self, epoch: int) -> None:
        self._epochs.set_epoch(epoch)


class TraceSampler(torch.utils.data.Sampler[Position]):
    """Any sampler of sample ids: a subset, weights, an order of one's own.

    At the start of each epoch the ids are listed and posted to the pods, which then hand out samples of those ids
    only, each as often as it was asked for, in an order of their own. An epoch begins when all ranks have posted.
    Give ``order="explicit"`` to the dataset when the sampler asks for its length, which registers the job.

    :param sampler: yields sample ids, ``0 <= id < len(dataset)``. With several ranks each wraps its own.
    """

    def __init__(self, dataset: CacheDataset, sampler: Iterable[int]) -> None:
        dataset.configure(order="explicit")
        dataset.register()
        self.dataset = dataset
        self.sampler = sampler
        self._epochs = _Epochs()

    def __iter__(self) -> Iterator[Position]:
        epoch = self._epochs.begin()
        ids = self._ids()
        self.dataset.connection.post_trace(epoch, ids)
        return self._epochs.positions(epoch, len(ids))

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]  # a sampler without a length has none here either

    @property
    def epoch(self) -> int:
        return self._epochs.epoch

    def set_epoch(self, epoch: int) -> None:
        self._epochs.set_epoch(epoch)
        inner: Any = self.sampler
        if hasattr(inner, "set_epoch"):
            inner.set_epoch(epoch)

    def _ids(self) -> Int64Array:
        try:
            ids = np.fromiter((operator.index(sample_id) for sample_id in self.sampler), dtype=np.int64)
        except (TypeError, OverflowError) as error:
            raise InvalidInput(
                f"TraceSampler takes a sampler of sample ids, one by one (a BatchSampler goes around it): {error}"
            ) from error
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(self.dataset):
            wrong = ids[(ids < 0) | (ids >= len(self.dataset))][0]
            raise InvalidInput(f"there is no sample {wrong}; the dataset has samples 0 to {len(self.dataset) - 1}")
        return ids
