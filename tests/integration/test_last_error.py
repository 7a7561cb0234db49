"""The error that a request ends with is the cause, and not the first pod that was silent because of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.chaos.store_relay import StoreFaults, store_relay
from tests.conftest import S3Server
from tests.pod_fixtures import kind_of, write_files

from refill.errors import EpochNotReady, StoreUnavailable
from refill.pods.planned_connection import PlannedConnection
from refill.pods.pod_connection import PodConnection
from refill.protocol.job_spec import JobSpec
from refill_service.datasets.pack import pack
from refill_service.demo.local_cluster import LocalCluster

WAIT_SECONDS = 6
"""Longer than a client was once ready to wait for its last answer."""


@pytest.mark.parametrize("order", ["keyed", "explicit"])
def test_a_rank_that_never_shows_up_is_named(packed: tuple[str, object], tmp_path: Path, order: str) -> None:
    spec = JobSpec("job", packed[0], policy="redox", chunk_size=16, memory_bytes=600_000, world_size=2, order=order)
    with LocalCluster(2, tmp_path, {"memory_bytes": "4MiB", "wait_seconds": WAIT_SECONDS}) as cluster:
        rank = PodConnection(cluster.pod_urls[0], spec, 0, None, 3)
        if order == "explicit":
            rank.post_trace(0, np.arange(500))
        with pytest.raises(EpochNotReady, match=r"rank 0 gives up on .* waits for (the trace of )?rank 1") as caught:
            epochs(rank, 0, 1)
        assert caught.value.details["ranks"] == [1]


@pytest.fixture
def store(s3_server: S3Server) -> Iterator[StoreFaults]:
    with store_relay(s3_server.endpoint_url, seed=1) as faults:
        yield faults


@pytest.mark.parametrize("policy", [pytest.param("redox", marks=pytest.mark.variant), "planned"])
def test_a_store_that_hangs_is_blamed(
    store: StoreFaults, s3_server: S3Server, s3_environment: S3Server, tmp_path: Path, policy: str
) -> None:
    (tmp_path / "files").mkdir()
    write_files(tmp_path / "files", 400)
    dataset = f"s3://{s3_server.new_bucket()}/data"
    asyncio.run(pack(str(tmp_path / "files"), dataset, blob_bytes=100_000))
    environment = s3_server.environment | {"AWS_ENDPOINT_URL": store.url}
    settings = {"memory_bytes": "4MiB", "wait_seconds": 1, "pinned_fraction": 0}
    with LocalCluster(2, tmp_path, settings, environment) as cluster:
        spec = JobSpec("job", dataset, policy=policy, chunk_size=8, memory_bytes=200_000)
        rank = kind_of(spec)(cluster.pod_urls[0], spec, 0, None, 3)
        store.answers.clear()
        with pytest.raises(StoreUnavailable, match=f"waits to open {dataset}: the store has not answered for 1 s"):
            rank.info()
        store.answers.set()
        rank.timeout_seconds = 60
        rank.batch(0, np.arange(20))
        store.answers.clear()
        rank.timeout_seconds = 3
        of_planned = "job job waits for the store: nothing has come for 1 s"
        said = of_planned if policy == "planned" else f"pod [01] waits for .*{dataset}.* for 1 s"
        with pytest.raises(StoreUnavailable, match=said):
            epochs(rank, 0)  # what is in memory comes
        store.answers.set()
        rank.timeout_seconds = 60
        assert sorted(epochs(rank, 0)) == list(range(400))


def epochs(rank: PodConnection | PlannedConnection, *epochs: int) -> list[int]:
    length = rank.info()["samples_per_rank"]
    asked = [(epoch, start) for epoch in epochs for start in range(0, length, 20)]
    return [s for epoch, start in asked for s in rank.batch(epoch, np.arange(start, start + 20)).sample_ids.tolist()]
