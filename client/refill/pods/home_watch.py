"""Does a rank's home pod hear of it now and then? A thread of the process that registered the job sees to that.

A rank whose loop stands still asks for nothing: it validates, or waits for another rank. It is there all the same, and
another process that calls itself the same must not take its place.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from typing import Protocol

from refill.errors import RefillError
from refill.pods.background_work import background_work

EVERY_SECONDS = 3.0


class _Watched(Protocol):
    """Whoever is asked now and then to look after its home pod."""

    look_every_seconds: float

    def look_after_home(self) -> None: ...


def watch_home(connection: _Watched) -> threading.Event:
    """Let a thread call ``look_after_home`` every few seconds, as long as the connection is in use, and whenever what
    this returns is set."""
    is_due = threading.Event()
    arguments = weakref.ref(connection), connection.look_every_seconds, is_due
    thread = threading.Thread(target=_watch, args=arguments, name="refill-watch", daemon=True)
    thread.start()
    return is_due


def _watch(watched: weakref.ref[_Watched], seconds: float, is_due: threading.Event) -> None:
    while True:
        is_due.wait(seconds)
        is_due.clear()
        with background_work():
            connection = watched()
            if connection is None:
                return
            with contextlib.suppress(RefillError):  # requests for samples will raise it
                connection.look_after_home()
            del connection
