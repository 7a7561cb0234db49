"""A store that does not answer: who waits is told, and the log says so for as long as it lasts."""

from __future__ import annotations

import asyncio
import logging

import pytest
from tests.waiting import until_in_loop

from refill.errors import StoreUnavailable
from refill_service.object_store import store_counters
from refill_service.object_store.store_counters import OverdueRequests, within


def test_who_waits_is_told() -> None:
    async def waits() -> None:
        async with within(0.01, "pod 1 waits for a chunk"):
            await asyncio.Event().wait()

    with pytest.raises(StoreUnavailable, match=r"^pod 1 waits for a chunk: the store has not answered for 0.01 s$"):
        asyncio.run(waits())


def test_reads_that_take_long_are_said_until_they_end(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_counters, "SAY_EVERY_SECONDS", 0.02)
    overdue = OverdueRequests()

    async def slow() -> int:
        with overdue.watched("s3://bucket/quick"):
            pass
        with overdue.watched("s3://bucket/slow"), overdue.watched("s3://bucket/later"):
            await until_in_loop(lambda: len(caplog.records) >= 3, "three lines in the log")
        said = len(caplog.records)
        await asyncio.sleep(0.06)
        return said

    with caplog.at_level(logging.WARNING):
        said = asyncio.run(slow())
    assert "2 reads wait for the store, the longest for 0 s: s3://bucket/slow" in caplog.text
    assert len(caplog.records) == said, "it is said though nothing waits"
