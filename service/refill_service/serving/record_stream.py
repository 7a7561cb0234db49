"""How do records come in? One after another, so that one of them is held at a time, however much is reported."""

from __future__ import annotations

from collections.abc import AsyncIterator

from starlette.requests import Request

from refill.errors import InvalidInput, PodBusy, RequestTooLarge
from refill.protocol.records import RECORD_HEADER_BYTES, Record, RecordReader, record_bytes
from refill.protocol.wire_format import MAX_BATCH
from refill_service.cache_core.shared_room import Asker
from refill_service.jobs.job import Job
from refill_service.serving.access import holder_of
from refill_service.serving.node_of import node_of

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
    with _Held(request, job.spec.name) as held:
        async for piece in request.stream():
            held.is_now(len(waiting) + len(piece))
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


class _Held:
    """What waits for the rest of its record, charged to the job and its team. One record of a team may have any size
    that its job can have."""

    def __init__(self, request: Request, job: str) -> None:
        self._room = node_of(request.scope).bodies
        self._asker = Asker(holder_of(request), job)
        self._size_bytes = 0

    def __enter__(self) -> _Held:
        return self

    def __exit__(self, *error: object) -> None:
        self._room.hold(self._asker, -self._size_bytes)

    def is_now(self, size_bytes: int) -> None:
        more_bytes = size_bytes - self._size_bytes
        is_alone = self._room.held_by_team(self._asker.team) == self._size_bytes
        if more_bytes > 0 and not is_alone and not self._room.fits(self._asker, more_bytes, has_bytes=self._size_bytes):
            raise PodBusy(f"the pod holds as many bytes of reports of job {self._asker.job} as it takes")
        self._room.hold(self._asker, more_bytes)
        self._size_bytes = size_bytes
