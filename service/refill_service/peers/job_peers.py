"""How does a job at one pod talk to its other pods, while one of them is down or has forgotten it?

A pod that does not answer is asked again, at growing intervals, for a few seconds. Requests to other pods go on
meanwhile. One that does not know the job was restarted: then the job is lost.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from refill.errors import PodUnreachable, RefillError, UnknownJob
from refill_service.peers.peers import Body, FrameReader, Peers

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
WasRestarted = Callable[[int], RefillError]
"""Is told of a pod that has lost the job, ends it everywhere, and returns the error for who asks."""

SAYS_DAMAGE = "&damaged=say"
REPEATS = "&repeats=true"
PATIENCE_SECONDS = 4.0
"""At most, whatever ``wait_seconds`` is: clients wait 5 s or more, and the answer should say what is missing."""
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 1.0
_SAY_EVERY_SECONDS = 10.0


class JobPeers:
    """The other pods, as one job at the pod ``ordinal`` of ``num_pods`` sees them."""

    def __init__(
        self,
        name: str,
        incarnation: str,
        ordinal: int,
        num_pods: int,
        peers: Peers,
        wait_seconds: float,
        was_restarted: WasRestarted,
    ) -> None:
        self.others = [pod for pod in range(num_pods) if pod != ordinal]
        self.waiting: Counter[int] = Counter()
        """Requests that wait for each pod to answer again."""
        self.sent_bytes: Counter[int] = Counter()
        """To each pod, of requests for frames."""
        self._name = name
        self._asker = f"incarnation={incarnation}&pod={ordinal}"
        self._peers = peers
        self._wait_seconds = min(wait_seconds, PATIENCE_SECONDS)
        self._was_restarted = was_restarted
        self._said: dict[int, float] = {}

    async def patiently(self, pod: int, attempt: Callable[[], Awaitable[Answer]]) -> Answer:
        """Try until it works, an error is final, or patience ends: then the last error, which names the pod."""
        started = time.monotonic()
        pause = _FIRST_PAUSE_SECONDS
        waits = False
        try:
            while True:
                tried = time.monotonic()
                try:
                    return await attempt()
                except UnknownJob as error:
                    raise self._was_restarted(pod) from error
                except PodUnreachable as error:
                    if time.monotonic() + pause > started + self._wait_seconds:
                        raise
                    self._say(pod, error)
                if not waits:
                    waits = True
                    self.waiting[pod] += 1
                # A try that took long, because packets are dropped, has been a pause.
                took = time.monotonic() - tried
                await asyncio.sleep(max(_FIRST_PAUSE_SECONDS, pause - took) * random.uniform(0.5, 1.0))
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        finally:
            self.waiting[pod] -= waits

    async def call(self, pod: int, method: str, what: str, body: Body = None) -> Any:
        """One small request, made with patience."""
        return await self.patiently(pod, lambda: self._peers.call(pod, method, self._path(what), body))

    async def call_all(self, method: str, what: str, body: Body = None) -> list[Any]:
        """The same small request to all of them; the first error is raised when all have answered."""
        calls = (self.call(pod, method, what, body) for pod in self.others)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    @asynccontextmanager
    async def frames(
        self, pod: int, what: str, body: bytes, *, says_damage: bool = False, repeats: bool = False
    ) -> AsyncIterator[FrameReader]:
        """One request that is answered with frames; made once.

        :param says_damage: whether a sample that is damaged is answered by its error in the frame.
        :param repeats: whether positions of an epoch that repeat samples ask for them.
        """
        self.sent_bytes[pod] += len(body)
        path = self._path(what) + (SAYS_DAMAGE if says_damage else "") + (REPEATS if repeats else "")
        async with self._peers.frames(pod, path, body) as frames:
            yield frames

    async def bytes_of(self, pod: int, what: str, most_bytes: int, **params: int) -> bytes:
        """One request that is answered with so many bytes at most; made once."""
        said = "".join(f"&{name}={value}" for name, value in params.items())
        return await self._peers.get_bytes(pod, self._path(what) + said, most_bytes)

    def _path(self, what: str) -> str:
        return f"/peer/v1/jobs/{self._name}/{what}?{self._asker}"

    def _say(self, pod: int, error: Exception) -> None:
        now = time.monotonic()
        if now - self._said.get(pod, -_SAY_EVERY_SECONDS) >= _SAY_EVERY_SECONDS:
            self._said[pod] = now
            log.warning("job %s waits for pod %d: %s", self._name, pod, error)
