"""Which requests does a pod take on, and how much of them does it hold? Around every route, of clients and of peers.

A body is measured while it comes, by the limit of its route and by what all requests hold together; a request above
``max_requests`` is answered "busy"; answers from 400 on are counted. What a route holds for its answer (room in a gate)
it puts on the request's stack, ``held``, which is let go of when the answer was sent or can't be sent any more.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from refill.errors import InvalidInput, PodBusy, PodStopping, RefillError, RequestTooLarge, RequestTooSlow
from refill.protocol.wire_format import MAX_BATCH
from refill_service.serving.access_log import log_request
from refill_service.serving.request_id import REQUEST_ID_HEADER, take_request_id
from refill_service.tracing import continue_trace

__all__ = [
    "LEAST_BYTES",
    "OVER_LIMIT",
    "BodyBytes",
    "PeerGone",
    "RequestCounts",
    "RequestGuard",
    "allowed_seconds",
    "held",
    "wire_answer",
]

LEAST_BYTES = 1 << 16
OVER_LIMIT = "refill.over_limit"
"""In a request's scope: its connection is one too many."""

_HELD = "refill.held"
_PIECE_BYTES = 1 << 20
_JSON_BYTES = 1 << 20
_BODY_BYTES = {
    "batch": 8 * MAX_BATCH + 64,
    "take": 8 * MAX_BATCH + 64,
    "samples": 8 * MAX_BATCH,
    "trace": 1 << 31,
    "records": 1 << 31,
    "kept": 1 << 31,
}
"""By the last part of the path: routes whose bodies are no JSON."""
_ALWAYS = ("/healthz", "/readyz", "/metrics")
"""Whoever looks after the pod must see it when it is busy, or would restart it for that."""


def held(request: Request) -> AsyncExitStack:
    """What is let go of at the end of this request's answer."""
    stack: AsyncExitStack = request.scope[_HELD]
    return stack


def allowed_seconds(timeout_seconds: float, moved_bytes: int) -> float:
    """How long the other side may take to move so many bytes: a byte now and then is no progress."""
    return timeout_seconds * (1 + moved_bytes // LEAST_BYTES)


@dataclass
class RequestCounts:
    """What became of requests, on all ports."""

    under_way: Counter[str] = field(default_factory=Counter)
    """Of ``client``s and of other ``pod``s, without probes."""
    by_status: Counter[int] = field(default_factory=Counter)
    """Answers from 400 on; those to probes are none."""
    connections_cut: int = 0
    """Of clients that sent or read too slowly."""


class PeerGone(Exception):
    """The other side does not read its answer, or is gone: there is nobody to tell."""


class BodyBytes:
    """How many bytes of request bodies the pod holds. One body alone may be larger than the limit."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0


class RequestGuard:
    """An ASGI application around another one.

    :param asker: ``client`` or ``pod``, as it is counted.
    :param timeout_seconds: for a peer that sends or reads less than ``LEAST_BYTES`` meanwhile; None: the server sees to
        that itself.
    """

    def __init__(
        self,
        app: ASGIApp,
        asker: str,
        bodies: BodyBytes,
        counts: RequestCounts,
        max_requests: int,
        timeout_seconds: float | None = None,
        *,
        access_log: bool = False,
    ) -> None:
        self.under_way = 0
        self.stopping: PodStopping | None = None
        """Once set, the answer to every request that is not under way yet."""
        self._app = app
        self._asker = asker
        self._bodies = bodies
        self._counts = counts
        self._max_requests = max_requests
        self._timeout_seconds = timeout_seconds
        self._access_log = access_log
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_until_idle(self) -> None:
        await self._idle.wait()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        started = time.monotonic()
        always = scope["path"] in _ALWAYS
        request_id = take_request_id(scope["headers"])
        continue_trace(scope["headers"])
        answer = _Answer(send, request_id, None if always else self._counts, self._timeout_seconds)
        try:
            await self._answer(scope, receive, answer, always)
        finally:
            if self._access_log and not always:
                log_request(scope, self._asker, answer.status, answer.num_bytes, time.monotonic() - started)

    async def _answer(self, scope: Scope, receive: Receive, answer: _Answer, always: bool) -> None:
        limit_bytes = _BODY_BYTES.get(scope["path"].rpartition("/")[2], _JSON_BYTES)
        if not always and (refusal := self._refusal(scope, limit_bytes)) is not None:
            await answer.refuse(refusal)
            return
        body = _Body(receive, answer, limit_bytes, self._bodies, self._timeout_seconds)
        self.under_way += 1
        self._counts.under_way[self._asker] += not always
        self._idle.clear()
        try:
            async with AsyncExitStack() as stack:
                scope[_HELD] = stack
                await self._app(scope, body.receive, answer.send)
        except PeerGone:
            pass
        finally:
            body.forget()
            self.under_way -= 1
            self._counts.under_way[self._asker] -= not always
            if self.under_way == 0:
                self._idle.set()

    def _refusal(self, scope: Scope, limit_bytes: int) -> RefillError | None:
        if self.stopping is not None:
            return self.stopping
        if scope.get(OVER_LIMIT) or self.under_way >= self._max_requests:
            return PodBusy(
                f"the pod has {self._max_requests} requests or connections, as many as it takes (max_connections)"
            )
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        # Anything else than a number is the server's to refuse.
        if announced.isdigit() and int(announced) > limit_bytes:
            return _too_large(limit_bytes)
        return None


class _Answer:
    """What is sent to the other side, once: after a refusal nothing more."""

    def __init__(
        self, send: Send, request_id: str, counts: RequestCounts | None, timeout_seconds: float | None
    ) -> None:
        self.status = 0
        """0: nobody was there to read it."""
        self.num_bytes = 0
        self._send = send
        self._id_header = (REQUEST_ID_HEADER.encode(), request_id.encode())
        self._counts = counts
        self._timeout_seconds = timeout_seconds
        self._begun = False
        self._over = False

    async def send(self, message: Message) -> None:
        if self._over:
            return
        if message["type"] == "http.response.start":
            self._begun = True
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), self._id_header]
            if message["status"] >= 400 and self._counts is not None:
                self._counts.by_status[message["status"]] += 1
        self.num_bytes += len(message.get("body", b""))
        if self._timeout_seconds is None:
            await self._send(message)
            return
        try:
            # How much of a piece has left can't be seen here, so a stuck one is not given the time of a slow one.
            pieces = 1 + len(message.get("body", b"")) // _PIECE_BYTES
            async with asyncio.timeout(self._timeout_seconds * pieces):
                await self._send(message)
        except TimeoutError as error:
            raise PeerGone("the answer is not read") from error

    def nobody_reads(self) -> None:
        self._over = True

    async def refuse(self, error: RefillError) -> None:
        if not self._begun:
            status, headers, body = wire_answer(error)
            await self.send({"type": "http.response.start", "status": status, "headers": headers})
            await self.send({"type": "http.response.body", "body": body})
        self._over = True


class _Body:
    """A request's body on its way in. When it is refused, the route sees a client that is gone."""

    def __init__(
        self, receive: Receive, answer: _Answer, limit_bytes: int, bodies: BodyBytes, timeout_seconds: float | None
    ) -> None:
        self._receive = receive
        self._answer = answer
        self._limit_bytes = limit_bytes
        self._bodies = bodies
        self._timeout_seconds = timeout_seconds
        self._started = time.monotonic()
        self._size_bytes = 0
        self._whole = False

    async def receive(self) -> Message:
        try:
            message = await self._next()
            if message["type"] == "http.request":
                self._count(message)
            elif not self._whole:
                self._answer.nobody_reads()
        except InvalidInput as error:
            return await self._refused(error)
        except PodBusy as error:
            return await self._refused(error)
        return message

    async def _next(self) -> Message:
        if self._timeout_seconds is None or self._whole:
            return await self._receive()
        left = self._started + allowed_seconds(self._timeout_seconds, self._size_bytes) - time.monotonic()
        try:
            async with asyncio.timeout(left):
                return await self._receive()
        except TimeoutError as error:
            raise RequestTooSlow(
                f"{self._size_bytes} bytes of the request's body came, and the rest did not"
            ) from error

    def _count(self, message: Message) -> None:
        came = len(message.get("body", b""))
        self._size_bytes += came
        self._bodies.used_bytes += came
        self._whole = not message.get("more_body", False)
        if self._size_bytes > self._limit_bytes:
            raise _too_large(self._limit_bytes)
        if self._size_bytes < self._bodies.used_bytes > self._bodies.limit_bytes:
            raise PodBusy(f"the pod holds {self._bodies.limit_bytes} bytes of requests, as many as it takes")

    async def _refused(self, error: RefillError) -> Message:
        self.forget()
        await self._answer.refuse(error)
        return {"type": "http.disconnect"}

    def forget(self) -> None:
        self._bodies.used_bytes -= self._size_bytes
        self._size_bytes = 0


def wire_answer(error: RefillError) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Status, headers and body of an error that no route answers with."""
    told: dict[str, Any] = error.to_wire()
    body = json.dumps(told).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    return error.status, headers, body


def _too_large(limit_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(f"request body is longer than {limit_bytes} bytes")
