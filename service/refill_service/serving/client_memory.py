"""How does an answer reach a client on the same machine without crossing a socket? Written into memory it lends.

A client connects to the Unix socket ``PATH.memory`` and hands over one segment of memory (a sealed memfd); it gets a
name for it, which its requests carry. The segment is the client's: allocated before it comes here, and let go of when
the connection closes, so nothing of a client that died stays behind. See ``refill.shared_segments``.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import secrets
import socket
from pathlib import Path

from refill_service.serving.frame_response import OutgoingFrame

__all__ = ["ClientMemory"]

_REFUSED = b"-"
_MOST_FDS = 8


class ClientMemory:
    """The segments that clients lend. They count towards the pod's resident set: at most ``limit_bytes`` are taken."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self._segments: dict[str, mmap.mmap] = {}
        self._names: dict[socket.socket, str | None] = {}
        """Of each connection, once it has handed over its segment."""
        self._listener: socket.socket | None = None

    def listen(self, path: str) -> None:
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind(path)
        Path(path).chmod(0o666)  # as the socket beside it
        self._listener.listen()
        asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener)

    def close(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
        for connection in list(self._names):
            self._drop(connection)

    def write(self, name: str, frame: OutgoingFrame) -> bool:
        """Write a frame into a segment; False when there is none of that name, or it is too small."""
        segment = self._segments.get(name)
        if segment is None or frame.total_bytes > len(segment):
            return False
        end = 0
        with memoryview(segment) as memory:
            for part in frame.parts():
                start, end = end, end + len(part)
                memory[start:end] = part
        return True

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError:  # gone again, or no file descriptors left: the client does without
            return
        connection.setblocking(False)
        self._names[connection] = None
        asyncio.get_running_loop().add_reader(connection, self._arrived, connection)

    def _arrived(self, connection: socket.socket) -> None:
        """A segment; or the end of the connection, which any second message counts as."""
        try:
            _, fds, _, _ = socket.recv_fds(connection, 1, _MOST_FDS)
        except OSError:
            fds = []
        try:
            if len(fds) != 1 or self._names[connection] is not None:
                self._drop(connection)
                return
            segment = self._mapped(fds[0])
            name = _REFUSED.decode() if segment is None else secrets.token_hex(16)
            connection.send(name.encode())
            if segment is not None:
                self._names[connection], self._segments[name] = name, segment
                self.used_bytes += len(segment)
        except OSError:
            self._drop(connection)
        finally:
            for fd in fds:
                os.close(fd)

    def _mapped(self, fd: int) -> mmap.mmap | None:
        """None for what would be too much, or could shrink: touching what is no longer there kills the process."""
        num_bytes = os.fstat(fd).st_size
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            return None
        if num_bytes == 0 or self.used_bytes + num_bytes > self.limit_bytes:
            return None
        # All pages at once: a fault for each would take longer than the copies.
        return mmap.mmap(fd, num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)

    def _drop(self, connection: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(connection)
        connection.close()
        name = self._names.pop(connection)
        if name is not None:
            segment = self._segments.pop(name)
            self.used_bytes -= len(segment)
            segment.close()
