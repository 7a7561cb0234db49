"""Who may be in the middle of a TLS handshake with a pod? So many at once, each so long; the oldest gives way.

A server of asyncio hands a connection over when its handshake is done: before that nobody counts it, and it has a
minute.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

__all__ = ["TlsListener"]

_HANDSHAKE_SECONDS = 10.0
_MAX_HANDSHAKES = 256
_PAUSE_SECONDS = 0.1


class TlsListener:
    """Serves from when it is made until it is closed, as an :class:`asyncio.Server` does."""

    def __init__(
        self, host: str, port: int, backlog: int, context: ssl.SSLContext, new_protocol: Callable[[], asyncio.Protocol]
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=backlog)
        self._listener.setblocking(False)
        self._context = context
        self._new_protocol = new_protocol
        self._loop = asyncio.get_running_loop()
        self._handshakes: dict[asyncio.Task[None], None] = {}
        """The oldest first."""
        self._accepting = asyncio.create_task(self._accept())

    @property
    def sockets(self) -> list[socket.socket]:
        return [self._listener]

    def close(self) -> None:
        self._accepting.cancel()
        for each in self._handshakes:
            each.cancel()
        self._listener.close()

    async def wait_closed(self) -> None:
        await asyncio.gather(self._accepting, *self._handshakes, return_exceptions=True)

    async def _accept(self) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._listener)
            except OSError:  # gone again, or no file descriptors left
                await asyncio.sleep(_PAUSE_SECONDS)
                continue
            if len(self._handshakes) >= _MAX_HANDSHAKES:
                oldest = next(iter(self._handshakes))
                del self._handshakes[oldest]
                oldest.cancel()
            task = asyncio.create_task(self._shake_hands(connection))
            self._handshakes[task] = None
            task.add_done_callback(lambda done: self._handshakes.pop(done, None))

    async def _shake_hands(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._new_protocol, connection, ssl=self._context, ssl_handshake_timeout=_HANDSHAKE_SECONDS
            )
        except (OSError, asyncio.CancelledError):
            connection.close()  # what came is no TLS, or took too long, or gave way
