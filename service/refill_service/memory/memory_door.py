"""How does a client hand over memory without a way to hold up the pod? In threads, apart from the event loop.

Whoever enters the folder of the Unix socket can send descriptors, and to close one may take as long as its sender likes
(a TCP connection that lingers, a file of a file system in user space). The kernel closes those that nobody asked for,
too, in the thread that reads their message or closes the connection. So the event loop accepts connections, and never
reads or closes one: a thread does, at most ``_MAX_HANDSHAKES`` at once, and while all are busy nobody else is let in.

What is said: the client the one-time name that the pod gave it, the pod ``+``; the client its memory, the pod ``+``. To
anything else the pod says ``-`` and hangs up.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import socket
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

__all__ = ["Keeper", "MemoryDoor", "refuse_descriptors"]

_YES, _NO = b"+", b"-"
_NAME_BYTES = 64
_STEP_SECONDS = 2.0
_MAX_HANDSHAKES = 32
_MAX_CONNECTIONS = 1024
_SO_PASSRIGHTS = 83
"""Linux 6.16: whether a Unix socket takes descriptors; Python has no name for it yet."""


class Keeper(Protocol):
    """Who decides what comes in, and keeps it."""

    def claim(self, name: str) -> bool:
        """In a thread: whether somebody is expected by this name; once."""

    def room(self, name: str, num_bytes: int) -> bool:
        """In a thread: whether so much may be taken, for somebody who was expected; it is taken then. Less than 0: it
        is not wanted after all."""

    def came(self, name: str, memory: mmap.mmap) -> None:
        """In the event loop: it may be written to."""

    def went(self, name: str) -> None:
        """In the event loop: nobody may touch that memory any more."""

    def gone(self, name: str, num_bytes: int) -> None:
        """In a thread: the room is free again, and the name forgotten."""


class MemoryDoor:
    """A listening socket, and the connections over which memory came, each for as long as its client lives."""

    def __init__(self, path: str, keeper: Keeper) -> None:
        self._keeper = keeper
        self._loop = asyncio.get_running_loop()
        self._num_handshakes = self._num_connections = 0
        self._open: dict[socket.socket, tuple[str, mmap.mmap]] = {}
        self._closed = False
        self._listens = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        refuse_descriptors(self._listener)
        self._listener.bind(path)
        Path(path).chmod(0o666)  # as the socket beside it
        self._listener.listen()
        self._listen_if_free()

    def close(self) -> None:
        self._closed = True
        self._listen_if_free()
        _in_a_thread(self._listener.close)  # with who waits there, and what they have sent
        for connection in list(self._open):
            self._ended(connection)

    def _listen_if_free(self) -> None:
        free = self._num_handshakes < _MAX_HANDSHAKES and self._num_connections < _MAX_CONNECTIONS
        if self._listens == (free and not self._closed):
            return
        self._listens = not self._listens
        if self._listens:
            self._loop.add_reader(self._listener, self._accept)
        else:
            self._loop.remove_reader(self._listener)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # gone again, or no file descriptors left: the client does without
            return
        self._num_handshakes += 1
        self._num_connections += 1
        self._listen_if_free()
        _in_a_thread(self._shake_hands, connection)

    def _shake_hands(self, connection: socket.socket) -> None:
        name, claimed, memory = "", False, None
        try:
            connection.settimeout(_STEP_SECONDS)
            name = connection.recv(_NAME_BYTES).decode("ascii")
            claimed = self._keeper.claim(name)
            if claimed:
                _take_descriptors(connection)
                connection.send(_YES)
                memory = self._received(connection, name)
            connection.send(_NO if memory is None else _YES)
        except (OSError, UnicodeDecodeError):
            pass  # it is gone, or too slow: below
        if memory is None:
            if claimed:
                self._keeper.gone(name, 0)
            connection.close()
        self._in_the_loop(self._shaken, connection, name, memory)

    def _received(self, connection: socket.socket, name: str) -> mmap.mmap | None:
        _, fds, flags, _ = socket.recv_fds(connection, 1, 1)
        try:
            if len(fds) != 1 or flags & socket.MSG_CTRUNC:
                return None
            num_bytes = _size_of_memory(fds[0])
            if num_bytes == 0 or not self._keeper.room(name, num_bytes):
                return None
            try:
                # All pages at once: a fault for each would take longer than the copies.
                return mmap.mmap(fds[0], num_bytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
            except (OSError, ValueError):
                self._keeper.room(name, -num_bytes)
                return None
        finally:
            for fd in fds:
                os.close(fd)

    def _shaken(self, connection: socket.socket, name: str, memory: mmap.mmap | None) -> None:
        self._num_handshakes -= 1
        if memory is None:
            self._num_connections -= 1
        else:
            self._open[connection] = name, memory
            self._keeper.came(name, memory)
            if self._closed:
                self._ended(connection)
            else:
                self._loop.add_reader(connection, self._ended, connection)
        self._listen_if_free()

    def _ended(self, connection: socket.socket) -> None:
        """The client has hung up; or says something, which there is no reason to."""
        self._loop.remove_reader(connection)
        name, memory = self._open.pop(connection)
        self._keeper.went(name)
        _in_a_thread(self._let_go, connection, name, memory)

    def _let_go(self, connection: socket.socket, name: str, memory: mmap.mmap) -> None:
        num_bytes = len(memory)
        memory.close()
        self._keeper.gone(name, num_bytes)
        connection.close()
        self._in_the_loop(self._let_gone)

    def _let_gone(self) -> None:
        self._num_connections -= 1
        self._listen_if_free()

    def _in_the_loop(self, call: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # it has ended
            self._loop.call_soon_threadsafe(call, *arguments)


def refuse_descriptors(listener: socket.socket) -> bool:
    """Whether the kernel keeps descriptors from connections that this Unix socket accepts; those before 6.16 can't."""
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
    except OSError:
        return False
    return True


def _take_descriptors(connection: socket.socket) -> None:
    with suppress(OSError):  # it takes them anyway
        connection.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 1)


def _size_of_memory(fd: int) -> int:
    """0 for what is no memory, or could harm who touches it: what shrinks, or has no pages yet, kills or charges us."""
    try:
        seals, found, pages = fcntl.fcntl(fd, fcntl.F_GET_SEALS), os.fstat(fd), os.fstatvfs(fd)
    except OSError:  # a socket, a device, a file on a disk: only memory has seals
        return 0
    if not stat.S_ISREG(found.st_mode) or not seals & fcntl.F_SEAL_SHRINK:
        return 0
    if pages.f_bsize != mmap.PAGESIZE:  # huge pages run out under the hands of whoever writes
        return 0
    return found.st_size if found.st_blocks * 512 >= found.st_size else 0


def _in_a_thread(call: Callable[..., None], *arguments: object) -> None:
    """Of its own, that no end of the pod waits for: those of a pool are joined."""
    threading.Thread(target=call, args=arguments, daemon=True, name="refill-memory").start()
