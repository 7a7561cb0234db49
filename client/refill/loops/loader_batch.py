"""What of a batch becomes a tensor, and does torch put samples together by itself? Then they have to be of one shape.

Its own error names neither sample nor remedy (``Trying to resize storage that is not resizable``). But a loader with a
``collate_fn`` of its own may deal with any samples, and no loader says which it has: so it is found among the callers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils.data

from refill.formats.sample_decoder import check_alike, shapes_of
from refill.loops.callers import callers

_REMEDY = (
    "Have them made alike by transform=function of CacheDataset, as in step 3 of README, where photos are resized; or "
    "give the DataLoader a collate_fn that takes all shapes"
)
_MOST_CALLERS = 12
"""Frames between a dataset and the loader's fetcher, which may have a Subset or a concatenation between them."""


def check_one_shape(samples: Sequence[Any], yielded: int | None = None) -> None:
    """Raises :class:`InvalidInput`, naming two shapes, when the loader that asks can't put these samples together.

    :param yielded: of the iterable form, how many samples the loader has had: these may be of several batches.
    """
    if not samples or (shapes := shapes_of(samples[0])) == {}:
        return
    if all(shapes_of(sample) == shapes for sample in samples):
        return
    size = _stacked_by_torch()
    if size is None:
        return
    ends = [len(samples)] if yielded is None else range(size - yielded % size, len(samples) + size, size)
    start = 0
    for end in ends:
        check_alike(samples[start:end], _REMEDY)
        start = end


def tensor_of(data: memoryview) -> torch.Tensor:
    """Bytes in a buffer as a tensor ``(n,)``, uint8: a view of it."""
    if not len(data):  # which torch refuses
        return torch.empty(0, dtype=torch.uint8)
    # Nor does it take memory that can't be written to.
    return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.uint8)


def _stacked_by_torch() -> int | None:
    """How many samples the loader that asks puts together, by torch's own function; None: another does it."""
    for frame in callers(past=2, most=_MOST_CALLERS):
        fetcher, batch = (frame.f_locals.get(name) for name in ("self", "possibly_batched_index"))
        if batch is not None and getattr(fetcher, "collate_fn", None) is torch.utils.data.default_collate:
            return len(batch)
    return None
