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
_BYTES_PER_CHUNK = 300

_BYTES_PER_LISTED = 180
"""The same where ranks have the order in lists: a list is sorted by chunk, by sample and by position."""

_BYTES_OF_WHOLE = 8

_PLANNED_PART = 0.8
"""Of memory: loader workers ask out of order, ranks are not in step, and chunks are read a little ahead."""
_LISTED_PART = 0.5
"""Of memory, where ranks have the order in lists: samplers of classes compose them of what the plan has, each class in
its turn, and those come a little before or after their time. With more, chunk-mates meet less, and more is read."""
_CHUNKS_OF_SHARE = 128
"""In memory at once, for each share: with fewer, chunk-mates of a share meet in its runs."""
_LEAST_SHARES, _FEW_SHARES = 8, 8
_RUN, _RUN_OF_FEW = 64, 32


def plan_memory(num_samples: int, num_chunks: int, num_pods: int, *, is_listed: bool = False) -> int:
    """What a plan takes at a pod, beside the index; of lists, what is made of them, and the plan's whole order."""
    of_sample = _BYTES_PER_LISTED if is_listed else _BYTES_PER_SAMPLE
    of_pod = -(-(of_sample * num_samples + _BYTES_PER_CHUNK * num_chunks) // num_pods)
    return of_pod + _BYTES_OF_WHOLE * num_samples if is_listed else of_pod


def with_plan(spec: JobSpec, pod_bytes: int, num_pods: int, chunk_bytes: float) -> JobSpec:
    """The job with all settings of its plan.

    :param pod_bytes: memory for samples that a job has on each pod.
    :param chunk_bytes: mean bytes of a chunk.

    Each pod has two shares at least, so that memory of all is used. Beyond that there are as many as keep 128 chunks of
    each in memory; orders of 2**n shares are most even.
    """
    given = spec.settings_of_policy()
    part = _LISTED_PART if spec.is_listed else _PLANNED_PART
    pods_bytes = given["plan_bytes"] or int(part * pod_bytes * num_pods)
    most_shares = max(1, int(pods_bytes / max(1.0, chunk_bytes)) // _CHUNKS_OF_SHARE)
    wanted = _power_of_two(max(_LEAST_SHARES, 2 * num_pods))
    least = _power_of_two(2 * num_pods) if num_pods > 1 else 1
    shares = given["shares"] or max(least, min(wanted, 1 << most_shares.bit_length() - 1))
    # A pod may have one share more than another, and no more memory.
    of_pod = -(-shares // num_pods)
    plan_bytes = given["plan_bytes"] or max(1, int(part * pod_bytes * shares / of_pod))
    run = given["run"] or (_RUN_OF_FEW if shares <= _FEW_SHARES else _RUN)
    chosen = {"plan_bytes": plan_bytes, "shares": shares, "run": run}
    if given["selection"]:
        chosen["selection"] = given["selection"]
    return replace(spec, policy_settings=chosen)


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
        given["selection"],
    )


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
