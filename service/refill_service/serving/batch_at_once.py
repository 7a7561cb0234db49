"""Which batches are answered in the moment in which they have come? Parts of batches whose samples are all in memory.

Most are, where ranks ask in the order of the plan. For them neither a task nor an application is begun: what the layers
around the routes see to is looked at here in a row, each by the very object that sees to it there. Whatever is not
plain is left to them (None), before anything has been done for it; what is found wrong with who asks is answered here,
so that it is found once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NamedTuple

from fastapi.exceptions import RequestValidationError
from starlette.types import Scope

from refill.errors import InvalidInput, RefillError
from refill.protocol.wire_format import MEMORY_HEADER, BatchRequest
from refill_service.memory.byte_gate import Passage
from refill_service.memory.outgoing_frame import OutgoingFrame
from refill_service.observing.request_id import REQUEST_ID_HEADER, take_request_id
from refill_service.observing.tracing import is_traced
from refill_service.planned.planned_job import PlannedJob
from refill_service.pod.cache_node import CacheNode
from refill_service.serving.access import Access
from refill_service.serving.access_log import was_done_in
from refill_service.serving.answer_room import entered_now, overhead_bytes
from refill_service.serving.cut_samples import check_cut, cut_samples
from refill_service.serving.error_answers import SaidErrors
from refill_service.serving.frame_response import PIECE_BYTES
from refill_service.serving.known_names import KnownNames
from refill_service.serving.planned_routes import Asker, asker_of, checked_dealing
from refill_service.serving.request_guard import RequestGuard, wire_answer

__all__ = ["AnsweredNow", "BatchAtOnce", "is_batch"]

_JOBS, _BATCH = b"/v1/jobs/", b"/planned/batch"
_BODY_BYTES = 16 << 10
"""Longer ones take their way: what is held of them is charged."""
_MEMORY_HEADER = MEMORY_HEADER.encode()


class AnsweredNow(NamedTuple):
    """``content``: head and body; ``sent`` is to be called when they are, or nobody reads them any more."""

    content: bytes
    status: int
    sent: Callable[[], None]


class _Ready(NamedTuple):
    job: PlannedJob
    asker: Asker
    wanted: BatchRequest
    take: Callable[[], tuple[Any, list[Any]]]
    room: Passage


def is_batch(method: bytes, url: bytes) -> bool:
    return method == b"POST" and url.startswith(_JOBS) and url.partition(b"?")[0].endswith(_BATCH)


class BatchAtOnce:
    """Answers, at one pod, batches whose samples are all in memory, in the moment in which they come.

    :param names: None: clients have tokens, and may call the pod what they like.
    """

    def __init__(self, node: CacheNode, guard: RequestGuard, access: Access, names: KnownNames | None) -> None:
        self._node, self._guard, self._access, self._names = node, guard, access, names
        self._errors = SaidErrors()

    def answer(self, scope: Scope, body: bytes, connection: Any) -> AnsweredNow | None:
        """None: it is to take its way, and nothing has been done for it."""
        started = time.monotonic()
        ready = self._ready(scope, body)
        if ready is None:
            return None
        try:
            with ready.job.use.under_way():
                frame = self._frame(ready, connection)
            ready.room.resize(frame.total_bytes + overhead_bytes(len(frame.payloads)))
            was_done_in(scope, f"read {len(frame.payloads)} samples")
            status, num_bytes = 200, frame.total_bytes
            headers, parts = b"content-type: application/octet-stream\r\n", list(frame.parts())
        except Exception as error:
            status, headers, body = self._refusal(scope, error)
            num_bytes, parts = len(body), [body]
        head = b"HTTP/1.1 %d %s\r\n%scontent-length: %d\r\n%s: %s\r\n\r\n" % (
            status,
            HTTPStatus(status).phrase.encode(),
            headers,
            num_bytes,
            REQUEST_ID_HEADER.encode(),
            take_request_id(scope["headers"]).encode(),
        )
        self._guard.begins()

        def sent() -> None:
            ready.room.leave()
            self._guard.ends()
            self._guard.was_answered(scope, status, num_bytes, started)

        return AnsweredNow(b"".join([head, *parts]), status, sent)

    def _ready(self, scope: Scope, body: bytes) -> _Ready | None:
        """Whether all is there for an answer."""
        if self._guard.refusal(scope) is not None or len(body) > _BODY_BYTES or is_traced(scope["headers"]):
            return None
        if any(name == _MEMORY_HEADER for name, _ in scope["headers"]):
            return None
        try:
            if self._names is not None and self._names.refuses(scope):
                return None
            self._access.check(scope)
            asker = asker_of(scope["query_string"])
            asked = asker.asked
            job = self._node.planned.find(_job_of(scope["path"]), asked.plan)
            wanted = BatchRequest.decode(body)
        except (RefillError, RequestValidationError):
            return None
        if asked.silent or job.lists is not None or wanted.sample_ids is not None:
            return None
        if not asked.part and not asked.allow_skipped and job.received.comes_to(wanted.epoch, wanted.rank):
            return None
        size_bytes = job.wanted_bytes(wanted)
        if size_bytes > PIECE_BYTES or int(wanted.positions.max()) >= job.layout.num_samples:
            return None
        if (take := job.at_hand(wanted)) is None:
            return None
        room = entered_now(self._node.sending_to_clients, job, len(wanted.positions), size_bytes)
        return None if room is None else _Ready(job, asker, wanted, take, room)

    def _frame(self, ready: _Ready, connection: Any) -> OutgoingFrame:
        job, asker, wanted, take, _ = ready
        dealing = checked_dealing(job, asker, wanted, connection)
        if not asker.asked.part:
            job.clients.client(wanted.rank).request_wait_seconds += wanted.waited_seconds
        own = dealing.places_of_rank(wanted.rank, wanted.positions)
        job.received.asks(wanted.epoch, dealing, wanted.rank, own, asker.asked.had, now=time.time())
        metadata = job.dataset.index.metadata
        check_cut(asker.cut, metadata)
        ids, payloads = take()
        payloads = cut_samples(asker.cut, metadata, ids.tolist(), payloads)
        job.confirmed = True
        return OutgoingFrame(wanted.positions, ids, payloads)

    def _refusal(self, scope: Scope, error: Exception) -> tuple[int, bytes, bytes]:
        if isinstance(error, RefillError):
            self._errors.refused(error)
        else:
            error = self._errors.failed(scope["method"], scope["path"], error)
        status, headers, body = wire_answer(error)
        kept = [name + b": " + value + b"\r\n" for name, value in headers if name != b"content-length"]
        return status, b"".join(kept), body


def _job_of(path: str) -> str:
    job = path[len(_JOBS) : -len(_BATCH)]
    if not job or "/" in job:
        raise InvalidInput(f"{path[:100]!r} names no job")
    return job
