"""When may a pod answer? Here one that is alone; what several decide is in tests/cache_core/test_pod_lives.py."""

from __future__ import annotations

import asyncio
import time

import pytest
from pyreqwest.exceptions import ConnectTimeoutError

from refill.errors import PodUnreachable
from refill.protocol.pod_life import PodLife
from refill_service.cache_core.pod_lives import PodLives
from refill_service.peers.fence import Fence
from refill_service.peers.peers import Peers


@pytest.mark.parametrize("own_urls", [(), ("http://127.0.0.1:9",)], ids=["told of no URL", "its own leads nowhere"])
def test_a_pod_that_is_alone_answers(own_urls: tuple[str, ...]) -> None:
    """`refill serve` without any URL, as the README shows it, failed at its first batch."""

    async def confirmed() -> None:
        lives = PodLives(0, 1, PodLife(100, "a"), time.monotonic())
        peers = Peers(own_urls, 1, lives=lives)
        try:
            await Fence(lives, peers).confirm()
        finally:
            await peers.close()

    asyncio.run(confirmed())


def test_a_pod_that_can_not_be_reached_in_time_is_unreachable() -> None:
    """The library's error is a TimeoutError, too, as that of a request which is broken off."""

    async def ask() -> None:
        peers = Peers(("http://127.0.0.1:9",), 1)
        with pytest.raises(PodUnreachable, match="can't be reached within 2 s"):
            async with peers._translated(0):
                raise ConnectTimeoutError("connection timeout", {"causes": []})

    asyncio.run(ask())
