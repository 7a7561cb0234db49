"""What waits until ranks have their first batches? Reads ahead, where nothing was in memory when ranks asked."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["HeldBack"]


class HeldBack:
    """Holds back one job's reads ahead until its ranks have their first batches."""

    def __init__(self) -> None:
        self._num_first = 0
        """Requests that came when nothing was in memory."""
        self._starts: dict[asyncio.Future[int | None], None] = {}

    @property
    def holds_back(self) -> bool:
        return self._num_first > 0

    @contextmanager
    def first(self, *, is_first: bool) -> Iterator[None]:
        """While a request lasts that is one of the first."""
        self._num_first += is_first
        try:
            yield
        finally:
            self._num_first -= is_first
            if not self.holds_back:
                for start in list(self._starts):
                    self.begin(start, None)

    def start(self, due: int | None) -> asyncio.Future[int | None]:
        """Done when a read may begin: at once, if it is due. The result is when it is due then."""
        start: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._starts[start] = None
        if due is not None or not self.holds_back:
            self.begin(start, due)
        return start

    def begin(self, start: asyncio.Future[int | None], due: int | None) -> None:
        """Fact: this read is due now, or may begin; it may have begun long since."""
        if start in self._starts:
            del self._starts[start]
            if not start.done():
                start.set_result(due)
