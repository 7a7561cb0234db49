"""How does a request come in, and its answer go out? The one layer around the routes of a door.

What stands in the way is said first (:mod:`.door`); then the request waits for its team's turn, and is counted. Its
body is measured while it comes. Each route says how much it takes (:func:`takes_body`); a route that says nothing takes
JSON. Whatever a path looks like, it is the route that was found which decides, so a body is measured from when its
route reads it. What is held of a body is charged to its job and team (:mod:`refill_service.cache_core.shared_room`),
but for the little that every batch needs. An answer has to be read at a pace; answers from 400 on are counted. What a
route holds for its answer (room in a gate) it puts among the request's resources, which are freed when the answer was
sent or can't be sent any more.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from refill.errors import NotAuthenticated, PodBusy, PodUnreachable, RefillError, RequestTooLarge, RequestTooSlow
from refill_service.cache_core.shared_room import Asker, SharedRoom
from refill_service.memory.loop_turns import STRANGERS, LoopTurns, in_turn
from refill_service.memory.payload import Payload
from refill_service.observing.tracing import REQUEST_ID_HEADER, continue_trace, take_request_id
from refill_service.pod.cache_node import CacheNode, RequestCounts
from refill_service.serving.access_log import HOLDER, log_request
from refill_service.serving.door import Door, asks_for_batches, looks_after_the_pod

ANSWER = "refill.answer"
"""In a request's scope: its :class:`Answer`."""

ALWAYS_TAKEN_BYTES = 16 << 10
"""Of each body: it is never refused for what others hold. A batch of 2,000 positions."""

LEAST_BYTES = 1 << 16
"""To be moved, or all that is left, within the timeout: a byte now and then is no progress."""
LEAST_BYTES_PER_SECOND = 256 << 10
"""Over all, beside the timeout: what is held for the other side is not held for hours."""

SEND_BUFFER_BYTES = 16 << 10
"""Of the server for other pods, for each stream."""
_LAST_PIECES, _LAST_PIECE_BYTES = 6, 4 << 10
_SHORT_BYTES = 16 << 10
"""An answer to a pod that is no longer is sent as it is."""

_RESOURCES = "refill.resources"
_PIECE_BYTES = 1 << 20
_MOST_REFUSED = 256
"""Requests without a token at the port for other pods, where each connection has many, that wait for their answer."""
_JSON_BYTES, _JSON_OF_PODS_BYTES = 64 << 10, 1 << 20
_TAKES = "refill_takes_body"

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])
Result = TypeVar("Result")


def node_of(scope: Scope) -> CacheNode:
    """The pod that a request is made to: routes are made once in a process, which may be several pods."""
    node: CacheNode = scope["app"].state.node
    return node


def resources_of(request: Request) -> AsyncExitStack:
    """What is freed at the end of this request's answer."""
    stack: AsyncExitStack = request.scope[_RESOURCES]
    return stack


class PeerGone(Exception):
    """The other side does not read its answer, or is gone: nobody is left to answer."""


async def while_wanted(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Await work that changes nothing, for a request whose body has come: it is given up when who asks hangs up. Raises
    :class:`PeerGone` then."""
    working, gone = asyncio.create_task(in_turn(work)), asyncio.create_task(_hangs_up(request))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise PeerGone
        return working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def _hangs_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class RequestGuard:
    """Refuses what may not come in, as an ASGI application around the routes of one door of a pod.

    :param bodies: room for those of requests.
    :param turns: in which teams are answered.
    :param timeout_seconds: for a peer that sends or reads nothing meanwhile (:class:`Pace`); None: the server sees to
        that itself.
    """

    def __init__(
        self,
        routes: ASGIApp,
        door: Door,
        bodies: SharedRoom,
        counts: RequestCounts,
        turns: LoopTurns,
        timeout_seconds: float | None = None,
        *,
        access_log: bool = False,
    ) -> None:
        self.door = door
        self._routes, self._turns = routes, turns
        self._bodies, self._counts = bodies, counts
        self._timeout_seconds = timeout_seconds
        self._access_log = access_log
        self._num_refused = 0
        """That wait for their answer."""
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_until_idle(self) -> None:
        await self._idle.wait()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if (of_pods := self.door.of_pods) is not None and of_pods.is_shut_out(scope["client"]):
            return
        started, asker = time.monotonic(), self.door.asker
        is_probe = asker == "client" and looks_after_the_pod(scope["path"])  # other pods make none
        request_id = take_request_id(scope["headers"])
        continue_trace(scope["headers"])
        counts = None if is_probe else self._counts
        answer = Answer(
            scope, send, request_id, counts, self._bodies, self._timeout_seconds, to_pods=self.door.of_pods is not None
        )
        scope[ANSWER] = answer
        try:
            if (refusal := self.door.admission(scope)) is not None:
                await self._refuse(scope, answer, refusal)
            else:
                await self._answer(scope, receive, answer, is_probe)
        except PeerGone:
            if self.door.of_pods is not None:
                self.door.of_pods.end(scope["client"])  # the server still has the answer
        finally:
            if self._access_log and not is_probe:
                log_request(scope, asker, answer.status, answer.num_bytes, time.monotonic() - started)
            scope.clear()  # it names what holds it: without this, each request is garbage that Python has to look for

    async def _refuse(self, scope: Scope, answer: Answer, refusal: RefillError) -> None:
        team, of_pods = self.door.turn_of(scope), self.door.of_pods
        if of_pods is not None and team is STRANGERS:
            of_pods.stranger_asks()
            if self._num_refused >= _MOST_REFUSED:
                of_pods.end(scope["client"])
                return
        self._num_refused += 1
        try:
            await self._turns.run(team, answer.refuse(refusal), lambda: True)
        finally:
            self._num_refused -= 1

    async def _answer(self, scope: Scope, receive: Receive, answer: Answer, is_probe: bool) -> None:
        of_pods = self.door.asker == "pod"
        body = RequestBody(scope, receive, answer, self._bodies, self._timeout_seconds, of_pods=of_pods)
        is_for_training = of_pods or asks_for_batches(scope["path"])
        self.begins(is_probe=is_probe)
        try:
            async with AsyncExitStack() as stack:
                scope[_RESOURCES] = stack
                await self._turns.run(
                    self.door.turn_of(scope),
                    self._routed(scope, body, answer),
                    lambda: not is_for_training or answer.status >= 400,
                )
        finally:
            body.forget()
            answer.forget()
            self.ends(is_probe=is_probe)

    async def _routed(self, scope: Scope, body: RequestBody, answer: Answer) -> None:
        """The server cancels requests that take too long at its end, and would answer them with status 500, after which
        nobody tries again."""
        try:
            await self._routes(scope, body.receive, answer.send)
        except asyncio.CancelledError:
            if answer.has_begun:
                raise
            ordinal, _ = self.door.pod
            await answer.refuse(PodUnreachable(f"pod {ordinal} stops", pod=ordinal))

    def begins(self, *, is_probe: bool = False) -> None:
        """Fact: a request is answered; until :meth:`ends`."""
        self.door.under_way += 1
        self._counts.under_way[self.door.asker] += not is_probe
        self._idle.clear()

    def ends(self, *, is_probe: bool = False) -> None:
        self.door.under_way -= 1
        self._counts.under_way[self.door.asker] -= not is_probe
        if self.door.under_way == 0:
            self._idle.set()

    def was_answered(self, scope: Scope, status: int, num_bytes: int, started: float) -> None:
        """Fact: a request that was answered at once, beside this, has had its answer."""
        if status >= 400:
            self._counts.by_status[status] += 1
        if self._access_log:
            log_request(scope, self.door.asker, status, num_bytes, time.monotonic() - started)


class Answer:
    """What is sent to the other side, once: after a refusal nothing more.

    One that was made as a whole (JSON, metrics) is charged to who asked until it was taken. Frames of samples have a
    gate of their own.

    :param room: for those.
    :param to_pods: another pod asks: its server holds what it was given (:class:`LastPieces`).
    """

    def __init__(
        self,
        scope: Scope,
        send: Send,
        request_id: str,
        counts: RequestCounts | None,
        room: SharedRoom,
        timeout_seconds: float | None,
        *,
        to_pods: bool,
    ) -> None:
        self.status = 0
        """0: nobody was there to read it."""
        self.num_bytes = 0
        self._send = send
        self._id_header = (REQUEST_ID_HEADER.encode(), request_id.encode())
        self._counts = counts
        self._scope = scope
        self._room = room
        self._to_pods = to_pods
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
            parts = LastPieces(len(body)).cut(body, 0) if self._to_pods else [(body, True)]
            for part, _ in parts:
                await self._send_piece({**message, "body": bytes(part), "more_body": True})
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
        if self._room.held_by(self._asker) and not self._room.fits(self._asker, size_bytes):
            return False
        self._room.hold(self._asker, size_bytes)
        self._held_bytes = size_bytes
        return True

    def forget(self) -> None:
        """It was taken, or nobody is left to take it."""
        if self._held_bytes:
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

    @property
    def has_begun(self) -> bool:
        return self._begun

    def nobody_reads(self) -> None:
        self._over = True

    async def refuse(self, error: RefillError) -> None:
        if not self._begun and not self._over:
            status, headers, body = wire_answer(error)
            await self._send_start({"type": "http.response.start", "status": status, "headers": headers})
            await self._send_piece({"type": "http.response.body", "body": body})
        self._over = True


class LastPieces:
    """Cuts the end of one answer into small pieces, so that a pod knows when another one has taken it.

    granian takes four pieces of an answer ahead, and one more that waits for its stream; the next one only when those
    before have left, but for ``SEND_BUFFER_BYTES``. So whoever has handed over an answer that ends with six small
    pieces knows that no more than five of these and that buffer are left of it. That is charged to nobody, nor are
    short answers: the number of connections bounds it, and that of requests on each (:mod:`.peer_server`).

    :param total_bytes: all of it.
    """

    def __init__(self, total_bytes: int) -> None:
        last = range(total_bytes, max(0, total_bytes - _LAST_PIECES * _LAST_PIECE_BYTES - 1), -_LAST_PIECE_BYTES)
        self._ends = list(last) if total_bytes > _SHORT_BYTES else []
        """Where a piece has to end, the last one first."""
        self.begin = self._ends[-1] if self._ends else sys.maxsize
        """What ends before this byte of the answer need not be cut."""

    def cut(self, part: Payload, at: int) -> list[tuple[Payload, bool]]:
        """What comes next of the answer, in so many parts that a piece ends only behind one: where True stands.

        :param at: where in the answer it begins.
        """
        ends = self._ends
        found: list[tuple[Payload, bool]] = []
        while ends and at + len(part) >= ends[-1]:
            size_bytes = ends.pop() - at
            at += size_bytes
            found.append((memoryview(part)[:size_bytes], True))
            part = memoryview(part)[size_bytes:]
        if len(part) or not found:
            found.append((part, False))
        return found


def wire_answer(error: RefillError) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Status, headers and body of an error that no route answers with."""
    answer: dict[str, Any] = error.to_wire()
    body = json.dumps(answer).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if error.status == NotAuthenticated.status:
        headers.append((b"www-authenticate", b"Bearer"))
    return error.status, headers, body


@dataclass(frozen=True)
class _Taken:
    """What a route takes of a request's body."""

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


class RequestBody:
    """A request's body on its way in. When it is refused, that has been answered, and the route ends.

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
        of_pods: bool,
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
            of_whom = f"job {self._asker.job}" if self._asker.job else "one client"
            raise PodBusy(
                f"the pod holds as many bytes of requests as it takes, of {of_whom} or of all: "
                f"{self._room.used_bytes:,}"
            )
        self._hold(more)

    def _hold(self, more_bytes: int) -> None:
        if more_bytes:
            self._room.hold(self._asker, more_bytes)
            self._held_bytes += more_bytes


def _too_large(limit_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(f"request body is longer than {limit_bytes} bytes")


class Pace:
    """Says until when one request, or one answer, may take, from ``now`` on."""

    def __init__(self, timeout_seconds: float, now: float) -> None:
        self._timeout_seconds = timeout_seconds
        self._started = self._progress = now
        self._progress_bytes = 0
        self.moved_bytes = 0

    def moved(self, more_bytes: int, now: float) -> None:
        self.moved_bytes += more_bytes
        if self.moved_bytes - self._progress_bytes >= LEAST_BYTES:
            self._progress, self._progress_bytes = now, self.moved_bytes

    @property
    def ends(self) -> float:
        """When its time is used up, if nothing more is moved."""
        in_all = self._started + self._timeout_seconds + self.moved_bytes / LEAST_BYTES_PER_SECOND
        return min(in_all, self._progress + self._timeout_seconds)
