"""``refill analyze --classes``: which classes does ``drain`` redirect within, and in which order do they come?"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import numpy as np

from refill.errors import InvalidInput
from refill.protocol.class_order import bucket_boundaries
from refill_service.cache_core.sample_mapping import Int64Array
from refill_service.commands.simulate_classes import classes_of
from refill_service.planning.class_reads import CLASS_ORDERS

if TYPE_CHECKING:
    from refill_service.datasets.dataset_reader import Dataset

__all__ = ["add_options", "batches_text", "class_order_of", "classes_in", "classes_made_up"]

_NUM_BUCKETS = 10
"""As BucketSampler's."""


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "classes", "Policy drain redirects within them, as jobs with BucketSampler or ClassBalancedSampler have it."
    )
    group.add_argument(
        "--classes",
        metavar="WHICH",
        help=f"labels or lengths of DATASET ({_NUM_BUCKETS} buckets of about as many bytes); or a file, the class of a "
        "sample in each line; or a number of equally large ones, at random places (default: none)",
    )
    group.add_argument(
        "--class-order",
        choices=CLASS_ORDERS,
        help="each batch of one class, with all of them, as a shuffled order has them, or one class after another "
        "(default: balanced for labels, else buckets)",
    )


def class_order_of(args: argparse.Namespace) -> str:
    if args.class_order is not None and args.classes is None:
        raise InvalidInput("--class-order goes with --classes")
    return str(args.class_order or ("balanced" if args.classes == "labels" else "buckets"))


def batches_text(order: str) -> str:
    texts = (
        "each batch of one of them",
        "each batch with all of them",
        "as a shuffled order has them",
        "one after another",
    )
    return dict(zip(CLASS_ORDERS, texts, strict=True))[order]


async def classes_in(dataset: Dataset, lengths: Int64Array, given: str | None, seed: int) -> Int64Array | None:
    """:param lengths: ``(samples,)`` of the first ones of the dataset, whose classes are wanted."""
    if given is None:
        return None
    if given == "labels":
        return _numbered(await dataset.labels(0, len(lengths)))
    if given == "lengths":
        return _numbered(np.searchsorted(bucket_boundaries(lengths, _NUM_BUCKETS), lengths, side="right"))
    return _numbered(classes_of(given, dataset.num_samples, seed)[: len(lengths)])


def classes_made_up(num_samples: int, simulated: int, given: str | None, seed: int) -> Int64Array | None:
    """Of a dataset that there is not."""
    if given in ("labels", "lengths"):
        raise InvalidInput(f"--classes {given} are those of a DATASET; with --samples give a number, or a file")
    return None if given is None else _numbered(classes_of(given, num_samples, seed)[:simulated])


def _numbered(classes: np.ndarray) -> Int64Array:
    """From 0 on, each of them there."""
    return np.unique(classes, return_inverse=True)[1].astype(np.int64)
