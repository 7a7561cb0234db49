"""Which answers of a pod that stood still, and has a successor, reach a client?"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from refill.protocol.pod_life import PodLife
from refill_service.cache_core.pod_lives import PodLives
from refill_service.peers.fence import Fence
from refill_service.peers.lease_clock import lease_time
from refill_service.peers.peers import Peers
from refill_service.serving.life_check import LifeCheck


class _LeadsToSuccessor(Peers):
    """The pod's name leads to a later run of it, as it learns when it asks."""

    async def who_is(self, pod: int) -> PodLife | None:
        return PodLife(200, "b")


async def _answered(method: str, status: int) -> tuple[int, bytes]:
    lives = PodLives(0, 1, PodLife(100, "a"), lease_time())
    sent: list[Any] = []

    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b"half of it", "more_body": True})
        await send({"type": "http.response.body", "body": b" and the rest"})

    async def send(message: Any) -> None:
        sent.append(message)

    fence = Fence(lives, _LeadsToSuccessor(("http://127.0.0.1:9",), 1, lives=lives))
    check = LifeCheck(route, fence, of_pods=False)
    await check({"type": "http", "method": method, "path": "/v1/jobs/a", "headers": []}, _nothing, send)
    starts = [message for message in sent if message["type"] == "http.response.start"]
    assert len(starts) == 1
    return starts[0]["status"], b"".join(message.get("body", b"") for message in sent)


async def _nothing() -> Any:
    raise AssertionError("nobody sends anything")


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
@pytest.mark.parametrize("status", [200, 204, 410, 500])
def test_a_client_does_not_hear_that_it_was_done_or_is_over(method: str, status: int) -> None:
    found, body = asyncio.run(_answered(method, status))
    assert found == 503
    assert json.loads(body)["error"] == "PodReplaced"


@pytest.mark.parametrize(("method", "status"), [("GET", 200), ("PUT", 503)])
def test_what_changes_nothing_and_what_says_to_come_again_is_sent(method: str, status: int) -> None:
    assert asyncio.run(_answered(method, status)) == (status, b"half of it and the rest")
