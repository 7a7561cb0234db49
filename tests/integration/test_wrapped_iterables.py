"""Nothing is lost silently where a wrapper runs the iterable form in some loader workers only, on real pods."""

from __future__ import annotations

import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.forked_processes import RANKS, start
from tests.integration.wrapped import Divided, Wrapped, in_first_only
from tests.pod_fixtures import NUM_SAMPLES
from tests.waiting import until
from torch.utils.data import DataLoader, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

import refill
from refill.errors import SamplesSkipped
from refill_service.demo.local_cluster import LocalCluster

STRETCH = 16
NEVER_ASKED = (
    r"rank 0 of job .* in epoch 0 worker 1 of \d loader workers never asked for its positions, 16 to 31 .*TRAINERS"
)

DatasetOf = Callable[..., refill.CacheIterableDataset]


@pytest.fixture
def dataset_of(three_pods: LocalCluster, job: dict[str, Any]) -> DatasetOf:
    def make(**more: Any) -> refill.CacheIterableDataset:
        arguments = {"job": job["name"], "rank": 0, "world_size": 1, "batch_size": STRETCH}
        arguments |= {name: job[name] for name in job if name != "name"}
        return refill.CacheIterableDataset(three_pods.pod_urls[0], **(arguments | more))

    return make


def closed(batches: Any) -> None:
    batches._shutdown_workers()  # else whenever the error and its frames are collected, at 5 s a worker


@pytest.mark.parametrize(
    ("loader_class", "workers", "batch", "persistent"),
    [
        pytest.param(DataLoader, 2, 8, False, marks=pytest.mark.variant),
        (DataLoader, 4, 40, True),
        (StatefulDataLoader, 3, None, False),
    ],
)
def test_workers_that_never_ask_are_an_error_in_the_first_epoch(
    dataset_of: DatasetOf, loader_class: Any, workers: int, batch: int | None, persistent: bool
) -> None:
    wrapped = Wrapped(dataset_of(), in_first_only)
    loader = loader_class(wrapped, batch, num_workers=workers, persistent_workers=persistent)
    batches = iter(loader)
    with pytest.raises(SamplesSkipped, match=NEVER_ASKED):
        list(batches)
    closed(batches)


@pytest.mark.variant
def test_so_are_those_of_a_loader_that_is_spawned(dataset_of: DatasetOf) -> None:
    loader = DataLoader(Wrapped(dataset_of(), in_first_only), 16, num_workers=2, multiprocessing_context="spawn")
    batches = iter(loader)
    with pytest.raises(SamplesSkipped, match=NEVER_ASKED):
        list(batches)
    closed(batches)


def test_so_are_those_of_a_dataset_that_is_made_in_the_wrapper(dataset_of: DatasetOf) -> None:
    batches = iter(DataLoader(Wrapped(dataset_of, in_first_only), 16, num_workers=2))
    with pytest.raises(SamplesSkipped, match=NEVER_ASKED):
        list(batches)
    closed(batches)


def test_a_worker_that_ceases_to_ask_is_an_error_in_the_first_epoch(dataset_of: DatasetOf) -> None:
    wrapped = Wrapped(dataset_of(), lambda worker: 40 if worker == 1 else None)
    batches = iter(DataLoader(wrapped, 16, num_workers=3))
    with pytest.raises(
        SamplesSkipped, match="worker 1 of 3 loader workers ceased to ask for its positions, 160 to 175"
    ):
        list(batches)
    closed(batches)


@pytest.mark.parametrize(("workers", "sets_epoch"), [(2, True), pytest.param(4, False, marks=pytest.mark.variant)])
def test_the_next_epoch_tells_where_the_loader_shows_nothing(
    dataset_of: DatasetOf, workers: int, sets_epoch: bool
) -> None:
    dataset = dataset_of()
    loader = DataLoader(Wrapped(dataset, in_first_only), 16, num_workers=workers, in_order=False)
    assert sum(map(len, loader)) < NUM_SAMPLES
    if sets_epoch:
        dataset.set_epoch(1)
    batches = iter(loader)
    with pytest.raises(SamplesSkipped, match=NEVER_ASKED):
        next(batches)
    closed(batches)


class EndsLast(Wrapped):
    """Only worker 0 has samples, and it ends when the process of the other has."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.other = torch.zeros(1, dtype=torch.int64).share_memory_()

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        assert worker is not None
        if worker.id:
            self.other[0] = os.getpid()
        else:
            yield from super().__iter__()
            until(lambda: self.other[0] and is_zombie(int(self.other[0])), "the end of the other worker")


def is_zombie(process: int) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize("in_order", [pytest.param(True, marks=pytest.mark.variant), False])
def test_the_next_epoch_tells_however_little_a_worker_has_once_its_process_has_ended(
    dataset_of: DatasetOf, in_order: bool
) -> None:
    """Two stretches of it are all, less than what the loader has under way: nothing else would show."""
    dataset = dataset_of(batch_size=250)
    assert sum(map(len, DataLoader(EndsLast(dataset), 250, num_workers=2, in_order=in_order))) == 500
    dataset.set_epoch(1)
    batches = iter(DataLoader(Wrapped(dataset), 16, num_workers=2))
    with pytest.raises(SamplesSkipped, match="worker 1 of 2 loader workers never asked for its positions, 250 to 499"):
        next(batches)
    closed(batches)


def test_the_next_epoch_tells_whichever_process_asks(dataset_of: DatasetOf) -> None:
    dataset = dataset_of()
    list(DataLoader(Wrapped(dataset, in_first_only), 16, num_workers=2, in_order=False))
    dataset.set_epoch(1)
    with pytest.raises(SamplesSkipped, match=NEVER_ASKED):
        next(iter(DataLoader(Wrapped(dataset), 16)))
    assert len(list(DataLoader(Wrapped(dataset), None))) == NUM_SAMPLES, "what was said holds nobody up for good"


@pytest.mark.variants("4-2-2 ranks and 4 workers")
@pytest.mark.parametrize(
    ("workers", "ranks", "dealt"), [(2, 1, "2 workers"), (0, 2, "2 ranks"), (4, 2, "2 ranks and 4 workers")]
)
def test_a_wrapper_that_divides_once_more_is_an_error(
    dataset_of: DatasetOf, workers: int, ranks: int, dealt: str
) -> None:
    loader = DataLoader(Divided(dataset_of(world_size=ranks)), 16, num_workers=workers, collate_fn=list)
    batches = iter(loader)
    keeps_one = f"keeps one of every {workers or ranks} samples that it takes, and the others are lost: .* {dealt} alr"
    with pytest.raises(SamplesSkipped, match=keeps_one):
        list(batches)
    if workers:
        closed(batches)
    allowed = dataset_of(world_size=ranks, allow_skipped=True)
    assert len(list(DataLoader(Divided(allowed), None))) == NUM_SAMPLES // ranks // 2


def test_in_the_stored_order_it_may_choose_by_what_is_in_samples(dataset_of: DatasetOf) -> None:
    """Such as the left one of two cameras that take turns."""
    dataset = dataset_of(world_size=2, shuffle=False)
    with pytest.warns(UserWarning, match="keeps one of every 2 samples .* the others are lost, unless it was to leave"):
        assert len(list(islice(DataLoader(Divided(dataset), 16, collate_fn=list), 4))) == 4


def test_a_wrapper_that_throws_away_all_of_a_worker_is_told_at_its_end(dataset_of: DatasetOf, tmp_path: Path) -> None:
    """In its other worker it has had all that is dealt there, so that half of the samples come."""
    handler = logging.FileHandler(tmp_path / "log")
    logging.getLogger("refill").addHandler(handler)
    loader = DataLoader(Divided(dataset_of(), NUM_SAMPLES // 2), 16, num_workers=2, collate_fn=list)
    assert 500 <= sum(map(len, loader)) < 510
    logging.getLogger("refill").removeHandler(handler)
    said = (tmp_path / "log").read_text().splitlines()
    assert len(said) == 1
    assert "keeps none of the 496 samples that it took in one of them, and they are lost" in said[0]


ONE_EPOCH = """
import sys
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data import IterableDataset
import refill
class Wrapped(IterableDataset):
    def __iter__(self):
        if get_worker_info().id == 0 or sys.argv[4] == "all":
            yield from dataset
dataset = refill.CacheIterableDataset(sys.argv[1], dataset=sys.argv[2], job=sys.argv[3], batch_size=16)
loader = DataLoader(Wrapped(), 16, collate_fn=list, num_workers=2, in_order=False, multiprocessing_context="fork")
print(sum(map(len, loader)))
sys.exit(3)
"""


@pytest.mark.parametrize(("who", "asked"), [("first", 504), ("all", 1000)])
def test_the_end_of_the_process_tells_where_no_epoch_follows(
    three_pods: LocalCluster, job: dict[str, Any], tmp_path: Path, who: str, asked: int
) -> None:
    (tmp_path / "one_epoch.py").write_text(ONE_EPOCH)
    arguments = [str(tmp_path / "one_epoch.py"), three_pods.pod_urls[0], job["dataset"], job["name"], who]
    with (tmp_path / "log").open("wb") as log:
        ended = start(RANKS, arguments, dict(os.environ), log).wait(120)
    lines = (tmp_path / "log").read_text().splitlines()
    assert ended == 3, lines
    assert f"{asked}" in lines
    said = [line for line in lines if "lost samples" in line]
    if who == "all":
        assert said == []
    else:
        assert len(said) == 1
        assert f"rank 0 of job {job['name']} lost samples: in epoch 0 worker 1 of 2 loader workers never" in said[0]


def test_it_can_be_allowed(dataset_of: DatasetOf, caplog: pytest.LogCaptureFixture) -> None:
    dataset = dataset_of(allow_skipped=True)
    loader = DataLoader(Wrapped(dataset, in_first_only), 16, num_workers=2)
    for epoch in range(2):
        dataset.set_epoch(epoch)
        assert sum(map(len, loader)) == 504
    del loader, dataset  # as at exit
    assert "lost samples" not in caplog.text


@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 50, "num_workers": 3, "persistent_workers": True},
        pytest.param({"batch_size": 7, "num_workers": 2, "in_order": False}, marks=pytest.mark.variant),
        pytest.param({"batch_size": 16, "num_workers": 2, "prefetch_factor": 9}, marks=pytest.mark.variant),
    ],
    ids=str,
)
def test_a_wrapper_that_every_worker_runs_has_everything(
    dataset_of: DatasetOf, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    """Also around loops that stop early, anywhere."""
    dataset = dataset_of()
    loader = DataLoader(Wrapped(dataset), **options)
    for epoch, batches in enumerate([None, 1, 9, None]):
        dataset.set_epoch(epoch)
        ids = torch.cat(list(islice(loader, batches))).tolist()
        assert len(ids) == len(set(ids)) == (NUM_SAMPLES if batches is None else batches * options["batch_size"])
    del loader, dataset
    assert "lost samples" not in caplog.text


@pytest.mark.parametrize("in_order", [False, pytest.param(True, marks=pytest.mark.variant)])
def test_a_loop_that_stops_before_a_slow_worker_asks_at_all_leaves_no_hole(
    dataset_of: DatasetOf, caplog: pytest.LogCaptureFixture, in_order: bool
) -> None:
    may_ask = multiprocessing.get_context("fork").Event()

    def waits(worker: int) -> None:
        if worker == 1:
            may_ask.wait()

    dataset = dataset_of()
    batches = iter(DataLoader(Wrapped(dataset, waits), 16, num_workers=2, in_order=in_order, prefetch_factor=4))  # type: ignore[arg-type]
    for _ in range(1 if in_order else 7):
        next(batches)
    may_ask.set()
    closed(batches)
    dataset.set_epoch(1)
    ids = torch.cat(list(DataLoader(Wrapped(dataset), 16, num_workers=2))).tolist()
    assert sorted(ids) == list(range(NUM_SAMPLES))
    del dataset
    assert "lost samples" not in caplog.text


@pytest.mark.parametrize("each", [pytest.param(1, marks=pytest.mark.variant), 100])
def test_workers_that_all_end_after_as_many_samples_stop_early(dataset_of: DatasetOf, each: int) -> None:
    dataset = dataset_of()
    loader = DataLoader(Wrapped(dataset, lambda worker: each + (worker == 0)), 8, num_workers=3)
    for epoch in range(2):
        dataset.set_epoch(epoch)
        assert sum(map(len, loader)) == 3 * each + 1


def test_workers_without_a_part_have_nothing_to_ask(dataset_of: DatasetOf) -> None:
    dataset = dataset_of(batch_size=600)
    for epoch in range(2):
        dataset.set_epoch(epoch)
        assert sum(map(len, DataLoader(Wrapped(dataset), 8, num_workers=3))) == NUM_SAMPLES


def test_the_rest_of_an_epoch_goes_on_from_a_state(dataset_of: DatasetOf) -> None:
    before = dataset_of()
    had = torch.cat(list(islice(DataLoader(Wrapped(before), 16, num_workers=2), 11))).tolist()
    after = dataset_of()
    after.load_state_dict(before.state_after(len(had)))
    loader = DataLoader(Wrapped(after), 16, num_workers=3)
    rest = torch.cat(list(loader)).tolist()
    assert sorted(had + rest) == list(range(NUM_SAMPLES))
    after.set_epoch(1)
    assert sum(map(len, loader)) == NUM_SAMPLES


def test_a_sampler_in_a_generator_has_everything_in_one_worker(three_pods: LocalCluster, job: dict[str, Any]) -> None:
    """Nobody deals its positions to workers, so the one that runs has all of them."""
    arguments = {"job": job["name"]} | {name: job[name] for name in job if name != "name"}
    dataset = refill.CacheDataset(three_pods.pod_urls[0], **arguments)

    def samples() -> Iterator[Any]:
        for first in range(0, NUM_SAMPLES, 50):
            yield from dataset.__getitems__(positions[first : first + 50])

    positions = list(refill.EpochSampler(dataset))
    ids = torch.cat(list(DataLoader(Wrapped(samples, in_first_only), 16, num_workers=2))).tolist()
    assert sorted(ids) == list(range(NUM_SAMPLES))


def test_a_generator_of_hugging_face_datasets_is_an_error(dataset_of: DatasetOf) -> None:
    """Under its own name: it wraps a generator in whatever it has."""
    datasets = pytest.importorskip("datasets")
    dataset = dataset_of()

    def generate() -> Iterator[dict[str, int]]:
        for sample in dataset:
            yield {"id": int(sample["__id__"])}

    wrapped = datasets.IterableDataset.from_generator(generate).with_format("torch")
    batches = iter(DataLoader(wrapped, 16, num_workers=2))
    with pytest.raises(SamplesSkipped, match=NEVER_ASKED):
        list(batches)
    closed(batches)
    ids = torch.cat([batch["id"] for batch in DataLoader(wrapped, 16, num_workers=1)]).tolist()
    assert sorted(ids) == list(range(NUM_SAMPLES)), "as the error says"
