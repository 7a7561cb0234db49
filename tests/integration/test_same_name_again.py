"""A notebook's cell that trains is run twice, with loader workers: the second time is a new run, said in one line."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from tests.pod_fixtures import NUM_SAMPLES
from torch.utils.data import DataLoader

from refill import CacheDataset, EpochSampler
from refill_service.demo.local_cluster import LocalCluster


def trained(pods: LocalCluster, job: dict[str, Any], num_workers: int) -> tuple[list[list[int]], CacheDataset]:
    """Two epochs, by objects of their own; and the dataset."""
    settings = {name: value for name, value in job.items() if name != "name"}
    dataset = CacheDataset(
        pods.pod_urls[0], job=job["name"], policy="redox", transform=lambda sample: sample["__id__"], **settings
    )
    loader = DataLoader(dataset, 50, sampler=EpochSampler(dataset), num_workers=num_workers)
    epochs = []
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        epochs.append([sample for batch in loader for sample in batch.tolist()])
    return epochs, dataset


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_cell_that_is_run_twice(
    three_pods: LocalCluster, job: dict[str, Any], num_workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    first, kept = trained(three_pods, job, num_workers)
    with caplog.at_level(logging.WARNING, "refill"):
        second, dataset = trained(three_pods, job, num_workers)
    for epoch in [*first, *second]:
        assert sorted(epoch) == list(range(NUM_SAMPLES))
    taken = [one.epoch_counts(0)["total"]["takes"] for one in (kept, dataset)]
    assert taken == [NUM_SAMPLES] * 2, "the samples of the run before came once more"
    before, now = kept.connection.info()["incarnation"], dataset.connection.info()["incarnation"]
    assert before != now
    assert dataset.state_at(1, 0, NUM_SAMPLES)["incarnation"] == now, "a checkpoint would be of the run before"
    assert num_workers or "so it is a new run" in caplog.text
    assert dataset.epoch_counts(0)["run"] == now
    assert kept.epoch_counts(0)["run"] == before
    dataset.end_job()
