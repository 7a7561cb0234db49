"""How is a file opened below a folder, though somebody else may put links there? The kernel refuses what leads out.

Linux' ``openat2`` follows links as long as they stay below the folder. Where it is not to be had (kernels before 5.6,
some sandboxes), segment after segment is opened, and no link is followed at all.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat

_SYS_OPENAT2 = 437
"""On every architecture."""
_RESOLVE_NO_MAGICLINKS = 0x02
_RESOLVE_BENEATH = 0x08
_TRIES = 16


class LinkLeadsOut(OSError):
    """A link on the way leads out of the folder."""


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_syscall = ctypes.CDLL(None, use_errno=True).syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(_OpenHow), ctypes.c_size_t)


def open_beneath(folder: int, path: str, flags: int) -> int:
    """A descriptor of ``path``, which is relative, below the folder that ``folder`` is a descriptor of.

    Raises :class:`LinkLeadsOut`, and :class:`OSError` as :func:`os.open` does.
    """
    flags |= os.O_CLOEXEC
    try:
        return _openat2(folder, path, flags)
    except OSError as error:
        # A sandbox that does not know the call may answer with either.
        if error.errno not in (errno.ENOSYS, errno.EPERM):
            raise
    return _walk(folder, path, flags)


def regular(file: int) -> int:
    """The descriptor given, if it is of a file with bytes; else it is closed and :class:`FileNotFoundError` raised."""
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise FileNotFoundError(errno.ENOENT, "no regular file")
    return file


def _openat2(folder: int, path: str, flags: int) -> int:
    how = _OpenHow(flags, 0, _RESOLVE_BENEATH | _RESOLVE_NO_MAGICLINKS)
    for _ in range(_TRIES):
        found = _syscall(_SYS_OPENAT2, folder, os.fsencode(path), ctypes.byref(how), ctypes.sizeof(how))
        if found >= 0:
            return int(found)
        number = ctypes.get_errno()
        if number not in (errno.EAGAIN, errno.EINTR):  # something was renamed on the way
            break
    kind = LinkLeadsOut if number in (errno.EXDEV, errno.ELOOP) else OSError
    raise kind(number, os.strerror(number), path)


def _walk(folder: int, path: str, flags: int) -> int:
    *above, name = path.split("/")
    here = os.dup(folder)
    try:
        for segment in above:
            there = _open_segment(here, segment, os.O_PATH | os.O_DIRECTORY)
            os.close(here)
            here = there
        return _open_segment(here, name, flags)
    finally:
        os.close(here)


def _open_segment(folder: int, segment: str, flags: int) -> int:
    if stat.S_ISLNK(os.stat(segment, dir_fd=folder, follow_symlinks=False).st_mode):
        raise LinkLeadsOut(errno.ELOOP, "a link", segment)
    return os.open(segment, flags | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
