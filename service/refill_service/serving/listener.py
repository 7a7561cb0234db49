"""Who comes in at a pod's port? One connection after another, in the turn of strangers, which all are when they come.

With TLS so many may be in the middle of a handshake, each so long; the oldest gives way. A server of asyncio takes all
who wait at once, and hands a connection over when its handshake is done: before that nobody counts it, and it has a
minute.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable

from refill_service.memory.loop_turns import STRANGERS, LoopTurns, in_turn

__all__ = ["Listener"]

_HANDSHAKE_SECONDS = 10.0
_MAX_HANDSHAKES = 256
_PAUSE_SECONDS = 0.1


class Listener:
    """Serves from when it is made until it is closed, as an :class:`asyncio.Server` does.

    :param listening: a socket that listens; closed with this.
    :param context: None: no TLS.
    """

    def __init__(
        self,
        listening: socket.socket,
        context: ssl.SSLContext | None,
        new_protocol: Callable[[], asyncio.Protocol],
        turns: LoopTurns,
    ) -> None:
        self._listener = listening
        self._listener.setblocking(False)
        self._context = context
        self._turns = turns
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
        await self._turns.run(STRANGERS, self._accept_all())

    async def _accept_all(self) -> None:
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
            task = asyncio.create_task(in_turn(self._shake_hands(connection)))
            self._handshakes[task] = None
            task.add_done_callback(lambda done: self._handshakes.pop(done, None))

    async def _shake_hands(self, connection: socket.socket) -> None:
        try:
            if connection.family != socket.AF_UNIX:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            seconds = None if self._context is None else _HANDSHAKE_SECONDS
            await self._loop.connect_accepted_socket(
                self._new_protocol, connection, ssl=self._context, ssl_handshake_timeout=seconds
            )
        except (OSError, asyncio.CancelledError):
            connection.close()  # what came is no TLS, or took too long, or gave way
