"""How does a trace come in? In pieces, each checked and packed while the next is on its way.

So a pod holds a trace once, in the form in which it keeps it, and only if the job has memory for it; a trace that was
posted before is compared and not held again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
from starlette.requests import Request

from refill.errors import InvalidInput
from refill_service.cache_core.epoch_order import IdArray
from refill_service.jobs.job import Job

__all__ = ["coming_trace", "most_trace_bytes"]

_FIRST_POSITIONS = 8192
"""Of a trace that does not say how long it is."""


def most_trace_bytes(job: Job) -> int:
    """Of the body of a request that posts a trace to this job."""
    return 8 * job.posted.most_positions


@asynccontextmanager
async def coming_trace(request: Request, job: Job, epoch: int, rank: int) -> AsyncIterator[IdArray]:
    """The trace in the request's body, little-endian int64, checked. Room for it is set aside until the end of the
    block. Raises :class:`InvalidInput` and what :meth:`PostedTraces.arriving` raises."""
    job.check_posting()
    before = job.posted.of_epoch(epoch).get(rank)
    if before is not None:
        await _compare(request, job, epoch, rank, before)
        yield before
        return
    announced = request.headers.get("content-length", "")
    count = int(announced) // 8 if announced.isdigit() else _FIRST_POSITIONS
    with job.posted.arriving(count, epoch) as room:
        found = np.empty(count, dtype=job.posted.dtype)  # memory comes with its first use
        filled = 0
        async for piece in _pieces(request):
            job.check_trace(rank, piece)
            if filled + len(piece) > len(found):
                more = max(len(piece), min(len(found), job.posted.most_positions - len(found)))
                room.grow(len(found) + more)
                found = np.concatenate([found[:filled], np.empty(more, dtype=found.dtype)])
            found[filled : filled + len(piece)] = piece
            filled += len(piece)
        yield found if filled == len(found) else found[:filled].copy()


async def _compare(request: Request, job: Job, epoch: int, rank: int, before: IdArray) -> None:
    same, start = True, 0
    async for piece in _pieces(request):
        job.check_trace(rank, piece)
        same = same and np.array_equal(before[start : start + len(piece)], piece)
        start += len(piece)
    if not same or start != len(before):
        raise job.posted_another(epoch, rank)


async def _pieces(request: Request) -> AsyncIterator[IdArray]:
    """Raises :class:`InvalidInput` unless the body is a whole number of int64 values."""
    rest, size_bytes = b"", 0
    async for piece in request.stream():
        size_bytes += len(piece)
        whole = rest + piece if rest else piece
        end = len(whole) - len(whole) % 8
        rest = whole[end:]
        if end:
            yield np.frombuffer(whole, dtype="<i8", count=end // 8)
    if rest:
        raise InvalidInput(f"body of {size_bytes} bytes is not a list of 8-byte integers")
