"""Brand Table 7, Redox Fig. 7, DeepIO Fig. 7: what do small networks learn by memory, and by how random an order is?

    python -m benchmarks.papers.accuracy [--samples 8192]

A made-up dataset of ten classes (``benchmarks/made_up_training.py``) in place of ImageNet and Caltech 101, so that
differences between orders are what can be compared, and not accuracies. Redox's dataset is stored mixed; blocks are of
one that is stored by class, as folders of images are.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from benchmarks.papers.page import Part, Row, print_rows

__all__ = ["MEMORIES", "accuracies_of", "part_of_page"]

MEMORIES = (0.05, 0.1, 0.25, 0.5)
BLOCKS = ((4, "a little less"), (16, "less"), (256, "much less"))
CLASSES, BATCH, EPOCHS, CHUNK_SIZE = 10, 128, 5, 64


def accuracies_of(num_samples: int, epochs: int, seeds: Sequence[int]) -> dict[str, float]:
    """The best of each order's epochs in percent, the mean of seeds."""
    sys.path.insert(0, str(Path(__file__).parents[1]))  # its files are scripts, which import each other by name
    training, orders = importlib.import_module("made_up_training"), importlib.import_module("delivered_orders")
    tried = {"exact": orders.Order("exact")}
    tried |= {f"memory {part:.0%}": orders.Order("redox", CHUNK_SIZE, part, by_class=False) for part in MEMORIES}
    tried |= {f"blocks of {size}": orders.Order("blocks", size) for size, _ in BLOCKS}
    tried["constant"] = orders.Order("stored")
    found = [
        training.accuracies(list(tried.values()), 2, num_samples, CLASSES, BATCH, epochs, seed).max(axis=1)
        for seed in seeds
    ]
    return dict(zip(tried, np.mean(found, axis=0).tolist(), strict=True))


def part_of_page(num_samples: int = 8192, epochs: int = EPOCHS, seeds: Sequence[int] = (0,)) -> Part:
    found = accuracies_of(num_samples, epochs, seeds)
    shuffled = found["exact"]
    rows = [Row("a perfect shuffle: accuracy, percent", "75.61 (ResNet50)", f"{shuffled:.2f}", "Brand Table 7")]
    told = ("75.60", "75.65", "75.61", "75.63")
    rows += [
        Row(
            f"redox, memory for {part:.0%}, beside it", f"{float(of_paper) - 75.61:+.2f} (15, 25, 35, 60 GB)",
            f"{found[f'memory {part:.0%}'] - shuffled:+.2f}", "Brand Table 7, Redox Fig. 7",
        )
        for part, of_paper in zip(MEMORIES, told, strict=True)
    ]  # fmt: skip
    rows += [
        Row(
            f"blocks of {size} in order, beside it",
            less,
            f"{found[f'blocks of {size}'] - shuffled:+.2f}",
            "DeepIO Fig. 7",
        )
        for size, less in BLOCKS
    ]
    rows.append(Row("a constant order, beside it", "worst", f"{found['constant'] - shuffled:+.2f}", "DeepIO Fig. 7"))
    return Part("Accuracy", f"python -m benchmarks.papers.accuracy --samples {num_samples}", rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=8192)
    print_rows("Accuracy", part_of_page(parser.parse_args().samples).rows)
