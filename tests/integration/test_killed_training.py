"""Training on real pods that is left and taken up again: every sample of the epoch exactly once over both parts."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any

import httpx
import pytest
from tests.forked_processes import ForkedProcess, start_rank
from tests.integration.job_ranks import exact_receipt
from tests.pod_fixtures import NUM_SAMPLES
from torch.utils.data import DataLoader, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

import refill
from refill.errors import EpochEnded, JobLost
from refill_service.demo.local_cluster import LocalCluster

EVERY_SAMPLE = list(range(NUM_SAMPLES))
WORKERS: list[dict[str, Any]] = [
    {"num_workers": 0},
    {"num_workers": 2},
    {"num_workers": 2, "persistent_workers": True},
    {"num_workers": 3},
]
WORKER_NAMES = ["in process", "two workers", "two persistent workers", "three workers"]

Begin = Callable[..., tuple[Any, Any]]


def ids_of(batches: Iterable[Any]) -> list[int]:
    return [sample["__id__"] for batch in batches for sample in batch]


def arguments_of(job: dict[str, Any]) -> dict[str, Any]:
    """Settings of a job as CacheDataset takes them."""
    return {("job" if name == "name" else name): value for name, value in job.items()} | {"timeout_seconds": 30}


FORMS = ["map-style", "iterable", "map-style, stateful", "iterable, stateful"]
PLACES: list[tuple[dict[str, Any], int, str]] = [
    *((WORKERS[1], batches, f"{WORKER_NAMES[1]}-{batches}") for batches in (3, 17, 0, 16)),
    *((WORKERS[each], 3, f"{WORKER_NAMES[each]}-3") for each in (0, 2, 3)),
]
"""Workers, batches that the loop has had, and both in a name. ``make test`` tries the first one in every form, and of
the map-style form the next one, the end of the epoch."""


def _places_in_forms() -> Iterator[Any]:
    for form in FORMS:
        for nth, (workers, batches, name) in enumerate(PLACES):
            marks = () if nth < (2 if form == FORMS[0] else 1) else pytest.mark.variant
            yield pytest.param(form, workers, batches, id=f"{form}-{name}", marks=marks)


@pytest.fixture(params=FORMS)
def begin(request: pytest.FixtureRequest, three_pods: LocalCluster, job: dict[str, Any]) -> Begin:
    """Begins a process's loop anew: a loader that keeps its state, and what has ``set_epoch``."""

    def make(batch_size: int = 60, **workers: Any) -> tuple[Any, Any]:
        kind: Any = StatefulDataLoader if "stateful" in request.param else DataLoader
        settings = {"batch_size": batch_size, "collate_fn": list, **workers}
        if "iterable" in request.param:
            stream = refill.CacheIterableDataset(three_pods.pod_urls[0], batch_size=batch_size, **arguments_of(job))
            return refill.timed(kind(stream, **settings), stream), stream
        dataset = refill.CacheDataset(three_pods.pod_urls[0], **arguments_of(job))
        sampler = refill.EpochSampler(dataset)
        return refill.timed(kind(dataset, sampler=sampler, **settings), dataset), sampler

    return make


def check_left_and_taken_up(begin: Begin, workers: dict[str, Any], batches: int) -> None:
    loader, epochs = begin(**workers)
    epochs.set_epoch(0)
    consumed = ids_of(islice(loader, batches))
    state = loader.state_dict()
    del loader

    loader, epochs = begin(**workers)
    loader.load_state_dict(state)
    epochs.set_epoch(0)
    assert sorted(consumed + ids_of(loader)) == EVERY_SAMPLE
    epochs.set_epoch(1)
    assert sorted(ids_of(loader)) == EVERY_SAMPLE


@pytest.mark.variants("iterable-two workers-3", "map-style, stateful-two workers-3")
@pytest.mark.parametrize(("begin", "workers", "batches"), list(_places_in_forms()), indirect=["begin"])
def test_what_the_loop_had_and_what_it_has_then_is_every_sample_once(
    three_pods: LocalCluster, job: dict[str, Any], begin: Begin, workers: dict[str, Any], batches: int
) -> None:
    check_left_and_taken_up(begin, workers, batches)
    exact_receipt(three_pods, job, 1)


@pytest.mark.parametrize(
    ("begin", "workers", "batches"),
    [
        pytest.param("map-style", *PLACES[0][:2], id="map-style"),
        pytest.param("iterable, stateful", *PLACES[0][:2], id="iterable, stateful", marks=pytest.mark.variant),
    ],
    indirect=["begin"],
)
def test_what_is_decided_as_it_is_asked_is_decided_once(
    three_pods: LocalCluster, job: dict[str, Any], begin: Begin, workers: dict[str, Any], batches: int
) -> None:
    job["policy"] = "redox"
    check_left_and_taken_up(begin, workers, batches)
    answer = httpx.get(f"{three_pods.pod_urls[0]}/v1/jobs/{job['name']}/epochs/0").json()
    assert answer["total"]["takes"] == NUM_SAMPLES, "what was fetched ahead and lost is no other sample the second time"


@pytest.mark.parametrize("begin", ["map-style", pytest.param("iterable", marks=pytest.mark.variant)], indirect=True)
def test_other_workers_and_batch_sizes_go_on_too(begin: Begin) -> None:
    consumed, state = [], None
    for batch_size, num_workers in ((32, 2), (7, 0), (50, 3), (11, 2)):
        loader, _ = begin(batch_size, num_workers=num_workers)
        if state is not None:
            loader.load_state_dict(state)
        consumed += ids_of(islice(loader, 5))
        state = loader.state_dict()
    loader, _ = begin(64)
    loader.load_state_dict(state)
    assert sorted(consumed + ids_of(loader)) == EVERY_SAMPLE


@pytest.mark.parametrize(
    ("settings", "form"),
    [
        ({}, {"stateful": False, "iterable": False}),
        pytest.param({"policy": "redox"}, {"stateful": False, "iterable": False}, marks=pytest.mark.variant),
        pytest.param({}, {"stateful": True, "iterable": False}, marks=pytest.mark.variant),
        pytest.param({}, {"stateful": False, "iterable": True}, marks=pytest.mark.variant),
        pytest.param({}, {"stateful": True, "iterable": True}, marks=pytest.mark.variant),
    ],
    ids=str,
)
def test_killed_ranks_go_on_from_their_last_checkpoints(
    three_pods: LocalCluster, job: dict[str, Any], tmp_path: Path, settings: dict[str, Any], form: dict[str, bool]
) -> None:
    """Two ranks are killed at different places, with batches consumed that no checkpoint knows, and go on."""

    def start(rank: int, stop_after: int, num_workers: int) -> tuple[ForkedProcess, IO[str], IO[str]]:
        arguments = arguments_of(job | settings | {"world_size": 2}) | {"rank": rank}
        process_settings = {
            **form,
            "url": three_pods.pod_urls[rank],
            "arguments": arguments,
            "batch_size": 16,
            "num_workers": num_workers,
            "stop_after": stop_after,
            "log": str(tmp_path / f"{rank}.log"),
            "checkpoint": str(tmp_path / f"{rank}.checkpoint"),
        }
        script = Path(__file__).with_name("training_process.py")
        return start_rank(script, json.dumps(process_settings), ends_whole=True)

    @contextlib.contextmanager
    def lives(*each: tuple[int, int]) -> Iterator[list[tuple[ForkedProcess, IO[str]]]]:
        """Of both ranks, by the batches after which it stops and its workers; killed in the end, with its workers."""
        started = [start(rank, stop_after, num_workers) for rank, (stop_after, num_workers) in enumerate(each)]
        try:
            yield [(process, output) for process, _, output in started]
        finally:
            for process, process_input, output in started:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # workers would wait for it for ever
                process.wait()
                process_input.close()
                output.close()

    other_workers = 2 if form["stateful"] else 0
    for num_workers, stops in ((2, (8, 20)), (other_workers, (13, 5))):
        with lives(*((stop_after, num_workers) for stop_after in stops)) as ranks:
            for _, output in ranks:
                assert output.readline() == "stopped\n"
    with lives((-1, 2), (-1, 2)) as ranks:
        for process, _ in ranks:
            assert process.wait(90) == 0
    lines = [line.split() for rank in range(2) for line in (tmp_path / f"{rank}.log").read_text().splitlines()]
    for epoch in range(2):
        ids = [int(sample) for number, *samples in lines for sample in samples if number == str(epoch)]
        assert sorted(ids) == EVERY_SAMPLE


@pytest.mark.parametrize("batches", [5, *(pytest.param(batches, marks=pytest.mark.variant) for batches in (0, 20))])
def test_an_order_of_ones_own_goes_on(three_pods: LocalCluster, job: dict[str, Any], batches: int) -> None:
    subset = range(0, NUM_SAMPLES, 2)

    def begin() -> Any:
        dataset = refill.CacheDataset(three_pods.pod_urls[0], order="explicit", **arguments_of(job))
        sampler = refill.TraceSampler(dataset, RandomSampler(subset))
        return refill.timed(
            DataLoader(dataset, batch_size=25, sampler=sampler, collate_fn=list, num_workers=2), dataset
        )

    job["num_epochs"] = 1
    loader = begin()
    consumed = ids_of(islice(loader, batches))
    state = loader.state_dict()
    loader = begin()
    loader.load_state_dict(state)
    ids = consumed + (ids_of(loader) if loader.sampler.epoch == 0 else [])
    assert len(ids) == len(set(ids)) == len(subset)


@pytest.mark.parametrize("begin", ["map-style"], indirect=True)
def test_a_job_that_was_ended_goes_on_only_where_an_epoch_begins(
    three_pods: LocalCluster, job: dict[str, Any], begin: Begin
) -> None:
    job["policy"] = "redox"
    loader, sampler = begin()
    states = []
    for _ in loader:
        states.append(loader.state_dict())
    sampler.dataset.end_job()
    loader, sampler = begin()
    with pytest.raises(JobLost, match=job["name"]):
        loader.load_state_dict(states[10])
    loader.load_state_dict(states[-1])
    assert sampler.epoch == 1
    assert sorted(ids_of(loader)) == EVERY_SAMPLE


@pytest.mark.parametrize("begin", [pytest.param("map-style", marks=pytest.mark.variant), "iterable"], indirect=True)
def test_the_datasets_own_order_goes_on_even_if_the_job_was_ended(job: dict[str, Any], begin: Begin) -> None:
    job["shuffle"] = False
    loader, epochs = begin()
    consumed = ids_of(islice(loader, 10))
    state = loader.state_dict()
    epochs.dataset.end_job()
    loader, epochs = begin()
    loader.load_state_dict(state)
    assert consumed + ids_of(loader) == EVERY_SAMPLE
    epochs.set_epoch(1)
    assert ids_of(loader) == EVERY_SAMPLE


@pytest.mark.parametrize("begin", ["map-style"], indirect=True)
def test_an_epoch_that_pods_have_left_long_ago_says_so(job: dict[str, Any], begin: Begin) -> None:
    job["policy"] = "redox"
    loader, _ = begin(100)
    ids_of(islice(loader, 3))
    state = loader.state_dict()
    for _ in range(4):
        ids_of(loader)
    loader, _ = begin(100)
    loader.load_state_dict(state)
    with pytest.raises(EpochEnded):
        ids_of(loader)


def test_a_killed_loader_worker(three_pods: LocalCluster, job: dict[str, Any]) -> None:
    """torch ends the iteration. What the loop had not had comes in the next one, with what was on its way."""
    settings = {name: job[name] for name in ("dataset", "chunk_size", "memory_bytes")}
    dataset = refill.CacheDataset(three_pods.pod_urls[0], job=job["name"], **settings)
    # Small batches, for which the workers' pipe has room: torch waits for ever for the rest of one that a killed worker
    # had begun to write.
    batches: DataLoader[Any] = DataLoader(
        dataset, batch_size=8, sampler=refill.EpochSampler(dataset), num_workers=2, collate_fn=list
    )
    training = refill.timed(batches, dataset)
    keys: list[str] = []
    states: list[dict[str, Any]] = []

    def train() -> None:
        for batch in training:
            keys.extend(sample["__key__"] for sample in batch)
            states.append(training.state_dict())
            if len(states) == 10:
                worker = multiprocessing.active_children()[0]
                os.kill(worker.pid or 0, signal.SIGKILL)
                worker.join(10)

    with pytest.raises(RuntimeError, match="DataLoader worker"):
        train()
    training.load_state_dict(states[-1])
    train()
    assert len(keys) == len(set(keys)) == NUM_SAMPLES
