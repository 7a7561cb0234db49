"""Which requests does a pod take on, and how much of them does it hold? Around every route, of clients and of peers.

A body is measured while it comes (:mod:`.request_body`); a request above ``max_requests`` is answered "busy"; an answer
has to be read at a pace; answers from 400 on are counted. What a route holds for its answer (room in a gate)
it puts among the request's resources, which are freed when the answer was sent or can't be sent any more.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import AsyncExitStack
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from refill.errors import PodBusy, PodStopping, RefillError
from refill_service.cache_core.shared_room import Asker, SharedRoom
from refill_service.observing.request_counts import RequestCounts
from refill_service.observing.request_id import REQUEST_ID_HEADER, take_request_id
from refill_service.observing.tracing import continue_trace
from refill_service.serving.access_log import HOLDER, log_request
from refill_service.serving.pace import LEAST_BYTES_PER_SECOND
from refill_service.serving.probes import looks_after_the_pod
from refill_service.serving.request_body import ALWAYS_TAKEN_BYTES, RequestBody

__all__ = [
    "ANSWER",
    "OVER_LIMIT",
    "Answer",
    "PeerGone",
    "RequestGuard",
    "resources_of",
    "wire_answer",
]

OVER_LIMIT = "refill.over_limit"
"""In a request's scope: its connection is one too many."""

ANSWER = "refill.answer"
"""In a request's scope: its :class:`Answer`."""

_RESOURCES = "refill.resources"
_PIECE_BYTES = 1 << 20


def resources_of(request: Request) -> AsyncExitStack:
    """What is freed at the end of this request's answer."""
    stack: AsyncExitStack = request.scope[_RESOURCES]
    return stack


class PeerGone(Exception):
    """The other side does not read its answer, or is gone: nobody is left to answer."""


class RequestGuard:
    """Refuses what may not come in, as an ASGI application around another one.

    :param asker: ``client`` or ``pod``, as it is counted.
    :param bodies: room for those of requests.
    :param timeout_seconds: for a peer that sends or reads nothing meanwhile (:mod:`.pace`); None: the server sees to
        that itself.
    """

    def __init__(
        self,
        app: ASGIApp,
        asker: str,
        bodies: SharedRoom,
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
        is_probe = self._asker == "client" and looks_after_the_pod(scope["path"])  # other pods make none
        request_id = take_request_id(scope["headers"])
        continue_trace(scope["headers"])
        counts = None if is_probe else self._counts
        room = self._bodies if self._asker == "client" else None
        answer = Answer(scope, send, request_id, counts, room, self._timeout_seconds)
        scope[ANSWER] = answer
        try:
            await self._answer(scope, receive, answer, is_probe)
        finally:
            if self._access_log and not is_probe:
                log_request(scope, self._asker, answer.status, answer.num_bytes, time.monotonic() - started)

    async def _answer(self, scope: Scope, receive: Receive, answer: Answer, is_probe: bool) -> None:
        if not is_probe and (refusal := self.refusal(scope)) is not None:
            await answer.refuse(refusal)
            return
        body = RequestBody(scope, receive, answer, self._bodies, self._timeout_seconds, of_pods=self._asker == "pod")
        self.begins(is_probe=is_probe)
        try:
            async with AsyncExitStack() as stack:
                scope[_RESOURCES] = stack
                await self._app(scope, body.receive, answer.send)
        except PeerGone:
            pass
        finally:
            body.forget()
            answer.forget()
            self.ends(is_probe=is_probe)

    def begins(self, *, is_probe: bool = False) -> None:
        """Fact: a request is answered; until :meth:`ends`."""
        self.under_way += 1
        self._counts.under_way[self._asker] += not is_probe
        self._idle.clear()

    def ends(self, *, is_probe: bool = False) -> None:
        self.under_way -= 1
        self._counts.under_way[self._asker] -= not is_probe
        if self.under_way == 0:
            self._idle.set()

    def was_answered(self, scope: Scope, status: int, num_bytes: int, started: float) -> None:
        """Fact: a request that came in by another way has had its answer."""
        if status >= 400:
            self._counts.by_status[status] += 1
        if self._access_log:
            log_request(scope, self._asker, status, num_bytes, time.monotonic() - started)

    def refusal(self, scope: Scope) -> RefillError | None:
        """Why a request is not taken on."""
        if self.stopping is not None:
            return self.stopping
        if scope.get(OVER_LIMIT) or self.under_way >= self._max_requests:
            return PodBusy(
                f"the pod has {self._max_requests} requests or connections, as many as it takes (max_connections)"
            )
        return None


class Answer:
    """What is sent to the other side, once: after a refusal nothing more.

    One that was made as a whole (JSON, metrics) is charged to who asked until it was taken. Frames of samples have a
    gate of their own.

    :param room: for those; None: who asks is trusted.
    """

    def __init__(
        self,
        scope: Scope,
        send: Send,
        request_id: str,
        counts: RequestCounts | None,
        room: SharedRoom | None,
        timeout_seconds: float | None,
    ) -> None:
        self.status = 0
        """0: nobody was there to read it."""
        self.num_bytes = 0
        self._send = send
        self._id_header = (REQUEST_ID_HEADER.encode(), request_id.encode())
        self._counts = counts
        self._scope = scope
        self._room = room
        self._asker = Asker()
        self._held_bytes = 0
        self._timeout_seconds = timeout_seconds
        self._start: Message | None = None
        """Comes with the first bytes."""
        self._begun = False
        self._over = False
        self._waited_seconds = 0.0
        self._waits_since: float | None = None

    def waited_too_long(self, timeout_seconds: float, now: float) -> bool:
        """Whether the other side has let it wait for longer than its bytes may take. It holds samples meanwhile."""
        waited = self._waited_seconds + (0.0 if self._waits_since is None else now - self._waits_since)
        return waited > timeout_seconds + self.num_bytes / LEAST_BYTES_PER_SECOND

    async def send(self, message: Message) -> None:
        if self._over:
            return
        if message["type"] == "http.response.start":
            self._start = message
            return
        body, last = message.get("body", b""), not message.get("more_body", False)
        if self._start is not None:
            start, self._start = self._start, None
            if last and len(body) > ALWAYS_TAKEN_BYTES and not self._hold(len(body)):
                await self.refuse(
                    PodBusy("the pod holds as many bytes of answers as it does for you: read those that you asked for")
                )
                return
            await self._send_start(start)
        if last and self._held_bytes:
            await self._send_piece({**message, "more_body": True})
            message = {"type": message["type"], "body": b""}  # waits for what is before it
        await self._send_piece(message)

    async def _send_start(self, message: Message) -> None:
        self._begun = True
        self.status = message["status"]
        message["headers"] = [*message.get("headers", ()), self._id_header]
        if message["status"] >= 400 and self._counts is not None:
            self._counts.by_status[message["status"]] += 1
        await self._send_piece(message)

    def _hold(self, size_bytes: int) -> bool:
        """False: who asks has been given as much as it may. One alone may have any size."""
        what = "metrics" if looks_after_the_pod(self._scope["path"]) else "answers"  # apart from heads, as jobs are
        self._asker = Asker(str(self._scope.get(HOLDER, "")), what)
        if self._room is None:
            return True
        if self._room.held_by(self._asker) and not self._room.fits(self._asker, size_bytes):
            return False
        self._room.hold(self._asker, size_bytes)
        self._held_bytes = size_bytes
        return True

    def forget(self) -> None:
        """It was taken, or nobody is left to take it."""
        if self._room is not None and self._held_bytes:
            self._room.hold(self._asker, -self._held_bytes)
            self._held_bytes = 0

    async def _send_piece(self, message: Message) -> None:
        self.num_bytes += len(message.get("body", b""))
        self._waits_since = time.monotonic()
        try:
            await self._send_in_time(message)
        finally:
            now = time.monotonic()
            self._waited_seconds += now - self._waits_since
            self._waits_since = None
        if self._timeout_seconds is not None and self.waited_too_long(self._timeout_seconds, now):
            raise PeerGone("the answer is read too slowly")

    async def _send_in_time(self, message: Message) -> None:
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
        if not self._begun and not self._over:
            status, headers, body = wire_answer(error)
            await self._send_start({"type": "http.response.start", "status": status, "headers": headers})
            await self._send_piece({"type": "http.response.body", "body": body})
        self._over = True


def wire_answer(error: RefillError) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Status, headers and body of an error that no route answers with."""
    answer: dict[str, Any] = error.to_wire()
    body = json.dumps(answer).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    return error.status, headers, body
