"""May the process fork or end while a thread of ours works? Not before that thread has done what it is at, if it can.

A fork in the middle of it would leave the child with locks that nobody releases. The end is worse: Python ends a thread
that asks for the interpreter's lock then, and inside a call of torch's that aborts the whole process
(pytorch/pytorch#38228), after a training that went well.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Iterator

_WAIT_SECONDS = 1.0
"""A thread that waits for a pod for longer does no harm: it is in no call of torch's."""

_changing = threading.Condition()
_num_working = 0
_num_pausing = 0


@contextlib.contextmanager
def background_work() -> Iterator[None]:
    """What a thread that nobody joins does at a time. It does not begin while the process forks, or ends."""
    global _num_working
    with _changing:
        _changing.wait_for(lambda: not _num_pausing)
        _num_working += 1
    try:
        yield
    finally:
        with _changing:
            _num_working -= 1
            _changing.notify_all()


def _pause() -> None:
    global _num_pausing
    _changing.acquire()
    _num_pausing += 1
    _changing.wait_for(lambda: not _num_working, _WAIT_SECONDS)


def _go_on() -> None:
    global _num_pausing
    _num_pausing -= 1
    _changing.notify_all()
    _changing.release()


def _in_child() -> None:
    global _changing, _num_working, _num_pausing
    _changing, _num_working, _num_pausing = threading.Condition(), 0, 0


os.register_at_fork(before=_pause, after_in_parent=_go_on, after_in_child=_in_child)
atexit.register(_pause)
