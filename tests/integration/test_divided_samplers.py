"""Nothing is lost silently when something divides a sampler's positions a second time, on real pods."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
from tests.pod_fixtures import rank_of
from torch.utils.data import BatchSampler, DataLoader, Sampler

import refill
from refill.errors import SamplesSkipped
from refill_service.demo.local_cluster import LocalCluster

DatasetOf = Callable[..., refill.CacheDataset]


@pytest.fixture
def dataset_of(three_pods: LocalCluster, job: dict[str, Any]) -> DatasetOf:
    def make(**more: Any) -> refill.CacheDataset:
        arguments = {"job": job["name"]} | {name: job[name] for name in job if name != "name"}
        return refill.CacheDataset(three_pods.pod_urls[0], **(arguments | {"rank": 0, "world_size": 2} | more))

    return make


class EverySecond(Sampler[Any]):
    """What trainers that know no better do with a sampler, or with a batch sampler."""

    def __init__(self, inner: Any, first: int = 0) -> None:
        self.inner = inner
        self.first = first

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.inner), self.first, None, 2)

    def __len__(self) -> int:
        return len(self.inner) // 2


@pytest.mark.variants("redox-sampler")
@pytest.mark.parametrize(
    ("policy", "what", "first", "num_workers"),
    [("planned", "sampler", 0, 0), ("redox", "sampler", 1, 3), ("planned", "batch_sampler", 1, 3)],
)
def test_a_divided_sampler_fails_within_the_first_epoch(
    dataset_of: DatasetOf, policy: str, what: str, first: int, num_workers: int
) -> None:
    dataset = dataset_of(policy=policy)
    sampler = refill.EpochSampler(dataset)
    if what == "sampler":
        loader = DataLoader(dataset, 50, sampler=EverySecond(sampler, first), num_workers=num_workers, collate_fn=list)
    else:
        every_second = EverySecond(BatchSampler(sampler, 50, False), first)
        loader = DataLoader(dataset, batch_sampler=every_second, num_workers=num_workers, collate_fn=list)
    batches: Any = iter(loader)
    with pytest.raises(
        SamplesSkipped, match=r"rank 0 of job .* asks for a part of its positions only: in epoch 0 .*TRAINERS"
    ):
        list(batches)
    if num_workers:
        batches._shutdown_workers()  # else whenever the error and its frames are collected, at 5 s a worker


def test_it_can_be_allowed(dataset_of: DatasetOf) -> None:
    dataset = dataset_of(allow_skipped=True, world_size=1)
    sampler = refill.EpochSampler(dataset)
    loader = DataLoader(dataset, batch_sampler=EverySecond(BatchSampler(sampler, 50, False)), collate_fn=list)
    assert [sum(map(len, loader)) for _ in range(2)] == [500, 500]


@pytest.mark.variants("3")
@pytest.mark.parametrize("num_workers", [0, 3])
def test_an_epoch_that_is_broken_off_or_looked_at_first_is_no_hole(dataset_of: DatasetOf, num_workers: int) -> None:
    dataset = dataset_of(world_size=1)
    sampler = refill.EpochSampler(dataset)
    loader = DataLoader(dataset, 20, sampler=sampler, num_workers=num_workers, collate_fn=list)
    next(iter(loader))
    for epoch, batches in enumerate([3, 11, 50, 1, 50]):
        sampler.set_epoch(epoch)
        assert len(list(islice(loader, batches))) == batches


def test_skipping_what_was_trained_with_before_is_no_hole(dataset_of: DatasetOf) -> None:
    """A trainer that goes on from a checkpoint by skipping batches, in another process, without a state of ours."""
    before = dataset_of(world_size=1)
    list(islice(DataLoader(before, 20, sampler=refill.EpochSampler(before), collate_fn=list), 7))
    after = dataset_of(world_size=1)
    batches = list(BatchSampler(refill.EpochSampler(after), 20, False))[7:]
    assert sum(len(samples) for samples in DataLoader(after, batch_sampler=batches, collate_fn=list)) == 1000 - 140


def test_skipping_what_nobody_was_trained_with_is_one(dataset_of: DatasetOf) -> None:
    dataset = dataset_of(world_size=1)
    batches = list(BatchSampler(refill.EpochSampler(dataset), 20, False))[7:]
    with pytest.raises(SamplesSkipped, match="left out 0 to 139"):
        list(DataLoader(dataset, batch_sampler=batches, collate_fn=list))


@pytest.mark.variants("redox")
@pytest.mark.parametrize("policy", ["planned", "redox"])
def test_whatever_asks_the_next_epoch_tells(three_pods: LocalCluster, job: dict[str, Any], policy: str) -> None:
    """A loader of which the client sees nothing: processes that share no memory, each with a part of the positions."""
    rank = rank_of(three_pods, job | {"policy": policy})
    for position in range(0, 1000, 10):
        rank.batch(0, np.arange(position, position + 1))
    with pytest.raises(SamplesSkipped, match="has left epoch 0 and never asked for its positions 1 to 9"):
        rank.batch(1, np.arange(2))
    rank.batch(0, np.arange(1, 2))  # the epoch before is still served
    rank.allow_skipped = True
    rank.batch(1, np.arange(2))


def test_what_is_sent_ahead_of_a_loop_that_is_broken_off_is_no_hole(
    three_pods: LocalCluster, job: dict[str, Any]
) -> None:
    """Owners send samples for positions far above the last one that was asked for."""
    rank = rank_of(three_pods, job | {"policy": "redox", "prefetch_window": 10_000})
    for epoch in range(3):
        for position in range(50):
            rank.batch(epoch, np.arange(position, position + 1))
