"""What is in a dataset, and is every byte still what was packed? ``refill inspect``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from refill.errors import DatasetError, IndexDamaged, SampleDamaged, StoreNotFound
from refill.protocol.job_spec import JobSpec
from refill_service.cache_core.dataset_index import Int64Array, SampleRecords
from refill_service.cache_core.planned.job_plan import more_for_short_chunks
from refill_service.datasets.dataset_reader import Dataset
from refill_service.formats.rows import MOST_GROUP_BYTES

_EXACT_BLOCKS = 256
"""Up to a million samples the size distribution is exact, beyond from that many blocks of records."""
_CHUNK_SIZES = (8, 16, 32, 64)
_VERIFY_BYTES = 8 << 20
_VERIFY_AT_ONCE = 8


@dataclass(frozen=True)
class DatasetSummary:
    """What ``refill inspect`` shows of a dataset."""

    url: str
    data_url: str | None
    """Below which the blobs lie; None: beside the index."""
    num_samples: int
    num_blobs: int
    sample_bytes: int
    blob_bytes: int
    index_bytes: int
    fingerprint: str
    metadata: dict[str, Any]
    sample_sizes: dict[str, int]
    """``min``, ``p05``, ``median``, ``mean``, ``p95``, ``p99``, ``max`` in bytes."""
    sample_sizes_exact: bool
    sample_sizes_are_means: bool
    """Of groups of rows, whose headers say no more."""
    """False: from a part of the samples, spread over the dataset."""
    blob_sizes: dict[str, int]
    samples_per_blob: dict[str, int]
    labels: dict[str, Any] | None
    """What the index says of them."""
    by_class: bool
    """Whether neighbours share labels far more often than by chance."""
    has_checksums: bool
    """False: pods compare a sample with what it was at their first read."""
    default_chunk_size: int
    """K of a job that names none and whose order is not planned for memory: of lists, or of policy ``exact``."""
    more_for_short_chunks: dict[str, float]
    """By K, up to what a blob holds: how many more GETs there are since chunks at the ends of blobs are short, as a
    part."""


async def describe(dataset: Dataset, *, despite_damage: bool = False) -> DatasetSummary:
    """``despite_damage``: leave blocks of records that can't be read out of ``sample_sizes``, in place of raising."""
    index, blobs, labels = dataset.index, dataset.blobs, dataset.label_summary
    num_blocks = index.header.num_blocks
    chosen = np.unique(np.linspace(0, num_blocks - 1, min(num_blocks, _EXACT_BLOCKS)).astype(np.int64))
    lengths = []
    for block in chosen.tolist():
        try:
            lengths.append((await _load_block(dataset, block)).length)
        except IndexDamaged:
            if not despite_damage:
                raise
    return DatasetSummary(
        url=dataset.url,
        data_url=index.data_url,
        num_samples=index.num_samples,
        num_blobs=len(blobs),
        sample_bytes=index.sample_bytes,
        blob_bytes=int(blobs.size_bytes.sum()),
        index_bytes=index.header.index_bytes,
        fingerprint=f"{index.fingerprint:016x}",
        metadata=index.metadata,
        sample_sizes=_distribution(np.concatenate(lengths) if lengths else np.zeros(0, np.int64)),
        sample_sizes_exact=len(lengths) == num_blocks and not dataset.has_means,
        sample_sizes_are_means=dataset.has_means,
        blob_sizes=_distribution(blobs.size_bytes),
        samples_per_blob=_distribution(np.diff(blobs.first_sample)),
        labels=None if labels is None else labels.to_dict(),
        by_class=labels is not None and labels.by_class,
        has_checksums=index.header.has_checksums,
        default_chunk_size=dataset.chunk_size_of(JobSpec.policy),
        more_for_short_chunks=_more_for_short_chunks(dataset),
    )


async def find_damage(dataset: Dataset, on_bytes: Callable[[int], None]) -> AsyncIterator[DatasetError]:
    """Reads every byte and yields what is damaged, in order: a :class:`SampleDamaged` for each such sample, an
    :class:`IndexDamaged` for each block of the index that can't be read. Errors of the store are raised.
    """
    running: list[asyncio.Task[list[DatasetError]]] = []
    try:
        async for records, first, end in sample_ranges(dataset):
            if isinstance(records, IndexDamaged):
                running.append(asyncio.create_task(_already(records)))
            else:
                running.append(asyncio.create_task(_verify(dataset, records, first, end, on_bytes)))
            if len(running) >= _VERIFY_AT_ONCE:
                for error in await running.pop(0):
                    yield error
        while running:
            for error in await running.pop(0):
                yield error
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def sample_ranges(dataset: Dataset) -> AsyncIterator[tuple[SampleRecords | IndexDamaged, int, int]]:
    """Consecutive samples of one blob that are read together."""
    for block in range(dataset.index.header.num_blocks):
        try:
            records = await _load_block(dataset, block)
        except IndexDamaged as error:
            yield error, 0, 0
            continue
        first = records.first_sample
        while first < records.end_sample:
            blob = dataset.blobs.blob_of(first)
            most = min(records.end_sample, int(dataset.blobs.first_sample[blob + 1])) - records.first_sample
            here = first - records.first_sample
            ends = records.offset[here:most] + records.length[here:most] - records.offset[here]
            most_bytes = _VERIFY_BYTES if dataset.group_samples is None else MOST_GROUP_BYTES
            end = first + max(1, int(np.searchsorted(ends, most_bytes, side="right")))
            yield records, first, end
            first = end


async def _verify(
    dataset: Dataset, records: SampleRecords, first: int, end: int, on_bytes: Callable[[int], None]
) -> list[DatasetError]:
    part = records.part(first, end)
    try:
        buffer = await dataset.read_samples(part, first, end)
    except SampleDamaged as error:
        if end - first == 1:
            on_bytes(int(part.length[0]))
            return [error]
        if isinstance(error.__cause__, StoreNotFound):
            on_bytes(int(part.length.sum()))
            return [dataset.damage(part, sample, "the blob is gone from the store") for sample in range(first, end)]
        if dataset.group_samples is not None:  # a group is read whole, or not at all
            on_bytes(int(part.length.sum()))
            return [dataset.damage(part, sample, "its group of rows can't be read") for sample in range(first, end)]
        # The blob is too short for all of them, perhaps not for each.
        return [
            error
            for sample in range(first, end)
            for error in await _verify(dataset, records, sample, sample + 1, on_bytes)
        ]
    found: list[DatasetError] = []
    on_bytes(int(part.length.sum()))
    part = dataset.as_read(part)
    for place in range(end - first):
        start = int(part.offset[place] - part.offset[0])
        try:
            dataset.verify_sample(buffer[start : start + int(part.length[place])], part, first + place)
        except SampleDamaged as error:
            found.append(error)
    return found


async def _already(error: DatasetError) -> list[DatasetError]:
    return [error]


async def _load_block(dataset: Dataset, block: int) -> SampleRecords:
    block_samples = dataset.index.header.block_samples
    return await dataset.load_records(block * block_samples, min(dataset.num_samples, (block + 1) * block_samples))


def _more_for_short_chunks(dataset: Dataset) -> dict[str, float]:
    if dataset.group_samples is not None:  # each row group is a chunk
        return {}
    first_sample = dataset.blobs.first_sample
    largest_blob = int(np.diff(first_sample).max(initial=0))
    return {str(k): more_for_short_chunks(k, first_sample) for k in _CHUNK_SIZES if k <= largest_blob}


def _distribution(values: Int64Array) -> dict[str, int]:
    if not len(values):
        return {}
    p05, median, p95, p99 = np.percentile(values, [5, 50, 95, 99])
    return {
        "min": int(values.min()),
        "p05": int(p05),
        "median": int(median),
        "mean": int(values.mean()),
        "p95": int(p95),
        "p99": int(p99),
        "max": int(values.max()),
    }
