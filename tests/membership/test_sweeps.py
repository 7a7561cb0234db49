"""Jobs of a sweep at pods: those with one ``read_seed`` read the store about once while they are near each other, and
each has the order of its own plan, whatever becomes of the others."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from tests.membership.planned_in_process import BATCH, Run, new_name
from tests.membership.pods_in_process import PodsInProcess
from tests.pod_fixtures import write_files

from refill.errors import InvalidInput, JobConflict
from refill_service.datasets.pack import pack

NUM_SAMPLES = 2000
NUM_PODS = 2


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    files, store = tmp_path_factory.mktemp("files"), tmp_path_factory.mktemp("store")
    write_files(files, NUM_SAMPLES, least=1000, most=2000)
    asyncio.run(pack(str(files), store.as_uri(), blob_bytes=2 << 20))
    return store.as_uri()


@pytest.fixture
def pods() -> Iterator[PodsInProcess]:
    with PodsInProcess(NUM_PODS, memory_bytes="16MiB") as pods:
        yield pods


class Sweep:
    """Jobs with one rank each, and what pods have read of the store for them."""

    def __init__(self, pods: PodsInProcess, images: str, count: int, **settings: Any) -> None:
        given: dict[str, Any] = {"chunk_size": 8, "memory_bytes": 1_000_000, "read_seed": 0, "num_epochs": 1}
        given["policy_settings"] = {"shares": NUM_PODS}
        self.pods, self.images = pods, images
        self.runs = [
            Run(pods, images, new_name(), 1, **{"seed": seed, **given, **settings}) for seed in range(1, count + 1)
        ]
        for run in self.runs:
            run.ranks[0].info()
        self.num_bytes = self.runs[0].ranks[0].info()["total_bytes"]
        self.planned_samples = NUM_SAMPLES * self.runs[0].plan.memory_bytes // self.num_bytes
        self._before = self._read()

    def _read(self) -> int:
        """Of blobs; an index is read when a job begins."""
        pods = [self.pods.node(pod) for pod in range(self.pods.num_pods)]
        return sum(node.store_counters.operations["read_range"].bytes for node in pods)

    @property
    def times_read(self) -> float:
        return (self._read() - self._before) / self.num_bytes

    def counts(self, run: Run) -> dict[str, int]:
        found: dict[str, int] = self.pods.get(0, f"/v1/jobs/{run.name}/epochs/0")["total"]
        return found

    def take(self, behind: int, first: int = 0, end: int = NUM_SAMPLES) -> None:
        """Each job so many positions behind the one before it."""
        for place in range(first, end + behind * (len(self.runs) - 1), BATCH):
            for number, run in enumerate(self.runs):
                if first <= place - number * behind < end:
                    run.take(0, place - number * behind, min(end, place - number * behind + BATCH))

    def kept_bytes(self) -> int:
        jobs = [job for pod in range(self.pods.num_pods) for job in self.pods.node(pod).planned.jobs.values()]
        return max(job.recent_bytes for job in jobs)

    def check(self) -> None:
        for run in self.runs:
            run.check(self.images)
            assert sorted(run.positions_of(0)) == list(range(NUM_SAMPLES)), "an epoch was not each position once"


@pytest.mark.variants("2-0.0", "3-0.0")
@pytest.mark.parametrize(("count", "behind"), [(2, 0.0), (2, 0.1), (3, 0.0)])
def test_a_sweep_reads_the_store_about_once(pods: PodsInProcess, images: str, count: int, behind: float) -> None:
    sweep = Sweep(pods, images, count)
    orders = {tuple(run.plan.to_dict().items()) for run in sweep.runs}
    assert len(orders) == count
    sweep.take(int(behind * sweep.planned_samples) // BATCH * BATCH)
    sweep.check()
    assert sweep.times_read <= 1.1
    counts = [sweep.counts(run) for run in sweep.runs]
    assert sum(each["bytes_shared"] for each in counts) >= 0.9 * (count - 1) * sweep.num_bytes
    assert sum(each["bytes_read"] + each["exact_bytes"] for each in counts) <= 1.1 * sweep.num_bytes


@pytest.mark.variants("settings1")
@pytest.mark.parametrize("settings", [{"read_seed": None}, {"memory_bytes": 450_000, "chunk_size": 16}])
def test_jobs_of_other_orders_read_for_themselves(pods: PodsInProcess, images: str, settings: dict[str, Any]) -> None:
    """Beside a job that reads in an order that others may share."""
    sweep, alone = Sweep(pods, images, 1), Sweep(pods, images, 1, **settings)
    sweep.runs += alone.runs
    sweep.take(0)
    sweep.check()
    assert 1.95 <= sweep.times_read <= 2.1
    assert [sweep.counts(run)["bytes_shared"] for run in sweep.runs] == [0, 0]


def test_a_job_that_lags_is_let_go(pods: PodsInProcess, images: str) -> None:
    """Nothing is kept for it: what it takes stays within what the other's memory has for that."""
    sweep = Sweep(pods, images, 2)
    ahead, lags = sweep.runs
    most = 0
    lags.take(0, 0, BATCH)
    for place in range(0, NUM_SAMPLES, BATCH):
        ahead.take(0, place, place + BATCH)
        most = max(most, sweep.kept_bytes())
    assert most <= 1_000_000 * (1 / 12 + 0.05)  # what is kept in case it is asked for again stands beside it
    lags.take(0, BATCH)
    sweep.check()
    assert sweep.times_read > 1.5


def test_one_that_ends_early_and_one_that_comes_later(pods: PodsInProcess, images: str) -> None:
    sweep = Sweep(pods, images, 2)
    sweep.take(0, 0, 800)
    first, second = sweep.runs
    first.ranks[0].end_job()
    later = Sweep(pods, images, 1, seed=3)
    for place in range(0, NUM_SAMPLES - 800, BATCH):
        second.take(0, 800 + place, 800 + place + BATCH)
        later.runs[0].take(0, place, place + BATCH)
    later.runs[0].take(0, NUM_SAMPLES - 800)
    sweep.runs = [second, *later.runs]
    sweep.check()
    first.check(images)


def test_pods_that_are_killed_change_nobodys_order(pods: PodsInProcess, images: str) -> None:
    sweep = Sweep(pods, images, 2)
    sweep.take(BATCH, 0, 800)
    pods.kill(1)
    sweep.take(BATCH, 800, 1000)
    pods.start(1)
    pods.kill(0)
    pods.start(0)
    sweep.take(BATCH, 1000)
    sweep.check()


@pytest.mark.variant
def test_two_ranks_of_each_job_and_several_epochs(pods: PodsInProcess, images: str) -> None:
    runs = [
        Run(pods, images, new_name(), 2, seed=seed, read_seed=5, chunk_size=8, memory_bytes=1_000_000, num_epochs=2)
        for seed in (1, 2)
    ]
    for epoch in range(2):
        for first in range(0, runs[0].length(epoch), BATCH):
            for run in runs:
                run.take(epoch, first, min(first + BATCH, run.length(epoch)))
    for run in runs:
        run.check(images)
        assert run.exact_receipt(1)["read_seed"] == 5
        assert run.states(1, 40)[0]["plan"]["read_seed"] == 5


def test_a_state_goes_on_with_its_read_seed_alone(pods: PodsInProcess, images: str) -> None:
    sweep = Sweep(pods, images, 1)
    (run,) = sweep.runs
    run.take(0, 0, 400)
    (state,) = run.states(0, 400)
    run.ranks[0].end_job()
    with pytest.raises(JobConflict, match=r"to go on by a plan with read_seed 0, and has read_seed 4"):
        Run(pods, images, run.name, 1, state, seed=1, read_seed=4, chunk_size=8, memory_bytes=1_000_000).take(0, 400)
    same = Run(pods, images, run.name, 1, state, seed=1, read_seed=0, chunk_size=8, memory_bytes=1_000_000)
    same.take(0, 400)
    same.check(images)


def test_all_of_a_sweep_are_planned_for_the_same_memory(pods: PodsInProcess, images: str) -> None:
    """Whoever comes first has the pods alone."""
    sweep = Sweep(pods, images, 3, memory_bytes=0, chunk_size=0)
    assert len({(run.plan.memory_bytes, run.plan.chunk_size, run.plan.num_shares) for run in sweep.runs}) == 1


@pytest.mark.parametrize("settings", [{"policy": "redox"}, {"shuffle": False}, {"order": "explicit"}])
def test_what_has_no_such_order_is_refused(pods: PodsInProcess, images: str, settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="read_seed goes with policy='planned', shuffle=True and whole datasets"):
        Run(pods, images, new_name(), 1, read_seed=1, **settings)
