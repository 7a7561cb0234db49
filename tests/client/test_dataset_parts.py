"""Subset and random_split around a CacheDataset: which samples a sampler of a part hands out, and what it refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.client.conftest import NUM_SAMPLES
from tests.client.fake_pod import FakePod
from torch.utils.data import ConcatDataset, DataLoader, Dataset, DistributedSampler, Subset, random_split

import refill
from refill import CacheDataset, EpochSampler, TraceSampler
from refill.errors import InvalidInput

DatasetOf = Callable[..., CacheDataset]
PART = [3, 1, 4, 15, 9, 2, 6, 5, 35, 8, 38]


def ids_of(part: Any, sampler: Any, **settings: Any) -> list[int]:
    loader = DataLoader(part, batch_size=4, sampler=sampler, collate_fn=list, **settings)
    return [sample["__id__"] for batch in loader for sample in batch]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_subset_comes_once_an_epoch_by_one_request_a_batch(pod: FakePod, dataset_of: DatasetOf, workers: int) -> None:
    part = Subset(dataset_of(), PART)
    sampler = EpochSampler(part)
    orders = []
    for _ in range(3):
        orders.append(ids_of(part, sampler, num_workers=workers))
        assert sorted(orders[-1]) == sorted(PART)
    assert len({tuple(order) for order in orders}) == 3, "each epoch is another order"
    assert pod.count("POST batch") == 9
    assert pod.count("POST samples") == 0


def test_the_whole_dataset_is_no_job_until_it_is_read(pod: FakePod, dataset_of: DatasetOf) -> None:
    dataset = dataset_of()
    parts = random_split(dataset, [0.75, 0.25])
    assert (len(dataset), pod.jobs) == (NUM_SAMPLES, {}), "to ask for a length registers nothing"
    samplers = [EpochSampler(part) for part in parts]
    for part, sampler in zip(parts, samplers, strict=True):
        assert len(ids_of(part, sampler)) == len(part)
    assert set(pod.jobs) == {sampler.dataset.job for sampler in samplers}
    dataset[3]
    assert set(pod.jobs) == {sampler.dataset.job for sampler in samplers} | {"job"}


@pytest.mark.variants("25-False")
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", [1, 3, 4, 25])
def test_ranks_divide_a_part_as_distributed_sampler_does(
    dataset_of: DatasetOf, world_size: int, drop_last: bool
) -> None:
    given: Counter[int] = Counter()
    for rank in range(world_size):
        part = Subset(dataset_of(), PART)
        sampler = EpochSampler(part, world_size, rank, drop_last=drop_last)
        torchs: DistributedSampler[Any] = DistributedSampler(part, world_size, rank, drop_last=drop_last)
        ids = ids_of(part, sampler)
        assert len(ids) == len(sampler) == len(torchs)
        assert (sampler.num_samples, sampler.total_size) == (torchs.num_samples, torchs.total_size)
        given.update(ids)
    if drop_last:
        assert max(given.values(), default=1) == 1
        assert sum(given.values()) == len(PART) // world_size * world_size
    else:
        assert set(given) == set(PART)
        assert sum(given.values()) == -(-len(PART) // world_size) * world_size


def test_without_shuffling_a_part_comes_as_it_was_listed(dataset_of: DatasetOf) -> None:
    part = Subset(dataset_of(), PART)
    assert ids_of(part, EpochSampler(part, shuffle=False)) == PART
    assert ids_of(part, EpochSampler(part, shuffle=False)) == PART, "a second sampler of the same part"


@pytest.mark.parametrize("indices", [np.array([7, -1, 0]), torch.tensor([7, 39, 0]), range(3), (5, 5, 6), []])
def test_indices_may_be_of_any_kind(dataset_of: DatasetOf, indices: Any) -> None:
    part = Subset(dataset_of(), indices)
    expected = [int(index) % NUM_SAMPLES for index in indices]
    assert ids_of(part, EpochSampler(part, shuffle=False)) == expected


def test_parts_of_parts_and_folds_put_together(dataset_of: DatasetOf) -> None:
    dataset = dataset_of()
    first, rest = random_split(dataset, [10, 30], generator=torch.Generator().manual_seed(3))
    expected = [rest.indices[index] for index in (2, 4, 29, -1)]
    inner = Subset(rest, [2, 4, 29, -1])
    assert ids_of(inner, EpochSampler(inner, shuffle=False)) == expected
    EpochSampler(rest)
    of_one_that_is_read = Subset(rest, [2, 4, 29, -1])
    assert ids_of(of_one_that_is_read, EpochSampler(of_one_that_is_read, shuffle=False)) == expected
    both = Subset(dataset, [*first.indices, *rest.indices])
    assert sorted(ids_of(both, EpochSampler(both))) == list(range(NUM_SAMPLES))


def test_each_part_is_a_job_of_its_own_whose_name_follows_from_its_samples(pod: FakePod, dataset_of: DatasetOf) -> None:
    dataset = dataset_of()
    train, held_out = random_split(dataset, [0.75, 0.25], generator=torch.Generator().manual_seed(3))
    samplers = [EpochSampler(train, seed=7), EpochSampler(held_out, seed=8)]
    jobs = [sampler.dataset.job for sampler in samplers]
    assert all(job.startswith("job-part-") for job in jobs)
    assert [pod.jobs[job].seed for job in jobs] == [7, 8]
    in_turns = zip(ids_of(train, samplers[0])[:10], ids_of(held_out, samplers[1]), strict=True)
    assert not {sample for sample, _ in in_turns} & set(held_out.indices)
    again, _ = random_split(dataset_of(), [0.75, 0.25], generator=torch.Generator().manual_seed(3))
    assert EpochSampler(again, seed=7).dataset.job == jobs[0], "in another process"
    dataset.end_job()
    assert pod.jobs == {}, "all have ended"


def test_a_trace_of_a_part_counts_its_samples_from_0(dataset_of: DatasetOf) -> None:
    part = Subset(dataset_of(), PART)
    drawn = [0, 0, 10, 4]
    assert ids_of(part, TraceSampler(part, drawn, any_order=True)) == [PART[index] for index in drawn]
    with pytest.raises(InvalidInput, match="there is no sample 11; the dataset has samples 0 to 10"):
        ids_of(part, TraceSampler(part, [11], any_order=True))


def test_plain_integers_are_samples_of_the_part(dataset_of: DatasetOf) -> None:
    part = Subset(dataset_of(), PART)
    before = [part[2]["__id__"], [sample["__id__"] for sample in part.__getitems__([0, -1])]]
    EpochSampler(part)
    assert [part[2]["__id__"], [sample["__id__"] for sample in part.__getitems__([0, -1])]] == before == [4, [3, 38]]
    assert len(part) == len(PART)


def test_a_loop_over_a_part_goes_on_from_its_state_in_another_process(dataset_of: DatasetOf) -> None:
    def loop_of() -> tuple[Any, Subset[Any]]:
        dataset = dataset_of()
        part = Subset(dataset, PART)
        loader = DataLoader(part, batch_size=4, sampler=EpochSampler(part), collate_fn=list)
        return refill.timed(loader, dataset), part

    loop, _ = loop_of()
    first = [sample["__id__"] for sample in next(iter(loop))]
    state = loop.state_dict()
    resumed, _ = loop_of()
    resumed.load_state_dict(state)
    rest = [sample["__id__"] for batch in resumed for sample in batch]
    assert sorted(first + rest) == sorted(PART)
    assert sorted(sample["__id__"] for batch in resumed for sample in batch) == sorted(PART), "the next epoch"


def test_the_state_of_one_part_is_not_taken_for_anothers(dataset_of: DatasetOf) -> None:
    train, held_out = random_split(dataset_of(), [30, 10])
    state = EpochSampler(train).state_after(0)
    with pytest.raises(InvalidInput, match=r"the state is of job 'job-part-\w+', not 'job-part-\w+'"):
        EpochSampler(held_out).load_state_dict(state)


class Wrapper(Dataset[Any]):
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getitem__(self, index: Any) -> Any:
        return self.inner[index]


@pytest.mark.parametrize(
    ("around", "says"),
    [
        (lambda dataset: ConcatDataset([dataset, dataset]), r"can't read a ConcatDataset: make one Subset\(dataset, "),
        (
            lambda dataset: Subset(ConcatDataset([dataset]), [1]),
            r"can't read a ConcatDataset: .* DataLoader of its own",
        ),
        (Wrapper, "a torch Subset of one, not a Wrapper: if that wraps a dataset, give the sampler what is inside"),
        (lambda dataset: Subset(dataset, [1, 40]), "the Subset has index 40, and what it is of has 40 samples"),
        (lambda dataset: Subset(dataset, [1.5]), "the indices of the Subset must be whole numbers"),  # type: ignore[list-item]
    ],
)
def test_what_can_not_be_read_is_said_in_one_line(
    dataset_of: DatasetOf, around: Callable[[CacheDataset], Any], says: str
) -> None:
    for make in (EpochSampler, lambda dataset: TraceSampler(dataset, [0], any_order=True)):
        with pytest.raises(InvalidInput, match=says):
            make(around(dataset_of()))


def test_samplers_that_compose_a_whole_dataset_refuse_a_part(dataset_of: DatasetOf) -> None:
    part = Subset(dataset_of(), PART)
    for make in (
        lambda: refill.BucketSampler(part, 4),  # type: ignore[arg-type]
        lambda: refill.ClassBalancedSampler(part, 4),  # type: ignore[arg-type]
        lambda: refill.ImportanceSampler(part),  # type: ignore[arg-type]
    ):
        with pytest.raises(
            InvalidInput, match=r"Sampler reads a whole CacheDataset, not a Subset: EpochSampler and Trace"
        ):
            make()


def test_a_loader_and_a_sampler_that_do_not_belong_together_are_an_error(dataset_of: DatasetOf) -> None:
    """Each would else be given samples of the other's, or end in an error that names neither."""
    dataset = dataset_of()
    train, held_out = random_split(dataset, [30, 10])
    of_train, of_held_out = EpochSampler(train), EpochSampler(held_out)
    for loaded, sampler, says in (
        (train, of_held_out, r"the DataLoader reads job job-part-\w+, and its sampler is one of another job"),
        (dataset, of_train, "the DataLoader reads job job, and its sampler is one of another job"),
        (ConcatDataset([train, held_out]), of_train, "no index: .* A ConcatDataset can't be read by one"),
        (Subset(dataset, PART), EpochSampler(dataset), "no index: make the sampler of what the DataLoader reads"),
    ):
        with pytest.raises(InvalidInput, match=says):
            ids_of(loaded, sampler)
