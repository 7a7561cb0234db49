"""A list of hundreds of jobs is made a few jobs at a time: others are answered meanwhile."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

import httpx

from refill_service.planned.planned_job import PlannedJob
from refill_service.pod.cache_node import CacheNode
from refill_service.serving.app import client_app
from refill_service.settings import load_settings

NUM_JOBS, AT_ONCE = 300, 60


def test_others_have_their_turns_while_jobs_are_listed() -> None:
    turns = 0
    described: Counter[int] = Counter()

    class Described:
        """Notes in which turn of the loop it was asked."""

        def __init__(self, number: int) -> None:
            self.spec = SimpleNamespace(name=f"job-{number}", holder="")

        def info(self) -> dict[str, Any]:
            described[turns] += 1
            return {"spec": {"name": self.spec.name}}

        def users(self) -> dict[str, Any]:
            return {}

    async def others(listing: asyncio.Task[httpx.Response]) -> None:
        nonlocal turns
        while not listing.done():
            turns += 1
            await asyncio.sleep(0)

    async def list_all() -> httpx.Response:
        node = CacheNode(load_settings())
        for number in range(NUM_JOBS):
            node.planned.jobs[f"job-{number}"] = cast("PlannedJob", Described(number))
        transport = httpx.ASGITransport(client_app(node))
        async with httpx.AsyncClient(transport=transport, base_url="http://pod") as client:
            listing = asyncio.create_task(client.get("/v1/jobs"))
            await others(listing)
            return listing.result()

    answer = asyncio.run(list_all())
    assert len(answer.json()) == NUM_JOBS
    assert described.total() == NUM_JOBS
    assert max(described.values()) <= AT_ONCE
