"""How long does a request wait for other ranks? Until they have come as far, for so long at most, and no more when the
pod ends.

A pod that ends waits for its requests, and the ranks that those wait for may need what comes after that pod.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from refill_service.jobs.changes import Changes

__all__ = ["RankWaits"]


class RankWaits:
    """Of all requests of a pod. ``seconds``: at most."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._under_way: set[asyncio.Timeout] = set()

    async def until(self, changes: Changes, holds: Callable[[], bool]) -> None:
        """Raises TimeoutError when it does not hold in time."""
        async with asyncio.timeout(self._seconds) as wait:
            self._under_way.add(wait)
            try:
                await changes.wait_until(holds)
            finally:
                self._under_way.discard(wait)

    def end(self) -> None:
        """Whoever waits, or would, is answered at once."""
        self._seconds = 0
        for wait in self._under_way:
            if not wait.expired():
                wait.reschedule(0)
