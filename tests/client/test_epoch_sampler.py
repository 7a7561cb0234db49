"""The samplers: as torch's DistributedSampler where they take its place, and epochs that follow one another."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
from tests.client.conftest import NUM_SAMPLES
from tests.client.fake_pod import FakePod
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)

from refill import CacheDataset, EpochSampler, Position, TraceSampler
from refill.errors import InvalidInput, JobConflict

DatasetOf = Callable[..., CacheDataset]


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 41])
@pytest.mark.parametrize("drop_last", [False, True])
def test_it_takes_the_arguments_of_distributed_sampler_and_has_its_length(
    dataset_of: DatasetOf, world_size: int, drop_last: bool
) -> None:
    arguments: dict[str, Any] = {"num_replicas": world_size, "rank": world_size - 1, "drop_last": drop_last}
    dataset = dataset_of()
    sampler = EpochSampler(dataset, shuffle=True, seed=3, **arguments)
    torchs: DistributedSampler[int] = DistributedSampler(range(NUM_SAMPLES), **arguments)  # type: ignore[arg-type]
    assert len(sampler) == len(list(sampler)) == len(torchs)
    assert dataset.rank == world_size - 1


def test_both_samplers_are_distributed_samplers_by_type(dataset_of: DatasetOf) -> None:
    """So that trainers which wrap every other sampler leave them as they are."""
    sampler = EpochSampler(dataset_of(), num_replicas=3, rank=1, seed=4)
    assert isinstance(sampler, DistributedSampler)
    torchs: DistributedSampler[int] = DistributedSampler(range(NUM_SAMPLES), 3, 1, seed=4)  # type: ignore[arg-type]
    for name in ("num_replicas", "rank", "epoch", "drop_last", "num_samples", "total_size", "shuffle", "seed"):
        assert getattr(sampler, name) == getattr(torchs, name), name
    assert isinstance(
        TraceSampler(dataset_of(job="other", order="explicit"), RandomSampler(range(9))), DistributedSampler
    )


def test_what_the_sampler_is_given_is_the_jobs(pod: FakePod, dataset_of: DatasetOf) -> None:
    EpochSampler(dataset_of(), 2, 1, False, 5, True)
    spec = pod.jobs["job"]
    assert (spec.world_size, spec.shuffle, spec.seed, spec.drop_last) == (2, False, 5, True)


def test_what_it_is_not_given_is_the_datasets(pod: FakePod, dataset_of: DatasetOf) -> None:
    EpochSampler(dataset_of(rank=1, world_size=2, seed=5, shuffle=False, drop_last=True))
    spec = pod.jobs["job"]
    assert (spec.world_size, spec.shuffle, spec.seed, spec.drop_last) == (2, False, 5, True)


@pytest.mark.parametrize(
    ("of_dataset", "of_sampler"),
    [
        ({"seed": 1}, {"seed": 2}),
        ({"shuffle": True}, {"shuffle": False}),
        ({"drop_last": False}, {"drop_last": True}),
        ({"world_size": 2, "rank": 0}, {"num_replicas": 3}),
        ({"world_size": 2, "rank": 0}, {"rank": 1}),
        ({"order": "explicit"}, {}),
    ],
)
def test_contradictions_are_refused_in_one_line(
    pod: FakePod, dataset_of: DatasetOf, of_dataset: dict[str, Any], of_sampler: dict[str, Any]
) -> None:
    with pytest.raises(InvalidInput, match="contradicts the dataset, whose job job has") as caught:
        EpochSampler(dataset_of(**of_dataset), **of_sampler)
    assert "\n" not in str(caught.value)
    assert pod.requests == []


def test_settings_are_fixed_by_the_first_use(dataset_of: DatasetOf) -> None:
    dataset = dataset_of()
    len(dataset)
    EpochSampler(dataset, shuffle=True, seed=0)
    with pytest.raises(InvalidInput, match="give shuffle=False to CacheDataset"):
        EpochSampler(dataset, shuffle=False)


def test_a_refused_setting_leaves_the_dataset_as_it_was(dataset_of: DatasetOf) -> None:
    dataset = dataset_of()
    with pytest.raises(InvalidInput, match="rank 5"):
        EpochSampler(dataset, num_replicas=2, rank=5)
    assert len(EpochSampler(dataset)) == NUM_SAMPLES


def test_another_run_under_the_same_name_is_refused(dataset_of: DatasetOf) -> None:
    EpochSampler(dataset_of(seed=1))
    with pytest.raises(JobConflict):
        EpochSampler(dataset_of(seed=2))


def epochs_of(sampler: EpochSampler | TraceSampler) -> set[int]:
    return {position.epoch for position in sampler}


def test_without_set_epoch_each_whole_iteration_is_the_next_epoch(dataset_of: DatasetOf) -> None:
    sampler = EpochSampler(dataset_of())
    assert [epochs_of(sampler) for _ in range(3)] == [{0}, {1}, {2}]
    sampler.set_epoch(7)
    assert [epochs_of(sampler), epochs_of(sampler)] == [{7}, {8}]
    sampler.set_epoch(8)
    assert epochs_of(sampler) == {8}
    assert sampler.epoch == 8


def test_an_epoch_that_was_broken_off_begins_again(dataset_of: DatasetOf) -> None:
    sampler = EpochSampler(dataset_of())
    assert list(islice(sampler, 2)) == [Position(0, 0), Position(0, 1)]
    assert len(list(islice(sampler, NUM_SAMPLES))) == NUM_SAMPLES
    assert next(iter(sampler)) == Position(1, 0), "all positions were handed out"


def first_of(sampler: EpochSampler, times: int) -> int:
    """How many warnings come when a loop takes the first samples so often, as ``zip`` of two loaders and ``islice``
    do."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(times):
            assert len(list(islice(sampler, 5))) == 5
    return sum("call set_epoch(epoch) before each epoch" in str(each.message) for each in said)


def test_a_loop_that_has_the_first_samples_again_and_again_is_told(dataset_of: DatasetOf) -> None:
    sampler = EpochSampler(dataset_of())
    assert first_of(sampler, 2) == 0, "somebody looks at a batch, or made a mistake"
    assert first_of(sampler, 1) == 1
    assert first_of(sampler, 10) == 0, "once"
    for epoch in (0, 0, 0, 0, 1, 2):
        sampler.set_epoch(epoch)
        assert first_of(sampler, 1) == 0, "it was said"
    list(sampler)
    assert first_of(sampler, 2) == 0, "another epoch"
    assert first_of(EpochSampler(dataset_of(job="in-order"), shuffle=False), 5) == 0, "as in a short validation"


@pytest.mark.parametrize("epoch", [-1, 2**31, 1.5, True, "3", None])
def test_an_epoch_that_can_not_be_is_refused(dataset_of: DatasetOf, epoch: Any) -> None:
    with pytest.raises(InvalidInput, match=f"epoch must be 0 to 2147483647, got {epoch!r}"):
        EpochSampler(dataset_of()).set_epoch(epoch)


def test_an_epoch_may_be_a_number_of_numpy(dataset_of: DatasetOf) -> None:
    sampler = EpochSampler(dataset_of())
    sampler.set_epoch(np.int64(3))  # type: ignore[arg-type]
    assert epochs_of(sampler) == {3}


def test_a_sampler_of_ones_own_is_posted_and_served(pod: FakePod, dataset_of: DatasetOf) -> None:
    dataset = dataset_of()
    subset = list(range(0, NUM_SAMPLES, 3))
    sampler = TraceSampler(dataset, SubsetRandomSampler(subset))
    loader = DataLoader(dataset, batch_size=4, sampler=sampler, collate_fn=list, num_workers=2)
    assert len(loader) == 4
    for epoch in range(2):
        ids = [sample["__id__"] for batch in loader for sample in batch]
        assert sorted(ids) == subset
        assert pod.traces["job", epoch, 0].tolist() == ids
    assert pod.count("POST batch") == 8
    assert pod.count("PUT trace") == 2


def test_each_rank_posts_its_own_and_set_epoch_reaches_the_inner_sampler(pod: FakePod, dataset_of: DatasetOf) -> None:
    ids = []
    for rank in range(2):
        dataset = dataset_of(rank=rank, world_size=2, order="explicit")
        inner: DistributedSampler[int] = DistributedSampler(dataset, num_replicas=2, rank=rank, seed=4)
        sampler = TraceSampler(dataset, inner)
        sampler.set_epoch(3)
        assert inner.epoch == 3
        ids += [dataset[position]["__id__"] for position in sampler]
    assert sorted(ids) == list(range(NUM_SAMPLES))


def test_a_sampler_that_asks_for_the_length_needs_no_setting(dataset_of: DatasetOf) -> None:
    dataset = dataset_of()
    sampler = TraceSampler(dataset, RandomSampler(dataset))
    assert sorted(batch["__id__"] for batch in DataLoader(dataset, None, sampler=sampler)) == list(range(NUM_SAMPLES))


def test_after_a_sample_was_read_it_is_told_what_to_do(dataset_of: DatasetOf) -> None:
    dataset = dataset_of()
    inner = RandomSampler(dataset)
    dataset[0]
    with pytest.raises(InvalidInput, match="give order='explicit' to CacheDataset"):
        TraceSampler(dataset, inner)


def test_it_works_inside_a_batch_sampler(pod: FakePod, dataset_of: DatasetOf) -> None:
    dataset = dataset_of(order="explicit")
    batches = BatchSampler(TraceSampler(dataset, SequentialSampler(range(10)), any_order=True), 5, drop_last=True)
    loader = DataLoader(dataset, batch_sampler=batches, collate_fn=list)
    assert [[sample["__id__"] for sample in batch] for batch in loader] == [list(range(5)), list(range(5, 10))]


class Countdown(Iterator[int]):
    """Begins anew each time that somebody iterates it."""

    def __iter__(self) -> Countdown:
        self.left = 10
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        self.left -= 1
        return self.left


def test_a_generator_is_refused_since_its_second_epoch_would_be_empty(dataset_of: DatasetOf) -> None:
    dataset = dataset_of(order="explicit")
    for of_one_epoch in ((number for number in range(10)), iter([1, 2]), map(int, "12")):
        with pytest.raises(InvalidInput, match="for one only: give a list, or an object whose __iter__ begins anew"):
            TraceSampler(dataset, of_one_epoch)
    sampler = TraceSampler(dataset, Countdown(), any_order=True)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert [each.position for each in sampler] == list(range(10)), f"epoch {epoch}"


@pytest.mark.parametrize(("ids", "why"), [([0, 40], "no sample 40"), ([-1], "no sample -1"), ([[1, 2]], "one by one")])
def test_wrong_ids_are_refused_before_they_are_posted(
    pod: FakePod, dataset_of: DatasetOf, ids: list[Any], why: str
) -> None:
    with pytest.raises(InvalidInput, match=why):
        next(iter(TraceSampler(dataset_of(), ids, any_order=True)))
    assert pod.count("PUT trace") == 0


def test_a_list_of_everything_in_each_rank_is_warned_of(dataset_of: DatasetOf) -> None:
    whole = range(NUM_SAMPLES)
    with pytest.warns(
        UserWarning, match="all 40 samples, and each of 2 ranks asks for its own list: each sample comes 2"
    ):
        TraceSampler(dataset_of(rank=0, world_size=2), RandomSampler(whole))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        TraceSampler(dataset_of(job="one"), RandomSampler(whole))
        TraceSampler(dataset_of(job="other", rank=0, world_size=2), RandomSampler(whole, replacement=True))
        TraceSampler(dataset_of(job="parts", rank=0, world_size=2), DistributedSampler(whole, 2, 0))  # type: ignore[arg-type]


class Indexed(Dataset[Any]):
    """What people write around a dataset."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


@pytest.mark.parametrize(
    "around",
    [
        lambda dataset: dataset,
        lambda dataset: Subset(dataset, range(9)),
        lambda dataset: ConcatDataset([dataset, dataset]),
        Indexed,
    ],
    ids=["alone", "Subset", "ConcatDataset", "own"],
)
def test_a_sampler_in_the_place_of_a_batch_sampler(dataset_of: DatasetOf, around: Callable[[Any], Any]) -> None:
    """A batch would be the samples whose ids are the epoch and the position."""
    dataset = dataset_of()
    loader: DataLoader[Any] = DataLoader(around(dataset), batch_sampler=EpochSampler(dataset), collate_fn=list)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="give it sampler= and batch_size=, not batch_sampler="):
        next(iter(loader))


def test_positions_are_copied_and_sent() -> None:
    position = Position(3, 7, 1, -1, 5, 2)
    for copied in (copy.copy(position), copy.deepcopy(position), pickle.loads(pickle.dumps(position))):
        assert isinstance(copied, Position)
        assert copied[:] == (3, 7, 1, -1, 5, 2)
