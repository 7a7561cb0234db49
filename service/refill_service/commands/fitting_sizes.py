"""Which chunk sizes does ``refill analyze`` leave out? Those of which memory holds no chunk. What would fit is said."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from refill.errors import MemoryTooSmall, RefillError
from refill_service.planning.analysis import Analysis

__all__ = ["none_fits", "of_those_that_fit"]

Row = TypeVar("Row")


def of_those_that_fit(
    analysis: Analysis, chunk_sizes: Sequence[int], row_of: Callable[[int], Row]
) -> tuple[dict[int, Row], list[str]]:
    """The row of each chunk size that fits, and for each of the others why not."""
    rows: dict[int, Row] = {}
    failures: dict[int, MemoryTooSmall] = {}
    for chunk_size in chunk_sizes:
        try:
            rows[chunk_size] = row_of(chunk_size)
        except MemoryTooSmall as error:
            failures[chunk_size] = error
    if not rows:
        raise none_fits(analysis, failures[min(failures)])
    return rows, [f"K={chunk_size}: {error}" for chunk_size, error in failures.items()]


def none_fits(analysis: Analysis, error: RefillError) -> RefillError:
    """The error of a chunk size, with the option that makes it fit."""
    if not isinstance(error, MemoryTooSmall):
        return error
    how = "give more --pod-memory"
    if analysis.pod is None:
        how = f"--chunk-memory {math.ceil(error.details['chunk_bytes'] * analysis.num_pods * analysis.scale)} is enough"
    return MemoryTooSmall(f"{error} ({how})", **error.details)
