"""Where do batches of planned jobs come in? By a door of their own, ahead of all routes.

Most are answered in the moment in which they have come, since all that is wanted is in memory, where ranks ask in the
order of the plan: for these neither a task nor an application is begun. What is not plain, and what is found wrong,
takes its way (None), before anything has been done for it: there it is answered by the same checks.

The others wait, for a store or another pod, in a task. They don't go through the framework of the routes, which takes
as long over a batch as the pod does.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NamedTuple

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from refill.errors import RefillError
from refill.protocol.wire_format import BatchRequest
from refill_service.memory.byte_gate import Passage
from refill_service.observing.tracing import REQUEST_ID_HEADER, is_traced, take_request_id
from refill_service.pod.cache_node import CacheNode
from refill_service.serving.access_log import was_done_in
from refill_service.serving.cut_samples import CUT_AT_ONCE
from refill_service.serving.error_answers import SaidErrors
from refill_service.serving.frame_response import PIECE_BYTES, overhead_bytes
from refill_service.serving.planned_routes import AskedBatch, asker_of, batch, batches
from refill_service.serving.request_guard import PeerGone, RequestGuard, wire_answer

_JOBS, _BATCH, _BATCHES = "/v1/jobs/", "/planned/batch", "/v1/batches"
_MOST_BODY_BYTES = 16 << 10
"""Of what is answered at once: what is held of longer ones is charged."""
_REQUEST_ID = REQUEST_ID_HEADER.encode()
_OK = b"HTTP/1.1 200 OK\r\n"
_FRAME_HEADERS = [(b"content-type", b"application/octet-stream")]
_ENDS = b"\r\n\r\n"
_MOST_DIGITS = 6
_LENGTH = re.compile(rb"\r\ncontent-length: ([0-9]{1,%d})\r\n" % _MOST_DIGITS, re.IGNORECASE)
_NAME = b"content-length"


class AnsweredNow(NamedTuple):
    """``content``: head and body; ``sent`` is to be called when they are, or nobody reads them any more."""

    content: bytes
    status: int
    sent: Callable[[], None]


class _Ready(NamedTuple):
    """A batch that is answered at once."""

    asked: AskedBatch
    take: Callable[[], tuple[Any, list[Any]]]
    room: Passage


def is_batch(method: bytes, url: bytes) -> bool:
    return method == b"POST" and url.startswith(_JOBS.encode()) and url.partition(b"?")[0].endswith(_BATCH.encode())


class BatchAtOnce:
    """Answers a batch of a planned job in the moment in which it has come, if memory has all of it.

    :param guard: of the door at which batches come in.
    """

    def __init__(self, node: CacheNode, guard: RequestGuard) -> None:
        self._node, self._guard = node, guard
        self._errors = SaidErrors()

    def answer(self, scope: Scope, body: bytes, connection: Any) -> AnsweredNow | None:
        """None: it is to take its way, and nothing has been done for it."""
        started = time.monotonic()
        ready = self._ready(scope, body)
        if ready is None:
            return None
        asked = ready.asked
        try:
            with asked.job.use.under_way():
                asked.begins(asked.admitted(connection))
                frame = asked.frame(*ready.take())
            ready.room.resize(frame.total_bytes + overhead_bytes(len(frame.payloads)))
            was_done_in(scope, f"read {len(frame.payloads)} samples")
            status, headers, num_bytes, parts = 200, _FRAME_HEADERS, frame.total_bytes, frame.parts()
        except Exception as error:
            status, headers, refusal = wire_answer(self._errors.said(scope, error))
            num_bytes, parts = len(refusal), [refusal]
        self._guard.begins()

        def sent() -> None:
            ready.room.leave()
            self._guard.ends()
            self._guard.was_answered(scope, status, num_bytes, started)

        return AnsweredNow(b"".join([_head(scope, status, headers, num_bytes), *parts]), status, sent)

    def _ready(self, scope: Scope, body: bytes) -> _Ready | None:
        """Whether all is there for an answer."""
        if len(body) > _MOST_BODY_BYTES or is_traced(scope["headers"]):
            return None
        if self._guard.door.admission(scope) is not None:
            return None
        try:
            asker = asker_of(scope["query_string"])
            job, wanted = self._node.planned.find(_job_of(scope), asker.asked.plan), BatchRequest.decode(body)
        except (RefillError, RequestValidationError):
            return None
        asked = AskedBatch(job, asker, wanted)
        if asker.silent or job.lists is not None or wanted.sample_ids is not None or asked.leaves_an_epoch:
            return None
        if not asker.cut.is_whole and len(wanted.positions) > CUT_AT_ONCE:
            return None
        size_bytes = job.wanted_bytes(wanted)
        if size_bytes > PIECE_BYTES or int(wanted.positions.max()) >= job.layout.num_samples:
            return None
        if (take := job.at_hand(wanted)) is None:
            return None
        answer_bytes = size_bytes + overhead_bytes(len(wanted.positions))
        room = self._node.sending_to_clients.enter_now(answer_bytes, job.asker)
        return None if room is None else _Ready(asked, take, room)


class BatchDoor:
    """An ASGI application around that of clients, which answers all else.

    :param routes: whose pod this is.
    """

    def __init__(self, routes: FastAPI) -> None:
        self._routes = routes
        self._errors = SaidErrors()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST" and scope["path"] == _BATCHES:
            scope["endpoint"], scope["path_params"] = batches, {}
        elif scope["method"] == "POST" and (job := _job_of(scope)):
            scope["endpoint"], scope["path_params"] = batch, {"job": job}
        else:
            await self._routes(scope, receive, send)
            return
        scope["app"] = self._routes
        if (response := await self._answer_of(scope, receive)) is not None:
            await response(scope, receive, send)

    async def _answer_of(self, scope: Scope, receive: Receive) -> Response | None:
        """None: it has been answered, or nobody is there to read it."""
        try:
            found: Response = await scope["endpoint"](Request(scope, receive))
            return found
        except (HTTPException, ClientDisconnect):  # its body was refused, or did not come
            return None
        except PeerGone:
            raise
        except Exception as error:
            status, headers, body = wire_answer(self._errors.said(scope, error))
            response = Response(body, status)
            response.raw_headers = headers
            return response


def _job_of(scope: Scope) -> str:
    """The job that a batch is of; empty: it is another request."""
    path: str = scope["path"]
    if not path.endswith(_BATCH) or not path.startswith(_JOBS):
        return ""
    job = path[len(_JOBS) : -len(_BATCH)]
    return "" if "/" in job else job


def _head(scope: Scope, status: int, headers: list[tuple[bytes, bytes]], num_bytes: int) -> bytes:
    lines = b"".join(b"%s: %s\r\n" % header for header in headers if header[0] != b"content-length")
    begin = _OK if status == 200 else b"HTTP/1.1 %d %s\r\n" % (status, HTTPStatus(status).phrase.encode())
    request_id = take_request_id(scope["headers"]).encode()
    return b"%s%scontent-length: %d\r\n%s: %s\r\n\r\n" % (begin, lines, num_bytes, _REQUEST_ID, request_id)


class KnownHead:
    """Of a request that came as one piece of bytes, with nothing before or behind it.

    :param before, behind: what the head has before and behind the digits of its body's length.
    :param scope: as ASGI has it, as it was before anybody has looked at it.
    """

    def __init__(self, before: bytes, behind: bytes, scope: dict[str, Any]) -> None:
        self._before, self._behind, self._scope = before, behind, scope
        self._others = [(name, value) for name, value in scope["headers"] if name != _NAME]

    @classmethod
    def of(cls, piece: bytes, body: bytes, scope: dict[str, Any]) -> KnownHead | None:
        """None: the piece is not just that request, or its head does not say how long its body is in the usual way.

        :param body: as the parser has found it.
        """
        end = piece.find(_ENDS) + len(_ENDS)
        lengths = list(_LENGTH.finditer(piece, 0, end))
        is_plain = end >= len(_ENDS) and [name for name, _ in scope["headers"]].count(_NAME) == len(lengths) == 1
        if not is_plain or piece[end:] != body or int(lengths[0][1]) != len(body):
            return None
        first, last = lengths[0].span(1)
        return cls(piece[:first], piece[last:end], scope)

    def body_in(self, piece: bytes) -> bytes | None:
        """Of a request that has this head, but for the length of its body, and is all of this piece. None: it is
        not."""
        first = len(self._before)
        at = piece.find(b"\r", first, first + _MOST_DIGITS + 1)
        if at < 0 or not piece.startswith(self._before) or not piece.startswith(self._behind, at):
            return None
        length, begin = piece[first:at], at + len(self._behind)
        return piece[begin:] if length.isdigit() and int(length) == len(piece) - begin else None

    def scope(self, body_bytes: int) -> dict[str, Any]:
        """A new one, for a body of so many bytes."""
        return self._scope | {"headers": [*self._others, (_NAME, b"%d" % body_bytes)]}
