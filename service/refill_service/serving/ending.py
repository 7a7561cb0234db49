"""How does a pod end? Readiness goes first, then new jobs, then new requests; what was begun is finished.

1. ``/readyz`` turns 503 and new jobs are refused, while requests of running jobs go on for ``drain_seconds``: after
   that nobody who looks for a ready pod is sent here any more.
2. Clients' servers accept nothing new; requests under way are answered, those that wait for another rank with that: it
   may not come as far before this pod's successor is there. Other pods are still served, since those may need them in
   turn.
3. Other pods' requests under way are answered, new ones refused.

All of it takes ``grace_seconds`` at most. A second signal ends the process at once. (The first process of a container
does not get it.)
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable

from refill_service.pod.cache_node import CacheNode, PodPhase
from refill_service.serving.client_protocol import ClientServer
from refill_service.serving.request_guard import RequestGuard

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def ends_by_signal() -> asyncio.Event:
    """Set at the first SIGTERM or SIGINT; the second one kills the process."""
    loop, ends = asyncio.get_running_loop(), asyncio.Event()

    def first_signal() -> None:
        ends.set()
        for number in _SIGNALS:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in _SIGNALS:
        loop.add_signal_handler(number, first_signal)
    return ends


class Ending:
    """The end of a pod whose servers still run. Afterwards nobody waits for an answer, unless time was up."""

    def __init__(
        self,
        node: CacheNode,
        clients: list[ClientServer],
        serving: list[asyncio.Task[None]],
        for_clients: RequestGuard,
        for_peers: RequestGuard,
    ) -> None:
        self._node = node
        self._clients = clients
        self._serving = serving
        self._for_clients = for_clients
        self._for_peers = for_peers

    async def carry_out(self) -> None:
        settings = self._node.settings
        self._node.phase = PodPhase.STOPPING
        log.info("pod %d ends: requests are taken for %g s more", settings.ordinal, settings.drain_seconds)
        try:
            async with asyncio.timeout(settings.grace_seconds):
                await self._drain()
        except TimeoutError:
            broken_off = self._for_clients.door.under_way + self._for_peers.door.under_way
            log.warning("%d requests are broken off after %g s", broken_off, settings.grace_seconds)
            for server in self._clients:
                server.force_exit = True

    async def _drain(self) -> None:
        settings = self._node.settings
        await self._unless_a_server_ends(asyncio.sleep(settings.drain_seconds))
        self._node.table.waits.end()
        for server in self._clients:
            server.end()
        await asyncio.wait(self._serving[: len(self._clients)])
        self._for_peers.door.stopping = self._node.table.stopping()
        await self._for_peers.wait_until_idle()

    async def _unless_a_server_ends(self, waiting: Awaitable[None]) -> None:
        task = asyncio.ensure_future(waiting)
        await asyncio.wait([task, *self._serving], return_when=asyncio.FIRST_COMPLETED)
        task.cancel()
