"""How does a network between two processes go wrong, on order? A relay for TCP whose links delay, cut and reset.

It runs in a thread of its own; whoever made a link switches it while bytes go through.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from dataclasses import dataclass, field
from types import TracebackType

__all__ = ["Link", "Relay"]

_PIECE_BYTES = 1 << 16
_LOOK_AGAIN_SECONDS = 0.01
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass
class Link:
    """One way through the relay. ``delay_seconds``, ``cut`` and ``resets`` may be set at any time."""

    to_port: int
    port: int = 0
    """Where the relay listens for it, on 127.0.0.1."""
    delay_seconds: float = 0.0
    """Of each piece of at most 64 KiB, either way."""
    cut: bool = False
    """Nothing goes through, and neither side is told: connections stay open, and go on afterwards."""
    resets: int = 0
    """So many of the next answers end in the middle, with a reset on both sides."""
    answers_reset: int = 0
    connections: set[asyncio.StreamWriter] = field(default_factory=set)


class Relay:
    """A context manager; every link and connection ends with it."""

    def __enter__(self) -> Relay:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._thread.start()
        self._carrying: set[asyncio.Task[None]] = set()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def link(self, to_port: int) -> Link:
        """A new link to a port of 127.0.0.1, whether anybody listens there yet or not."""
        link = Link(to_port)

        async def listen() -> None:
            server = await asyncio.start_server(lambda *streams: self._came(link, *streams), "127.0.0.1", 0)
            link.port = server.sockets[0].getsockname()[1]

        asyncio.run_coroutine_threadsafe(listen(), self._loop).result(10)
        return link

    def reset(self, link: Link) -> None:
        """End all connections of a link at once."""

        def reset() -> None:
            for writer in list(link.connections):
                _reset(writer)

        self._loop.call_soon_threadsafe(reset)

    def _came(self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._carry(link, reader, writer))
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)

    async def _carry(self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        link.connections.add(writer)
        try:
            await _until_healed(link)
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", link.to_port)
            ends.append(far_writer)
            link.connections.add(far_writer)
            there = asyncio.ensure_future(_pump(link, reader, far_writer))
            back = asyncio.ensure_future(_pump(link, far_reader, writer, answers=True))
            await asyncio.wait([there, back], return_when=asyncio.FIRST_COMPLETED)
            there.cancel()
            back.cancel()
            await asyncio.gather(there, back, return_exceptions=True)
        except OSError:  # nobody listens there: the one who asks is to see that
            _reset(writer)
        finally:
            for end in ends:
                link.connections.discard(end)
                end.close()

    async def _end(self) -> None:
        for task in self._carrying:
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)


async def _pump(
    link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, answers: bool = False
) -> None:
    with contextlib.suppress(OSError):
        while piece := await reader.read(_PIECE_BYTES):
            if link.delay_seconds:
                await asyncio.sleep(link.delay_seconds)
            await _until_healed(link)
            if answers and link.resets > 0:
                link.resets -= 1
                link.answers_reset += 1
                writer.write(piece[: len(piece) // 2])
                await writer.drain()
                _reset(writer)
                return
            writer.write(piece)
            await writer.drain()


async def _until_healed(link: Link) -> None:
    while link.cut:  # noqa: ASYNC110  set by another thread, which knows no event loop
        await asyncio.sleep(_LOOK_AGAIN_SECONDS)


def _reset(writer: asyncio.StreamWriter) -> None:
    end: socket.socket = writer.get_extra_info("socket")
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
    writer.transport.abort()
