"""Clients that ask again and again, on many connections: the next request as soon as the one before is answered."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized

import uvloop


@dataclass(frozen=True)
class Flood:
    """:param at_once: so many requests are sent without waiting for answers."""

    request: bytes
    connections: int = 200
    at_once: int = 1


@contextlib.contextmanager
def flooded(port: int, floods: list[Flood]) -> Iterator[Synchronized[int]]:
    """A pod that these clients ask meanwhile, from processes of their own. Yields how often they have asked."""
    context = multiprocessing.get_context("spawn")
    asked = context.Value("q", 0)
    processes = [context.Process(target=_flood, args=(port, flood, asked), daemon=True) for flood in floods]
    for process in processes:
        process.start()
    try:
        yield asked
    finally:
        for process in processes:
            process.kill()
            process.join()


def _flood(port: int, flood: Flood, asked: Synchronized[int]) -> None:
    async def run() -> None:
        await asyncio.gather(*(_ask(port, flood, asked) for _ in range(flood.connections)))

    uvloop.run(run())


async def _ask(port: int, flood: Flood, asked: Synchronized[int]) -> None:
    while True:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            with contextlib.closing(writer):
                while True:
                    writer.write(flood.request * flood.at_once)
                    with asked.get_lock():
                        asked.value += 1
                    for _ in range(flood.at_once):
                        head = await reader.readuntil(b"\r\n\r\n")
                        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
                        await reader.readexactly(int(length))
