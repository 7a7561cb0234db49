"""Who waits for a store that does not answer, and who learns of it?

A request that waits is answered in time with what it waits for: else whoever asked would blame the pod. And the pod's
log says so every ten seconds, as long as it lasts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from refill.errors import StoreUnavailable

__all__ = ["OverdueRequests", "within"]

log = logging.getLogger(__name__)

SAY_EVERY_SECONDS = 10.0


@asynccontextmanager
async def within(seconds: float, what: str) -> AsyncIterator[None]:
    """Raises :class:`StoreUnavailable` when what it holds takes longer.

    :param what: who waits for what, for the error.
    """
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise StoreUnavailable(f"{what}: the store has not answered for {seconds:g} s") from error


class OverdueRequests:
    """Reads of one store that are under way, and a line in the log when one takes long. Belongs to one event loop."""

    def __init__(self) -> None:
        self._under_way: dict[object, tuple[float, str]] = {}
        """Since when, and of what; the oldest first."""
        self._look: asyncio.TimerHandle | None = None

    @contextmanager
    def watched(self, url: str) -> Iterator[None]:
        key = object()
        self._under_way[key] = time.monotonic(), url
        if self._look is None:
            self._look_in(SAY_EVERY_SECONDS)
        try:
            yield
        finally:
            del self._under_way[key]

    def _look_in(self, seconds: float) -> None:
        self._look = asyncio.get_running_loop().call_later(seconds, self._say)

    def _say(self) -> None:
        self._look = None
        if not self._under_way:
            return
        since, url = next(iter(self._under_way.values()))
        waits = time.monotonic() - since
        if waits >= SAY_EVERY_SECONDS:
            log.warning("%d reads wait for the store, the longest for %.0f s: %s", len(self._under_way), waits, url)
            self._look_in(SAY_EVERY_SECONDS)
        else:
            self._look_in(SAY_EVERY_SECONDS - waits)
