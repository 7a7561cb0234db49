"""How does a pod make a folder its own? By a lock that ends with the process.

The pod before it may not have ended yet, where Kubernetes was told not to wait for that (``kubectl delete --force``).
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from refill.errors import InvalidInput

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


_ASIDE = ".aside"


class NoKeptFile(OSError):
    """It is there, and no file that a pod has kept: somebody else may write to its volume. It is put aside, so that it
    does not come again."""


def open_kept(path: Path, flags: int, mode: int = 0o600) -> int:
    """A descriptor of a regular file. Raises :class:`NoKeptFile` for a link, a pipe, a device or a folder, and
    :class:`OSError` as :func:`os.open` does."""
    try:
        # A pipe would be waited for until somebody opens its other end.
        file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ENODEV):
            raise NoKeptFile(error.errno, "no regular file", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise NoKeptFile(errno.EINVAL, "no regular file", str(path))
    return file


def open_or_make(path: Path) -> int:
    """A descriptor, to read and write, of a regular file that is made where there is none; what is there and is none is
    put aside."""
    try:
        return open_kept(path, os.O_RDWR | os.O_CREAT)
    except NoKeptFile as error:
        put_aside(path, error.strerror)
        return open_kept(path, os.O_RDWR | os.O_CREAT)


def put_aside(path: Path, why: object) -> None:
    """It is not opened again, and whoever looks for the cause finds it. Raises nothing."""
    aside = path.with_name(f"{path.name}{_ASIDE}")
    try:
        os.rename(path, aside)
    except OSError as error:
        log.warning("%s can be neither used nor put aside (%s): %s", path, error.strerror, why)
        return
    log.warning("%s can't be used, and is put aside as %s: %s", path, aside.name, why)
