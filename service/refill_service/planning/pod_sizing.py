"""What does a job have that is alone on pods of so much memory, and what do these need? By the code of the pods.

What a pod moves in a second, and what CPU that takes, is measured (``make bench-cores``; docs/INSTALL.md, Sizing).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from refill.protocol.job_spec import JobSpec
from refill_service.cache_core.job_memory import JobMemory, PodMemory
from refill_service.cache_core.planned.job_plan import plan_memory, with_plan
from refill_service.cache_core.planned.posted_lists import list_memory
from refill_service.cache_core.posted_traces import memory_with_traces, trace_memory

CPU_SECONDS_PER_GB, _CPU_SECONDS_PER_GB_OF_ONE = 2.5, 1.4
"""Of samples of 100 KB, from the store to training: with several pods, and with one alone."""
_SMALL_INDEX_SAMPLES = 2_000_000
_BESIDE_SAMPLE_BYTES = 75
"""Of a pod's share, if it has more samples than that: the index, and tables of who got what."""


@dataclass(frozen=True)
class JobAlone:
    """A job of one policy and chunk size, on each pod."""

    memory: JobMemory
    for_plan_bytes: int
    """What the order takes, beside ``memory``."""
    plan: dict[str, Any] | None
    """Settings of its plan, if it has one."""

    @property
    def memory_bytes(self) -> int:
        """What the pod gives the job."""
        return self.memory.memory_bytes + self.for_plan_bytes


def job_alone(
    pod: PodMemory,
    policy: str,
    chunk_size: int,
    num_samples: int,
    total_bytes: int,
    at_once_bytes: int = 0,
    *,
    has_lists: bool = False,
) -> JobAlone:
    """A job that names no memory, on a dataset of ``num_samples`` and ``total_bytes``.

    :param at_once_bytes: that loaders ask for at once on each pod; 0: not known.
    :param has_lists: whether its ranks post the order in lists.
    """
    planned = policy == "planned"
    parts = pod.parts(total_bytes / max(1, num_samples), planned=planned)
    num_chunks = -(-num_samples // chunk_size)
    beside = plan_memory(num_samples, num_chunks, pod.num_pods, is_listed=has_lists) if planned else 0
    gives_back = planned and not has_lists
    _, first = pod.least_and_most(parts, total_bytes, chunk_size, gives_back=gives_back, beside_bytes=beside)
    later = first
    if has_lists:
        claimed = memory_with_traces(first, num_samples)
        first = later = min(claimed, int(pod.for_jobs_bytes * pod.kept_fraction))
        beside += list_memory(first, num_samples) if planned else trace_memory(first, num_samples)
        if planned:  # its order is planned for what it gets first, and then it grows
            later = min(claimed, pod.for_jobs_bytes)
    memory = replace(parts, memory_bytes=max(0, later - beside))
    plan = None
    if planned:
        order = "explicit" if has_lists else JobSpec.order
        spec = JobSpec("sized", "memory://sized", order=order, chunk_size=chunk_size, policy=policy)
        planned_for = replace(parts, memory_bytes=max(0, first - beside)).abstract_bytes
        spec = with_plan(spec, planned_for, pod.num_pods, chunk_size, parts.sample_bytes, at_once_bytes)
        plan = dict(spec.policy_settings)
    return JobAlone(memory, min(beside, later), plan)


@dataclass(frozen=True)
class PodNeeds:
    """What pods need while training goes at its speed: all pods together, except where it says of each."""

    samples_per_second: float
    bytes_per_second: float
    """To training."""
    store_bytes_per_second: float
    """From the store, in an epoch after the first: what is pinned is not read again."""
    cores: float
    in_bytes_per_second: float
    """Of each pod's network: from the store, and from other pods."""
    out_bytes_per_second: float
    """The same, to training and to other pods."""
    limit_bytes: int
    """Of each pod: what its container may take."""
    extra_bytes: int
    """Of each pod, for a large index: the chart's extraMemory. Part of ``limit_bytes``."""


def pod_needs(pod: PodMemory, num_samples: int, total_bytes: int, samples_per_second: float) -> PodNeeds:
    rate = samples_per_second * total_bytes / max(1, num_samples)
    from_store = rate * (1 - min(1.0, pod.num_pods * pod.pinned_bytes / max(1, total_bytes)))
    between = rate * (pod.num_pods - 1) / pod.num_pods
    share = -(-num_samples // pod.num_pods)
    extra = _BESIDE_SAMPLE_BYTES * share if share > _SMALL_INDEX_SAMPLES else 0
    return PodNeeds(
        samples_per_second,
        rate,
        from_store,
        cores=rate / 1e9 * (CPU_SECONDS_PER_GB if pod.num_pods > 1 else _CPU_SECONDS_PER_GB_OF_ONE),
        in_bytes_per_second=(from_store + between) / pod.num_pods,
        out_bytes_per_second=(rate + between) / pod.num_pods,
        limit_bytes=int(pod.memory_bytes * 1.15) + 200_000_000 + extra,
        extra_bytes=extra,
    )
