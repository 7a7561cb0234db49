"""Policy ``planned`` over a real S3 server that counts: each chunk is read once, whatever loader workers do."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import pytest
import torch.utils.data
from tests.conftest import S3Server
from tests.s3_counts import counting

import refill
from refill_service.datasets.pack import pack
from refill_service.demo.local_cluster import LocalCluster

NUM_SAMPLES, CHUNK_SIZE, NUM_EPOCHS, BATCH = 1536, 8, 2, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    files = tmp_path_factory.mktemp("files")
    for number in range(NUM_SAMPLES):
        (files / f"{number:05}.bin").write_bytes(number.to_bytes(4, "big") * 250)
    return files


@pytest.mark.variant
@pytest.mark.parametrize("num_workers", [*(pytest.param(few, marks=pytest.mark.variant) for few in (0, 1)), 4])
def test_each_chunk_is_read_once_an_epoch(
    folder: Path, s3_environment: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, num_workers: int
) -> None:
    """Three pods with memory for a part of the dataset. Four workers have up to 128 samples under way."""
    dataset_url = f"s3://{s3_environment.new_bucket()}/samples"
    asyncio.run(pack(str(folder), dataset_url, blob_bytes=1 << 20))
    with counting(s3_environment.endpoint_url) as served:
        monkeypatch.setenv("AWS_ENDPOINT_URL", served.url)
        with LocalCluster(3, tmp_path, {"memory_bytes": "16MiB", "pinned_fraction": 0, "wait_seconds": 60}) as cluster:
            dataset = refill.CacheDataset(
                cluster.pod_urls[0],
                dataset=dataset_url,
                job=f"job-{uuid.uuid4().hex[:8]}",
                policy="planned",
                chunk_size=CHUNK_SIZE,
                memory_bytes=375_000,
                num_epochs=NUM_EPOCHS,
            )
            sampler = refill.EpochSampler(dataset)
            loader = torch.utils.data.DataLoader(
                dataset, batch_size=BATCH, sampler=sampler, num_workers=num_workers, collate_fn=list
            )
            info = dataset.connection.info()
            in_memory = info["chunks_in_memory"] * 3 * CHUNK_SIZE
            assert NUM_SAMPLES / 10 < in_memory < NUM_SAMPLES / 3, f"memory for {in_memory} samples tries nothing"
            for epoch in range(NUM_EPOCHS):
                sampler.set_epoch(epoch)
                ids = sorted(sample["__id__"] for batch in loader for sample in batch)
                assert ids == list(range(NUM_SAMPLES)), f"epoch {epoch} was not each sample once"
            dataset.end_job()
    total_bytes = info["total_bytes"]
    # What lies side by side and is wanted at once is one GET.
    assert len(served.sizes) <= 1.01 * NUM_EPOCHS * (NUM_SAMPLES // CHUNK_SIZE + info["num_blobs"])
    assert NUM_EPOCHS * total_bytes <= sum(served.sizes) <= 1.01 * NUM_EPOCHS * total_bytes
