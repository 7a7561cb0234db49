"""How does a request wait: for other ranks, or for a fact that many things can bring about?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


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
