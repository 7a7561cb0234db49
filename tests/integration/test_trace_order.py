"""A sampler's ids come from real pods, each as often as it was asked for; and in its order but with policy redox."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from tests.pod_fixtures import NUM_SAMPLES
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader.sampler import RandomSampler as StatefulRandomSampler

import refill
from refill.protocol.wire_format import Int64Array
from refill_service.demo.local_cluster import LocalCluster

BATCH = 50
MakeDataset = Callable[..., refill.CacheDataset]
EVERYTHING = range(NUM_SAMPLES)


@pytest.fixture
def dataset_of(three_pods: LocalCluster, job: dict[str, Any]) -> MakeDataset:
    settings = {name: value for name, value in job.items() if name not in ("name", "dataset")}

    def make(**more: Any) -> refill.CacheDataset:
        url, name = three_pods.pod_urls[0], job["name"]
        how: dict[str, Any] = {"policy": "redox"} | settings | more
        return refill.CacheDataset(url, dataset=job["dataset"], job=name, order="explicit", **how)

    return make


def received(dataset: refill.CacheDataset, sampler: Iterable[int], any_order: bool = True) -> Int64Array:
    """The ids of an epoch, ``(batches, BATCH)``."""
    traced = refill.TraceSampler(dataset, sampler, any_order=any_order)
    loader = DataLoader(dataset, BATCH, sampler=traced, collate_fn=list)
    return np.array([[sample["__id__"] for sample in batch] for batch in loader])


def test_a_curriculum_is_not_kept(dataset_of: MakeDataset) -> None:
    """What was to come first, such as what is easy, comes anywhere."""
    asked = np.random.default_rng(2).permutation(NUM_SAMPLES)
    ids = received(dataset_of(), asked.tolist()).ravel()
    assert sorted(ids) == list(EVERYTHING)
    place_asked = np.argsort(asked)[ids]
    assert np.corrcoef(np.arange(NUM_SAMPLES), place_asked)[0, 1] < 0.5


def test_batches_of_one_length_come_mixed(dataset_of: MakeDataset) -> None:
    lengths = np.random.default_rng(3).permutation(NUM_SAMPLES) % (NUM_SAMPLES // BATCH)
    ids = received(dataset_of(), np.argsort(lengths, kind="stable").tolist())
    assert sorted(ids.ravel()) == list(EVERYTHING)
    assert np.mean([len(set(lengths[batch])) == 1 for batch in ids]) < 0.1


@pytest.mark.variants("False")
@pytest.mark.parametrize("repeats", [False, True])
def test_without_shuffling_the_order_is_kept_for_the_price_of_reads(dataset_of: MakeDataset, repeats: bool) -> None:
    generator = np.random.default_rng(4)
    asked = generator.integers(0, NUM_SAMPLES, 600) if repeats else generator.permutation(NUM_SAMPLES)
    dataset = dataset_of(shuffle=False)
    assert received(dataset, asked.tolist()).ravel().tolist() == asked.tolist()
    assert dataset.epoch_counts(0)["total"]["exact_reads"] > 100, "samples that were read alone"


@pytest.mark.variants("lengths-exact", "curriculum-planned")
@pytest.mark.parametrize(
    ("kind", "policy"), [("curriculum", "planned"), ("lengths", "exact"), ("repeats", "planned"), ("repeats", "exact")]
)
def test_the_order_is_kept_to_the_letter(dataset_of: MakeDataset, kind: str, policy: str) -> None:
    generator = np.random.default_rng(5)
    asked = {
        "curriculum": generator.permutation(NUM_SAMPLES),
        "lengths": np.argsort(generator.permutation(NUM_SAMPLES) % 50, kind="stable"),
        "repeats": generator.integers(0, NUM_SAMPLES, 600),
    }[kind]
    dataset = dataset_of(policy=policy)
    assert not seen_warnings(lambda: refill.TraceSampler(dataset, asked.tolist()))
    assert received(dataset, asked.tolist(), any_order=False).ravel().tolist() == asked.tolist()


def seen_warnings(make: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", UserWarning)
        make()
    assert all(each.filename == __file__ for each in seen), "it names the line of the one who can change it"
    return [str(each.message) for each in seen]


class EasyFirst(RandomSampler):
    """An order made of a random one: of a class of one's own, nobody knows."""


@pytest.mark.parametrize(
    "sampler",
    [
        SequentialSampler(EVERYTHING),
        EasyFirst(EVERYTHING),
        DistributedSampler(EVERYTHING, 1, 0, shuffle=False),  # type: ignore[arg-type]  # a range is a dataset to it
        list(EVERYTHING),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_an_order_that_will_be_lost_is_warned_of(dataset_of: MakeDataset, sampler: Iterable[int]) -> None:
    dataset = dataset_of()
    (message,) = seen_warnings(lambda: refill.TraceSampler(dataset, sampler))
    assert message.startswith(f"the order of {type(sampler).__name__} is not kept: ")
    assert "any_order=True" in message
    assert "policy='exact'" in message
    assert "\n" not in message
    assert not seen_warnings(lambda: refill.TraceSampler(dataset, sampler, any_order=True))


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(EVERYTHING),
        SubsetRandomSampler(EVERYTHING),
        WeightedRandomSampler(torch.ones(NUM_SAMPLES), 10),  # type: ignore[arg-type]  # a tensor is a sequence to it
        DistributedSampler(EVERYTHING, 1, 0),  # type: ignore[arg-type]
        StatefulRandomSampler(EVERYTHING),
    ],
    ids=lambda sampler: type(sampler).__module__.split(".")[0] + type(sampler).__name__,
)
def test_nobody_misses_a_random_order(dataset_of: MakeDataset, sampler: Iterable[int]) -> None:
    dataset = dataset_of()
    assert not seen_warnings(lambda: refill.TraceSampler(dataset, sampler))


def test_no_warning_where_the_order_is_kept(dataset_of: MakeDataset) -> None:
    dataset = dataset_of(shuffle=False)
    assert not seen_warnings(lambda: refill.TraceSampler(dataset, EVERYTHING))
