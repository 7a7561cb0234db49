"""What does a process ask of the connection holder? A request to a pod, as bytes, and what it must know of it."""

from __future__ import annotations

import json
import select
import socket
import time
from typing import Any, NamedTuple

from refill.errors import RefillError
from refill.pods.holder_door import HELD_HEADER, HOLDER_LANE, SAID_HEADER

_MOST_HEAD_BYTES = 64 << 10
_MOST_BODY_BYTES = 256 << 20
_ASKER_SECONDS = 60.0
"""That it may leave what it is answered unread."""
_HEAD_ENDS = b"\r\n\r\n"
_VIA = b"Via: 1.1 refill"
"""Pods are not to take a connection of the holder for that of a process."""


class AskerGone(Exception):
    """Nobody waits for the answer any more."""


class HolderAsked(Exception):
    """Somebody wants to know whether the holder is there."""


class PoolKey(NamedTuple):
    """Requests that differ in any of these share no connection."""

    job: str
    pod: str
    ca_file: str | None
    authorization: bytes
    lane: str


class Asker:
    """A connection of a process of this machine."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.number = sock.fileno()
        self.job: str | None = None
        self.received = bytearray()
        """Of a request that is not whole yet."""
        sock.settimeout(_ASKER_SECONDS)

    def read(self) -> bool:
        """Takes what has come; False: it has closed."""
        try:
            found = self.sock.recv(256 << 10, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.received += found
        return bool(found)

    def is_there(self) -> bool:
        """While it waits for an answer, and so says nothing."""
        watched = select.poll()
        watched.register(self.sock, select.POLLIN)
        return not watched.poll(0)

    def gets(self, piece: bytes | memoryview) -> None:
        try:
            self.sock.sendall(piece)
        except OSError as error:
            raise AskerGone from error


class HeldRequest:
    """A process's request that waits for its turn on a connection, or is under way.

    :param content: head and body, as the pod is to get them.
    :param seconds: that the pod may be silent for.
    """

    def __init__(self, asker: Asker, key: PoolKey, content: bytes, connect_seconds: float, seconds: float) -> None:
        self.asker, self.key, self.content = asker, key, content
        self.connect_seconds = connect_seconds
        self.seconds = seconds
        self.silent_seconds: float | None = None
        """While TLS is begun; None: as long as the request."""
        self.came_at = time.monotonic()
        self.ends_at = self.came_at + seconds

    def begins(self) -> None:
        """Fact: it has a connection now. Neither its turn nor connecting was time of the pod's."""
        self.ends_at = time.monotonic() + self.seconds

    def is_said(self, error: RefillError | None) -> None:
        """Answer it with what is known here of the pod; None: it is alive."""
        body = json.dumps({} if error is None else error.to_wire()).encode()
        status = 200 if error is None else error.status
        head = f"HTTP/1.1 {status} said\r\n{SAID_HEADER}: 1\r\nContent-Length: {len(body)}\r\n\r\n"
        self.asker.gets(head.encode() + body)


def parsed(asker: Asker) -> HeldRequest | None:
    """The request that an asker has sent, as soon as it is whole. Raises ValueError for what no client of ours says."""
    end = asker.received.find(_HEAD_ENDS)
    if end < 0:
        if len(asker.received) > _MOST_HEAD_BYTES:
            raise ValueError("its head is too long")
        return None
    lines = bytes(asker.received[:end]).split(b"\r\n")
    headers = dict(_header(line) for line in lines[1:])
    body_bytes = int(headers.get(b"content-length", b"0"))
    if not 0 <= body_bytes <= _MOST_BODY_BYTES:
        raise ValueError("its body is too long")
    first = end + len(_HEAD_ENDS)
    if len(asker.received) < first + body_bytes:
        return None
    about: dict[str, Any] = json.loads(headers[HELD_HEADER.lower().encode()])
    if about["lane"] == HOLDER_LANE:
        raise HolderAsked
    body = bytes(asker.received[first : first + body_bytes])
    del asker.received[: first + body_bytes]
    passed_on = [line for line in lines if not line.lower().startswith(HELD_HEADER.lower().encode() + b":")]
    key = PoolKey(
        str(about["job"]), str(about["pod"]), about["ca_file"], headers.get(b"authorization", b""), str(about["lane"])
    )
    asker.job = key.job
    content = b"\r\n".join([passed_on[0], _VIA, *passed_on[1:], b"", body])
    request = HeldRequest(asker, key, content, float(about["connect_seconds"]), float(about["seconds"]))
    silent_seconds = about.get("silent_seconds")
    request.silent_seconds = None if silent_seconds is None else float(silent_seconds)
    return request


def _header(line: bytes) -> tuple[bytes, bytes]:
    name, found, value = line.partition(b":")
    if not found:
        raise ValueError("a line of its head is no header")
    return name.lower(), value.strip()
