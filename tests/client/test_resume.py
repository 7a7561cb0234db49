"""Checkpoints of the loop: a process that loads one gets the samples that the other had not, each once."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.client.conftest import NUM_SAMPLES
from tests.client.fake_pod import FakePod
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import BatchSampler as StatefulBatchSampler

import refill
from refill import CacheDataset, CacheIterableDataset, EpochSampler, Position, TraceSampler
from refill.data_wait import TimedLoader
from refill.errors import InvalidInput, JobLost

DatasetOf = Callable[..., CacheDataset]
Loader = TimedLoader[Any]

WORKERS: list[dict[str, Any]] = [
    {"num_workers": 0},
    {"num_workers": 2},
    {"num_workers": 3, "persistent_workers": True, "prefetch_factor": 4},
]
WORKER_NAMES = ["in process", "two workers", "three persistent workers"]


def ids_of(batches: Iterable[Any]) -> list[int]:
    return [sample["__id__"] for batch in batches for sample in batch]


def trace_of(pod: FakePod, epoch: int, rank: int = 0) -> list[int]:
    return pod.trace(pod.jobs["job"], epoch, rank).tolist()


def _of_dataset(arguments: dict[str, Any]) -> dict[str, Any]:
    """What a loader is not told, taken out of the arguments for both."""
    names = ("rank", "world_size", "timeout_seconds", "shuffle", "job", "dataset")
    return {name: arguments.pop(name) for name in names if name in arguments}


def mapped(dataset_of: DatasetOf, batch_size: int = 6, **arguments: Any) -> tuple[Loader, EpochSampler]:
    """A loop of a process of its own over the map-style form, and what is told of epochs."""
    dataset = dataset_of(**_of_dataset(arguments))
    sampler = EpochSampler(dataset)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler, collate_fn=list, **arguments)
    return refill.timed(loader, dataset), sampler


def iterable(dataset_of: DatasetOf, batch_size: int = 6, **arguments: Any) -> tuple[Loader, CacheIterableDataset]:
    """The same over the iterable form."""
    url = dataset_of()._service_url
    told = {"dataset": "file:///data", "job": "job", "timeout_seconds": 10} | _of_dataset(arguments)
    dataset = CacheIterableDataset(url, batch_size=batch_size, **told)
    loader: DataLoader[Any] = DataLoader(dataset, batch_size=batch_size, collate_fn=list, **arguments)
    return refill.timed(loader, dataset), dataset


def stored(state: Any) -> Any:
    """As it comes back from a checkpoint file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


FORMS = pytest.mark.parametrize("form", [mapped, iterable], ids=["map-style", "iterable"])


@FORMS
@pytest.mark.parametrize("workers", WORKERS, ids=WORKER_NAMES)
@pytest.mark.parametrize("batches", [0, pytest.param(1, marks=pytest.mark.variant), 4, 6, 7])
def test_the_rest_of_the_epoch_follows_and_then_whole_ones(
    pod: FakePod, dataset_of: DatasetOf, form: Any, workers: dict[str, Any], batches: int
) -> None:
    loader, epochs = form(dataset_of, **workers)
    epochs.set_epoch(3)
    consumed = ids_of(islice(loader, batches))
    state = stored(loader.state_dict())

    loader, epochs = form(dataset_of, **workers)
    loader.load_state_dict(state)
    assert epochs.epoch == (3 if batches < 7 else 4), "the epoch to go on with"
    epochs.set_epoch(3)
    assert consumed + ids_of(loader) == trace_of(pod, 3)
    for epoch in (4, 5):
        epochs.set_epoch(epoch)
        assert ids_of(loader) == trace_of(pod, epoch)


@FORMS
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    batches=st.integers(0, 8),
    sizes=st.tuples(st.integers(1, 15), st.integers(1, 15), st.integers(1, 15)),
    num_workers=st.tuples(st.sampled_from([0, 0, 0, 2, 3]), st.sampled_from([0, 0, 0, 2, 3]), st.just(0)),
)
def test_it_may_go_on_with_other_workers_and_batch_sizes_any_number_of_times(
    pod: FakePod,
    dataset_of: DatasetOf,
    form: Any,
    batches: int,
    sizes: tuple[int, ...],
    num_workers: tuple[int, ...],
) -> None:
    consumed: list[int] = []
    state = None
    for size, workers in zip(sizes, num_workers, strict=True):
        loader, epochs = form(dataset_of, size, num_workers=workers)
        if state is not None:
            loader.load_state_dict(state)
        if epochs.epoch == 0:
            consumed += ids_of(islice(loader, batches))
        state = loader.state_dict()
    loader, epochs = form(dataset_of, 7)
    loader.load_state_dict(state)
    if epochs.epoch == 0:
        consumed += ids_of(loader)
    assert consumed == trace_of(pod, 0)


@FORMS
def test_a_state_is_that_of_the_batch_the_loop_has_not_of_what_workers_fetched(
    dataset_of: DatasetOf, form: Any
) -> None:
    loader, _ = form(dataset_of, num_workers=2)
    positions = []
    for _batch in loader:
        state = loader.state_dict()
        positions.append((state["epoch"], state["position"]))
    assert positions == [(0, 6), (0, 12), (0, 18), (0, 24), (0, 30), (0, 36), (0, 40)]
    assert state == loader.state_dict(), "at the end of the loop as with its last batch"


@FORMS
def test_an_epoch_set_within_the_loop_does_not_move_it(dataset_of: DatasetOf, form: Any) -> None:
    loader, epochs = form(dataset_of, num_workers=2)
    batches = iter(loader)
    next(batches)
    epochs.set_epoch(1)
    assert [loader.state_dict()[name] for name in ("epoch", "position")] == [0, 6]
    batches.close()
    assert [loader.state_dict()[name] for name in ("epoch", "position")] == [1, 0], "what would be served next"


@FORMS
def test_a_state_from_the_end_of_an_epoch_is_the_next_epoch_and_its_own_is_empty(
    pod: FakePod, dataset_of: DatasetOf, form: Any
) -> None:
    loader, _ = form(dataset_of)
    assert len(ids_of(loader)) == NUM_SAMPLES
    state = loader.state_dict()

    loader, epochs = form(dataset_of)
    loader.load_state_dict(state)
    assert epochs.epoch == 1
    assert ids_of(loader) == trace_of(pod, 1)
    loader.load_state_dict(state)
    epochs.set_epoch(0)
    assert ids_of(loader) == [], "a loop that sets the epoch of its checkpoint does not repeat it"


def test_another_epoch_starts_at_its_beginning(pod: FakePod, dataset_of: DatasetOf) -> None:
    for form in (mapped, iterable):
        loader, epochs = form(dataset_of)
        next(iter(loader))
        state = loader.state_dict()
        loader, epochs = form(dataset_of)
        loader.load_state_dict(state)
        epochs.set_epoch(5)
        assert ids_of(loader) == trace_of(pod, 5)
        epochs.set_epoch(0)
        assert ids_of(loader) == trace_of(pod, 0)


def test_a_look_at_the_first_batch_does_not_lose_the_place(pod: FakePod, dataset_of: DatasetOf) -> None:
    loader, _ = mapped(dataset_of)
    consumed = ids_of(islice(loader, 3))
    state = loader.state_dict()
    loader, sampler = mapped(dataset_of)
    loader.load_state_dict(state)
    next(iter(loader))
    sampler.set_epoch(0)
    assert consumed + ids_of(loader) == trace_of(pod, 0)
    sampler.set_epoch(0)
    assert ids_of(loader) == trace_of(pod, 0), "handed out whole, it starts over when it is asked for again"


def test_the_length_stays_that_of_a_whole_epoch(dataset_of: DatasetOf) -> None:
    loader, _ = mapped(dataset_of)
    next(iter(loader))
    state = loader.state_dict()
    loader, sampler = mapped(dataset_of)
    loader.load_state_dict(state)
    assert (len(sampler), len(loader), len(list(loader))) == (NUM_SAMPLES, 7, 6)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_drop_last_drops_is_not_left_for_the_next_process(
    pod: FakePod, dataset_of: DatasetOf, num_workers: int
) -> None:
    loader, _ = mapped(dataset_of, drop_last=True, num_workers=num_workers)
    assert len(ids_of(islice(loader, 6))) == 36
    state = loader.state_dict()
    loader, sampler = mapped(dataset_of, batch_size=2)
    loader.load_state_dict(state)
    assert sampler.epoch == 1
    assert ids_of(loader) == trace_of(pod, 1)


@pytest.mark.parametrize("as_sampler", [False, True])
def test_a_batch_sampler_around_the_sampler(pod: FakePod, dataset_of: DatasetOf, as_sampler: bool) -> None:
    def begin() -> Loader:
        dataset = dataset_of()
        batches = BatchSampler(EpochSampler(dataset), 6, drop_last=False)
        if as_sampler:
            loader = DataLoader(dataset, batch_size=None, sampler=batches, collate_fn=list, num_workers=2)
        else:
            loader = DataLoader(dataset, batch_sampler=batches, collate_fn=list, num_workers=2)
        return refill.timed(loader, dataset)

    loader = begin()
    consumed = ids_of(islice(loader, 3))
    state = loader.state_dict()
    loader = begin()
    loader.load_state_dict(state)
    assert consumed + ids_of(loader) == trace_of(pod, 0)


def test_each_rank_goes_on_from_its_own_place(pod: FakePod, dataset_of: DatasetOf) -> None:
    ids, states = [], []
    for rank in range(2):
        loader, _ = mapped(dataset_of, rank=rank, world_size=2)
        ids += ids_of(islice(loader, 1 + rank))
        states.append(loader.state_dict())
    for rank in range(2):
        loader, _ = mapped(dataset_of, rank=rank, world_size=2)
        loader.load_state_dict(states[rank])
        ids += ids_of(loader)
    assert sorted(ids) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize("form", [mapped, iterable])
def test_any_rank_goes_on_from_rank_0s_place(pod: FakePod, dataset_of: DatasetOf, form: Any) -> None:
    """Trainers keep one state, rank 0's, and ranks take their steps together."""
    ids, states = [], []
    for rank in range(2):
        loader, _ = form(dataset_of, rank=rank, world_size=2)
        ids += ids_of(islice(loader, 2))
        states.append(loader.state_dict())
    for rank in range(2):
        loader, _ = form(dataset_of, rank=rank, world_size=2)
        loader.load_state_dict(states[0])
        ids += ids_of(loader)
    assert sorted(ids) == list(range(NUM_SAMPLES))


def test_an_error_in_the_loader_leaves_the_place_before_it(pod: FakePod, dataset_of: DatasetOf) -> None:
    loader, _ = mapped(dataset_of, num_workers=1)
    pod.faults.extend([InvalidInput("no"), InvalidInput("no")])
    with pytest.raises(InvalidInput):
        next(iter(loader))
    assert loader.state_dict()["position"] == 0


def test_a_loop_that_counts_for_itself(pod: FakePod, dataset_of: DatasetOf) -> None:
    sampler = EpochSampler(dataset_of())
    with pytest.raises(InvalidInput, match="can't have consumed 3 samples: its iteration has 0"):
        sampler.state_after(3)
    assert sampler.state_after(0)["position"] == 0
    assert list(islice(sampler, 20))[-1] == Position(0, 19)
    state = sampler.state_after(12)
    sampler = EpochSampler(dataset_of())
    sampler.load_state_dict(state)
    assert list(islice(sampler, 2)) == [Position(0, 12), Position(0, 13)]
    assert sampler.state_after(2)["position"] == 14
    with pytest.raises(InvalidInput, match="can't have consumed 29 samples: its iteration has 28"):
        sampler.state_after(29)


def test_a_sampler_refuses_to_tell_what_the_loop_has_consumed(dataset_of: DatasetOf) -> None:
    with pytest.raises(AttributeError, match=r"use refill\.timed\(loader, dataset\)\.state_dict\(\)"):
        EpochSampler(dataset_of()).state_dict()


class Uneven(BatchSampler):
    """Batches of other sizes than ``batch_size``."""

    def __iter__(self) -> Any:
        yield from ([position] for position in self.sampler)


def test_loaders_whose_batches_do_not_tell_are_refused_and_timed_as_ever(pod: FakePod, dataset_of: DatasetOf) -> None:
    dataset = dataset_of(order="explicit")
    stream = CacheIterableDataset(pod.url, batch_size=4, dataset="file:///data", job="stream")
    sampler = TraceSampler(dataset, range(8), any_order=True)
    for loader, read, why in (
        ((batch for batch in [1, 2]), dataset, "is a generator and no torch DataLoader"),
        (DataLoader(dataset, batch_sampler=Uneven(sampler, 4, False), collate_fn=list), dataset, "an? Uneven may make"),
        (DataLoader(dataset, sampler=[1, 2], collate_fn=list), dataset, "its sampler is a list"),
        (DataLoader(dataset, sampler=sampler, num_workers=1, in_order=False), dataset, "in_order=False"),
        (DataLoader(stream, batch_size=8, num_workers=2), stream, "from runs of 4: give batch_size=4"),
        (DataLoader(stream, batch_size=None, num_workers=2), stream, "give batch_size=4"),
    ):
        timed: Loader = refill.timed(loader, read)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match=why) as caught:
            timed.state_dict()
        assert "\n" not in str(caught.value)
        next(iter(timed))


# --- samplers of one's own ---


def traced(dataset_of: DatasetOf, make: Callable[[], Any]) -> tuple[Loader, TraceSampler]:
    dataset = dataset_of(order="explicit")
    sampler = TraceSampler(dataset, make(), any_order=True)
    loader = DataLoader(dataset, batch_size=6, sampler=sampler, collate_fn=list, num_workers=2)
    return refill.timed(loader, dataset), sampler


@pytest.mark.parametrize("batches", [pytest.param(0, marks=pytest.mark.variant), 3, 7])
@pytest.mark.parametrize(
    "make",
    [
        lambda: RandomSampler(range(NUM_SAMPLES), generator=torch.Generator()),
        pytest.param(
            lambda: WeightedRandomSampler([1.0] * NUM_SAMPLES, NUM_SAMPLES, generator=torch.Generator()),
            marks=pytest.mark.variant,
        ),
        lambda: DistributedSampler(range(NUM_SAMPLES), num_replicas=1, rank=0),  # type: ignore[arg-type]
        pytest.param(lambda: SequentialSampler(range(NUM_SAMPLES)), marks=pytest.mark.variant),
    ],
    ids=["random", "weighted", "distributed", "sequential"],
)
def test_an_order_of_ones_own_goes_on_and_the_next_epochs_are_as_they_would_have_been(
    pod: FakePod, dataset_of: DatasetOf, make: Callable[[], Any], batches: int
) -> None:
    loader, sampler = traced(dataset_of, make)
    uninterrupted = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        uninterrupted.append(ids_of(loader))
    pod.traces.clear()

    loader, sampler = traced(dataset_of, make)
    consumed = ids_of(islice(loader, batches))
    state = stored(loader.state_dict())
    loader, sampler = traced(dataset_of, make)
    loader.load_state_dict(state)
    if sampler.epoch == 0:
        sampler.set_epoch(0)
        consumed += ids_of(loader)
    assert consumed == uninterrupted[0]
    for epoch in (1, 2):
        sampler.set_epoch(epoch)
        assert ids_of(loader) == uninterrupted[epoch]


@pytest.mark.parametrize("batches", [0, 2, 4])
def test_samplers_of_all_ranks_go_on_from_rank_0s_state(pod: FakePod, dataset_of: DatasetOf, batches: int) -> None:
    """Each lists what it would have listed: its own draws, and not those of rank 0."""

    def loader_of(rank: int) -> tuple[Loader, TraceSampler]:
        dataset = dataset_of(order="explicit", rank=rank, world_size=2)
        ids = range(rank, NUM_SAMPLES, 2)
        inner = SubsetRandomSampler(ids, generator=torch.Generator().manual_seed(rank))
        sampler = TraceSampler(dataset, inner)
        return refill.timed(DataLoader(dataset, 5, sampler=sampler, collate_fn=list), dataset), sampler

    states = []
    for rank in range(2):
        loader, sampler = loader_of(rank)
        for epoch in range(2):
            sampler.set_epoch(epoch)
            consumed = ids_of(islice(loader, 4 if epoch == 0 else batches))
        states.append((loader.state_dict(), consumed))
    traces = dict(pod.traces)
    for rank in range(2):
        loader, sampler = loader_of(rank)
        loader.load_state_dict(stored(states[0][0]))
        rest = ids_of(loader) if sampler.epoch == 1 else []
        assert sorted(states[rank][1] + rest) == list(range(rank, NUM_SAMPLES, 2))
        sampler.set_epoch(2)
        assert sorted(ids_of(loader)) == list(range(rank, NUM_SAMPLES, 2))
    for key, trace in traces.items():
        assert pod.traces[key].tolist() == trace.tolist()


def test_an_epoch_under_way_is_not_listed_again(pod: FakePod, dataset_of: DatasetOf) -> None:
    """The wrapped sampler may be unable to give the same ids; the pods have them."""
    loader, _ = traced(dataset_of, lambda: RandomSampler(range(NUM_SAMPLES)))
    consumed = ids_of(islice(loader, 3))
    state = loader.state_dict()
    loader, _ = traced(dataset_of, lambda: RandomSampler(range(NUM_SAMPLES)))
    loader.load_state_dict(state)
    assert sorted(consumed + ids_of(loader)) == list(range(NUM_SAMPLES))
    assert pod.count("PUT trace") == 1


class Curriculum:
    """A sampler that keeps a state: each epoch takes one more sample."""

    def __init__(self) -> None:
        self.level = 7

    def __iter__(self) -> Any:
        self.level += 1
        return iter(range(self.level))

    def state_dict(self) -> dict[str, int]:
        return {"level": self.level}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.level = state["level"]


def test_the_state_of_a_wrapped_sampler_goes_along(dataset_of: DatasetOf) -> None:
    loader, _ = traced(dataset_of, Curriculum)
    next(iter(loader))
    state = loader.state_dict()
    loader, _ = traced(dataset_of, Curriculum)
    loader.load_state_dict(state)
    assert [ids_of(loader), ids_of(loader)] == [[6, 7], list(range(9))]


# --- states that can't be ---


@pytest.fixture
def state(dataset_of: DatasetOf) -> dict[str, Any]:
    loader, _ = mapped(dataset_of, rank=0, world_size=2)
    next(iter(loader))
    found: dict[str, Any] = loader.state_dict()
    return found


def test_a_state_is_small_and_plain(state: dict[str, Any]) -> None:
    assert state == {
        "version": 1,
        "job": "job",
        "dataset": "file:///data",
        "incarnation": "1",
        "world_size": 2,
        "rank": 0,
        "epoch": 0,
        "position": 6,
        "length": 20,
    }


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"job": "another"}, "the state is of job 'another', not 'job'"),
        ({"dataset": "s3://b/x"}, "the state is of dataset 's3://b/x', not 'file:///data'"),
        ({"world_size": 4}, "saved with world_size 4, and this job has 2"),
        ({"position": 21}, "position 21 is past the end of epoch 0, which has 20 positions"),
        ({"length": 30}, "counts 30 samples of rank 0 in an epoch, and there are 20"),
        ({"position": -1}, "position must be a number of at least 0, got -1"),
        ({"position": 1.5}, "position must be a number"),
        ({"epoch": True}, "epoch must be a number"),
        ({"epoch": None}, "epoch must be a number"),
        ({"epoch": 2**31}, "epoch must be"),
        ({"job": 3}, "job must be a text"),
        ({"version": 2}, "the state has version 2, and this refill reads version 1"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_wrong_states_are_refused_in_one_line(
    dataset_of: DatasetOf, state: dict[str, Any], change: dict[str, Any], why: str
) -> None:
    loader, sampler = mapped(dataset_of, rank=0, world_size=2)
    with pytest.raises(InvalidInput, match=why) as caught:
        loader.load_state_dict(state | change)
    assert "\n" not in str(caught.value)
    assert next(iter(sampler)) == Position(0, 0), "what is refused changes nothing"


@pytest.mark.parametrize(
    ("garbage", "why"),
    [
        (None, "got NoneType"),
        ([1, 2], "got list"),
        ({}, "has no 'version'"),
        ({"version": 1}, "job must be a text, got None"),
        ({"_snapshot": {}}, "of torchdata's StatefulDataLoader: load it there"),
    ],
)
def test_what_is_no_state_is_refused(dataset_of: DatasetOf, garbage: Any, why: str) -> None:
    loader, _ = mapped(dataset_of)
    with pytest.raises(InvalidInput, match=why):
        loader.load_state_dict(garbage)
    stream, _ = iterable(dataset_of)
    with pytest.raises(InvalidInput, match=why):
        stream.load_state_dict(garbage)


def test_a_state_is_not_loaded_within_the_loop(dataset_of: DatasetOf) -> None:
    loader, _ = mapped(dataset_of)
    state = loader.state_dict()
    for _ in loader:
        with pytest.raises(InvalidInput, match="before the loop begins"):
            loader.load_state_dict(state)
    loader.load_state_dict(state)


def test_pods_that_lost_the_job_can_not_go_on_midway(pod: FakePod, dataset_of: DatasetOf) -> None:
    states = []
    loader, _ = mapped(dataset_of)
    for _ in loader:
        states.append(loader.state_dict())
    pod.incarnation = "2"
    loader, sampler = mapped(dataset_of)
    with pytest.raises(JobLost, match=r"registered anew since the state was saved.*set_epoch\(0\) starts it over"):
        loader.load_state_dict(states[2])
    loader.load_state_dict(states[-1])
    assert sampler.epoch == 1, "at the end of an epoch there is nothing to know"


def test_a_fixed_order_goes_on_whatever_the_pods_know(pod: FakePod, dataset_of: DatasetOf) -> None:
    loader, _ = mapped(dataset_of, shuffle=False)
    consumed = ids_of(islice(loader, 2))
    state = loader.state_dict()
    pod.incarnation = "2"
    loader, _ = mapped(dataset_of, shuffle=False)
    loader.load_state_dict(state)
    assert consumed + ids_of(loader) == list(range(NUM_SAMPLES))


# --- torchdata's StatefulDataLoader ---


def stateful(dataset_of: DatasetOf, **arguments: Any) -> tuple[StatefulDataLoader, EpochSampler]:
    dataset = dataset_of()
    sampler = EpochSampler(dataset)
    arguments = {"batch_size": 6, "sampler": sampler, "collate_fn": list} | arguments
    return StatefulDataLoader(dataset, **arguments), sampler


def stateful_iterable(
    dataset_of: DatasetOf, batch_size: int = 6, **arguments: Any
) -> tuple[StatefulDataLoader, CacheIterableDataset]:
    _, dataset = iterable(dataset_of)
    return StatefulDataLoader(dataset, batch_size=batch_size, collate_fn=list, **arguments), dataset


STATEFUL_FORMS = pytest.mark.parametrize("form", [stateful, stateful_iterable], ids=["map-style", "iterable"])


@STATEFUL_FORMS
@pytest.mark.parametrize("workers", WORKERS, ids=WORKER_NAMES)
@pytest.mark.parametrize("batches", [0, pytest.param(1, marks=pytest.mark.variant), 4, 7, 8])
def test_a_stateful_loader_goes_on(
    pod: FakePod, dataset_of: DatasetOf, form: Any, workers: dict[str, Any], batches: int
) -> None:
    """8 batches: the loop is over, 7: it has the last batch."""
    loader, epochs = form(dataset_of, **workers)
    epochs.set_epoch(3)
    consumed = ids_of(islice(loader, batches))
    state = stored(loader.state_dict())
    del loader

    loader, epochs = form(dataset_of, **workers)
    loader.load_state_dict(state)
    if batches < 8:
        epochs.set_epoch(3)
        assert consumed + ids_of(loader) == trace_of(pod, 3)
    for epoch in (4, 5):
        epochs.set_epoch(epoch)
        assert ids_of(loader) == trace_of(pod, epoch)


@pytest.mark.parametrize("workers", WORKERS, ids=WORKER_NAMES)
def test_a_stateful_loader_needs_no_set_epoch(pod: FakePod, dataset_of: DatasetOf, workers: dict[str, Any]) -> None:
    for batches, epoch in ((4, 1), (8, 2)):
        loader, sampler = stateful(dataset_of, **workers)
        sampler.set_epoch(1)
        consumed = ids_of(islice(loader, batches))
        state = loader.state_dict()
        loader, sampler = stateful(dataset_of, **workers)
        loader.load_state_dict(state)
        rest = ids_of(loader)
        assert (consumed if epoch == 1 else []) + rest == trace_of(pod, epoch)
        assert ids_of(loader) == trace_of(pod, epoch + 1)


@STATEFUL_FORMS
@pytest.mark.parametrize("every", [3, 100])
def test_a_stateful_loader_with_rare_snapshots(pod: FakePod, dataset_of: DatasetOf, form: Any, every: int) -> None:
    loader, _ = form(dataset_of, num_workers=2, snapshot_every_n_steps=every)
    consumed = ids_of(islice(loader, 5))
    state = loader.state_dict()
    loader, _ = form(dataset_of, num_workers=2, snapshot_every_n_steps=every)
    loader.load_state_dict(state)
    assert consumed + ids_of(loader) == trace_of(pod, 0)


def test_a_stateful_loader_whose_batches_are_other_than_the_runs(pod: FakePod, dataset_of: DatasetOf) -> None:
    loader, _ = stateful_iterable(dataset_of, batch_size=4, num_workers=3)
    whole = ids_of(loader)
    assert sorted(whole) == list(range(NUM_SAMPLES))
    for batches in range(11):
        loader, _ = stateful_iterable(dataset_of, batch_size=4, num_workers=3)
        consumed = ids_of(islice(loader, batches))
        state = loader.state_dict()
        loader, _ = stateful_iterable(dataset_of, batch_size=4, num_workers=3)
        loader.load_state_dict(state)
        assert consumed + ids_of(loader) == whole


def test_a_stateful_loader_and_its_batch_sampler(pod: FakePod, dataset_of: DatasetOf) -> None:
    def begin() -> StatefulDataLoader:
        dataset = dataset_of()
        batches = StatefulBatchSampler(EpochSampler(dataset), 6, False)
        return StatefulDataLoader(dataset, batch_sampler=batches, collate_fn=list, num_workers=2)

    loader = begin()
    consumed = ids_of(islice(loader, 3))
    state = loader.state_dict()
    loader = begin()
    loader.load_state_dict(state)
    assert consumed + ids_of(loader) == trace_of(pod, 0)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("batches", [0, 3, 8])
def test_a_stateful_loader_and_an_order_of_ones_own(
    pod: FakePod, dataset_of: DatasetOf, num_workers: int, batches: int
) -> None:
    def begin() -> StatefulDataLoader:
        dataset = dataset_of(order="explicit")
        sampler = TraceSampler(dataset, RandomSampler(range(NUM_SAMPLES), generator=torch.Generator()))
        return StatefulDataLoader(dataset, batch_size=6, sampler=sampler, collate_fn=list, num_workers=num_workers)

    loader = begin()
    consumed = ids_of(islice(loader, batches))
    state = loader.state_dict()
    loader = begin()
    loader.load_state_dict(state)
    rest = ids_of(loader)
    assert sorted(rest if batches == 8 else consumed + rest) == list(range(NUM_SAMPLES))
    assert (("job", 1, 0) in pod.traces) == (batches == 8)


def test_a_stateful_loader_is_timed_with_its_own_state(pod: FakePod, dataset_of: DatasetOf) -> None:
    def begin() -> Loader:
        loader, sampler = stateful(dataset_of, num_workers=2)
        return refill.timed(loader, sampler.dataset)

    loader = begin()
    consumed = ids_of(islice(loader, 3))
    state = loader.state_dict()
    assert "_snapshot" in state
    loader = begin()
    loader.load_state_dict(state)
    assert consumed + ids_of(loader) == trace_of(pod, 0)


def test_a_stateful_iterable_loader_goes_on_with_as_many_workers_only(dataset_of: DatasetOf) -> None:
    loader, _ = stateful_iterable(dataset_of, num_workers=2)
    next(iter(loader))
    state = loader.state_dict()
    loader, _ = stateful_iterable(dataset_of, num_workers=1)
    loader.load_state_dict(state)
    with pytest.raises(InvalidInput, match="of a StatefulDataLoader with 2 workers, and it goes on with as many only"):
        next(iter(loader))


def test_a_stateful_loader_refuses_the_state_of_another_job(dataset_of: DatasetOf) -> None:
    loader, _ = stateful(dataset_of)
    next(iter(loader))
    state = loader.state_dict()
    dataset = dataset_of(job="another")
    other = StatefulDataLoader(dataset, batch_size=6, sampler=EpochSampler(dataset), collate_fn=list)
    other.load_state_dict(state)
    with pytest.raises(InvalidInput, match="the state is of job 'job', not 'another'"):
        next(iter(other))
