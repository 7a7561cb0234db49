"""What does a pod answer to other pods? The bulk path of owners, and what is forwarded to every pod."""

from __future__ import annotations

import zlib
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import BaseModel, Field

from refill.errors import InvalidInput
from refill.protocol.job_spec import MOST_URL_LETTERS, JobSpec
from refill.protocol.rank_life import RankLife
from refill.protocol.wire_format import BatchRequest
from refill_service.cache_core.admission import AsksAs, rank_admission
from refill_service.cache_core.kept_runs import RunPart
from refill_service.jobs.job_at_pod import JobAtPod
from refill_service.jobs.scores import encode_drawn, keep_scores, read_scores
from refill_service.memory.payload import OutgoingFrame
from refill_service.pod.cache_node import CacheNode
from refill_service.serving.client_requests import BATCH_BODY_BYTES, SAMPLES_BODY_BYTES, checked_ids, in_use
from refill_service.serving.frame_response import AnswerRoom, FrameResponse
from refill_service.serving.request_guard import node_of, takes_body
from refill_service.serving.sampler_routes import SCORES_BODY_BYTES, coming_trace, most_trace_bytes

_MOST_PART_BYTES = 4 << 20

Incarnation = Annotated[str, Query(max_length=64)]
AnyIncarnation = Annotated[str | None, Query(max_length=64)]
Holder = Annotated[str, Query(max_length=255)]
Pod = Annotated[int, Query(ge=0)]
Damaged = Literal["raise", "say"]
Count = Annotated[int, Query(ge=0, lt=2**62)]
Number = Annotated[int, Path(ge=0, lt=2**31)]


class Registration(BaseModel):
    """The registration of a live job: to pod 0, or from it with the run that it has named; see
    :meth:`LiveJobs.take_part`."""

    spec: dict[str, Any]
    incarnation: str = ""
    fingerprint: str = ""
    process: str = ""


class Opening(BaseModel):
    """The dataset of a job that is about to be registered; see :mod:`refill_service.datasets.early_opening`."""

    dataset: str = Field(max_length=MOST_URL_LETTERS)
    whole: bool = False


class Opens(BaseModel):
    """Says which process a rank is; see :mod:`refill.protocol.rank_life`."""

    life: str


class Ended(BaseModel):
    """Says which process was a rank, and which one is now."""

    life: str
    by: str


ALIVE_ROUTES = APIRouter(prefix="/peer/v1/alive")
PEER_ROUTES = APIRouter(prefix="/peer/v1/jobs/{job}")


@ALIVE_ROUTES.get("")
async def alive(request: Request) -> dict[str, int]:
    """A sign of life."""
    return {"pod": node_of(request.scope).settings.ordinal}


def known_spec(node: CacheNode, fields: dict[str, Any]) -> JobSpec:
    """Another pod has checked it, by its own settings."""
    spec = JobSpec.from_dict(fields)
    node.settings.check_dataset(spec.dataset)
    return spec


def _is_a_rank(at_pod: JobAtPod, rank: int, life: RankLife | None = None, ended: RankLife | None = None) -> None:
    """:func:`rank_admission` of a rank whose home is another pod, which keeps its lease: a rank counts once."""
    rank_admission(at_pod.job, at_pod.home.leases, AsksAs(rank, life, takes=False, ended=ended))


@PEER_ROUTES.put("")
async def register(job: str, body: Registration, request: Request) -> dict[str, Any]:
    node = node_of(request.scope)
    spec = known_spec(node, body.spec)
    if not body.incarnation:
        return await node.live.lead(spec)
    return await node.live.take_part(spec, body.incarnation, body.fingerprint, body.process)


@PEER_ROUTES.post("/begins")
async def begins(job: str, body: Registration, request: Request) -> dict[str, str]:
    """From pod 0: a new run of a live job is about to begin."""
    node = node_of(request.scope)
    return {"process": await node.live.make_way(known_spec(node, body.spec))}


@PEER_ROUTES.post("/opening")
async def opening(job: str, body: Opening, request: Request) -> dict[str, bool]:
    node = node_of(request.scope)
    node.settings.check_dataset(body.dataset)
    if job not in node.jobs and job not in node.planned.jobs:
        node.opening.begin(body.dataset, whole=body.whole)
    return {"opening": True}


@PEER_ROUTES.get("")
async def known(job: str, request: Request, incarnation: AnyIncarnation = None) -> dict[str, Any]:
    return node_of(request.scope).live.known(job, incarnation)


@PEER_ROUTES.delete("")
async def remove(
    job: str,
    request: Request,
    holder: Holder = "",
    incarnation: AnyIncarnation = None,
    why: Annotated[str, Query(max_length=4000)] = "",
) -> dict[str, bool]:
    """As a client asks for it; or of one run alone, that another pod has found to be over or lost."""
    node = node_of(request.scope)
    if incarnation is None:
        return {"removed": await node.end_here(job, holder)}
    return {"removed": await node.live.end_here(job, holder, incarnation, why)}


@PEER_ROUTES.get("/ranks")
async def has_ranks(job: str, request: Request) -> dict[str, bool]:
    """Whether ranks ask for the job whose home this pod is."""
    return {"has_ranks": node_of(request.scope).table.has_ranks(job)}


@PEER_ROUTES.post("/goodbye")
async def goodbye(job: str, pod: Pod, request: Request) -> dict[str, str]:
    """No rank whose home is that pod asks for the job any more."""
    node_of(request.scope).table.pod_said_goodbye(job, pod)
    return {"job": job}


@PEER_ROUTES.post("/take")
@takes_body(BATCH_BODY_BYTES)
async def take(job: str, incarnation: Incarnation, pod: Pod, request: Request, damaged: Damaged = "raise") -> Response:
    """Three frames: what will be sent ahead (no payload), what was asked for, what is sent ahead."""
    node, at_pod = node_of(request.scope), in_use(request, job, incarnation, pod=pod)
    wanted = BatchRequest.decode(await request.body())
    _is_a_rank(at_pod, wanted.rank)
    asked, epoch = await at_pod.asked_of_this_pod(wanted)
    room = AnswerRoom(request, node.sending_to_pods, at_pod.job)
    await room.enter(len(asked.positions))  # nothing was taken yet
    await at_pod.owner.look_ahead(epoch, asked.rank, wanted.ahead_from)
    sample_ids, payloads = await at_pod.owner.take(epoch, asked.rank, asked.samples, says_damage=damaged == "say")
    ahead_positions, ahead_ids, ahead_payloads = at_pod.owner.ahead(
        asked.epoch,
        asked.rank,
        asked.samples,
        wanted.ahead_from,
        min(wanted.room_bytes, node.sending_to_pods.free_bytes),
        wanted.started_below,
    )
    frames = [
        OutgoingFrame(ahead_positions, ahead_ids, [b""] * len(ahead_ids)),
        OutgoingFrame(asked.positions, sample_ids, payloads),
        OutgoingFrame(ahead_positions, ahead_ids, ahead_payloads),
    ]
    room.holds(sum(frame.total_bytes for frame in frames))
    return FrameResponse(frames, node.peer_bytes_sent, pod)


@PEER_ROUTES.post("/samples")
@takes_body(SAMPLES_BODY_BYTES)
async def samples(
    job: str, incarnation: Incarnation, pod: Pod, request: Request, damaged: Damaged = "raise", repeats: bool = False
) -> Response:
    node, at_pod = node_of(request.scope), in_use(request, job, incarnation)
    ids = checked_ids(at_pod, await request.body())
    room = AnswerRoom(request, node.sending_to_pods, at_pod.job)
    await room.enter(len(ids))
    payloads = await at_pod.owner.exact(ids, says_damage=damaged == "say", repeats=repeats)
    frame = OutgoingFrame(np.full(len(ids), -1), ids, payloads)
    room.holds(frame.total_bytes)
    return FrameResponse([frame], node.peer_bytes_sent, pod)


@PEER_ROUTES.post("/epochs/{epoch}/ranks/{rank}")
async def rank_opens(
    job: str,
    epoch: Number,
    rank: Number,
    incarnation: Incarnation,
    pod: Pod,
    request: Request,
    body: Opens | None = None,
) -> dict[str, bool]:
    at_pod = node_of(request.scope).table.find(job, incarnation, pod=pod)
    _is_a_rank(at_pod, rank, None if body is None else RankLife.decode(body.life))
    at_pod.rank_opens(epoch, rank)
    return {"opened": True}


@PEER_ROUTES.post("/ranks/{rank}/asks")
async def rank_asks(job: str, rank: Number, incarnation: Incarnation, body: Opens, request: Request) -> dict[str, bool]:
    """Whether a process may ask as a rank by way of another pod. Changes nothing."""
    at_pod = node_of(request.scope).table.find(job, incarnation)
    _is_a_rank(at_pod, rank, RankLife.decode(body.life))
    return {"asks": True}


@PEER_ROUTES.post("/ranks/{rank}/ended")
async def rank_ended(
    job: str, rank: Number, incarnation: Incarnation, body: Ended, request: Request
) -> dict[str, bool]:
    at_pod = node_of(request.scope).table.find(job, incarnation)
    _is_a_rank(at_pod, rank, RankLife.decode(body.by), ended=RankLife.decode(body.life))
    return {"ended": True}


@PEER_ROUTES.put("/epochs/{epoch}/ranks/{rank}/trace")
@takes_body(lambda node, job: most_trace_bytes(node.table.find(job).job), in_pieces=True)
async def trace(job: str, epoch: Number, rank: Number, incarnation: Incarnation, request: Request) -> dict[str, int]:
    at_pod = node_of(request.scope).table.find(job, incarnation)
    _is_a_rank(at_pod, rank)
    async with coming_trace(request, at_pod.job, epoch, rank) as ids:
        await at_pod.keep_trace(epoch, rank, ids)
    return {"positions": len(ids)}


@PEER_ROUTES.put("/scores")
@takes_body(SCORES_BODY_BYTES)
async def scores(job: str, incarnation: Incarnation, request: Request) -> dict[str, Any]:
    """Of samples that this pod owns."""
    at_pod = node_of(request.scope).table.find(job, incarnation)
    ids, scores = read_scores(await request.body(), at_pod.job.layout.num_samples)
    return {"book": await keep_scores(at_pod, ids, scores)}


@PEER_ROUTES.get("/epochs/{epoch}/ranks/{rank}/scores")
async def drawn_from(
    job: str, epoch: Number, rank: Number, start: Count, end: Count, incarnation: Incarnation, request: Request
) -> Response:
    """Of samples that this pod owns; see :func:`draw_from`."""
    at_pod = node_of(request.scope).table.find(job, incarnation)
    _is_a_rank(at_pod, rank)
    encoded = await encode_drawn(at_pod, epoch, rank, start, end)
    return Response(encoded, media_type="application/octet-stream")


@PEER_ROUTES.put("/ended")
@takes_body(_MOST_PART_BYTES)
async def ended(job: str, request: Request) -> dict[str, bool]:
    """From the pod before this one: its part of the receipts of a run that has ended."""
    node = node_of(request.scope)
    try:
        part = RunPart.decode(await request.body())
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise InvalidInput(f"that is no part of a run: {error}") from error
    node.table.kept_runs.put(part)
    return {"kept": True}


@PEER_ROUTES.get("/runs/{epoch}")
async def runs(
    job: str, epoch: Number, request: Request, run: Annotated[str, Query(max_length=64)] = "", holder: Holder = ""
) -> list[dict[str, Any]]:
    return await node_of(request.scope).runs.parts_here(job, epoch, run, holder)


@PEER_ROUTES.get("/epochs/{epoch}/receipt")
async def receipt(job: str, epoch: Number, incarnation: Incarnation, request: Request) -> dict[str, Any]:
    return await node_of(request.scope).table.find(job, incarnation, looked_at=True).receipt_here(epoch)


@PEER_ROUTES.get("/epochs/{epoch}")
async def epoch_counts(job: str, epoch: Number, incarnation: Incarnation, request: Request) -> dict[str, Any]:
    return node_of(request.scope).table.find(job, incarnation, looked_at=True).counts_here(epoch)
