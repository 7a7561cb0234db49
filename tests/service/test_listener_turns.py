"""How much do strangers get, who always ask, before somebody who has just connected is heard? Little."""

from __future__ import annotations

import asyncio
import socket
import ssl

import pytest
import trustme
import uvloop
from tests.service.test_loop_turns import steps_of, work

from refill_service.memory.loop_turns import STRANGERS, LoopTurns
from refill_service.serving.listener import Listener

NUM_STRANGERS, NUM_COMERS = 50, 10


@pytest.mark.parametrize("with_tls", [False, True])
def test_who_connects_does_not_wait_for_all_that_strangers_ask(with_tls: bool) -> None:
    context, of_comers = _contexts() if with_tls else (None, None)

    async def run() -> None:
        turns, begun, all_came = LoopTurns(), asyncio.Event(), asyncio.Event()
        num_pieces = num_came = 0

        async def asks_always() -> None:
            nonlocal num_pieces
            while not all_came.is_set():
                work()
                num_pieces += 1
                begun.set()
                await asyncio.sleep(0)

        class Heard(asyncio.BufferedProtocol):
            """Of a connection that can ask now."""

            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                nonlocal num_came
                num_came += 1
                if num_came == NUM_COMERS:
                    all_came.set()

            def get_buffer(self, sizehint: int) -> bytearray:
                return bytearray(1)

        listening = socket.create_server(("127.0.0.1", 0))
        listener = Listener(listening, context, Heard, turns)
        strangers = [asyncio.create_task(steps_of(turns, STRANGERS, asks_always())) for _ in range(NUM_STRANGERS)]
        await begun.wait()
        before = num_pieces
        host, port = listening.getsockname()
        name = "pod.test" if with_tls else None
        comers = [
            asyncio.create_task(asyncio.open_connection(host, port, ssl=of_comers, server_hostname=name))
            for _ in range(NUM_COMERS)
        ]
        await all_came.wait()
        assert num_pieces - before < NUM_STRANGERS
        for _, writer in await asyncio.gather(*comers):
            writer.close()
        await asyncio.gather(*strangers)
        listener.close()
        await listener.wait_closed()

    uvloop.run(run())


def _contexts() -> tuple[ssl.SSLContext, ssl.SSLContext]:
    authority = trustme.CA()
    of_server, of_comers = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    authority.issue_cert("pod.test").configure_cert(of_server)
    authority.configure_trust(of_comers)
    return of_server, of_comers
