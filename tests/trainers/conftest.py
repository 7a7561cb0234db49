"""What do tests of trainers share? One pair of pods and one small dataset."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from tests.trainers.launching import Place, pack_numbered

from refill_service.demo.local_cluster import LocalCluster


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("trainers")
    dataset = asyncio.run(pack_numbered(folder))
    # Jobs stay, since tests look at their receipts: so each takes a small part of what is free.
    settings = {"memory_bytes": "64MiB", "job_memory_fraction": 0.02, "wait_seconds": 1}
    with LocalCluster(2, folder, settings | {"dataset_urls": folder.as_uri()}) as cluster:
        yield Place(cluster, dataset, folder)
