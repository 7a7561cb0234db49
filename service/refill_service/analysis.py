"""Which policy and K suit a dataset and its memory? What an epoch would cost, how long it takes, how well it shuffles.

``analyze`` runs one epoch of the protocol core for a policy and chunk size, with one rank for each pod in lockstep and
no I/O, and looks at the order that came out. Times are floors by a simple model, not measurements: see ``Analysis``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from refill.errors import InvalidInput
from refill_service.cache_core.drain_epoch import DrainEpoch
from refill_service.cache_core.epoch_order import KeyedTraces
from refill_service.cache_core.owner_epoch import OwnerEpoch
from refill_service.cache_core.policies import new_epoch
from refill_service.cache_core.refill import Refill
from refill_service.cache_core.sample_mapping import (
    AbstractMapping,
    ChunkLayout,
    Int64Array,
    abstract_chunks_for_budget,
)

__all__ = [
    "MATES",
    "Analysis",
    "Recommendation",
    "Store",
    "Workload",
    "analyze",
    "randomization_level",
    "recommend",
    "spread",
]

MATES = 64
"""Chunk-mates are the samples of one run of so many neighbours in a blob, whatever K is."""

UNIFORM_DISTANCE = 1 / 3
"""Mean distance of two samples of a uniform shuffle, as a part of the epoch."""

_MOST_SUMMED = 10_000_000
"""The randomization level is a sum over all samples."""

ENOUGH_DISTANCE = 0.9 * UNIFORM_DISTANCE
ENOUGH_CO_BATCH = 1.5


@dataclass(frozen=True)
class Workload:
    """What is to be read, and with how much memory.

    :param blob_samples: ``(num_blobs,)`` samples of each blob. One of them at least must hold two samples.
    :param memory_share: part of the dataset that fits into the memory for chunks, of all pods together.
    """

    blob_samples: Int64Array
    sample_bytes: float
    memory_share: float
    num_pods: int = 1
    batch_size: int = 256
    group_order: str = "consecutive"
    seed: int = 1

    def __post_init__(self) -> None:
        for name, least in (("num_pods", 1), ("batch_size", 1)):
            if getattr(self, name) < least:
                raise InvalidInput(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not self.num_samples:
            raise InvalidInput("the dataset has no samples: there is nothing to analyze")
        if not self.memory_share > 0:
            raise InvalidInput(f"memory must be more than nothing, got {self.memory_share:.3%} of the dataset")

    @property
    def num_samples(self) -> int:
        return int(self.blob_samples.sum())

    @property
    def total_bytes(self) -> float:
        return self.num_samples * self.sample_bytes

    def scaled_down(self, most_samples: int) -> Workload:
        """Fewer blobs, so that an epoch is simulated in seconds; what is relative to the dataset stays as it is."""
        if self.num_samples <= most_samples:
            return self
        upto = np.searchsorted(np.cumsum(self.blob_samples), most_samples, side="right")
        kept = self.blob_samples[:upto] if upto else np.array([most_samples], dtype=np.int64)
        return Workload(
            kept, self.sample_bytes, self.memory_share, self.num_pods, self.batch_size, self.group_order, self.seed
        )


@dataclass(frozen=True)
class Store:
    """How fast the store is for one pod, and what it asks for. Prices are in the currency that they are given in."""

    latency_seconds: float = 0.025
    bandwidth_bytes: float = 1e9
    """A second, for each pod."""
    concurrency: int = 32
    """GETs in flight, of each pod."""
    price_per_1000_gets: float = 0.0004
    price_per_gb: float = 0.0


@dataclass(frozen=True)
class Analysis:
    """One policy at one K, for a whole epoch of the dataset.

    Times are floors. To the first batch: one round trip to the store, then the chunks that the batch needs at the pods'
    bandwidth. For the epoch: at each pod the larger of its bytes over its bandwidth and its GETs times the time of one
    over those in flight.
    """

    policy: str
    chunk_size: int
    gets: float
    """GETs of an epoch, over all pods."""
    gets_per_sample: float
    read_amplification: float
    cost: float
    """Of an epoch's GETs and bytes."""
    resident_bytes: float
    """Most bytes of samples in abstract memory at once, at one pod."""
    distance: float
    """Mean distance of chunk-mates in the epoch; 0.333 when shuffled uniformly."""
    co_batch: float
    """How often two chunk-mates meet in a batch, 1 when shuffled uniformly."""
    randomization_level: float
    """DeepIO's, 0 to 1."""
    first_batch_seconds: float
    epoch_seconds: float


@dataclass(frozen=True)
class Recommendation:
    chunk_size: int
    reason: str


def analyze(workload: Workload, policy: str, chunk_size: int, store: Store, most_samples: int = 131_072) -> Analysis:
    """Raises :class:`InvalidInput` when no blob holds a chunk, or the memory holds none.

    :param most_samples: of a larger dataset, so many samples are simulated.
    """
    small = workload.scaled_down(most_samples)
    run = _Run(small, policy, chunk_size)
    counts = [owner.counts for owner in run.owners]
    gets_per_sample = sum(count.refills for count in counts) / small.num_samples
    amplification = sum(count.samples_read for count in counts) / small.num_samples
    gets = gets_per_sample * workload.num_samples
    read_bytes = amplification * workload.total_bytes
    distance, co_batch = spread(run.position, run.batch, small)
    chunk_bytes = chunk_size * workload.sample_bytes
    get_seconds = store.latency_seconds + chunk_bytes / store.bandwidth_bytes
    pods = workload.num_pods
    return Analysis(
        policy,
        chunk_size,
        gets,
        gets_per_sample,
        amplification,
        gets / 1000 * store.price_per_1000_gets + read_bytes / 1e9 * store.price_per_gb,
        run.most_held / small.num_samples * workload.total_bytes,
        distance,
        co_batch,
        randomization_level(min(workload.num_samples, _MOST_SUMMED), workload.memory_share),
        store.latency_seconds + run.first_batch_chunks * chunk_bytes / store.bandwidth_bytes,
        max(read_bytes / pods / store.bandwidth_bytes, gets / pods * get_seconds / store.concurrency),
    )


def recommend(rows: Sequence[Analysis]) -> Recommendation | None:
    """The largest K of ``drain``, so the fewest GETs, that shuffles almost as well as a uniform shuffle does.

    None when no row is of ``drain``.
    """
    drain = sorted((row for row in rows if row.policy == "drain"), key=lambda row: -row.chunk_size)
    for row in drain:
        if row.co_batch <= ENOUGH_CO_BATCH and row.distance >= ENOUGH_DISTANCE:
            return Recommendation(
                row.chunk_size,
                f"the fewest GETs with a co-batch ratio of at most {ENOUGH_CO_BATCH:g} and a distance of at least"
                f" {ENOUGH_DISTANCE:.2f}",
            )
    if not drain:
        return None
    return Recommendation(
        drain[-1].chunk_size,
        f"the smallest; no K keeps the co-batch ratio at {ENOUGH_CO_BATCH:g} or below: more memory shuffles better",
    )


def randomization_level(num_samples: int, memory_share: float) -> float:
    """DeepIO's randomization level, 0 to 1 (DeepIO, IPDPS'18, 4.2: entropy of the order against a uniform shuffle's).

    RL = sum Q(i) log2 P(i, r) / sum Q(i) log2 Q(i), with Q(i) = 1 / (N - i), r = i div N_mem and
    P(i, r) = [1 / (1/R - r)] / (N_mem - i mod N_mem): memory is filled with one of the parts of the dataset that are
    left, then emptied at random. It knows the share R of the dataset that is in memory, and neither policy nor K.
    """
    if memory_share >= 1:
        return 1.0
    in_memory = max(1, round(num_samples * memory_share))
    i = np.arange(num_samples, dtype=np.float64)
    loads, place = np.divmod(i, in_memory)
    uniform = 1 / (num_samples - i)
    # The last load may be smaller than the others: at least one part is left, and no more samples than there are.
    parts_left = np.maximum(1, 1 / memory_share - loads)
    left_in_memory = np.minimum(in_memory - place, num_samples - i)
    chosen = 1 / (parts_left * left_in_memory)
    return float((uniform * np.log2(chosen)).sum() / (uniform * np.log2(uniform)).sum())


class _Run:
    """One epoch, one rank for each pod in lockstep: where each sample came, and what was read and held."""

    def __init__(self, workload: Workload, policy: str, chunk_size: int) -> None:
        first_sample = np.concatenate([[0], np.cumsum(workload.blob_samples)])
        layout = ChunkLayout(first_sample, chunk_size)
        pods = workload.num_pods
        capacity = int(workload.memory_share * workload.num_samples / pods)
        traces = KeyedTraces(workload.num_samples, pods, seed=workload.seed)
        self._policy, self._chunk_size = policy, chunk_size
        self.owners = [self._owner(layout, pod, workload, capacity, traces) for pod in range(pods)]
        self.position = np.full(workload.num_samples, -1, dtype=np.int64)
        """``(num_samples,)`` where each sample came in the epoch."""
        self.most_held = 0
        """Most samples in memory at one pod."""
        self.first_batch_chunks = 0
        """Most chunks that a pod has to read for the first batch of every rank."""
        self._in_memory = [0] * pods
        for pod, owner in enumerate(self.owners):
            self._arrive(pod, owner.start())
        self._run(traces, np.array([owner.mapping.share.end_sample for owner in self.owners]), workload.batch_size)
        self.batch = self.position // (pods * workload.batch_size) * pods + self.position % pods
        """``(num_samples,)`` the batch in which each sample came."""

    def _owner(
        self, layout: ChunkLayout, pod: int, workload: Workload, capacity: int, traces: KeyedTraces
    ) -> OwnerEpoch:
        share = layout.share(pod, workload.num_pods)
        num_abstract_chunks = abstract_chunks_for_budget(share.num_chunks, layout.chunk_size, capacity)
        if share.num_chunks and not num_abstract_chunks:
            raise InvalidInput(
                f"memory of {capacity:,} samples at each pod holds no chunk of {layout.chunk_size}: give more memory or"
                " a smaller chunk size"
            )
        return new_epoch(
            self._policy,
            AbstractMapping(share, num_abstract_chunks, workload.group_order),
            traces,
            np.ones(share.num_samples, dtype=np.int64),
            capacity_bytes=capacity,
            refill="best",
            prefetch_window=0,
            key=f"analysis {workload.seed} {pod}",
        )

    def _run(self, traces: KeyedTraces, ends: Int64Array, batch_size: int) -> None:
        pods = len(self.owners)
        length = traces.length(0)
        first_chunks = [0] * pods
        asked, repeats = (
            np.stack(each, axis=1).reshape(-1)
            for each in zip(*(traces.asked(rank, np.arange(length)) for rank in range(pods)), strict=True)
        )
        of_pod = np.searchsorted(ends, asked, side="right")
        for pod, owner in enumerate(self.owners):
            asked[of_pod == pod] -= owner.mapping.share.first_sample
        locations = np.empty_like(asked)
        for pod, owner in enumerate(self.owners):
            locations[of_pod == pod] = owner.mapping.locations(asked[of_pod == pod])
        first = [owner.mapping.share.first_sample for owner in self.owners]
        columns = (of_pod.tolist(), asked.tolist(), locations.tolist(), repeats.tolist())
        for place, (pod, sample, location, repeat) in enumerate(zip(*columns, strict=True)):
            if repeat:
                continue
            answer, refills = self.owners[pod].take_one(sample, location)
            self.position[first[pod] + answer] = place
            self._in_memory[pod] -= 1
            self._arrive(pod, refills)
            if place < pods * batch_size:
                first_chunks[pod] += 1 if isinstance(self.owners[pod], DrainEpoch) else len(refills)
        per_chunk = self._chunk_size if self._policy == "drain" else 1
        self.first_batch_chunks = max(math.ceil(count / per_chunk) for count in first_chunks)

    def _arrive(self, pod: int, refills: list[Refill]) -> None:
        for refill in refills:
            self.owners[pod].refill_arrived(refill)
            self._in_memory[pod] += len(refill.samples)
        self.most_held = max(self.most_held, self._in_memory[pod])


def spread(position: Int64Array, batch: Int64Array, workload: Workload) -> tuple[float, float]:
    """``(mean distance, co-batch ratio)`` of runs of ``MATES`` neighbours, or of a blob if that is smaller."""
    first = np.concatenate([[0], np.cumsum(workload.blob_samples)])
    size = min(MATES, int(workload.blob_samples.max()))
    starts = np.concatenate([np.arange(a, b - size + 1, size) for a, b in pairwise(first)])
    runs = starts[:, None] + np.arange(size)
    pairs, num_samples = size * (size - 1), workload.num_samples
    if not pairs:
        return UNIFORM_DISTANCE, 1.0
    # Of sorted numbers, the sum of all distances follows from their ranks.
    weights = 2 * (2 * np.arange(size) - size + 1)
    distance = float((np.sort(position[runs], axis=1) * weights).sum() / pairs / len(runs) / num_samples)
    batches = batch[runs]
    meetings = float(np.mean([((run[:, None] == run[None, :]).sum() - size) / pairs for run in batches]))
    uniform = (min(workload.batch_size, num_samples) - 1) / (num_samples - 1)
    return distance, meetings / uniform if uniform else 1.0
