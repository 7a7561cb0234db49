"""How many bytes may be on their way at once? A gate that lets through what fits, in the order of asking."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

__all__ = ["ByteGate"]


class ByteGate:
    """At most ``limit_bytes`` inside; something larger than the limit goes through alone.

    :param opens_with_bytes: after a time with nobody inside, this much may be inside at first, and as much more as has
        come through since (TCP's slow start): what was asked for first need not share the store's bandwidth with all
        that follows. None: the limit.
    """

    def __init__(self, limit_bytes: int, opens_with_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._opens_with_bytes = limit_bytes if opens_with_bytes is None else min(opens_with_bytes, limit_bytes)
        self._open_bytes = self._opens_with_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def passage(self, size_bytes: int, *, urgent: bool = False) -> AsyncIterator[None]:
        """
        :param urgent: go before all who wait.
        """
        if self._waiting or not self._fits(size_bytes):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            entry = (size_bytes, turn)
            if urgent:
                self._waiting.appendleft(entry)
            else:
                self._waiting.append(entry)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._leave(size_bytes)  # let in and cancelled at once
                else:
                    with suppress(ValueError):  # not there: it was passed over already
                        self._waiting.remove(entry)
                    self._admit()
                raise
        else:
            self.used_bytes += size_bytes
        try:
            yield
        finally:
            self._leave(size_bytes)

    def _fits(self, size_bytes: int) -> bool:
        return self.used_bytes == 0 or self.used_bytes + size_bytes <= self._open_bytes

    def _leave(self, size_bytes: int) -> None:
        self.used_bytes -= size_bytes
        self._open_bytes = min(self.limit_bytes, self._open_bytes + size_bytes)
        if self.used_bytes == 0 and not self._waiting:
            self._open_bytes = self._opens_with_bytes
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            size_bytes, turn = self._waiting.popleft()
            if not turn.cancelled():  # who waits may have been cancelled and not run since
                self.used_bytes += size_bytes
                turn.set_result(None)
