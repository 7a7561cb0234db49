"""Who hangs up while a request is answered keeps the place of their connection until that has ended."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import uvloop
from starlette.types import Receive, Scope, Send
from tests.conftest import free_port

from refill_service.cache_core.shared_room import SharedRoom
from refill_service.cache_core.team_quotas import TeamQuotas
from refill_service.memory.loop_turns import LoopTurns
from refill_service.observing.request_counts import RequestCounts
from refill_service.serving.client_protocol import ClientLimits, ClientServer
from refill_service.serving.door import CONNECTION

MOST, PART = 8, 2
"""Connections, and those that each of two teams is sure of."""


class Slow:
    """An application that answers who belongs to a team when it is let to."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.refused = 0
        self.may_answer = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        team = scope["path"].strip("/")
        if scope[CONNECTION].belongs_to(team):
            self.begun.append(team)
            await self.may_answer.wait()
        else:
            self.refused += 1
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


async def ask_and_hang_up(port: int, team: str, slow: Slow) -> None:
    seen = len(slow.begun) + slow.refused
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /{team} HTTP/1.1\r\nHost: pod\r\n\r\n".encode())
    while len(slow.begun) + slow.refused == seen:
        await asyncio.sleep(0)
    writer.transport.abort()


def test_who_asks_and_hangs_up_has_no_more_answered_than_their_connections() -> None:
    async def run() -> None:
        slow, port = Slow(), free_port()
        quotas = TeamQuotas(lambda: ["greedy", "victim"], 0.5, 10)
        limits = ClientLimits(60, MOST, MOST, RequestCounts(), quotas, SharedRoom(16 << 20), LoopTurns())
        options: dict[str, Any] = {"app": slow, "lifespan": "off", "ws": "none", "log_level": "error"}
        server = ClientServer(limits, host="127.0.0.1", port=port, **options)
        serving = asyncio.create_task(server.serve())
        try:
            while not server.started:
                await asyncio.sleep(0)
            for _ in range(30):
                await ask_and_hang_up(port, "greedy", slow)
            assert slow.begun == ["greedy"] * (MOST - PART)
            assert slow.refused == 30 - (MOST - PART)
            await ask_and_hang_up(port, "victim", slow)
            assert slow.begun[-1] == "victim"
            slow.may_answer.set()
            slow.begun.clear()
            for _ in range(30):
                await ask_and_hang_up(port, "greedy", slow)
            assert len(slow.begun) >= MOST, "their places are free again"
        finally:
            server.should_exit = True
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(serving, 10)

    uvloop.run(asyncio.wait_for(run(), 60))
