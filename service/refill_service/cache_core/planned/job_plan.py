"""The plan of a job: what its settings are where the job leaves them open."""

from __future__ import annotations

from dataclasses import replace

from refill.protocol.job_spec import JobSpec
from refill.protocol.plan_settings import PlanSettings
from refill_service.cache_core.sample_mapping import ChunkLayout

__all__ = ["plan_memory", "plan_of", "with_plan"]

_BYTES_PER_SAMPLE = 60
"""Of a pod's shares: which samples they are, their lengths and chunks, and of three epochs the order, each sample's
place in it and where it is."""

_PLANNED_PART = 0.8
"""Of memory: loader workers ask out of order, ranks are not in step, and chunks are read a little ahead."""
_CHUNKS_OF_SHARE = 128
"""In memory at once, for each share: with fewer, chunk-mates of a share meet in its runs."""
_LEAST_SHARES, _FEW_SHARES = 8, 8
_RUN, _RUN_OF_FEW = 64, 32


def plan_memory(num_samples: int, num_pods: int) -> int:
    """What a plan takes at a pod, beside the index."""
    return _BYTES_PER_SAMPLE * -(-num_samples // num_pods)


def with_plan(spec: JobSpec, pod_bytes: int, num_pods: int, chunk_bytes: float) -> JobSpec:
    """The job with all settings of its plan.

    :param pod_bytes: memory for samples that a job has on each pod.
    :param chunk_bytes: mean bytes of a chunk.

    Each pod has two shares at least, so that memory of all is used. Beyond that there are as many as keep 128 chunks of
    each in memory; orders of 2**n shares are most even.
    """
    given = spec.settings_of_policy()
    pods_bytes = given["plan_bytes"] or int(_PLANNED_PART * pod_bytes * num_pods)
    most_shares = max(1, int(pods_bytes / max(1.0, chunk_bytes)) // _CHUNKS_OF_SHARE)
    wanted = _power_of_two(max(_LEAST_SHARES, 2 * num_pods))
    least = _power_of_two(2 * num_pods) if num_pods > 1 else 1
    shares = given["shares"] or max(least, min(wanted, 1 << most_shares.bit_length() - 1))
    # A pod may have one share more than another, and no more memory.
    of_pod = -(-shares // num_pods)
    plan_bytes = given["plan_bytes"] or max(1, int(_PLANNED_PART * pod_bytes * shares / of_pod))
    run = given["run"] or (_RUN_OF_FEW if shares <= _FEW_SHARES else _RUN)
    return replace(spec, policy_settings={"plan_bytes": plan_bytes, "shares": shares, "run": run})


def plan_of(spec: JobSpec, fingerprint: str, layout: ChunkLayout) -> PlanSettings:
    """:param spec: as :func:`with_plan` returns it; ``fingerprint``: of the dataset."""
    given = spec.settings_of_policy()
    return PlanSettings(
        fingerprint,
        layout.num_samples,
        layout.chunk_size,
        given["shares"],
        given["plan_bytes"],
        given["run"],
        spec.seed,
    )


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
