"""What does each pod do when a planned job is very large, and of which thing does a pod run short first?

Nothing is simulated: chunk size, shares, who has them, the pods of a batch and the parts of the index that a pod reads
follow from the code that decides it in pods; one share is planned to see how long that takes.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from refill.errors import InvalidInput
from refill.protocol.plan_memory import asked_at_once, divided
from refill.protocol.plan_settings import PlanSettings
from refill.protocol.share_owners import share_owners
from refill.protocol.weaving import weaving_of
from refill_service.cache_core.dataset_index import BLOCK_SAMPLES
from refill_service.cache_core.job_memory import PodMemory
from refill_service.cache_core.planned.job_plan import chunks_wanted, fitted_chunk_size, planned_chunk_size
from refill_service.cache_core.planned.share_order import order_share
from refill_service.cache_core.planned.shares import Share, Shares
from refill_service.cache_core.record_pieces import holds_all
from refill_service.cache_core.sample_mapping import ChunkLayout, Int64Array
from refill_service.datasets.dataset_reader import held_bytes, record_requests
from refill_service.planning.analysis import StoreTerms
from refill_service.planning.pod_sizing import job_alone

_BATCHES_LOOKED_AT = 400
_PLANNED_SAMPLES = 1 << 20
"""Of a share: as many are planned to see how long it takes."""
_RECORD_BYTES = 16
"""Of a sample in the index, where blobs have less than 4 GiB."""
_BLOB_ENTRY_BYTES = 24 + len("blob-000000.tar")


@dataclass(frozen=True)
class ScaleShape:
    """A job, and its dataset."""

    num_samples: int
    sample_bytes: int
    num_pods: int
    num_ranks: int
    samples_per_second: float
    """Of all ranks together."""
    batch: int
    """Samples of a rank in a step."""
    num_workers: int
    """Of each rank's loader."""
    blob_bytes: int
    seed: int = 0


@dataclass(frozen=True)
class PodLimits:
    """What one pod has."""

    memory: PodMemory
    store: StoreTerms
    max_connections: int
    cores: float
    network_bytes_per_second: float
    """Each way."""
    cpu_seconds_of_sample: float
    """CPU of a pod for a sample, from the store to training, however small."""
    cpu_seconds_of_gb: float
    """In addition, for each GB."""


@dataclass(frozen=True)
class Scaled:
    """What the pod that has most to do does and needs, except where it says of all pods."""

    chunk_size: int
    num_shares: int
    shares_of_pod: int
    samples_of_pod: int
    requests_per_second: float
    pods_of_batch: float
    """That are asked for one batch, on average."""
    gets_per_second: float
    """To the store, in an epoch after the first."""
    store_bytes_per_second: float
    sent_bytes_per_second: float
    connections: int
    cores: float
    memory_bytes: int
    """For samples, with the pinned tier."""
    planned_bytes: int
    """What the order is planned for, of that."""
    plan_tables_bytes: int
    chunks_in_memory_part: float
    """Of the chunks that the planned memory of all pods should hold, so that a shuffle is good; above 1: as many or
    more."""
    index_bytes: int
    """The whole object, in the store."""
    index_held_bytes: int
    index_read_bytes: int
    index_requests: int
    planning_seconds: float
    """An epoch of all shares of the pod, here."""
    start_seconds: float
    """From the registration of a job to the first answer: the index, and the plan."""
    lacks: str | None
    """What of its memory does not fit, in words."""
    needs: dict[str, float] = field(default_factory=dict)
    """By resource, the part of what a pod has that it needs."""

    @property
    def bottleneck(self) -> str:
        return max(self.needs, key=lambda name: self.needs[name])

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"bottleneck": self.bottleneck}


def scaled(shape: ScaleShape, limits: PodLimits) -> Scaled:
    """Raises :class:`InvalidInput` for blobs that hold no chunk."""
    layout, plan, at_once_bytes, lacks, planned_bytes = _planned(shape, limits.memory)
    shares = Shares(layout, plan.num_shares)
    owners = share_owners(plan.num_shares, shape.num_pods)
    of_pods = np.zeros(shape.num_pods, dtype=np.int64)
    np.add.at(of_pods, owners, shares.sizes)
    fullest = int(of_pods.argmax())
    own = np.flatnonzero(owners == fullest).tolist()
    part = int(of_pods[fullest]) / shape.num_samples

    pods_of_batch = _pods_of_batch(shape, plan, shares.sizes, owners)
    rate, sample_bytes = shape.samples_per_second * part, shape.sample_bytes
    sent = rate * sample_bytes
    pinned_part = min(1.0, limits.memory.pinned_bytes / max(1.0, float(of_pods[fullest]) * sample_bytes))
    from_store = sent * (1 - pinned_part)
    cores = rate * limits.cpu_seconds_of_sample + sent / 1e9 * limits.cpu_seconds_of_gb

    num_blobs = len(layout.first_sample) - 1
    head_bytes = 128 + num_blobs * _BLOB_ENTRY_BYTES
    index_bytes = head_bytes + shape.num_samples * _RECORD_BYTES
    whole = holds_all(shape.num_samples, is_listed=False)
    first, end = shares.pieces(own)
    if whole:
        first, end = np.zeros(1, dtype=np.int64), np.array([shape.num_samples], dtype=np.int64)
    requests, read_samples = record_requests(first, end, BLOCK_SAMPLES, shape.num_samples, _RECORD_BYTES)
    read_bytes = head_bytes + read_samples * _RECORD_BYTES
    held = held_bytes(shape.num_samples if whole else int(of_pods[fullest]), head_bytes)
    planning_seconds = _planning_seconds(plan, shares, sample_bytes, int(of_pods[fullest]), own[0])
    store = limits.store
    index_seconds = (2 + requests / store.concurrency) * store.latency_seconds + read_bytes / store.bytes_per_second

    jobs = job_alone(
        limits.memory, "planned", plan.chunk_size, shape.num_samples, shape.num_samples * sample_bytes, at_once_bytes
    )
    wanted_bytes = chunks_wanted(shape.num_samples, shape.num_pods, 0) * plan.chunk_size * sample_bytes
    connections = shape.num_ranks * max(1, shape.num_workers)
    index_room = limits.memory.memory_bytes // 8 + (64 << 20)
    needs = {
        "network, to training": sent / limits.network_bytes_per_second,
        "network, from the store": from_store / min(limits.network_bytes_per_second, store.bytes_per_second),
        "GETs under way": _under_way(from_store, plan.chunk_size * sample_bytes, store) / store.concurrency,
        "CPU": cores / limits.cores,
        "connections": connections / limits.max_connections,
        "memory for the shuffle": wanted_bytes / max(1, plan.memory_bytes),
        "memory for the index": held / index_room,
    }
    return Scaled(
        chunk_size=plan.chunk_size,
        num_shares=plan.num_shares,
        shares_of_pod=len(own),
        samples_of_pod=int(of_pods[fullest]),
        requests_per_second=shape.samples_per_second / shape.batch * pods_of_batch * part,
        pods_of_batch=pods_of_batch,
        gets_per_second=from_store / (plan.chunk_size * sample_bytes),
        store_bytes_per_second=from_store,
        sent_bytes_per_second=sent,
        connections=connections,
        cores=cores,
        memory_bytes=limits.memory.memory_bytes,
        planned_bytes=planned_bytes,
        plan_tables_bytes=jobs.for_plan_bytes,
        chunks_in_memory_part=plan.memory_bytes / max(1.0, wanted_bytes),
        index_bytes=index_bytes,
        index_held_bytes=held,
        index_read_bytes=read_bytes,
        index_requests=2 + requests,
        planning_seconds=planning_seconds,
        start_seconds=index_seconds + planning_seconds / max(1, len(own)),
        lacks=lacks,
        needs=needs,
    )


def _planned(shape: ScaleShape, pod: PodMemory) -> tuple[ChunkLayout, PlanSettings, int, str | None, int]:
    """As pods make the plan of a job that names nothing: the chunks, the plan, what loaders ask for at once on a pod,
    what does not fit, and the memory that the order is planned for on a pod."""
    num_samples, total_bytes = shape.num_samples, shape.num_samples * shape.sample_bytes
    per_blob = shape.blob_bytes // shape.sample_bytes
    if per_blob < 1:
        raise InvalidInput(f"a blob of {shape.blob_bytes:,} bytes holds no sample: give a larger --blob-size")
    first_sample = np.minimum(np.arange(-(-num_samples // per_blob) + 1, dtype=np.int64) * per_blob, num_samples)
    at_once = asked_at_once(
        max(1, shape.num_workers) * shape.batch, shape.num_ranks, shape.sample_bytes, shape.num_pods
    )
    samples_bytes = job_alone(pod, "planned", 8, num_samples, total_bytes, at_once).memory.abstract_bytes
    memory = divided(samples_bytes, at_once, is_listed=False)
    chunk_size = planned_chunk_size(
        num_samples,
        shape.sample_bytes,
        int(np.diff(first_sample).max()),
        memory.planned_bytes * shape.num_pods,
        shape.num_pods,
        0,
    )
    chunk_size = fitted_chunk_size(chunk_size, first_sample)
    chosen = job_alone(pod, "planned", chunk_size, num_samples, total_bytes, at_once).plan
    assert chosen is not None
    plan = PlanSettings(
        "0" * 16, num_samples, chunk_size, chosen["shares"], chosen["plan_bytes"], chosen["run"], shape.seed
    )
    return ChunkLayout(first_sample, chunk_size), plan, at_once, memory.lacks(at_once), memory.planned_bytes


def _pods_of_batch(shape: ScaleShape, plan: PlanSettings, sizes: Int64Array, owners: Int64Array) -> float:
    """Of batches at random places of an epoch: how many pods have a part of it."""
    weaving = weaving_of(plan, sizes, 1)
    batch = min(shape.batch, shape.num_samples)
    random = np.random.default_rng(shape.seed)
    counts = []
    for start in random.integers(0, shape.num_samples - batch + 1, _BATCHES_LOOKED_AT).tolist():
        found, _ = weaving.places(np.arange(start, start + batch, dtype=np.int64))
        counts.append(len(np.unique(owners[found])))
    return float(np.mean(counts))


def _planning_seconds(plan: PlanSettings, shares: Shares, sample_bytes: int, num_samples: int, number: int) -> float:
    """CPU time of this machine. A share that is very large is planned in part."""
    share = shares.share(number)
    some = _first(share, min(len(share.samples), _PLANNED_SAMPLES))
    lengths = np.full(len(some.samples), sample_bytes, dtype=np.int64)
    memory_bytes = plan.memory_bytes * len(some.samples) // plan.num_samples
    started = time.process_time()
    order_share(some.starts, lengths, memory_bytes, 1, number=number, num_shares=plan.num_shares)
    return (time.process_time() - started) * num_samples / max(1, len(some.samples))


def _first(share: Share, num_samples: int) -> Share:
    """About so many of its samples, in whole chunks."""
    chunks = max(1, int(np.searchsorted(share.starts, num_samples, side="right")) - 1)
    starts = share.starts[: chunks + 1]
    return Share(share.chunks[:chunks], starts, share.samples[: int(starts[-1])])


def _under_way(bytes_per_second: float, get_bytes: float, store: StoreTerms) -> float:
    """GETs at once, by Little's law: each takes its latency and, alone, the time of its bytes."""
    return bytes_per_second / get_bytes * store.latency_seconds + bytes_per_second / store.bytes_per_second
