"""Batches of classes with policy ``planned``: composed as asked, each sample once, whatever becomes of pods; and chunks
stay whole."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.integration.job_ranks import Packed, cluster_of, exact_receipt, settings_of
from tests.integration.test_planned_loops import dataset_at, ids_of
from tests.pod_fixtures import NUM_SAMPLES
from torch.utils.data import DataLoader

import refill
from refill.errors import InvalidInput, JobConflict
from refill_service.demo.local_cluster import LocalCluster

BATCH = 50
CLASSES = np.random.default_rng(1).permutation(NUM_SAMPLES) % 5
"""Of each sample, by id."""


def in_stages(epoch: int) -> Any:
    return np.sort(CLASSES) if epoch % 2 else np.sort(CLASSES)[::-1]


SAMPLERS: dict[str, Callable[[Any], Any]] = {
    "buckets": lambda dataset: refill.BucketSampler(dataset, BATCH, num_buckets=4),
    "balanced": lambda dataset: refill.ClassBalancedSampler(dataset, BATCH, CLASSES),
    "stages of one's own": lambda dataset: refill.ClassSampler(dataset, BATCH, in_stages, CLASSES),
    "a curriculum": lambda dataset: refill.CurriculumSampler(dataset, BATCH, CLASSES, epochs=1),
}


def loader_of(cluster: LocalCluster, job: dict[str, Any], kind: str, **more: Any) -> Any:
    dataset = dataset_at(cluster, job, **more)
    sampler = SAMPLERS[kind](dataset)
    return DataLoader(dataset, BATCH, sampler=sampler, num_workers=2, collate_fn=list)


@pytest.mark.parametrize(
    "kind", ["balanced", *(pytest.param(kind, marks=pytest.mark.variant) for kind in ("buckets", "a curriculum"))]
)
def test_batches_are_composed_as_asked_though_pods_die(packed: Packed, tmp_path: Path, kind: str) -> None:
    """Two ranks; a pod is killed within the first epoch, and then all pods."""
    job = settings_of(packed[0], num_epochs=3)
    with cluster_of(tmp_path, 2) as cluster:
        loaders = [loader_of(cluster, job, kind, rank=rank, world_size=2) for rank in range(2)]
        for epoch in range(2):
            for loader in loaders:
                loader.sampler.set_epoch(epoch)
            loops = [iter(loader) for loader in loaders]
            batches = [list(islice(loop, 4)) for loop in loops]
            for pod in range(1 + epoch):
                cluster.kill(pod)
            for pod in range(1 + epoch):
                cluster.restart(pod)
            for loop, came in zip(loops, batches, strict=True):
                came += list(loop)
            assert sorted(ids_of(batches[0]) + ids_of(batches[1])) == list(range(NUM_SAMPLES))
            for came in batches:
                check_composed(kind, epoch, loaders[0].sampler, [ids_of([batch]) for batch in came])
            exact_receipt(cluster, job, epoch)
        loaders[0].dataset.end_job()


def check_composed(kind: str, epoch: int, sampler: Any, batches: list[list[int]]) -> None:
    if kind == "buckets":
        buckets = np.searchsorted(sampler.boundaries, sampler.dataset.lengths, side="right")
        mixed = sum(len(set(buckets[batch].tolist())) > 1 for batch in batches)
        assert mixed <= len(sampler.boundaries) + 1
    elif kind == "balanced":
        assert all(np.bincount(CLASSES[batch], minlength=5).tolist() == [BATCH // 5] * 5 for batch in batches[:-1])
    else:
        stages = np.concatenate([CLASSES[batch] for batch in batches])
        if kind == "a curriculum":
            assert (np.diff(stages) >= 0).all() == (epoch == 0), "the second epoch is in no stages"
        else:
            assert (np.diff(stages if epoch % 2 else -stages) >= 0).all()


def test_equally_many_of_each_class(three_pods: LocalCluster, packed: Packed) -> None:
    """Of large classes some do not come, others in each epoch; those of small ones come again."""
    job = settings_of(packed[0], world_size=1)
    classes = np.where(np.arange(NUM_SAMPLES) < 60, 1, 0)
    dataset = dataset_at(three_pods, job)
    sampler = refill.ClassBalancedSampler(dataset, BATCH, classes, per_class=200)
    loader = DataLoader(dataset, BATCH, sampler=sampler, collate_fn=list)
    of_epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        ids = np.array(ids_of(loader))
        assert np.bincount(classes[ids]).tolist() == [200, 200]
        assert len(set(ids[classes[ids] == 0].tolist())) == 200
        assert set(ids[classes[ids] == 1].tolist()) == set(range(60))
        of_epochs.append(set(ids.tolist()))
    assert of_epochs[0] != of_epochs[1]
    dataset.end_job()


def test_chunks_are_read_whole_and_once_where_memory_holds_a_step_of_each_class(
    three_pods: LocalCluster, packed: Packed
) -> None:
    job = settings_of(packed[0], world_size=1, memory_bytes=1_800_000)
    loader = loader_of(three_pods, job, "balanced")
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        ids_of(loader)
        cost = loader.dataset.epoch_counts(epoch)["total"]
        assert cost["exact_reads"] == 0
        assert cost["samples_read"] <= 1.02 * NUM_SAMPLES
    loader.dataset.end_job()


def test_a_loop_goes_on_with_what_is_left(packed: Packed, tmp_path: Path) -> None:
    """At other pods, with other memory."""
    job = settings_of(packed[0], world_size=1, memory_bytes=0)
    before, after = tmp_path / "before", tmp_path / "after"
    before.mkdir()
    after.mkdir()
    with cluster_of(before, 2) as cluster:
        loader = loader_of(cluster, job, "buckets")
        whole = ids_of(loader)
        loader.sampler.set_epoch(0)
        loop = refill.timed(loader, loader.dataset)
        assert ids_of(islice(loop, 8)) == whole[: 8 * BATCH]
        state = loop.state_dict()
    with cluster_of(after, 3, memory_bytes="9MiB") as cluster:
        dataset = dataset_at(cluster, job, resume=state)
        sampler = SAMPLERS["buckets"](dataset)
        loader = DataLoader(dataset, BATCH, sampler=sampler, num_workers=2, collate_fn=list)
        loop = refill.timed(loader, dataset)
        loop.load_state_dict(state)
        assert ids_of(loop) == whole[8 * BATCH :]


def test_ranks_with_other_classes_are_refused(three_pods: LocalCluster, packed: Packed) -> None:
    job = settings_of(packed[0], world_size=2)
    first = dataset_at(three_pods, job, rank=0)
    refill.ClassBalancedSampler(first, BATCH, CLASSES)
    others = CLASSES.copy()
    others[7] += 1
    with pytest.raises(JobConflict, match=r"policy_settings selection: yours is "):
        refill.ClassBalancedSampler(dataset_at(three_pods, job, rank=1), BATCH, others)
    refill.ClassBalancedSampler(dataset_at(three_pods, job, rank=1), BATCH, CLASSES.astype(np.int16))
    first.end_job()


def test_policies_that_know_no_classes_are_refused_by_name(three_pods: LocalCluster, packed: Packed) -> None:
    job = settings_of(packed[0], world_size=1)
    with pytest.raises(InvalidInput, match=r"ClassBalancedSampler .*planned"):
        refill.ClassBalancedSampler(dataset_at(three_pods, job, policy="exact"), BATCH, CLASSES)
