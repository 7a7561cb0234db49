"""Where a sample lives: chunks never cross blobs, shares cover everything once, slots are a bijection in a group."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill.errors import InvalidInput
from refill_service.cache_core.policies.registry import kind_of
from refill_service.cache_core.sample_mapping import (
    AbstractMapping,
    ChunkLayout,
    abstract_chunks_for_budget,
)

blobs = st.lists(st.integers(1, 50), min_size=1, max_size=8)


@given(blobs, st.integers(1, 50))
def test_chunks_partition_the_samples_within_blobs(per_blob: list[int], chunk_size: int) -> None:
    chunk_size = min(chunk_size, max(per_blob))
    layout = ChunkLayout(np.concatenate([[0], np.cumsum(per_blob)]), chunk_size)
    samples = np.arange(sum(per_blob))
    chunks, slots = layout.locate(samples)
    starts = layout.starts(np.arange(layout.num_chunks + 1))
    assert np.array_equal(starts[chunks] + slots, samples)
    assert (np.diff(chunks) >= 0).all()
    assert (slots < chunk_size).all()
    blob_of_sample = np.repeat(np.arange(len(per_blob)), per_blob)
    for chunk in range(layout.num_chunks):
        assert len(set(blob_of_sample[chunks == chunk])) == 1


@given(blobs, st.integers(1, 9), st.integers(1, 7), st.integers(1, 6), st.sampled_from(["consecutive", "interleaved"]))
def test_shares_and_groups_cover_everything_once(
    per_blob: list[int], chunk_size: int, num_pods: int, group_size: int, order: str
) -> None:
    chunk_size = min(chunk_size, max(per_blob))
    layout = ChunkLayout(np.concatenate([[0], np.cumsum(per_blob)]), chunk_size)
    bounds = layout.owner_bounds(num_pods)
    owned = []
    for pod in range(num_pods):
        share = layout.share(pod, num_pods)
        assert (share.first_sample, share.end_sample) == (bounds[pod], bounds[pod + 1])
        owned += range(share.first_sample, share.end_sample)
        mapping = AbstractMapping(share, -(-share.num_chunks // group_size), order)
        locations = mapping.locations(np.arange(share.num_samples))
        chunks = layout.locate(np.arange(share.first_sample, share.end_sample))[0] - share.first_chunk
        in_groups: list[int] = []
        for abstract_chunk in range(mapping.num_abstract_chunks):
            group = list(range(share.num_chunks))[mapping.group(abstract_chunk)]
            assert mapping.group_size - 1 <= len(group) <= mapping.group_size <= group_size
            assert set(chunks[locations // chunk_size == abstract_chunk].tolist()) == set(group)
            in_groups += group
        assert sorted(in_groups) == list(range(share.num_chunks))
    assert owned == list(range(sum(per_blob)))


def test_chunk_larger_than_every_blob_is_refused() -> None:
    with pytest.raises(InvalidInput, match=r"chunk size 65 is larger than every blob .*holds 64 samples"):
        ChunkLayout(np.array([0, 64, 100]), 65)


@pytest.mark.parametrize(("budget", "num"), [(10_000, 10), (1000, 10), (500, 5), (150, 1), (100, 1), (99, 0)])
def test_abstract_chunks_follow_from_the_budget(budget: int, num: int) -> None:
    """Ten chunks of 100 bytes: as many abstract chunks as chunks fit; 0 when not one does."""
    assert abstract_chunks_for_budget(10, 100, budget) == num


@pytest.mark.parametrize(
    ("policy", "num_samples", "sample_bytes", "largest_blob", "expected"),
    [
        ("redox", 10**6, 100_000, 1000, 64),
        ("planned", 10**6, 100_000, 1000, 8),  # images
        ("planned", 10**6, 3_000, 20_000, 64),  # thumbnails
        ("planned", 10**6, 20_000, 20_000, 32),
        ("planned", 60_000, 800, 60_000, 16),  # few samples: more chunks of fewer
        ("planned", 1_500, 250, 500, 8),
        ("planned", 10**6, 5_000_000, 100, 2),  # volumes: a chunk of 16 MiB at most
        ("planned", 10**6, 50_000_000, 10, 1),
        ("planned", 10**6, 3_000, 5, 5),
        ("redox", 10**6, 3_000, 5, 5),
    ],
)
def test_default_chunk_size(
    policy: str, num_samples: int, sample_bytes: float, largest_blob: int, expected: int
) -> None:
    assert kind_of(policy).default_chunk_size(num_samples, sample_bytes, largest_blob, False) == expected
