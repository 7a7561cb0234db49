"""Which other pods are away? Found out by who asks them, and by whether they give a sign of life; never by lateness.

A pod that refuses connections, or breaks them off, is away; so is one that is asked for something and gives no sign of
life for two seconds, which an idle pod gives at once and a busy one between two requests. It is looked at twice a
second then, until it answers again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Iterable
from typing import Any, TypeVar
from urllib.parse import quote

from refill.errors import JobError, PodBusy, PodUnreachable, RefillError
from refill_service.peers.peers import Peers

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_PATIENCE_SECONDS = 0.5
"""How long a request may take before its pod is asked for a sign of life, again and again."""
_SIGN_OF_LIFE_SECONDS = 1.5
_LOOKS = 6
"""Within that time it is looked whether the sign has come. Where this pod itself stood still, one of them is over, and
not all of the time, before it could hear anything."""
_IS_FRESH_SECONDS = 0.25
"""A sign of life that came so short a while ago is one for everybody who waits for that pod."""
_LOOK_SECONDS = 0.5
_ALIVE = "/peer/v1/alive"


def is_away(error: BaseException) -> bool:
    """Whether a pod that answers so, or not at all, can't be asked now: another one answers in its place."""
    return isinstance(error, PodUnreachable) and not isinstance(error, PodBusy)


def planned_path(name: str) -> str:
    """Of what pods ask each other about a planned job."""
    return f"/peer/v1/jobs/{quote(name, safe='')}/planned"


class PodsAway:
    """Finds out which other pods are away, for all jobs of this pod."""

    def __init__(self, peers: Peers) -> None:
        self.away: set[int] = set()
        self._peers = peers
        self._looking: dict[int, asyncio.Task[None]] = {}
        self._signs: dict[int, asyncio.Task[bool]] = {}
        """Questions for a sign of life that are under way."""
        self._last_sign: dict[int, float] = {}

    async def close(self) -> None:
        tasks = [*self._looking.values(), *self._signs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def is_gone(self, pod: int, why: RefillError) -> None:
        """Fact: a pod can't be asked."""
        if pod not in self.away:
            log.warning("pod %d is away, and others answer in its place: %s", pod, why)
            self.away.add(pod)
            self._looking[pod] = asyncio.create_task(self._look(pod))

    async def answer_of(self, pod: int, answer: Awaitable[Answer], *, was_silent: bool = False) -> Answer:
        """What a pod answers. Raises :class:`PodUnreachable`, too, when it gives no sign of life while it is waited
        for.

        :param was_silent: whether a rank has waited for its sign of life already: then it is asked for one at once,
            and waited for half as long.
        """
        asked = asyncio.ensure_future(answer)
        asked.add_done_callback(lambda done: done.cancelled() or done.exception())  # whoever still wants to know it
        try:
            patience = 0.0 if was_silent else _PATIENCE_SECONDS
            while not (await asyncio.wait([asked], timeout=patience))[0]:
                patience = _PATIENCE_SECONDS
                if not await self._is_alive(pod, _LOOKS // 2 if was_silent else _LOOKS) and not asked.done():
                    raise PodUnreachable(f"{self._peers.name(pod)} gives no sign of life", pod=pod)
            return asked.result()
        finally:
            asked.cancel()  # its connection may stay busy for as long as the pod stands still: nobody waits for that

    async def answers_of(self, pods: Iterable[int], method: str, path: str, body: bytes | None = None) -> list[Any]:
        """What each of these pods answers; None of one that does not know, or can't be asked."""

        async def answer(pod: int) -> Any:
            if pod in self.away:
                return None
            with contextlib.suppress(JobError):
                try:
                    return await self.answer_of(pod, self._peers.call(pod, method, path, body))
                except RefillError as error:
                    if not is_away(error):
                        raise
            return None

        return await asyncio.gather(*map(answer, pods))

    async def _look(self, pod: int) -> None:
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            if await self._is_alive(pod, _LOOKS):
                break
        log.info("pod %d answers again", pod)
        self.away.discard(pod)
        del self._looking[pod]

    async def _is_alive(self, pod: int, looks: int) -> bool:
        """Many may wait for one pod: it is asked once for all of them.

        :param looks: how often it is looked whether the sign has come.
        """
        if time.monotonic() - self._last_sign.get(pod, -math.inf) < _IS_FRESH_SECONDS:
            return True
        if pod not in self._signs:
            self._signs[pod] = asyncio.create_task(self._gives_sign(pod))
            self._signs[pod].add_done_callback(lambda _: self._signs.pop(pod))
        sign = self._signs[pod]
        return await _is_done(sign, looks) and sign.result()

    async def _gives_sign(self, pod: int) -> bool:
        asked = asyncio.create_task(self._peers.call(pod, "GET", _ALIVE, apart=True))
        try:
            if not await _is_done(asked, 2 * _LOOKS):  # whoever waits has gone on by then
                return False
            asked.result()
        except RefillError as error:
            if is_away(error):
                return False
        finally:
            asked.cancel()
        self._last_sign[pod] = time.monotonic()
        return True


async def _is_done(awaited: asyncio.Task[Any], looks: int) -> bool:
    for _ in range(looks):
        if (await asyncio.wait([awaited], timeout=_SIGN_OF_LIFE_SECONDS / _LOOKS))[0]:
            return True
    return False
