"""Is the home pod still the one that it was? Asked now and then by the process that registered the job.

A pod that was restarted waits for its ranks to report what they have received. A rank whose loop stands still, because
it waits for another rank, asks for nothing. If it did not report by itself, the other rank could wait for it in turn.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from typing import Protocol

from refill.errors import RefillError

__all__ = ["EVERY_SECONDS", "watch_home"]

EVERY_SECONDS = 3.0
_FORK_WAITS_SECONDS = 1.0


class _Watched(Protocol):
    look_every_seconds: float

    def look_after_home(self) -> None: ...


_asking = threading.Lock()
"""Locked while a watch asks: a fork in the middle of that would leave the child with locks that nobody releases."""

_locked_for_fork = False


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
        connection = watched()
        if connection is None:
            return
        with _asking, contextlib.suppress(RefillError):  # requests for samples will raise it
            connection.look_after_home()
        del connection


def _before_fork() -> None:
    global _locked_for_fork
    _locked_for_fork = _asking.acquire(timeout=_FORK_WAITS_SECONDS)


def _after_fork() -> None:
    if _locked_for_fork:
        _asking.release()


def _in_child() -> None:
    global _asking
    _asking = threading.Lock()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
