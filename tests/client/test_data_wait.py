"""timed: what the loop waited for is measured and reported, and never in its way."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from tests.client.conftest import NUM_SAMPLES
from tests.client.fake_pod import FakePod
from tests.waiting import until
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import refill
from refill import CacheDataset, CacheIterableDataset, EpochSampler, data_wait
from refill.errors import InvalidInput, StoreUnavailable

DatasetOf = Callable[..., CacheDataset]


def loader_of(dataset: CacheDataset, num_workers: int = 0) -> DataLoader[Any]:
    sampler = EpochSampler(dataset)
    return DataLoader(dataset, batch_size=8, sampler=sampler, collate_fn=list, num_workers=num_workers)


def slow(batches: DataLoader[Any], seconds: float) -> Iterator[Any]:
    for batch in batches:
        time.sleep(seconds)
        yield batch


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_bytes_and_wait_are_reported(pod: FakePod, dataset_of: DatasetOf, num_workers: int) -> None:
    dataset = dataset_of(rank=1, world_size=2)
    timed = refill.timed(loader_of(dataset, num_workers), dataset)
    assert len(timed) == 3
    for _ in range(2):
        assert len(list(timed)) == 3
    assert timed.batches == 6
    assert sum(report["samples"] for report in pod.reports) == NUM_SAMPLES
    assert sum(report["bytes"] for report in pod.reports) == dataset.fetched()[1] > 0
    assert sum(report["data_wait_seconds"] for report in pod.reports) == pytest.approx(timed.wait_seconds)
    assert {report["rank"] for report in pod.reports} == {1}


def test_only_the_time_blocked_in_the_loader_counts(dataset_of: DatasetOf) -> None:
    dataset = dataset_of()
    loader = loader_of(dataset)
    timed = refill.timed(slow(loader, 0.02), dataset)
    began, in_the_loop = time.monotonic(), 0.0
    for _ in timed:
        received = time.monotonic()
        time.sleep(0.1)
        in_the_loop += time.monotonic() - received
    assert 5 * 0.02 <= timed.wait_seconds <= time.monotonic() - began - in_the_loop


def test_reports_come_while_the_loop_runs(pod: FakePod, dataset_of: DatasetOf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_wait, "_REPORT_EVERY_SECONDS", 0.01)
    dataset = dataset_of()
    for number, _ in enumerate(refill.timed(loader_of(dataset), dataset)):
        until(lambda number=number: len(pod.reports) > number, "a report")  # type: ignore[misc]
    assert len(pod.reports) >= 5


def test_a_loop_that_is_broken_off_reports_too(pod: FakePod, dataset_of: DatasetOf) -> None:
    dataset = dataset_of()
    batches = iter(refill.timed(loader_of(dataset), dataset))
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert [report["samples"] for report in pod.reports] == [8]


def test_a_report_that_fails_stops_nothing_and_goes_with_the_next(
    pod: FakePod, dataset_of: DatasetOf, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = dataset_of()
    timed = refill.timed(loader_of(dataset), dataset)
    pod.report_error = StoreUnavailable("no")
    with caplog.at_level(logging.WARNING):
        assert len(list(timed)) == 5
    assert "training goes on" in caplog.text
    assert pod.reports == []
    pod.report_error = None
    assert len(list(timed)) == 5
    assert sum(report["samples"] for report in pod.reports) == 2 * NUM_SAMPLES


def test_errors_of_the_loader_pass(pod: FakePod, dataset_of: DatasetOf) -> None:
    dataset = dataset_of(transform=lambda sample: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        list(refill.timed(loader_of(dataset), dataset))


def fails_for_seven(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["__id__"] == 7:
        raise ZeroDivisionError
    return sample


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loop_that_catches_an_error_goes_on_with_the_next_batch(
    pod: FakePod, dataset_of: DatasetOf, num_workers: int
) -> None:
    dataset = dataset_of(transform=fails_for_seven)
    timed = refill.timed(loader_of(dataset, num_workers), dataset)
    batches, positions = iter(timed), []
    for number in range(6):
        try:
            next(batches)
        except ZeroDivisionError:
            failed = number
        except StopIteration:
            break
        positions.append(timed.state_dict()["position"])
    expected = [8 * (number + 1) for number in range(5)]
    expected[failed] = 8 * failed  # a loop that stops there may want its batch again
    assert positions == expected
    assert timed.batches == 4
    assert timed.state_dict()["position"] == NUM_SAMPLES
    assert next(batches, None) is None
    assert sum(report["samples"] for report in pod.reports) == NUM_SAMPLES


def test_a_batch_that_is_still_to_come_has_not_failed(dataset_of: DatasetOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a loader's timeout has passed: it hands out the same one then."""
    dataset = dataset_of()
    timed = refill.timed(loader_of(dataset, num_workers=1), dataset)
    batches = iter(timed)
    next(batches)
    with monkeypatch.context() as patched:
        patched.setattr(_MultiProcessingDataLoaderIter, "_get_data", mock.Mock(side_effect=RuntimeError("timed out")))
        with pytest.raises(RuntimeError, match="timed out"):
            next(batches)
    next(batches)
    assert timed.state_dict()["position"] == 16


def test_the_iterable_form_and_what_else_the_loader_has(pod: FakePod) -> None:
    dataset = CacheIterableDataset(pod.url, batch_size=8, dataset="file:///data", job="job", policy="redox")
    timed = refill.timed(DataLoader(dataset, batch_size=8, collate_fn=list), dataset)
    assert timed.batch_size == 8
    assert len(list(timed)) == 5
    assert sum(report["samples"] for report in pod.reports) == NUM_SAMPLES
    with pytest.raises(AttributeError):
        timed.nothing  # noqa: B018


def test_loader_and_dataset_in_each_others_place(dataset_of: DatasetOf) -> None:
    dataset = dataset_of()
    with pytest.raises(InvalidInput, match=r"takes the loader first, .*; got a CacheDataset and a DataLoader"):
        refill.timed(dataset, loader_of(dataset))  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="got a list and a list"):
        refill.timed([1, 2], [3])  # type: ignore[arg-type]
