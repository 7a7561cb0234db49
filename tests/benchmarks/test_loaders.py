"""Loaders out of step: each byte is read once where memory holds what was planned for, however loaders
ask; and nothing is lost where it does not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from benchmarks import loaders
from benchmarks.loaders import PlannedReads, PlannedRun, simulate_planned

from refill.errors import InvalidInput

BASE = PlannedRun(num_samples=32_768, memory_samples=3276, batch_size=64, num_shares=8, run=32)
"""2,620 samples are planned for, 41 batches."""


def epochs_of(run: PlannedRun, num_epochs: int = 3) -> list[PlannedReads]:
    """All epochs; each delivers every sample."""
    found = list(simulate_planned(run, num_epochs)[1])
    assert [each.delivered for each in found] == [run.num_samples] * num_epochs
    return found


@pytest.mark.variants("{}", "{'num_workers': 8}")
@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param({"chunk_size": 64}, marks=pytest.mark.variant),
        pytest.param({"num_workers": 2}, marks=pytest.mark.variant),
        {"num_workers": 8},  # W x B x R / M = 0.2
        {"num_ranks": 4, "batch_size": 32, "num_workers": 4, "num_pods": 3, "memory_samples": 1092},  # 0.22
        pytest.param(
            {"num_ranks": 4, "batch_size": 16, "num_workers": 12, "chunk_size": 64}, marks=pytest.mark.variant
        ),  # 0.29
        pytest.param({"num_ranks": 2, "out_of_step": 0.4}, marks=pytest.mark.variant),
        {"plan_samples": 3000, "num_samples": 32_771},  # neither K nor batches divide it
        pytest.param(
            {"num_pods": 2, "memory_samples": 1638, "num_ranks": 4, "batch_size": 16}, marks=pytest.mark.variant
        ),
        {"num_pods": 5, "memory_samples": 819},  # some have two shares, some one
    ],
    ids=str,
)
def test_each_byte_is_read_once_where_memory_holds_what_was_planned_for(changes: dict[str, Any]) -> None:
    run = replace(BASE, **changes)
    for each in epochs_of(run):
        assert each.gets == -(-run.num_samples // run.chunk_size)
        assert (each.samples_read, each.bytes_read) == (run.num_samples, 1.0)
        # Nothing is read before somebody asks for the first of each share.
        assert each.misses <= run.num_samples // 1000 + (8 * run.run if not each.epoch else 0)
        assert 0.9 * run.num_pods * run.memory_samples < each.held_peak <= run.num_pods * run.memory_samples


@pytest.mark.variants("{'plan_samples': 4900}")
@pytest.mark.parametrize(
    ("changes", "most_gets", "most_bytes"),
    [
        pytest.param({"plan_samples": 3640}, 1.6, 1.06, marks=pytest.mark.variant),  # memory over planned: 0.9
        ({"plan_samples": 4900}, 4.5, 1.25),  # 0.67
        # Were it read again as soon as there is room, what gave way would give way again: 5 GETs for a chunk.
        pytest.param({"num_ranks": 2, "batch_size": 32, "out_of_step": 1.0}, 4.0, 1.2, marks=pytest.mark.variant),
        ({"num_workers": 51}, 2.5, 1.1),  # W x B x R / M = 1.25
        # Memory for a single chunk.
        ({"num_samples": 4096, "memory_samples": 16, "plan_samples": 409, "num_shares": 1}, 16.5, 1.5),
    ],
    ids=str,
)
def test_with_less_memory_more_is_read_and_nothing_is_lost(
    changes: dict[str, Any], most_gets: float, most_bytes: float
) -> None:
    run = replace(BASE, **changes)
    for each in epochs_of(run)[1:]:
        assert 1 < each.gets * run.chunk_size / run.num_samples <= most_gets
        assert 1 < each.bytes_read <= most_bytes
        assert each.misses
        assert each.single_reads
        assert each.held_peak <= run.memory_samples


def test_positions_that_are_repeated_are_read_alone() -> None:
    run = replace(BASE, num_ranks=5)
    for each in epochs_of(run):
        assert (each.gets, each.single_reads, each.samples_read) == (2048 + 2, 2, 32_768 + 2)


def test_the_same_run_is_the_same() -> None:
    run = replace(BASE, num_workers=40)
    found = epochs_of(run, 2)
    assert epochs_of(run, 2) == found
    assert epochs_of(replace(run, seed=1), 2) != found


@pytest.mark.parametrize(("num_workers", "num_ranks"), [(0, 1), (0, 3), (1, 2), (2, 1), (8, 3)])
def test_batches_come_as_from_torchs_loader(num_workers: int, num_ranks: int) -> None:
    run = replace(BASE, num_workers=num_workers, num_ranks=num_ranks)
    asked = list(loaders.in_order(200, run, 0.0, np.random.default_rng(1)))
    assert sorted(asked) == [(rank, batch) for rank in range(num_ranks) for batch in range(200)]
    for rank in range(num_ranks):
        of_rank = [batch for each, batch in asked if each == rank]
        for worker in range(num_workers):
            own = [batch for batch in of_rank if batch % num_workers == worker]
            assert own == sorted(own), "a worker goes through its batches in turn"
        # The loop waits for the batch that the slowest worker has asked for: the others have no more than two each.
        ahead = max(batch - place for place, batch in enumerate(of_rank))
        assert ahead < max(1, 2 * num_workers - 1)
        assert (of_rank == sorted(of_rank)) == (num_workers <= 1)


def test_the_last_rank_is_so_far_behind() -> None:
    run = replace(BASE, num_ranks=3)
    asked = list(loaders.in_order(100, run, 10.0, np.random.default_rng(1)))
    place = {each: place for place, each in enumerate(asked)}
    for batch in range(10, 90):
        together = place[0, batch], place[1, batch - 5], place[2, batch - 10]
        assert max(together) - min(together) == 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_workers": -1}, "num_workers must be at least 0, got -1"),
        ({"memory_samples": 15}, "memory for 15 samples holds no chunk of 16"),
        ({"out_of_step": 0.1}, "out_of_step is between ranks, and there is 1"),
        ({"out_of_step": float("nan"), "num_ranks": 2}, "out_of_step must be a number of at least 0, got nan"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        replace(BASE, **changes)
