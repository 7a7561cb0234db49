"""Datasets in formats of others, as a training loop reads them: workers, batches, other policies, no torch."""

from __future__ import annotations

import uuid
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import refill
from refill.errors import InvalidInput
from refill.formats import parser_of
from refill.formats.parsed import Coded
from refill_service.cli import main
from refill_service.demo.local_cluster import LocalCluster

NUM_TOKENS = 4000


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokens")
    np.arange(NUM_TOKENS, dtype=np.uint16).tofile(folder / "a.bin")
    assert main(["index", str(folder), "--tokens", "33", "--stride", "32", "--dtype", "uint16", "--quiet"]) == 0
    return folder.as_uri()


def as_long(sample: dict[str, Any]) -> torch.Tensor:
    return torch.from_numpy(sample["tokens"].astype("int64"))


def settings_of(url: str, **more: Any) -> dict[str, Any]:
    return {"dataset": url, "job": f"job-{uuid.uuid4().hex[:8]}", "memory_bytes": 1 << 20, "chunk_size": 4} | more


@pytest.mark.variants("spawn-planned")
@pytest.mark.parametrize(
    ("context", "policy"),
    [
        ("fork", "planned"),
        ("fork", "redox"),
        ("spawn", "planned"),
        pytest.param("spawn", "redox", marks=pytest.mark.variant),
    ],
)
def test_workers_and_default_collate(pod: LocalCluster, url: str, policy: str, context: str) -> None:
    settings = settings_of(url, policy=policy, num_epochs=1)
    dataset = refill.CacheDataset(pod.pod_urls[0], transform=as_long, **settings)
    sampler = refill.EpochSampler(dataset)
    num_workers = 2 if context == "fork" else 1  # each that is spawned imports torch
    loader = DataLoader(dataset, 8, sampler=sampler, num_workers=num_workers, multiprocessing_context=context)
    batches = list(loader)
    starts = sorted(int(row[0]) for batch in batches for row in batch)
    assert starts == list(range(0, NUM_TOKENS - 32, 32))
    assert all((batch == batch[:, :1] + torch.arange(33)).all() for batch in batches)
    dataset.end_job()


def test_without_torch_and_by_ids(pod: LocalCluster, url: str) -> None:
    reader = refill.iterate(pod.pod_urls[0], batch_size=8, num_epochs=1, **settings_of(url))
    found = [int(row[0]) for batch in reader for row in batch["tokens"]]
    assert sorted(found) == list(range(0, NUM_TOKENS - 32, 32))
    dataset = refill.CacheDataset(pod.pod_urls[0], as_tuple=("tokens",), **settings_of(url))
    assert dataset[3][0].tolist() == list(range(96, 129))
    assert dataset[3][0].dtype == np.uint16
    dataset.end_job()


@pytest.mark.parametrize(
    "about",
    [
        "x", {}, {"name": "zarr"}, {"name": "tokens"}, {"name": "tokens", "dtype": "object"},
        {"name": "mds", "columns": 3}, {"name": "mds", "columns": [["x", "pickles", None]]},
        {"name": "litdata", "leaves": [["x", "graph"]]}, {"name": "objects", "field": "__id__", "kind": "jpg"},
        {"name": "tfrecord", "holds": "x"},
    ],
)  # fmt: skip
def test_an_index_that_describes_no_format_is_an_error_of_ours(about: Any) -> None:
    with pytest.raises(InvalidInput):
        parser_of({"format": about})


def test_parsers_copy_nothing_that_is_bytes() -> None:
    data = memoryview(b"\1\0\0\0x")
    parse = parser_of({"format": {"name": "mds", "columns": [["a", "bytes", None]]}})
    assert parse(data, 0)[1]["a"].obj is data.obj
    found = parser_of({"format": {"name": "objects", "field": "jpg", "kind": "jpg"}})(data, 0)[1]["jpg"]
    assert type(found) is Coded
    assert found.data.obj is data.obj
