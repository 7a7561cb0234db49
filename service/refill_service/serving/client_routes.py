"""What does a pod answer to clients and to people? Parses, asks the node, responds; decides nothing."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Body, Path, Query, Request, Response
from pydantic import BaseModel, Field

from refill.errors import InvalidInput, UnknownJob
from refill.protocol.incarnation import moves_of
from refill.protocol.job_spec import JobSpec
from refill.protocol.rank_life import LONGEST_LIFE, RankLife
from refill.protocol.wire_format import (
    FRAME_BYTES_HEADER,
    MAX_BATCH,
    MAX_LABELS,
    MAX_SAMPLES,
    MAX_SCORES,
    MEMORY_HEADER,
    BatchRequest,
    Int64Array,
)
from refill_service.jobs.job_at_pod import JobAtPod
from refill_service.jobs.scores import draw_from, read_scores, report_scores
from refill_service.jobs.trace_posting import post_trace
from refill_service.membership.resuming import Checkpoint
from refill_service.memory.outgoing_frame import OutgoingFrame
from refill_service.pod.cache_node import CacheNode
from refill_service.serving.access import holder_of
from refill_service.serving.access_log import was_done
from refill_service.serving.answer_room import AnswerRoom
from refill_service.serving.error_answers import ERROR_ANSWERS
from refill_service.serving.frame_response import FrameResponse
from refill_service.serving.node_of import node_of
from refill_service.serving.record_stream import coming_records, most_records_bytes
from refill_service.serving.request_body import takes_body
from refill_service.serving.request_guard import resources_of
from refill_service.serving.trace_stream import coming_trace, most_trace_bytes

__all__ = [
    "BATCH_BODY_BYTES",
    "CLIENT_ROUTES",
    "SAMPLES_BODY_BYTES",
    "SCORES_BODY_BYTES",
    "CheckpointBody",
    "checked_ids",
]

BATCH_BODY_BYTES = 8 * MAX_BATCH + 64
SCORES_BODY_BYTES = 12 * MAX_SCORES
SAMPLES_BODY_BYTES = 8 * MAX_SAMPLES

_FRAME_ANSWER: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "One frame: header, positions, sample ids, lengths, payload (refill.protocol.wire_format).",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
_BINARY_BODY: dict[str, Any] = {
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
RequiredLife = Annotated[str, Query(max_length=LONGEST_LIFE)]
Run = Annotated[
    str,
    Query(
        max_length=64,
        description="Which run of this job: its id as in /v1/runs, or the beginning of that. None: the one "
        "that runs, else the one that ended last.",
    ),
]


class Report(BaseModel):
    """What a client has seen since its last report."""

    rank: int = Field(ge=0, lt=2**20)
    data_wait_seconds: float = Field(
        ge=0, lt=1e9, allow_inf_nan=False, description="How long the training loop waited for data."
    )
    samples: int = Field(ge=0, lt=2**62)
    bytes: int = Field(ge=0, lt=2**62)


class CheckpointBody(BaseModel):
    """Where each rank was when the training run was saved."""

    incarnation: str = Field(max_length=64, description="The registration of the job that the state is of.")
    epoch: int = Field(ge=0, lt=2**31)
    position: int = Field(ge=0, lt=2**62, description="The first position that each rank had not consumed.")


class ResumeBody(BaseModel):
    """Settings of the job as it goes on, and where it was."""

    settings: dict[str, Any]
    checkpoint: CheckpointBody


CLIENT_ROUTES = APIRouter(responses=ERROR_ANSWERS)


def _framed(request: Request, frame: OutgoingFrame) -> Response:
    """In the memory that the request names, if it has room; else as the body."""
    node = node_of(request.scope)
    name = request.headers.get(MEMORY_HEADER)
    if name is not None and node.client_memory.write(name, holder_of(request), frame):
        return Response(headers={FRAME_BYTES_HEADER: str(frame.total_bytes)})
    return FrameResponse([frame])


def _asked_for(job: str, settings: dict[str, Any], request: Request) -> JobSpec:
    node = node_of(request.scope)
    if settings.get("name", job) != job:
        raise InvalidInput(f"the URL names job {job!r} and the body {settings['name']!r}")
    spec = JobSpec.from_dict({"name": job} | settings | {"holder": holder_of(request)})
    node.settings.check_dataset(spec.dataset)
    return spec


def _asked_of(node: CacheNode, job: str, incarnation: str | None, anew: bool) -> JobAtPod:
    if anew:
        node.new_runs.check_is_newest(job, incarnation)
    return node.table.find(job, incarnation)


async def _is_the_rank(
    node: CacheNode, at_pod: JobAtPod, epoch: int, rank: int, life: str | None, anew: bool, begins_at: int | None = 0
) -> None:
    at_pod.job.check_rank(rank)
    if anew and life is not None:  # whoever does not say who it is says nothing of the rank
        at_pod.home.leases.asks(rank, life_of(life), takes=False)
        await node.new_runs.check(at_pod, epoch, rank, begins_at)
    at_pod.home.leases.asks(rank, life_of(life))


@CLIENT_ROUTES.get("/v1/pods", tags=["health"], summary="URLs of all pods for clients, as this pod was told them.")
async def pods(request: Request) -> dict[str, Any]:
    node = node_of(request.scope)
    return {"ordinal": node.settings.ordinal, "pods": list(node.settings.pod_urls)}


@CLIENT_ROUTES.get("/v1/jobs", tags=["jobs"], summary="The jobs of this pod.")
async def jobs(request: Request) -> list[dict[str, Any]]:
    node = node_of(request.scope)
    return [at_pod.job.info() | at_pod.use() for at_pod in node.table.of_team(holder_of(request)).values()]


@CLIENT_ROUTES.put(
    "/v1/jobs/{job}", tags=["jobs"], summary="Register a job on all pods. Doing it again changes nothing."
)
async def register(
    job: JobName,
    settings: Annotated[dict[str, Any], Body()],
    request: Request,
    incarnation: Incarnation = None,
    pods: Annotated[int | None, Query(ge=1, lt=2**16, description="On how many pods the job ran then.")] = None,
) -> dict[str, Any]:
    node = node_of(request.scope)
    info = await node.registration.register(_asked_for(job, settings, request), incarnation, pods)
    if incarnation is not None and moves_of(info["incarnation"]) > moves_of(incarnation):
        was_done(request, "moved to", info["incarnation"])
    else:
        was_done(request, "registered", info["spec"]["dataset"])
    return info


@CLIENT_ROUTES.post("/v1/jobs/{job}/resume", tags=["jobs"], summary="Go on with a job from a checkpoint.")
async def resume(job: JobName, body: ResumeBody, request: Request) -> dict[str, Any]:
    node = node_of(request.scope)
    spec = _asked_for(job, body.settings, request)
    info = await node.resuming.resume(spec, Checkpoint(**body.checkpoint.model_dump()))
    was_done(request, "resumed", spec.dataset)
    return info


@CLIENT_ROUTES.get("/v1/jobs/{job}", tags=["jobs"], summary="Settings and state of a job.")
async def describe(job: JobName, request: Request) -> dict[str, Any]:
    node = node_of(request.scope)
    return node.table.find(job, looked_at=True).job.info()


@CLIENT_ROUTES.delete("/v1/jobs/{job}", tags=["jobs"], summary="End a job on all pods and free its memory.")
async def end(job: JobName, request: Request) -> dict[str, bool]:
    node = node_of(request.scope)
    if not await node.registration.end_everywhere(job, holder_of(request)):
        raise UnknownJob(f"no pod knows a job {job}", job=job)
    was_done(request, "ended")
    return {"removed": True}


@CLIENT_ROUTES.post(
    "/v1/memory", tags=["data"], summary="Get a name, good for one use, to lend memory by on this machine."
)
async def memory(request: Request) -> dict[str, str]:
    node = node_of(request.scope)
    return {"name": node.client_memory.expect(holder_of(request))}


@CLIENT_ROUTES.post(
    "/v1/jobs/{job}/batch",
    tags=["data"],
    summary="The samples of one batch of positions.",
    response_class=Response,
    responses=_FRAME_ANSWER,
    openapi_extra=_BINARY_BODY,
)
@takes_body(BATCH_BODY_BYTES)
async def batch(
    job: JobName,
    request: Request,
    incarnation: Incarnation = None,
    life: Life = None,
    anew: Anew = False,
    first: First = False,
    allow_skipped: Annotated[
        bool, Query(description="Whether the rank may have left out positions of earlier epochs.")
    ] = False,
    damaged: Annotated[
        Literal["raise", "say"],
        Query(description="What comes for a damaged sample: an error in place of the batch, or in place of its bytes."),
    ] = "raise",
) -> Response:
    node = node_of(request.scope)
    at_pod = _asked_of(node, job, incarnation, anew)
    resources_of(request).enter_context(at_pod.in_use())
    wanted = BatchRequest.decode(await request.body())
    at_pod.client(wanted.rank).request_wait_seconds += wanted.waited_seconds
    at_pod.home.record.check_reported(wanted.rank)  # else who comes first after a restart would be the rank
    position = int(wanted.positions.min(initial=2**62))
    begins_at = position if first or position == 0 else None
    await _is_the_rank(node, at_pod, wanted.epoch, wanted.rank, life, anew, begins_at)
    opened = await at_pod.home.open(wanted, allow_skipped=allow_skipped, says_damage=damaged == "say")
    room = AnswerRoom(request, node.sending_to_clients, at_pod, node.settings.wait_seconds)
    await room.enter(len(wanted.positions))  # nothing was taken yet
    batch = await at_pod.home.assemble(opened)
    await node.fence.confirm()
    frame = OutgoingFrame(batch.positions, batch.sample_ids, batch.payloads)
    room.holds(frame.total_bytes)
    was_done(request, f"read {len(batch.positions)} samples")
    return _framed(request, frame)


@CLIENT_ROUTES.post(
    "/v1/jobs/{job}/samples",
    tags=["data"],
    summary="The samples with these ids (int64), outside of any epoch.",
    response_class=Response,
    responses=_FRAME_ANSWER,
    openapi_extra=_BINARY_BODY,
)
@takes_body(SAMPLES_BODY_BYTES)
async def samples(job: JobName, request: Request, incarnation: Incarnation = None) -> Response:
    node = node_of(request.scope)
    at_pod = node.table.find(job, incarnation)
    resources_of(request).enter_context(at_pod.in_use())
    ids = checked_ids(at_pod, await request.body())
    room = AnswerRoom(request, node.sending_to_clients, at_pod, node.settings.wait_seconds)
    await room.enter(len(ids))
    frame = OutgoingFrame(np.full(len(ids), -1), ids, await at_pod.home.exact.read(ids))
    room.holds(frame.total_bytes)
    was_done(request, f"read {len(ids)} samples")
    return _framed(request, frame)


@CLIENT_ROUTES.post(
    "/v1/jobs/{job}/labels",
    tags=["data"],
    summary="The labels of the samples between two ids (int64): int32, as a frame's only sample.",
    response_class=Response,
    responses=_FRAME_ANSWER,
    openapi_extra=_BINARY_BODY,
)
@takes_body(16)
async def labels(job: JobName, request: Request, incarnation: Incarnation = None) -> Response:
    return await _of_index(job, request, incarnation, "labels", "<i4")


@CLIENT_ROUTES.post(
    "/v1/jobs/{job}/lengths",
    tags=["data"],
    summary="The bytes of each of the samples between two ids (int64): int64, as a frame's only sample.",
    response_class=Response,
    responses=_FRAME_ANSWER,
    openapi_extra=_BINARY_BODY,
)
@takes_body(16)
async def lengths(job: JobName, request: Request, incarnation: Incarnation = None) -> Response:
    return await _of_index(job, request, incarnation, "lengths", "<i8")


async def _of_index(job: str, request: Request, incarnation: str | None, what: str, dtype: str) -> Response:
    node = node_of(request.scope)
    at_pod = node.table.find(job, incarnation)
    resources_of(request).enter_context(at_pod.in_use())
    first, end = _checked_range(what, at_pod, await request.body())
    room = AnswerRoom(request, node.sending_to_clients, at_pod, node.settings.wait_seconds)
    await room.enter(1)
    dataset = at_pod.job.dataset
    found = await (dataset.labels(first, end) if what == "labels" else dataset.lengths(first, end))
    frame = OutgoingFrame(np.array([-1]), np.array([first]), [found.astype(dtype).tobytes()])
    room.holds(frame.total_bytes)
    return _framed(request, frame)


@CLIENT_ROUTES.put(
    "/v1/jobs/{job}/epochs/{epoch}/ranks/{rank}/trace",
    tags=["data"],
    summary="Post the sample ids (int64) that a rank wants in an epoch, for a job with order 'explicit'.",
    openapi_extra=_BINARY_BODY,
)
@takes_body(lambda node, job: most_trace_bytes(_asked_of(node, job, None, True).job), in_pieces=True)
async def trace(
    job: JobName,
    epoch: Number,
    rank: Number,
    request: Request,
    incarnation: Incarnation = None,
    life: Life = None,
    anew: Anew = False,
) -> dict[str, int]:
    node = node_of(request.scope)
    at_pod = _asked_of(node, job, incarnation, anew)
    resources_of(request).enter_context(at_pod.in_use())
    at_pod.job.check_rank(rank)
    await _is_the_rank(node, at_pod, epoch, rank, life, anew)
    async with coming_trace(request, at_pod.job, epoch, rank) as ids:
        await post_trace(at_pod, epoch, rank, ids)
    return {"positions": len(ids)}


@CLIENT_ROUTES.put(
    "/v1/jobs/{job}/ranks/{rank}/scores",
    tags=["data"],
    summary="Tell how important training finds samples: ids (int64), then scores (float32).",
    openapi_extra=_BINARY_BODY,
)
@takes_body(SCORES_BODY_BYTES)
async def scores(
    job: JobName, rank: Number, request: Request, incarnation: Incarnation = None, life: Life = None
) -> dict[str, Any]:
    node = node_of(request.scope)
    at_pod = node.table.find(job, incarnation)
    resources_of(request).enter_context(at_pod.in_use())
    at_pod.job.check_rank(rank)
    at_pod.home.leases.asks(rank, life_of(life), takes=False)
    ids, found = read_scores(await request.body(), at_pod.job.layout.num_samples)
    return await report_scores(at_pod, ids, found)


@CLIENT_ROUTES.post(
    "/v1/jobs/{job}/epochs/{epoch}/ranks/{rank}/scores",
    tags=["data"],
    summary="What a rank draws an epoch from, of the samples between two ids (int64): scores (float32), then a bit for "
    "each sample that is in memory, as a frame's only sample.",
    response_class=Response,
    responses=_FRAME_ANSWER,
    openapi_extra=_BINARY_BODY,
)
@takes_body(16)
async def drawn_from(
    job: JobName,
    epoch: Number,
    rank: Number,
    request: Request,
    incarnation: Incarnation = None,
    life: Life = None,
    anew: Anew = False,
) -> Response:
    node = node_of(request.scope)
    at_pod = _asked_of(node, job, incarnation, anew)
    resources_of(request).enter_context(at_pod.in_use())
    await _is_the_rank(node, at_pod, epoch, rank, life, anew)
    first, end = _checked_range("scores", at_pod, await request.body())
    room = AnswerRoom(request, node.sending_to_clients, at_pod, node.settings.wait_seconds)
    await room.enter(1)
    encoded = await draw_from(at_pod, epoch, rank, first, end)
    frame = OutgoingFrame(np.array([-1]), np.array([first]), [encoded])
    room.holds(frame.total_bytes)
    return _framed(request, frame)


@CLIENT_ROUTES.put(
    "/v1/jobs/{job}/epochs/{epoch}/ranks/{rank}/damaged",
    tags=["data"],
    summary="Report damaged samples that a rank goes on without: positions, then ids (int64).",
    openapi_extra=_BINARY_BODY,
)
@takes_body(2 * BATCH_BODY_BYTES)
async def goes_without(
    job: JobName, epoch: Number, rank: Number, request: Request, incarnation: Incarnation = None, life: Life = None
) -> dict[str, int]:
    node = node_of(request.scope)
    at_pod = node.table.find(job, incarnation)
    resources_of(request).enter_context(at_pod.in_use())
    at_pod.job.check_rank(rank)
    at_pod.home.record.check_reported(rank)
    at_pod.home.leases.asks(rank, life_of(life), takes=False)
    numbers = read_int64s(await request.body())
    if len(numbers) % 2:
        raise InvalidInput(f"{len(numbers)} integers are not as many samples as positions")
    positions, samples = numbers.reshape(2, -1)
    at_pod.home.record.rank_goes_without(epoch, rank, positions, samples)
    return {"damaged": len(samples)}


@CLIENT_ROUTES.get(
    "/v1/jobs/{job}/epochs/{epoch}/ranks/{rank}",
    tags=["data"],
    summary="The first positions in a row that a rank has left out of an epoch so far, or null.",
)
async def skipped(
    job: JobName,
    epoch: Number,
    rank: Number,
    request: Request,
    start: Annotated[int, Query(ge=0, lt=2**62)],
    end: Annotated[int, Query(ge=0, lt=2**62)],
    incarnation: Incarnation = None,
) -> dict[str, Any]:
    node = node_of(request.scope)
    found = await node.table.find(job, incarnation).skipped(epoch, rank, start, end)
    return {"rank": rank, "epoch": epoch, "skipped": found}


@CLIENT_ROUTES.get("/v1/jobs/{job}/ranks/{rank}", tags=["data"], summary="Whether this pod knows what a rank received.")
async def rank_known(
    job: JobName, rank: Number, request: Request, incarnation: Incarnation = None, life: Life = None
) -> dict[str, Any]:
    node = node_of(request.scope)
    at_pod = node.table.find(job, incarnation)
    at_pod.job.check_rank(rank)
    at_pod.home.leases.heard(rank, life_of(life))
    at_pod.home.record.check_reported(rank)
    unknown = {str(each): epoch for each, epoch in at_pod.records.unknown_before().items()}
    return {"rank": rank, "epoch": at_pod.owner.epoch, "unknown_before": unknown}


@CLIENT_ROUTES.put(
    "/v1/jobs/{job}/ranks/{rank}/records",
    tags=["data"],
    summary="Report what a rank has received, to a pod that was restarted (refill.protocol.records).",
    openapi_extra=_BINARY_BODY,
)
@takes_body(lambda node, job: most_records_bytes(node.table.find(job).job), in_pieces=True)
async def records(
    job: JobName, rank: Number, request: Request, incarnation: Incarnation = None, life: Life = None
) -> dict[str, int]:
    node = node_of(request.scope)
    at_pod = node.table.find(job, incarnation)
    at_pod.job.check_rank(rank)
    at_pod.home.leases.asks(rank, life_of(life), takes=False)
    resources_of(request).enter_context(at_pod.in_use())
    report = at_pod.home.record.report_of(rank)
    async for record in coming_records(request, at_pod.job):
        report.add(record)
    report.ended()
    if at_pod.home.record.is_reported(rank):  # by this process, or another one that has received something
        at_pod.home.leases.asks(rank, life_of(life))
    return {"records": report.num_records}


@CLIENT_ROUTES.put(
    "/v1/jobs/{job}/ranks/{rank}/lease", tags=["data"], summary="Take over a rank whose process has ended."
)
async def take_over(
    job: JobName,
    rank: Number,
    life: RequiredLife,
    ended: RequiredLife,
    request: Request,
    incarnation: Incarnation = None,
) -> dict[str, int]:
    node = node_of(request.scope)
    at_pod = node.table.find(job, incarnation)
    at_pod.job.check_rank(rank)
    await at_pod.home.entry.take_over(rank, RankLife.decode(ended), RankLife.decode(life))
    return {"rank": rank}


@CLIENT_ROUTES.post(
    "/v1/jobs/{job}/report",
    tags=["data"],
    status_code=204,
    summary="Report how long a client waited, and what it fetched.",
)
async def report(job: JobName, seen: Report, request: Request, incarnation: Incarnation = None) -> Response:
    node = node_of(request.scope)
    client = node.table.find(job, incarnation).client(seen.rank)
    client.data_wait_seconds += seen.data_wait_seconds
    client.samples += seen.samples
    client.bytes += seen.bytes
    return Response(status_code=204)


@CLIENT_ROUTES.get(
    "/v1/jobs/{job}/epochs/{epoch}", tags=["jobs"], summary="What an epoch cost: counts of each pod, and their sum."
)
async def epoch_counts(job: JobName, epoch: Number, request: Request, run: Run = "") -> dict[str, Any]:
    node = node_of(request.scope)
    return await node.runs.counts(job, epoch, run, holder_of(request))


@CLIENT_ROUTES.get(
    "/v1/jobs/{job}/epochs/{epoch}/receipt",
    tags=["jobs"],
    summary="The receipt of an epoch: what it delivered to whom.",
)
async def receipt(job: JobName, epoch: Number, request: Request, run: Run = "") -> dict[str, Any]:
    node = node_of(request.scope)
    return await node.runs.receipt(job, epoch, run, holder_of(request))


@CLIENT_ROUTES.get("/v1/runs", tags=["jobs"], summary="Runs that have ended, and whose receipts this pod keeps.")
async def runs(request: Request) -> list[dict[str, Any]]:
    node = node_of(request.scope)
    return node.runs.ended(holder_of(request))


def life_of(text: str | None) -> RankLife | None:
    """None for a client that does not say it: one of an earlier version."""
    return None if text is None else RankLife.decode(text)


def read_int64s(body: bytes) -> Int64Array:
    """Raises :class:`InvalidInput` unless the body is a whole number of little-endian int64 values."""
    if len(body) % 8:
        raise InvalidInput(f"body of {len(body)} bytes is not a list of 8-byte integers")
    return np.frombuffer(body, dtype="<i8").astype(np.int64)


def _checked_range(what: str, at_pod: JobAtPod, body: bytes) -> tuple[int, int]:
    wanted = read_int64s(body).tolist()
    num_samples = at_pod.job.layout.num_samples
    if len(wanted) != 2 or not 0 <= wanted[0] < wanted[1] <= min(num_samples, wanted[0] + MAX_LABELS):
        raise InvalidInput(f"{what} are asked for by two ids of 0 to {num_samples}, {MAX_LABELS:,} apart at most")
    return wanted[0], wanted[1]


def checked_ids(at_pod: JobAtPod, body: bytes) -> Int64Array:
    ids = read_int64s(body)
    last = at_pod.job.layout.num_samples - 1
    if len(ids) and (int(ids.min()) < 0 or int(ids.max()) > last):
        wrong = ids[(ids < 0) | (ids > last)][0]
        raise InvalidInput(f"there is no sample {wrong}; the dataset has samples 0 to {last}")
    return ids
