"""Ranks that gather scores know the same when they draw, whoever has found them."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch.distributed

from refill.errors import InvalidInput
from refill.gathered_scores import GatheredScores
from refill.protocol.job_spec import JobSpec
from refill.training_scores import TrainingScores

SPEC = JobSpec("gathered", "file:///nowhere", world_size=2, policy="planned", order="explicit")


def _rank(rank: int, store: str, file: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    scores = GatheredScores(SPEC, rank, 5)
    scores.report_scores(np.array([rank, 4]), np.array([1 + rank, 7 + rank], dtype=np.float32))
    drawn, cached = scores.drawn_from(0, 5)
    assert not cached.any()
    if rank == 0:
        scores.report_scores(np.array([4]), np.array([3], dtype=np.float32))
    np.save(file, np.stack([drawn, scores.drawn_from(1, 5)[0]]))
    torch.distributed.destroy_process_group()


def _ran(work: Callable[[int, str, str], None], folder: Path) -> list[str]:
    """In a process for each rank."""
    forks = multiprocessing.get_context("fork")
    files = [f"{folder}/{rank}.npy" for rank in range(2)]
    ranks = [forks.Process(target=work, args=(rank, f"{folder}/store", files[rank])) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    return files


def test_all_ranks_draw_from_the_same(tmp_path: Path) -> None:
    files = _ran(_rank, tmp_path)
    first, second = np.load(files[0])
    np.testing.assert_array_equal(np.load(files[0]), np.load(files[1]))
    np.testing.assert_array_equal(first, np.array([1, 2, np.nan, np.nan, 8], dtype=np.float32))
    np.testing.assert_array_equal(second, np.array([1, 2, np.nan, np.nan, 3], dtype=np.float32))


def _rank_that_goes_on(rank: int, store: str, file: str) -> None:
    """Draws, trains and is stopped; a new process would do the rest, with another connection of the same group."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    training = TrainingScores(GatheredScores(SPEC, rank, 6), 6)
    training.trained(np.arange(3 * rank, 3 * rank + 3), np.array([3.0, 1.0, 2.0]))
    training.drawn_from(0)
    training.trained(np.array([4, 5] if rank == 0 else [0, 1]), np.array([1.0, 2.0]))
    state = training.snapshot()
    again = TrainingScores(GatheredScores(SPEC, rank, 6), 6)
    again.restore(*state)
    np.save(file, np.stack([training.drawn_from(1)[0], again.drawn_from(1)[0]]))
    torch.distributed.destroy_process_group()


def test_ranks_that_go_on_from_their_own_states_draw_as_if_they_had_not_stopped(tmp_path: Path) -> None:
    files = _ran(_rank_that_goes_on, tmp_path)
    for file in files:
        not_stopped, gone_on = np.load(file)
        np.testing.assert_array_equal(not_stopped, gone_on)
        assert not np.isnan(gone_on).any()


def test_several_ranks_need_torch_distributed() -> None:
    with pytest.raises(InvalidInput, match="which has 1 processes, and the job has world_size=2: call init_process_g"):
        GatheredScores(SPEC, 0, 5)
