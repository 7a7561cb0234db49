"""Do blobs end with whole chunks?"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.service.datasets_on_disk import write_files
from tests.service.packing import everything, packed

from refill_service.cache_core.planned.job_plan import largest_chunk_size, planned_chunk_size
from refill_service.datasets.blob_builder import FillingBlob, whole_chunks
from refill_service.datasets.dataset_reader import Dataset
from refill_service.datasets.pack_samples import pack_samples


def blobs_of(sizes: list[int], most_bytes: int) -> list[list[int]]:
    filling, left, blobs = FillingBlob(most_bytes), list[int](), list[list[int]]()
    for size in sizes:
        for count in filling.add(size):
            blobs.append(left[:count])
            left = left[count:]
        left.append(size)
    return [*blobs, left] if left else blobs


@given(
    st.lists(st.one_of(st.integers(1, 20), st.integers(1, 1000), st.integers(10**6, 10**8)), min_size=1, max_size=400),
    st.sampled_from([1, 1000, 5000, 64_000_000]),
)
def test_every_sample_lies_in_a_blob_in_order_and_blobs_end_with_whole_chunks(
    sizes: list[int], most_bytes: int
) -> None:
    blobs = blobs_of(sizes, most_bytes)
    assert [size for blob in blobs for size in blob] == sizes
    assert all(blob and (sum(blob) <= most_bytes or len(blob) == 1) for blob in blobs)
    first = 0
    for blob in blobs[:-1]:
        held, end = 0, first  # what there was room for
        while end < len(sizes) and held + sizes[end] <= most_bytes:
            held += sizes[end]
            end += 1
        chunk_size = largest_chunk_size(held / max(1, end - first))
        while chunk_size > 64 and 8 * chunk_size > end - first:
            chunk_size //= 2
        assert len(blob) % chunk_size == 0 or len(blob) == max(1, end - first) < chunk_size
        assert end - first - len(blob) < chunk_size, "no more is left to the next than must be"
        first += len(blob)


@pytest.mark.parametrize(
    ("num_samples", "sample_bytes", "expected"),
    [
        *((291, 110_000, 256), (580, 110_000, 576), (64, 110_000, 64), (63, 110_000, 63), (1, 110_000, 1)),
        *((63, 1_000_000, 48), (15, 4_000_000, 12), (3, 20_000_000, 3), (0, 1, 0)),
        *((21_845, 3_000, 21_760), (86, 200, 64), (2_050, 3_000, 2_048), (1_300, 3_000, 1_280)),
    ],
)
def test_how_many_samples_are_whole_chunks(num_samples: int, sample_bytes: int, expected: int) -> None:
    assert whole_chunks(num_samples, num_samples * sample_bytes) == expected


@given(st.floats(1, 1e8), st.integers(1, 10**12))
def test_a_whole_number_of_the_largest_chunks_is_one_of_those_that_a_job_chooses(
    sample_bytes: float, plan_bytes: int
) -> None:
    chosen = planned_chunk_size(10**6, sample_bytes, 10**6, plan_bytes, 1, 0)
    assert largest_chunk_size(sample_bytes) % chosen == 0


def test_a_packed_folder_has_no_short_chunk_but_its_last(tmp_path: Path) -> None:
    write_files(tmp_path / "src", {f"{number:04}.bin": bytes(number % 400) for number in range(500)})
    url = (tmp_path / "out").as_uri()
    packed(tmp_path / "src", url, blob_bytes=90_000)  # 86 would fit
    assert samples_of_blobs(url) == [64] * 7 + [52]
    assert len(everything(url)[3]) == 500


def test_packed_samples_have_no_short_chunk_but_the_last(tmp_path: Path) -> None:
    items: list[Any] = [{"bin": bytes(100)}] * 16 + [{"bin": bytes(1500)}] * 484
    url = (tmp_path / "out").as_uri()
    asyncio.run(pack_samples(items, url, blob_bytes=140_000, shuffle=False, jobs=1))
    # By the first samples 136 fit, so 128 are a part. Those that follow are larger, and a part is two blobs.
    assert samples_of_blobs(url) == [64] * 7 + [52]


def samples_of_blobs(url: str) -> list[int]:
    async def read() -> list[int]:
        dataset = await Dataset.open(url)
        found: list[int] = np.diff(dataset.blobs.first_sample).tolist()
        await dataset.close()
        return found

    return asyncio.run(read())
