"""random_split around a dataset on real pods: each sample of a part once an epoch, whatever the other part does."""

from __future__ import annotations

import asyncio
import copy
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, zip_longest
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from tests.pod_fixtures import NUM_SAMPLES
from tests.waiting import until
from torch.utils.data import DataLoader, Subset, WeightedRandomSampler, random_split

import refill
from refill.errors import DatasetNotFound, EpochNotReady, InvalidInput, JobConflict
from refill.protocol.column_values import KEYS
from refill_service.datasets.write_columns import asked_column, write_columns
from refill_service.demo.local_cluster import LocalCluster

DatasetOf = Callable[..., refill.CacheDataset]


@pytest.fixture
def dataset_of(three_pods: LocalCluster, job: dict[str, Any]) -> Iterator[DatasetOf]:
    made: list[refill.CacheDataset] = []

    def make(**more: Any) -> refill.CacheDataset:
        arguments = {"job": job["name"]} | {name: job[name] for name in job if name != "name"}
        made.append(refill.CacheDataset(three_pods.pod_urls[0], **(arguments | more)))
        return made[-1]

    yield make
    for dataset in made:
        dataset.end_job()


def split_of(dataset: refill.CacheDataset) -> list[Subset[Any]]:
    return random_split(dataset, [0.8, 0.2], generator=torch.Generator().manual_seed(5))


def jobs_of(pods: LocalCluster, part: refill.CacheDataset) -> set[str]:
    """Of the dataset that this is a part of, at all pods."""
    of_dataset = part.job.partition("-part-")[0]
    names = {job["spec"]["name"] for url in pods.pod_urls for job in httpx.get(f"{url}/v1/jobs").json()}
    return {name for name in names if name.startswith(of_dataset)}


def loader_of(part: Any, sampler: Any, **settings: Any) -> DataLoader[Any]:
    return DataLoader(part, batch_size=27, sampler=sampler, collate_fn=list, **settings)


def ids_of(batches: Any) -> list[int]:
    return [sample["__id__"] for batch in batches for sample in batch]


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.variant)])
def test_training_and_validation_of_one_split_take_turns_and_each_is_exact(
    three_pods: LocalCluster, dataset_of: DatasetOf, method: str
) -> None:
    """Two workers each, persistent, so that both parts are asked for by processes of their own."""
    train, held_out = split_of(dataset_of())
    expected = sorted(train.indices), sorted(held_out.indices)
    samplers = refill.EpochSampler(train), refill.EpochSampler(held_out, shuffle=False)
    workers = {"num_workers": 2, "multiprocessing_context": method, "persistent_workers": True}
    loaders = [loader_of(part, each, **workers) for part, each in zip((train, held_out), samplers, strict=True)]
    assert jobs_of(three_pods, samplers[0].dataset) == {sampler.dataset.job for sampler in samplers}
    for epoch in range(3):
        for sampler, loader, wanted in zip(samplers, loaders, expected, strict=True):
            sampler.set_epoch(epoch)
            assert sorted(ids_of(loader)) == wanted
    for sampler, wanted in zip(samplers, expected, strict=True):
        path = f"/v1/jobs/{sampler.dataset.job}/epochs/1/receipt"
        url = f"{three_pods.pod_urls[0]}{path}"
        until(lambda url=url: bool(httpx.get(url).json()["exact"]), "an exact receipt")  # type: ignore[misc]
        receipt = httpx.get(url).raise_for_status().json()
        assert (receipt["exact"], receipt["planned"]) == (True, len(wanted)), receipt
    asked = samplers[0].dataset.epoch_counts(1)["total"]["batches"]
    assert len(loaders[0]) <= asked <= 3 * len(loaders[0]), (
        "not a request for each batch to each pod that has some of it"
    )


@pytest.mark.parametrize("as_tuple", [None, ("__id__", "bin")], ids=["dict", "of the first item"])
def test_a_copy_has_a_transform_of_its_own_and_parts_follow_that_of_their_dataset(
    dataset_of: DatasetOf, as_tuple: tuple[str, str] | None
) -> None:
    """As validation is often given its own: ``copy.copy(dataset)`` in its Subset."""
    dataset = dataset_of(as_tuple=as_tuple)
    train, held_out = split_of(dataset)
    held_out.dataset = copied = copy.copy(dataset)
    copied.transform = lambda _: "held out"
    loaders = [loader_of(part, refill.EpochSampler(part)) for part in (train, held_out)]
    dataset.transform = lambda _: "train"
    for loader, expected in zip(loaders, ("train", "held out"), strict=True):
        assert {each if as_tuple is None else each[0] for batch in loader for each in batch} == {expected}


@pytest.mark.parametrize("url", ["file:///nowhere", "nonsense"])
def test_the_length_of_a_dataset_that_is_not_there_is_an_error_each_time(dataset_of: DatasetOf, url: str) -> None:
    dataset = dataset_of(dataset=url, timeout_seconds=5)
    said = set()
    for _ in range(2):
        with pytest.raises((DatasetNotFound, InvalidInput)) as raised:
            len(dataset)
        said.add(str(raised.value))
    assert len(said) == 1


def test_ranks_divide_both_parts_at_the_same_time(dataset_of: DatasetOf) -> None:
    def run(rank: int) -> list[tuple[list[int], list[int]]]:
        """What the rank has of both parts, by epochs: a batch of one, a batch of the other."""
        parts = split_of(dataset_of(rank=rank, world_size=2))
        loaders = [loader_of(part, refill.EpochSampler(part)) for part in parts]
        found = []
        for _ in range(2):
            batches = list(zip_longest(*loaders, fillvalue=()))
            found.append((ids_of(first for first, _ in batches), ids_of(second for _, second in batches)))
        return found

    with ThreadPoolExecutor(2) as pool:
        of_ranks = list(pool.map(run, range(2)))
    train, held_out = (sorted(part.indices) for part in split_of(dataset_of(rank=0, world_size=2)))
    for of_first, of_second in zip(*of_ranks, strict=True):
        assert sorted(of_first[0] + of_second[0]) == train
        assert sorted(of_first[1] + of_second[1]) == held_out


@pytest.mark.variants("whole")
@pytest.mark.parametrize(
    "of_loader", [lambda part, dataset: part, lambda part, dataset: dataset], ids=["part", "whole"]
)
def test_a_killed_training_goes_on_within_an_epoch_of_its_part(
    dataset_of: DatasetOf, of_loader: Callable[[Any, Any], Any]
) -> None:
    def loop_of() -> tuple[Any, Subset[Any]]:
        dataset = dataset_of()
        train, _ = split_of(dataset)
        return refill.timed(loader_of(train, refill.EpochSampler(train)), of_loader(train, dataset)), train

    loop, train = loop_of()
    before = ids_of(islice(loop, 20))
    state = loop.state_dict()
    resumed, _ = loop_of()
    resumed.load_state_dict(state)
    assert sorted(before + ids_of(resumed)) == sorted(train.indices)


def test_a_state_that_is_given_to_the_whole_dataset_is_its_parts(dataset_of: DatasetOf) -> None:
    """``resume=`` is given before anybody knows of parts. As with all traces, ranks are as many as they were."""
    train, _ = split_of(dataset_of())
    loop = refill.timed(loader_of(train, refill.EpochSampler(train)), train)
    before = ids_of(islice(loop, 20))
    state = loop.state_dict()
    with pytest.raises(InvalidInput, match="ranks ask by lists of their own, so as many ranks must go on as before"):
        refill.EpochSampler(split_of(dataset_of(rank=0, world_size=2, resume=state))[0])
    again, held_out = split_of(dataset_of(resume=state))
    resumed = refill.timed(loader_of(again, refill.EpochSampler(again)), again)
    resumed.load_state_dict(state)
    assert sorted(before + ids_of(resumed)) == sorted(again.indices)
    assert sorted(ids_of(loader_of(held_out, refill.EpochSampler(held_out)))) == sorted(held_out.indices)


def test_a_weighted_draw_of_a_part(dataset_of: DatasetOf) -> None:
    train, _ = split_of(dataset_of())
    expected = list(train.indices)
    weights = [0.0 if index % 2 else 1.0 for index in range(len(train))]
    sampler = refill.TraceSampler(
        train, WeightedRandomSampler(weights, 300, generator=torch.Generator().manual_seed(1))
    )
    ids = ids_of(loader_of(train, sampler))
    assert len(ids) == 300
    assert set(ids) <= set(expected[::2])


def test_policy_exact_keeps_the_order_of_the_part(dataset_of: DatasetOf) -> None:
    part = Subset(dataset_of(policy="exact"), range(NUM_SAMPLES - 1, 0, -7))
    assert ids_of(loader_of(part, refill.EpochSampler(part, shuffle=False))) == list(range(NUM_SAMPLES - 1, 0, -7))


def test_a_part_reads_the_chunks_that_have_a_sample_of_it(dataset_of: DatasetOf) -> None:
    """So a range reads each byte once, and a tenth at random little more than that: docs/CLIENT.md."""

    def read_for(indices: Any) -> float:
        part = Subset(dataset_of(chunk_size=8), indices)
        sampler = refill.EpochSampler(part)
        assert sorted(ids_of(loader_of(part, sampler))) == sorted(indices)
        return float(sampler.dataset.epoch_counts(0)["total"]["samples_read"]) / len(part)

    at_random = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(1)).tolist()
    assert read_for(range(100, 200)) < 1.2
    assert read_for(at_random[:100]) < 1.6
    assert read_for(at_random[100:]) == pytest.approx(1 / 0.9, rel=0.1)


@pytest.mark.parametrize("policy", ["redox", "planned"])
def test_where_chooses_by_keys_and_columns_of_the_index(
    dataset_of: DatasetOf, job: dict[str, Any], tmp_path: Path, policy: str
) -> None:
    dataset = dataset_of(policy=policy)
    scores = np.random.default_rng(3).random(NUM_SAMPLES)
    np.save(tmp_path / "score.npy", scores)
    asked = [asked_column(KEYS), asked_column(f"score={tmp_path / 'score.npy'}")]
    with pytest.raises(InvalidInput, match="has no column 'nothing', not in this version of it: write it by"):
        dataset.column("nothing")
    asyncio.run(write_columns(job["dataset"], asked))
    keys = dataset.column(KEYS)
    assert keys[7] == dataset[7]["__key__"]
    np.testing.assert_array_equal(dataset.column("score"), scores)
    part = dataset.where(np.asarray(dataset.column("score")) > 0.7, keys=["*1", "*[78]"])
    wanted = [number for number, key in enumerate(keys) if scores[number] > 0.7 and key[-1] in "178"]
    assert part.indices == wanted
    assert sorted(ids_of(loader_of(part, refill.EpochSampler(part)))) == wanted
    splits = {"train": 0.8, "test": 0.2}
    train, test = (set(dataset.where(split=name, splits=splits, by="key").indices) for name in splits)
    assert (train | test, train & test) == (set(range(NUM_SAMPLES)), set())
    assert train != set(dataset.where(split="train", splits=splits).indices), "the key says nothing"
    for wrong, said in (
        ({"by": "name"}, "by must be"),
        ({"keys": 3}, "keys must be patterns"),
        ({"keys": "x*"}, rf"keys='x\*' leaves none of the {NUM_SAMPLES} samples of the dataset"),
    ):
        with pytest.raises(InvalidInput, match=said):
            dataset.where(**wrong)


@pytest.mark.variants("redox")
@pytest.mark.parametrize("policy", ["redox", "planned"])
def test_ranks_that_split_differently_are_told_so(dataset_of: DatasetOf, policy: str) -> None:
    """Long before time is up; and with policy planned, where none waits for another."""
    parts = []

    def run(rank: int) -> None:
        dataset = dataset_of(rank=rank, world_size=2, policy=policy)
        train, _ = random_split(dataset, [0.8, 0.2], generator=torch.Generator().manual_seed(rank))
        parts.append(train)  # it is read until the other one is told, too
        sampler = refill.EpochSampler(train)
        with pytest.raises(JobConflict, match=f"rank {rank} reads {sampler.dataset.job}, and rank {1 - rank} reads "):
            for _ in epochs_without_end(loader_of(train, sampler)):
                pass

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))


def epochs_without_end(loader: Any) -> Iterator[Any]:
    """The loop waits until a batch may bring something new, as one does that trains."""
    while True:
        for batch in loader:
            yield batch
            Event().wait(0.2)


def test_ranks_that_split_differently_wait_for_each_other_by_name(dataset_of: DatasetOf) -> None:
    """Each has a job of other samples, and no sample comes that another rank validates with."""
    dataset = dataset_of(rank=0, world_size=2, timeout_seconds=1, policy="redox")
    train, _ = random_split(dataset, [0.8, 0.2], generator=torch.Generator().manual_seed(6))
    with pytest.raises(EpochNotReady, match=r"job-\w+-part-\w+ .*rank 1.* generator with a seed$"):
        next(iter(loader_of(train, refill.EpochSampler(train))))


def test_parts_by_what_is_known_of_samples_are_exact_and_nest(dataset_of: DatasetOf) -> None:
    dataset = dataset_of()
    splits = {"train": 0.8, "test": 0.2}
    train = dataset.where(split="train", splits=splits, lengths=(1000, 10_000), without=range(100))
    lengths = dataset.lengths
    assert {int(lengths[each]) >= 1000 and each >= 100 for each in train.indices} == {True}
    test = dataset.where(split="test", splits=splits)
    assert not set(train.indices) & set(test.indices)
    small = dataset.where(lengths < 2000, split="train", splits=splits, fraction=0.3, first=30)
    assert set(small.indices) < set(dataset.where(split="train", splits=splits, fraction=0.5).indices)
    assert len(small) == 30
    expected = sorted(small.indices)
    loader = loader_of(small, refill.EpochSampler(small))
    assert sorted(ids_of(loader)) == expected
    with pytest.raises(InvalidInput, match="the dataset has no labels"):
        dataset.where(classes=3)
    for nothing, said in (
        ({"fraction": 0}, "fraction=0 leaves none of the 1000 samples of the dataset"),
        ({"ids": [3], "without": [3]}, "without leaves none of the 1 samples that ids leave"),
        ({"mask": lengths < 0}, "mask leaves none of the 1000 samples of the dataset"),
        ({"lengths": (10**6, 10**7)}, r"lengths=\(1000000, 10000000\) leaves none of the 1000 samples of the dataset"),
        ({"ids": [3, 4], "split": "b", "splits": {"a": 1, "b": 0}}, "split='b' leaves none of the 2 samples that ids"),
    ):
        with pytest.raises(InvalidInput, match=said):
            dataset.where(**nothing)


def test_a_part_that_nobody_reads_any_more_leaves_nothing_behind(
    three_pods: LocalCluster, dataset_of: DatasetOf
) -> None:
    """As where each epoch chooses its samples."""

    def watching() -> set[threading.Thread]:
        gc.collect()
        return {thread for thread in threading.enumerate() if thread.name == "refill-watch"}

    def read(part: Subset[Any]) -> None:
        assert len(ids_of(loader_of(part, refill.EpochSampler(part)))) == len(part)

    dataset = dataset_of()
    dataset.register()
    before = watching()
    first = Subset(dataset, range(100))
    read(first)
    for at in (200, 300, 400):
        read(Subset(dataset, range(at, at + 50)))
    again = Subset(dataset, range(100))
    read(again)
    assert again.dataset is first.dataset, "the same part is read by the same job"
    until(lambda: len(watching() - before) <= 1, "parts that nobody reads are gone")
    assert len(jobs_of(three_pods, dataset)) == 5
    dataset.end_job()
    assert not jobs_of(three_pods, dataset), "all are ended"
