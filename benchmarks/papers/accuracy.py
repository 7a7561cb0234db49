"""Brand Table 7, Redox Fig. 7, DeepIO Fig. 7: what does a small network learn by memory, and by how random an order is?

    python -m benchmarks.papers.accuracy [--samples 16384]

A network of one hidden layer on a made-up dataset, ten classes of four clusters each, in place of ResNet50 on ImageNet
and AlexNet on Caltech 101: differences between orders can be compared, accuracies can't. Redox's dataset is stored
mixed; blocks are of one that is stored by class, as folders of images are.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
from benchmarks.papers.page import Part, Row, print_rows
from numpy.typing import NDArray

from refill.protocol.job_spec import JobSpec
from refill_service.cache_core.sample_mapping import Int64Array
from refill_service.planning.simulated_job import SimulatedJob, SimulatedPods

__all__ = ["MEMORIES", "accuracies_of", "part_of_page"]

Points = NDArray[np.float64]

MEMORIES = (0.05, 0.1, 0.25, 0.5)
BLOCKS = (4, 16, 256)
CLASSES, CLUSTERS, DIMENSIONS, HIDDEN = 10, 4, 32, 64
BATCH, EPOCHS, CHUNK_SIZE, NUM_TEST = 128, 6, 64, 4096
RATE, MOMENTUM = 0.05, 0.9
_SEPARATION = 0.6
"""Of the clusters, in standard deviations of the points of each, in one dimension."""

Order = Callable[[int], Int64Array]
"""``(samples,)`` of an epoch, by its number."""


def accuracies_of(num_samples: int, epochs: int = EPOCHS, seed: int = 0) -> dict[str, float]:
    """By order, in percent: the mean of the last two epochs."""
    generator = np.random.default_rng(seed)
    centres = generator.standard_normal((CLASSES * CLUSTERS, DIMENSIONS)) * _SEPARATION
    cluster = generator.integers(len(centres), size=num_samples + NUM_TEST)
    points = centres[cluster] + generator.standard_normal((len(cluster), DIMENSIONS))
    labels = cluster % CLASSES
    mixed = (points[:num_samples], labels[:num_samples])
    sort = np.argsort(mixed[1], kind="stable")
    by_class, test = (mixed[0][sort], mixed[1][sort]), (points[num_samples:], labels[num_samples:])
    tried: dict[str, tuple[tuple[Points, Int64Array], Order]] = {
        "a perfect shuffle": (by_class, lambda epoch: np.random.default_rng((seed, epoch)).permutation(num_samples)),
        "a constant order": (by_class, lambda epoch: np.arange(num_samples)),
    }
    tried |= {f"memory {part:.0%}": (mixed, _redirected(num_samples, part, seed)) for part in MEMORIES}
    tried |= {f"blocks of {size}": (by_class, _blocks(num_samples, size, seed)) for size in BLOCKS}
    return {name: _trained(*stored, order, epochs, test, seed) for name, (stored, order) in tried.items()}


def _redirected(num_samples: int, memory: float, seed: int) -> Order:
    def order(epoch: int) -> Int64Array:
        spec = JobSpec("accuracy", "memory://n", seed=seed + epoch, chunk_size=CHUNK_SIZE, policy="redox")
        blob, lengths = np.array([0, num_samples], dtype=np.int64), np.ones(num_samples, dtype=np.int64)
        pods = SimulatedPods(1, int(num_samples * memory))
        job = SimulatedJob.of(spec, blob, lengths, pods, 1, batch_size=BATCH)
        return np.concatenate([samples for _, samples in job.epoch(0)])

    return order


def _blocks(num_samples: int, size: int, seed: int) -> Order:
    def order(epoch: int) -> Int64Array:
        firsts = np.random.default_rng((seed, epoch)).permutation(-(-num_samples // size)) * size
        found = (firsts[:, None] + np.arange(size)).ravel()
        return np.asarray(found[found < num_samples])

    return order


def _trained(
    points: Points, labels: Int64Array, order: Order, epochs: int, test: tuple[Points, Int64Array], seed: int
) -> float:
    generator = np.random.default_rng(seed)
    weights: list[Any] = [
        generator.standard_normal((DIMENSIONS, HIDDEN)) * DIMENSIONS**-0.5,
        np.zeros(HIDDEN),
        generator.standard_normal((HIDDEN, CLASSES)) * HIDDEN**-0.5,
        np.zeros(CLASSES),
    ]
    speeds: list[Any] = [np.zeros_like(each) for each in weights]
    found = []
    for epoch in range(epochs):
        samples = order(epoch)
        for first in range(0, len(samples), BATCH):
            batch = samples[first : first + BATCH]
            hidden = np.maximum(points[batch] @ weights[0] + weights[1], 0)
            scores = hidden @ weights[2] + weights[3]
            scores = np.exp(scores - scores.max(axis=1, keepdims=True))
            error = scores / scores.sum(axis=1, keepdims=True)
            error[np.arange(len(batch)), labels[batch]] -= 1
            error /= len(batch)
            back = (error @ weights[2].T) * (hidden > 0)
            slopes = [points[batch].T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0)]
            for weight, speed, slope in zip(weights, speeds, slopes, strict=True):
                speed *= MOMENTUM
                speed -= RATE * slope
                weight += speed
        hidden = np.maximum(test[0] @ weights[0] + weights[1], 0)
        found.append(100 * float(np.mean((hidden @ weights[2] + weights[3]).argmax(axis=1) == test[1])))
    return float(np.mean(found[-2:]))


def part_of_page(num_samples: int = 16_384) -> Part:
    found = accuracies_of(num_samples)
    shuffled = found["a perfect shuffle"]
    rows = [Row("a perfect shuffle: accuracy, percent", "75.61 (ResNet50)", f"{shuffled:.2f}", "Brand Table 7")]
    told = ("75.60, 15 GB", "75.65, 25 GB", "75.61, 35 GB", "75.63, 60 GB")
    for part, of_paper in zip(MEMORIES, told, strict=True):
        beside = f"{found[f'memory {part:.0%}'] - shuffled:+.2f}"
        where = "Brand Table 7, Redox Fig. 7"
        rows.append(Row(f"redox, memory for {part:.0%}, beside it", f"about 0 ({of_paper})", beside, where))
    names = [*(f"blocks of {size}" for size in BLOCKS), "a constant order"]
    for name, level in zip(names, ("73 %", "49 %", "16 %", "0 %"), strict=True):
        beside = f"{found[name] - shuffled:+.2f}"
        rows.append(Row(f"{name} (RL {level}), beside it", "less, the lower RL is", beside, "DeepIO Fig. 7"))
    return Part("Accuracy", f"python -m benchmarks.papers.accuracy --samples {num_samples}", rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=16_384)
    print_rows("Accuracy", part_of_page(parser.parse_args().samples).rows)
