"""How does a pod open what it has kept on a volume, though somebody else may have written there?

Only regular files are opened, and no link is followed. What is none of these is put aside, in one line of the log, so
that it does not come again.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from pathlib import Path

__all__ = ["NoKeptFile", "open_kept", "open_or_make", "put_aside"]

log = logging.getLogger(__name__)

_ASIDE = ".aside"


class NoKeptFile(OSError):
    """It is there, and no file that a pod has kept."""


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
