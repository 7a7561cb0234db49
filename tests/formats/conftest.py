"""One pod for all tests of formats."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from refill_service.demo.local_cluster import LocalCluster


@pytest.fixture(scope="session")
def pod(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(1, tmp_path_factory.mktemp("pod"), {"memory_bytes": "64MiB", "wait_seconds": 2}) as cluster:
        yield cluster
