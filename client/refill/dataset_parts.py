"""Which samples does a torch Subset of a dataset have, and which job reads them?

``random_split(dataset, ...)`` makes Subsets of one dataset. Each is an order of its own, so each part has a job of its
own: no part waits for another one, and none counts as left out. The job's name follows from the samples, so that all
ranks, and the next process, name it alike.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.utils.data

from refill.errors import InvalidInput
from refill.protocol.wire_format import Int64Array

if TYPE_CHECKING:
    from refill.torch_dataset import CacheDataset

__all__ = [
    "dataset_alone",
    "dataset_and_ids",
    "dataset_inside",
]


class _Ids(Sequence[Any]):
    """Takes the place of the indices of a Subset, and has the ids of its samples. What a sampler yields is no index: it
    passes through as it is, to the dataset of the part."""

    def __init__(self, ids: Int64Array) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, tuple):  # a Position
            return index
        return self.ids[index].tolist()


def dataset_and_ids(name: str, given: Any) -> tuple[CacheDataset, Int64Array | None]:
    """What a sampler reads: a dataset, and the ids of a part of it, ``(n,)``; None: all of it.

    A Subset is made to read its part: from now on positions pass through it, and its ``dataset`` is that of the part.

    :param name: of the sampler, for errors.

    Raises :class:`InvalidInput` for anything but a CacheDataset, or Subsets around one.
    """
    if not isinstance(given, torch.utils.data.Subset):
        return dataset_alone(name, given), None
    whole, ids = _flat(name, given)
    part = whole.part(ids)
    given.dataset, given.indices = part, _Ids(ids)
    return part, ids


def dataset_alone(name: str, given: Any) -> CacheDataset:
    """The CacheDataset itself. Raises :class:`InvalidInput` for anything else."""
    from refill.torch_dataset import CacheDataset

    if isinstance(given, CacheDataset):
        return given
    kind = type(given).__name__
    if isinstance(given, torch.utils.data.ConcatDataset):
        raise InvalidInput(
            f"{name} can't read a {kind}: make one Subset(dataset, [*a.indices, *b.indices]) of parts of one dataset; "
            "give each of several datasets a sampler and a DataLoader of its own, or pack them as one"
        )
    if isinstance(given, torch.utils.data.Subset):
        raise InvalidInput(f"{name} reads a whole CacheDataset, not a Subset: EpochSampler and TraceSampler read those")
    raise InvalidInput(
        f"{name} reads a CacheDataset, or a torch Subset of one, not a {kind}: if that wraps a dataset, give the "
        "sampler what is inside, and have the wrapper's __getitems__ hand on the list that it gets"
    )


def dataset_inside(given: Any) -> Any:
    """Of a Subset, the dataset that it reads; else what is given."""
    while isinstance(given, torch.utils.data.Subset):
        given = given.dataset
    return given


def _flat(name: str, subset: torch.utils.data.Subset[Any]) -> tuple[CacheDataset, Int64Array]:
    """The dataset, and its ids, of a Subset of it or of another Subset."""
    if isinstance(subset.indices, _Ids):
        return dataset_alone(name, subset.dataset), subset.indices.ids
    try:
        ids = np.fromiter((operator.index(index) for index in subset.indices), dtype=np.int64)
    except (TypeError, OverflowError) as error:
        raise InvalidInput(f"the indices of the Subset must be whole numbers: {error}") from error
    within: Int64Array | None = None
    if isinstance(subset.dataset, torch.utils.data.Subset):
        dataset, within = _flat(name, subset.dataset)
    else:
        dataset = dataset_alone(name, subset.dataset)
    size = len(dataset) if within is None else len(within)
    ids = np.where(ids < 0, ids + size, ids)
    if len(wrong := np.flatnonzero((ids < 0) | (ids >= size))):
        raise InvalidInput(f"the Subset has index {subset.indices[wrong[0]]}, and what it is of has {size} samples")
    return dataset, ids if within is None else within[ids]
