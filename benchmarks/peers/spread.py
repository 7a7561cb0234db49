"""Was it a shuffle, and of every sample once? Measured from the ids that a loader delivered in an epoch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["RUN", "co_batch", "distance", "missing", "repeated"]

RUN = 64
"""Samples of a run: neighbours in the dataset's order. A uniform shuffle has no memory of them."""


def co_batch(batches: Sequence[np.ndarray]) -> float:
    """How often two samples of one run meet in a batch, against a uniform shuffle of the same samples: 1.0."""
    ids = np.concatenate(batches)
    batch_of = np.repeat(np.arange(len(batches)), [len(batch) for batch in batches])
    _, in_batch = np.unique(batch_of, return_counts=True)
    _, in_run = np.unique(ids // RUN, return_counts=True)
    _, in_both = np.unique(np.stack([batch_of, ids // RUN]), axis=1, return_counts=True)
    expected = _pairs(in_batch) * _pairs(in_run) / _pairs(np.array([len(ids)]))
    return float(_pairs(in_both) / expected)


def distance(batches: Sequence[np.ndarray]) -> float:
    """How far apart two samples of one run come, as part of the epoch, on average; a uniform shuffle: 0.333."""
    ids = np.concatenate(batches)
    total, pairs = 0.0, 0
    for places in np.split(
        np.argsort(ids // RUN, kind="stable"), np.unique(ids // RUN, return_counts=True)[1].cumsum()
    ):
        # Sorted, as a stable sort leaves them: place i is added i times and taken away n - 1 - i times.
        total += float((places * (2 * np.arange(len(places)) - len(places) + 1)).sum())
        pairs += len(places) * (len(places) - 1) // 2
    return total / pairs / len(ids)


def repeated(batches: Sequence[np.ndarray]) -> int:
    """Deliveries of samples that had been delivered in this epoch already."""
    ids = np.concatenate(batches)
    return len(ids) - len(np.unique(ids))


def missing(batches: Sequence[np.ndarray], samples: int) -> int:
    return samples - len(np.unique(np.concatenate(batches)))


def _pairs(counts: np.ndarray) -> float:
    return float((counts * (counts - 1.0) / 2).sum())
