"""What the index says is there before any job: samplers are made of it, whatever settings they give the job then."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.integration.job_ranks import cluster_of
from torch.utils.data import DataLoader, WeightedRandomSampler

import refill
from refill.errors import InvalidInput, JobConflict, UnknownJob
from refill.pods.index_reads import DatasetIndex
from refill.protocol.column_values import LABELS
from refill_service.datasets.pack import pack
from refill_service.demo.local_cluster import LocalCluster

CLASSES, OF_EACH, BATCH = ("cat", "dog"), 30, 10
NUM_SAMPLES = len(CLASSES) * OF_EACH


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with cluster_of(tmp_path_factory.mktemp("pods"), 2) as cluster:
        yield cluster


def packed_in(folder: Path, longer: int = 0) -> str:
    files = folder / f"files-{longer}"
    for name in CLASSES:
        (files / name).mkdir(parents=True)
        for number in range(OF_EACH):
            (files / name / f"{number}.bin").write_bytes(bytes(50 + number + longer))
    store = (folder / "store").as_uri()
    asyncio.run(pack(str(files), store, force=bool(longer)))
    return store


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> str:
    return packed_in(tmp_path_factory.mktemp("labelled"))


def dataset_of(pods: LocalCluster, url: str, **settings: Any) -> refill.CacheDataset:
    return refill.CacheDataset(pods.pod_urls[0], dataset=url, job=f"index-{uuid.uuid4().hex[:8]}", **settings)


def jobs_at(pods: LocalCluster) -> list[str]:
    return [each["spec"]["name"] for url in pods.pod_urls for each in httpx.get(f"{url}/v1/jobs").json()]


@pytest.mark.parametrize("policy", ["planned", "exact"])
def test_reading_the_index_registers_no_job(pods: LocalCluster, labelled: str, policy: str) -> None:
    dataset = dataset_of(pods, labelled, policy=policy)
    assert dataset.classes == list(CLASSES) == dataset.metadata["classes"]
    labels = dataset.labels
    assert labels is not None
    assert np.bincount(labels).tolist() == [OF_EACH] * 2
    assert dataset.lengths.shape == (NUM_SAMPLES,)
    assert dataset.lengths.min() >= 50
    assert np.array_equal(dataset.column(LABELS), labels)
    assert len(dataset) == NUM_SAMPLES
    with pytest.raises(InvalidInput, match="has no column 'size'"):
        dataset.column("size")
    assert dataset.job not in jobs_at(pods)
    dataset.register()
    assert dataset.job in jobs_at(pods)
    assert dataset.labels is labels
    dataset.end_job()


@pytest.mark.parametrize("policy", ["planned", "exact"])
def test_counts_of_an_epoch_register_no_job(pods: LocalCluster, labelled: str, policy: str) -> None:
    """A notebook that looks at a run would hold memory for it, or begin it anew when it has ended."""
    ran = dataset_of(pods, labelled, policy=policy)
    looks = refill.CacheDataset(pods.pod_urls[0], dataset=labelled, job=ran.job, policy=policy)
    with pytest.raises(UnknownJob):
        looks.epoch_counts(0)
    assert ran.job not in jobs_at(pods)
    list(DataLoader(ran, BATCH, sampler=refill.EpochSampler(ran), collate_fn=list))
    ran.end_job()
    assert looks.epoch_counts(0)["total"]["takes"] == NUM_SAMPLES
    assert ran.job not in jobs_at(pods)


def of_labels(dataset: refill.CacheDataset) -> Any:
    weights = 1 / np.bincount(dataset.labels)[dataset.labels]
    return refill.TraceSampler(dataset, WeightedRandomSampler(weights.tolist(), NUM_SAMPLES))


SAMPLERS: dict[str, Callable[[refill.CacheDataset], Any]] = {
    "classes by their labels": lambda each: refill.ClassSampler(each, BATCH, np.sort(each.labels)),
    "a curriculum by lengths": lambda each: refill.CurriculumSampler(each, BATCH, each.lengths, epochs=1),
    "weights of labels": of_labels,
    "in order, after a look at classes": lambda each: refill.EpochSampler(each, shuffle=bool(each.classes is None)),
    "another seed, after a look at metadata": lambda each: refill.EpochSampler(each, seed=len(each.metadata)),
}


@pytest.mark.parametrize("kind", SAMPLERS)
def test_samplers_are_made_of_what_it_says(pods: LocalCluster, labelled: str, kind: str) -> None:
    dataset = dataset_of(pods, labelled)
    loader = DataLoader(dataset, BATCH, sampler=SAMPLERS[kind](dataset), collate_fn=list)
    ids = [sample["__id__"] for batch in loader for sample in batch]
    assert len(ids) == NUM_SAMPLES
    assert kind == "weights of labels" or sorted(ids) == list(range(NUM_SAMPLES))
    dataset.end_job()


def test_a_sampler_that_comes_too_late_says_what_to_do(pods: LocalCluster, labelled: str) -> None:
    dataset = dataset_of(pods, labelled)
    dataset[0]
    with pytest.raises(
        InvalidInput, match="give shuffle=False to CacheDataset, or make the sampler before a sample is asked for"
    ):
        refill.EpochSampler(dataset, shuffle=False)
    dataset.end_job()


def test_a_batch_that_no_request_has_room_for_is_named(pods: LocalCluster, labelled: str) -> None:
    dataset = dataset_of(pods, labelled)
    loader = DataLoader(dataset, 10**6, sampler=refill.EpochSampler(dataset), collate_fn=list)
    with pytest.raises(InvalidInput, match="dealt 65,536 samples at once at most, got batches of 1,000,000: make them"):
        next(iter(loader))
    dataset.end_job()


def test_a_dataset_that_is_replaced_between_its_index_and_the_job(tmp_path: Path) -> None:
    """Labels of one version would be taken for those of the other."""
    store = packed_in(tmp_path)
    with cluster_of(tmp_path, 1) as pod:
        dataset, other = dataset_of(pod, store), dataset_of(pod, store)
        assert dataset.labels is not None
        packed_in(tmp_path, longer=1)
        other.register()  # a pod keeps what it has opened for the job that follows, which is this one
        with pytest.raises(JobConflict, match="was replaced since its index was read here: begin anew"):
            dataset.register()


def test_pods_of_an_earlier_version_are_asked_by_a_job(
    pods: LocalCluster, labelled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DatasetIndex, "about", lambda _: None)
    dataset = dataset_of(pods, labelled)
    assert dataset.classes == list(CLASSES)
    assert dataset.job in jobs_at(pods)
    dataset.end_job()
