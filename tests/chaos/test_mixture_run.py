"""A run of chaos over a mixture, as `python -m tests.chaos.mixture_run` makes many."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.chaos.mixture_run import mixture_datasets, run_mixture


@pytest.mark.parametrize("seed", [2, pytest.param(5, marks=pytest.mark.variant)])
def test_a_mixture_is_exact_though_pods_die_their_number_changes_and_ranks_go_back(tmp_path: Path, seed: int) -> None:
    outcome = run_mixture(seed, mixture_datasets(tmp_path), tmp_path)
    assert not outcome.problems, outcome
    assert len(outcome.done) > 4, "hardly anything went wrong"
