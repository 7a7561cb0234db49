"""What do planned epochs read, where memory is not what was planned for and requests come out of order?

``refill simulate`` has ranks in step; here their loaders are not. Loaders are those of torch: a rank's loop takes its
batches in their order, and its W workers have at most 2 W of them under way; batch b is asked for by worker b % W when
that has loaded its batch before. A sample counts as one byte, so memory is in samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from refill.errors import InvalidInput
from refill.protocol.dealing import Dealing
from refill.protocol.job_spec import JobSpec
from refill.protocol.plan_memory import asked_at_once
from refill.protocol.plan_settings import PlanSettings
from refill_service.cache_core.sample_mapping import ChunkLayout
from refill_service.planning.planned_pods import PlannedPods, made_up_plan

__all__ = ["PREFETCH_FACTOR", "PlannedReads", "PlannedRun", "simulate_planned"]

PREFETCH_FACTOR = 2
"""Batches that a worker of torch's DataLoader has under way unless it is told otherwise."""

_SLOWEST = 2.0
"""Workers' speeds lie evenly from 1 to this; and how long a batch takes is exponential, since samples and machines
differ. The loop takes no time, so that it is workers that it waits for: then they are most out of order."""


@dataclass(frozen=True)
class PlannedRun:
    """What to simulate. A step is a batch of every rank."""

    num_samples: int
    memory_samples: int
    """Of each pod."""
    chunk_size: int = 16
    num_pods: int = 1
    num_ranks: int = 1
    batch_size: int = 256
    """Positions that a rank asks for at once."""
    num_workers: int = 0
    """Of each rank's loader; 0: the loop asks itself."""
    out_of_step: float = 0.0
    """How far the last rank is behind the first, in the memory that is planned for: a step has ``num_ranks *
    batch_size`` samples. The others are between, at equal distances."""
    plan_samples: int = 0
    """Memory that is planned for, of all pods together. 0, here and below: as a job has it that does not say."""
    num_shares: int = 0
    run: int = 0
    """About how many positions in a row are of one share."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_samples", "memory_samples", "chunk_size", "num_pods", "num_ranks", "batch_size"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("num_workers", "plan_samples", "num_shares", "run"):
            if getattr(self, name) < 0:
                raise InvalidInput(f"{name} must be at least 0, got {getattr(self, name)}")
        if not 0 <= self.out_of_step < np.inf:
            raise InvalidInput(f"out_of_step must be a number of at least 0, got {self.out_of_step}")
        if self.out_of_step and self.num_ranks == 1:
            raise InvalidInput("out_of_step is between ranks, and there is 1")
        if self.memory_samples < min(self.chunk_size, self.num_samples):
            raise InvalidInput(f"memory for {self.memory_samples} samples holds no chunk of {self.chunk_size}")


@dataclass(frozen=True)
class PlannedReads:
    """Of one epoch, over all pods."""

    epoch: int
    gets: int
    gets_for_64: float
    """For 64 samples of the dataset."""
    samples_read: int
    bytes_read: float
    """In datasets."""
    misses: int
    """Positions whose sample was not in memory when it was asked for."""
    single_reads: int
    """GETs for one sample."""
    held_peak: int
    """The most samples in memory after a batch, those of the next epoch included."""
    delivered: int
    """Different samples that ranks got."""


def simulate_planned(run: PlannedRun, num_epochs: int) -> tuple[PlanSettings, Iterator[PlannedReads]]:
    """The plan, and what each epoch reads: the first is the job's first, and the job goes on after the last one. Ranks
    begin an epoch when all of them have ended the one before."""
    if num_epochs < 1:
        raise InvalidInput(f"epochs must be at least 1, got {num_epochs}")
    layout = ChunkLayout(np.array([0, run.num_samples], dtype=np.int64), run.chunk_size)
    lengths = np.ones(run.num_samples, dtype=np.int64)
    spec = JobSpec(
        "simulated",
        "memory://simulated",
        seed=run.seed,
        policy_settings={"plan_bytes": run.plan_samples, "shares": run.num_shares, "run": run.run},
    )
    at_once = asked_at_once(max(1, run.num_workers) * run.batch_size, run.num_ranks, 1, run.num_pods)
    plan = made_up_plan(spec, layout, lengths, run.memory_samples, run.num_pods, at_once)
    pods = PlannedPods(plan, layout, lengths, run.memory_samples, run.num_pods)
    return plan, _epochs(run, plan, pods, num_epochs)


def _epochs(run: PlannedRun, plan: PlanSettings, pods: PlannedPods, num_epochs: int) -> Iterator[PlannedReads]:
    dealing = Dealing(run.num_samples, run.num_ranks)
    behind = run.out_of_step * plan.memory_bytes / (run.num_ranks * run.batch_size)
    generator = np.random.default_rng([run.seed, 1])
    num_batches = -(-dealing.per_rank // run.batch_size)
    for epoch in range(num_epochs):
        seen = np.zeros(run.num_samples, dtype=bool)
        held_peak = pods.held_bytes
        for rank, batch in in_order(num_batches, run, behind, generator):
            places = np.arange(batch * run.batch_size, (batch + 1) * run.batch_size, dtype=np.int64)
            positions = dealing.positions(rank, places[places < dealing.per_rank])
            # Ranks that do not divide the epoch ask for its first positions once more.
            seen[pods.ask(epoch, positions % run.num_samples)] = True
            held_peak = max(held_peak, pods.held_bytes)
        counts = pods.counts.pop(epoch)
        yield PlannedReads(
            epoch,
            counts.gets,
            gets_for_64=64 * counts.gets / run.num_samples,
            samples_read=counts.samples_read,
            bytes_read=counts.bytes_read / run.num_samples,
            misses=counts.misses,
            single_reads=counts.single_reads,
            held_peak=held_peak,
            delivered=int(seen.sum()),
        )


def in_order(
    num_batches: int, run: PlannedRun, behind: float, generator: np.random.Generator
) -> Iterator[tuple[int, int]]:
    """``(rank, batch)`` of an epoch, in the order in which they are asked for.

    :param behind: steps by which the last rank is behind the first.
    """
    asked, step = _asked_at(num_batches, run.num_ranks, run.num_workers, generator)
    ranks = np.arange(run.num_ranks)
    at = asked + behind * step * ranks / max(1, run.num_ranks - 1)
    # At the same time, batch by batch: those of a batch rank by rank.
    order = np.lexsort((np.tile(ranks, num_batches), np.repeat(np.arange(num_batches), run.num_ranks), at.ravel()))
    for place in order.tolist():
        batch, rank = divmod(place, run.num_ranks)
        yield rank, batch


def _asked_at(
    num_batches: int, num_ranks: int, num_workers: int, generator: np.random.Generator
) -> tuple[NDArray[np.float64], float]:
    """``(batches, ranks)``: when each is asked for, ranks in step; and how long a step takes in the mean."""
    asked = np.zeros((num_batches, num_ranks))
    if not num_workers:
        asked += np.arange(num_batches, dtype=np.float64)[:, None]
        return asked, 1.0
    speeds = generator.uniform(1.0, _SLOWEST, (num_workers, num_ranks))
    takes = generator.exponential(1.0, (num_batches, num_ranks))
    loaded = np.zeros((num_batches, num_ranks))
    taken = np.zeros(num_batches)
    for batch in range(num_batches):
        if batch >= PREFETCH_FACTOR * num_workers:  # the loader hands out a batch for each that its loop takes
            asked[batch] = taken[batch - PREFETCH_FACTOR * num_workers]
        if batch >= num_workers:
            np.maximum(asked[batch], loaded[batch - num_workers], out=asked[batch])
        loaded[batch] = asked[batch] + takes[batch] * speeds[batch % num_workers]
        # A step is computed by all ranks together.
        taken[batch] = max(taken[batch - 1] if batch else 0.0, float(loaded[batch].max()))
    return asked, float(taken[-1]) / num_batches if num_batches else 1.0
