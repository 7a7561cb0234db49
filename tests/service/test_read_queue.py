"""Which reads are begun next: what somebody waits for, then what is ordered ahead, and nothing that was forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

from refill_service.planned.share_reads import ReadQueue


class Reads:
    """Begins reads, each of one sample, and notes which; they end when the test says so."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self._end = asyncio.Event()
        self.queue: ReadQueue[int] = ReadQueue(
            lambda: False, lambda read: (read, read + 1), self._side_by_side, self._begin
        )

    @staticmethod
    def _side_by_side(bounds: Sequence[tuple[int, int]], most: int) -> list[list[int]]:
        return [[place] for place in range(len(bounds))]

    def _begin(self, reads: list[int]) -> list[asyncio.Task[None]]:
        self.begun += reads
        return [asyncio.create_task(self._until_end()) for _ in reads]

    async def _until_end(self) -> None:
        await self._end.wait()

    async def all_begun(self) -> list[int]:
        """When all have ended that may begin."""
        self._end.set()
        while True:
            before = len(self.begun)
            for _ in range(1000):
                await asyncio.sleep(0)
            await asyncio.to_thread(lambda: None)  # behind what threads put together
            if len(self.begun) == before:
                await self.queue.close()
                return self.begun


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_what_somebody_waits_for_goes_first() -> None:
    async def test() -> None:
        reads = Reads()
        reads.queue.put(range(300), urgent=False)
        reads.queue.put([1000, 1001], urgent=True)
        assert (await reads.all_begun())[:2] == [1000, 1001]
        assert sorted(reads.begun) == [*range(300), 1000, 1001]

    run(test())


def test_what_is_forgotten_does_not_begin_and_what_somebody_waits_for_does() -> None:
    """Whatever has become of it by then: ordered, put together by a thread, or beside others that are under way."""

    async def test(turns: int) -> None:
        reads = Reads()
        reads.queue.put(range(300), urgent=False)
        for _ in range(turns):
            await asyncio.sleep(0)
        before = set(reads.begun)
        reads.queue.hasten({7, 290} - before)
        left = set(reads.queue.forget())
        reads.queue.put([500], urgent=False)
        begun = await reads.all_begun()
        assert len(begun) == len(set(begun))
        assert set(begun).isdisjoint(left)
        assert set(begun) | left == {*range(300), 500}
        assert {7, 290, 500} | before <= set(begun)

    for turns in (0, 1, 2, 3, 5, 50, 3000):
        run(test(turns))
