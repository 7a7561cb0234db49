"""What does a pod answer to other pods about planned jobs? Its part of a batch, and what makes jobs known."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field

from refill.errors import InvalidInput
from refill.protocol.plan_settings import PlanSettings
from refill.protocol.rank_life import LONGEST_LIFE
from refill.protocol.wire_format import MAX_BATCH, MAX_LISTED, BatchRequest
from refill_service.cache_core.admission import AsksAs, rank_admission
from refill_service.memory.payload import OutgoingFrame
from refill_service.planned.planned_job import place_of, step_of
from refill_service.serving.client_requests import LISTED_BODY_BYTES, life_of, query_of, read_int64s
from refill_service.serving.frame_response import AnswerRoom, FrameResponse
from refill_service.serving.peer_routes import Holder, Number, known_spec
from refill_service.serving.planned_routes import Listed
from refill_service.serving.request_guard import node_of, resources_of, takes_body


class Introduction(BaseModel):
    """How a pod tells another one of a planned job: :meth:`PlannedJobs.register_here`."""

    spec: dict[str, Any]
    plan: dict[str, Any] | None = None
    confirmed: bool = False
    since: float | None = None
    again: bool = False
    """Whether the run has been asked for samples, so that it may have been ended meanwhile."""
    at_once: int = Field(0, ge=0, lt=2**40)


PLANNED_PEER_ROUTES = APIRouter(prefix="/peer/v1/jobs/{job}/planned")


@PLANNED_PEER_ROUTES.put("")
async def introduce(job: str, body: Introduction, request: Request) -> dict[str, Any]:
    node = node_of(request.scope)
    plan = None if body.plan is None else PlanSettings.from_dict(body.plan)
    spec = known_spec(node, body.spec)
    begun = body.confirmed and plan is not None
    found = await node.planned.register_here(
        spec, plan, begun=begun, again=body.again, of_pod=True, since=body.since, at_once=body.at_once
    )
    return found.introduction()


@PLANNED_PEER_ROUTES.post("/made_by/{first}")
async def made_by(job: str, first: Number, body: Introduction, request: Request) -> dict[str, Any]:
    """For a pod that can't reach the first one, which is to make the plan: what this pod hears of it."""
    node = node_of(request.scope)
    if first >= node.settings.num_pods:
        raise InvalidInput(f"there are {node.settings.num_pods} pods, and you ask for pod {first}")
    return await node.planned.known_or_made(known_spec(node, body.spec), first, body.at_once)


@PLANNED_PEER_ROUTES.get("")
async def known(job: str, request: Request) -> dict[str, Any]:
    node = node_of(request.scope)
    found = node.planned.find(job, looked_at=True)
    return found.introduction() | {"idle": found.use.idle_seconds > node.settings.job_idle_seconds}


@PLANNED_PEER_ROUTES.delete("")
async def take_back(job: str, plan: Annotated[str, Query(max_length=64)], request: Request) -> dict[str, str]:
    await node_of(request.scope).planned.take_back_here(job, plan)
    return {"job": job}


class AskedForPart(BaseModel):
    """Says which pod asks for its rank's positions of an epoch, and how that is dealt."""

    plan: str = Field(max_length=64)
    pod: int = Field(ge=0)
    ranks: int = Field(1, ge=1, le=2**20)
    batch: int = Field(1, ge=1, le=MAX_BATCH)
    start: int = Field(0, ge=0, lt=2**62)
    drop_last: bool = False
    group: int = Field(1, ge=1, le=2**10)
    member: int = Field(0, ge=0, lt=2**10)
    life: str | None = Field(None, max_length=LONGEST_LIFE)
    damaged: Literal["raise", "say"] = "raise"


@PLANNED_PEER_ROUTES.post("/take")
@takes_body(LISTED_BODY_BYTES)
async def take(request: Request) -> Response:
    node = node_of(request.scope)
    asked = query_of(request, AskedForPart)
    found = node.planned.find(request.path_params["job"], asked.plan, pod=asked.pod)
    resources_of(request).enter_context(found.use.under_way())
    wanted = BatchRequest.decode(await request.body())
    found.check_wanted(wanted)
    asks = AsksAs(wanted.rank, life_of(asked.life), num_ranks=asked.ranks, group=asked.group, member=asked.member)
    rank_admission(found, None, asks)
    dealing = found.dealing(asked.ranks, asked.batch, asked.start, asked.drop_last)
    found.check_dealing(wanted.epoch, dealing, asks)
    room = AnswerRoom(request, node.sending_to_pods, found)
    await room.enter(
        len(wanted.positions),
        found.wanted_bytes(wanted),
        place=place_of(wanted),
        step=step_of(wanted, dealing),
    )
    ids, payloads = await found.take(wanted, says_damage=asked.damaged == "say")
    found.confirmed = True
    frame = OutgoingFrame(wanted.positions, ids, payloads)
    room.holds(frame.total_bytes)
    return FrameResponse([frame], node.peer_bytes_sent, asked.pod)


@PLANNED_PEER_ROUTES.put("/epochs/{epoch}/ranks/{rank}/list")
@takes_body(8 * MAX_LISTED)
async def post_list(
    job: str,
    plan: Annotated[str, Query(max_length=64)],
    epoch: Number,
    rank: Number,
    about: Listed,
    request: Request,
) -> dict[str, int]:
    samples = read_int64s(await request.body())
    found = node_of(request.scope).planned.find(job, plan)
    await found.post_list(epoch, rank, about.about(rank), about.first, samples)
    return {"positions": len(samples)}


@PLANNED_PEER_ROUTES.post("/warm")
async def warm(
    job: str,
    plan: Annotated[str, Query(max_length=64)],
    epoch: Annotated[int, Query(ge=0, lt=2**31)],
    position: Annotated[int, Query(ge=0, lt=2**62)],
    request: Request,
) -> dict[str, int]:
    return node_of(request.scope).planned.find(job, plan).shares.warm(epoch, position)


@PLANNED_PEER_ROUTES.get("/epochs/{epoch}")
async def about(
    job: str,
    epoch: Number,
    request: Request,
    holder: Holder = "",
    run: Annotated[str, Query(max_length=64)] = "",
    packed: bool = False,
) -> dict[str, Any]:
    return await node_of(request.scope).planned.receipts.about_here(job, epoch, run, holder, packed=packed)


@PLANNED_PEER_ROUTES.get("/epochs/{epoch}/ranks/{rank}")
async def asked(job: str, epoch: Number, rank: Number, request: Request, packed: bool = False) -> dict[str, Any]:
    return node_of(request.scope).planned.receipts.asked_here(job, epoch, rank, packed=packed)
