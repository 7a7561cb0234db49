"""What does an epoch read whose positions ask for classes? The machines of pods with ranks in step and no I/O.

A sample counts as one byte. Orders of classes are those of ``refill.BucketSampler`` and its like.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from refill.errors import InvalidInput
from refill.protocol.class_order import balanced_order, bucket_order, rank_part, samples_for
from refill.protocol.classes import entries_of
from refill_service.cache_core.epoch_order import ExplicitTraces
from refill_service.cache_core.home_machine import HomeMachine
from refill_service.cache_core.sample_mapping import (
    AbstractMapping,
    ChunkLayout,
    Int64Array,
    abstract_chunks_for_budget,
)
from refill_service.planning.lockstep import LocalOwner, epoch_in_lockstep
from refill_service.planning.shuffle_measures import spread

__all__ = ["CLASS_ORDERS", "ClassReads", "ClassRun", "class_traces", "equal_classes", "simulate_classes"]

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
    remote_memory_samples: int = 10_000
    window: int = 10_000
    seed: int = 0

    def __post_init__(self) -> None:
        least_of = {"remote_memory_samples": 0, "window": 0, "seed": 0}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int) and value < (least := least_of.get(field.name, 1)):
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
    """Deliveries beyond those that are asked for."""
    missing: int
    distance: float
    co_batch: float
    """As of :func:`spread`, where a batch is a step: the batches of all ranks."""


def equal_classes(num_samples: int, num_classes: int, seed: int) -> Int64Array:
    """The class of each sample: as many of each, at random places."""
    return np.random.default_rng([seed, 1]).permutation(num_samples) % num_classes


def simulate_classes(classes: Int64Array, run: ClassRun) -> ClassReads:
    """:param classes: ``(samples,)`` 0 and up."""
    num_samples, num_pods = len(classes), run.num_pods
    classes = np.unique(classes, return_inverse=True)[1]
    traces = class_traces(classes, run.order, num_pods, run.batch_size, run.seed)
    layout = ChunkLayout(np.array([0, num_samples], dtype=np.int64), run.chunk_size)
    owners = [_owner(layout, traces, pod, run) for pod in range(num_pods)]
    bounds = layout.owner_bounds(num_pods)
    homes: list[HomeMachine[int]] = [HomeMachine(pod, bounds, run.remote_memory_samples) for pod in range(num_pods)]
    came = np.zeros(num_samples, dtype=np.int64)
    place_of = np.zeros(num_samples, dtype=np.int64)
    batches = composed = 0
    for rank, positions, samples in epoch_in_lockstep(owners, homes, traces, run.batch_size):
        batches += 1
        composed += bool((classes[samples] == classes[traces.asked(rank, positions)[0]]).all())
        np.add.at(came, samples, 1)
        place_of[samples] = positions * num_pods + rank
    place_of[np.argsort(place_of, kind="stable")] = np.arange(num_samples)  # without the places of repeats
    distance, co_batch = spread(place_of, layout.first_sample, num_pods * run.batch_size)
    counts = [owner.counts for owner in owners]
    samples_read = sum(count.samples_read for count in counts)
    return ClassReads(
        batches=batches,
        composed=composed,
        gets=sum(count.refills for count in counts),
        samples_read=samples_read,
        read_amplification=samples_read / num_samples,
        misses=sum(count.misses for count in counts),
        delivered=int(came.sum()),
        duplicates=int((came[came > 1] - 1).sum()),
        missing=int(np.count_nonzero(came == 0)),
        distance=distance,
        co_batch=co_batch,
    )


def class_traces(classes: Int64Array, order: str, num_ranks: int, batch_size: int, seed: int) -> ExplicitTraces:
    """As samplers make them.

    :param classes: ``(samples,)`` 0 and up, each of them there.
    :param order: as of :class:`ClassRun`.
    :param batch_size: of a rank.
    """
    everything = _in_order(classes, order, num_ranks * batch_size, seed)
    of_ranks = {rank: rank_part(everything, rank, num_ranks, batch_size, drop_last=False) for rank in range(num_ranks)}
    return ExplicitTraces(len(classes), {rank: entries_of(ids, 1 + classes[ids]) for rank, ids in of_ranks.items()})


def _in_order(classes: Int64Array, order: str, step_size: int, seed: int) -> Int64Array:
    """The samples that positions of all ranks name."""
    random = np.random.default_rng([seed, 2])
    if order == "random":
        return random.permutation(len(classes))
    if order == "sorted":
        in_order = np.sort(classes)
    elif order == "balanced":
        in_order = balanced_order(np.bincount(classes), random)
    else:
        in_order = bucket_order(classes, step_size, random)
    return samples_for(in_order, classes, random)


def _owner(layout: ChunkLayout, traces: ExplicitTraces, pod: int, run: ClassRun) -> LocalOwner:
    share = layout.share(pod, run.num_pods)
    num_abstract_chunks = max(1, abstract_chunks_for_budget(share.num_chunks, run.chunk_size, run.memory_samples))
    return LocalOwner(
        "drain",
        AbstractMapping(share, num_abstract_chunks),
        [traces],
        run.num_pods,
        np.ones(share.num_samples, dtype=np.int64),
        run.memory_samples,
        window=run.window,
        key=f"classes {run.seed} {pod}",
        own={"within": "class"},
    )
