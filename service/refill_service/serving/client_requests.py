"""What do the routes for clients share? Their parameters, who asks as which rank, and how samples leave."""

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from fastapi import Path, Query, Request, Response
from pydantic import BaseModel, Field

from refill.errors import InvalidInput
from refill.protocol.job_spec import JobSpec
from refill.protocol.rank_life import LONGEST_LIFE, RankLife
from refill.protocol.wire_format import FRAME_BYTES_HEADER, MAX_BATCH, MAX_SAMPLES, MEMORY_HEADER, Int64Array
from refill_service.jobs.job_at_pod import JobAtPod
from refill_service.memory.outgoing_frame import OutgoingFrame
from refill_service.pod.cache_node import CacheNode
from refill_service.serving.access import holder_of
from refill_service.serving.frame_response import FrameResponse
from refill_service.serving.node_of import node_of

__all__ = [
    "BATCH_BODY_BYTES",
    "BINARY_BODY",
    "FRAME_ANSWER",
    "SAMPLES_BODY_BYTES",
    "Anew",
    "CheckpointBody",
    "First",
    "Incarnation",
    "JobName",
    "Life",
    "Number",
    "asked_of",
    "checked_ids",
    "framed",
    "is_the_rank",
    "life_of",
    "read_int64s",
    "spec_of",
]

BATCH_BODY_BYTES = 8 * MAX_BATCH + 64
SAMPLES_BODY_BYTES = 8 * MAX_SAMPLES

FRAME_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "One frame: header, positions, sample ids, lengths, payload (refill.protocol.wire_format).",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
BINARY_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}

JobName = Annotated[str, Path(description="Name of the job.", max_length=128)]
Number = Annotated[int, Path(ge=0, lt=2**31)]
Incarnation = Annotated[
    str | None,
    Query(max_length=64, description="Which registration of the job: the incarnation that it was answered with."),
]
Life = Annotated[
    str | None,
    Query(max_length=LONGEST_LIFE, description="The training process that asks (refill.protocol.rank_life)."),
]
Anew = Annotated[
    bool,
    Query(description="Whether the process goes on from no state and has received nothing: it may be a new run."),
]
First = Annotated[
    bool,
    Query(description="With anew: whether no other loader worker of the process asks for earlier positions."),
]


class CheckpointBody(BaseModel):
    """Where each rank was when the training run was saved."""

    incarnation: str = Field(max_length=64, description="The registration of the job that the state is of.")
    epoch: int = Field(ge=0, lt=2**31)
    position: int = Field(ge=0, lt=2**62, description="The first position that each rank had not consumed.")


def spec_of(job: str, settings: dict[str, Any], request: Request) -> JobSpec:
    """The job that is asked for. Raises :class:`InvalidInput` for settings that no job has."""
    node = node_of(request.scope)
    if settings.get("name", job) != job:
        raise InvalidInput(f"the URL names job {job!r} and the body {settings['name']!r}")
    spec = JobSpec.from_dict({"name": job} | settings | {"holder": holder_of(request)})
    node.settings.check_dataset(spec.dataset)
    return spec


def framed(request: Request, frame: OutgoingFrame) -> Response:
    """In the memory that the request names, if it has room; else as the body."""
    node = node_of(request.scope)
    name = request.headers.get(MEMORY_HEADER)
    if name is not None and node.client_memory.write(name, holder_of(request), frame):
        return Response(headers={FRAME_BYTES_HEADER: str(frame.total_bytes)})
    return FrameResponse([frame])


def asked_of(node: CacheNode, job: str, incarnation: str | None, anew: bool) -> JobAtPod:
    if anew:
        node.new_runs.check_is_newest(job, incarnation)
    return node.table.find(job, incarnation)


async def is_the_rank(
    node: CacheNode, at_pod: JobAtPod, epoch: int, rank: int, life: str | None, anew: bool, begins_at: int | None = 0
) -> None:
    at_pod.job.check_rank(rank)
    if anew and life is not None:  # whoever does not say who it is says nothing of the rank
        at_pod.home.leases.asks(rank, life_of(life), takes=False)
        await node.new_runs.check(at_pod, epoch, rank, begins_at)
    at_pod.home.leases.asks(rank, life_of(life))


def life_of(text: str | None) -> RankLife | None:
    """None for a client that does not say it: one of an earlier version."""
    return None if text is None else RankLife.decode(text)


def read_int64s(body: bytes) -> Int64Array:
    """Raises :class:`InvalidInput` unless the body is a whole number of little-endian int64 values."""
    if len(body) % 8:
        raise InvalidInput(f"body of {len(body)} bytes is not a list of 8-byte integers")
    return np.frombuffer(body, dtype="<i8").astype(np.int64)


def checked_ids(at_pod: JobAtPod, body: bytes) -> Int64Array:
    ids = read_int64s(body)
    last = at_pod.job.layout.num_samples - 1
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) > last):
        wrong = ids[(ids < 0) | (ids > last)][0]
        raise InvalidInput(f"there is no sample {wrong}; the dataset has samples 0 to {last}")
    return ids
