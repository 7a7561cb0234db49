"""How do records come in? One after another, so that one of them is held at a time, however much is reported."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.requests import Request

from refill.errors import InvalidInput, RequestTooLarge
from refill.protocol.records import RECORD_HEADER_BYTES, Record, RecordReader, record_bytes
from refill.protocol.wire_format import MAX_BATCH
from refill_service.jobs.job import Job

__all__ = ["coming_records", "most_records_bytes"]

_OVERHEAD_BYTES = 64 << 20
_TIMES_REPORTED = 6
"""Two epochs; and what was asked for again, as often as a loop is begun anew within them. It is not held, so there is
no need to be strict."""


def most_records_bytes(job: Job) -> int:
    """Of all that a rank may report: each position with its header, if it asked for them one by one, and its traces."""
    positions = max(job.samples_per_rank(), job.posted.most_positions)
    return _OVERHEAD_BYTES + _TIMES_REPORTED * (RECORD_HEADER_BYTES + 16 + 8) * positions


async def coming_records(request: Request, job: Job) -> AsyncIterator[Record]:
    """The records in the request's body; their columns are views, to be copied by who keeps them.

    Raises :class:`InvalidInput` for damaged ones, after those that came before them.
    """
    most_bytes = max(16 * MAX_BATCH, 8 * job.posted.most_positions)
    waiting, read = bytearray(), 0
    async for piece in request.stream():
        waiting += piece
        if len(waiting) < RECORD_HEADER_BYTES:
            continue
        first_bytes = record_bytes(waiting)
        if first_bytes > most_bytes + RECORD_HEADER_BYTES:
            raise RequestTooLarge(f"record at byte {read} is longer than {most_bytes} bytes")
        if len(waiting) < first_bytes:
            continue
        reader = RecordReader(bytes(waiting))
        for record in reader:
            yield record
        read += reader.intact_bytes
        if reader.damaged:
            raise InvalidInput(f"records are damaged after byte {read}")
        waiting = bytearray(reader.stream[reader.intact_bytes :])
    if waiting:
        raise InvalidInput(f"records are damaged after byte {read}")
