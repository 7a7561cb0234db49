"""Ranks that gather scores know the same when they draw, whoever has found them."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch.distributed

from refill.errors import InvalidInput
from refill.gathered_scores import GatheredScores
from refill.protocol.job_spec import JobSpec

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


def test_all_ranks_draw_from_the_same(tmp_path: Path) -> None:
    forks = multiprocessing.get_context("fork")
    files = [f"{tmp_path}/{rank}.npy" for rank in range(2)]
    ranks = [forks.Process(target=_rank, args=(rank, f"{tmp_path}/store", files[rank])) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
        assert process.exitcode == 0
    first, second = np.load(files[0])
    np.testing.assert_array_equal(np.load(files[0]), np.load(files[1]))
    np.testing.assert_array_equal(first, np.array([1, 2, np.nan, np.nan, 8], dtype=np.float32))
    np.testing.assert_array_equal(second, np.array([1, 2, np.nan, np.nan, 3], dtype=np.float32))


def test_several_ranks_need_torch_distributed() -> None:
    with pytest.raises(InvalidInput, match="which has 1 processes, and the job has world_size=2: call init_process_g"):
        GatheredScores(SPEC, 0, 5)
