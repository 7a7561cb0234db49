"""Brand Table 7 and Fig. 15, Redox Table 7 and Fig. 7, DeepIO Fig. 7 and 8: what does a small network learn by memory,
and by how random an order is?

    python -m benchmarks.papers.accuracy [--samples 16384]

In place of ResNet50 on ImageNet and AlexNet on Caltech 101 (``small_network.py``). Redox's dataset is stored mixed;
blocks and rounds are of one that is stored by class, as folders of images are.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import numpy as np
from benchmarks.papers.page import Curve, Part, Row, print_rows
from benchmarks.papers.small_network import BATCH, Network, Points, made_up

from refill.protocol.job_spec import JobSpec
from refill_service.cache_core.sample_mapping import Int64Array
from refill_service.planning.simulated_job import SimulatedJob, SimulatedPods

__all__ = ["FILE", "MEMORIES", "accuracies_of", "part_of_page", "rounds"]

MEMORIES = (0.05, 0.1, 0.25, 0.5)
BLOCKS = (4, 16, 256)
SHARES = (0.5, 0.25)
EPOCHS, CHUNK_SIZE, FILE = 6, 64, 64
SHUFFLE, CONSTANT = "a perfect shuffle", "a constant order"

Order = Callable[[int], Int64Array]
"""``(samples,)`` of an epoch, by its number."""


def accuracies_of(num_samples: int, epochs: int = EPOCHS, seed: int = 0) -> dict[str, list[float]]:
    """By order, in percent, after each epoch."""
    mixed, test = made_up(num_samples, seed)
    by_class = mixed.some(np.argsort(mixed.labels, kind="stable"))
    tried: dict[str, tuple[Points, Order]] = {
        SHUFFLE: (by_class, lambda epoch: np.random.default_rng((seed, epoch)).permutation(num_samples)),
        CONSTANT: (by_class, lambda epoch: np.arange(num_samples)),
    }
    tried |= {f"redox, memory {part:.0%}": (mixed, _redirected(num_samples, part, seed)) for part in MEMORIES}
    tried |= {f"blocks of {size}": (by_class, _blocks(num_samples, size, seed)) for size in BLOCKS}
    tried |= {f"R = {share:g}": (by_class, rounds(num_samples, share, seed)) for share in SHARES}
    return {name: _trained(points, order, epochs, test, seed) for name, (points, order) in tried.items()}


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
        return _of_blocks(np.random.default_rng((seed, epoch)).permutation(-(-num_samples // size)), size, num_samples)

    return order


def rounds(num_samples: int, share: float, seed: int) -> Order:
    """DeepIO's opportunistic order: rounds of whole files that are drawn, all samples of a round shuffled."""

    def order(epoch: int) -> Int64Array:
        generator = np.random.default_rng((seed, epoch))
        rounds = np.array_split(generator.permutation(-(-num_samples // FILE)), round(1 / share))
        return np.concatenate([generator.permutation(_of_blocks(files, FILE, num_samples)) for files in rounds])

    return order


def _of_blocks(blocks: Int64Array, size: int, num_samples: int) -> Int64Array:
    found = (blocks[:, None] * size + np.arange(size)).ravel()
    return np.asarray(found[found < num_samples])


def _trained(points: Points, order: Order, epochs: int, test: Points, seed: int) -> list[float]:
    network, found = Network(seed), []
    for epoch in range(epochs):
        samples = order(epoch)
        for first in range(0, len(samples), BATCH):
            network.train(points.some(samples[first : first + BATCH]))
        found.append(network.accuracy(test))
    return found


def part_of_page(num_samples: int = 16_384) -> Part:
    by_order = accuracies_of(num_samples)
    last_two = {name: float(np.mean(found[-2:])) for name, found in by_order.items()}
    shuffled = last_two[SHUFFLE]
    rows = [Row(f"{SHUFFLE}: accuracy, percent", "75.61 (ResNet50)", f"{shuffled:.2f}", "Brand, Redox Table 7")]

    def beside(name: str, what: str, expected: str, where: str) -> Row:
        return Row(f"{what}, beside it", expected, f"{last_two[name] - shuffled:+.2f}", where)

    told = ("75.60, 15 GB", "75.65, 25 GB", "75.61, 35 GB", "75.63, 60 GB")
    for part, of_paper in zip(MEMORIES, told, strict=True):
        expected, where = f"about 0 ({of_paper})", "Brand Table 7 and Fig. 15, Redox Table 7 and Fig. 7"
        rows.append(beside(f"redox, memory {part:.0%}", f"redox, memory for {part:.0%}", expected, where))
    levels = {**dict(zip(BLOCKS, ("73 %", "49 %", "16 %"), strict=True))}
    for size, level in levels.items():
        name = f"blocks of {size}"
        rows.append(beside(name, f"{name} (RL {level})", "less, the lower RL is", "DeepIO Fig. 7"))
    rows.append(beside(CONSTANT, f"{CONSTANT} (RL 0 %)", "less, the lower RL is", "DeepIO Fig. 7"))
    for share, level in zip(SHARES, ("98.54 %", "96.96 %"), strict=True):
        rows.append(beside(f"R = {share:g}", f"R = {share:g} (RL {level})", "almost 0", "DeepIO Fig. 8"))
    epochs = range(1, EPOCHS + 1)
    curves = [
        Curve(name, "epoch", "accuracy, percent", {each: list(zip(epochs, by_order[each], strict=True)) for each in of})
        for name, of in (
            ("accuracy_redox", [SHUFFLE, *(f"redox, memory {part:.0%}" for part in MEMORIES)]),
            (
                "accuracy_level",
                [SHUFFLE, *(f"R = {each:g}" for each in SHARES), *(f"blocks of {each}" for each in BLOCKS), CONSTANT],
            ),
        )
    ]
    return Part("Accuracy", f"python -m benchmarks.papers.accuracy --samples {num_samples}", rows, curves)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=16_384)
    print_rows("Accuracy", part_of_page(parser.parse_args().samples).rows)
