"""How does a home pod ask an owner, and what becomes of the three frames of its answer?

``ask`` returns when what was asked for is here, with the second frame. What the owner sends ahead arrives after it, in
a task of its own; a batch that asks for some of that meanwhile waits until this answer has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence

from refill.errors import PodUnreachable, RefillError
from refill.protocol.wire_format import Int64Array
from refill_service.cache_core.home_machine import Batch, HomeMachine, OwnerRequest, SentAhead
from refill_service.memory.payload import Payload
from refill_service.observing.tracing import span
from refill_service.peers.job_peers import JobPeers

__all__ = ["OwnerAnswers"]

log = logging.getLogger(__name__)

Answer = tuple[Int64Array, Sequence[Payload]]
"""Sample ids and bytes, in the order of the positions that were asked for."""


class OwnerAnswers:
    """Of other pods, to one pod as the home of a job's ranks."""

    def __init__(self, machine: HomeMachine[Payload], peers: JobPeers, ordinal: int) -> None:
        self._machine = machine
        self._peers = peers
        self._why_closed: RefillError = PodUnreachable(f"pod {ordinal} stops", pod=ordinal)
        self._receiving: set[asyncio.Task[list[SentAhead[Payload]]]] = set()
        self._ended: dict[OwnerRequest, asyncio.Future[None]] = {}
        """Of the requests under way."""

    async def close(self, why: RefillError) -> None:
        """Requests under way end with ``why``."""
        self._why_closed = why
        for task in self._receiving:
            task.cancel()
        await asyncio.gather(*self._receiving, return_exceptions=True)

    async def ask(
        self, batch: Batch[Payload], pod: int, places: Int64Array, owners_left: int, says_damage: bool = False
    ) -> Answer:
        """Ask an owner for places of a batch, once."""
        request = self._machine.ask(batch, pod, places, owners_left)
        loop = asyncio.get_running_loop()
        answered: asyncio.Future[Answer] = loop.create_future()
        self._ended[request] = loop.create_future()
        with span("ask owner", pod=pod, positions=len(places)):
            task = asyncio.create_task(self._receive(request, answered, says_damage))
            self._receiving.add(task)
            task.add_done_callback(lambda task: self._has_ended(request, task, answered))
            return await answered

    async def wait_for(self, requests: Iterable[OwnerRequest]) -> None:
        """Until these have ended, well or badly."""
        if under_way := [self._ended[request] for request in requests if request in self._ended]:
            await asyncio.wait(under_way)

    async def _receive(
        self, request: OwnerRequest, answered: asyncio.Future[Answer], says_damage: bool
    ) -> list[SentAhead[Payload]]:
        """Read an owner's answer: which positions it sends ahead, what was asked for, what is sent ahead."""
        pod, wire = request.pod, request.wire
        async with self._peers.frames(pod, "take", wire.encode(), says_damage=says_damage) as frames:
            self._machine.announced(request, (await frames.frame()).positions)
            asked = await frames.frame()
            if not answered.done():
                answered.set_result((asked.sample_ids, asked.payloads))
            ahead = await frames.frame()
        # Copies: a sample sent ahead must not keep the buffer of all that came with it.
        return [
            SentAhead(position, sample, len(payload), bytes(payload))
            for position, sample, payload in zip(
                ahead.positions.tolist(), ahead.sample_ids.tolist(), ahead.payloads, strict=True
            )
        ]

    def _has_ended(
        self, request: OwnerRequest, task: asyncio.Task[list[SentAhead[Payload]]], answered: asyncio.Future[Answer]
    ) -> None:
        """However it ended, even before it began: its room is free again, and nobody waits for it any more."""
        self._receiving.discard(task)
        error = self._why_closed if task.cancelled() else task.exception()
        self._machine.ended(request, task.result() if error is None else ())
        self._ended.pop(request).set_result(None)
        if not answered.done():
            answered.set_exception(error or self._why_closed)
        elif error is not None and not task.cancelled():
            # What was lost was assigned to later requests; they ask on demand and get the same samples.
            log.warning("samples sent ahead were lost: %s: %s", type(error).__name__, error)
