"""Which policies are there? The one place that knows them by name."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from refill_service.cache_core.drain_epoch import DrainEpoch
from refill_service.cache_core.epoch_order import Traces
from refill_service.cache_core.owner_epoch import OwnerEpoch
from refill_service.cache_core.redox_epoch import RedoxEpoch
from refill_service.cache_core.sample_mapping import AbstractMapping, Int64Array

__all__ = ["new_epoch"]


def new_epoch(
    policy: str,
    mapping: AbstractMapping,
    traces: Traces,
    lengths: NDArray[np.int64],
    *,
    capacity_bytes: int,
    refill: str,
    prefetch_window: int,
    key: str,
    answered: tuple[Int64Array, Int64Array] | None = None,
) -> OwnerEpoch:
    """One owner's share of one epoch under ``drain`` or ``redox``.

    :param capacity_bytes: memory for samples. ``redox`` does without: its slots are its limit.
    :param refill: chunk choice of ``redox``, ``best`` or ``random``.
    :param answered: what was answered before a restart, as :class:`OwnerEpoch` takes it.
    """
    if policy == "drain":
        return DrainEpoch(
            mapping,
            traces,
            lengths,
            capacity_bytes=capacity_bytes,
            prefetch_window=prefetch_window,
            key=key,
            answered=answered,
        )
    return RedoxEpoch(
        mapping, traces, lengths, refill=refill, prefetch_window=prefetch_window, key=key, answered=answered
    )
