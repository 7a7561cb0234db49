"""Is the machine at the other end of a client's connection there, and what has it yet to take? Its kernel says so, also
for a process that stands still; and it closes the connections of a process that has ended.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
import termios
from contextlib import suppress

GONE_SECONDS = 10
"""A machine that has confirmed nothing for so long is gone, or the network is."""
_PROBE_AFTER_SECONDS = 5
_WATCHED = (
    (socket.TCP_KEEPIDLE, _PROBE_AFTER_SECONDS),
    (socket.TCP_KEEPINTVL, 1),
    (socket.TCP_KEEPCNT, GONE_SECONDS - _PROBE_AFTER_SECONDS),
)
_TCP_INFO = struct.Struct("24xI28xI")
"""``tcpi_unacked`` and ``tcpi_last_ack_recv``, in milliseconds, of Linux's ``struct tcp_info``."""
_OF_PROXIES = (b"via", b"forwarded")


def is_watched(connection: socket.socket | None) -> None:
    """From now on the kernel asks the machine, whenever nothing comes, whether it is there; else it closes the
    connection."""
    if connection is None or connection.family == socket.AF_UNIX:
        return
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _WATCHED:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def has_confirmed(connection: socket.socket | None) -> bool:
    """Whether nothing that was sent has waited for long for the machine's word that it has come; the kernel asks
    nothing meanwhile. True where that can't be told."""
    if connection is None or connection.family == socket.AF_UNIX:
        return True
    try:
        known = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        unconfirmed, silent_ms = (int(each) for each in _TCP_INFO.unpack(known))
    except (OSError, struct.error):
        return True
    return unconfirmed == 0 or silent_ms < 1000 * GONE_SECONDS


def is_of_proxy(headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether somebody passes a request on for others, as its headers say: the connection may stay when they end."""
    return any(name.startswith(b"x-") or name in _OF_PROXIES for name, _ in headers)


def bytes_in_kernel(connection: socket.socket | None) -> int:
    """What the other side has yet to take: the kernel asks for more only after a third of megabytes has left.

    :param connection: None: it is gone.
    """
    if connection is None:
        return 0
    size = bytearray(4)
    with suppress(OSError):
        fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, size)
    return int.from_bytes(size, sys.byteorder)
