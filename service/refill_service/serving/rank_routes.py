"""What do ranks report to a pod, and what does it answer of a rank? What they went without, and waited for."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field

from refill.errors import InvalidInput
from refill.protocol.rank_life import LONGEST_LIFE, RankLife
from refill_service.cache_core.admission import AsksAs, rank_admission
from refill_service.serving.client_requests import (
    BATCH_BODY_BYTES,
    BINARY_BODY,
    Incarnation,
    JobName,
    Life,
    Number,
    in_use,
    is_the_rank,
    life_of,
    read_int64s,
)
from refill_service.serving.door import CONNECTION
from refill_service.serving.error_answers import ERROR_ANSWERS
from refill_service.serving.request_guard import node_of, takes_body

RequiredLife = Annotated[str, Query(max_length=LONGEST_LIFE)]


class Report(BaseModel):
    """What a client has seen since its last report."""

    rank: int = Field(ge=0, lt=2**20)
    data_wait_seconds: float = Field(
        ge=0, lt=1e9, allow_inf_nan=False, description="How long the training loop waited for data."
    )
    samples: int = Field(ge=0, lt=2**62)
    bytes: int = Field(ge=0, lt=2**62)


RANK_ROUTES = APIRouter(responses=ERROR_ANSWERS)


@RANK_ROUTES.put(
    "/v1/jobs/{job}/epochs/{epoch}/ranks/{rank}/damaged",
    tags=["data"],
    summary="Report damaged samples that a rank goes on without: positions, then ids (int64).",
    openapi_extra=BINARY_BODY,
)
@takes_body(2 * BATCH_BODY_BYTES)
async def goes_without(
    job: JobName, epoch: Number, rank: Number, request: Request, incarnation: Incarnation = None, life: Life = None
) -> dict[str, int]:
    at_pod = in_use(request, job, incarnation)
    is_the_rank(request, at_pod, rank, life, takes=False)
    numbers = read_int64s(await request.body())
    if len(numbers) % 2:
        raise InvalidInput(f"{len(numbers)} integers are not as many samples as positions")
    positions, samples = numbers.reshape(2, -1)
    at_pod.home.rank_goes_without(epoch, rank, positions, samples)
    return {"damaged": len(samples)}


@RANK_ROUTES.get(
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
    at_pod = node_of(request.scope).table.find(job, incarnation)
    is_the_rank(request, at_pod, rank, None)
    found = await at_pod.skipped(epoch, rank, start, end)
    return {"rank": rank, "epoch": epoch, "skipped": found}


@RANK_ROUTES.get("/v1/jobs/{job}/ranks/{rank}", tags=["data"], summary="Whether this pod has the job of a rank.")
async def rank_known(
    job: JobName, rank: Number, request: Request, incarnation: Incarnation = None, life: Life = None
) -> dict[str, Any]:
    at_pod = node_of(request.scope).table.find(job, incarnation)
    asks = AsksAs(rank, life_of(life), is_heard=True)
    rank_admission(at_pod.job, at_pod.home.leases, asks, request.scope.get(CONNECTION))
    return {"rank": rank, "epoch": at_pod.owner.epoch}


@RANK_ROUTES.get(
    "/v1/jobs/{job}/ranks/{rank}/parts",
    tags=["data"],
    summary="Whether a rank has come to this part of a dataset, and which other parts it reads.",
)
async def parts(job: JobName, rank: Number, request: Request) -> dict[str, Any]:
    return node_of(request.scope).table.parts_of_rank(job, rank)


@RANK_ROUTES.delete(
    "/v1/jobs/{job}/ranks/{rank}/lease", tags=["data"], summary="Say goodbye: the process of a rank ends."
)
async def goodbye(job: JobName, rank: Number, life: RequiredLife, request: Request) -> dict[str, int]:
    await node_of(request.scope).table.said_goodbye(job, rank, RankLife.decode(life))
    return {"rank": rank}


@RANK_ROUTES.put(
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
    at_pod = node_of(request.scope).table.find(job, incarnation)
    is_the_rank(request, at_pod, rank, None)
    await at_pod.home.entry.take_over(rank, RankLife.decode(ended), RankLife.decode(life))
    return {"rank": rank}


@RANK_ROUTES.post(
    "/v1/jobs/{job}/report",
    tags=["data"],
    status_code=204,
    summary="Report how long a client waited, and what it fetched.",
)
async def report(job: JobName, seen: Report, request: Request, incarnation: Incarnation = None) -> Response:
    node = node_of(request.scope)
    if job in node.planned.jobs:
        client = node.planned.find(job, incarnation, looked_at=True).clients.client(seen.rank)
    else:
        at_pod = node.table.find(job, incarnation)
        is_the_rank(request, at_pod, seen.rank, None)
        client = at_pod.clients.client(seen.rank)
    client.data_wait_seconds += seen.data_wait_seconds
    client.samples += seen.samples
    client.bytes += seen.bytes
    return Response(status_code=204)
