"""Memory follows use: planned jobs that run share a pod, those that sleep leave theirs at once, and a floor holds."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from tests.membership.planned_in_process import Run, new_name
from tests.membership.pods_in_process import Packed, PodsInProcess
from tests.pod_fixtures import NUM_SAMPLES

from refill.errors import MemoryTooSmall
from refill_service.jobs import job_use


@pytest.fixture
def pods() -> Iterator[PodsInProcess]:
    """One pod with memory for a few jobs that shuffle well."""
    with PodsInProcess(1, memory_bytes="4MB") as pods:
        yield pods


def run_of(pods: PodsInProcess, packed: Packed, chunk_size: int = 4, memory_bytes: int = 0) -> Run:
    found = Run(pods, packed[0], new_name(), 1, memory_bytes=memory_bytes, chunk_size=chunk_size)
    found.ranks[0].info()
    return found


def memory_of(pods: PodsInProcess, *runs: Run) -> list[int]:
    jobs = pods.node(0).planned.jobs
    return [jobs[run.name].memory_bytes for run in runs]


def taken(pods: PodsInProcess) -> int:
    return sum(job.taken_bytes for job in pods.node(0).planned.jobs.values())


def test_jobs_share_give_back_and_get_again(packed: Packed, pods: PodsInProcess) -> None:
    total = pods.node(0).settings.memory_bytes
    first = run_of(pods, packed)
    first.take(0, 0, 300)
    (alone,) = memory_of(pods, first)
    second = run_of(pods, packed)
    assert max(memory_of(pods, first, second)) <= total // 2 + 1, "the first did not give back at once"
    second.take(0, 0, 20)
    first.take(0, 300)
    second.take(0, 20)
    assert taken(pods) <= total
    for run in (first, second):
        run.check(packed[0])
        assert sorted(run.positions_of(0)) == list(range(NUM_SAMPLES))
    second.ranks[0].end_job()
    assert memory_of(pods, first)[0] > alone - (1 << 17), "what the second had is not the first one's again, at once"


def test_who_sleeps_leaves_its_memory_and_goes_on_all_the_same(
    packed: Packed, pods: PodsInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dead runs in a row, each broken off in its epoch with its memory full."""
    total = pods.node(0).settings.memory_bytes
    dead = []
    monkeypatch.setattr(job_use, "SLEEPS_AFTER_SECONDS", -1.0)  # whoever asks for nothing at the moment
    for _ in range(5):
        dead.append(run_of(pods, packed))
        dead[-1].take(0, 0, 100)
    alone = memory_of(pods, dead[0])
    monkeypatch.setattr(job_use, "SLEEPS_AFTER_SECONDS", 1000.0)
    for job in pods.node(0).planned.jobs.values():
        job.use.last_used -= 2000
    alive = run_of(pods, packed)
    alive.take(0, 0, 20)
    assert memory_of(pods, alive) >= alone, "a live job has less for those that sleep"
    assert taken(pods) <= total
    alive.take(0, 20)
    for run in dead[:2]:  # they were not dead after all
        run.take(0, 100)
    assert taken(pods) <= total
    for run in (alive, *dead[:2]):
        run.check(packed[0])
        assert sorted(run.positions_of(0)) == list(range(NUM_SAMPLES))


def test_a_chunk_that_does_not_fit_says_whose_memory_is_too_small(packed: Packed, pods: PodsInProcess) -> None:
    own = r"its largest chunk of 4 samples .*; raise the job's own memory_bytes, which is 10, or lower chunk_size$"
    with pytest.raises(MemoryTooSmall, match=own):
        run_of(pods, packed, memory_bytes=10)
    holder = run_of(pods, packed, memory_bytes=pods.node(0).settings.pod_memory.for_jobs_bytes - 1000)
    with pytest.raises(MemoryTooSmall, match=rf"its largest chunk .*; end jobs that are over .*taken: {holder.name} "):
        run_of(pods, packed)


def test_who_finds_too_little_is_told(packed: Packed, pods: PodsInProcess, caplog: pytest.LogCaptureFixture) -> None:
    runs: list[Run] = []

    def another() -> None:
        runs.append(run_of(pods, packed, chunk_size=1))
        assert taken(pods) <= pods.node(0).settings.memory_bytes

    def until_refused() -> None:
        for _ in range(30):
            another()

    with caplog.at_level(logging.WARNING), pytest.raises(MemoryTooSmall) as refused:
        until_refused()
    assert len(runs) > 2
    assert f"job {runs[0].name} has memory for" in caplog.text, "nobody said that it reads more for the others"
    assert runs[0].name in refused.value.message, "who holds the memory is not named"
    assert "refill end NAME" in refused.value.message, "what to do is not said"
