"""For how long does a piece of work hold an event loop? In CPU time of the loop's thread, which a loaded machine does
not make longer; less what the garbage collector takes meanwhile, which depends on all that the process holds."""

from __future__ import annotations

import asyncio
import gc
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
        self._collecting_seconds = self._collecting_since = 0.0
        gc.callbacks.append(self._collects)
        self.begin_anew()

    def close(self) -> None:
        gc.callbacks.remove(self._collects)
        super().close()

    def _collects(self, phase: str, _: dict[str, int]) -> None:
        """In whichever thread: of others, it may be counted though the loop did not wait for it."""
        if phase == "start":
            self._collecting_since = time.thread_time()
        elif phase == "stop":
            self._collecting_seconds += time.thread_time() - self._collecting_since

    def begin_anew(self) -> None:
        self.longest = Piece(0.0, "nothing")

    def _timed(self, callback: Callable[..., object]) -> Callable[..., object]:
        def timed(*given: Any) -> object:
            before = time.thread_time() - self._collecting_seconds
            try:
                return callback(*given)
            finally:
                took = time.thread_time() - self._collecting_seconds - before
                if took > self.longest.cpu_seconds:
                    self.longest = Piece(took, repr(callback))

        return timed

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *given: Any, context: Context | None = None
    ) -> asyncio.Handle:
        return super().call_soon(self._timed(callback), *given, context=context)

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *given: Any, context: Context | None = None
    ) -> asyncio.Handle:
        return super().call_soon_threadsafe(self._timed(callback), *given, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *given: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return super().call_at(when, self._timed(callback), *given, context=context)
