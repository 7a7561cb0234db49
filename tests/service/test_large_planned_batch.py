"""A batch of very many positions: others have their turns while its places are found, and while it leaves."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextvars import Context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.security.hostile_datasets import write_many_samples

from refill.protocol.job_spec import JobSpec
from refill.protocol.wire_format import BatchRequest
from refill_service.cache_core.planned.job_orders import JobOrders
from refill_service.planned.share_server import ShareServer
from refill_service.pod.cache_node import CacheNode
from refill_service.settings import load_settings

NUM_SAMPLES, CHUNK, AT_ONCE = 6_000, 64, 1 << 12


class CountingLoop(asyncio.SelectorEventLoop):
    num_calls = 0

    def call_soon(self, callback: Callable[..., object], *given: Any, context: Context | None = None) -> asyncio.Handle:  # type: ignore[override]
        self.num_calls += 1
        return super().call_soon(callback, *given, context=context)


def test_a_large_cold_batch(tmp_path: Path) -> None:
    loop, placed = CountingLoop(), list[tuple[int, int]]()
    url = write_many_samples(tmp_path, NUM_SAMPLES)

    class Orders(JobOrders):
        """Notes how many positions it is asked for, and when."""

        def places(self, epoch: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            placed.append((loop.num_calls, len(positions)))
            return super().places(epoch, positions)

    async def taken() -> np.ndarray:
        node = CacheNode(load_settings(memory_bytes="1GiB", dataset_urls=url))
        spec = JobSpec("large", url, policy="planned", chunk_size=CHUNK)
        await node.planned.register(spec, None, begun=False, again=False)
        job = node.planned.jobs["large"]
        job.orders.__class__ = Orders
        try:
            loop.num_calls = 0
            everything = np.random.default_rng(1).permutation(NUM_SAMPLES)
            ids, payloads = await job.take(BatchRequest(0, 0, everything), says_damage=False)
            assert set(map(len, payloads)) == {1}
            return ids
        finally:
            await node.close()

    try:
        ids = loop.run_until_complete(taken())
    finally:
        loop.close()
    assert sorted(ids.tolist()) == list(range(NUM_SAMPLES))
    assert max(count for _, count in placed) <= AT_ONCE
    assert len({turn for turn, _ in placed}) == len(placed), "two pieces were placed in one turn"


def test_a_large_batch_that_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves as a small one does, share by share, and others have their turns in between."""
    loop, taken, waited = CountingLoop(), Counter[int](), list[int]()
    url = write_many_samples(tmp_path, NUM_SAMPLES)
    take_entries, take = ShareServer.take_entries, ShareServer.take

    def at_once(server: ShareServer, epoch: int, places: np.ndarray, entries: list[int]) -> Any:
        taken[loop.num_calls] += len(entries)
        return take_entries(server, epoch, places, entries)

    def waits(server: ShareServer, epoch: int, places: np.ndarray, **how: Any) -> Any:
        waited.append(len(places))
        return take(server, epoch, places, **how)

    async def batches() -> list[np.ndarray]:
        node = CacheNode(load_settings(memory_bytes="1GiB", dataset_urls=url))
        spec = JobSpec("warm", url, chunk_size=CHUNK, num_epochs=1, policy_settings={"shares": 4, "run": 64})
        await node.planned.register(spec, None, begun=False, again=False)
        job = node.planned.jobs["warm"]
        try:
            first, _ = await job.take(BatchRequest(0, 0, np.arange(CHUNK * 8)), says_damage=False)
            while job.resident_bytes < NUM_SAMPLES - len(first):  # noqa: ASYNC110  nobody tells of what is read ahead
                await asyncio.sleep(0.001)
            monkeypatch.setattr(ShareServer, "take_entries", at_once)
            monkeypatch.setattr(ShareServer, "take", waits)
            second, _ = await job.take(BatchRequest(0, 0, np.arange(CHUNK * 8, CHUNK * 20)), says_damage=False)
            return [first, second]
        finally:
            await node.close()

    try:
        ids = np.concatenate(loop.run_until_complete(batches()))
    finally:
        loop.close()
    assert len(set(ids.tolist())) == len(ids) == CHUNK * 20
    assert (waited, sum(taken.values())) == ([], CHUNK * 12)
    assert max(taken.values()) <= 256
