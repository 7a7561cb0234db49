"""Memory follows use: planned jobs that run share a pod, those that sleep leave theirs at once, and a floor holds."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.membership.planned_in_process import Run, new_name
from tests.membership.pods_in_process import Packed, PodsInProcess, Rank, spec_of
from tests.pod_fixtures import NUM_SAMPLES
from tests.waiting import until

from refill.errors import DatasetNotFound, MemoryTooSmall
from refill_service.cache_core.dataset_index import SampleRecords
from refill_service.datasets.dataset_reader import Dataset
from refill_service.jobs import job_use
from refill_service.planned.job_records import JobRecords


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


def warmed(pods: PodsInProcess, run: Run, epoch: int, position: int) -> int:
    """Bytes in memory, when all of it has come."""
    found: dict[str, int] = {}

    def is_done() -> bool:
        found.update(pods.do(pods.node(0).planned.warm(run.name, epoch, position)))
        return not found["is_planning"] and 0 < found["wanted_bytes"] == found["in_memory_bytes"]

    until(is_done, "all that is warmed")
    return found["in_memory_bytes"]


def test_a_job_is_warmed_again_elsewhere_and_after_it_slept(packed: Packed, pods: PodsInProcess) -> None:
    run = run_of(pods, packed, memory_bytes=600_000)
    job = pods.node(0).planned.jobs[run.name]
    for epoch, position in ((0, 0), (2, 500), (2, 500), (0, 0)):
        assert warmed(pods, run, epoch, position) > 100_000
    pods.do(in_loop(job.let_go))
    assert job.resident_bytes == 0
    warmed(pods, run, 0, 0)
    read = job.counts.owner(0).core.samples_read
    run.take(0, 0, 100)
    counts = job.counts.owner(0)
    assert (counts.core.takes, counts.waited_takes) == (100, 0), f"they were in memory: {read} had been read"


@pytest.mark.parametrize("memory_bytes", [600_000, 0], ids=["named", "not named"])
def test_it_is_logged_once_that_a_job_sleeps(
    packed: Packed, pods: PodsInProcess, caplog: pytest.LogCaptureFixture, memory_bytes: int
) -> None:
    """Each second it is told to let go again, as long as others want memory."""
    run = run_of(pods, packed, memory_bytes=memory_bytes)
    run.take(0, 0, 100)
    job = pods.node(0).planned.jobs[run.name]
    with caplog.at_level("INFO"):
        for _ in range(3):
            pods.do(in_loop(job.let_go))
    assert sum("sleeps" in record.message for record in caplog.records) == 1


def test_what_a_job_has_ordered_ahead_is_not_read_when_it_lets_go_of_its_memory(
    packed: Packed, pods: PodsInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it reads on for nobody, beside the job that has its memory now."""
    go_on, begun = pods.event(), list[int]()
    read_samples = Dataset.read_samples

    async def slow(dataset: Dataset, records: Any, first: int, end: int, room: Any = None) -> memoryview:
        begun.append(first)
        await go_on.wait()
        return await read_samples(dataset, records, first, end, room)

    monkeypatch.setattr(Dataset, "read_samples", slow)
    run = run_of(pods, packed)
    job = pods.node(0).planned.jobs[run.name]
    pods.do(pods.node(0).planned.warm(run.name, 0, 0))
    until(lambda: len(begun) > 0, "a read")
    pods.do(in_loop(job.let_go))
    num_begun = len(begun)
    pods.set(go_on)
    until(lambda: pods.node(0).gate.inside_bytes == 0, "what was under way")
    assert (len(begun), job.resident_bytes) == (num_begun, 0), "reads began when it had let go"
    monkeypatch.undo()
    run.take(0)
    run.check(packed[0])
    run.exact_receipt(0)


async def in_loop(work: Callable[[], object]) -> None:
    work()


def test_a_dataset_that_does_not_open_keeps_no_other_job_waiting(
    packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens, asked = Dataset.open, list[str]()
    with PodsInProcess(1, memory_bytes="4MB", wait_seconds=30) as pods:
        go_on = pods.event()

        async def silent(url: str, *more: Any, **named: Any) -> Dataset:
            asked.append(url)
            if url.endswith("silent"):
                await go_on.wait()
            return await opens(url, *more, **named)

        monkeypatch.setattr(Dataset, "open", silent)
        with ThreadPoolExecutor(3) as threads:
            held = [threads.submit(Run(pods, "file:///silent", new_name(), 1).take, 0, 0, 50) for _ in range(3)]
            until(lambda: "file:///silent" in asked, "the dataset is asked for")
            run = run_of(pods, packed)
            run.take(0)
            run.exact_receipt(0)
            pods.set(go_on)
            for each in held:
                with pytest.raises(DatasetNotFound):
                    each.result(60)


def test_an_index_that_loads_slowly_keeps_no_other_job_waiting_and_is_loaded_once(
    packed: Packed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who registers the job waits for it."""
    slow_url = shutil.copytree(urlsplit(packed[0]).path, tmp_path / "slow").as_uri()
    load, loading = Dataset._load_records, list[str]()  # noqa: SLF001
    with PodsInProcess(1, memory_bytes="4MB", wait_seconds=0.2) as pods:
        go_on = pods.event()

        async def slow(dataset: Dataset, first: int, end: int) -> SampleRecords:
            loading.append(dataset.url)
            if dataset.url == slow_url:
                await go_on.wait()
            return await load(dataset, first, end)

        monkeypatch.setattr(Dataset, "_load_records", slow)
        with ThreadPoolExecutor(1) as threads:
            held = threads.submit(Run(pods, slow_url, new_name(), 1).take, 0)
            until(lambda: slow_url in loading, "the records are asked for")
            run = run_of(pods, packed)
            run.take(0)
            run.exact_receipt(0)
            pods.set(go_on)
            held.result(60)
        assert loading.count(slow_url) == 1


def test_jobs_of_both_kinds_are_given_memory_one_after_the_other(
    packed: Packed, pods: PodsInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A live one comes while a planned one has been given its memory, and loads its records."""
    go_on, load, loading = pods.event(), JobRecords.load, list[int]()

    async def slow(*given: Any, **named: Any) -> JobRecords:
        loading.append(1)
        await go_on.wait()
        return await load(*given, **named)

    monkeypatch.setattr(JobRecords, "load", slow)
    live = Rank(pods, spec_of(packed[0], memory_bytes=2_500_000), 0)
    with ThreadPoolExecutor(2) as threads:
        planned = threads.submit(run_of, pods, packed, memory_bytes=2_500_000)
        until(lambda: bool(loading), "the planned job loads its records")
        refused = threads.submit(live.info)
        until(lambda: bool(pods.node(0).table.making._waiters), "the live one waits")  # noqa: SLF001
        pods.set(go_on)
        planned.result(60)
        with pytest.raises(MemoryTooSmall):
            refused.result(60)
