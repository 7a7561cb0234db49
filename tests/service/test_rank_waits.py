"""Do requests wait for other ranks as long as they may, and no more when the pod ends?"""

from __future__ import annotations

import asyncio

import pytest

from refill_service.jobs.changes import Changes
from refill_service.jobs.rank_waits import RankWaits


def test_who_waits_is_answered_at_once_when_the_pod_ends() -> None:
    async def end_while_some_wait() -> list[object]:
        waits, came = RankWaits(3600), Changes()
        waiting = [asyncio.create_task(waits.until(came, lambda: False)) for _ in range(3)]
        await asyncio.sleep(0)
        waits.end()
        waits.end()  # twice is once
        return await asyncio.gather(*waiting, return_exceptions=True)

    assert [type(found) for found in asyncio.run(end_while_some_wait())] == [TimeoutError] * 3


def test_who_comes_later_does_not_wait() -> None:
    async def come_late() -> None:
        waits, came = RankWaits(3600), Changes()
        waits.end()
        await waits.until(came, lambda: True)
        with pytest.raises(TimeoutError):
            await waits.until(came, lambda: False)

    asyncio.run(come_late())
