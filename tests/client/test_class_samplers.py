"""Samplers of classes: what they post, what they refuse, and that a loop goes on where it stood."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
from tests.client.conftest import NUM_SAMPLES
from tests.client.fake_pod import FakePod
from torch.utils.data import DataLoader

from refill import (
    BucketSampler,
    CacheDataset,
    ClassBalancedSampler,
    ClassSampler,
    CurriculumSampler,
    TraceSampler,
    timed,
)
from refill.errors import InvalidInput
from refill.protocol.plan_settings import is_within_classes

DatasetOf = Callable[..., CacheDataset]

CLASSES = np.arange(NUM_SAMPLES) // 10
"""Four classes of ten samples."""


@pytest.fixture
def dataset_of(dataset_of: DatasetOf) -> DatasetOf:
    return lambda **arguments: dataset_of(**{"policy": "planned"} | arguments)


def test_ranks_post_the_batches_of_one_order(pod: FakePod, dataset_of: DatasetOf) -> None:
    """A curriculum: what is easy first. Each rank has every second batch."""
    order = np.repeat([3, 1, 0, 2], 10)
    asked = []
    for rank in range(2):
        sampler = ClassSampler(dataset_of(rank=rank, world_size=2, seed=-7), 5, order, CLASSES)
        assert len(sampler) == len(list(sampler)) == 20
        asked.append(pod.traces["job", 0, rank])
    for of_rank in asked:
        assert CLASSES[of_rank].reshape(-1, 5).tolist() == [[each] * 5 for each in (3, 1, 0, 2)]
    assert sorted(np.concatenate(asked).tolist()) == list(range(NUM_SAMPLES))


def test_an_order_may_change_with_the_epoch(pod: FakePod, dataset_of: DatasetOf) -> None:
    def order(epoch: int) -> Any:
        return np.roll(np.sort(CLASSES), 10 * epoch)

    with pytest.raises(InvalidInput, match="order asks for class 0, which no sample has"):
        next(iter(ClassSampler(dataset_of(job="other"), 10, order, CLASSES * 7 - 1)))
    sampler = ClassSampler(dataset_of(), 10, order, CLASSES)
    for epoch in range(2):
        list(sampler)
        assert CLASSES[pod.traces["job", epoch, 0]][0] == [0, 3][epoch]


def test_batches_of_a_loader_are_of_one_bucket(pod: FakePod, dataset_of: DatasetOf) -> None:
    dataset, lengths = dataset_of(), np.arange(NUM_SAMPLES) * 100
    sampler = BucketSampler(dataset, 5, lengths, boundaries=[1000, 2000, 3000])
    loader = DataLoader(dataset, 5, sampler=sampler, collate_fn=list)
    for epoch in range(2):
        batches = [[sample["__id__"] for sample in batch] for batch in loader]
        assert sorted(np.concatenate(batches).tolist()) == list(range(NUM_SAMPLES))
        for batch in batches:
            assert len(set(np.array(batch) // 10)) == 1, f"batch of epoch {epoch}: {batch}"
    assert is_within_classes(pod.jobs["job"].policy_settings["selection"])
    assert pod.count("PUT list") == 2


def test_a_curriculum_has_low_values_first_and_later_epochs_are_mixed(pod: FakePod, dataset_of: DatasetOf) -> None:
    by = np.random.default_rng(3).permutation(NUM_SAMPLES) / 7 - 2
    for job, how in (("stages", {"num_stages": 4}), ("mixed", {"num_stages": 4, "mixed": 0.5})):
        sampler = CurriculumSampler(dataset_of(job=job), 5, by, epochs=1, **how)
        for epoch in range(2):
            list(sampler)
            asked = pod.traces[job, epoch, 0]
            assert sorted(asked.tolist()) == list(range(NUM_SAMPLES))
            stages = (by[asked].argsort().argsort() // 10).tolist()
            assert (stages == sorted(stages)) == (job == "stages" and epoch == 0)
            assert by[asked].tolist() != sorted(by), "within a stage the order is drawn"


def test_equal_values_of_a_curriculum_are_in_one_stage(pod: FakePod, dataset_of: DatasetOf) -> None:
    assert CurriculumSampler(dataset_of(job="a"), 5, CLASSES).boundaries.tolist() == [1, 2, 3]
    assert CurriculumSampler(dataset_of(job="b"), 5, CLASSES, boundaries=[2.5]).boundaries.tolist() == [2.5]
    assert CurriculumSampler(dataset_of(job="c"), 5, np.zeros(NUM_SAMPLES)).boundaries.tolist() == []


@pytest.mark.variants("4-4 to 7-2", "7-7 to 13-2", "15-0 to 14-2")
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("size", "named"), [(4, "4 to 7"), (1, "1 to 1"), (15, "0 to 14"), (7, "7 to 13")])
def test_a_loader_with_another_batch_size_is_named_once(
    pod: FakePod, dataset_of: DatasetOf, recwarn: pytest.WarningsRecorder, size: int, named: str, num_workers: int
) -> None:
    """Where it can't be taken for the last batch of an epoch."""
    dataset = dataset_of()
    loader = DataLoader(dataset, size, sampler=ClassBalancedSampler(dataset, 10, CLASSES), num_workers=num_workers)
    for _ in range(2):
        assert len(list(loader)) == -(-NUM_SAMPLES // size)
    warned = [str(each.message) for each in recwarn if "composed" in str(each.message)]
    if num_workers:
        assert not warned, "it is said by the worker that sees it"
        list(DataLoader(dataset, size, sampler=ClassBalancedSampler(dataset, 10, CLASSES)))
        assert not [each for each in recwarn if "composed" in str(each.message)], "and by nobody after it"
        return
    assert warned == [
        f"positions {named} came as a batch, and the sampler has composed batches of 10, each of classes that belong "
        "together: give the DataLoader batch_size=10, or the sampler the DataLoader's"
    ]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_with_the_same_batch_size_is_not(
    pod: FakePod, dataset_of: DatasetOf, recwarn: pytest.WarningsRecorder, num_workers: int
) -> None:
    """Nor one that goes on where another stood, nor the last batch, nor a sampler that composes nothing."""
    dataset = dataset_of()
    sampler = BucketSampler(dataset, 12, np.arange(NUM_SAMPLES))
    loader = timed(DataLoader(dataset, 12, sampler=sampler, num_workers=num_workers, collate_fn=list), dataset)
    assert [len(batch) for batch in loader] == [12, 12, 12, 4]
    list(islice(loader, 2))
    loader.load_state_dict(sampler.state_after(24))
    assert [len(batch) for batch in loader] == [12, 4]
    plain = dataset_of(job="another")
    list(DataLoader(plain, 7, sampler=TraceSampler(plain, range(NUM_SAMPLES), any_order=True), num_workers=num_workers))
    assert not [each for each in recwarn if "composed" in str(each.message)]
    list(DataLoader(dataset, 7, sampler=sampler, collate_fn=list))
    assert len([each for each in recwarn if "composed" in str(each.message)]) == 1, "a worker has said it before"


def test_equal_classes_come_equally_often(pod: FakePod, dataset_of: DatasetOf) -> None:
    classes = np.array([0] * 36 + [1] * 4)
    sampler = ClassBalancedSampler(dataset_of(), 8, classes, per_class=16)
    assert len(sampler) == len(list(sampler)) == 32
    posted = pod.traces["job", 0, 0]
    asked = classes[posted]
    assert np.bincount(asked).tolist() == [16, 16]
    assert all(np.bincount(batch).tolist() == [4, 4] for batch in asked.reshape(-1, 8))
    assert len(set(posted[asked == 0].tolist())) == 16, "the larger class has enough"


def test_a_loop_goes_on_where_it_stood(pod: FakePod, dataset_of: DatasetOf) -> None:
    def loader_of() -> Any:
        dataset = dataset_of(seed=3)
        sampler = ClassBalancedSampler(dataset, 4, CLASSES)
        return timed(DataLoader(dataset, 4, sampler=sampler, collate_fn=list), dataset)

    before = loader_of()
    had = [sample["__id__"] for batch in islice(before, 4) for sample in batch]
    after = loader_of()
    after.load_state_dict(before.state_dict())
    rest = [sample["__id__"] for batch in after for sample in batch]
    assert sorted(had + rest) == list(range(NUM_SAMPLES))


def test_an_order_that_is_no_function_of_the_epoch_is_refused(pod: FakePod, dataset_of: DatasetOf) -> None:
    random, offset = np.random.default_rng(0), 0
    with pytest.raises(InvalidInput, match=r"order gives another one for epoch 0 than .* function of the epoch alone"):
        next(iter(ClassSampler(dataset_of(), 10, lambda _: random.permutation(CLASSES), CLASSES)))

    def loader_of() -> Any:
        dataset = dataset_of()
        sampler = ClassSampler(dataset, 10, lambda epoch: np.roll(CLASSES, epoch + offset), CLASSES)
        return timed(DataLoader(dataset, 10, sampler=sampler, collate_fn=list), dataset)

    loader = loader_of()
    next(iter(loader))
    state, offset = loader.state_dict(), 10
    after = loader_of()
    after.load_state_dict(state)
    with pytest.raises(InvalidInput, match="order gives another one for epoch 0 than it gave before"):
        next(iter(after))
    offset = 0
    assert len([sample for batch in after for sample in batch]) == NUM_SAMPLES - 10


def test_within_an_epoch_batches_stay_as_large_where_its_order_follows_from_them(
    pod: FakePod, dataset_of: DatasetOf
) -> None:
    def buckets(batch_size: int) -> BucketSampler:
        return BucketSampler(dataset_of(), batch_size, np.arange(NUM_SAMPLES), num_buckets=4)

    sampler = buckets(4)
    next(iter(sampler))
    state = sampler.state_after(8)
    with pytest.raises(InvalidInput, match=r"in batches of 4, and this sampler has batches of 8.*batch_size=4"):
        buckets(8).load_state_dict(state)
    buckets(4).load_state_dict(state)
    at_end = sampler.state_after(NUM_SAMPLES)
    buckets(8).load_state_dict(at_end)
    alone = ClassBalancedSampler(dataset_of(job="alone"), 4, CLASSES)
    next(iter(alone))
    ClassBalancedSampler(dataset_of(job="alone"), 8, CLASSES).load_state_dict(alone.state_after(8))


def test_a_state_of_an_epoch_of_another_length_is_refused(pod: FakePod, dataset_of: DatasetOf) -> None:
    state = ClassBalancedSampler(dataset_of(), 4, CLASSES, per_class=10).state_after(0)
    other = ClassBalancedSampler(dataset_of(), 4, CLASSES, per_class=3)
    with pytest.raises(InvalidInput, match="of an epoch of 40 positions a rank, and this sampler's has 12"):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            lambda d: ClassSampler(d, 5, CLASSES, CLASSES[:-1]),
            r"classes has shape \(39,\), and must be one for each of 40",
        ),
        (lambda d: ClassSampler(d, 5, CLASSES, CLASSES / 2), "classes must be whole numbers, got float64"),
        (lambda d: ClassSampler(d, 0, CLASSES, CLASSES), "batch_size must be at least 1, got 0"),
        (lambda d: ClassBalancedSampler(d, 5), "the dataset has no labels: give classes"),
        (lambda d: ClassBalancedSampler(d, 5, CLASSES, per_class=0), "per_class must be at least 1, got 0"),
        (lambda d: BucketSampler(d, 5, np.ones((2, 20))), "lengths has shape"),
        (lambda d: BucketSampler(d, 5, CLASSES, num_buckets=0), "num_buckets must be at least 1"),
        (
            lambda d: next(iter(ClassSampler(d, 5, CLASSES[:-1], CLASSES))),
            "asks for 9 samples of class 3 in epoch 0, and",
        ),
        (lambda d: next(iter(ClassSampler(d, 5, np.ones(40), CLASSES))), "order must be whole numbers"),
        (lambda d: CurriculumSampler(d, 5, np.full(40, np.nan)), "by must be a finite number for each of 40 samples"),
        (lambda d: CurriculumSampler(d, 5, CLASSES, boundaries=["a"]), "boundaries must be finite numbers"),  # type: ignore[list-item]
        (lambda d: CurriculumSampler(d, 5, CLASSES, num_stages=0), "num_stages must be a whole number"),
        (lambda d: CurriculumSampler(d, 5, CLASSES, mixed=2), "mixed must be a part of the positions"),
        (lambda d: CurriculumSampler(d, 5, CLASSES, epochs=-1), "epochs must be a whole number"),
    ],
)
def test_what_does_not_fit_the_dataset_is_refused(
    pod: FakePod, dataset_of: DatasetOf, make: Callable[[CacheDataset], object], why: str
) -> None:
    with pytest.raises(InvalidInput, match=why):
        make(dataset_of())
    assert pod.count("PUT list") == 0


@pytest.mark.parametrize("policy", ["exact", "redox"])
@pytest.mark.parametrize("make", [ClassSampler, BucketSampler, ClassBalancedSampler, CurriculumSampler])
def test_other_policies_are_refused(pod: FakePod, dataset_of: DatasetOf, policy: str, make: Any) -> None:
    with pytest.raises(
        InvalidInput, match=f"^{make.__name__} needs policy planned, the default: leave out policy='{policy}'$"
    ):
        make(dataset_of(policy=policy), 5, CLASSES)
    assert pod.count("PUT job") == 0


def test_an_order_of_another_kind_is_refused(dataset_of: DatasetOf) -> None:
    with pytest.raises(InvalidInput, match="contradicts the dataset"):
        ClassSampler(dataset_of(order="keyed"), 5, CLASSES, CLASSES)
