"""Buckets by length from real pods: what is padded is what bucketing pads that reads the order as asked."""

from __future__ import annotations

from typing import Any

import httpx
import numpy as np
import pytest
from tests.pod_fixtures import NUM_SAMPLES
from tests.waiting import until
from torch.utils.data import DataLoader

import refill
from refill.errors import InvalidInput
from refill.protocol.wire_format import Int64Array
from refill_service.demo.local_cluster import LocalCluster

BATCH, NUM_EPOCHS = 20, 3


def padded(lengths: Int64Array, batches: list[list[int]]) -> float:
    """What is padded where each sample is as long as the longest of its batch, for each byte of a sample."""
    return sum(len(batch) * int(lengths[batch].max()) for batch in batches) / int(lengths.sum()) - 1


def as_lhotse(lengths: Int64Array, boundaries: Int64Array, random: np.random.Generator) -> list[list[int]]:
    """Batches of bucketing that chooses the samples itself: each bucket shuffled and cut; what is left, by bucket."""
    batches, rest = [], []
    buckets = np.searchsorted(boundaries, lengths, side="right")
    for bucket in range(len(boundaries) + 1):
        ids = random.permutation(np.flatnonzero(buckets == bucket))
        whole = len(ids) // BATCH * BATCH
        batches += ids[:whole].reshape(-1, BATCH).tolist()
        rest += ids[whole:].tolist()
    return batches + [rest[start : start + BATCH] for start in range(0, len(rest), BATCH)]


def test_as_little_is_padded_as_by_bucketing_of_single_samples(
    three_pods: LocalCluster, job: dict[str, Any], packed: tuple[str, dict[str, bytes]]
) -> None:
    settings = {name: value for name, value in job.items() if name not in ("name", "dataset")}
    settings["memory_bytes"] = 1_200_000
    url = three_pods.pod_urls[0]
    dataset = refill.CacheDataset(url, dataset=job["dataset"], job=job["name"], **settings)
    sampler = refill.BucketSampler(dataset, BATCH, num_buckets=5)
    lengths = dataset.lengths
    for member, sample in ((member, dataset[i]) for i in (0, NUM_SAMPLES - 1) for member in ("bin",)):
        assert len(sample[member]) <= lengths[sample["__id__"]] < len(sample[member]) + 2048, "no length of the sample"
    found = []
    for epoch in range(NUM_EPOCHS):
        sampler.set_epoch(epoch)
        loader = DataLoader(dataset, BATCH, sampler=sampler, collate_fn=list)
        batches = [[sample["__id__"] for sample in batch] for batch in loader]
        assert sorted(np.concatenate(batches).tolist()) == list(range(NUM_SAMPLES))
        buckets = [np.searchsorted(sampler.boundaries, lengths[batch], side="right") for batch in batches]
        mixed = sum(len(set(each.tolist())) > 1 for each in buckets)
        assert mixed <= len(sampler.boundaries) + 1, "only what is left of a bucket comes with others"
        found.append(padded(lengths, batches))
        cost = dataset.epoch_counts(epoch)["total"]
        assert cost["samples_read"] == NUM_SAMPLES, "bytes are read once"
        path = f"{url}/v1/jobs/{job['name']}/epochs/{epoch}/receipt"
        until(lambda path=path: httpx.get(path).json()["exact"], "an exact receipt")  # type: ignore[misc]
    random = np.random.default_rng(1)
    reference = [padded(lengths, as_lhotse(lengths, sampler.boundaries, random)) for _ in range(30)]
    mixed_batches = random.permutation(NUM_SAMPLES).reshape(-1, BATCH).tolist()
    assert np.mean(found) == pytest.approx(np.mean(reference), rel=0.05)
    assert np.mean(found) < padded(lengths, mixed_batches) / 3


def test_lengths_of_what_is_not_there(three_pods: LocalCluster, job: dict[str, Any]) -> None:
    url, settings = three_pods.pod_urls[0], {name: value for name, value in job.items() if name != "name"}
    dataset = refill.CacheDataset(url, job=job["name"], **settings)
    dataset.register()
    for wanted in ([0, NUM_SAMPLES + 1], [5, 5], [-1, 3], [1]):
        body = np.array(wanted, dtype="<i8").tobytes()
        answer = httpx.post(f"{url}/v1/jobs/{job['name']}/lengths", content=body)
        assert answer.status_code == 400, wanted
        assert "lengths are asked for by two ids of 0 to 1000" in answer.text
    with pytest.raises(InvalidInput, match="give order='explicit' to CacheDataset"):
        refill.ClassBalancedSampler(dataset, BATCH)  # the dataset was looked at before
