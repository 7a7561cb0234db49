"""How do frames leave the pod? Head and samples as one body with a known length, copied as little as possible."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from refill_service.memory.outgoing_frame import OutgoingFrame
from refill_service.memory.payload import Payload

__all__ = ["FrameResponse"]

PIECE_BYTES = 1 << 20
"""Small samples are joined up to this size: fewer, larger writes. Samples of this size and more go as they are."""


class FrameResponse(Response):
    """Answers with frames one after another; ``on_sent`` is called with the bytes that were sent, at the end."""

    media_type = "application/octet-stream"

    def __init__(self, frames: list[OutgoingFrame], on_sent: Callable[[int], None] | None = None) -> None:
        self._frames = frames
        self._on_sent = on_sent
        total = sum(frame.total_bytes for frame in frames)
        super().__init__(headers={"content-length": str(total)})
        self.total_bytes = total

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        # Frame by frame, so that no piece of one that is wanted now waits for bytes of the next.
        for frame in self._frames:
            for piece in _joined(frame.parts()):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        if self._on_sent is not None:
            self._on_sent(self.total_bytes)


def _joined(parts: Iterable[Payload]) -> Iterator[bytes]:
    """The same bytes in pieces of about ``PIECE_BYTES``."""
    waiting: list[Payload] = []
    size = 0
    for part in parts:
        if waiting and size + len(part) > PIECE_BYTES:
            yield b"".join(waiting)
            waiting, size = [], 0
        if len(part) >= PIECE_BYTES:
            yield bytes(part)  # no copy when it is bytes already
        else:
            waiting.append(part)
            size += len(part)
    if waiting:
        yield b"".join(waiting)
