"""A store over a network stays open from job to job; one that failed, and a folder, do not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from tests.conftest import S3Server

from refill.errors import DatasetNotFound
from refill.protocol.job_spec import JobSpec
from refill_service.datasets.pack import pack
from refill_service.jobs.waits import RankWaits
from refill_service.object_store.open_store import WarmStores
from refill_service.object_store.store_counters import StoreCounters
from refill_service.object_store.store_settings import StoreSettings
from refill_service.pod.cache_node import CacheNode
from refill_service.settings import load_settings


def test_jobs_on_one_dataset_share_its_store(
    s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "a.bin").write_bytes(b"sample")
    url = f"s3://{s3_server.new_bucket()}/data"

    async def run() -> None:
        node = CacheNode(load_settings())
        with pytest.raises(DatasetNotFound):
            await node.live.register(JobSpec("early", url, policy="redox"))
        await pack(str(tmp_path), url)
        for name in ("first", "second"):
            await node.live.register(JobSpec(name, url, policy="redox"))
        first, second = (node.jobs[name].job.dataset for name in ("first", "second"))
        assert first.store is second.store
        await node.table.remove("first")
        traces = await node.jobs["second"].job.traces(0, RankWaits(1))
        asked, _ = traces.asked(0, np.arange(1))
        owner = node.jobs["second"].owner
        assert len((await owner.take(await owner.open(0, 0), 0, asked))[1]) == 1, "the first job's end closed the store"
        await node.close()

    asyncio.run(run())


def test_the_last_few_are_kept() -> None:
    stores = WarmStores(StoreSettings(), StoreCounters())
    first, kept = stores.get("s3://bucket/0")
    assert kept
    assert stores.get("s3://bucket/0")[0] is first
    for number in range(1, 9):
        stores.get(f"s3://bucket/{number}")
    assert stores.get("s3://bucket/0")[0] is not first, "nine are kept"
    again = stores.get("s3://bucket/8")[0]
    stores.forget("s3://bucket/8")
    assert stores.get("s3://bucket/8")[0] is not again


def test_a_folder_belongs_to_its_dataset(tmp_path: Path) -> None:
    stores = WarmStores(StoreSettings(), StoreCounters())
    (first, kept), (second, _) = stores.get(tmp_path.as_uri()), stores.get(tmp_path.as_uri())
    assert not kept
    assert first is not second
