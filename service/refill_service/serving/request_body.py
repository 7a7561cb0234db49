"""How long may a request's body be, how slowly may it come, and who holds it meanwhile?

Each route says what it takes (:func:`takes_body`); a route that says nothing takes JSON. Whatever a path looks like, it
is the route that was found which decides, so a body is measured from when its route reads it. What is held of a body is
charged to its job and team (:mod:`refill_service.cache_core.shared_room`), but for the little that every batch needs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope

from refill.errors import PodBusy, RefillError, RequestTooLarge, RequestTooSlow
from refill_service.cache_core.shared_room import Asker, SharedRoom
from refill_service.pod.cache_node import CacheNode
from refill_service.serving.access_log import HOLDER
from refill_service.serving.node_of import node_of
from refill_service.serving.pace import Pace

__all__ = ["ALWAYS_TAKEN_BYTES", "RequestBody", "takes_body"]

ALWAYS_TAKEN_BYTES = 16 << 10
"""Of each body: it is never refused for what others hold. A batch of 2,000 positions."""

_JSON_BYTES = 64 << 10
_JSON_OF_PODS_BYTES = 1 << 20
_TAKES = "refill_takes_body"

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


@dataclass(frozen=True)
class _Taken:
    most_bytes: int | Callable[[CacheNode, str], int] = _JSON_BYTES
    in_pieces: bool = False
    most_lists: int | None = None

    def limit_bytes(self, scope: Scope, job: str) -> int:
        return self.most_bytes if isinstance(self.most_bytes, int) else self.most_bytes(node_of(scope), job)


_JSON = _Taken()
_JSON_OF_PODS = _Taken(_JSON_OF_PODS_BYTES)


def takes_body(
    most_bytes: int | Callable[[CacheNode, str], int], *, in_pieces: bool = False, most_lists: int | None = None
) -> Callable[[Endpoint], Endpoint]:
    """Decorates a route.

    :param most_bytes: in one request; or at this pod for the job of this name, whose errors are the answer then.
    :param in_pieces: the route reads the body's stream and keeps account itself of what it makes of it.
    :param most_lists: in JSON, and objects, each of which takes twenty times its bytes when it has been read; None: any
        number.
    """

    def mark(endpoint: Endpoint) -> Endpoint:
        setattr(endpoint, _TAKES, _Taken(most_bytes, in_pieces, most_lists))
        return endpoint

    return mark


class Answer(Protocol):
    """What the body can do with the answer to its request."""

    async def refuse(self, error: RefillError) -> None: ...

    def nobody_reads(self) -> None: ...


class RequestBody:
    """On its way in. When it is refused, that has been answered, and the route ends.

    :param timeout_seconds: None: the server sees to slow ones itself.
    :param of_pods: another pod asks, which may send longer JSON.
    """

    def __init__(
        self,
        scope: Scope,
        receive: Receive,
        answer: Answer,
        room: SharedRoom,
        timeout_seconds: float | None,
        *,
        of_pods: bool = False,
    ) -> None:
        self._unless_said = _JSON_OF_PODS if of_pods else _JSON
        self._scope = scope
        self._receive = receive
        self._answer = answer
        self._room = room
        self._timeout_seconds = timeout_seconds
        self._pace = Pace(timeout_seconds or 0, time.monotonic())
        self._asker = Asker()
        self._taken = self._unless_said
        self._limit_bytes: int | None = None
        self._size_bytes = self._num_lists = 0
        self._held_bytes = 0
        self._whole = False

    async def receive(self) -> Message:
        try:
            if self._limit_bytes is None:
                self._limit_bytes = self._limit_of_route()
            message = await self._next()
            if message["type"] == "http.request":
                self._count(message, self._limit_bytes)
            elif not self._whole:
                self._answer.nobody_reads()
        except RefillError as error:
            self.forget()
            await self._answer.refuse(error)
            # Of all exceptions this one alone goes through FastAPI without being kept, with all that had come of the
            # body, until the next collection of garbage.
            raise HTTPException(error.status, error.message) from None
        return message

    def forget(self) -> None:
        """Nothing of it is held any more."""
        self._hold(-self._held_bytes)

    def _limit_of_route(self) -> int:
        job = str(self._scope.get("path_params", {}).get("job", ""))
        self._asker = Asker(str(self._scope.get(HOLDER, "")), job)
        self._taken = getattr(self._scope.get("endpoint"), _TAKES, self._unless_said)
        limit_bytes = self._taken.limit_bytes(self._scope, job)
        announced = dict(self._scope["headers"]).get(b"content-length", b"0")
        # Anything else than a number is the server's to refuse.
        if announced.isdigit() and int(announced) > limit_bytes:
            raise _too_large(limit_bytes)
        return limit_bytes

    async def _next(self) -> Message:
        if self._timeout_seconds is None or self._whole:
            return await self._receive()
        try:
            async with asyncio.timeout(self._pace.ends - time.monotonic()):
                return await self._receive()
        except TimeoutError as error:
            raise RequestTooSlow(
                f"{self._size_bytes} bytes of the request's body came, and the rest did not"
            ) from error

    def _count(self, message: Message, limit_bytes: int) -> None:
        came = len(message.get("body", b""))
        if came:
            self._pace.moved(came, time.monotonic())
        self._size_bytes += came
        self._whole = not message.get("more_body", False)
        if self._size_bytes > limit_bytes:
            raise _too_large(limit_bytes)
        if (most_lists := self._taken.most_lists) is not None:
            self._num_lists += sum(message.get("body", b"").count(begin) for begin in (b"[", b"{"))
            if self._num_lists > most_lists:
                raise RequestTooLarge(f"request body has more than {most_lists} lists: make several of it")
        if self._taken.in_pieces:
            self._hold(came - self._held_bytes)  # the piece before has been used
            return
        more = max(0, self._size_bytes - ALWAYS_TAKEN_BYTES) - self._held_bytes
        if more and not self._room.fits(self._asker, more, has_bytes=self._held_bytes):
            raise PodBusy(
                f"the pod holds as many bytes of requests as it takes, of {self._of_whom()} or of all: "
                f"{self._room.used_bytes:,}"
            )
        self._hold(more)

    def _of_whom(self) -> str:
        return f"job {self._asker.job}" if self._asker.job else "one client"

    def _hold(self, more_bytes: int) -> None:
        if more_bytes:
            self._room.hold(self._asker, more_bytes)
            self._held_bytes += more_bytes


def _too_large(limit_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(f"request body is longer than {limit_bytes} bytes")
