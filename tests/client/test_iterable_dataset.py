"""CacheIterableDataset: the same epochs, dealt to workers, and set_epoch that reaches persistent ones."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from tests.client.conftest import NUM_SAMPLES
from tests.client.fake_pod import FakePod
from tests.client.loops import fails_in_a_worker
from torch.utils.data import DataLoader, get_worker_info

import refill
from refill import CacheIterableDataset
from refill.errors import InvalidInput, JobLost


def iterable_of(pod: FakePod, batch_size: int = 7, **arguments: Any) -> CacheIterableDataset:
    return CacheIterableDataset(
        pod.url, batch_size=batch_size, dataset="file:///data", job="job", policy="redox", **arguments
    )


@pytest.mark.parametrize(
    "workers",
    [
        {"num_workers": 0},
        {"num_workers": 2, "persistent_workers": True},
        pytest.param(
            {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True},
            marks=pytest.mark.variant,
        ),
    ],
    ids=["in process", "forked, persistent", "spawned, persistent"],
)
def test_epochs_are_served_exactly_once_by_one_request_a_batch(pod: FakePod, workers: dict[str, Any]) -> None:
    dataset = iterable_of(pod)
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=7, collate_fn=list, **workers)
    orders = []
    for epoch in (0, 1, 5):
        dataset.set_epoch(epoch)
        batches = list(loader)
        assert len(batches) == len(loader) == 6
        orders.append([sample["__id__"] for batch in batches for sample in batch])
        assert sorted(orders[-1]) == list(range(NUM_SAMPLES))
        assert orders[-1] == pod.trace(pod.jobs["job"], epoch, 0).tolist(), "not in the order of the trace"
    assert pod.count("POST batch") == 3 * 6
    assert {batch.epoch for batch in pod.batches} == {0, 1, 5}


def test_the_same_epoch_again_is_said_once(pod: FakePod, recwarn: pytest.WarningsRecorder) -> None:
    """Trainers that know no ``set_epoch`` of datasets train with one order for ever."""
    dataset = iterable_of(pod)
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=7, collate_fn=list)
    for epoch in range(2):
        dataset.set_epoch(epoch)
        list(loader)
    dataset.set_epoch(2)
    next(iter(loader))  # a look
    list(loader)
    assert not recwarn
    orders = [[sample["__id__"] for batch in loader for sample in batch] for _ in range(2)]
    assert orders[0] == orders[1]
    (said,) = recwarn
    assert "epoch 2 of job job comes again, the same samples in the same order: call set_epoch" in str(said.message)


def test_persistent_workers_say_it_and_what_has_the_datasets_order_does_not(pod: FakePod) -> None:
    for job, shuffle in (("validation", False), ("training", True)):
        dataset = CacheIterableDataset(
            pod.url, batch_size=7, dataset="file:///data", job=job, policy="redox", shuffle=shuffle
        )
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=7,
            collate_fn=list,
            num_workers=2,
            persistent_workers=True,
            worker_init_fn=lambda _: warnings.simplefilter("error"),  # as what the loop sees
        )
        list(loader)
        with pytest.raises(UserWarning, match="comes again") if shuffle else contextlib.nullcontext():
            list(loader)


def test_a_worker_that_is_at_its_end_before_another_begins_says_nothing_of_that(
    pod: FakePod, recwarn: pytest.WarningsRecorder
) -> None:
    """Where there are few samples: the epoch does not come again for the worker that is late."""
    dataset = iterable_of(pod)
    found: list[Any] = []
    for number in (1, 0):
        worker = mock.Mock(id=number, num_workers=2, seed=0)
        with mock.patch("torch.utils.data.get_worker_info", return_value=worker):
            found += list(dataset)
    assert sorted(sample["__id__"] for sample in found) == list(range(NUM_SAMPLES))
    assert not [said for said in recwarn if "comes again" in str(said.message)]


@pytest.fixture
def log_file(tmp_path: Path) -> Iterator[Path]:
    """What workers say, too."""
    handler = logging.FileHandler(tmp_path / "log")
    logging.getLogger("refill").addHandler(handler)
    yield tmp_path / "log"
    logging.getLogger("refill").removeHandler(handler)
    handler.close()


@pytest.mark.parametrize(
    ("batch_size", "workers", "is_said"),
    [(5, 2, True), (7, 2, False), (None, 2, False), (5, 1, False), (5, 0, False)],
)
def test_batches_of_another_size_than_workers_are_dealt_are_said_at_the_first(
    pod: FakePod, batch_size: int | None, workers: int, is_said: bool, log_file: Path
) -> None:
    """By one of the workers. What comes is right all the same."""
    loader: DataLoader[Any] = DataLoader(iterable_of(pod), batch_size, num_workers=workers, collate_fn=list)
    batches = list(loader)
    samples = [sample for batch in batches for sample in batch] if batch_size else batches
    assert len(samples) == NUM_SAMPLES
    line = "the DataLoader makes batches of 5, and its 2 workers are dealt 7 positions at a time: "
    assert log_file.read_text().count(line) == is_said


def test_two_ranks_share_an_epoch(pod: FakePod) -> None:
    ids = [sample["__id__"] for rank in range(2) for sample in iterable_of(pod, rank=rank, world_size=2)]
    assert sorted(ids) == list(range(NUM_SAMPLES))


def test_an_epoch_under_way_stays_the_one_it_began_as(pod: FakePod) -> None:
    dataset = iterable_of(pod)
    samples = iter(dataset)
    dataset.set_epoch(1)
    assert len(list(samples)) == NUM_SAMPLES
    assert {batch.epoch for batch in pod.batches} == {0}


def test_an_epoch_set_once_workers_are_started_is_the_next_ones(pod: FakePod) -> None:
    dataset = iterable_of(pod)
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=7, collate_fn=list, num_workers=2)
    for epoch in range(2):
        batches = iter(loader)
        dataset.set_epoch(epoch + 1)
        found = [sample["__id__"] for batch in batches for sample in batch]
        assert found == pod.trace(pod.jobs["job"], epoch, 0).tolist()


def test_workers_that_stay_and_begin_two_epochs_at_once_are_refused(
    pod: FakePod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are told of an iteration one after another: here the loop sets another epoch between the two."""
    context = multiprocessing.get_context("fork")
    first_began, was_set, usual = context.Event(), context.Event(), CacheIterableDataset.begins_at

    turns = list[int]()

    def in_turns(dataset: CacheIterableDataset) -> tuple[int, int]:
        turns.append(os.getpid())  # of this process
        worker = get_worker_info()
        assert worker is not None
        if worker.id == 1 and len(turns) == 2:
            was_set.wait()
        found = usual(dataset)
        if worker.id == 0 and len(turns) == 2:
            first_began.set()
        return found

    monkeypatch.setattr(CacheIterableDataset, "begins_at", in_turns)
    dataset = iterable_of(pod)
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=7,
        collate_fn=list,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context=context,
    )
    assert len(list(loader)) == 6
    dataset.set_epoch(1)
    batches = iter(loader)
    first_began.wait()
    dataset.set_epoch(2)
    was_set.set()
    with fails_in_a_worker("workers of one loader began epochs [12] and [12]: set_epoch was called as the loader"):
        list(batches)
    del batches
    assert len(list(loader)) == 6, "the next one is whole"


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loop_that_catches_an_error_goes_on_with_the_next_batch(pod: FakePod, num_workers: int) -> None:
    def fails_for_seven(sample: dict[str, Any]) -> dict[str, Any]:
        if sample["__id__"] == 7:
            raise ZeroDivisionError
        return sample

    dataset = iterable_of(pod, transform=fails_for_seven)
    timed = refill.timed(DataLoader(dataset, batch_size=7, collate_fn=list, num_workers=num_workers), dataset)
    batches, ids, failed = iter(timed), list[int](), 0
    for _ in range(6):
        try:
            ids += [sample["__id__"] for sample in next(batches)]
        except ZeroDivisionError:
            failed += 1
    assert next(batches, None) is None
    assert failed == 1
    assert len(ids) == len(set(ids)) in (NUM_SAMPLES - 7, NUM_SAMPLES - 5)
    assert timed.state_dict()["position"] == NUM_SAMPLES


def test_what_can_not_be_is_refused(pod: FakePod) -> None:
    with pytest.raises(InvalidInput, match="batch_size must be at least 1, got 0"):
        iterable_of(pod, batch_size=0)
    for wrong in ("4", 2.5, None, True):
        with pytest.raises(InvalidInput, match=f"batch_size must be a whole number, got {wrong!r}"):
            iterable_of(pod, batch_size=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="order='keyed' contradicts"):
        iterable_of(pod, order="explicit")
    with pytest.raises(InvalidInput, match="epoch must be"):
        iterable_of(pod).set_epoch(-1)


def test_a_worker_of_a_run_that_is_lost_does_not_go_on(pod: FakePod) -> None:
    samples = iter(iterable_of(pod))
    for _ in range(10):
        next(samples)
    state = samples.state_dict()  # type: ignore[attr-defined]  # of a worker of torchdata's StatefulDataLoader
    again = iter(iterable_of(pod))
    again.load_state_dict(state)  # type: ignore[attr-defined]
    assert len(list(again)) == NUM_SAMPLES - 10
    pod.restart()
    with pytest.raises(JobLost, match=r"\(set_epoch\(0\)\)"):
        iter(iterable_of(pod)).load_state_dict(state)  # type: ignore[attr-defined]
