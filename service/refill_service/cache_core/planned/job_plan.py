"""The plan of a job: what its settings are where the job leaves them open."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from refill.protocol.job_spec import JobSpec
from refill.protocol.plan_memory import divided
from refill.protocol.plan_settings import (
    PLAN_VERSION,
    STORED_ORDER,
    WITHIN_CLASSES_VERSION,
    PlanSettings,
    is_within_classes,
)
from refill_service.cache_core.sample_mapping import ChunkLayout, Int64Array

_BYTES_PER_SAMPLE = 60
"""Of a pod's shares: which samples they are, their lengths and chunks, and of three epochs the order, each sample's
place in it and where it is."""
_BYTES_PER_CHUNK = 300

_BYTES_PER_LISTED = 180
"""The same where ranks have the order in lists: a list is sorted by chunk, by sample and by position."""

_BYTES_OF_WHOLE = 8

_CHUNKS_OF_SHARE = 128
"""In memory at once, for each share: with fewer, chunk-mates of a share meet in its runs."""
_LEAST_SHARES, _FEW_SHARES = 8, 8
_SHORT_RUN, _RUN_OF_FEW, _RUN, _LONG_RUN, _LONGEST_RUN = 16, 32, 64, 128, 256
_FEW_CHUNKS = 32
"""In memory, of a share: a batch should then have samples of all shares, or chunk-mates would meet in it."""
_CHUNKS_OF_RUN = 2
"""In memory, of a share, for each sample of a run that is longer than 64: then chunk-mates do not meet in it."""
_CHUNK_OF_LONGEST = 32
"""Runs are longest with chunks of so many samples or more: neighbours in smaller ones would meet too often."""
_LONGEST_RUN_BYTES = 4 << 20
"""And not longer than this: of large samples batches should come of several pods at once."""

SMALLEST_CHUNK, USUAL_CHUNK, _LARGEST_CHUNK = 8, 64, 512
"""More than 64 only of small samples, and where memory holds very many chunks all the same."""
_WORTH_A_REQUEST_BYTES = 1 << 20
"""Chunks of more than 64 samples are no larger than this."""
_LARGE_CHUNK_BYTES = 16 << 20
"""Larger requests read no faster, and what is under way takes memory."""
SHORT_ENOUGH = 1 / 32
"""Of chunks: with no more than so many more, since some are short, K stays what it is."""
_CHUNKS_OF_CLASS = 2
"""In memory, of each class, where chunks have samples of one class alone: with one, models were worse."""
_SAMPLES_OF_CLASS = 1300
"""About as many as ImageNet's have: of a dataset that may be stored by class."""


def plan_memory(num_samples: int, num_chunks: int, num_pods: int, *, is_listed: bool = False) -> int:
    """What a plan takes at a pod, beside the index; of lists, what is made of them, and the plan's whole order."""
    of_sample = _BYTES_PER_LISTED if is_listed else _BYTES_PER_SAMPLE
    of_pod = -(-(of_sample * num_samples + _BYTES_PER_CHUNK * num_chunks) // num_pods)
    return of_pod + _BYTES_OF_WHOLE * num_samples if is_listed else of_pod


def with_plan(
    spec: JobSpec, pod_bytes: int, num_pods: int, chunk_size: int, sample_bytes: float, at_once_bytes: int = 0
) -> JobSpec:
    """The job with all settings of its plan.

    :param pod_bytes: memory for samples that a job has on each pod.
    :param sample_bytes: of a sample, on average.
    :param at_once_bytes: that loaders ask for at once on a pod; 0: not known.

    Each pod has two shares at least, so that memory of all is used. Beyond that there are as many as keep 128 chunks of
    each in memory; orders of 2**n shares are most even.
    """
    given = spec.settings_of_policy()
    pods_bytes = planned_bytes(spec, pod_bytes, num_pods, at_once_bytes)
    chunk_bytes = chunk_size * sample_bytes
    most_shares = max(1, int(pods_bytes / max(1.0, chunk_bytes)) // _CHUNKS_OF_SHARE)
    wanted = _shares_wanted(num_pods)
    shares = given["shares"] or max(_least_shares(num_pods), min(wanted, 1 << most_shares.bit_length() - 1))
    # A pod may have one share more than another, and no more memory.
    plan_bytes = given["plan_bytes"] or max(1, pods_bytes * shares // (-(-shares // num_pods) * num_pods))
    run = given["run"] or _run(shares, plan_bytes / shares / max(1.0, chunk_bytes), chunk_size, sample_bytes)
    chosen = {"plan_bytes": plan_bytes, "shares": shares, "run": run}
    if selection := given["selection"] or STORED_ORDER * (not spec.shuffle and not spec.is_listed):
        chosen["selection"] = selection
    return replace(spec, policy_settings=chosen)


def planned_bytes(spec: JobSpec, pod_bytes: int, num_pods: int, at_once_bytes: int = 0) -> int:
    """What a job's order is planned for where each pod has as many shares, of all pods together; parameters as of
    :func:`with_plan`."""
    given = spec.settings_of_policy()
    is_listed = spec.is_listed and not is_within_classes(given["selection"])
    of_pod = divided(pod_bytes, at_once_bytes, is_listed=is_listed).planned_bytes
    return int(given["plan_bytes"]) or of_pod * num_pods


def planned_chunk_size(
    num_samples: int,
    sample_bytes: float,
    largest_blob: int,
    plan_bytes: int,
    num_pods: int,
    num_classes: int | None,
) -> int:
    """K of a job that names none, and whose order follows from the seed: the largest power of two from 8 to 64 that
    trains no worse (docs/TRAINING_QUALITY.md). Memory then holds ``chunks_wanted``. Below 8 only where samples are
    large, or blobs small. Up to 512 of small samples, where memory holds as many chunks as the longest runs want of
    all the shares that there may be: neither more shares nor longer runs would be had with smaller ones.

    :param sample_bytes: of a sample, on average; ``largest_blob``: in samples.
    :param plan_bytes: that the order is planned for, of all pods together.
    :param num_classes: as of :func:`chunks_wanted`.
    """
    wanted = chunks_wanted(num_samples, num_pods, num_classes)
    very_many = max(wanted, _CHUNKS_OF_RUN * _LONGEST_RUN * _shares_wanted(num_pods))
    chunk_size = largest_chunk_size(sample_bytes)
    while chunk_size > SMALLEST_CHUNK:
        if (very_many if chunk_size > USUAL_CHUNK else wanted) * chunk_size * sample_bytes <= plan_bytes:
            break
        chunk_size //= 2
    return min(chunk_size, largest_blob)


def largest_chunk_size(sample_bytes: float) -> int:
    """K of a job with all the memory that it could use, a power of two: what blobs should hold a whole number of."""
    chunk_size = _LARGEST_CHUNK
    while chunk_size > USUAL_CHUNK and chunk_size * sample_bytes > _WORTH_A_REQUEST_BYTES:
        chunk_size //= 2
    while chunk_size > 1 and chunk_size * sample_bytes > _LARGE_CHUNK_BYTES:
        chunk_size //= 2
    return chunk_size


def fitted_chunk_size(chunk_size: int, first_sample: Int64Array) -> int:
    """K, or as little more as makes up for short chunks at the ends of blobs, an eighth at most. Of blobs with 291
    samples each K = 32 makes ten chunks, the last of 3; K = 33 makes nine.

    :param first_sample: ``(blobs + 1,)``, as of :class:`ChunkLayout`.
    """
    if chunk_size <= SMALLEST_CHUNK or more_for_short_chunks(chunk_size, first_sample) <= SHORT_ENOUGH:
        return chunk_size
    largest = min(chunk_size + chunk_size // 8, int(np.diff(first_sample).max()))
    held = int(first_sample[-2])
    if_whole = held / chunk_size

    def num_chunks(k: int) -> int:
        return (held + _lacking(k, first_sample)) // k

    return min(range(chunk_size, largest + 1), key=lambda k: (max(num_chunks(k), if_whole), k))


def more_for_short_chunks(chunk_size: int, first_sample: Int64Array) -> float:
    """How many more chunks there are than if none was short at the end of a blob, as a part of these. The last blob
    counts for nothing: it holds what was left.

    :param first_sample: ``(blobs + 1,)``, as of :class:`ChunkLayout`.
    """
    return _lacking(chunk_size, first_sample) / max(1, int(first_sample[-2]))


def _lacking(chunk_size: int, first_sample: Int64Array) -> int:
    """Samples that short chunks have less than K, of all blobs but the last."""
    return int((-np.diff(first_sample[:-1]) % chunk_size).sum())


def chunks_wanted(num_samples: int, num_pods: int, num_classes: int | None) -> float:
    """So many chunks the memory that is planned for should hold: enough of each share that those of one chunk do not
    meet in a batch, and of each class that is stored in a piece.

    :param num_classes: that are stored one after another; 0: the dataset is stored mixed. None: it is not known.
    """
    classes = num_samples / _SAMPLES_OF_CLASS if num_classes is None else num_classes
    return max(_CHUNKS_OF_SHARE * _least_shares(num_pods), _CHUNKS_OF_CLASS * classes)


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
        WITHIN_CLASSES_VERSION if is_within_classes(given["selection"]) else PLAN_VERSION,
        spec.read_seed,
    )


def _run(num_shares: int, chunks_of_share: float, chunk_size: int, sample_bytes: float) -> int:
    """Longer ones have a batch ask fewer pods."""
    may_be_longest = chunk_size >= _CHUNK_OF_LONGEST and _LONGEST_RUN * sample_bytes <= _LONGEST_RUN_BYTES
    if may_be_longest and chunks_of_share >= _CHUNKS_OF_RUN * _LONGEST_RUN:
        return _LONGEST_RUN
    if chunks_of_share >= _CHUNKS_OF_RUN * _LONG_RUN:
        return _LONG_RUN
    if num_shares > _FEW_SHARES:
        return _RUN
    return _SHORT_RUN if chunks_of_share < _FEW_CHUNKS else _RUN_OF_FEW


def _shares_wanted(num_pods: int) -> int:
    return _power_of_two(max(_LEAST_SHARES, 2 * num_pods))


def _least_shares(num_pods: int) -> int:
    return _power_of_two(2 * num_pods) if num_pods > 1 else 1


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
