"""What does a pod answer to samplers? Lengths and columns of the dataset, posted traces, scores of training."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Path, Query, Request, Response

from refill.errors import InvalidInput, JobConflict
from refill.protocol.column_values import BLOCK_VALUES, is_column_name
from refill.protocol.wire_format import MAX_LABELS, MAX_SCORES
from refill_service.cache_core.epoch_order import IdArray
from refill_service.cache_core.shared_room import Asker
from refill_service.datasets.dataset_reader import Dataset
from refill_service.jobs.job import Job
from refill_service.jobs.job_at_pod import JobAtPod
from refill_service.jobs.scores import draw_from, read_scores, report_scores
from refill_service.memory.payload import OutgoingFrame
from refill_service.planned.planned_job import PlannedJob
from refill_service.serving.client_requests import (
    ANSWERS_FRAME,
    BINARY_BODY,
    DatasetUrl,
    Incarnation,
    JobName,
    Life,
    Number,
    answered,
    in_use,
    is_the_rank,
    opened_dataset,
    read_int64s,
)
from refill_service.serving.door import holder_of
from refill_service.serving.error_answers import ERROR_ANSWERS
from refill_service.serving.frame_response import Answering, AnswerRoom
from refill_service.serving.request_guard import node_of, resources_of, takes_body

SCORES_BODY_BYTES = 12 * MAX_SCORES
_BYTES_OF_RECORD, _BYTES_OF_SCORE = 96, 16

ColumnName = Annotated[str, Path(max_length=256)]
Version = Annotated[str, Query(max_length=64, description="Its fingerprint, which it has to have still.")]

SAMPLER_ROUTES = APIRouter(responses=ERROR_ANSWERS)


@SAMPLER_ROUTES.post(
    "/v1/jobs/{job}/lengths",
    summary="The bytes of each of the samples between two ids (int64): int64, as a frame's only sample.",
    **ANSWERS_FRAME,
)
@takes_body(16)
async def lengths(job: JobName, request: Request, incarnation: Incarnation = None) -> Response:
    found = _in_use(request, job, incarnation)
    return await _lengths(request, found, found.dataset)


@SAMPLER_ROUTES.post(
    "/v1/dataset/lengths",
    summary="The same, without a job.",
    **ANSWERS_FRAME,
)
@takes_body(16)
async def lengths_of_dataset(url: DatasetUrl, request: Request, version: Version = "") -> Response:
    return await _lengths(request, *await _looked_at(request, url, version))


async def _lengths(request: Request, asking: Answering, dataset: Dataset) -> Response:
    async def read(first: int, end: int) -> bytes:
        return (await dataset.lengths(first, end)).astype("<i8", copy=False).tobytes()

    return await of_range(request, asking, dataset.num_samples, "lengths", read, _BYTES_OF_RECORD)


@SAMPLER_ROUTES.post(
    "/v1/jobs/{job}/columns/{column}",
    summary="The values of a column of the dataset, of the samples between two ids (int64): one block of it, as a "
    "frame's only sample.",
    **ANSWERS_FRAME,
)
@takes_body(16)
async def column(job: JobName, column: ColumnName, request: Request, incarnation: Incarnation = None) -> Response:
    found = _in_use(request, job, incarnation)
    return await _column(request, found, found.dataset, column)


@SAMPLER_ROUTES.post(
    "/v1/dataset/columns/{column}",
    summary="The same, without a job.",
    **ANSWERS_FRAME,
)
@takes_body(16)
async def column_of_dataset(url: DatasetUrl, column: ColumnName, request: Request, version: Version = "") -> Response:
    return await _column(request, *await _looked_at(request, url, version), column)


async def _column(request: Request, asking: Answering, dataset: Dataset, name: str) -> Response:
    if not is_column_name(name):
        raise InvalidInput("a column has a name of up to 64 of the letters A-Z a-z 0-9 _ . -")

    async def size(first: int, end: int) -> int:
        if first % BLOCK_VALUES or end != min(first + BLOCK_VALUES, dataset.num_samples):
            raise InvalidInput(f"columns are asked for by blocks of {BLOCK_VALUES:,} samples, got {first} to {end}")
        return await dataset.column_bytes(name, first // BLOCK_VALUES)

    async def read(first: int, end: int) -> memoryview:
        return await dataset.column(name, first // BLOCK_VALUES)

    return await of_range(request, asking, dataset.num_samples, "columns", read, size)


@dataclass
class _Looking:
    """Who asks what a dataset has, without a job."""

    ordinal: int
    asker: Asker

    def mean_bytes(self, num_samples: int) -> int:
        return 0


async def _looked_at(request: Request, url: str, version: str) -> tuple[_Looking, Dataset]:
    """Raises :class:`JobConflict` where it is another version by now than the one that was looked at first."""
    dataset = await opened_dataset(request, url)
    if version not in ("", dataset.version):
        raise JobConflict(f"dataset {dataset.url} was replaced while its index was read: begin anew")
    return _Looking(node_of(request.scope).settings.ordinal, Asker(holder_of(request))), dataset


@SAMPLER_ROUTES.put(
    "/v1/jobs/{job}/epochs/{epoch}/ranks/{rank}/trace",
    tags=["data"],
    summary="Post the sample ids (int64) that a rank wants in an epoch, for a job with order 'explicit'.",
    openapi_extra=BINARY_BODY,
)
@takes_body(lambda node, job: most_trace_bytes(node.table.find(job).job), in_pieces=True)
async def trace(
    job: JobName,
    epoch: Number,
    rank: Number,
    request: Request,
    incarnation: Incarnation = None,
    life: Life = None,
) -> dict[str, int]:
    at_pod = in_use(request, job, incarnation)
    is_the_rank(request, at_pod, rank, life)
    async with coming_trace(request, at_pod.job, epoch, rank) as ids:
        await at_pod.post_trace(epoch, rank, ids)
    return {"positions": len(ids)}


@SAMPLER_ROUTES.put(
    "/v1/jobs/{job}/ranks/{rank}/scores",
    tags=["data"],
    summary="Tell how important training finds samples: ids (int64), then scores (float32).",
    openapi_extra=BINARY_BODY,
)
@takes_body(SCORES_BODY_BYTES)
async def scores(
    job: JobName, rank: Number, request: Request, incarnation: Incarnation = None, life: Life = None
) -> dict[str, Any]:
    at_pod = in_use(request, job, incarnation)
    is_the_rank(request, at_pod, rank, life, takes=False)
    ids, found = read_scores(await request.body(), at_pod.job.layout.num_samples)
    return await report_scores(at_pod, ids, found)


@SAMPLER_ROUTES.post(
    "/v1/jobs/{job}/epochs/{epoch}/ranks/{rank}/scores",
    summary="What a rank draws an epoch from, of the samples between two ids (int64): scores (float32), then a bit for "
    "each sample that is in memory, as a frame's only sample.",
    **ANSWERS_FRAME,
)
@takes_body(16)
async def drawn_from(
    job: JobName,
    epoch: Number,
    rank: Number,
    request: Request,
    incarnation: Incarnation = None,
    life: Life = None,
) -> Response:
    at_pod = in_use(request, job, incarnation)
    is_the_rank(request, at_pod, rank, life)
    draw, num_samples = partial(draw_from, at_pod, epoch, rank), at_pod.job.layout.num_samples
    return await of_range(request, at_pod.job, num_samples, "scores", draw, _BYTES_OF_SCORE)


def _in_use(request: Request, job: str, incarnation: str | None) -> Job | PlannedJob:
    """A job, which is not dropped while the request is answered."""
    node = node_of(request.scope)
    at_pod: JobAtPod | PlannedJob
    found: Job | PlannedJob
    if job in node.planned.jobs:
        at_pod = found = node.planned.find(job, incarnation)
    else:
        at_pod = node.table.find(job, incarnation)
        found = at_pod.job
    resources_of(request).enter_context(at_pod.use.under_way())
    return found


async def of_range(
    request: Request,
    asking: Answering,
    num_samples: int,
    what: str,
    read: Callable[[int, int], Awaitable[bytes | memoryview]],
    size: int | Callable[[int, int], Awaitable[int]],
) -> Response:
    """A frame with one sample, which is what ``read`` returns of the samples between the two ids of the body.

    :param size: bytes that are held for each of them while it is read, or for all.
    """
    node = node_of(request.scope)
    first, end = _checked_range(what, num_samples, await request.body())
    room = AnswerRoom(request, node.sending_to_clients, asking)
    await room.enter(1, size * (end - first) if isinstance(size, int) else await size(first, end))
    frame = OutgoingFrame(np.array([-1]), np.array([first]), [await read(first, end)])
    return answered(request, room, frame, what)


def _checked_range(what: str, num_samples: int, body: bytes) -> tuple[int, int]:
    wanted = read_int64s(body).tolist()
    if len(wanted) != 2 or not 0 <= wanted[0] < wanted[1] <= min(num_samples, wanted[0] + MAX_LABELS):
        raise InvalidInput(f"{what} are asked for by two ids of 0 to {num_samples}, {MAX_LABELS:,} apart at most")
    return wanted[0], wanted[1]


_FIRST_POSITIONS = 8192
"""Of a trace that does not say how long it is."""


def most_trace_bytes(job: Job) -> int:
    """Of the body of a request that posts a trace to this job."""
    return 8 * job.posted.most_positions


@asynccontextmanager
async def coming_trace(request: Request, job: Job, epoch: int, rank: int) -> AsyncIterator[IdArray]:
    """The trace in the request's body, little-endian int64, checked piece by piece while the next is on its way: a pod
    holds it once, and only if the job has memory for it; one that was posted before is compared. Room for it is set
    aside until the end of the block. Raises :class:`InvalidInput` and what :meth:`PostedTraces.arriving` raises."""
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
