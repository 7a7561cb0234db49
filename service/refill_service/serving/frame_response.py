"""How do samples leave the pod? When there is room for them among those that are being sent, as one body with a known
length, copied as little as possible.

Room is entered before anything is taken, for about as much as the answer will be, so that nobody holds samples while it
waits; and left when the answer was sent, or nobody reads it any more.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from refill.errors import PodBusy
from refill_service.cache_core.fair_queue import Need
from refill_service.cache_core.shared_room import Asker
from refill_service.memory.byte_gate import ByteGate, Passage
from refill_service.memory.payload import OutgoingFrame, Payload
from refill_service.serving.request_guard import LastPieces, node_of, resources_of

PIECE_BYTES = 1 << 20
"""Small samples are joined up to this size: fewer, larger writes. Samples of this size and more go as they are."""
_OVERHEAD_BYTES_PER_SAMPLE = 512
"""What Python needs for each sample meanwhile; and its place in the queue, as it costs time, however small it is."""


_NEAR_STEPS = 2


class Answering(Protocol):
    """A job at a pod, as far as answers need it."""

    ordinal: int
    asker: Asker

    def mean_bytes(self, num_samples: int) -> int: ...


class AnswerRoom:
    """The room that the answer to one request takes, in a gate that bounds the bytes of all answers."""

    def __init__(self, request: Request, gate: ByteGate, job: Answering) -> None:
        self._request, self._gate, self._job = request, gate, job
        self._passage: Passage | None = None
        self._overhead_bytes = 0

    async def enter(
        self, num_samples: int, samples_bytes: int | None = None, *, place: int | None = None, step: int = 0
    ) -> None:
        """Raises :class:`PodBusy` when no room came free in time.

        :param samples_bytes: of all of them; None: not known.
        :param place: where in the job's order they are: the first ones go first, since loader workers ask far ahead of
            their loops. None: behind those that have one.
        :param step: samples that all ranks ask for together: what is several steps ahead of another request may have
            half of the job's room.
        """
        need = Need(place, _NEAR_STEPS * step or None)
        job = self._job
        self._overhead_bytes = overhead_bytes(num_samples)
        size_bytes = job.mean_bytes(num_samples) if samples_bytes is None else samples_bytes
        size_bytes += self._overhead_bytes
        if (found := self._gate.enter_now(size_bytes, job.asker, need)) is not None:
            self._passage = found
            resources_of(self._request).callback(found.leave)
            return
        passage = self._gate.passage(size_bytes, job.asker, need=need)
        try:
            async with asyncio.timeout(node_of(self._request.scope).settings.wait_seconds):
                self._passage = await resources_of(self._request).enter_async_context(passage)
        except TimeoutError as error:
            raise PodBusy(
                f"pod {job.ordinal} has {self._gate.inside_bytes:,} bytes of answers that are still being sent, as "
                "many as it may (sending_bytes): do its clients read them?",
                pod=job.ordinal,
            ) from error

    def holds(self, size_bytes: int) -> None:
        """Fact: the answer is as large as this."""
        if self._passage is not None:
            self._passage.resize(size_bytes + self._overhead_bytes)


def overhead_bytes(num_samples: int) -> int:
    return _OVERHEAD_BYTES_PER_SAMPLE * num_samples


class FrameResponse(Response):
    """Answers with frames one after another, and lets go of samples as they leave.

    :param sent_bytes: by pod, what was sent to it; counted when all of it was taken. None: a client asks.
    :param pod: that asks.
    """

    media_type = "application/octet-stream"

    def __init__(self, frames: list[OutgoingFrame], sent_bytes: Counter[int] | None = None, pod: int = 0) -> None:
        self._frames = frames
        self._sent_bytes, self._pod = sent_bytes, pod
        total = sum(frame.total_bytes for frame in frames)
        super().__init__(headers={"content-length": str(total)})
        self.total_bytes = total

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        last = None if self._sent_bytes is None else LastPieces(self.total_bytes)
        at = 0
        # Frame by frame, so that no piece of one that is wanted now waits for bytes of the next.
        for frame in self._frames:
            num_bytes = frame.total_bytes
            parts, frame.payloads = frame.parts(), ()
            for piece in _joined(parts, last, at):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            at += num_bytes
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        if self._sent_bytes is not None:
            self._sent_bytes[self._pod] += self.total_bytes


def _joined(parts: list[Payload], last: LastPieces | None, at: int) -> Iterator[bytes]:
    """The same bytes in pieces of about ``PIECE_BYTES``. Each lets go of its parts.

    :param at: where in the answer they begin.
    """
    ends = list(accumulate(map(len, parts), initial=at))
    first, num_whole = 0, len(parts) if last is None else bisect_left(ends, last.begin, 1) - 1
    while first < num_whole:
        end = min(num_whole, max(first + 1, bisect_right(ends, ends[first] + PIECE_BYTES) - 1))
        piece, parts[first:end] = parts[first:end], [b""] * (end - first)
        yield b"".join(piece)  # no copy when it is one, and bytes already
        first = end
    waiting: list[Payload] = []
    for begin, whole in zip(ends[num_whole:], parts[num_whole:], strict=False):
        assert last is not None
        for part, is_end in last.cut(whole, begin):
            waiting.append(part)
            if is_end:
                yield b"".join(waiting)
                waiting = []
    if waiting:
        yield b"".join(waiting)
