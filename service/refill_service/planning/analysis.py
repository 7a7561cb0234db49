"""What would an epoch cost under each policy and chunk size, and how well would it shuffle?

``analyze`` runs an epoch of a job with no I/O (``simulated_job.py``) and derives a :class:`Row`. Counts
and shuffle measures are of that epoch; times are a floor that the store sets, see :func:`read_seconds`.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from refill.errors import InvalidInput
from refill.protocol.job_spec import JobSpec
from refill.protocol.plan_memory import PlanMemory, asked_at_once, divided
from refill_service.cache_core.job_memory import PodMemory, chunks_in_memory
from refill_service.cache_core.planned.job_plan import (
    SMALLEST_CHUNK,
    chunks_wanted,
    fitted_chunk_size,
    planned_chunk_size,
)
from refill_service.cache_core.policies.interface import default_chunk_size
from refill_service.cache_core.policies.registry import kind_of
from refill_service.cache_core.sample_mapping import ChunkLayout, Int64Array
from refill_service.planning.listed_orders import dealt
from refill_service.planning.plan_measures import block_randomization_level, randomization_level, spread
from refill_service.planning.pod_sizing import JobAlone, job_alone
from refill_service.planning.run_cost import PROVIDERS, run_cost
from refill_service.planning.simulated_job import Batch, SimulatedJob, SimulatedPods

MOST_CO_BATCH = 1.5
"""Of a shuffle that is good: the plot shows it."""


@dataclass(frozen=True)
class DatasetShape:
    """How large a dataset is, and the part of it, from its start, that an epoch is simulated on."""

    num_samples: int
    total_bytes: int
    first_sample: Int64Array
    """``(blobs + 1,)`` of the simulated part, as of :class:`ChunkLayout`."""
    lengths: Int64Array
    """``(simulated samples,)`` bytes of each."""
    by_class: bool = False
    """Whether neighbours share labels."""
    classes_in_pieces: int | None = None
    """Classes that are stored one after another; 0: it is stored mixed. None: it is not known."""
    group_samples: int | None = None
    """K of all jobs, where rows are decoded a group at a time; None: each job may choose."""

    def __post_init__(self) -> None:
        if self.largest_blob < 2:
            raise InvalidInput("no blob holds more than one sample: there are no chunks to choose a size of")
        if not int(self.lengths.sum()):
            raise InvalidInput("all samples are empty: there is nothing to cache")

    @classmethod
    def uniform(cls, num_samples: int, sample_bytes: int, most_simulated: int) -> DatasetShape:
        """One blob of samples of one size."""
        simulated = min(num_samples, most_simulated)
        lengths = np.full(simulated, sample_bytes, dtype=np.int64)
        return cls(num_samples, num_samples * sample_bytes, np.array([0, simulated], dtype=np.int64), lengths)

    @property
    def simulated(self) -> int:
        return len(self.lengths)

    @property
    def largest_blob(self) -> int:
        """Samples of the largest blob."""
        return int(np.diff(self.first_sample).max(initial=0))


@dataclass(frozen=True)
class StoreTerms:
    """What the store charges, and how fast it is; speeds are of one pod."""

    dollars_per_1000_gets: float = 0.0004
    dollars_per_gb: float = 0.0
    latency_seconds: float = 0.03
    """From a GET to its first byte."""
    bytes_per_second: float = 1e9
    concurrency: int = 32
    """GETs under way at once."""

    def dollars(self, gets: float, num_bytes: float) -> float:
        return gets / 1000 * self.dollars_per_1000_gets + num_bytes / 1e9 * self.dollars_per_gb


@dataclass(frozen=True)
class Analysis:
    """What to analyse."""

    shape: DatasetShape
    memory_bytes: int
    """For chunks, over all pods."""
    num_pods: int = 1
    """Each the home of one rank."""
    batch_size: int = 256
    """Samples of one training step, over all ranks."""
    num_workers: int | None = None
    """Of each rank's loader; None: it is not known."""
    group_order: str = JobSpec.group_order
    prefetch_window: int = JobSpec.prefetch_window
    remote_bytes: int = 0
    """What a home pod can hold of what owners send ahead."""
    store: StoreTerms = StoreTerms()
    compute_samples_per_second: float | None = None
    """How fast the job would train if data were always there; None: nothing is said of it."""
    epochs: int = 0
    """Of a run whose cost is shown; 0: nothing is said of it."""
    vm_hour: float = 0.0
    """Dollars for a pod's machine."""
    seed: int = 1
    orders: Sequence[Int64Array] = ()
    """Of lists that ranks have of their own: ``(samples,)`` ids for each epoch, each once, dealt to ranks in turn;
    after the last the first again. None given: the order follows from the seed."""
    pod: PodMemory | None = None
    """What each pod has in all: ``memory_bytes`` is then what a job of the default policy has of it, and each policy
    has what pods would give it. None: all policies have the same."""

    def memory_of(self, policy: str, chunk_size: int) -> int:
        """For chunks, over all pods."""
        if self.pod is None:
            return self.memory_bytes
        return self.num_pods * self.job_alone(policy, chunk_size).memory.abstract_bytes

    def job_alone(self, policy: str, chunk_size: int) -> JobAlone:
        """On the pods, where it is given what they have."""
        assert self.pod is not None
        of_dataset = (self.shape.num_samples, self.shape.total_bytes)
        return job_alone(self.pod, policy, chunk_size, *of_dataset, self.at_once_bytes, has_lists=bool(self.orders))

    @property
    def at_once_bytes(self) -> int:
        """That the loaders of all ranks ask for at once, on each pod; 0: it is not known."""
        if self.num_workers is None:
            return 0
        sample_bytes = self.shape.total_bytes / self.shape.num_samples
        return asked_at_once(max(1, self.num_workers) * self.batch_size, 1, sample_bytes, self.num_pods)

    @property
    def plan_memory(self) -> PlanMemory:
        """Of a planned job, on each pod."""
        samples_bytes = self.memory_of("planned", SMALLEST_CHUNK) // self.num_pods
        return divided(samples_bytes, self.at_once_bytes, is_listed=bool(self.orders))

    def chunks_in_memory(self, policy: str, layout: ChunkLayout) -> int:
        """So many of its chunks a job has in memory at once on the first pod: exact where the whole dataset is
        simulated."""
        shape, pod_bytes = self.shape, self.memory_of(policy, layout.chunk_size) // self.num_pods
        if policy == "planned":  # any of the dataset's
            return chunks_in_memory(
                pod_bytes, layout.num_chunks * shape.num_samples // shape.simulated, shape.total_bytes
            )
        if shape.simulated == shape.num_samples:
            share = layout.share(0, self.num_pods)
            share_bytes = int(shape.lengths[share.first_sample : share.end_sample].sum())
            return chunks_in_memory(pod_bytes, share.num_chunks, share_bytes)
        num_chunks = layout.num_chunks * shape.num_samples // shape.simulated // self.num_pods
        return chunks_in_memory(pod_bytes, num_chunks, shape.total_bytes // self.num_pods)

    def memory_fraction(self, policy: str = JobSpec.policy, chunk_size: int = 1) -> float:
        """The part of the dataset that fits."""
        return min(1.0, self.memory_of(policy, chunk_size) / self.shape.total_bytes)

    @property
    def scale(self) -> float:
        """Bytes of the whole for each that is simulated."""
        return self.shape.total_bytes / int(self.shape.lengths.sum())

    def simulated_job(self, policy: str, chunk_size: int, **of_spec: Any) -> tuple[JobSpec, SimulatedPods]:
        """A job on pods that have the same part of memory, of remote memory and of the window as in the whole.

        :param of_spec: further settings of it.
        """
        shape, num_pods = self.shape, self.num_pods
        if self.orders:
            of_spec["order"] = "explicit"
        spec = JobSpec(
            "analysis",
            "memory://analysis",
            world_size=num_pods,
            seed=self.seed,
            chunk_size=chunk_size,
            group_order=self.group_order,
            policy=policy,
            prefetch_window=self.prefetch_window * shape.simulated // shape.num_samples,
            **of_spec,
        )
        pods = SimulatedPods(
            num_pods,
            int(self.memory_of(policy, chunk_size) / self.scale) // num_pods,
            int(self.remote_bytes / self.scale),
            int(self.at_once_bytes / self.scale),
        )
        return spec, pods

    @property
    def simulated_batch(self) -> int:
        """The same part of an epoch as in the real one; but in small batches too few pairs meet to be counted."""
        return max(min(self.batch_size, 256), self.batch_size * self.shape.simulated // self.shape.num_samples)


@dataclass(frozen=True)
class Row:
    """One policy and chunk size; counts and bytes are of one epoch, over all pods."""

    policy: str
    chunk_size: int
    gets: float
    gets_per_64_samples: float
    bytes_read: float
    read_amplification: float
    store_dollars: float
    held_peak_bytes: float
    """The most bytes of samples that the pods held together: in abstract memory, and sent ahead."""
    held_mean_bytes: float
    distance: float
    co_batch: float
    randomization_level: float
    block_randomization_level: float
    """Of an order that shuffles chunks, and nothing in them."""
    first_batch_seconds: float
    read_seconds: float
    """What the store needs for the epoch's reads."""
    epoch_seconds: float
    """The larger of that and the time to compute, from the first batch on."""
    io_bound: bool | None
    """Whether the store needs longer than the training; None: its speed was not given."""
    run_dollars: dict[str, float]
    """By provider, of all epochs: GETs at its price, and machines; no storage, which is the same for all rows."""
    chunks_in_memory: int = 0
    """At once, on the first pod, on average."""
    job_memory_bytes: int = 0
    """What each pod gives the job, where it is known what a pod has; else 0."""
    plan: dict[str, Any] | None = None
    """Settings of the plan that pods make then, if the policy has one."""
    more_than_one_cache: float | None = None
    """By which part these pods make more GETs than one with the memory of all: each keeps what is of use to its own
    share. None: there is one pod, or the policy keeps nothing from epoch to epoch."""

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def analyze(analysis: Analysis, policy: str, chunk_size: int) -> Row:
    """Simulate one epoch.

    Raises :class:`InvalidInput` when no blob holds a chunk, :class:`MemoryTooSmall` when a pod's memory holds none.
    """
    shape, num_pods, kind = analysis.shape, analysis.num_pods, kind_of(policy)
    simulated_bytes, scale = int(shape.lengths.sum()), analysis.scale
    spec, pods = analysis.simulated_job(policy, chunk_size)
    # Where memory outlives an epoch the first one finds nothing in it: the second is what all later ones are like.
    is_cache = kind.keeps_order or spec.is_planned
    shown = 1 if is_cache else 0
    place_of = np.empty(shape.simulated, dtype=np.int64)
    job, epochs = _simulated(analysis, spec, pods, shown + 1)
    for batches in epochs:
        for places, samples in batches:
            place_of[samples] = places
    place_of[np.argsort(place_of, kind="stable")] = np.arange(shape.simulated)  # without the places of repeats
    reads = job.reads(shown)
    more_gets = None
    if is_cache and num_pods > 1:
        in_one = SimulatedPods(1, num_pods * pods.memory_bytes, at_once_bytes=num_pods * pods.at_once_bytes)
        one_cache, epochs = _simulated(analysis, spec, in_one, shown + 1)
        for batches in epochs:
            deque(batches, maxlen=0)
        more_gets = reads.gets / max(1, one_cache.reads(shown).gets) - 1
    gets = reads.gets * shape.num_samples / shape.simulated
    bytes_read = reads.bytes_read * scale
    distance, co_batch = spread(place_of, shape.first_sample, analysis.simulated_batch)
    asked_first = -(-min(analysis.batch_size, shape.num_samples) // num_pods)
    if kind.keeps_order or spec.is_listed:  # as random as its sampler's, whatever memory there is
        level = 1.0
    else:
        in_memory = analysis.memory_fraction(policy, chunk_size)
        part = min(1.0, job.plan.memory_bytes / simulated_bytes) if job.plan else in_memory
        level = randomization_level(shape.num_samples, part)
    return _row(
        analysis,
        policy=policy,
        chunk_size=chunk_size,
        **_on_pods(analysis, policy, ChunkLayout(shape.first_sample, chunk_size)),
        gets=gets,
        bytes_read=bytes_read,
        held_peak_bytes=reads.held_peak * scale,
        held_mean_bytes=sum(job.held) / len(job.held) * scale,
        distance=distance,
        co_batch=co_batch,
        randomization_level=level,
        more_than_one_cache=more_gets,
        first_batch_seconds=read_seconds(
            kind.first_batch_gets(asked_first, chunk_size, job.chunks_in_memory * scale),
            bytes_read / gets,
            analysis.store,
        ),
    )


def _simulated(
    analysis: Analysis, spec: JobSpec, pods: SimulatedPods, num_epochs: int
) -> tuple[SimulatedJob, Iterator[Iterator[Batch]]]:
    """The job, and the batches of each of its epochs. A list is known when its epoch begins, as ranks post it."""
    shape, num_ranks = analysis.shape, analysis.num_pods
    lists = [analysis.orders[epoch % len(analysis.orders)] for epoch in range(num_epochs if analysis.orders else 0)]
    of_ranks = dealt(lists, shape.simulated, num_ranks)
    known = of_ranks[:1]
    job = SimulatedJob.of(
        spec,
        shape.first_sample,
        shape.lengths,
        pods,
        num_epochs,
        batch_size=max(1, analysis.batch_size * shape.simulated // shape.num_samples // num_ranks),
        orders=known,
        key=f"analysis {analysis.seed}",
    )

    def epochs() -> Iterator[Iterator[Batch]]:
        for epoch in range(num_epochs):
            known.extend(of_ranks[len(known) : epoch + 1])
            yield job.epoch(epoch)

    return job, epochs()


def sample_by_sample(analysis: Analysis) -> Row:
    """What the same epoch takes with no cache: a true shuffle, and a GET for every sample."""
    shape = analysis.shape
    sample_bytes = shape.total_bytes / shape.num_samples
    asked_first = -(-min(analysis.batch_size, shape.num_samples) // analysis.num_pods)
    return _row(
        analysis,
        policy="none",
        chunk_size=1,
        gets=shape.num_samples,
        bytes_read=shape.total_bytes,
        held_peak_bytes=0.0,
        held_mean_bytes=0.0,
        distance=1 / 3,
        co_batch=1.0,
        randomization_level=1.0,
        first_batch_seconds=read_seconds(asked_first, sample_bytes, analysis.store),
    )


def _on_pods(analysis: Analysis, policy: str, layout: ChunkLayout) -> dict[str, Any]:
    found: dict[str, Any] = {"chunks_in_memory": analysis.chunks_in_memory(policy, layout)}
    if analysis.pod is not None:
        alone = analysis.job_alone(policy, layout.chunk_size)
        found |= {"job_memory_bytes": alone.memory_bytes, "plan": alone.plan}
    return found


def _row(analysis: Analysis, *, gets: float, bytes_read: float, first_batch_seconds: float, **measured: Any) -> Row:
    shape, store = analysis.shape, analysis.store
    reading = read_seconds(gets / analysis.num_pods, bytes_read / gets, store)
    epoch_seconds, io_bound = reading, None
    if analysis.compute_samples_per_second is not None:
        computing = shape.num_samples / analysis.compute_samples_per_second
        epoch_seconds, io_bound = max(reading, first_batch_seconds + computing), reading > computing
    return Row(
        gets=gets,
        gets_per_64_samples=gets * 64 / shape.num_samples,
        bytes_read=bytes_read,
        read_amplification=bytes_read / shape.total_bytes,
        block_randomization_level=block_randomization_level(shape.num_samples, measured["chunk_size"]),
        store_dollars=store.dollars(gets, bytes_read),
        first_batch_seconds=first_batch_seconds,
        read_seconds=reading,
        epoch_seconds=epoch_seconds,
        io_bound=io_bound,
        run_dollars={
            provider: run_cost(
                prices,
                epochs=analysis.epochs,
                gets=gets,
                run_seconds=analysis.epochs * epoch_seconds,
                machines=analysis.num_pods,
                vm_hour=analysis.vm_hour,
            ).total
            for provider, prices in PROVIDERS.items()
        }
        if analysis.epochs
        else {},
        **measured,
    )


def read_seconds(gets: float, chunk_bytes: float, store: StoreTerms) -> float:
    """The least time in which one pod can read so many chunks; a floor, not a measurement.

    Two things bound it. Each of the GETs under way at once takes a latency and its transfer, one after the other; and
    after the first latency all bytes come through the pod's bandwidth. The larger counts. Left out: what GETs under
    way at once take from each other, retries, waits of the training loop for reads that were not ordered ahead.
    """
    transfer = chunk_bytes / store.bytes_per_second
    rounds = math.ceil(gets / store.concurrency)
    return max(rounds * (store.latency_seconds + transfer), store.latency_seconds + gets * transfer)


def recommend(analysis: Analysis) -> tuple[int, str]:
    """``(K, the reason in one line)`` of a job of the default policy: what it has when it names none, by the code of
    the pods."""
    shape, planned = analysis.shape, analysis.plan_memory.planned_bytes * analysis.num_pods
    sample_bytes, classes = shape.total_bytes / shape.num_samples, shape.classes_in_pieces
    if shape.group_samples is not None:
        return shape.group_samples, (
            f"K={shape.group_samples}, as every job has it: a row group or record batch is decoded whole; smaller ones "
            "shuffle better (row_group_size)"
        )
    if analysis.orders:
        chunk_size = default_chunk_size(shape.num_samples, sample_bytes, shape.largest_blob, shape.by_class)
        return chunk_size, f"K={chunk_size}, as a planned job with lists has it that names none"
    about = (shape.num_samples, sample_bytes, shape.largest_blob, planned, analysis.num_pods, classes)
    chunk_size = fitted_chunk_size(planned_chunk_size(*about), shape.first_sample)
    stored = (
        "stored mixed" if classes == 0 else f"of {classes:,} classes one after another" if classes else "of any kind"
    )
    holds = f"planned with K={chunk_size}, as a job has it that names none: what its order is planned for holds"
    if planned >= shape.total_bytes:
        num_chunks = ChunkLayout(shape.first_sample, chunk_size).num_chunks * shape.num_samples // shape.simulated
        return chunk_size, f"{holds} all {num_chunks:,} chunks of the dataset"
    wanted = math.ceil(chunks_wanted(shape.num_samples, analysis.num_pods, classes))
    held = int(planned / sample_bytes / chunk_size)
    return chunk_size, f"{holds} {held:,} chunks, and {wanted:,} are wanted of a dataset {stored}"
