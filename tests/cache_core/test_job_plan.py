"""What a planned job leaves open: how its memory is divided, and how many neighbours are read together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill.protocol.job_spec import JobSpec
from refill.protocol.plan_memory import PlanMemory, asked_at_once, divided
from refill_service.cache_core.planned.epoch_plan import EpochPlan
from refill_service.cache_core.planned.job_plan import fitted_chunk_size, plan_of, planned_chunk_size, with_plan
from refill_service.cache_core.planned.shares import Shares
from refill_service.cache_core.sample_mapping import ChunkLayout
from refill_service.planning.plan_measures import spread_of


def spec(**settings: Any) -> JobSpec:
    return JobSpec("job", "memory://dataset", policy="planned", **settings)


# Memory.


@pytest.mark.parametrize(
    ("at_once", "is_listed", "planned"),
    [
        (0, False, 800),  # not known
        (100, False, 800),
        (101, False, 799),
        (300, False, 600),
        (400, False, 500),
        (5000, False, 500),
        (0, True, 500),
        (300, True, 500),
    ],
)
def test_what_loaders_ask_for_at_once_is_not_planned_for(at_once: int, is_listed: bool, planned: int) -> None:
    """Nor a tenth, for what is read ahead; but half of memory is, at least."""
    assert divided(1000, at_once, is_listed=is_listed).planned_bytes == planned


@given(st.integers(0, 2**50), st.integers(0, 2**50))
def test_all_terms_together_are_what_there_is(samples_bytes: int, at_once_bytes: int) -> None:
    memory = divided(samples_bytes, at_once_bytes, is_listed=False)
    assert memory.planned_bytes + memory.loaders_bytes == samples_bytes
    if at_once_bytes <= 0.4 * samples_bytes:
        assert memory.planned_bytes + memory.read_ahead_bytes + at_once_bytes <= samples_bytes
    assert (memory.lacks(at_once_bytes) is None) == (at_once_bytes <= memory.loaders_bytes)
    assert PlanMemory.from_dict(memory.to_dict()) == memory


def test_what_does_not_fit_is_said_with_what_to_do() -> None:
    known_late = divided(1000, 0, is_listed=False).lacks(350)
    assert known_late is not None
    assert known_late.endswith(
        "there are 200: some samples are read more than once; give it plan_bytes for 550 bytes on each pod, or fewer "
        "workers or smaller batches"
    )
    too_much = divided(1000, 800, is_listed=False).lacks(800)
    assert too_much is not None
    assert "memory for 2,000 bytes of samples on each pod" in too_much
    assert divided(2000, 800, is_listed=False).lacks(800) is None
    assert PlanMemory(500, 800).lacks(700, dataset_bytes=500) is None, "all of a small dataset is in memory"
    lost = PlanMemory(500, 800).lacks(0, dataset_bytes=501)
    assert lost is not None
    assert lost.startswith("its order is planned for 800 bytes on each pod, and there are 500 for samples")


def test_a_pod_has_its_part_of_what_all_ranks_ask_for() -> None:
    assert asked_at_once(8 * 64, 16, 100.0, 4) == 8 * 64 * 16 * 100 // 4
    plan = with_plan(spec(), 1_000_000, 2, 8, 100.0, 300_000).policy_settings["plan_bytes"]
    assert plan == 2 * 600_000
    assert with_plan(spec(policy_settings={"plan_bytes": 7}), 1000, 2, 8, 1.0, 300).policy_settings["plan_bytes"] == 7


# How many neighbours are read together.


@pytest.mark.parametrize(
    ("num_samples", "part", "num_pods", "num_classes", "expected"),
    [
        # As docs/TRAINING_QUALITY.md has it: 50 classes one after another, a plan for 5, 10, 25 %.
        (131_072, 0.05, 1, 50, 32),
        (131_072, 0.1, 1, 50, 64),
        (65_536, 0.25, 1, 50, 64),
        (131_072, 0.05, 1, None, 32),  # perhaps stored by class
        (131_072, 0.1, 1, None, 64),
        (10**7, 0.05, 1, None, 32),
        (10**7, 0.1, 1, None, 64),
        (10**7, 0.01, 1, None, 8),
        (10**7, 0.01, 1, 0, 64),  # stored mixed: chunks are many enough
        (10**7, 0.01, 1, 10**4, 8),
        (1_281_167, 0.1, 1, 1000, 64),
        (1_281_167, 0.05, 1, 1000, 32),
        (1_500, 0.1, 1, 10, 8),  # digits
        (4_000, 0.1, 1, 10, 8),  # MNIST
        (1_281_167, 0.1, 64, 0, 8),  # 128 shares of 128 chunks
        (1_281_167, 0.5, 16, 0, 64),
        (10**7, 0.3, 1, 0, 512),  # 4,096 chunks: 8 shares of 512, which the longest runs want
        (10**7, 0.1, 1, 0, 128),
        (10**7, 0.3, 1, None, 128),  # two chunks for each 1,300 samples
        (10**7, 0.3, 16, 0, 128),  # 32 shares
        (100, 1.0, 1, 0, 8),
        (1, 1.0, 1, None, 1),
        (2, 0.0, 3, None, 2),
        (7, 0.5, 1, 7, 7),
    ],
)
def test_chunks_are_as_large_as_trains_no_worse(
    num_samples: int, part: float, num_pods: int, num_classes: int | None, expected: int
) -> None:
    planned = round(part * num_samples) * 1000
    assert planned_chunk_size(num_samples, 1000.0, num_samples, planned, num_pods, num_classes) == expected


def test_chunks_are_no_larger_than_a_request_or_a_blob() -> None:
    assert planned_chunk_size(10**8, 3000, 10**8, 10**12, 1, 0) == 256, "1 MiB at most, of more than 64 samples"
    assert planned_chunk_size(10**8, 20_000, 10**8, 10**13, 1, 0) == 64
    assert planned_chunk_size(10**9, 10, 10**9, 10**13, 1, 0) == 512
    assert planned_chunk_size(10**6, 1e6, 10**6, 10**11, 1, 0) == 16, "16 MiB at most"
    assert planned_chunk_size(10**6, 1e8, 10**6, 10**11, 1, 0) == 1
    assert planned_chunk_size(10**6, 1e3, 5, 10**8, 1, 0) == 5


@given(
    st.integers(1, 10**7),
    st.floats(1, 1e6),
    st.integers(1, 1000),
    st.integers(0, 10**12),
    st.integers(1, 64),
    st.one_of(st.none(), st.integers(0, 10**4)),
)
def test_more_memory_never_makes_chunks_smaller(
    num_samples: int, sample_bytes: float, blob: int, memory: int, num_pods: int, num_classes: int | None
) -> None:
    less, more = (
        planned_chunk_size(num_samples, sample_bytes, blob, each, num_pods, num_classes)
        for each in (memory, 2 * memory)
    )
    assert 1 <= less <= more <= min(512, blob)


@pytest.mark.parametrize(
    ("per_blob", "chunk_size", "expected"),
    [
        ([291] * 17 + [173], 32, 33),  # 9 chunks of a blob, not 10
        ([291] * 17 + [173], 64, 64),  # 5 with each K to 72
        ([400] * 9, 64, 67),  # 6, not 7
        ([283, 299, 290, 288, 296, 5], 32, 34),  # 45, not 48
        ([291] * 17 + [173], 8, 8),  # small ones stay
        ([1000] * 20, 64, 64),  # 16 where 15.6 would be whole
        ([256] * 20 + [1], 64, 64),
        ([10, 10, 64], 64, 64),
        ([300], 64, 64),
        ([70, 70, 66], 64, 70),
        ([70, 70, 66, 69, 0], 64, 70),
        ([30], 16, 16),
    ],
)
def test_chunks_fit_the_blobs(per_blob: list[int], chunk_size: int, expected: int) -> None:
    first_sample = np.concatenate([[0], np.cumsum(per_blob)])
    assert fitted_chunk_size(chunk_size, first_sample) == expected


@given(st.lists(st.integers(0, 400), min_size=1, max_size=30), st.sampled_from([1, 2, 4, 8, 16, 32, 64]))
def test_a_chunk_size_that_fits_makes_no_more_chunks(per_blob: list[int], chunk_size: int) -> None:
    chunk_size = min(chunk_size, max(1, *per_blob))
    first_sample = np.concatenate([[0], np.cumsum(per_blob)])
    fitted = fitted_chunk_size(chunk_size, first_sample)
    assert chunk_size <= fitted <= max(chunk_size * 9 // 8, chunk_size)
    assert fitted <= max(chunk_size, *per_blob), "some blob holds that many"

    def num_chunks(k: int) -> int:
        return sum(-(-size // k) for size in per_blob)

    assert num_chunks(fitted) <= num_chunks(chunk_size)
    if fitted > chunk_size:  # else one less would do
        whole = sum(per_blob[:-1]) / chunk_size
        assert sum(-(-size // (fitted - 1)) for size in per_blob[:-1]) > whole


# Runs.


@pytest.mark.parametrize(
    ("num_pods", "chunks_of_share", "chunk_size", "sample_bytes", "run"),
    [
        *((1, 130, 64, 100, 32), (1, 255, 64, 100, 32), (1, 256, 64, 100, 128), (1, 512, 64, 100, 256)),
        *((16, 130, 64, 100, 64), (16, 255, 64, 100, 64), (16, 256, 64, 100, 128), (16, 5000, 64, 100, 256)),
        *((16, 5000, 16, 100, 128), (16, 5000, 32, 16_384, 256), (16, 5000, 32, 16_385, 128)),
    ],
)
def test_runs_are_long_where_memory_holds_two_chunks_of_a_share_for_each_sample_of_a_run(
    num_pods: int, chunks_of_share: int, chunk_size: int, sample_bytes: int, run: int
) -> None:
    """Then chunk-mates do not meet in one (docs/PLANNED.md), and a batch asks fewer pods. The longest ones are of large
    chunks of small samples alone."""
    shares = {1: 8, 16: 32}[num_pods]
    plan_bytes = shares * chunks_of_share * chunk_size * sample_bytes
    chosen = with_plan(
        spec(policy_settings={"plan_bytes": plan_bytes}), 1 << 40, num_pods, chunk_size, sample_bytes
    ).settings_of_policy()
    assert (chosen["shares"], chosen["run"]) == (shares, run)


def test_a_run_that_is_given_stays() -> None:
    found = with_plan(spec(policy_settings={"run": 16}), 1 << 40, 4, 8, 125.0)
    assert found.settings_of_policy()["run"] == 16


@pytest.mark.parametrize(("memory_part", "chunk_size", "most"), [(0.05, 8, 1.2), (0.17, 16, 0.9), (0.17, 32, 1.4)])
def test_with_few_chunks_of_a_share_in_memory_neighbours_still_meet_as_in_a_uniform_shuffle(
    memory_part: float, chunk_size: int, most: float
) -> None:
    """As on two pods that hold little of a small dataset: a batch of 64 has samples of all four shares. With runs of
    32 it has those of two, and neighbours meet twice as often."""
    num_samples, batch = 5120, 64
    layout = ChunkLayout(np.array([0, num_samples]), chunk_size)
    plan_bytes = {"plan_bytes": int(memory_part * num_samples)}
    found = plan_of(with_plan(spec(policy_settings=plan_bytes), 1, 2, chunk_size, 1.0), "one blob", layout)
    lengths = np.ones(num_samples, dtype=np.int64)
    orders = [
        EpochPlan(found, Shares(layout, found.num_shares), lengths.__getitem__, epoch, ramped=False).whole()
        for epoch in range(1, 6)
    ]
    met = [spread_of(order, layout.first_sample, chunk_size, batch, batch)["cobatch_rank"]["all"] for order in orders]
    assert found.run == 16
    assert np.mean(met) < most
