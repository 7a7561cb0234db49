"""SHADE Fig. 8: how soon does a network learn whose samples are drawn by importance, beside uniform sampling over LRU?

    python -m benchmarks.papers.shade_accuracy [--samples 8192]

A small network (``small_network.py``) in place of AlexNet and ResNet-50. Time is that of loading, where a miss takes as
long as in ``shade_caches.py``: 11 hits. Means of a few seeds. What it learns of real images by epochs is measured by
``make bench-importance``.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from benchmarks.papers.known_uses import KnownUses
from benchmarks.papers.page import Curve, Part, Row, print_rows
from benchmarks.papers.small_network import BATCH, Network, made_up
from numpy.typing import NDArray

from refill.protocol.importance import order_of_rank, rank_scores
from refill_service.cache_core.exact.sample_caches import ImportanceCache, LruCache
from refill_service.cache_core.sample_mapping import Int64Array

__all__ = ["Learned", "learned", "part_of_page"]

EPOCHS, SEEDS, REPETITION = 12, 3, 3.0
MISS = 11
"""What one takes, in hits."""
_NEARLY = 1.0
"""Percent below what both reach: who is there first?"""
_NOTHING_KNOWN = KnownUses(np.empty(0, dtype=np.int64), 0)


@dataclass(frozen=True)
class Learned:
    """After each epoch, means over the seeds."""

    accuracy: NDArray[np.float64]
    """In percent."""
    loaded: NDArray[np.float64]
    """Time, in epochs all of whose samples are hits."""

    def when(self, accuracy: float) -> tuple[int, float]:
        """``(epoch, time)`` when it is first so high; infinite time if it never is."""
        reached = np.flatnonzero(self.accuracy >= accuracy)
        if not len(reached):
            return len(self.accuracy) + 1, math.inf
        return int(reached[0]) + 1, float(self.loaded[reached[0]])


def learned(
    num_samples: int, memory: float, repetition: float | None, epochs: int = EPOCHS, seeds: int = SEEDS
) -> Learned:
    """:param memory: as a part of the samples.

    :param repetition: None: uniform sampling over LRU.
    """
    found = np.array([list(_epochs(num_samples, memory, repetition, epochs, seed)) for seed in range(seeds)])
    accuracy, hits = found.mean(axis=0).T
    return Learned(accuracy, np.cumsum(hits + MISS * (1 - hits)))


def _epochs(
    num_samples: int, memory: float, repetition: float | None, epochs: int, seed: int
) -> Iterator[tuple[float, float]]:
    """``(accuracy, hits)``."""
    points, test = made_up(num_samples, seed)
    network, scores = Network(seed), np.full(num_samples, np.nan)
    make = LruCache if repetition is None else ImportanceCache
    cache = make(np.ones(num_samples, dtype=np.int64), int(memory * num_samples))
    for epoch in range(epochs):
        if repetition is None:
            order = np.random.default_rng((seed, epoch)).permutation(num_samples)
        else:
            cached = np.array([cache.holds(sample) for sample in range(num_samples)])
            order = order_of_rank(scores, cached, 0, 1, seed=seed, epoch=epoch, repetition=repetition, improving=False)
        hits = 0
        for first in range(0, len(order), BATCH):
            batch = order[first : first + BATCH]
            hits += _fetched(cache, batch)
            found = rank_scores(network.train(points.some(batch)))
            if isinstance(cache, ImportanceCache):
                scores[batch] = found
                cache.scored(batch, scores[batch])
        yield network.accuracy(test), hits / len(order)


def _fetched(cache: LruCache | ImportanceCache, batch: Int64Array) -> int:
    """The hits."""
    hits = 0
    for sample in batch.tolist():
        if cache.holds(sample):
            hits += 1
            cache.used(sample, 0, _NOTHING_KNOWN)
        else:
            cache.missed(sample, 0, _NOTHING_KNOWN)
    return hits


def part_of_page(num_samples: int = 8192) -> Part:
    rows: list[Row] = []
    curves: list[Curve] = []
    for memory, told in ((0.1, "up to 3x"), (0.75, "up to 3.3x")):
        uniform, shade = learned(num_samples, memory, None), learned(num_samples, memory, REPETITION)
        what = f"SHADE, 3x, beside uniform sampling over LRU, memory for {memory:.0%}"
        last = (float(shade.accuracy[-1]), float(uniform.accuracy[-1]))
        got = f"{last[0]:.1f}, {last[1]:.1f}"
        rows.append(Row(f"{what}: accuracy after {EPOCHS} epochs, percent", "no less", got, "Fig. 8"))
        target = min(last) - _NEARLY
        ours, theirs = shade.when(target), uniform.when(target)
        for expected, unit, mine, other in (
            ("-", "epochs", ours[0], theirs[0]),
            (told, "time of loading", ours[1], theirs[1]),
        ):
            rows.append(Row(f"{what}: faster to {target:.1f} %, by {unit}", expected, f"{other / mine:.1f}x", "Fig. 8"))
        lines = {
            name: list(zip(found.loaded.tolist(), found.accuracy.tolist(), strict=True))
            for name, found in (("SHADE, 3x", shade), ("uniform, LRU", uniform))
        }
        curves.append(Curve(f"shade_accuracy_{memory:.0%}"[:-1], "time of loading", "accuracy, percent", lines))
    return Part("SHADE", f"python -m benchmarks.papers.shade_accuracy --samples {num_samples}", rows, curves)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8192)
    print_rows("SHADE, accuracy by time", part_of_page(parser.parse_args().samples).rows)
