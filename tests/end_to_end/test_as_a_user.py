"""From the command line to a DataLoader, as a user goes: pack into S3, serve from three pods, read it all back."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import S3Server
from tests.pod_fixtures import metric, write_files
from torch.utils.data import DataLoader, SubsetRandomSampler

import refill
from refill_service.demo.local_cluster import LocalCluster

NUM_FILES = 700


def run_refill(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "refill_service.cli", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, **(environment or {})}
    )


@pytest.fixture(scope="module")
def s3_cluster(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """``(cluster, dataset URL, bytes by key)`` with everything in S3."""
    folder = tmp_path_factory.mktemp("files")
    content = write_files(folder, NUM_FILES)
    url = f"s3://{s3_server.new_bucket()}/datasets/random"
    done = run_refill("pack", str(folder), url, "--blob-size", "200KB", environment=s3_server.environment)
    assert done.returncode == 0, done.stderr
    logs = tmp_path_factory.mktemp("logs")
    settings = {"memory_bytes": "2MiB", "job_memory_fraction": 0.3}
    with LocalCluster(3, logs, settings, environment=s3_server.environment) as cluster:
        yield cluster, url, content


def dataset_of(cluster: LocalCluster, url: str, rank: int = 0, job: str = "", **settings: Any) -> refill.CacheDataset:
    job = job or f"user-{uuid.uuid4().hex[:8]}"
    return refill.CacheDataset(cluster.pod_urls[rank], dataset=url, job=job, rank=rank, chunk_size=16, **settings)


@pytest.mark.parametrize(
    "loader_settings",
    [
        {"num_workers": 0},
        {"num_workers": 2, "persistent_workers": True},
        pytest.param(
            {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True},
            marks=pytest.mark.variant,
        ),
    ],
    ids=["in process", "forked and persistent", "spawned and persistent"],
)
def test_data_loader_over_s3(s3_cluster: Any, loader_settings: dict[str, Any]) -> None:
    cluster, url, content = s3_cluster
    dataset = dataset_of(cluster, url)
    sampler = refill.EpochSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler, collate_fn=list, **loader_settings)
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        samples = [sample for batch in refill.timed(loader, dataset) for sample in batch]
        assert {sample["__key__"]: sample["bin"] for sample in samples} == content
        assert len(samples) == len(dataset) == NUM_FILES
        orders.append([sample["__id__"] for sample in samples])
    assert orders[0] != orders[1], "two epochs in the same order"
    assert dataset.epoch_counts(1)["total"]["takes"] == NUM_FILES
    job = dataset.connection.spec.name
    assert metric(cluster.pod_urls[0], "refill_client_samples_total", training_job=job) == 2 * NUM_FILES
    dataset.end_job()


def test_two_ranks_share_an_epoch(s3_cluster: Any) -> None:
    cluster, url, _ = s3_cluster
    ranks = [dataset_of(cluster, url, rank, job="two-ranks", world_size=2) for rank in range(2)]
    ids: Counter[int] = Counter()
    loaders = [DataLoader(d, 25, sampler=refill.EpochSampler(d), collate_fn=list) for d in ranks]
    for batches in zip(*loaders, strict=True):
        ids.update(sample["__id__"] for batch in batches for sample in batch)
    assert ids == Counter(range(NUM_FILES))
    ranks[0].end_job()


def test_a_sampler_of_ones_own(s3_cluster: Any) -> None:
    cluster, url, _ = s3_cluster
    dataset = dataset_of(cluster, url)
    subset = list(range(0, NUM_FILES, 3))
    sampler = refill.TraceSampler(dataset, SubsetRandomSampler(subset))
    for epoch in range(2):
        sampler.set_epoch(epoch)
        loader = DataLoader(dataset, 16, sampler=sampler, collate_fn=list)
        assert sorted(sample["__id__"] for batch in loader for sample in batch) == subset
    dataset.end_job()


def test_iterable_form(s3_cluster: Any) -> None:
    cluster, url, _ = s3_cluster
    dataset = refill.CacheIterableDataset(
        cluster.pod_urls[0], dataset=url, job="iterable", batch_size=32, chunk_size=16
    )
    loader = DataLoader(dataset, 32, num_workers=2, persistent_workers=True, collate_fn=list)
    for epoch in range(2):
        dataset.set_epoch(epoch)
        assert sorted(sample["__id__"] for batch in loader for sample in batch) == list(range(NUM_FILES))
    dataset.dataset.end_job()


def test_random_access(s3_cluster: Any) -> None:
    cluster, url, content = s3_cluster
    dataset = dataset_of(cluster, url)
    sample = dataset[NUM_FILES - 1]
    assert sample["__id__"] == NUM_FILES - 1
    assert sample["bin"] == content[sample["__key__"]]
    assert dataset[-1] == sample
    with pytest.raises(IndexError, match="there is no sample 700"):
        dataset[NUM_FILES]
    dataset.end_job()


def test_shards_that_lie_in_a_bucket_already(s3_server: S3Server, s3_cluster: Any) -> None:
    """`refill index` on tars that others wrote, then the same path."""
    cluster, url, content = s3_cluster
    bucket, _, prefix = url.removeprefix("s3://").partition("/")
    other, client = s3_server.new_bucket(), s3_server.client()
    for found in client.list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]:
        if found["Key"].endswith(".tar"):
            copied = "shards/" + found["Key"].rpartition("/")[2]
            client.copy_object(Bucket=other, Key=copied, CopySource={"Bucket": bucket, "Key": found["Key"]})
    done = run_refill("index", f"s3://{other}/shards", environment=s3_server.environment)
    assert done.returncode == 0, done.stderr
    dataset = dataset_of(cluster, f"s3://{other}/shards")
    loader = DataLoader(dataset, 32, sampler=refill.EpochSampler(dataset), collate_fn=list)
    samples = [sample for batch in loader for sample in batch]
    assert {sample["__key__"]: sample["bin"] for sample in samples} == content
    dataset.end_job()


def test_pythons_standard_library(tmp_path: Path) -> None:
    """A second real input: hundreds of text files, or thousands, of very different sizes, every byte compared."""
    library, store = tmp_path / "library", tmp_path / "store"
    shutil.copytree(
        sysconfig.get_paths()["stdlib"],
        library,
        ignore=lambda folder, names: [name for name in names if not _is_text_of_the_library(Path(folder, name))],
    )
    done = run_refill("pack", str(library), store.as_uri(), "--blob-size", "4MB", "--classes", "no")
    assert done.returncode == 0, done.stderr
    files = {path.relative_to(library).as_posix(): path for path in library.rglob("*") if path.is_file()}
    assert len(files) > 500, "some distributions leave the tests of the library out"
    with LocalCluster(3, tmp_path, {"memory_bytes": "16MiB"}) as cluster:
        dataset = refill.CacheDataset(cluster.pod_urls[0], dataset=store.as_uri(), job="stdlib", chunk_size=8)
        loader = DataLoader(dataset, 64, sampler=refill.EpochSampler(dataset), num_workers=2, collate_fn=list)
        seen: Counter[str] = Counter()
        for batch in loader:
            for sample in batch:
                for extension, data in sample.items():
                    if not extension.startswith("__"):
                        name = f"{sample['__key__']}.{extension}"
                        assert data == files[name].read_bytes(), f"{name} came with other bytes"
                        seen[name] += 1
        assert seen == Counter(files.keys()), "not every file came exactly once"


def _is_text_of_the_library(path: Path) -> bool:
    if path.is_dir():
        return path.name not in ("site-packages", "__pycache__")
    return path.suffix in (".py", ".txt") and not path.name.startswith(".")
