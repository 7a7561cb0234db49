"""Jobs that were resumed from a checkpoint with another number of ranks, and what becomes of them then."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.membership.jobs import Packed, rest_of, resumed, spec_of
from tests.membership.pods_in_process import PodsInProcess, Rank, Training
from tests.pod_fixtures import NUM_SAMPLES

from refill.errors import InvalidInput, PodBusy, RefillError, StoreUnavailable
from refill_service.cache_core import rank_leases


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


@pytest.mark.parametrize("world_size", [2, 5])
def test_resumed_again_from_a_state_that_was_saved_before_the_first_batch(
    packed: Packed, tmp_path: Path, world_size: int
) -> None:
    """Position 0 of what was left of the epoch is not position 0 of the epoch: half of it had been consumed."""
    with PodsInProcess(2, tmp_path, journal=False) as pods:
        training = Training(pods, spec_of(packed), NUM_SAMPLES)
        training.all_ask(0, 0, 100)
        had = set(training.samples.values())
        first = resumed(pods, training, 4, process=2)
        training.ranks = first
        again = resumed(pods, training, world_size, process=3, position=0)
        rest = rest_of(again, 0)
        assert len(set(rest)) == NUM_SAMPLES - len(had), "samples are missing"
        assert had.isdisjoint(rest), f"{len(had & {*rest})} samples came twice"


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
        training.look()
        for start in range(50, length, 50):
            for rank in ranks:
                found += rank.batch(3, np.arange(start, min(start + 50, length))).sample_ids.tolist()
        assert sorted(found) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize("policy", ["drain", "redox"])
def test_what_was_dealt_when_a_job_moved_outlives_a_refused_resume(
    packed: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Whatever epoch the refused one names, the running one goes on as it was dealt, not as the seed says."""
    with PodsInProcess(3, tmp_path, journal=False) as pods:
        training = Training(pods, spec_of(packed, policy=policy, world_size=4), NUM_SAMPLES, batch=10)
        training.all_ask(0, 0, 100)
        pods.scale(2)
        training.all_ask(0, 100, 150)
        dealt = [pods.node(pod).jobs[training.spec.name].job.traced_epochs for pod in range(2)]
        assert dealt == [[0], [0]], "the epoch was not dealt anew"
        with monkeypatch.context() as silent:
            silent.setattr(rank_leases, "LEASE_SECONDS", 0.0)  # ranks were silent for so long, and come back
            incarnation = training.ranks[0].info()["incarnation"]
            refused = Rank(pods, replace(training.spec, world_size=2), 0, process=3, timeout_seconds=3)
            with pytest.raises(InvalidInput, match="nothing is left of epoch 9"):
                refused.resume(incarnation, 9, 250)
        training.all_ask(0, 150)
        training.check(0)
        for epoch in (1, 2, 3):
            training.all_ask(epoch)
            training.check(epoch)
        kept = [pods.node(pod).jobs[training.spec.name].job.traced_epochs for pod in range(2)]
        assert kept == [[], []], "what was dealt anew is kept though nobody can ask for that epoch any more"


def test_what_was_dealt_when_a_job_moved_outlives_a_rank_that_asks_far_ahead(packed: Packed, tmp_path: Path) -> None:
    """A rank asks for one epoch after another, and is told to wait each time; the others are in the first."""
    with PodsInProcess(3, tmp_path, journal=False) as pods:
        training = Training(pods, spec_of(packed), NUM_SAMPLES)
        training.all_ask(0, 0, 100)
        pods.scale(2)
        training.all_ask(0, 100, 200)
        training.ask(0, 0, 200)
        training.ranks[0].timeout_seconds = 1
        for epoch in (1, 2, 3):
            with contextlib.suppress(RefillError):
                training.ask(0, epoch, 0, 20)
        training.ask(1, 0, 200)
        assert training.truth(0) == (0, 0), f"(missing, twice): {training.truth(0)}"


@pytest.mark.parametrize(("epoch", "position"), [(9, 10), (9, 0), (1, 10)])
def test_a_running_job_is_not_replaced_by_one_from_where_it_has_never_been(
    packed: Packed, tmp_path: Path, epoch: int, position: int
) -> None:
    with PodsInProcess(2, tmp_path, journal=False) as pods:
        training = Training(pods, spec_of(packed), NUM_SAMPLES)
        training.all_ask(0, 0, 100)
        incarnation = training.ranks[0].info()["incarnation"]
        other = Rank(pods, replace(training.spec, world_size=4), 0, process=3, timeout_seconds=3)
        with pytest.raises(InvalidInput, match=f"is in epoch 0, and has never been at epoch {epoch}, .*DELETE"):
            other.resume(incarnation, epoch, position)
        training.all_ask(0, 100)
        training.check(0)


def test_a_running_job_goes_on_from_the_end_of_its_epoch(packed: Packed, tmp_path: Path) -> None:
    """A state that was saved when the epoch was over says: position 0 of the next."""
    with PodsInProcess(2, tmp_path, journal=False) as pods:
        training = Training(pods, spec_of(packed), NUM_SAMPLES)
        training.all_ask(0)
        incarnation = training.ranks[0].info()["incarnation"]
        other = Rank(pods, replace(training.spec, world_size=4), 0, process=3, timeout_seconds=3)
        assert other.resume(incarnation, 1, 0)["resumed"]["epoch"] == 1


def test_a_job_that_nobody_runs_goes_on_from_where_pods_have_not_seen_it(
    packed: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ranks have ended: what pods know may be less than what was."""
    with PodsInProcess(2, tmp_path, journal=False) as pods:
        training = Training(pods, spec_of(packed), NUM_SAMPLES)
        training.all_ask(0, 0, 100)
        incarnation = training.ranks[0].info()["incarnation"]
        monkeypatch.setattr(rank_leases, "LEASE_SECONDS", 0.0)  # as if they had been silent for so long
        other = Rank(pods, replace(training.spec, world_size=4), 0, process=3, timeout_seconds=3)
        assert other.resume(incarnation, 2, 0)["resumed"]["epoch"] == 2


@pytest.mark.parametrize("pod", [0, 1])
@pytest.mark.parametrize("journal", [True, False], ids=["restarted", "in memory"])
def test_a_resume_that_finds_the_store_away_loses_nothing(
    packed: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pod: int, journal: bool
) -> None:
    """A pod ended the run before, and then could not make the one that was to take its place: nobody knew any more
    which samples of its share had been consumed."""
    with PodsInProcess(2, tmp_path, journal=journal) as pods:
        training = Training(pods, spec_of(packed), NUM_SAMPLES)
        training.all_ask(0, 0, 200)
        had = {sample for (_, _, position), sample in training.samples.items() if position < 100}

        async def away(url: str) -> None:
            raise StoreUnavailable(f"{url} can't be read")

        with monkeypatch.context() as store:
            store.setattr(pods.node(pod).opening, "take", away)
            first = Rank(pods, replace(training.spec, world_size=4), 0, process=2, timeout_seconds=1)
            with pytest.raises(StoreUnavailable):
                first.resume(training.ranks[0].info()["incarnation"], 0, 100)
        if journal:
            pods.kill(0, 1)
            pods.start(0, 1)
        again = resumed(pods, training, 4, process=3)
        assert again[0].info()["resumed"]["unknown"] == 0
        rest = rest_of(again, 0)
        assert len(rest) == len(set(rest)) == NUM_SAMPLES - len(had)
        assert had.isdisjoint(rest)
