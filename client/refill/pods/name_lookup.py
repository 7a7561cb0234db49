"""Which addresses does a name have now? Looked up by a thread, since nobody can tell a resolver how long it may take.

With DNS away a resolver takes 5 s, 10 s or more to say so. Whoever connects waits for its limit, and then asks again.
The thread goes on meanwhile: its answer, which came too late for one try, is there for the next. So a resolver that
always takes longer than the limit finds names, too, and one that never answers holds a thread for each name, not more.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import Future, wait
from typing import Any

Addresses = list[tuple[Any, ...]]
"""As ``socket.getaddrinfo`` has them."""

_LATE_ANSWER_SECONDS = 10.0
"""An answer that nobody has waited for is good for so long. The next try comes sooner, and a pod may move later."""


class _Lookup:
    """One lookup of one name."""

    def __init__(self, host: str, port: int) -> None:
        self.answer: Future[Addresses] = Future()
        self._host = host
        self._port = port
        self._ended_at = float("inf")

    def make(self) -> None:
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except BaseException as error:  # whoever waits is to get it
            self._ended_at = time.monotonic()
            self.answer.set_exception(error.with_traceback(None))
        else:
            self._ended_at = time.monotonic()
            self.answer.set_result(found)

    @property
    def is_of_use(self) -> bool:
        """It is under way, or has just ended."""
        return time.monotonic() < self._ended_at + _LATE_ANSWER_SECONDS


_changing = threading.Lock()
_lookups: dict[tuple[str, int], _Lookup] = {}
"""Those whose answer nobody has taken yet; one at most for each name."""


def addresses_of(host: str, port: int, seconds: float) -> Addresses:
    """Looked up anew, unless an earlier lookup is still under way, or has ended after all who waited for it had left.

    Raises OSError when the name has no address, or none is known within ``seconds``.
    """
    lookup = _joined(host, port)
    wait([lookup.answer], seconds)
    if not lookup.answer.done():
        raise OSError(f"the name {host} is still being looked up after {seconds:g} s: does DNS answer?")
    with _changing:
        if _lookups.get((host, port)) is lookup:
            del _lookups[host, port]
    try:
        return lookup.answer.result()
    finally:
        del lookup  # no cycle: it has the error, whose traceback would lead back to it and to whoever asks


def _joined(host: str, port: int) -> _Lookup:
    with _changing:
        lookup = _lookups.get((host, port))
        if lookup is not None and lookup.is_of_use:
            return lookup
        lookup = _Lookup(host, port)
        try:
            threading.Thread(target=lookup.make, name="refill-lookup", daemon=True).start()
        except RuntimeError:  # there are too many, or the process ends
            _lookups.pop((host, port), None)
        else:
            _lookups[host, port] = lookup
            return lookup
    lookup.make()
    return lookup


def _in_child() -> None:
    """The thread that forked is the only one here: no lookup goes on, and nobody releases a lock."""
    global _changing
    _changing = threading.Lock()
    _lookups.clear()


os.register_at_fork(after_in_child=_in_child)
