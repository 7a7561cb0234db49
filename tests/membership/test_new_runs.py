"""The same name again, without a state: a new run after one that has ended; one that lives is never replaced."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.membership.pods_in_process import PodsInProcess, Rank, Training
from tests.pod_fixtures import NUM_SAMPLES
from tests.waiting import until

from refill.errors import EpochEnded, JobLost, PodBusy, RankTaken
from refill.protocol.job_spec import JobSpec
from refill.run_start import RunStart
from refill_service.cache_core import rank_leases

Packed = tuple[str, dict[str, bytes]]


def spec_of(packed: Packed, **settings: Any) -> JobSpec:
    name = f"again-{uuid.uuid4().hex[:8]}"
    how = {"policy": "redox", "chunk_size": 16, "memory_bytes": 600_000, "world_size": 2}
    return JobSpec(name, packed[0], **(how | settings))


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[PodsInProcess]:
    with PodsInProcess(3, tmp_path, journal=False) as pods:
        yield pods


@pytest.fixture
def ended_processes_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of before are gone, and have not been heard for longer than a lease."""
    monkeypatch.setattr(rank_leases, "LEASE_SECONDS", -1.0)


def again(before: Training, process: int = 2, **how: Any) -> Training:
    """The ranks of the same job, as processes that were started once more and load no state."""
    training = Training(before.pods, before.spec, NUM_SAMPLES, process=process, **how)
    training.ranks = [
        Rank(before.pods, before.spec, rank, process=process, start=RunStart([0, 0, 0]), **how)
        for rank in range(before.spec.world_size)
    ]
    return training


def runs_of(training: Training) -> set[str]:
    return {rank.info()["incarnation"] for rank in training.ranks}


@pytest.mark.parametrize("epochs", [1, 2, 4])
@pytest.mark.usefixtures("ended_processes_are_seen")
def test_a_run_that_has_ended_starts_again_as_a_new_one(
    packed: Packed, pods: PodsInProcess, epochs: int, caplog: pytest.LogCaptureFixture
) -> None:
    first = Training(pods, spec_of(packed), NUM_SAMPLES)
    for epoch in range(epochs):
        first.all_ask(epoch)
    (before,) = runs_of(first)
    second = again(first)
    with caplog.at_level(logging.WARNING, "refill"):
        for epoch in range(epochs):
            second.all_ask(epoch)
            second.check(epoch)
    (now,) = runs_of(second)
    assert now != before, "it went on with the run that had ended"
    assert second.samples != first.samples, "it was given the samples of before once more"
    assert "so it is a new run" in caplog.text
    for epoch in range(epochs):
        kept = pods.get(1, f"/v1/jobs/{first.spec.name}/epochs/{epoch}/receipt?run={before}")
        assert (kept["exact"], kept["ended"]) == (True, True)
    with pytest.raises(JobLost, match="registered again since"):
        first.ask(0, epochs)
    third = again(second, process=3)
    third.all_ask(0)
    third.check(0)
    assert len(pods.get(0, "/v1/runs")) == 2


def test_right_after_the_process_of_before_it_is_a_new_run_at_once(
    packed: Packed, pods: PodsInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the same machine, where a process sees that the one before is gone. No pod waits for a lease then, and none
    takes the process that asks anew for another one that is in the run still."""
    first = Training(pods, spec_of(packed, world_size=1), NUM_SAMPLES)
    first.all_ask(0)
    second = again(first, timeout_seconds=1)
    monkeypatch.setattr("refill.job_pods.has_ended", lambda life: True)
    second.all_ask(0)
    second.check(0)
    assert runs_of(second) != runs_of(first)
    alive = [job["ranks_alive"] for pod in range(3) for job in pods.get(pod, "/v1/jobs")]
    assert sum(alive) == 1, f"there is one rank, and pods count {alive}"


def test_other_workers_of_a_rank_follow_into_the_new_run(
    packed: Packed, pods: PodsInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Training(pods, spec_of(packed, world_size=1), NUM_SAMPLES)
    first.ask(0, 0)
    monkeypatch.setattr(rank_leases, "LEASE_SECONDS", -1.0)
    start, name = RunStart([0, 0, 0]), first.spec
    workers = [Rank(pods, name, 0, process=2, start=start) for _ in range(3)]
    for worker in workers:
        worker.info()  # as copies of one that registered the job
    found: list[int] = []
    for at, worker in enumerate([*workers, *workers]):
        found += worker.batch(0, np.arange(100 * at, 100 * at + 100)).sample_ids.tolist()
    assert len(set(found)) == 600
    assert len({worker.info()["incarnation"] for worker in workers}) == 1


@pytest.mark.usefixtures("ended_processes_are_seen")
def test_a_process_that_begins_in_a_later_epoch_goes_on(packed: Packed, pods: PodsInProcess) -> None:
    """As a trainer does that was killed when all of epoch 1 had been sent ahead, and goes on from a checkpoint by
    iterating over what it has had: a new run would give it other samples, and others would never come."""
    first = Training(pods, spec_of(packed), NUM_SAMPLES)
    first.all_ask(0)
    first.all_ask(1)
    second = again(first)
    second.all_ask(1)
    assert runs_of(second) == runs_of(first)
    assert all(first.samples[key] == sample for key, sample in second.samples.items()), "others than before the kill"
    second.all_ask(2)
    second.check(2)
    assert first.receipt(0)["exact"]


@pytest.mark.usefixtures("ended_processes_are_seen")
def test_a_run_that_was_left_within_an_epoch_goes_on(packed: Packed, pods: PodsInProcess) -> None:
    """Its state may have been mislaid: a new run would destroy what it can be resumed by."""
    first = Training(pods, spec_of(packed), NUM_SAMPLES)
    first.all_ask(0, 0, 300)
    second = again(first)
    second.all_ask(0)
    second.check(0)
    assert all(second.samples[key] == sample for key, sample in first.samples.items())
    assert runs_of(second) == runs_of(first)
    for epoch in range(1, 4):
        second.all_ask(epoch)
    second.all_ask(4, 0, 100)
    third = again(second, process=3)
    with pytest.raises(EpochEnded, match="epoch 0 has ended"):
        third.ask(0, 0)


@pytest.mark.usefixtures("ended_processes_are_seen")
def test_with_a_state_it_goes_on(packed: Packed, pods: PodsInProcess) -> None:
    first = Training(pods, spec_of(packed), NUM_SAMPLES)
    first.all_ask(0)
    second = again(first)
    for rank in second.ranks:
        assert rank._pods.start is not None
        rank._pods.start.state_was_loaded()
    second.all_ask(0, 400)
    assert all(first.samples[key] == sample for key, sample in second.samples.items())
    third = again(second, process=3)
    third.all_ask(1)
    third.check(1)
    assert runs_of(third) == runs_of(first), "the next epoch is asked for by a process of its own"


def test_a_live_run_is_not_replaced_by_a_typing_error(packed: Packed, pods: PodsInProcess) -> None:
    """All its ranks have had all of the epoch, and are alive."""
    first = Training(pods, spec_of(packed), NUM_SAMPLES)
    first.all_ask(0)
    other = again(first, timeout_seconds=1)
    for rank in other.ranks:
        with pytest.raises(RankTaken, match="is process"):
            rank.batch(0, np.arange(20))
    first.all_ask(1)
    first.check(1)


def test_while_one_rank_may_be_alive_the_others_wait_and_then_go_on(
    packed: Packed, pods: PodsInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 was started again alone. Rank 1 is in the run, which goes on with what rank 0 had."""
    first = Training(pods, spec_of(packed), NUM_SAMPLES)
    first.all_ask(0)
    alone = Rank(pods, first.spec, 0, process=1, start=RunStart([0, 0, 0]), timeout_seconds=1)
    with pytest.raises(PodBusy, match="when its other ranks have been silent"):
        alone.batch(0, np.arange(20))
    monkeypatch.setattr("refill_service.membership.new_runs.LEASE_SECONDS", 0.0)
    had = [first.samples[0, 0, position] for position in range(20)]
    assert alone.batch(0, np.arange(20)).sample_ids.tolist() == had
    first.all_ask(1)
    first.check(1)


def test_in_the_same_processes_both_ranks_begin_again(packed: Packed, pods: PodsInProcess) -> None:
    """As when a cell of a notebook runs twice: the processes live, and each asks anew by another object."""
    first = Training(pods, spec_of(packed), NUM_SAMPLES)
    for epoch in range(2):
        first.all_ask(epoch)
    second = again(first, process=1)
    second.all_ask(0)
    second.check(0)
    assert runs_of(second) != runs_of(first)


def test_a_made_up_name_does_not_move_a_job_that_runs(packed: Packed, pods: PodsInProcess) -> None:
    training = Training(pods, spec_of(packed), NUM_SAMPLES)
    training.all_ask(0, 0, 200)
    path = f"/v1/jobs/{training.spec.name}?incarnation={training.ranks[0].info()['incarnation']}.7&pods=2"
    body = httpx.Request("PUT", "http://x", json=training.spec.to_dict())
    for pod in range(3):
        status, _, answer = pods.do(pods.request("client", pod, "PUT", path, body.content, body.headers))
        assert (status, b"no pod knows job" in answer) == (400, True), answer
    training.all_ask(0)
    training.check(0)
    assert training.ranks[0].info()["incarnation"].count(".") == 0


@pytest.mark.usefixtures("ended_processes_are_seen")
def test_a_pod_that_missed_the_new_run_takes_it_up(packed: Packed, pods: PodsInProcess) -> None:
    first = Training(pods, spec_of(packed), NUM_SAMPLES)
    first.all_ask(0)
    second = again(first)
    pods.rule(f"/peer/v1/jobs/{first.spec.name}?", to=2, times=1)
    pods.rule(f"/peer/v1/jobs/{first.spec.name}", to=2, times=3)
    second.all_ask(0)
    second.check(0)
    assert runs_of(second) != runs_of(first)


@pytest.mark.usefixtures("ended_processes_are_seen")
def test_after_a_restart_of_pods_with_journals(packed: Packed, tmp_path: Path) -> None:
    with PodsInProcess(2, tmp_path, journal=True) as pods:
        first = Training(pods, spec_of(packed), NUM_SAMPLES)
        first.all_ask(0)
        first.all_ask(1)
        (before,) = runs_of(first)
        pods.kill(0, 1)
        pods.start(0, 1)
        second = again(first)
        second.all_ask(0)
        second.check(0)
        assert runs_of(second) != {before}
        assert pods.get(0, f"/v1/jobs/{first.spec.name}/epochs/1/receipt?run={before}")["exact"]


@pytest.mark.usefixtures("ended_processes_are_seen")
def test_with_traces_of_ranks_own(packed: Packed, pods: PodsInProcess) -> None:
    first = Training(pods, spec_of(packed, order="explicit"), NUM_SAMPLES)
    second = again(first)
    for training, seed in ((first, 1), (second, 2)):
        ids = np.random.default_rng(seed).permutation(NUM_SAMPLES)
        training.together(*(partial(rank.post_trace, 0, ids[rank.rank :: 2]) for rank in training.ranks))
        training.all_ask(0)
        training.check(0)
    assert runs_of(second) != runs_of(first)


@pytest.mark.usefixtures("ended_processes_are_seen")
def test_a_rank_that_reports_while_another_begins_the_new_run_is_in_it(packed: Packed, pods: PodsInProcess) -> None:
    """As after a restart of pods. It had registered the run that has ended by now, and was refused."""
    first = Training(pods, spec_of(packed), NUM_SAMPLES)
    first.all_ask(0)
    (before,) = runs_of(first)
    second = again(first)
    late = second.ranks[1]._pods
    assert late.incarnation == before

    def is_replaced() -> bool:
        at_pod = pods.node(0).jobs.get(first.spec.name)
        return at_pod is not None and at_pod.job.incarnation != before

    def report_then_ask() -> None:
        until(is_replaced, "a new run")
        late.retried(None, lambda pod, wait: late._report(pod, wait))
        second.ask(1, 0)

    second.together(lambda: second.ask(0, 0), report_then_ask)
    second.check(0)


def test_a_live_run_is_not_replaced_after_a_restart_of_pods(packed: Packed, tmp_path: Path) -> None:
    """Its ranks stand between epochs, and ask for nothing; leases are in no journal."""
    with PodsInProcess(2, tmp_path, journal=True) as pods:
        first = Training(pods, spec_of(packed), NUM_SAMPLES)
        first.all_ask(0)
        pods.kill(0, 1)
        pods.start(0, 1)
        other = again(first, timeout_seconds=1)
        for rank in other.ranks:
            with pytest.raises((RankTaken, PodBusy)):
                rank.batch(0, np.arange(20))
        first.all_ask(1)
        first.check(1)


def test_a_second_process_that_is_heard_first_after_a_restart_is_not_the_rank(packed: Packed, tmp_path: Path) -> None:
    """The journal says what was delivered, and not to which process."""
    with PodsInProcess(1, tmp_path, journal=True) as pods:
        first = Training(pods, spec_of(packed), NUM_SAMPLES)
        first.all_ask(0, 0, 100)
        pods.kill(0)
        pods.start(0)
        other = again(first, timeout_seconds=1)
        for rank in other.ranks:
            with pytest.raises(PodBusy, match="if another one is that rank, it is heard in a moment"):
                rank.batch(0, np.arange(20))
        first.all_ask(0, 100)
        first.check(0)
        for rank in other.ranks:
            with pytest.raises(RankTaken):
                rank.batch(0, np.arange(20))


@pytest.mark.usefixtures("ended_processes_are_seen")
def test_a_process_that_skips_the_first_positions_goes_on_at_once(packed: Packed, pods: PodsInProcess) -> None:
    """As trainers do that go on in mid-epoch without a state of the loader. No worker of it asks for what it skips."""
    first = Training(pods, spec_of(packed), NUM_SAMPLES)
    first.all_ask(0)
    second = again(first, timeout_seconds=1)
    second.all_ask(0, 20, 40)
    assert all(first.samples[key] == sample for key, sample in second.samples.items())
    assert runs_of(second) == runs_of(first)


@pytest.mark.usefixtures("ended_processes_are_seen")
def test_a_worker_waits_for_the_one_that_begins_at_the_first_position(
    packed: Packed, pods: PodsInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That one may be late by more than a lease. The other went on with the run that had ended."""
    first = Training(pods, spec_of(packed), NUM_SAMPLES)
    first.all_ask(0)
    second = again(first, timeout_seconds=1)
    worker = second.ranks[0]
    late_seconds = rank_leases.LEASE_SECONDS + 20
    for node in pods.nodes:
        assert node is not None
        node.jobs[first.spec.name].home.leases._leases._again[0] = (time.monotonic() - late_seconds, time.monotonic())
    with monkeypatch.context() as in_worker:
        in_worker.setattr("refill.run_start.loader_worker", lambda: 1)
        with pytest.raises(PodBusy, match="another worker asks for that in a moment"):
            worker.batch(0, np.arange(20, 40))
    second = again(first)
    second.all_ask(0)
    second.check(0)
    assert runs_of(second) != runs_of(first)


@pytest.mark.usefixtures("ended_processes_are_seen")
def test_a_job_does_not_wait_for_pods_that_are_asked_about_another_one(packed: Packed, pods: PodsInProcess) -> None:
    """Nor one team for another."""
    held, ended = asyncio.Event(), []
    for _ in range(2):
        training = Training(pods, spec_of(packed), NUM_SAMPLES)
        training.all_ask(0)
        ended.append(training)
    waits, other = ended
    silent = pods.rule(f"jobs/{waits.spec.name}/run", to=1, held=held)
    asking = threading.Thread(target=lambda: again(waits).all_ask(0))
    asking.start()
    try:
        until(lambda: silent.seen > 0, "the question to pod 1")
        again(other).all_ask(0)
        assert not held.is_set()
    finally:
        pods.do(set_event(held))
        asking.join()


async def set_event(event: asyncio.Event) -> None:
    event.set()
