"""What do the routes for clients share? Their parameters, who asks as which rank, and how samples leave."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qsl

import numpy as np
from fastapi import Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError

from refill.errors import InvalidInput
from refill.protocol.job_spec import JOB_NAME, MOST_URL_LETTERS, JobSpec
from refill.protocol.rank_life import LONGEST_LIFE, RankLife
from refill.protocol.wire_format import MAX_BATCH, MAX_SAMPLES, Int64Array, check_samples
from refill_service.cache_core.admission import AsksAs, rank_admission
from refill_service.datasets.dataset_reader import Dataset
from refill_service.jobs.job_at_pod import JobAtPod
from refill_service.memory.payload import OutgoingFrame
from refill_service.object_store.store_counters import within
from refill_service.object_store.store_url import parse_url
from refill_service.serving.access_log import was_done
from refill_service.serving.door import CONNECTION, holder_of
from refill_service.serving.frame_response import AnswerRoom, FrameResponse
from refill_service.serving.request_guard import node_of, resources_of

BATCH_BODY_BYTES = 8 * MAX_BATCH + 64
LISTED_BODY_BYTES = 16 * MAX_BATCH + 64
"""Of positions, and of the samples that are wanted there."""
SAMPLES_BODY_BYTES = 8 * MAX_SAMPLES
TOGETHER_BODY_BYTES = LISTED_BODY_BYTES
"""Of batches of several jobs: as many positions in all as one has, about."""

FRAME_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "One frame: header, positions, sample ids, lengths, payload (refill.protocol.wire_format).",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
FRAMES_ANSWER: dict[int | str, dict[str, Any]] = {
    200: FRAME_ANSWER[200] | {"description": "A frame for each request, one after another."}
}
BINARY_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}

ANSWERS_FRAME: dict[str, Any] = {
    "tags": ["data"],
    "response_class": Response,
    "responses": FRAME_ANSWER,
    "openapi_extra": BINARY_BODY,
}
"""Of a route that takes binary, and answers with a frame."""

DatasetUrl = Annotated[str, Query(max_length=MOST_URL_LETTERS, description="Where it is, as jobs name it.")]
JobName = Annotated[str, Path(description="Name of the job.", pattern=JOB_NAME)]
"""It comes into URLs by which pods ask each other, with a token of their own."""
Number = Annotated[int, Path(ge=0, lt=2**31)]
Incarnation = Annotated[
    str | None,
    Query(max_length=64, description="Which registration of the job: the incarnation that it was answered with."),
]
Life = Annotated[
    str | None,
    Query(max_length=LONGEST_LIFE, description="The training process that asks (refill.protocol.rank_life)."),
]


Asked = TypeVar("Asked", bound=BaseModel)


def query_of(request: Request, kind: type[Asked]) -> Asked:
    """The parameters of a request's query. FastAPI would take longer over them than a pod does over the whole batch."""
    return parsed_query(request.scope["query_string"], kind)


def parsed_query(query: bytes, kind: type[Asked]) -> Asked:
    """As :func:`query_of`."""
    given = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True))
    try:
        return kind.model_validate_strings(given)
    except ValidationError as error:
        errors = [each | {"loc": ("query", *each["loc"])} for each in error.errors()]
        raise RequestValidationError(errors) from error


def openapi_of(kind: type[BaseModel]) -> dict[str, Any]:
    """How the API's description shows a route with a binary body, and these parameters beside the job's name."""
    schema = kind.model_json_schema()
    required = schema.get("required", ())
    named = [
        {"name": name, "in": "query", "required": name in required, "schema": shown}
        for name, shown in schema["properties"].items()
    ]
    job = {"name": "job", "in": "path", "required": True, "schema": {"type": "string", "maxLength": 128}}
    return BINARY_BODY | {"parameters": [job, *named]}


def spec_of(job: str, settings: dict[str, Any], request: Request) -> JobSpec:
    """The job that is asked for. Raises :class:`InvalidInput` for settings that no job has."""
    node = node_of(request.scope)
    if settings.get("name", job) != job:
        raise InvalidInput(f"the URL names job {job!r} and the body {settings['name']!r}")
    spec = JobSpec.from_dict({"name": job} | settings | {"holder": holder_of(request)})
    node.settings.check_dataset(spec.dataset)
    return replace(spec, dataset=str(parse_url(spec.dataset)))


async def opened_dataset(request: Request, url: str) -> Dataset:
    """One that no job need be registered for. It stays a while, for a job that may follow."""
    node = node_of(request.scope)
    node.table.check_taking_jobs()
    node.settings.check_dataset(url)
    opened = str(parse_url(url))
    async with within(node.settings.wait_seconds, f"pod {node.settings.ordinal} waits to open {opened}"):
        return await node.opening.dataset(opened)


def answered(request: Request, room: AnswerRoom, frame: OutgoingFrame, of: str = "") -> Response:
    """A frame, as the body.

    :param of: what it has in place of samples.
    """
    room.holds(frame.total_bytes)
    was_done(request, f"read {of}" if of else f"read {len(frame.payloads)} samples")
    return FrameResponse([frame])


def answered_with(request: Request, room: AnswerRoom, frames: list[OutgoingFrame]) -> Response:
    """Several frames, as the body."""
    room.holds(sum(frame.total_bytes for frame in frames))
    was_done(request, f"read {sum(len(frame.payloads) for frame in frames)} samples of {len(frames)} jobs")
    return FrameResponse(frames)


def in_use(request: Request, job: str, incarnation: str | None, *, pod: int | None = None) -> JobAtPod:
    """A live job, which is not dropped while the request is answered. Parameters and errors as of
    :meth:`JobTable.find`."""
    at_pod = node_of(request.scope).table.find(job, incarnation, pod=pod)
    resources_of(request).enter_context(at_pod.use.under_way())
    return at_pod


def is_the_rank(request: Request, at_pod: JobAtPod, rank: int, life: str | None, *, takes: bool = True) -> None:
    """:func:`rank_admission` of what a client asks of a live job."""
    asks = AsksAs(rank, life_of(life), takes)
    rank_admission(at_pod.job, at_pod.home.leases, asks, request.scope.get(CONNECTION))


def life_of(text: str | None) -> RankLife | None:
    """None for a client that does not say it."""
    return None if text is None else RankLife.decode(text)


def read_int64s(body: bytes) -> Int64Array:
    """Raises :class:`InvalidInput` unless the body is a whole number of little-endian int64 values."""
    if len(body) % 8:
        raise InvalidInput(f"body of {len(body)} bytes is not a list of 8-byte integers")
    return np.frombuffer(body, dtype="<i8").astype(np.int64)


def checked_ids(at_pod: JobAtPod, body: bytes) -> Int64Array:
    ids = read_int64s(body)
    check_samples(ids, at_pod.job.layout.num_samples)
    return ids
