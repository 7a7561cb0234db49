"""The table of docs/CORRECTNESS.md, cell by cell: what was lost, with journals that survive it and without."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.membership.jobs import Packed, spec_of
from tests.membership.pods_in_process import PodsInProcess, Rank, Training
from tests.pod_fixtures import NUM_SAMPLES

from refill.errors import JobLost, RankTaken, RefillError
from refill_service.cache_core import rank_leases

AT = 200
"""Positions that each rank has had when the loss comes."""


@pytest.fixture(params=[True, False], ids=["journals", "no journals"])
def journal(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def pods(tmp_path: Path, journal: bool) -> Iterator[PodsInProcess]:
    with PodsInProcess(3, tmp_path, journal=journal, recovery_seconds=1) as pods:
        yield pods


def begun(pods: PodsInProcess, packed: Packed, **settings: Any) -> Training:
    training = Training(pods, spec_of(packed, **settings), NUM_SAMPLES, batch=100)
    training.all_ask(0, 0, AT)
    return training


def start_again(training: Training, *ranks: int, process: int = 2) -> None:
    """As other processes, that load a checkpoint of where the ones before were."""
    for rank in ranks:
        training.ranks[rank] = Rank(training.pods, training.spec, rank, process=process)
        training.ranks[rank]._record.resumes_within(0, np.arange(AT))


def check_rest(training: Training, again_from: int = AT) -> None:
    """The rest of the epoch, and the next one, are exact, and so say their receipts."""
    training.all_ask(0, again_from)
    training.check(0)
    training.all_ask(1)
    training.check(1)


def restart_all(pods: PodsInProcess) -> None:
    pods.kill(*range(pods.num_pods))
    pods.start(*range(pods.num_pods))


@pytest.fixture
def silent_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if ranks that ended had been silent for long."""
    monkeypatch.setattr(rank_leases, "LEASE_SECONDS", 0.0)


def test_answers_are_lost(packed: Packed, pods: PodsInProcess) -> None:
    training = begun(pods, packed)
    for pod in range(3):
        pods.rule("/batch", to=pod, answer=True, times=3)
        pods.rule("/take", to=pod, answer=True, times=3)
    check_rest(training)


@pytest.mark.usefixtures("silent_ranks")
def test_a_training_process_is_killed(packed: Packed, pods: PodsInProcess) -> None:
    training = begun(pods, packed)
    start_again(training, 1)
    check_rest(training, AT - 100)


def test_a_second_process_of_a_rank(packed: Packed, pods: PodsInProcess) -> None:
    training = begun(pods, packed)
    twin = Rank(pods, training.spec, 0, process=2, timeout_seconds=1)
    for _ in range(2):
        with pytest.raises(RankTaken, match="rank 0"):
            twin.batch(0, np.arange(20))
        restart_all(pods)
        training.look()
    check_rest(training)


def test_an_object_that_looks_is_asked_first(packed: Packed, pods: PodsInProcess) -> None:
    training = begun(pods, packed)
    observer = Rank(pods, training.spec, 0)
    observer.is_rank = False
    observer.info()
    restart_all(pods)
    with contextlib.suppress(RefillError):
        observer.look_after_home()  # it has nothing to report
    check_rest(training)


@pytest.mark.parametrize("killed", [[1], [0, 1, 2]], ids=["a pod", "all pods"])
def test_pods_are_killed(packed: Packed, pods: PodsInProcess, killed: list[int]) -> None:
    training = begun(pods, packed)
    pods.kill(*killed)
    pods.start(*killed)
    check_rest(training, AT - 100)


def test_a_pod_is_killed_while_ranks_are_an_epoch_apart(packed: Packed, pods: PodsInProcess) -> None:
    training = begun(pods, packed, policy="drain", memory_bytes=2_000_000)
    training.ask(0, 0)
    training.ask(0, 1)
    pods.kill(1)
    pods.start(1)
    training.ask(1, 0)
    training.ask(1, 1)
    training.check(0)
    training.check(1)


@pytest.mark.usefixtures("silent_ranks")
def test_pods_end_in_order_one_after_another(packed: Packed, pods: PodsInProcess) -> None:
    """And each time all ranks are started again, so that none of them remembers."""
    training = begun(pods, packed)
    for pod in (2, 1, 0):
        pods.end(pod)
        pods.start(pod)
        start_again(training, 0, 1, process=4 - pod)
        training.all_ask(0, AT - 100, AT)
    check_rest(training, AT - 100)


@pytest.mark.usefixtures("silent_ranks")
@pytest.mark.parametrize("how", ["killed", "ended"])
def test_all_pods_and_all_ranks_are_gone(packed: Packed, pods: PodsInProcess, journal: bool, how: str) -> None:
    training = begun(pods, packed)
    incarnation = training.ranks[0].info()["incarnation"]
    for pod in (2, 1, 0):
        if how == "killed":
            pods.kill(pod)
        else:
            pods.end(pod)
    pods.start(0, 1, 2)
    start_again(training, 0, 1)
    if journal:
        check_rest(training)
    else:  # a state of before is of another registration of the name
        assert training.ranks[0].info()["incarnation"] != incarnation


def test_other_pods(packed: Packed, pods: PodsInProcess) -> None:
    training = begun(pods, packed)
    pods.scale(2)
    check_rest(training)


@pytest.mark.usefixtures("silent_ranks")
def test_other_pods_and_a_rank_that_was_started_again(packed: Packed, pods: PodsInProcess) -> None:
    training = begun(pods, packed)
    start_again(training, 1)
    training.all_ask(0, AT, AT)
    training.ranks[1].batch(0, np.arange(AT, AT + 20))
    pods.scale(2)
    with pytest.raises(JobLost, match=r"can't move to the 2 pods .* rank 1 was resumed within epoch 0"):
        training.all_ask(0, AT)


@pytest.mark.usefixtures("silent_ranks")
def test_a_pod_and_a_rank_of_which_it_was_the_home(packed: Packed, pods: PodsInProcess, journal: bool) -> None:
    training = begun(pods, packed)
    start_again(training, 1)
    pods.kill(1)
    pods.start(1)
    training.all_ask(0, AT)
    if journal:
        training.check(0)
    else:
        missing, twice = training.truth(0)
        found = training.receipt(0)
        assert found["unknown"] >= max(missing, twice) > 0
        assert (found["missing"], found["duplicates"], found["exact"]) == (0, 0, False)
    training.all_ask(1)
    training.check(1)


def test_the_files_of_a_rank_are_removed_under_it(packed: Packed, tmp_path: Path, journal: bool) -> None:
    # None of it is waited for: the rank has reported what it can.
    with PodsInProcess(3, tmp_path, journal=journal, recovery_seconds=1000) as pods:
        _files_are_removed(begun(pods, packed), pods, journal)


def _files_are_removed(training: Training, pods: PodsInProcess, journal: bool) -> None:
    shutil.rmtree(training.ranks[1]._record._folder)
    training.all_ask(0, AT, AT + 100)
    pods.kill(1)
    pods.start(1)
    training.all_ask(0, AT + 100)
    if journal:
        training.check(0)
    else:
        missing, twice = training.truth(0)
        found = training.receipt(0)
        assert found["unknown"] >= max(missing, twice)
        assert found["unknown"] > 0
        assert not found["exact"]
    training.all_ask(1)
    training.check(1)
    # What the rank receives two epochs later is all in its record again.
    training.all_ask(2, 0, AT)
    pods.kill(0, 1, 2)
    pods.start(0, 1, 2)
    training.look()
    training.all_ask(2, AT)
    training.check(2)
    at_pods = [pods.node(pod).jobs[training.spec.name] for pod in range(3)]
    assert not any(at_pod.job.life.unknown.ranks(2) for at_pod in at_pods), "an alert that nobody needs"
