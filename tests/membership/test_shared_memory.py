"""Memory follows use: jobs that run share a pod, those that sleep leave theirs at once, and epochs stay exact."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.membership.jobs import Packed, spec_of
from tests.membership.pods_in_process import PodsInProcess, Training
from tests.pod_fixtures import NUM_SAMPLES

from refill.errors import MemoryTooSmall
from refill_service.cache_core import job_memory
from refill_service.jobs import job_use


@pytest.fixture
def pods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PodsInProcess]:
    """One pod with memory for a few jobs that shuffle well. Their chunks have a sample each, whose tables take as much
    as the samples: that is not what is tested here."""
    monkeypatch.setattr(job_memory, "_TABLES_PER_CHUNK", 0)
    monkeypatch.setattr(job_memory, "_TABLES_PER_SAMPLE", 0)
    with PodsInProcess(1, tmp_path, journal=False, memory_bytes="4MB") as pods:
        yield pods


def training_of(pods: PodsInProcess, packed: Packed, **settings: object) -> Training:
    of_test: dict[str, object] = {"policy": "drain", "world_size": 1, "memory_bytes": 0, "chunk_size": 1}
    return Training(pods, spec_of(packed, **(of_test | settings)), NUM_SAMPLES)


def memory_of(pods: PodsInProcess, *trainings: Training) -> list[int]:
    jobs = pods.node(0).jobs
    return [jobs[training.spec.name].job.memory_bytes for training in trainings]


def most_of(pods: PodsInProcess, training: Training) -> int:
    claim = pods.node(0).jobs[training.spec.name].claim
    assert claim is not None
    return claim.most_bytes


def resident(pods: PodsInProcess, training: Training) -> int:
    return pods.node(0).jobs[training.spec.name].owner.resident_bytes


def taken(pods: PodsInProcess) -> int:
    return sum(at_pod.taken_bytes for at_pod in pods.node(0).jobs.values())


def test_jobs_share_give_back_and_get_again(packed: Packed, pods: PodsInProcess) -> None:
    total = pods.node(0).settings.memory_bytes
    first = training_of(pods, packed)
    first.ask(0, 0, 0, 300)
    (alone,) = memory_of(pods, first)
    dataset_bytes = first.ranks[0].info()["total_bytes"]
    assert alone > most_of(pods, first) * 0.99, "one alone has less than it can use"
    second = training_of(pods, packed)
    given_back = [resident(pods, first), memory_of(pods, first)[0]]
    assert memory_of(pods, second)[0] > total // 2 - (1 << 17), "the second had to wait for its memory"
    assert max(given_back) <= total // 2 + 1, "the first did not give back at once"
    second.ask(0, 0, 0, 20)
    first.ask(0, 0, 300)
    second.ask(0, 0)
    assert taken(pods) <= total
    counts = pods.get(0, f"/v1/jobs/{first.spec.name}/epochs/0")["total"]
    assert dataset_bytes < counts["bytes_read"] < 2 * dataset_bytes, "what was given back is read again, and counted"
    assert counts["exact_reads"] == 0, "by whole chunks"
    for training in (first, second):
        training.ask(0, 1)
        training.check(0)
        training.check(1)
    second.ranks[0].end_job()
    assert memory_of(pods, first)[0] > alone - (1 << 17), "what the second had is not the first one's again, at once"
    first.ask(0, 2)
    first.check(2)


def test_who_sleeps_leaves_its_memory_and_goes_on_all_the_same(
    packed: Packed, pods: PodsInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dead runs in a row, each broken off in its epoch with its memory full."""
    total = pods.node(0).settings.memory_bytes
    dead = []
    monkeypatch.setattr(job_use, "SLEEPS_AFTER_SECONDS", -1.0)  # whoever asks for nothing at the moment
    for _ in range(5):
        dead.append(training_of(pods, packed))
        dead[-1].ask(0, 0, 0, 100)
    monkeypatch.setattr(job_use, "SLEEPS_AFTER_SECONDS", 1000.0)
    for at_pod in pods.node(0).jobs.values():
        at_pod.use.last_used -= 2000
    alive = training_of(pods, packed)
    alive.ask(0, 0, 0, 20)
    assert memory_of(pods, alive)[0] > most_of(pods, alive) * 0.99, "a live job has less for those that sleep"
    assert taken(pods) <= total
    alive.ask(0, 0)
    alive.check(0)
    for training in dead[:2]:  # they were not dead after all
        training.ask(0, 0)
        training.check(0)
    assert taken(pods) <= total


def test_a_floor_holds_and_who_finds_too_little_is_told(
    packed: Packed, pods: PodsInProcess, caplog: pytest.LogCaptureFixture
) -> None:
    trainings: list[Training] = []

    def another() -> None:
        trainings.append(training_of(pods, packed))
        floors = [pods.node(0).jobs[each.spec.name].claim.least_bytes for each in trainings]  # type: ignore[union-attr]
        pairs = zip(memory_of(pods, *trainings), floors, strict=True)
        assert all(has >= floor for has, floor in pairs), "taken from jobs that then shuffle badly"
        assert taken(pods) <= pods.node(0).settings.memory_bytes

    def until_refused() -> None:
        for _ in range(20):
            another()

    with caplog.at_level(logging.WARNING), pytest.raises(MemoryTooSmall) as refused:
        until_refused()
    last = trainings[-1].spec.name
    assert len(trainings) > 3
    assert f"job {last} has memory for" in caplog.text, "nobody said that its shuffle suffers"
    assert f"job {trainings[0].spec.name} has memory for" not in caplog.text
    assert trainings[0].spec.name in refused.value.message, "who holds the memory is not named"
    assert "refill end NAME" in refused.value.message, "what to do is not said"
