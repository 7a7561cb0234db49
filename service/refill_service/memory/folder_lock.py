"""How does a pod make a folder its own? By a lock that ends with the process.

The pod before it may not have ended yet, where Kubernetes was told not to wait for that (``kubectl delete --force``).
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from refill.errors import InvalidInput
from refill_service.memory.kept_files import open_or_make

__all__ = ["locked", "wait_until_left"]

log = logging.getLogger(__name__)

_LOOK_AGAIN_SECONDS = 0.1


def locked(folder: Path, setting: str) -> int:
    """Makes the folder and locks it; returns the descriptor that holds the lock. Raises :class:`InvalidInput`.

    :param setting: that named the folder, for the error.
    """
    with _lock_of(folder, setting) as lock:
        if not _takes(lock):
            raise InvalidInput(f"{setting} {folder} is used by another pod: give each pod a folder of its own")
        return os.dup(lock)  # the lock is held until both are closed


def wait_until_left(folder: Path, setting: str, wait_seconds: float) -> None:
    """Until no other process has the folder, or time is up: then :func:`locked` says so. Nothing else is done
    meanwhile. Raises as that for a folder that can't be used."""
    ends = time.monotonic() + wait_seconds
    with _lock_of(folder, setting) as lock:
        if not _takes(lock):
            log.warning("%s %s is used by another pod: waiting up to %g s for its end", setting, folder, wait_seconds)
        while not _takes(lock) and time.monotonic() < ends:
            time.sleep(_LOOK_AGAIN_SECONDS)


@contextmanager
def _lock_of(folder: Path, setting: str) -> Iterator[int]:
    """The descriptor of the file that is locked in place of the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open_or_make(folder / "lock")
        try:
            yield lock
        finally:
            os.close(lock)
    except OSError as error:
        raise InvalidInput(f"{setting} {folder} can't be used: {error.strerror}") from error


def _takes(lock: int) -> bool:
    """Whether it is ours now. Raises OSError where the file system knows no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
