"""What does a small network learn of a made-up dataset, batch by batch?

One hidden layer, and ten classes of four clusters each, in place of the papers' networks and photos: differences
between orders can be compared, accuracies can't.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refill_service.cache_core.sample_mapping import Int64Array

__all__ = ["BATCH", "Network", "Points", "made_up"]

CLASSES, CLUSTERS, DIMENSIONS, HIDDEN, NUM_TEST = 10, 4, 32, 64, 4096
BATCH, RATE, MOMENTUM = 128, 0.05, 0.9
_SEPARATION = 0.6
"""Of the clusters, in standard deviations of the points of each, in one dimension."""


@dataclass(frozen=True)
class Points:
    at: NDArray[np.float64]
    """``(points, dimensions)``."""
    labels: Int64Array

    def some(self, which: Int64Array) -> Points:
        return Points(self.at[which], self.labels[which])


def made_up(num_samples: int, seed: int) -> tuple[Points, Points]:
    """``(training, test)``, stored mixed."""
    generator = np.random.default_rng(seed)
    centres = generator.standard_normal((CLASSES * CLUSTERS, DIMENSIONS)) * _SEPARATION
    cluster = generator.integers(len(centres), size=num_samples + NUM_TEST)
    at = centres[cluster] + generator.standard_normal((len(cluster), DIMENSIONS))
    all_points = Points(at, cluster % CLASSES)
    return all_points.some(np.arange(num_samples)), all_points.some(np.arange(num_samples, len(cluster)))


class Network:
    def __init__(self, seed: int) -> None:
        generator = np.random.default_rng(seed)
        self._weights: list[Any] = [
            generator.standard_normal((DIMENSIONS, HIDDEN)) * DIMENSIONS**-0.5,
            np.zeros(HIDDEN),
            generator.standard_normal((HIDDEN, CLASSES)) * HIDDEN**-0.5,
            np.zeros(CLASSES),
        ]
        self._speeds: list[Any] = [np.zeros_like(each) for each in self._weights]

    def train(self, batch: Points) -> NDArray[np.float64]:
        """``(points,)`` the losses before it."""
        weights, each = self._weights, np.arange(len(batch.labels))
        hidden = np.maximum(batch.at @ weights[0] + weights[1], 0)
        scores = hidden @ weights[2] + weights[3]
        parts = np.exp(scores - scores.max(axis=1, keepdims=True))
        parts /= parts.sum(axis=1, keepdims=True)
        losses = -np.log(parts[each, batch.labels])
        error = parts
        error[each, batch.labels] -= 1
        error /= len(each)
        back = (error @ weights[2].T) * (hidden > 0)
        slopes = [batch.at.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0)]
        for weight, speed, slope in zip(weights, self._speeds, slopes, strict=True):
            speed *= MOMENTUM
            speed -= RATE * slope
            weight += speed
        return np.asarray(losses)

    def accuracy(self, test: Points) -> float:
        """In percent."""
        weights = self._weights
        hidden = np.maximum(test.at @ weights[0] + weights[1], 0)
        return 100 * float(np.mean((hidden @ weights[2] + weights[3]).argmax(axis=1) == test.labels))
