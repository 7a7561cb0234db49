"""How does a request wait: for other ranks, for a fact that many things can bring about, for all parts of its work?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

from refill_service.memory.loop_turns import in_turn

__all__ = ["Changes", "RankWaits", "all_done", "given_up"]

_MOST_GIVEN_UP = 1 << 7
"""Tasks that end together, some 50 us each: there may be as many reads as a job has chunks."""


class RankWaits:
    """Waits of all requests of a pod for other ranks: until they have come as far, and no more when the pod ends. A pod
    that ends waits for its requests, and the ranks that those wait for may need what comes after that pod.

    :param seconds: the longest that one waits.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._under_way: set[asyncio.Timeout] = set()

    async def until(self, changes: Changes, holds: Callable[[], bool]) -> None:
        """Raises TimeoutError when it does not hold in time."""
        try:
            async with asyncio.timeout(self._seconds) as wait:
                self._under_way.add(wait)
                try:
                    await changes.wait_until(holds)
                finally:
                    self._under_way.discard(wait)
        except TimeoutError:
            if not holds():  # else both came at once, as when the process stood still
                raise

    def end(self) -> None:
        """Whoever waits, or would, is answered at once."""
        self._seconds = 0
        for wait in self._under_way:
            if not wait.expired():
                wait.reschedule(0)


class Changes:
    """Tells who waits for a fact to look again. What :class:`asyncio.Condition` is for, but notified by functions that
    can't await."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def happened(self) -> None:
        """Fact: something has changed. Whoever waits looks again."""
        self._next.set()
        self._next = asyncio.Event()

    async def wait_until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._next.wait()


Result = TypeVar("Result")


async def all_done(*work: Coroutine[Any, Any, Result]) -> list[Result]:
    """Run all to their end, then raise the first error: what one owner answered is not lost to another's failure."""
    if len(work) == 1:
        return [await work[0]]
    try:
        results = await asyncio.gather(*map(in_turn, work), return_exceptions=True)
    finally:
        for each in work:
            each.close()  # who was cancelled before it began
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


async def given_up(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel them, a few at a time, and wait until they have ended."""
    left = list(tasks)
    for start in range(0, len(left), _MOST_GIVEN_UP):
        piece = left[start : start + _MOST_GIVEN_UP]
        for task in piece:
            task.cancel()
        await asyncio.gather(*piece, return_exceptions=True)
