"""What does a pod answer, as it comes off its connection? Head and body of a plain answer, read without a detour.

``http.client`` reads an answer by four layers of files, and its headers as those of a mail: for a part of a batch that
takes as long as all else that a client does for it. Nearly all that pods answer is plain: a body of a length that its
head says. What is not is left to ``http.client``.
"""

from __future__ import annotations

import http.client
import re
import time
from collections.abc import Callable
from typing import Any

HEAD_BYTES = 256 << 10
"""Of an answer: status and headers, and those of answers before it that only say that it will come (1xx)."""
LEAST_BYTES_PER_SECOND = 256 << 10
"""Of an answer, over all, beside the time that the pod may be silent for. Pods want the same of clients."""
_READ_BYTES = 4 << 10
_ENDS = b"\r\n\r\n"
_STATUS = re.compile(r"HTTP/1\.1 ([2-5][0-9]{2})(?: .*)?")
_MOST_HEADERS = 100
_WITHOUT_BODY = (204, 304)


def read_head(sock: Any, ends: float) -> bytes:
    """What has come of an answer when its head is whole, or nothing more comes.

    :param ends: by ``time.monotonic``; raises TimeoutError later than that.
    """
    received: bytes = sock.recv(_READ_BYTES)
    if not received:
        raise http.client.RemoteDisconnected("Remote end closed connection without response")
    while _ENDS not in received and b"\n\n" not in received:
        if len(received) > HEAD_BYTES:
            raise http.client.HTTPException("its answer is longer than what was asked for can be")
        more = sock.recv(_READ_BYTES)
        if time.monotonic() > ends:
            raise TimeoutError
        if not more:
            break
        received += more
    return received


class PlainAnswer:
    """One answer, of which the head has come. As far as it goes, the same as :class:`http.client.HTTPResponse`.

    :param begun: of its body, what came with its head; no more than all of it.
    :param seconds: for all of it, with a second more for each ``LEAST_BYTES_PER_SECOND``. It is silent no longer.
    :param close: called at its end, if it is the last one of its connection.
    """

    def __init__(
        self,
        sock: Any,
        status: int,
        headers: dict[str, str],
        length: int,
        begun: memoryview,
        seconds: float,
        close: Callable[[], None],
    ) -> None:
        self.status = status
        self.length = length
        """What is left of its body."""
        self._close = close if "close" in headers.get("connection", "").lower() else None
        self._sock = sock
        self._headers = headers
        self._begun = begun
        self._seconds = seconds
        self._ends = time.monotonic() + seconds
        self._came(0)

    @classmethod
    def of(cls, sock: Any, received: bytes, seconds: float, close: Callable[[], None]) -> PlainAnswer | None:
        """None: it is not plain.

        :param received: as :func:`read_head` returns it.
        """
        head_bytes = received.find(_ENDS)
        first, *lines = received[: max(0, head_bytes)].decode("latin-1").split("\r\n")
        status = _STATUS.fullmatch(first)
        if status is None or len(lines) >= _MOST_HEADERS:
            return None
        headers: dict[str, str] = {}
        for line in lines:
            name, found, value = line.partition(":")
            name = name.lower()
            if not found or not name.isprintable() or " " in name or name in headers:
                return None
            headers[name] = value.strip()
        length, begun = headers.get("content-length", ""), memoryview(received)[head_bytes + len(_ENDS) :]
        is_plain = length.isascii() and length.isdecimal() and len(length) < 20 and "transfer-encoding" not in headers
        if not is_plain or int(status[1]) in _WITHOUT_BODY or len(begun) > int(length):
            return None
        return cls(sock, int(status[1]), headers, int(length), begun, seconds, close)

    def getheader(self, name: str) -> str | None:
        return self._headers.get(name.lower())

    def isclosed(self) -> bool:
        """Whether it was read to its end."""
        return self.length == 0

    def goes_on(self) -> None:
        """Fact: nobody wanted to read it meanwhile."""
        self._ends = time.monotonic() + self._seconds

    def may_have(self, more_bytes: int) -> None:
        """It has as many as it says."""

    def readinto(self, buffer: memoryview) -> int:
        """0: it ended too early, or nothing is left of it."""
        into = buffer[: self.length]
        if self._begun:
            count = min(len(into), len(self._begun))
            into[:count] = self._begun[:count]
            self._begun = self._begun[count:]
        else:
            count = self._sock.recv_into(into) if len(into) else 0
            self._ends += count / LEAST_BYTES_PER_SECOND
            if time.monotonic() > self._ends:
                raise TimeoutError
        self._came(count)
        return count

    def _came(self, count: int) -> None:
        self.length -= count
        if not self.length and self._close is not None:
            self._close()

    def read(self) -> bytes:
        """All that is left."""
        found = memoryview(bytearray(self.length))
        filled = 0
        while self.length:
            count = self.readinto(found[filled:])
            if not count:
                raise http.client.IncompleteRead(bytes(found[:filled]), self.length)
            filled += count
        return bytes(found)
