"""For how long does a piece of work hold an event loop? In CPU time of the loop's thread, which a loaded machine does
not make longer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import Context
from typing import Any, NamedTuple

__all__ = ["Piece", "TimedLoop"]


class Piece(NamedTuple):
    cpu_seconds: float
    what: str


class TimedLoop(asyncio.SelectorEventLoop):
    """Knows the longest piece of work that it has done since :meth:`begin_anew`."""

    def __init__(self) -> None:
        super().__init__()
        self.begin_anew()

    def begin_anew(self) -> None:
        self.longest = Piece(0.0, "nothing")

    def _timed(self, callback: Callable[..., object]) -> Callable[..., object]:
        def timed(*given: Any) -> object:
            before = time.thread_time()
            try:
                return callback(*given)
            finally:
                took = time.thread_time() - before
                if took > self.longest.cpu_seconds:
                    self.longest = Piece(took, repr(callback))

        return timed

    def call_soon(self, callback: Callable[..., object], *given: Any, context: Context | None = None) -> asyncio.Handle:
        return super().call_soon(self._timed(callback), *given, context=context)

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *given: Any, context: Context | None = None
    ) -> asyncio.Handle:
        return super().call_soon_threadsafe(self._timed(callback), *given, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *given: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return super().call_at(when, self._timed(callback), *given, context=context)
