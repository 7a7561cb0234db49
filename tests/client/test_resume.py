"""Checkpoints of the loop: a process that loads one gets the samples that the other had not, each once."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tests.client.conftest import NUM_SAMPLES
from tests.client.fake_pod import FakePod
from tests.client.loops import (
    FORMS,
    DatasetOf,
    Loader,
    fails_in_a_worker,
    ids_of,
    iterable,
    mapped,
    stored,
    trace_of,
    worker_places,
)
from tests.draws import draws
from torch.utils.data import BatchSampler, DataLoader

import refill
from refill import CacheIterableDataset, EpochSampler, Position, TraceSampler
from refill.errors import InvalidInput


@pytest.mark.variants("two workers-4-iterable", "two workers-7-map-style", "three persistent workers-4-map-style")
@FORMS
@pytest.mark.parametrize(("workers", "batches"), worker_places(0, 4, 1, 6, 7))
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
@draws(30, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
def test_a_look_or_a_pass_within_a_loop_leaves_its_place(pod: FakePod, dataset_of: DatasetOf, form: Any) -> None:
    """As loops do that log pictures, or the accuracy on the training set."""
    loader, epochs = form(dataset_of, num_workers=2)
    epochs.set_epoch(3)
    consumed = []
    for number, batch in enumerate(loader):
        consumed += ids_of([batch])
        if number == 1:
            next(iter(loader))
        if number == 2:
            list(loader)
        assert loader.state_dict()["position"] == len(consumed)
        if number == 4:
            break
    state = stored(loader.state_dict())
    loader, epochs = form(dataset_of)
    loader.load_state_dict(state)
    assert consumed + ids_of(loader) == trace_of(pod, 3)


@FORMS
def test_an_iterator_that_is_kept_after_a_look_is_no_loop(dataset_of: DatasetOf, form: Any) -> None:
    for batches, sets_epoch in ((1, False), (3, True)):
        loader, epochs = form(dataset_of)
        kept = iter(loader)
        for _ in range(batches):
            next(kept)
        if sets_epoch:
            epochs.set_epoch(0)
        for _ in islice(loader, 5):
            assert loader.state_dict()["epoch"] == 0
        assert loader.state_dict()["position"] == 30, "of the loop that began last"
        del kept
        assert loader.state_dict()["position"] == 30
        loader.load_state_dict(loader.state_dict())


def test_a_loop_whose_persistent_workers_begin_anew_is_told(dataset_of: DatasetOf) -> None:
    loader, _ = mapped(dataset_of, num_workers=1, persistent_workers=True)
    batches = iter(loader)
    next(batches)
    next(iter(loader))
    with pytest.warns(UserWarning, match="goes on with batches of another iteration: with persistent_workers a"):
        next(batches)
    assert loader.state_dict()["position"] == 12, "what the loader gives next, as its workers began anew"


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


@pytest.mark.parametrize("is_timed", [True, False])
def test_a_look_near_the_end_does_not_lose_it_though_workers_fetch_the_rest(
    pod: FakePod, dataset_of: DatasetOf, is_timed: bool
) -> None:
    loader, _ = mapped(dataset_of)
    consumed = ids_of(islice(loader, 5))
    state = loader.state_dict()
    loader, sampler = mapped(dataset_of, num_workers=2)
    sampler.load_state_dict(state)
    plain: Any = DataLoader(sampler.dataset, 6, sampler=sampler, collate_fn=list, num_workers=2)
    loop = loader if is_timed else plain
    next(iter(loop))
    sampler.set_epoch(0)
    assert consumed + ids_of(loop) == trace_of(pod, 0)
    sampler.set_epoch(0)
    assert ids_of(loop) == trace_of(pod, 0), "the loop has had it: it starts over when it is asked for again"


def test_a_loop_that_is_broken_off_near_the_end_gets_its_epoch_again(pod: FakePod, dataset_of: DatasetOf) -> None:
    loader, _ = mapped(dataset_of, num_workers=2)
    ids_of(islice(loader, 5))
    assert ids_of(loader) == trace_of(pod, 0)
    assert ids_of(islice(loader, 7)) == trace_of(pod, 1)
    assert ids_of(loader) == trace_of(pod, 2), "all of its batches are an epoch"


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
    with fails_in_a_worker():
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
    stream = CacheIterableDataset(pod.url, batch_size=4, dataset="file:///data", job="stream", policy="redox")
    sampler = TraceSampler(dataset, range(8), any_order=True)
    instead = r"give it a DataLoader with sampler=refill\.EpochSampler\(dataset\)"
    for loader, read, why in (
        ((batch for batch in [1, 2]), dataset, f"is a generator and no torch DataLoader; {instead}"),
        (DataLoader(dataset, batch_sampler=Uneven(sampler, 4, False), collate_fn=list), dataset, "an? Uneven may make"),
        (DataLoader(dataset, sampler=[1, 2], collate_fn=list), dataset, f"its sampler is a list.*; {instead}"),
        (DataLoader(dataset, sampler=sampler, num_workers=1, in_order=False), dataset, "in_order=False"),
        (DataLoader(stream, batch_size=8, num_workers=2), stream, "from runs of 4: give batch_size=4"),
        (DataLoader(stream, batch_size=None, num_workers=2), stream, "give batch_size=4"),
    ):
        timed: Loader = refill.timed(loader, read)  # type: ignore[arg-type]
        with pytest.raises(InvalidInput, match=why) as caught:
            timed.state_dict()
        assert "\n" not in str(caught.value)
        next(iter(timed))
