"""A rank has posted its trace of an epoch that nobody has asked for yet. What becomes of it when pods are restarted?"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.membership.jobs import Packed, spec_of
from tests.membership.pods_in_process import PodsInProcess, Training
from tests.pod_fixtures import NUM_SAMPLES


def post(training: Training, rank: int, epoch: int) -> None:
    training.ranks[rank].post_trace(epoch, np.random.default_rng(epoch).permutation(NUM_SAMPLES)[rank::2])


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_it_is_in_the_journal_that_a_restarted_pod_begins(packed: Packed, tmp_path: Path, how: str) -> None:
    """A pod began its journal anew with the epochs that ranks were in. After its next restart it believed that journal,
    and all ranks waited for ever for a trace that had been posted."""
    with PodsInProcess(2, tmp_path, journal=True) as pods:
        training = Training(pods, spec_of(packed, order="explicit", num_epochs=2), NUM_SAMPLES)
        for rank in range(2):
            post(training, rank, 0)
        training.all_ask(0, 0, 200)
        training.ask(0, 0)
        post(training, 0, 1)
        for end in (300, None):
            (pods.kill if how == "killed" else pods.end)(1)
            pods.start(1)
            training.ask(1, 0, 0, end)
        post(training, 1, 1)
        training.all_ask(1)
        for epoch in range(2):
            training.check(epoch)
