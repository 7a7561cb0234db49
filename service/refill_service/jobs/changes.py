"""How is a fact waited for that many things can bring about? By looking again whenever something has changed.

What :class:`asyncio.Condition` is for, but notified by functions that can't await.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Changes"]


class Changes:
    """Of one thing, in one event loop."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def happened(self) -> None:
        """Fact: something has changed. Whoever waits looks again."""
        self._next.set()
        self._next = asyncio.Event()

    async def wait_until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            await self._next.wait()
