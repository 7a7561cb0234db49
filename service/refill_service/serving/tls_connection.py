"""How does a connection speak TLS, and hold no more than a few records while it does? Python's ``ssl`` in a protocol.

uvloop has TLS of its own. It keeps a quarter of a megabyte for each connection to read into, reads ahead as much, and
encrypts whatever it is given at once. OpenSSL's buffers grow by that, and stay so until the connection closes:
megabytes for each client that was answered once. And its handshakes, a millisecond of CPU each, take nobody's turn.

Here all connections read into one buffer, what is read waits in the kernel while nobody takes it, and one record is
encrypted after another, as far as the client reads. A handshake goes on in the turn of those who connect, and has a
length.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from refill_service.memory.loop_turns import COMERS, LoopTurns

_RECORD_BYTES = 16 << 10
"""As much as a TLS record can have."""
_HEADER_BYTES, _TINY_BYTES = 5, 32
"""Of a record. A change of keys is tiny, costs as much as a request, and is answered."""
_MOST_TINY, _BYTES_FOR_ONE = 64, 128
"""Tiny records that a client may send, and one more for so many bytes: a request may end with one."""
_HANDSHAKE_BYTES = 32 << 10
"""Of the client. Most say 500 bytes; OpenSSL would keep a third of a megabyte of one that does not end."""


class TlsConnection(asyncio.BufferedProtocol):
    """The server's side of one, for as much of a transport as HTTP uses.

    :param new_protocol: makes who is served by it, when hands were shaken.
    :param read_into: one for all connections: what is read is taken out before the next read.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        new_protocol: Callable[[], asyncio.BufferedProtocol],
        turns: LoopTurns,
        read_into: memoryview,
    ) -> None:
        self.shaken = asyncio.get_running_loop().create_future()
        """When hands are, or the connection is gone."""
        self._new_protocol, self._turns, self._read_into = new_protocol, turns, read_into
        self._context = context
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self._handshake_bytes = 0
        self._num_bytes = self._num_tiny = 0
        self._until_header = 0
        """So much of a record has yet to come."""
        self._header = b""
        """Of the next one, what has come."""
        self._raw: Any = None
        self._protocol: Any = None
        """None: hands were not shaken yet, or the connection is gone."""
        self._waiting: deque[memoryview] = deque()
        """What was written and is not encrypted."""
        self._waiting_bytes = 0
        self._is_full = self._is_paused = self._closes = False

    # What has come from the kernel

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._raw = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._read_into

    def buffer_updated(self, nbytes: int) -> None:
        self._incoming.write(self._read_into[:nbytes])
        if self._has_many_tiny_records(self._read_into[:nbytes]):
            self.abort()
            return
        if self._protocol is not None:
            self._take()
            return
        self._handshake_bytes += nbytes
        if self._handshake_bytes > _HANDSHAKE_BYTES:
            self.abort()
        elif not self._turns.call(COMERS, self._shake_hands, lambda: True):
            self._raw.pause_reading()

    def _has_many_tiny_records(self, piece: memoryview) -> bool:
        """Whether the client has sent more of them than anybody needs, as those do who change keys on and on."""
        self._num_bytes += len(piece)
        at = self._until_header
        while at < len(piece):
            more = _HEADER_BYTES - len(self._header)
            self._header += piece[at : at + more]
            if len(self._header) < _HEADER_BYTES:
                at = len(piece)
                break
            length = int.from_bytes(self._header[3:])
            at += more + length
            self._num_tiny += length < _TINY_BYTES
            self._header = b""
        self._until_header = at - len(piece)
        return self._num_tiny > _MOST_TINY + self._num_bytes // _BYTES_FOR_ONE

    def _shake_hands(self) -> None:
        if self._raw.is_closing():
            return
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self._send()
            self._raw.resume_reading()
            return
        except ssl.SSLError:
            self._send()  # what is wrong, as TLS says it
            self._raw.close()
            return
        self._send()
        self._protocol = self._new_protocol()
        self._protocol.connection_made(cast(asyncio.BaseTransport, self))
        self._is_known()
        self._take()

    def _is_known(self) -> None:
        if not self.shaken.done():  # or it gave way, in this moment
            self.shaken.set_result(None)

    def _take(self) -> None:
        """Give the protocol what has come, as far as it takes it. The rest waits here, and behind it in the kernel."""
        try:
            while self._protocol is not None and not self._is_paused and not self._raw.is_closing():
                room = self._protocol.get_buffer(-1)
                num_bytes = self._tls.read(len(room), cast(bytearray, room))
                if not num_bytes:
                    self.close()  # the client has said goodbye
                    break
                self._protocol.buffer_updated(num_bytes)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError:
            self.abort()
            return
        self._send()  # answers of TLS itself
        if not self._is_paused:
            self._raw.resume_reading()

    def eof_received(self) -> None:
        """The transport below closes then."""

    def connection_lost(self, exc: Exception | None) -> None:
        protocol, self._protocol = self._protocol, None
        self._waiting.clear()
        self._waiting_bytes = 0
        self._is_known()
        if protocol is not None:
            protocol.connection_lost(exc)

    def pause_writing(self) -> None:
        self._is_full = True
        if self._protocol is not None:
            self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._is_full = False
        self._encrypt()
        if not self._is_full and self._protocol is not None:
            self._protocol.resume_writing()

    # What the protocol asks for

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._closes:
            self._waiting.append(memoryview(data))
            self._waiting_bytes += len(data)
            self._encrypt()

    def _encrypt(self) -> None:
        while self._waiting and not self._is_full and not self._raw.is_closing():
            first = self._waiting.popleft()
            if len(first) > _RECORD_BYTES:
                self._waiting.appendleft(first[_RECORD_BYTES:])
            record = first[:_RECORD_BYTES]
            self._waiting_bytes -= len(record)
            if record:
                self._tls.write(record)
                self._send()  # may call pause_writing
        if self._closes and not self._waiting:
            self._say_goodbye()

    def _send(self) -> None:
        if self._outgoing.pending:
            self._raw.write(self._outgoing.read())

    def close(self) -> None:
        self._closes = True
        self._encrypt()

    def _say_goodbye(self) -> None:
        if not self._raw.is_closing():
            with suppress(ssl.SSLError):  # nobody waits for the client's
                self._tls.unwrap()
            self._send()
            self._raw.close()

    def abort(self) -> None:
        self._closes = True
        if self._raw is not None:
            self._raw.abort()

    def is_closing(self) -> bool:
        return self._closes or bool(self._raw.is_closing())

    def get_write_buffer_size(self) -> int:
        return self._waiting_bytes + int(self._raw.get_write_buffer_size())

    def set_write_buffer_limits(self, high: int | None = None) -> None:
        self._raw.set_write_buffer_limits(high)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._context if name == "sslcontext" else self._raw.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._is_paused = True
        self._raw.pause_reading()

    def resume_reading(self) -> None:
        self._is_paused = False
        asyncio.get_running_loop().call_soon(self._take)  # not within what is being taken
