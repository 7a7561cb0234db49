"""What a rank knows of its samples: ranks of losses within their batch, and nothing of losses that are no numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from refill.training_scores import TrainingScores


class Connection:
    """Takes scores."""

    spec, rank = SimpleNamespace(world_size=1), 0

    def report_scores(self, ids: Any, scores: Any) -> None:
        pass


def test_a_loss_that_is_no_number_leaves_its_sample_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    scores = TrainingScores(Connection(), 5)  # type: ignore[arg-type]
    scores.trained(np.arange(5), np.array([1.0, np.nan, 2.0, np.inf, 3.0]))
    found, _ = scores.snapshot()
    assert np.isnan(found[[1, 3]]).all()
    assert found[0] < found[2] < found[4]
    assert "losses are no numbers" in caplog.text
