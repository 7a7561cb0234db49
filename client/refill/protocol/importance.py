"""How important is a sample for training, and which samples does an epoch draw? SHADE, section 4.2.1.

The loss of a batch is decomposed into those of its samples, and samples are ranked within their batch: losses of
different batches, at different stages of training, can't be compared, ranks can. An epoch draws samples with
replacement by their ranks: some come often, some not at all.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from refill.protocol.wire_format import Int64Array

RANK_OFFSET = 10.0
"""b0. It is not in the paper. It keeps the logarithm of the lowest rank finite, and scores within a factor of a few."""

_AT_FIRST = 1.0
"""The score of a sample that was never trained with: equal for all at first. It is not in the paper either; the hits
that are known for SHADE follow from it."""


def rank_scores(losses: NDArray[np.floating], offset: float = RANK_OFFSET) -> NDArray[np.float64]:
    """``(batch,)``: log(number of others in the batch with a strictly smaller loss + offset)."""
    return np.asarray(np.log(np.searchsorted(np.sort(losses), losses, side="left") + offset))


def drawn(scores: NDArray[np.floating], generator: np.random.Generator) -> Int64Array:
    """``(n,)``: as many draws with replacement as there are samples, each sample as probable as its score is high.

    :param scores: ``(n,)``; NaN for samples that were never trained with.
    """
    bounds = np.cumsum(np.where(np.isnan(scores), _AT_FIRST, scores), dtype=np.float64)
    drawn = np.searchsorted(bounds, generator.random(len(scores)) * bounds[-1], side="right")
    return np.asarray(drawn, dtype=np.int64)


def share_of(
    draws: Int64Array, process: int, num_processes: int, *, improving: bool, generator: np.random.Generator
) -> Int64Array:
    """Which of the epoch's draws one process trains with, ``(ceil(n / W),)``.

    While validation improves, the draws that came most often (ties by who came first), shuffled; else every W-th.
    """
    length = -(-len(draws) // num_processes)
    if not improving:
        return np.resize(draws, length * num_processes)[process::num_processes]
    _, first, which, counts = np.unique(draws, return_index=True, return_inverse=True, return_counts=True)
    most = np.lexsort((first[which], -counts[which]))[:length]
    return generator.permutation(draws[most])


def with_cached_first(share: Int64Array, cached: NDArray[np.bool_], repetition: float) -> Int64Array:
    """The order of one process, ``(len(share),)``: draws that are in the cache ``repetition`` times, then others as far
    as there is room.

    :param cached: ``(samples,)``.
    """
    here = cached[share]
    hits, others = share[here], share[~here]
    return np.concatenate([np.resize(hits, round(repetition * len(hits))), others, hits])[: len(share)]


def order_of_rank(
    scores: NDArray[np.floating],
    cached: NDArray[np.bool_],
    rank: int,
    num_ranks: int,
    *,
    seed: int,
    epoch: int,
    repetition: float,
    improving: bool,
) -> Int64Array:
    """``(ceil(n / W),)``: what a rank trains with in an epoch. Ranks that know the same divide one drawing, unless
    validation improves: then each draws for itself. Parameters as of the functions above."""
    of_all, own = np.random.default_rng([seed, epoch]), np.random.default_rng([seed, epoch, 1 + rank])
    draws = drawn(scores, own if improving else of_all)
    share = share_of(draws, rank, num_ranks, improving=improving, generator=own)
    return with_cached_first(share, cached, repetition)
