"""What does a pod answer to other pods about planned jobs? Its part of a batch, and what makes jobs known."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import BaseModel

from refill.protocol.dealing import Dealing
from refill.protocol.plan_settings import PlanSettings
from refill.protocol.wire_format import BatchRequest
from refill_service.memory.outgoing_frame import OutgoingFrame
from refill_service.serving.answer_room import AnswerRoom
from refill_service.serving.client_requests import BATCH_BODY_BYTES
from refill_service.serving.frame_response import FrameResponse
from refill_service.serving.node_of import node_of
from refill_service.serving.peer_routes import Number, check_number_of_pods, count_sent, known_spec
from refill_service.serving.request_body import takes_body
from refill_service.serving.request_guard import resources_of

__all__ = ["PLANNED_PEER_ROUTES"]


class Introduction(BaseModel):
    """See :meth:`PlannedJobs.register_here`."""

    spec: dict[str, Any]
    plan: dict[str, Any] | None = None
    confirmed: bool = False
    since: float | None = None
    again: bool = False
    """Whether the run has been asked for samples, so that it may have been ended meanwhile."""


PLANNED_PEER_ROUTES = APIRouter(prefix="/peer/v1/jobs/{job}/planned", dependencies=[Depends(check_number_of_pods)])


@PLANNED_PEER_ROUTES.put("")
async def introduce(job: str, body: Introduction, request: Request) -> dict[str, Any]:
    node = node_of(request.scope)
    plan = None if body.plan is None else PlanSettings.from_dict(body.plan)
    spec = known_spec(node, body.spec)
    begun = body.confirmed and plan is not None
    found = await node.planned.register_here(spec, plan, begun=begun, again=body.again, of_pod=True, since=body.since)
    return found.introduction()


@PLANNED_PEER_ROUTES.get("")
async def known(job: str, request: Request) -> dict[str, Any]:
    return node_of(request.scope).planned.find(job, looked_at=True).introduction()


@PLANNED_PEER_ROUTES.delete("")
async def take_back(job: str, plan: Annotated[str, Query(max_length=64)], request: Request) -> dict[str, str]:
    await node_of(request.scope).planned.take_back_here(job, plan)
    return {"job": job}


@PLANNED_PEER_ROUTES.post("/take")
@takes_body(BATCH_BODY_BYTES)
async def take(
    job: str,
    plan: Annotated[str, Query(max_length=64)],
    pod: Annotated[int, Query(ge=0)],
    request: Request,
    ranks: Annotated[int, Query(ge=1, le=2**20)] = 1,
    start: Annotated[int, Query(ge=0, lt=2**62)] = 0,
    damaged: Literal["raise", "say"] = "raise",
) -> Response:
    node = node_of(request.scope)
    found = node.planned.find(job, plan)
    resources_of(request).enter_context(found.in_use())
    wanted = BatchRequest.decode(await request.body())
    found.check_positions(wanted.epoch, wanted.positions)
    found.check_dealing(wanted.epoch, wanted.rank, Dealing(found.layout.num_samples, ranks, start=start))
    room = AnswerRoom(request, node.sending_to_pods, found, node.settings.wait_seconds)
    await room.enter(len(wanted.positions))
    ids, payloads = await found.take(wanted.epoch, wanted.positions, says_damage=damaged == "say")
    found.confirmed = True
    frame = OutgoingFrame(wanted.positions, ids, payloads)
    room.holds(frame.total_bytes)
    return FrameResponse([frame], lambda sent: count_sent(node, pod, sent))


@PLANNED_PEER_ROUTES.post("/warm")
async def warm(
    job: str,
    plan: Annotated[str, Query(max_length=64)],
    epoch: Annotated[int, Query(ge=0, lt=2**31)],
    position: Annotated[int, Query(ge=0, lt=2**62)],
    request: Request,
) -> dict[str, int]:
    return node_of(request.scope).planned.find(job, plan).warm(epoch, position)


@PLANNED_PEER_ROUTES.get("/epochs/{epoch}")
async def about(
    job: str, epoch: Number, request: Request, run: Annotated[str, Query(max_length=64)] = ""
) -> dict[str, Any]:
    return node_of(request.scope).planned.about_here(job, epoch, run)


@PLANNED_PEER_ROUTES.get("/epochs/{epoch}/ranks/{rank}")
async def asked(job: str, epoch: Number, rank: Number, request: Request) -> dict[str, Any]:
    return node_of(request.scope).planned.asked_here(job, epoch, rank)
