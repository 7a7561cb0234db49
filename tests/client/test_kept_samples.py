"""What shows that a wrapper divides samples among workers or ranks once more, and what must not be taken for it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
from torch.utils.data import DataLoader, IterableDataset

from refill.loops.kept_samples import Divided, KeptSamples

Wrap = Callable[[Iterator[Any]], Iterator[Any]]


class Watched(IterableDataset[Any]):
    """A wrapper around a hundred samples, which were dealt to 2 ranks with 2 workers each."""

    def __init__(self, wrap: Wrap) -> None:
        self.wrap = wrap
        self.found: list[Divided] = []
        self.none_kept: list[Any] | None = None
        self.looks = 0

    def __iter__(self) -> Iterator[Any]:
        return self.wrap(self.samples())

    def samples(self) -> Iterator[Any]:
        kept = KeptSamples({2, 4})
        for number in range(100):
            self.looks += not kept.is_over
            if (divided := kept.look()) is not None:
                self.found.append(divided)
            sample = [number]
            kept.gives(sample)
            yield sample
        self.none_kept = kept.none_kept()


def watched(wrap: Wrap, batch_size: int | None = 5) -> Watched:
    dataset = Watched(wrap)
    list(DataLoader(dataset, batch_size, collate_fn=list))
    return dataset


def every(step: int, first: int = 0) -> Wrap:
    return lambda samples: islice(samples, first, None, step)


def groups(size: int) -> Wrap:
    def wrap(samples: Iterator[Any]) -> Iterator[Any]:
        while group := list(islice(samples, size)):
            yield group

    return wrap


def blended(size: int) -> Wrap:
    def wrap(samples: Iterator[Any]) -> Iterator[Any]:
        while group := list(islice(samples, size)):
            group[0] += [number for sample in group[1:] for number in sample]
            yield group[0]

    return wrap


def collected(size: int) -> Wrap:
    """Such as to sort a few by length."""

    def wrap(samples: Iterator[Any]) -> Iterator[Any]:
        while group := list(islice(samples, size)):
            yield from reversed(group)

    return wrap


def by_chance(samples: Iterator[Any]) -> Iterator[Any]:
    choice = random.Random(3)
    return (sample for sample in samples if choice.random() < 0.5)


def shuffled(size: int) -> Wrap:
    def wrap(samples: Iterator[Any]) -> Iterator[Any]:
        buffer = list(islice(samples, size))
        for sample in samples:
            yield buffer.pop(0)
            buffer.append(sample)
        yield from buffer

    return wrap


@pytest.mark.parametrize("batch_size", [1, 2, 5, 40])
@pytest.mark.parametrize("first", [0, 1, 3])
@pytest.mark.parametrize("step", [2, 4])
def test_one_of_as_many_as_there_are_workers_or_ranks(step: int, first: int, batch_size: int) -> None:
    assert watched(every(step, first), batch_size).found == [Divided(step, as_they_are=True)]


@pytest.mark.parametrize(
    ("wrap", "batch_size"),
    [
        (lambda samples: ([sample] for sample in every(2)(samples)), 5),
        (groups(2), 5),
        (blended(2), 5),
        (blended(2), 1),
        (every(2), None),
    ],
    ids=["another object", "put together", "blended in place", "blended one by one", "no batches"],
)
def test_what_may_be_made_of_all_is_told_apart(wrap: Wrap, batch_size: int | None) -> None:
    assert watched(wrap, batch_size).found == [Divided(2, as_they_are=False)]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda samples: samples,
        every(3),
        groups(7),
        by_chance,
        shuffled(2),
        shuffled(50),
        lambda samples: (half for sample in samples for half in (sample, sample)),
        lambda samples: islice(samples, 20),
        lambda samples: islice(samples, 50, None),
    ],
    ids=["as it is", "of 3", "of 7", "by chance", "of 2 shuffled", "of 50 shuffled", "halves", "first", "last"],
)
def test_what_wrappers_do_otherwise(wrap: Wrap) -> None:
    dataset = watched(wrap)
    assert dataset.found == []
    assert not dataset.none_kept
    assert dataset.looks < 10, "it looks no longer than it has to"


@pytest.mark.parametrize("batch_size", [None, 1, 2, 3])
@pytest.mark.parametrize("size", [2, 4])
def test_who_collects_as_many_and_keeps_them_all(size: int, batch_size: int | None) -> None:
    assert watched(collected(size), batch_size).found == []


def test_a_part_that_another_worker_was_to_have_is_none() -> None:
    assert watched(lambda samples: islice(samples, 100, 200)).none_kept == []
    assert watched(shuffled(100)).none_kept, "they were collected, and come now"


def test_without_a_loader_there_is_nothing_to_see() -> None:
    dataset = Watched(every(2))
    assert len(list(dataset)) == 50
    assert (dataset.found, dataset.none_kept) == ([], None)
