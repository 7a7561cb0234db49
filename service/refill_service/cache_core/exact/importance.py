"""How important is a sample for training, and which samples does an epoch draw (SHADE, sections 4.1 and 4.2)?

The loss of a batch is decomposed into that of each sample, and samples are ranked within their batch: losses of
different batches, at different stages of training, can't be compared, ranks can. An epoch draws samples with
replacement by their ranks, so it is not once an epoch: some come often, some not at all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from refill_service.cache_core.sample_mapping import Int64Array

__all__ = ["drawn", "rank_scores", "sample_losses", "share_of"]

RANK_OFFSET = 10
"""b0. It is not in the paper; it keeps the logarithm of the lowest rank finite, and scores within a factor of a few."""


def sample_losses(logits: NDArray[np.float64], labels: Int64Array) -> NDArray[np.float64]:
    """Cross entropy of each sample, ``(batch,)``, from ``(batch, classes)`` logits and ``(batch,)`` labels."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_sums = np.log(np.exp(shifted).sum(axis=1))
    return np.asarray(log_sums - shifted[np.arange(len(labels)), labels])


def rank_scores(losses: NDArray[np.float64], offset: float = RANK_OFFSET) -> NDArray[np.float64]:
    """``(batch,)``: log(number of others in the batch with a strictly smaller loss + offset)."""
    return np.asarray(np.log(np.searchsorted(np.sort(losses), losses, side="left") + offset))


def drawn(scores: NDArray[np.float64], generator: np.random.Generator) -> Int64Array:
    """As many draws with replacement as there are samples, each sample as probable as its score is high. ``(n,)``."""
    return generator.choice(len(scores), size=len(scores), p=scores / scores.sum()).astype(np.int64)


def share_of(
    draws: Sequence[int],
    process: int,
    num_processes: int,
    *,
    improving: bool,
    is_cached: Callable[[int], bool] = lambda sample: False,
    repetition: float = 1.0,
) -> list[int]:
    """Which of the epoch's draws one process trains with, cached ones first; to be shuffled by who asks.

    While validation improves, a process takes the n / W draws that came most often (ties by who came first); else every
    W-th of all draws. Then draws that are in memory are repeated ``repetition`` times, and others fill up to n / W.
    """
    length = len(draws) // num_processes
    if improving:
        counts = Counter(draws)
        first: dict[int, int] = {}
        for place, sample in enumerate(draws):
            first.setdefault(sample, place)
        mine = sorted(draws, key=lambda sample: (-counts[sample], first[sample]))[:length]
    else:
        mine = list(draws[process::num_processes])[:length]
    cached = [sample for sample in mine if is_cached(sample)]
    whole, part = divmod(repetition, 1)
    repeated = cached * int(whole) + cached[: round(part * len(cached))]
    others = [sample for sample in mine if not is_cached(sample)]
    return (repeated + others)[:length]
