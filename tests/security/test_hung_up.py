"""Who hangs up while a request is answered keeps the place of their connection until that has ended, which is soon."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send
from tests.conftest import free_port
from tests.pod_fixtures import metric
from tests.security.hostile_datasets import write_many_samples
from tests.waiting import until

from refill.protocol.wire_format import MAX_SAMPLES
from refill_service.cache_core.shared_room import SharedRoom
from refill_service.cache_core.team_quotas import TeamQuotas
from refill_service.demo.local_cluster import LocalCluster
from refill_service.memory.loop_turns import LoopTurns
from refill_service.pod.cache_node import RequestCounts
from refill_service.serving import listener
from refill_service.serving.client_protocol import ClientLimits, ClientServer
from refill_service.serving.door import CONNECTION

MOST, PART = 8, 2
"""Connections, and those that each of two teams is sure of."""
ASKED = 20


class Slow:
    """An application that answers who belongs to a team when it is let to."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.refused = 0
        self.may_answer, self.was_asked = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        team = scope["path"].strip("/")
        if scope[CONNECTION].belongs_to(team):
            self.begun.append(team)
            self.was_asked.set()
            await self.may_answer.wait()
        else:
            self.refused += 1
            self.was_asked.set()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


async def ask_and_hang_up(port: int, team: str, slow: Slow) -> None:
    slow.was_asked.clear()
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET /{team} HTTP/1.1\r\nHost: pod\r\n\r\n".encode())
    await slow.was_asked.wait()
    writer.transport.abort()


@contextlib.asynccontextmanager
async def served(app: ASGIApp) -> AsyncIterator[tuple[int, ClientServer]]:
    """A pod's server with the application, and its port."""
    port = free_port()
    quotas = TeamQuotas(lambda: ["greedy", "victim"], 0.5, 10)
    limits = ClientLimits(60, MOST, MOST, RequestCounts(), quotas, SharedRoom(16 << 20), LoopTurns())
    options: dict[str, Any] = {"app": app, "lifespan": "off", "ws": "none", "log_level": "error"}
    server = ClientServer(limits, host="127.0.0.1", port=port, **options)
    serving = asyncio.create_task(server.serve())
    try:
        await asyncio.to_thread(until, lambda: server.started, "the server listens")
        yield port, server
    finally:
        server.end()
        await asyncio.wait_for(serving, 10)


def test_who_asks_and_hangs_up_has_no_more_answered_than_their_connections() -> None:
    async def run() -> None:
        slow = Slow()
        async with served(slow) as (port, _):
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

    uvloop.run(asyncio.wait_for(run(), 60))


def test_of_a_connection_that_has_gone_before_its_request_is_looked_at_that_is_told_at_once() -> None:
    """A rank's process was kept as connected, and the request failed, since uvloop can't watch a closed socket."""
    told = []
    looked_at = asyncio.Event()

    async def late(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        while (await receive())["type"] != "http.disconnect":
            pass
        connection = scope[CONNECTION]
        try:
            assert connection.belongs_to("greedy")
            assert not connection.is_answered()
            connection.when_lost(lambda: told.append(connection))
        finally:
            looked_at.set()

    async def run() -> None:
        async with served(late) as (port, _):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET / HTTP/1.1\r\nHost: pod\r\n\r\n")
            writer.transport.abort()
            await looked_at.wait()
            assert len(told) == 1

    uvloop.run(asyncio.wait_for(run(), 60))


async def never_asked(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("somebody asks")


def test_a_pod_that_ends_waits_for_no_connection_that_comes_at_the_last_moment() -> None:
    """It was made, and not known to be: the pod waited for it as long as it might."""

    async def run() -> None:
        async with served(never_asked) as (port, _):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.close()

    uvloop.run(asyncio.wait_for(run(), 60))


def test_of_many_that_come_at_once_none_that_was_cut_off_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some give way while they are made."""
    monkeypatch.setattr(listener, "_MAX_HANDSHAKES", 1)

    async def come_and_go(port: int) -> None:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write_eof()
            await reader.read()
            writer.close()

    async def run() -> None:
        async with served(never_asked) as (port, server):
            await asyncio.gather(*(come_and_go(port) for _ in range(200)))
            assert not server.server_state.connections

    uvloop.run(asyncio.wait_for(run(), 60))


def test_samples_that_nobody_waits_for_any_more_are_not_read(tmp_path: Path) -> None:
    url = write_many_samples(tmp_path / "many", MAX_SAMPLES)
    ids = np.arange(MAX_SAMPLES, dtype="<i8").tobytes()
    with LocalCluster(1, tmp_path, {"memory_bytes": "64MiB"}) as pod:
        with httpx.Client(base_url=pod.pod_urls[0], timeout=60) as client:
            plan = client.put("/v1/jobs/job", json={"dataset": url}).json()["plan_id"]
        head = (
            f"POST /v1/jobs/job/planned/samples?plan={plan} HTTP/1.1\r\nHost: pod\r\nContent-Length: {len(ids)}\r\n\r\n"
        )
        before = metric(pod.pod_urls[0], "refill_store_requests_total", operation="read_range")
        for _ in range(ASKED):
            with socket.create_connection(("127.0.0.1", pod.ports[0])) as connection:
                connection.sendall(head.encode() + ids)
        until(lambda: metric(pod.pod_urls[0], "refill_requests_under_way", asker="client") <= 1, "nothing is under way")
        read = metric(pod.pod_urls[0], "refill_store_requests_total", operation="read_range") - before
        assert read < ASKED * MAX_SAMPLES / 2
        assert "Traceback" not in pod.log(0)
