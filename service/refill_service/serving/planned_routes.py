"""What does a pod answer to clients of planned jobs? Parses, asks the node, responds."""

from __future__ import annotations

import asyncio
import time
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import unquote

import numpy as np
from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, FailFast, Field

from refill import __version__
from refill.build import VERSION_FIELD
from refill.errors import InvalidInput
from refill.formats.cut import check_cut
from refill.protocol.class_plan import chunk_entries
from refill.protocol.dealing import MOST_LISTED, Dealing
from refill.protocol.job_spec import is_job_name
from refill.protocol.plan_settings import PlanSettings
from refill.protocol.rank_life import LONGEST_LIFE, RankLife
from refill.protocol.receipt_digest import DigestPart
from refill.protocol.sample_cut import SampleCut
from refill.protocol.wire_format import MAX_BATCH, MAX_LISTED, BatchRequest, Int64Array, decode_together
from refill_service.cache_core.admission import AsksAs, check_holder, rank_admission
from refill_service.cache_core.planned.posted_lists import AboutList
from refill_service.cache_core.planned.received import check_part, check_places
from refill_service.memory.loop_turns import all_done
from refill_service.memory.payload import AnswerSize, OutgoingFrame, Payload
from refill_service.planned.planned_job import PlannedJob, place_of, step_of
from refill_service.serving.access_log import was_done
from refill_service.serving.client_requests import (
    ANSWERS_FRAME,
    BINARY_BODY,
    FRAMES_ANSWER,
    LISTED_BODY_BYTES,
    SAMPLES_BODY_BYTES,
    TOGETHER_BODY_BYTES,
    JobName,
    Life,
    Number,
    answered,
    answered_with,
    life_of,
    openapi_of,
    parsed_query,
    read_int64s,
    spec_of,
)
from refill_service.serving.cut_samples import cut_in_turns, cut_samples
from refill_service.serving.door import CONNECTION, holder_of
from refill_service.serving.error_answers import ERROR_ANSWERS
from refill_service.serving.frame_response import AnswerRoom
from refill_service.serving.request_guard import node_of, resources_of, takes_body, while_wanted
from refill_service.serving.sampler_routes import of_range

_JOBS, _BATCH = "/v1/jobs/", "/planned/batch"
_REPORT_BYTES, _MOST_SPANS = 512 << 10, 1 << 14
"""Of a rank's report: it is read in one piece. Clients make several of one with more than 4,096 spans."""
_BYTES_OF_POSITION, _BYTES_OF_CHUNK = 16, 64
"""While an order, or chunks, are looked up."""
_ADMITTED_AT_ONCE = 64
"""Batches of one request."""
_KEPT_QUERIES, _KEPT_QUERY_BYTES = 1024, 512
"""Parameters of batches that need not be parsed again."""

Plan = Annotated[str, Query(max_length=64, description="The plan that the asker goes by: its plan_id.")]
_OF_ASKER = {"ranks", "batch", "start", "drop_last", "group", "member", "life"}
_DAMAGED = "What comes for a damaged sample: an error in place of the batch, or in place of its bytes."
_REFUSED_BY = "Who is this rank, as another pod has said."
_CUT_LETTERS = 8192
_MEMBERS = "The members of each sample that come, with commas between; empty: all."
_RANGES = "Of which members a range of bytes comes: name:first:count, with commas between."
Count = Annotated[int, Query(ge=0, lt=2**62)]
InInt64 = Annotated[int, Field(ge=0, lt=2**62)]
Pairs = Annotated[list[tuple[InInt64, InInt64]], FailFast()]
"""The first thing that is wrong ends it: of each, pydantic makes a kilobyte."""


class Registering(BaseModel):
    """Settings of the job, and by which plan the client goes."""

    settings: dict[str, Any]
    plan: dict[str, Any] | None = Field(None, description="None: it knows none.")
    begun: bool = Field(False, description="Whether it has received samples by that plan.")
    again: bool = Field(False, description="Whether this process had registered the job before.")
    since: float | None = Field(None, allow_inf_nan=False, description="When that was, as a pod has said.")
    at_once: int = Field(
        0, ge=0, lt=2**40, description="Positions that a rank's loader asks for at once: workers x batch. 0: not known."
    )


class DealtTo(BaseModel):
    """How an epoch is dealt, and to which rank: see refill.protocol.dealing."""

    epoch: int = Field(ge=0, lt=2**31)
    rank: int = Field(ge=0, lt=2**20)
    num_ranks: int = Field(ge=1, le=2**20)
    batch: int = Field(1, ge=1, le=MAX_BATCH)
    start: int = Field(0, ge=0, lt=2**62)
    drop_last: bool = False

    def dealing(self, job: PlannedJob) -> Dealing:
        """Raises :class:`InvalidInput` for a rank that there is not."""
        rank_admission(job, None, AsksAs(self.rank, num_ranks=self.num_ranks))
        return job.dealing(self.num_ranks, self.batch, self.start, self.drop_last)


class Received(DealtTo):
    """Positions of a rank that it has received, or goes on without."""

    age_seconds: float = Field(0, ge=0, lt=1e9, description="For how long its process has gone by that.")
    spans: Pairs = Field([], description="[first, end) of positions in a row.")
    damaged: Pairs = Field([], description="Position and sample of what it goes on without.")
    listed: tuple[Annotated[int, Field(ge=0, le=MOST_LISTED)], Annotated[str, Field(max_length=64)]] | None = Field(
        None, description="How long the rank's list is, and its digest, where it asks by one."
    )
    digests: list[list[Any]] = Field(
        [], description="What the rank's loop was given: see refill.protocol.receipt_digest.", max_length=1000
    )


class ListPiece(BaseModel):
    """What each piece of a rank's list says about the whole list."""

    num_ranks: int = Field(ge=1, le=2**20)
    length: int = Field(ge=0, le=MOST_LISTED)
    start: int = Field(0, ge=0, description="Places before it were had, and do not come.")
    digest: str = Field("", max_length=64)
    first: int = Field(0, ge=0, description="The place of the piece's first sample.")

    def about(self, rank: int) -> AboutList:
        """Raises :class:`InvalidInput` for a rank that there is not."""
        if rank >= self.num_ranks:
            raise InvalidInput(f"rank {rank} is not one of {self.num_ranks} ranks")
        return AboutList(self.num_ranks, self.length, self.start, self.digest)


Listed = Annotated[ListPiece, Query()]

PLANNED_ROUTES = APIRouter(prefix="/v1/jobs/{job}/planned", responses=ERROR_ANSWERS)
PLANNED_ROUTES_OF_SEVERAL = APIRouter(responses=ERROR_ANSWERS)


@PLANNED_ROUTES.put("", tags=["jobs"], summary="Register a job whose order is planned.")
async def register(job: JobName, body: Registering, request: Request) -> dict[str, Any]:
    node = node_of(request.scope)
    spec = spec_of(job, body.settings, request)
    plan = None if body.plan is None else PlanSettings.from_dict(body.plan)
    begun = body.begun and plan is not None
    info = await node.planned.register(
        spec, plan, begun=begun, again=body.again, since=body.since, at_once=body.at_once
    )
    was_done(request, "registered", spec.dataset)
    return info | {VERSION_FIELD: __version__}


class AskedForBatch(BaseModel):
    """Who asks for positions of an epoch, and how it is dealt to ranks (see refill.protocol.dealing)."""

    plan: str = Field(max_length=64, description="The plan that the asker goes by: its plan_id.")
    ranks: int = Field(1, ge=1, le=2**20, description="How many ranks the epoch is dealt to.")
    batch: int = Field(1, ge=1, le=MAX_BATCH, description="How many positions are dealt to a rank together.")
    start: int = Field(0, ge=0, lt=2**62, description="The position from which on it is dealt so.")
    drop_last: bool = False
    had: int = Field(0, ge=0, lt=2**62, description="The rank's positions below lie in a checkpoint.")
    group: int = Field(1, ge=1, le=2**10, description="How many processes ask as this rank.")
    member: int = Field(0, ge=0, lt=2**10, description="Which of them asks.")
    part: bool = Field(
        False, description="Whether it is a part of a batch, whose other parts other pods are asked for."
    )
    allow_skipped: bool = False
    life: str | None = Field(None, max_length=LONGEST_LIFE, description="The training process that asks.")
    refused_by: str | None = Field(None, max_length=LONGEST_LIFE, description=_REFUSED_BY)
    ended: str | None = Field(None, max_length=LONGEST_LIFE, description="Who was this rank and has ended.")
    damaged: Literal["raise", "say"] = Field("raise", description=_DAMAGED)
    members: str = Field("", max_length=_CUT_LETTERS, description=_MEMBERS)
    ranges: str = Field("", max_length=_CUT_LETTERS, description=_RANGES)
    silent: str = Field(
        "",
        pattern="^([0-9]{1,6}(,[0-9]{1,6})*)?$",
        max_length=4096,
        description="Pods, by their ordinals, that gave the asker no sign of life.",
    )


@PLANNED_ROUTES.post(
    "/batch",
    summary="The samples at positions of an epoch's one order.",
    **ANSWERS_FRAME | {"openapi_extra": openapi_of(AskedForBatch)},
)
@takes_body(LISTED_BODY_BYTES)
async def batch(request: Request) -> Response:
    """Pods answer it ahead of the routes, by :mod:`.batch_door`."""
    name, node = request.path_params["job"], node_of(request.scope)
    asked = _asked(request, name, request.scope["query_string"], await request.body())
    dealing = asked.admitted(request.scope.get(CONNECTION))
    if asked.leaves_an_epoch:
        await node.planned.receipts.check_left(name, asked.wanted.epoch - 1, asked.wanted.rank)
    room = AnswerRoom(request, node.sending_to_clients, asked.job)
    wanted = asked.wanted
    needed = {"place": place_of(wanted), "step": step_of(wanted, dealing)}
    await room.enter(len(wanted.positions), asked.job.wanted_bytes(wanted), **needed)
    return answered(request, room, await _frame(request, name, asked, dealing))


@PLANNED_ROUTES_OF_SEVERAL.post(
    "/v1/batches",
    summary="Batches of several planned jobs, as a Mixture asks for them.",
    **ANSWERS_FRAME | {"responses": FRAMES_ANSWER},
)
@takes_body(TOGETHER_BODY_BYTES)
async def batches(request: Request) -> Response:
    """The body has paths and bodies of requests for a batch of each (refill.protocol.wire_format, "together"). What is
    wrong with one is the answer to all. Pods answer it ahead of the routes, by :mod:`.batch_door`."""
    node = node_of(request.scope)
    every = []
    for path, body in decode_together(await request.body()):
        name, query = job_and_query(path)
        found = node.planned.find(name, looked_at=True)
        check_holder(name, found.spec.holder, holder_of(request))
        asked = _asked(request, name, query, body)
        every.append((name, asked, asked.admitted(request.scope.get(CONNECTION))))
        if len(every) % _ADMITTED_AT_ONCE == 0:
            await asyncio.sleep(0)
    sizes = [asked.job.wanted_bytes(asked.wanted) for _, asked, _ in every]
    AnswerSize(node.settings.answer_limit_bytes).check(sum(sizes))
    # Room for all at once: who has some and waits for more could wait for ever.
    room = AnswerRoom(request, node.sending_to_clients, every[0][1].job)
    needed = {
        "place": min(place_of(asked.wanted) for _, asked, _ in every),
        "step": max(step_of(asked.wanted, dealing) for _, asked, dealing in every),
    }
    await room.enter(sum(len(asked.wanted.positions) for _, asked, _ in every), sum(sizes), **needed)
    frames = await all_done(*(_frame(request, *each) for each in every))
    return answered_with(request, room, frames)


def _asked(request: Request, name: str, query: bytes, body: bytes) -> AskedBatch:
    asker = asker_of(query)
    found = node_of(request.scope).planned.find(name, asker.asked.plan)
    resources_of(request).enter_context(found.use.under_way())
    return AskedBatch(found, asker, BatchRequest.decode(body))


async def _frame(request: Request, name: str, asked: AskedBatch, dealing: Dealing) -> OutgoingFrame:
    """Its samples, when there is room for them in an answer."""
    asked.begins(dealing)
    asker, says_damage = asked.asker, asked.asker.asked.damaged == "say"
    ids, payloads = await asked.job.batch(asked.wanted, says_damage=says_damage, asker=asker.said, silent=asker.silent)
    # One that a rank has samples by may have taken its place meanwhile.
    node_of(request.scope).planned.find(name, asker.asked.plan)
    cut, metadata = asked.asker.cut, asked.job.dataset.index.metadata
    return asked.frame_of(ids, await cut_in_turns(cut, metadata, ids.tolist(), payloads))


def job_and_query(path: str) -> tuple[str, bytes]:
    """Of the path of a request for a batch. Raises :class:`InvalidInput` for another one."""
    of_batch, _, query = path.partition("?")
    if not of_batch.startswith(_JOBS) or not of_batch.endswith(_BATCH):
        raise InvalidInput(f"only batches can be asked for together, not {path[:100]!r}")
    job = unquote(of_batch[len(_JOBS) : -len(_BATCH)])
    if not is_job_name(job):
        raise InvalidInput(f"{path[:100]!r} names no job")
    return job, query.encode()


class AskedBatch(NamedTuple):
    """A batch that was asked for, of a job that this pod has by the plan of who asks."""

    job: PlannedJob
    asker: Asker
    wanted: BatchRequest

    @property
    def leaves_an_epoch(self) -> bool:
        """Whether other pods may have to say that the rank has left out nothing of the epoch before."""
        asked, wanted = self.asker.asked, self.wanted
        if asked.part or asked.allow_skipped:
            return False
        return self.job.received.comes_to(wanted.epoch, wanted.rank)

    def admitted(self, connection: Any) -> Dealing:
        """How the epoch is dealt. Raises what is wrong with the request, or with who makes it.

        :param connection: that it came over.
        """
        (job, asker, wanted), asked = self, self.asker.asked
        asks = AsksAs(
            wanted.rank,
            asker.life,
            num_ranks=asked.ranks,
            group=asked.group,
            member=asked.member,
            ended=asker.ended,
            refused_by=asker.refused_by,
        )
        job.check_wanted(wanted)
        check_cut(asker.cut, job.dataset.index.metadata)
        rank_admission(job, job.leases, asks, connection)
        dealing = job.dealing(asked.ranks, asked.batch, asked.start, asked.drop_last)
        job.check_dealing(wanted.epoch, dealing, asks)
        return dealing

    def begins(self, dealing: Dealing) -> None:
        """Fact: it is about to be answered."""
        wanted = self.wanted
        own = dealing.places_of_rank(wanted.rank, wanted.positions)
        self.job.received.asks(wanted.epoch, dealing, wanted.rank, own, self.asker.asked.had, now=time.time())

    def frame(self, ids: Int64Array, payloads: list[Payload]) -> OutgoingFrame:
        """The answer, of samples as they are in the dataset."""
        cut, metadata = self.asker.cut, self.job.dataset.index.metadata
        if cut.is_whole:
            return self.frame_of(ids, payloads)
        return self.frame_of(ids, cut_samples(cut, metadata, ids.tolist(), payloads))

    def frame_of(self, ids: Int64Array, payloads: list[Payload]) -> OutgoingFrame:
        """The answer, of what is wanted of samples."""
        self.job.confirmed = True
        return OutgoingFrame(self.wanted.positions, ids, payloads)


class Asker(NamedTuple):
    """What the parameters of a batch say; the same for all batches of a process, more or less."""

    asked: AskedForBatch
    life: RankLife | None
    ended: RankLife | None
    refused_by: RankLife | None
    said: dict[str, Any]
    """What other pods are told of who asks."""
    silent: frozenset[int]
    cut: SampleCut


def asker_of(query: bytes) -> Asker:
    """Raises :class:`RequestValidationError`."""
    return _known_asker(query) if len(query) <= _KEPT_QUERY_BYTES else _parsed_asker(query)


def _parsed_asker(query: bytes) -> Asker:
    asked = parsed_query(query, AskedForBatch)
    return Asker(
        asked,
        life_of(asked.life),
        life_of(asked.ended),
        life_of(asked.refused_by),
        asked.model_dump(include=_OF_ASKER, exclude_defaults=True),
        frozenset(int(pod) for pod in asked.silent.split(",") if pod),
        SampleCut.parse(asked.members, asked.ranges),
    )


_known_asker = lru_cache(maxsize=_KEPT_QUERIES)(_parsed_asker)


@PLANNED_ROUTES.post(
    "/samples",
    summary="The samples with these ids (int64), outside of any epoch.",
    **ANSWERS_FRAME,
)
@takes_body(SAMPLES_BODY_BYTES)
async def samples(
    job: JobName,
    plan: Plan,
    request: Request,
    members: Annotated[str, Query(max_length=_CUT_LETTERS, description=_MEMBERS)] = "",
    ranges: Annotated[str, Query(max_length=_CUT_LETTERS, description=_RANGES)] = "",
) -> Response:
    node = node_of(request.scope)
    found = node.planned.find(job, plan)
    resources_of(request).enter_context(found.use.under_way())
    ids = read_int64s(await request.body())
    found.check_samples(ids)
    room = AnswerRoom(request, node.sending_to_clients, found)
    await while_wanted(request, room.enter(len(ids)))
    cut, metadata = SampleCut.parse(members, ranges), found.dataset.index.metadata
    check_cut(cut, metadata)
    payloads = await while_wanted(request, found.samples(ids))
    payloads = await cut_in_turns(cut, metadata, ids.tolist(), payloads)
    return answered(request, room, OutgoingFrame(np.full(len(ids), -1), ids, payloads))


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
@takes_body(_REPORT_BYTES, most_lists=_MOST_SPANS)
async def received(job: JobName, plan: Plan, body: Received, request: Request) -> dict[str, int]:
    """All of it is noted, or nothing where something is wrong with it."""
    found = node_of(request.scope).planned.find(job, plan)
    dealing, now = body.dealing(found), time.time() - body.age_seconds
    of_whom = body.epoch, dealing, body.rank
    positions, sample_ids = np.array(body.damaged, dtype=np.int64).reshape(-1, 2).T
    parts = [DigestPart.from_list(each) for each in body.digests]
    found.check_samples(sample_ids)
    check_places(*of_whom, np.array(body.spans, dtype=np.int64).reshape(-1, 2))
    check_places(*of_whom, np.stack([positions, positions + 1], axis=1))
    for part in parts:
        check_part(body.epoch, dealing, part)
    if body.listed is not None and found.lists is not None:
        found.received.is_listed(*of_whom, *body.listed, now=now)
    found.received.received(*of_whom, body.spans, now=now)
    if parts:
        found.received.loops_had(body.epoch, dealing, parts, now=now)
    if body.damaged:
        found.received.goes_without(*of_whom, positions, sample_ids, now=now)
    return {"spans": len(body.spans)}


@PLANNED_ROUTES.put(
    "/epochs/{epoch}/ranks/{rank}/list",
    tags=["data"],
    summary="A piece of the list of samples (int64) that a rank will ask for, with order 'explicit'.",
    openapi_extra=BINARY_BODY,
)
@takes_body(8 * MAX_LISTED)
async def post_list(
    job: JobName, plan: Plan, epoch: Number, rank: Number, about: Listed, request: Request
) -> dict[str, int]:
    planned = node_of(request.scope).planned
    planned.find(job, plan)
    samples = read_int64s(await request.body())
    await planned.post_list(job, epoch, rank, about.about(rank), about.first, samples)
    return {"positions": len(samples)}


@PLANNED_ROUTES.post(
    "/epochs/{epoch}/order",
    summary="The samples at the positions between two (int64) of an epoch's planned order: int64, as a frame's only "
    "sample.",
    **ANSWERS_FRAME,
)
@takes_body(16)
async def order(job: JobName, plan: Plan, epoch: Number, request: Request) -> Response:
    found = node_of(request.scope).planned.find(job, plan)
    resources_of(request).enter_context(found.use.under_way())

    async def read(first: int, end: int) -> bytes:
        return (await found.whole_order(epoch))[first:end].astype("<i8").tobytes()

    return await of_range(request, found, found.layout.num_samples, "positions", read, _BYTES_OF_POSITION)


@PLANNED_ROUTES.post(
    "/chunks",
    summary="Where the samples between two ids (int64) lie by the plan: int64, chunk times 2**16 plus share, as a "
    "frame's only sample.",
    **ANSWERS_FRAME,
)
@takes_body(16)
async def chunks(job: JobName, plan: Plan, request: Request) -> Response:
    found = node_of(request.scope).planned.find(job, plan)
    resources_of(request).enter_context(found.use.under_way())

    async def read(first: int, end: int) -> bytes:
        chunks, shares = found.orders.chunks_and_shares(np.arange(first, end, dtype=np.int64))
        return chunk_entries(chunks, shares).astype("<i8").tobytes()

    return await of_range(request, found, found.layout.num_samples, "samples", read, _BYTES_OF_CHUNK)


@PLANNED_ROUTES.get("", tags=["data"], summary="Says that a rank is there, though it asks for nothing now.")
async def heard(
    job: JobName,
    plan: Plan,
    request: Request,
    rank: Annotated[int, Query(ge=0, lt=2**20)],
    list_of: Annotated[int, Query(ge=0, lt=2**20, description="Which rank's lists it asks about.")] = 0,
    life: Life = None,
    asked: Annotated[
        bool, Query(description="Whether it is about to ask for samples, or has asked another pod for some.")
    ] = False,
    ended: Annotated[str | None, Query(max_length=LONGEST_LIFE, description="Who was this rank and has ended.")] = None,
    refused_by: Annotated[str | None, Query(max_length=LONGEST_LIFE, description=_REFUSED_BY)] = None,
) -> dict[str, Any]:
    found = node_of(request.scope).planned.find(job, plan)
    asks = AsksAs(
        rank,
        life_of(life),
        is_heard=not asked,
        num_ranks=rank + 1,
        ended=life_of(ended),
        refused_by=life_of(refused_by),
    )
    rank_admission(found, found.leases, asks, request.scope.get(CONNECTION))
    return {"rank": rank, "plan_id": found.plan_id, "lists": found.lists_of(list_of)}


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
    found = await planned.receipts.left_out(job, epoch, rank, start, end)
    return {"rank": rank, "epoch": epoch, "skipped": found}
