"""Jobs of live policies, whose tables lie in the memory of pods alone: exact while all pods live, and lost with any of
them, which every rank is told; a name begins anew when its run is over, ended or lost, and never before."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.membership.pods_in_process import Packed, PodsInProcess, Rank, Training, spec_of
from tests.pod_fixtures import NUM_SAMPLES
from tests.waiting import until

from refill.errors import EpochEnded, JobConflict, JobLost, PodUnreachable, RankTaken
from refill_service.cache_core import rank_leases


@pytest.fixture
def pods() -> Iterator[PodsInProcess]:
    with PodsInProcess(3) as pods:
        yield pods


@pytest.fixture
def ended_processes_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if they had been silent for longer than a lease, so that others may be their ranks."""
    monkeypatch.setattr(rank_leases, "LEASE_SECONDS", -1.0)


def training_of(pods: PodsInProcess, packed: Packed, **settings: Any) -> Training:
    return Training(pods, spec_of(packed[0], **settings), NUM_SAMPLES)


def again(before: Training, process: int = 2, **how: Any) -> Training:
    """The ranks of the same job, as other processes, which load no state."""
    return Training(before.pods, before.spec, NUM_SAMPLES, process=process, **how)


def end_processes(training: Training) -> None:
    for rank in training.ranks:
        rank.says_goodbye()


def run_of(training: Training) -> str:
    """The same for all ranks, and at all pods."""
    path = f"/v1/jobs/{training.spec.name}"
    (found,) = {rank.incarnation for rank in training.ranks} | {
        training.pods.get(pod, path)["incarnation"] for pod in range(training.pods.num_pods)
    }
    return found


def check_is_lost(training: Training, rank: int, epoch: int, first: int) -> None:
    with pytest.raises(JobLost, match=training.spec.name) as lost:
        training.ask(rank, epoch, first)
    assert "\n" not in str(lost.value)


def jobs_at(pods: PodsInProcess) -> list[Any]:
    """Those that are up."""
    return [job for pod in range(pods.num_pods) if pods.nodes[pod] for job in pods.get(pod, "/v1/jobs")]


@pytest.mark.variants("answers-redox", "requests-exact")
@pytest.mark.parametrize("policy", ["redox", "exact"])
@pytest.mark.parametrize("answer", [True, False], ids=["answers", "requests"])
def test_what_is_lost_on_its_way_changes_nothing(
    packed: Packed, pods: PodsInProcess, policy: str, answer: bool
) -> None:
    training = training_of(pods, packed, policy=policy)
    training.all_ask(0, 0, 200)
    for pod in range(3):
        pods.rule("/batch", to=pod, answer=answer, times=3)
        pods.rule("/take", to=pod, answer=answer, times=3)
    training.all_ask(0, 100)  # what had come comes again, the same
    training.check(0)
    training.all_ask(1)
    training.check(1)


@pytest.mark.variants("[0]-redox", "[1]-redox")
@pytest.mark.parametrize(
    ("killed", "policy"), [([0], "redox"), ([1], "redox"), ([2], "exact"), ([0, 1, 2], "redox")], ids=str
)
def test_a_pod_that_was_restarted_has_ended_the_job(
    packed: Packed, pods: PodsInProcess, killed: list[int], policy: str
) -> None:
    """Ranks 0 and 1 have pods 0 and 1 as their homes; pod 2 is no rank's. A fresh start is exact."""
    training = training_of(pods, packed, policy=policy)
    training.all_ask(0, 0, 200)
    pods.kill(*killed)
    pods.start(*killed)
    for rank in (1, 0):
        why = r"is lost: .*begins anew.*set_epoch\(0\).*policy planned survives this"
        with pytest.raises(JobLost, match=f"job {training.spec.name} {why}"):
            training.ask(rank, 0, 200)
    assert jobs_at(pods) == [], "a pod keeps what nobody can go on with"
    for rank in (0, 1):
        check_is_lost(training, rank, 0, 0)
    fresh = again(training)
    for epoch in range(2):
        fresh.all_ask(epoch)
        fresh.check(epoch)
    check_is_lost(training, 0, 0, 200)
    fresh.check(1)


def test_a_pod_that_does_not_answer_is_waited_for_and_was_lost_if_it_comes_back_without_the_job(
    packed: Packed, pods: PodsInProcess
) -> None:
    training = training_of(pods, packed)
    training.all_ask(0, 0, 100)
    pods.kill(2)
    for rank in training.ranks:
        rank.timeout_seconds = 0
        with pytest.raises(PodUnreachable, match="pod 2 does not answer"):
            training.ask(rank.rank, 0, 100)
    assert len(jobs_at(pods)) == 2, "it may come back"
    pods.start(2)
    check_is_lost(training, 0, 0, 100)


def test_a_job_is_on_all_pods_or_on_none(packed: Packed, pods: PodsInProcess) -> None:
    pods.kill(2)
    rank = Rank(pods, spec_of(packed[0], world_size=1), 0, timeout_seconds=0)
    with pytest.raises(PodUnreachable, match="pod 2 does not answer"):
        rank.info()
    assert jobs_at(pods) == []
    pods.start(2)
    rank.batch(0, np.arange(20))
    assert len({job["incarnation"] for job in jobs_at(pods)}) == 1
    assert len(jobs_at(pods)) == 3


@pytest.mark.usefixtures("ended_processes_are_seen")
def test_who_comes_within_an_epoch_joins_the_run_that_is_there(packed: Packed, pods: PodsInProcess) -> None:
    first = training_of(pods, packed)
    first.all_ask(0, 0, 300)
    end_processes(first)
    second = again(first)
    second.all_ask(0)
    second.check(0)
    assert all(second.samples[key] == sample for key, sample in first.samples.items())
    assert run_of(second) == run_of(first)


def test_a_run_that_is_over_begins_anew(packed: Packed, pods: PodsInProcess) -> None:
    """All ranks have had all of the newest epoch, and their processes have ended."""
    runs, before = [], training_of(pods, packed)
    for process, epochs in ((2, 1), (3, 2), (4, 1)):
        for epoch in range(epochs):
            before.all_ask(epoch)
            before.check(epoch)
        runs.append(run_of(before))
        end_processes(before)
        after = again(before, process)
        assert run_of(after) not in runs, "it went on with a run that was over"
        for epoch in range(epochs):
            path = f"/v1/jobs/{before.spec.name}/epochs/{epoch}/receipt?run={runs[-1]}"
            assert (pods.get(1, path)["exact"], pods.get(1, path)["ended"]) == (True, True)
        check_is_lost(before, 0, epochs, 0)
        before = after
    assert len(pods.get(0, "/v1/runs")) == 3


def test_a_run_whose_processes_live_is_not_replaced(packed: Packed, pods: PodsInProcess) -> None:
    """All its ranks have had all of the epoch; and one of two has ended."""
    first = training_of(pods, packed)
    first.all_ask(0)
    other = again(first, timeout_seconds=1)
    for rank in other.ranks:
        with pytest.raises(RankTaken, match="is process"):
            rank.batch(0, np.arange(20))
    first.ranks[1].says_goodbye()
    assert again(first, process=3).ranks[1].info()["incarnation"] == run_of(first)
    first.all_ask(1)
    first.check(1)


@pytest.mark.usefixtures("ended_processes_are_seen")
def test_an_epoch_that_is_long_over_is_refused_to_who_asks_for_it_anew(packed: Packed, pods: PodsInProcess) -> None:
    first = training_of(pods, packed)
    for epoch in range(3):
        first.all_ask(epoch)
    first.all_ask(3, 0, 100)
    end_processes(first)
    second = again(first)
    with pytest.raises(EpochEnded, match=f"refill end {first.spec.name}"):
        second.ask(0, 0)
    second.all_ask(3, 100)
    second.all_ask(4)
    second.check(4)


@pytest.mark.variants("[0]")
@pytest.mark.parametrize("killed", [[0], [2], [0, 1, 2]], ids=str)
def test_who_comes_first_after_a_restart_begins_anew_and_those_of_before_are_told(
    packed: Packed, pods: PodsInProcess, killed: list[int]
) -> None:
    before = training_of(pods, packed)
    before.all_ask(0, 0, 100)
    pods.kill(*killed)
    pods.start(*killed)
    fresh = again(before)
    assert run_of(fresh) != before.ranks[0].incarnation
    fresh.all_ask(0, 0, 100)
    for rank in (0, 1):
        check_is_lost(before, rank, 0, 100)
    fresh.all_ask(0, 100)
    fresh.check(0)


def test_who_had_received_nothing_begins_anew_without_a_word(packed: Packed, pods: PodsInProcess) -> None:
    """It registered the job before its home was restarted. That cost nobody anything."""
    training = training_of(pods, packed, world_size=1)
    before = run_of(training)
    pods.kill(0)
    pods.start(0)
    training.ask(0, 0)
    training.check(0)
    assert run_of(training) != before


def test_a_run_that_was_ended_does_not_end_the_next_one(packed: Packed, pods: PodsInProcess) -> None:
    """A process that is left over of it comes before the next run has asked for anything."""
    before = training_of(pods, packed)
    before.all_ask(0, 0, 100)
    before.ranks[0].end_job()
    fresh = again(before)
    with pytest.raises(JobLost):
        before.ask(0, 0, 100, 120)
    fresh.all_ask(0)
    fresh.check(0)


def test_other_settings_are_refused_at_every_pod_until_the_job_is_ended(packed: Packed, pods: PodsInProcess) -> None:
    first = training_of(pods, packed)
    first.all_ask(0)
    for pod in range(3):
        other = Rank(pods, replace(first.spec, world_size=3), 0, process=2, first_pod=pod, timeout_seconds=1)
        said = r"settings \(world_size: yours is 3, the job's 2\): use another name, or end that job first"
        with pytest.raises(JobConflict, match=said):
            other.batch(0, np.arange(50))
    first.ranks[0].end_job()
    assert len(other.batch(0, np.arange(50)).sample_ids) == 50


async def fails(*_: Any) -> None:
    raise RuntimeError("its dataset can't be closed")


def test_idle_jobs_are_removed_when_one_of_them_fails(
    packed: Packed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with PodsInProcess(1, job_idle_seconds=2) as pods, caplog.at_level(logging.INFO):
        failing = training_of(pods, packed, world_size=1)
        monkeypatch.setattr(pods.node(0).jobs[failing.spec.name].job.dataset, "close", fails)
        other = training_of(pods, packed, world_size=1)
        until(lambda: "its dataset can't be closed" in caplog.text, "the failure in the log")
        until(lambda: other.spec.name not in pods.node(0).jobs, "the end of the other idle job")


def test_the_others_are_closed_in_order_when_one_is_not(
    packed: Packed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with PodsInProcess(1) as pods:
        failing, other = (training_of(pods, packed, world_size=1) for _ in range(2))
        monkeypatch.setattr(pods.node(0).jobs[failing.spec.name].job.dataset, "close", fails)
        with caplog.at_level(logging.ERROR):
            pods.kill(0)
        errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
        assert any(failing.spec.name in error for error in errors)
        assert not any(other.spec.name in error for error in errors), errors
