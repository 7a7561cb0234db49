"""Who comes in at a pod's port, and which connection gives way when there is no room for another?

One comes in after another, in a turn that is theirs alone. It is a *stranger's* until one of its requests has shown
who it is. A stranger that is not being answered gives way to whoever comes, the oldest first, so that connections that
are merely open keep nobody out. A team has as many as its quota leaves it.

With TLS so many may be in the middle of a handshake, each so long; the oldest gives way. A server of asyncio takes all
who wait at once, and hands a connection over when its handshake is done: before that nobody counts it, and it has a
minute.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from refill_service.cache_core.team_quotas import TeamQuotas
from refill_service.memory.loop_turns import COMERS, LoopTurns, in_turn
from refill_service.serving.tls_connection import TlsConnection

log = logging.getLogger(__name__)

_HANDSHAKE_SECONDS = 10.0
_MAX_HANDSHAKES = 256
_READ_BYTES = 16 << 10
_RECEIVED_BYTES = 32 << 10
"""In the kernel, for each connection, which doubles it."""
_UNIX_SENT_BYTES = 1 << 20
"""In the kernel, for each connection of a Unix socket, which doubles it, as far as ``net.core.wmem_max`` lets it. TCP
takes up to 4 MiB by itself."""
_SO_PASSRIGHTS = 83
"""Linux 6.16: whether a Unix socket takes descriptors; Python has no name for it yet."""
_PAUSE_SECONDS = 0.1
_SPARE = 64
"""Connections above the limit, for whoever looks after the pod; others are answered "busy"."""


class Listener:
    """Serves from when it is made until it is closed, as an :class:`asyncio.Server` does.

    :param listening: a socket that listens; closed with this.
    :param context: None: no TLS.
    """

    def __init__(
        self,
        listening: socket.socket,
        context: ssl.SSLContext | None,
        new_protocol: Callable[[], asyncio.BufferedProtocol],
        turns: LoopTurns,
    ) -> None:
        self._listener = listening
        if listening.family != socket.AF_UNIX:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVED_BYTES)
        self._listener.setblocking(False)
        self._context = context
        self._turns = turns
        self._new_protocol = new_protocol
        self._read_into = memoryview(bytearray(_READ_BYTES))
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
        await self._turns.run(COMERS, self._accept_all(), lambda: True)  # which is no batch

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
        tls: TlsConnection | None = None
        try:
            if connection.family == socket.AF_UNIX:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_SENT_BYTES)
            else:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._context is None:
                await self._connected(self._new_protocol, connection)
                return
            tls = made = TlsConnection(self._context, self._new_protocol, self._turns, self._read_into)
            await self._connected(lambda: made, connection)
            async with asyncio.timeout(_HANDSHAKE_SECONDS):
                await tls.shaken
        except (OSError, asyncio.CancelledError):  # it is gone, took too long, or gave way
            if tls is not None:
                tls.abort()
            connection.close()

    async def _connected(self, new_protocol: Callable[[], asyncio.BufferedProtocol], connection: socket.socket) -> None:
        """Not cancelled in the midst of it: uvloop then closes the connection, and its protocol, which counts it, is
        never told."""
        connecting = asyncio.ensure_future(self._loop.connect_accepted_socket(new_protocol, connection))
        try:
            await asyncio.shield(connecting)
        except asyncio.CancelledError:
            transport, _ = await connecting
            transport.abort()
            raise


class Connection(Protocol):
    """A client's connection, which may have to give way to others."""

    @property
    def is_idle(self) -> bool:
        """Nothing is being answered on it."""

    @property
    def has_asked(self) -> bool:
        """A request was answered on it."""

    def give_way(self) -> None:
        """It is cut off, at once."""


class ConnectionRoom:
    """Says how many connections one server takes, and which give way when there are too many."""

    def __init__(self, limit: int, quotas: TeamQuotas) -> None:
        self.limit = limit
        self._quotas = quotas
        self._strangers: dict[Connection, None] = {}
        """The oldest first, as are those above the limit."""
        self._above_limit: dict[Connection, None] = {}
        self._teams: dict[Connection, str] = {}
        self._of_teams: Counter[str] = Counter()

    def enter(self, connection: Connection) -> bool:
        """Somebody came; False: they are one too many, and are to be refused."""
        inside = len(self._strangers) + len(self._teams)
        if inside >= self.limit and not self._gives_way(self._strangers):
            if len(self._above_limit) >= _SPARE and not self._gives_way(self._above_limit):
                connection.give_way()
            self._above_limit[connection] = None
            return False
        self._strangers[connection] = None
        return True

    def belongs_to(self, connection: Connection, team: str) -> bool:
        """One of its requests has shown who it is; False: the team has as many as it may."""
        if self._teams.get(connection) == team or connection in self._above_limit:
            return True
        if self._quotas.left_for(team, self.limit, self._of_teams) == 0:
            return False
        self.leave(connection)
        self._teams[connection] = team
        self._of_teams[team] += 1
        return True

    def leave(self, connection: Connection) -> None:
        self._strangers.pop(connection, None)
        self._above_limit.pop(connection, None)
        if (team := self._teams.pop(connection, None)) is not None:
            self._of_teams[team] -= 1

    def _gives_way(self, candidates: dict[Connection, None]) -> bool:
        # Who was answered, and has not shown who it is, may ask on and on: it gives way, too.
        found = next((each for each in candidates if each.is_idle), None)
        found = found or next((each for each in candidates if each.has_asked), None)
        if found is None:
            return False
        self.leave(found)
        found.give_way()
        return True


def listening_on(host: str, port: int, backlog: int | None = None) -> socket.socket:
    """An address of this machine. ``::`` is all of them, of IPv4, too, where the machine has both."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server((host, port), family=family, backlog=backlog, dualstack_ipv6=both)


def listening_at(path: str, backlog: int) -> socket.socket:
    """A Unix socket for all users of this machine."""
    listening = socket.socket(socket.AF_UNIX)
    if not _refuses_descriptors(listening):
        log.warning(
            "this kernel is older than Linux 6.16: whoever reaches %s can hold up the pod by descriptors that they "
            "send; keep its folder to training processes",
            path,
        )
    listening.bind(path)
    os.chmod(path, 0o666)
    listening.listen(backlog)
    return listening


def _refuses_descriptors(listener: socket.socket) -> bool:
    """Whether the kernel keeps descriptors from connections that this Unix socket accepts; those before 6.16 can't. To
    close one may take as long as its sender likes, in the thread that reads what came with it."""
    try:
        listener.setsockopt(socket.SOL_SOCKET, _SO_PASSRIGHTS, 0)
    except OSError:
        return False
    return True
