"""What does a pod answer to clients of planned jobs? Parses, asks the node, responds."""

from __future__ import annotations

import time
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, Field

from refill.errors import InvalidInput
from refill.protocol.dealing import Dealing
from refill.protocol.plan_settings import PlanSettings
from refill.protocol.rank_life import LONGEST_LIFE, RankLife
from refill.protocol.wire_format import BatchRequest
from refill_service.memory.outgoing_frame import OutgoingFrame
from refill_service.planned.planned_job import PlannedJob
from refill_service.serving.access_log import was_done
from refill_service.serving.answer_room import AnswerRoom
from refill_service.serving.client_requests import (
    BATCH_BODY_BYTES,
    BINARY_BODY,
    FRAME_ANSWER,
    SAMPLES_BODY_BYTES,
    JobName,
    Life,
    Number,
    framed,
    life_of,
    read_int64s,
    spec_of,
)
from refill_service.serving.error_answers import ERROR_ANSWERS
from refill_service.serving.node_of import node_of
from refill_service.serving.request_body import takes_body
from refill_service.serving.request_guard import resources_of

__all__ = ["PLANNED_ROUTES"]

_REPORT_BYTES = 4 << 20

Plan = Annotated[str, Query(max_length=64, description="The plan that the asker goes by: its plan_id.")]
Damaged = Annotated[
    Literal["raise", "say"],
    Query(description="What comes for a damaged sample: an error in place of the batch, or in place of its bytes."),
]
Count = Annotated[int, Query(ge=0, lt=2**62)]
InInt64 = Annotated[int, Field(ge=0, lt=2**62)]


class Registering(BaseModel):
    """Settings of the job, and by which plan the client goes."""

    settings: dict[str, Any]
    plan: dict[str, Any] | None = Field(None, description="None: it knows none.")
    begun: bool = Field(False, description="Whether it has received samples by that plan.")
    again: bool = Field(False, description="Whether this process had registered the job before.")


class DealtTo(BaseModel):
    """How an epoch is dealt, and to which rank: see refill.protocol.dealing."""

    epoch: int = Field(ge=0, lt=2**31)
    rank: int = Field(ge=0, lt=2**20)
    num_ranks: int = Field(ge=1, le=2**20)
    start: int = Field(0, ge=0, lt=2**62)
    drop_last: bool = False

    def dealing(self, job: PlannedJob) -> Dealing:
        """Raises :class:`InvalidInput` for a rank that there is not."""
        if self.rank >= self.num_ranks:
            raise InvalidInput(f"rank {self.rank} is not one of {self.num_ranks} ranks")
        return Dealing(job.layout.num_samples, self.num_ranks, start=self.start, drop_last=self.drop_last)


class Received(DealtTo):
    """Positions of a rank that it has received, or goes on without."""

    spans: list[tuple[InInt64, InInt64]] = Field([], description="[first, end) of positions in a row.")
    damaged: list[tuple[InInt64, InInt64]] = Field([], description="Position and sample of what it goes on without.")


PLANNED_ROUTES = APIRouter(prefix="/v1/jobs/{job}/planned", responses=ERROR_ANSWERS)


@PLANNED_ROUTES.put("", tags=["jobs"], summary="Register a job whose order is planned.")
async def register(job: JobName, body: Registering, request: Request) -> dict[str, Any]:
    node = node_of(request.scope)
    spec = spec_of(job, body.settings, request)
    plan = None if body.plan is None else PlanSettings.from_dict(body.plan)
    info = await node.planned.register(spec, plan, begun=body.begun and plan is not None, again=body.again)
    was_done(request, "registered", spec.dataset)
    return info


@PLANNED_ROUTES.post(
    "/batch",
    tags=["data"],
    summary="The samples at positions of an epoch's one order.",
    response_class=Response,
    responses=FRAME_ANSWER,
    openapi_extra=BINARY_BODY,
)
@takes_body(BATCH_BODY_BYTES)
async def batch(
    job: JobName,
    plan: Plan,
    request: Request,
    ranks: Annotated[int, Query(ge=1, le=2**20, description="How many ranks the epoch is dealt to.")] = 1,
    start: Annotated[int, Query(ge=0, lt=2**62, description="The position from which on it is dealt so.")] = 0,
    drop_last: bool = False,
    had: Annotated[int, Query(ge=0, lt=2**62, description="The rank's positions below lie in a checkpoint.")] = 0,
    group: Annotated[int, Query(ge=1, le=2**10, description="How many processes ask as this rank.")] = 1,
    member: Annotated[int, Query(ge=0, lt=2**10, description="Which of them asks.")] = 0,
    allow_skipped: bool = False,
    life: Life = None,
    refused_by: Annotated[
        str | None, Query(max_length=LONGEST_LIFE, description="Who is this rank, as another pod has said.")
    ] = None,
    ended: Annotated[str | None, Query(max_length=LONGEST_LIFE, description="Who was this rank and has ended.")] = None,
    damaged: Damaged = "raise",
) -> Response:
    node = node_of(request.scope)
    found = node.planned.find(job, plan)
    resources_of(request).enter_context(found.in_use())
    wanted = BatchRequest.decode(await request.body())
    if wanted.epoch >= 2**31:
        raise InvalidInput(f"there is no epoch {wanted.epoch}")
    if wanted.rank >= ranks:
        raise InvalidInput(f"rank {wanted.rank} is not one of {ranks} ranks")
    dealt = DealtTo(epoch=wanted.epoch, rank=wanted.rank, num_ranks=ranks, start=start, drop_last=drop_last)
    dealing = dealt.dealing(found)
    found.check_positions(wanted.epoch, wanted.positions)
    asker = life_of(life)
    process_of_rank = wanted.rank * group + member
    if ended is not None and asker is not None:
        found.leases.ended(process_of_rank, RankLife.decode(ended), asker)
    if refused_by is not None and asker is not None:
        found.leases.held_elsewhere(process_of_rank, RankLife.decode(refused_by), asker)
    found.leases.asks(process_of_rank, asker)
    found.check_dealing(wanted.epoch, wanted.rank, Dealing(dealing.num_positions, ranks, start=start))
    found.clients.client(wanted.rank).request_wait_seconds += wanted.waited_seconds
    if not allow_skipped and found.received.comes_to(wanted.epoch, wanted.rank):
        await node.planned.check_left(job, wanted.epoch - 1, wanted.rank)
    room = AnswerRoom(request, node.sending_to_clients, found, node.settings.wait_seconds)
    await room.enter(len(wanted.positions))
    of_ranks, places = dealing.places(wanted.positions)
    own = places[(of_ranks == wanted.rank) & (wanted.positions >= start)]
    found.received.asks(wanted.epoch, dealing, wanted.rank, own, had, now=time.time())
    ids, payloads = await found.batch(
        wanted.epoch, wanted.rank, dealing, wanted.positions, says_damage=damaged == "say"
    )
    node.planned.find(job, plan)  # one that a rank has samples by may have taken its place meanwhile
    found.confirmed = True
    frame = OutgoingFrame(wanted.positions, ids, payloads)
    room.holds(frame.total_bytes)
    was_done(request, f"read {len(ids)} samples")
    return framed(request, frame)


@PLANNED_ROUTES.post(
    "/samples",
    tags=["data"],
    summary="The samples with these ids (int64), outside of any epoch.",
    response_class=Response,
    responses=FRAME_ANSWER,
    openapi_extra=BINARY_BODY,
)
@takes_body(SAMPLES_BODY_BYTES)
async def samples(job: JobName, plan: Plan, request: Request) -> Response:
    node = node_of(request.scope)
    found = node.planned.find(job, plan)
    resources_of(request).enter_context(found.in_use())
    ids = read_int64s(await request.body())
    found.check_samples(ids)
    room = AnswerRoom(request, node.sending_to_clients, found, node.settings.wait_seconds)
    await room.enter(len(ids))
    frame = OutgoingFrame(np.full(len(ids), -1), ids, await found.samples(ids))
    room.holds(frame.total_bytes)
    was_done(request, f"read {len(ids)} samples")
    return framed(request, frame)


@PLANNED_ROUTES.post("/warm", tags=["jobs"], summary="Have all pods read what an epoch begins with.")
async def warm(
    job: JobName,
    plan: Plan,
    request: Request,
    epoch: Annotated[int, Query(ge=0, lt=2**31)] = 0,
    position: Annotated[int, Query(ge=0, lt=2**62, description="From which one on.")] = 0,
) -> dict[str, int]:
    planned = node_of(request.scope).planned
    planned.find(job, plan)
    return await planned.warm(job, epoch, position)


@PLANNED_ROUTES.put("/received", tags=["data"], summary="Report what a rank has received of an epoch, for its receipt.")
@takes_body(_REPORT_BYTES)
async def received(job: JobName, plan: Plan, body: Received, request: Request) -> dict[str, int]:
    found = node_of(request.scope).planned.find(job, plan)
    dealing = body.dealing(found)
    positions, sample_ids = np.array(body.damaged, dtype=np.int64).reshape(-1, 2).T
    found.check_samples(sample_ids)
    now = time.time()
    found.received.received(body.epoch, dealing, body.rank, body.spans, now=now)
    if body.damaged:
        found.received.goes_without(body.epoch, dealing, body.rank, positions, sample_ids, now=now)
    return {"spans": len(body.spans)}


@PLANNED_ROUTES.get("", tags=["data"], summary="Says that a rank is there, though it asks for nothing now.")
async def heard(
    job: JobName, plan: Plan, request: Request, rank: Annotated[int, Query(ge=0, lt=2**20)], life: Life = None
) -> dict[str, Any]:
    found = node_of(request.scope).planned.find(job, plan)
    found.leases.heard(rank, life_of(life))
    return {"rank": rank, "plan_id": found.plan_id}


@PLANNED_ROUTES.get(
    "/epochs/{epoch}/ranks/{rank}",
    tags=["data"],
    summary="The first positions in a row that a rank has not asked for so far, or null.",
)
async def left_out(
    job: JobName, plan: Plan, epoch: Number, rank: Number, start: Count, end: Count, request: Request
) -> dict[str, Any]:
    planned = node_of(request.scope).planned
    planned.find(job, plan)
    found = await planned.left_out(job, epoch, rank, start, end)
    return {"rank": rank, "epoch": epoch, "skipped": found}
