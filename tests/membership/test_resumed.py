"""Jobs that were resumed from a checkpoint with another number of ranks, and what becomes of them then."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.membership.pods_in_process import PodsInProcess, Rank, Training
from tests.membership.test_losses import Packed, spec_of
from tests.pod_fixtures import NUM_SAMPLES

from refill.errors import PodBusy
from refill_service.cache_core import rank_leases


def resumed(pods: PodsInProcess, training: Training, world_size: int, process: int, position: int = 100) -> list[Rank]:
    """Ranks of another number, that load the state of epoch 0 at a position."""
    incarnation = training.ranks[0].info()["incarnation"]
    spec = replace(training.spec, world_size=world_size)
    ranks = [Rank(pods, spec, rank, process=process, timeout_seconds=5) for rank in range(world_size)]
    for rank in ranks:
        rank.resume(incarnation, 0, position)
    return ranks


def rest_of(ranks: list[Rank], epoch: int, of_rest: bool = True) -> list[int]:
    info = ranks[0].info()
    length = info["resumed"]["samples_per_rank"] if of_rest else info["samples_per_rank"]
    return [
        sample
        for start in range(0, length, 50)
        for rank in ranks
        for sample in rank.batch(epoch, np.arange(start, min(start + 50, length))).sample_ids.tolist()
    ]


def test_resumed_again_from_the_same_state_with_another_number(
    packed: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run that resumed first died before it saved a state of its own."""
    with PodsInProcess(2, tmp_path, journal=False) as pods:
        training = Training(pods, spec_of(packed), NUM_SAMPLES)
        training.all_ask(0, 0, 200)
        had = {sample for (_, _, position), sample in training.samples.items() if position < 100}
        first = resumed(pods, training, 5, process=2)
        first[0].batch(0, np.arange(20))
        with pytest.raises(PodBusy, match="1 of those ranks are alive"):
            resumed(pods, training, 4, process=3)
        monkeypatch.setattr(rank_leases, "LEASE_SECONDS", 0.0)  # as if they had been silent for so long
        again = resumed(pods, training, 4, process=3)
        rest = rest_of(again, 0)
        assert len(rest) == len(set(rest)) == NUM_SAMPLES - len(had)
        assert had.isdisjoint(rest)


def test_all_memory_is_lost_when_the_epoch_that_was_resumed_is_long_over(packed: Packed, tmp_path: Path) -> None:
    with PodsInProcess(2, tmp_path, journal=False) as pods:
        training = Training(pods, spec_of(packed), NUM_SAMPLES)
        training.all_ask(0, 0, 200)
        ranks = resumed(pods, training, 4, process=2)
        for rank in ranks:
            rank.timeout_seconds = 30
        rest_of(ranks, 0)
        for epoch in (1, 2):
            assert len(set(rest_of(ranks, epoch, of_rest=False))) == NUM_SAMPLES
        length = ranks[0].info()["samples_per_rank"]
        found = [s for rank in ranks for s in rank.batch(3, np.arange(50)).sample_ids.tolist()]
        pods.kill(0, 1)
        pods.start(0, 1)
        training.ranks = ranks
        training.together(*(rank.look_after_home for rank in ranks))
        for start in range(50, length, 50):
            for rank in ranks:
                found += rank.batch(3, np.arange(start, min(start + 50, length))).sample_ids.tolist()
        assert sorted(found) == list(range(NUM_SAMPLES))
