"""Dataset objects that come to other processes in other ways than a DataLoader's: each rank has memory of its own,
which its loader workers share."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import uuid
from typing import Any

import pytest
import torch.multiprocessing
from tests.integration.job_ranks import Packed
from tests.pod_fixtures import NUM_SAMPLES
from torch.utils.data import DataLoader

import refill
from refill.pods.planned_connection import PlannedConnection
from refill_service.demo.local_cluster import LocalCluster


@pytest.fixture
def given(three_pods: LocalCluster, packed: Packed) -> dict[str, Any]:
    job = f"copied-{uuid.uuid4().hex[:8]}"
    return {"service_url": three_pods.pod_urls[0], "dataset": packed[0], "job": job, "memory_bytes": 600_000}


def train(rank: int, dataset: refill.CacheDataset, answers: Any) -> None:
    sampler = refill.EpochSampler(dataset, num_replicas=2, rank=rank)
    loader = DataLoader(dataset, 50, sampler=sampler, num_workers=1, collate_fn=list)
    loop = refill.timed(loader, dataset)
    ids = [sample["__id__"] for batch in loop for sample in batch]
    assert isinstance(dataset.connection, PlannedConnection)
    answers.put((rank, ids, dataset.fetched()[0], dataset.connection.digest_parts(0)))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_ranks_that_are_started_with_one_object_share_nothing(given: dict[str, Any], method: str) -> None:
    """As ``torch.multiprocessing.spawn`` does, and trainers in notebooks."""
    dataset = refill.CacheDataset(**given)
    context: Any = torch.multiprocessing.get_context(method)
    answers = context.SimpleQueue()
    ranks = [context.Process(target=train, args=(rank, dataset, answers)) for rank in range(2)]
    for each in ranks:
        each.start()
    found = {rank: rest for rank, *rest in (answers.get() for _ in ranks)}
    for each in ranks:
        each.join()
    assert sorted(found[0][0] + found[1][0]) == list(range(NUM_SAMPLES))
    for rank, (ids, fetched, digests) in found.items():
        assert fetched == len(ids) == NUM_SAMPLES // 2, "a rank counts its own samples"
        assert [(each.rank, each.spans) for each in digests] == [(rank, ((0, 500),))]
    assert found[0][2][0].digest != found[1][2][0].digest
    dataset.end_job()


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))], ids=["deep", "pickle"]
)
def test_workers_that_stay_are_told_of_each_epoch_of_a_copy(given: dict[str, Any], copied: Any) -> None:
    dataset = copied(refill.CacheIterableDataset(batch_size=50, **given))
    context = multiprocessing.get_context("fork")
    loader = DataLoader(
        dataset, 50, num_workers=2, persistent_workers=True, multiprocessing_context=context, collate_fn=list
    )
    epochs = []
    for epoch in range(2):
        dataset.set_epoch(epoch)
        epochs.append([sample["__id__"] for batch in loader for sample in batch])
    assert [sorted(ids) for ids in epochs] == [list(range(NUM_SAMPLES))] * 2
    assert epochs[0] != epochs[1]
    assert dataset.dataset.fetched()[0] == 2 * NUM_SAMPLES
    dataset.dataset.end_job()
