"""How does an answer reach a client on the pod's machine without crossing a socket? In memory that the client lends.

The client asks the pod for a one-time name, as it asks for anything, makes a segment of memory, hands it over by that
name at a Unix socket beside the pod's own (``PATH.memory``), and names it with each request; the pod writes the frame
there and answers with its length alone. A segment is lent again when nothing points into it any more. It is the
client's memory: allocated before the pod sees it, and gone with the client. The pod lets go of it when the connection
that it came over closes, however that comes about.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import time
import weakref
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from refill.errors import RefillError

__all__ = ["SharedSegment", "SharedSegments"]

_MOST_SEGMENTS = 2
"""One holds the batch that is in use, one the next; with all in use, answers cross the socket."""
_ROUND_BYTES = 2 << 20
_OFFER_SECONDS = 5.0
_TRY_AGAIN_SECONDS = 60.0
_TAKEN = b"+"


class SharedSegments:
    """The segments of one thread, lent to the pod behind one Unix socket.

    :param ask_for_name: of the pod. Raises :class:`RefillError` where it takes no memory.
    """

    def __init__(self, socket_path: str, ask_for_name: Callable[[], str]) -> None:
        self._path = f"{socket_path}.memory"
        self._ask_for_name = ask_for_name
        self._free: list[SharedSegment] = []
        self._num_open = 0
        self._frame_bytes = 0
        self._try_again_at = 0.0

    def lend(self) -> SharedSegment | None:
        """One that is free and holds frames of the size seen so far; None: there is none to be had."""
        while self._free:
            segment = self._free.pop()
            if segment.closed:
                continue  # dropped while something still pointed into it
            if segment.num_bytes >= self._frame_bytes:
                return segment
            self.drop(segment)
        if self._frame_bytes == 0 or self._num_open == _MOST_SEGMENTS or time.monotonic() < self._try_again_at:
            return None
        # Room for somewhat larger frames, so that the next is not too large at once.
        num_bytes = -(-self._frame_bytes * 5 // 4 // _ROUND_BYTES) * _ROUND_BYTES
        try:
            segment = SharedSegment(self._path, self._ask_for_name(), num_bytes)
        except (OSError, RefillError):  # a pod that takes no memory, or no more of it: the socket does as well
            self._try_again_at = time.monotonic() + _TRY_AGAIN_SECONDS
            return None
        self._num_open += 1
        return segment

    def seen(self, frame_bytes: int) -> None:
        """Fact: an answer was this long."""
        self._frame_bytes = max(self._frame_bytes, frame_bytes)

    def frame_in(self, segment: SharedSegment, num_bytes: int) -> memoryview:
        """What the pod wrote; the segment is free again when the last view of it is gone."""
        if not 0 <= num_bytes <= segment.num_bytes:
            raise RefillError(f"the pod says that it wrote {num_bytes} bytes into memory of {segment.num_bytes}")
        lease: NDArray[np.uint8] = np.frombuffer(segment.memory, dtype=np.uint8, count=num_bytes)
        weakref.finalize(lease, self._free.append, segment).atexit = False
        return lease.data

    def drop(self, segment: SharedSegment) -> None:
        """Let go of it; what the pod may still write there reaches nobody."""
        segment.close()
        self._num_open -= 1


class SharedSegment:
    """Memory that a pod may write into. Raises OSError when it can't be had, or the pod does not take it.

    :param name: which the pod has given for it.
    """

    def __init__(self, offer_path: str, name: str, num_bytes: int) -> None:
        self.name = name
        self.num_bytes = num_bytes
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fd = os.memfd_create("refill", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(fd, 0, num_bytes)
            # A pod takes nothing that could shrink under its hands: it would die of SIGBUS.
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            self.memory = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
            self._connection.settimeout(_OFFER_SECONDS)
            self._connection.connect(offer_path)
            self._connection.send(name.encode("ascii"))
            self._wait_for_yes()
            socket.send_fds(self._connection, [b"m"], [fd])
            self._wait_for_yes()
        except BaseException:
            self._connection.close()
            raise
        finally:
            os.close(fd)

    def _wait_for_yes(self) -> None:
        if self._connection.recv(64) != _TAKEN:
            raise OSError("the pod does not take it")

    @property
    def closed(self) -> bool:
        return self._connection.fileno() < 0

    def close(self) -> None:
        self._connection.close()
