"""How does a pod make a folder its own? By a lock that ends with the process."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from refill.errors import InvalidInput

__all__ = ["locked"]


def locked(folder: Path, setting: str) -> int:
    """Makes the folder and locks it; returns the descriptor that holds the lock. Raises :class:`InvalidInput`.

    :param setting: that named the folder, for the error.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InvalidInput(f"{setting} {folder} can't be used: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise InvalidInput(f"{setting} {folder} is used by another pod: give each pod a folder of its own") from error
    return lock
