"""How does a pod make a folder its own? By a lock that ends with the process.

The pod before it may not have ended yet, where Kubernetes was told not to wait for that (``kubectl delete --force``).
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from pathlib import Path

from refill.errors import InvalidInput

__all__ = ["locked"]

log = logging.getLogger(__name__)

_LOOK_AGAIN_SECONDS = 0.1


def locked(folder: Path, setting: str, wait_seconds: float = 0.0) -> int:
    """Makes the folder and locks it; returns the descriptor that holds the lock. Raises :class:`InvalidInput`.

    :param setting: that named the folder, for the error.
    :param wait_seconds: for another process to end. Nothing else is done meanwhile.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InvalidInput(f"{setting} {folder} can't be used: {error.strerror}") from error
    if not _takes(lock):
        log.warning("%s %s is used by another pod: waiting up to %g s for its end", setting, folder, wait_seconds)
        ends = time.monotonic() + wait_seconds
        while not _takes(lock):
            if time.monotonic() >= ends:
                os.close(lock)
                raise InvalidInput(f"{setting} {folder} is used by another pod: give each pod a folder of its own")
            time.sleep(_LOOK_AGAIN_SECONDS)
    return lock


def _takes(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
