"""What does an epoch read whose positions ask for classes? Planned within them, with ranks in step and no I/O.

A sample counts as one byte. Orders of classes are those of ``refill.BucketSampler`` and its like.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from refill.errors import InvalidInput
from refill.protocol.class_order import balanced_order, bucket_order, positions_in_turn, rank_part, samples_for
from refill.protocol.class_plan import StoredSamples, plan_epoch_within_classes
from refill.protocol.job_spec import JobSpec
from refill.protocol.plan_settings import WITHIN_CLASSES
from refill_service.cache_core.planned.job_orders import JobOrders
from refill_service.cache_core.sample_mapping import ChunkLayout, Int64Array
from refill_service.planning.plan_measures import spread
from refill_service.planning.planned_pods import PlannedPods, made_up_plan

__all__ = ["CLASS_ORDERS", "ClassReads", "ClassRun", "equal_classes", "simulate_classes"]

CLASS_ORDERS = ("buckets", "balanced", "random", "sorted")


@dataclass(frozen=True)
class ClassRun:
    """One epoch; one rank for each pod.

    :param memory_samples: of each pod.
    :param order: ``buckets``: each batch of one class; ``balanced``: each with all; ``random``: as a shuffled order has
        them; ``sorted``: one class after another.
    """

    memory_samples: int
    order: str = "buckets"
    chunk_size: int = 64
    num_pods: int = 1
    batch_size: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value < (least := int(field.name != "seed")):
                raise InvalidInput(f"{field.name} must be at least {least}, got {value}")


@dataclass(frozen=True)
class ClassReads:
    batches: int
    composed: int
    """Batches whose samples are of the classes that they ask for, position by position."""
    gets: int
    samples_read: int
    read_amplification: float
    misses: int
    """Positions that had to wait for the store."""
    delivered: int
    duplicates: int
    """Deliveries of samples that came before: those that pad the ranks' last batches."""
    missing: int
    distance: float
    co_batch: float
    """As of :func:`spread`, where a batch is a step: the batches of all ranks."""
    padding: float
    """Of all that batches take, what fills shorter samples up to the longest of their batch."""


def equal_classes(num_samples: int, num_classes: int, seed: int) -> Int64Array:
    """The class of each sample: as many of each, at random places."""
    return np.random.default_rng([seed, 1]).permutation(num_samples) % num_classes


def simulate_classes(classes: Int64Array, run: ClassRun, widths: Int64Array | None = None) -> ClassReads:
    """
    :param classes: ``(samples,)`` 0 and up.
    :param widths: ``(samples,)`` what a batch fills up: frames, tokens. None: all have the same.
    """
    classes = np.unique(classes, return_inverse=True)[1]
    num_samples, num_pods, batch_size = len(classes), run.num_pods, run.batch_size
    layout = ChunkLayout(np.array([0, num_samples], dtype=np.int64), run.chunk_size)
    lengths = np.ones(num_samples, dtype=np.int64)
    spec = JobSpec(
        "simulated",
        "memory://simulated",
        seed=run.seed,
        order="explicit",
        policy_settings={"selection": WITHIN_CLASSES},
    )
    plan = made_up_plan(spec, layout, lengths, run.memory_samples, num_pods)
    pods = PlannedPods(plan, layout, lengths, run.memory_samples, num_pods)
    epoch = 1  # one of those after the first
    stored = StoredSamples(
        *JobOrders(plan, layout, lengths.__getitem__).chunks_and_shares(np.arange(num_samples)), lengths
    )
    wanted, _ = _in_order(classes, run.order, num_pods * batch_size, run.seed, np.arange(num_samples))
    in_turn = positions_in_turn(num_samples, num_pods, batch_size, drop_last=False)
    samples_wanted = plan_epoch_within_classes(in_turn, wanted, classes, stored, plan, epoch)
    parts, of_classes = (
        [rank_part(each, rank, num_pods, batch_size, drop_last=False) for rank in range(num_pods)]
        for each in (samples_wanted, wanted)
    )
    pods.lists_are_known(epoch, np.stack(parts, axis=1).ravel())
    delivered = _Delivered(classes, np.ones(num_samples, np.int64) if widths is None else widths)
    for start in range(0, len(parts[0]), batch_size):
        for rank, part in enumerate(parts):
            samples = part[start : start + batch_size]
            positions = np.arange(start, start + len(samples)) * num_pods + rank
            pods.ask_for(epoch, positions, samples)
            delivered.batch(of_classes[rank][start : start + batch_size], samples, positions)
    counts = pods.counts[epoch]
    return delivered.counted(run, gets=counts.gets, samples_read=counts.samples_read, misses=counts.misses)


class _Delivered:
    """What came of an epoch."""

    def __init__(self, classes: Int64Array, widths: Int64Array) -> None:
        self._classes, self._widths = classes, widths
        self._taken = self._filled = 0
        self._came = np.zeros(len(classes), dtype=np.int64)
        self._place_of = np.zeros(len(classes), dtype=np.int64)
        self._batches = self._composed = 0

    def batch(self, wanted: Int64Array, samples: Int64Array, places: Int64Array) -> None:
        """:param wanted: the class of each sample that was asked for."""
        self._batches += 1
        self._composed += bool((self._classes[samples] == wanted).all())
        np.add.at(self._came, samples, 1)
        widths = self._widths[samples]
        self._taken, self._filled = self._taken + int(widths.sum()), self._filled + len(widths) * int(widths.max())
        self._place_of[samples] = places

    def counted(self, run: ClassRun, *, gets: int, samples_read: int, misses: int) -> ClassReads:
        num_samples, came, place_of = len(self._classes), self._came, self._place_of
        place_of[np.argsort(place_of, kind="stable")] = np.arange(num_samples)  # without the places of repeats
        first_sample = np.array([0, num_samples], dtype=np.int64)
        distance, co_batch = spread(place_of, first_sample, run.num_pods * run.batch_size)
        return ClassReads(
            batches=self._batches,
            composed=self._composed,
            gets=gets,
            samples_read=samples_read,
            read_amplification=samples_read / num_samples,
            misses=misses,
            delivered=int(came.sum()),
            duplicates=int((came[came > 1] - 1).sum()),
            missing=int(np.count_nonzero(came == 0)),
            distance=distance,
            co_batch=co_batch,
            padding=1 - self._taken / max(1, self._filled),
        )


def _in_order(
    classes: Int64Array, order: str, step_size: int, seed: int, turns: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """``(classes, samples)`` that positions of all ranks name.

    :param turns: the order in which those of a class come.
    """
    random = np.random.default_rng([seed, 2])
    if order == "random":
        in_order = classes[random.permutation(len(classes))]
    elif order == "sorted":
        in_order = np.sort(classes)
    elif order == "balanced":
        in_order = balanced_order(np.bincount(classes), random)
    else:
        in_order = bucket_order(classes, step_size, random)
    return in_order, samples_for(in_order, classes, turns, random)
