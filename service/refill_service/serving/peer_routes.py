"""What does a pod answer to other pods? The bulk path of owners, and what is forwarded to every pod."""

from __future__ import annotations

import zlib
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Depends, Header, Path, Query, Request, Response
from pydantic import BaseModel

from refill.errors import InvalidInput, PodRecovering
from refill.protocol.job_spec import JobSpec
from refill.protocol.pod_life import PodLife
from refill.protocol.rank_life import RankLife
from refill.protocol.wire_format import BatchRequest
from refill_service.cache_core.heard_answers import encode_count
from refill_service.cache_core.kept_runs import RunPart
from refill_service.jobs.epoch_counts import counts_here
from refill_service.jobs.job_at_pod import JobAtPod
from refill_service.jobs.scores import encode_drawn, keep_scores, read_scores
from refill_service.jobs.trace_posting import keep_trace
from refill_service.memory.outgoing_frame import OutgoingFrame
from refill_service.peers.peers import PODS_HEADER, TABLE_HEADER
from refill_service.pod.cache_node import CacheNode
from refill_service.serving.answer_room import AnswerRoom
from refill_service.serving.client_requests import BATCH_BODY_BYTES, SAMPLES_BODY_BYTES, checked_ids
from refill_service.serving.frame_response import FrameResponse
from refill_service.serving.node_of import node_of
from refill_service.serving.request_body import takes_body
from refill_service.serving.request_guard import resources_of
from refill_service.serving.sampler_routes import SCORES_BODY_BYTES
from refill_service.serving.trace_stream import coming_trace, most_trace_bytes

__all__ = ["LIVES_ROUTES", "PEER_ROUTES", "Holder", "Number", "check_number_of_pods", "count_sent", "known_spec"]

_MOST_PART_BYTES = 4 << 20

Incarnation = Annotated[str, Query(max_length=64)]
Holder = Annotated[str, Query(max_length=255)]
Pod = Annotated[int, Query(ge=0)]
Damaged = Literal["raise", "say"]
Count = Annotated[int, Query(ge=0, lt=2**62)]
Number = Annotated[int, Path(ge=0, lt=2**31)]
Ordinal = Annotated[int, Path(ge=0, lt=2**20)]
PodLifeText = Annotated[str, Query(alias="life", max_length=64)]


class Registration(BaseModel):
    """A job as another pod knows it; see :meth:`JobsHere.register`."""

    spec: dict[str, Any]
    incarnation: str = ""
    fingerprint: str = ""
    begun: bool = False


class Opening(BaseModel):
    """The dataset of a job that is about to be registered; see :mod:`refill_service.datasets.early_opening`."""

    dataset: str
    whole: bool = False


class Opens(BaseModel):
    """Which process a rank is; see :mod:`refill.protocol.rank_life`."""

    life: str


class Ended(BaseModel):
    """Which process was a rank, and which one is now."""

    life: str
    by: str


class Again(BaseModel):
    """A process asks anew; see :meth:`NewRuns.begin`."""

    incarnation: str
    may_wait: bool


async def check_number_of_pods(request: Request, pods: Annotated[int | None, Header(alias=PODS_HEADER)] = None) -> None:
    settings = node_of(request.scope).settings
    if pods is not None and pods != settings.num_pods:
        raise PodRecovering(
            f"pod {settings.ordinal} is one of {settings.num_pods} and was asked by one of {pods}: pods "
            "are being replaced",
            pod=settings.ordinal,
        )


LIVES_ROUTES = APIRouter(prefix="/peer/v1/lives", dependencies=[Depends(check_number_of_pods)])
"""Which run of each pod is the newest; see :mod:`refill_service.cache_core.pod_lives`."""

PEER_ROUTES = APIRouter(prefix="/peer/v1/jobs/{job}", dependencies=[Depends(check_number_of_pods)])


@LIVES_ROUTES.get("")
async def confirm() -> dict[str, bool]:
    """To a pod that asks whether it has a successor: it was refused before, if so."""
    return {"confirmed": True}


@LIVES_ROUTES.put("/{pod}")
async def announced(pod: Ordinal, life: PodLifeText, request: Request) -> dict[str, Any]:
    node = node_of(request.scope)
    return node.fence.announced(pod, PodLife.decode(life)).to_dict()


@LIVES_ROUTES.delete("/{pod}")
async def life_ended(pod: Ordinal, life: PodLifeText, request: Request) -> dict[str, bool]:
    node = node_of(request.scope)
    node.fence.lives.ended(pod, PodLife.decode(life))
    return {"ended": True}


def known_spec(node: CacheNode, fields: dict[str, Any]) -> JobSpec:
    """Another pod has checked it, by its own settings."""
    spec = JobSpec.from_dict(fields)
    node.settings.check_dataset(spec.dataset)
    return spec


def count_sent(node: CacheNode, pod: int, sent: int) -> None:
    node.peer_bytes_sent[pod] = node.peer_bytes_sent.get(pod, 0) + sent


@PEER_ROUTES.put("")
async def register(job: str, body: Registration, request: Request) -> dict[str, Any]:
    node = node_of(request.scope)
    return await node.jobs_here.register(
        known_spec(node, body.spec), body.incarnation, body.fingerprint, begun=body.begun
    )


@PEER_ROUTES.post("/opening")
async def opening(job: str, body: Opening, request: Request) -> dict[str, bool]:
    node = node_of(request.scope)
    node.settings.check_dataset(body.dataset)
    if job not in node.jobs and job not in node.planned.jobs:
        node.opening.begin(body.dataset, whole=body.whole)
    return {"opening": True}


@PEER_ROUTES.get("")
async def known(job: str, request: Request) -> dict[str, Any]:
    node = node_of(request.scope)
    return node.jobs_here.known(job).to_dict()


@PEER_ROUTES.delete("")
async def remove(job: str, request: Request, holder: Holder = "") -> dict[str, bool]:
    node = node_of(request.scope)
    return {"removed": await node.table.remove(job, holder)}


@PEER_ROUTES.post("/goodbye")
async def goodbye(job: str, pod: Pod, request: Request) -> dict[str, str]:
    """No rank whose home is that pod asks for the job any more."""
    node_of(request.scope).goodbyes.pod_said(job, pod)
    return {"job": job}


@PEER_ROUTES.post("/take")
@takes_body(BATCH_BODY_BYTES)
async def take(
    job: str, incarnation: Incarnation, pod: Pod, request: Request, damaged: Damaged = "raise", table: str = ""
) -> Response:
    """Three frames: what will be sent ahead (no payload), what was asked for, what is sent ahead."""
    node = node_of(request.scope)
    at_pod = node.table.find(job, incarnation, pod=pod)
    resources_of(request).enter_context(at_pod.use.under_way())
    at_pod.peers.heard.count_came(pod, table)
    wanted = BatchRequest.decode(await request.body())
    asked, epoch = await at_pod.asked_of_this_pod(wanted)
    room = AnswerRoom(request, node.sending_to_pods, at_pod.job, node.settings.wait_seconds)
    await room.enter(len(asked.positions))  # nothing was taken yet
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
    response = FrameResponse(frames, lambda sent: count_sent(node, pod, sent))
    if (size := at_pod.owner.table_size()) is not None:
        response.headers[TABLE_HEADER] = encode_count(*size)
    return response


@PEER_ROUTES.get("/heard")
async def heard(job: str, incarnation: Incarnation, pod: Pod, request: Request) -> dict[int, int]:
    """For a pod that goes on from its journal: by epoch, how much it has answered, as far as is known here."""
    node = node_of(request.scope)
    return node.table.find(job, incarnation, looked_at=True).peers.heard.of(pod)


@PEER_ROUTES.post("/samples")
@takes_body(SAMPLES_BODY_BYTES)
async def samples(
    job: str, incarnation: Incarnation, pod: Pod, request: Request, damaged: Damaged = "raise", repeats: bool = False
) -> Response:
    node = node_of(request.scope)
    at_pod = node.table.find(job, incarnation)
    resources_of(request).enter_context(at_pod.use.under_way())
    ids = checked_ids(at_pod, await request.body())
    room = AnswerRoom(request, node.sending_to_pods, at_pod.job, node.settings.wait_seconds)
    await room.enter(len(ids))
    payloads = await at_pod.owner.exact(ids, says_damage=damaged == "say", repeats=repeats)
    frame = OutgoingFrame(np.full(len(ids), -1), ids, payloads)
    room.holds(frame.total_bytes)
    return FrameResponse([frame], lambda sent: count_sent(node, pod, sent))


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
    node = node_of(request.scope)
    life = None if body is None else RankLife.decode(body.life)
    node.table.find(job, incarnation, pod=pod).rank_opens(epoch, rank, pod, life)
    return {"opened": True}


@PEER_ROUTES.post("/ranks/{rank}/asks")
async def rank_asks(job: str, rank: Number, incarnation: Incarnation, body: Opens, request: Request) -> dict[str, bool]:
    """Whether a process may ask as a rank by way of another pod. Changes nothing."""
    node = node_of(request.scope)
    at_pod = node.table.find(job, incarnation)
    at_pod.job.check_rank(rank)
    at_pod.home.leases.asks(rank, RankLife.decode(body.life), takes=False)
    return {"asks": True}


@PEER_ROUTES.post("/ranks/{rank}/ended")
async def rank_ended(
    job: str, rank: Number, incarnation: Incarnation, body: Ended, request: Request
) -> dict[str, bool]:
    node = node_of(request.scope)
    at_pod = node.table.find(job, incarnation)
    at_pod.job.check_rank(rank)
    ended, by = RankLife.decode(body.life), RankLife.decode(body.by)
    at_pod.home.leases.ended(rank, ended, by, takes=False)  # its home keeps the lease: a rank counts once
    return {"ended": True}


@PEER_ROUTES.put("/epochs/{epoch}/ranks/{rank}/trace")
@takes_body(lambda node, job: most_trace_bytes(node.table.find(job).job), in_pieces=True)
async def trace(job: str, epoch: Number, rank: Number, incarnation: Incarnation, request: Request) -> dict[str, int]:
    node = node_of(request.scope)
    at_pod = node.table.find(job, incarnation)
    async with coming_trace(request, at_pod.job, epoch, rank) as ids:
        await keep_trace(at_pod, epoch, rank, ids)
    return {"positions": len(ids)}


@PEER_ROUTES.put("/scores")
@takes_body(SCORES_BODY_BYTES)
async def scores(job: str, incarnation: Incarnation, request: Request) -> dict[str, Any]:
    """Of samples that this pod owns."""
    node = node_of(request.scope)
    at_pod = node.table.find(job, incarnation)
    ids, scores = read_scores(await request.body(), at_pod.job.layout.num_samples)
    return {"book": keep_scores(at_pod, ids, scores)}


@PEER_ROUTES.get("/epochs/{epoch}/ranks/{rank}/scores")
async def drawn_from(
    job: str, epoch: Number, rank: Number, start: Count, end: Count, incarnation: Incarnation, request: Request
) -> Response:
    """Of samples that this pod owns; see :func:`draw_from`."""
    node = node_of(request.scope)
    at_pod = node.table.find(job, incarnation)
    encoded = await encode_drawn(at_pod, epoch, rank, start, end)
    return Response(encoded, media_type="application/octet-stream")


@PEER_ROUTES.get("/told")  # the name that pods of earlier versions ask for
async def records_for_pod(
    job: str,
    incarnation: Incarnation,
    pod: Pod,
    life: Annotated[str, Query(max_length=64)],
    request: Request,
    everything: bool = False,
) -> Response:
    """For a pod that was restarted: records of what it had answered (refill.protocol.records)."""
    node = node_of(request.scope)
    at_pod = node.table.find(job, incarnation)
    if not 0 <= pod < at_pod.job.num_pods:
        raise InvalidInput(f"there is no pod {pod}; job {job} runs on {at_pod.job.num_pods}")
    records = at_pod.records.records_for(pod, life, everything=everything)
    return Response(records, media_type="application/octet-stream")


@PEER_ROUTES.put("/kept")
@takes_body(lambda node, job: _most_kept_bytes(node.table.find(job)))
async def keep(
    job: str, incarnation: Incarnation, pod: Pod, request: Request, of: Pod | None = None, run: str = ""
) -> dict[str, bool]:
    """From a pod that ends: records of what it has answered, handed over for its next run; or of what another pod
    has, whose run ``run`` has ended before, and that has not started again."""
    node = node_of(request.scope)
    records, of_pod = await request.body(), pod if of is None else of
    newest = node.fence.lives.newest(of_pod)
    kept = node.table.find(job, incarnation).records
    kept.hands_over(of_pod, records, run, newest.name if run and newest is not None else None)
    node.journal.keep(job, of_pod, records)
    return {"kept": True}


@PEER_ROUTES.put("/unknown")
@takes_body(lambda node, job: _most_unknown_bytes(node.table.find(job)))
async def unknown(job: str, incarnation: Incarnation, pod: Pod, request: Request) -> dict[str, bool]:
    """From a pod that recovered: records of which of its answers are unknown."""
    node = node_of(request.scope)
    records = await request.body()
    node.table.find(job, incarnation).records.unknown[pod] = records
    return {"kept": True}


@PEER_ROUTES.post("/move")
async def move(job: str, body: Registration, request: Request) -> dict[str, Any]:
    node = node_of(request.scope)
    return await node.moving.move(known_spec(node, body.spec), body.incarnation)


@PEER_ROUTES.post("/again")
async def again(job: str, body: Again, request: Request) -> dict[str, bool]:
    """For pod 0: see :meth:`NewRuns.begin`."""
    node = node_of(request.scope)
    return {"begun": await node.new_runs.begin(job, body.incarnation, body.may_wait)}


@PEER_ROUTES.get("/run")
async def run(job: str, incarnation: Incarnation, request: Request) -> dict[str, Any]:
    node = node_of(request.scope)
    return node.new_runs.run_here(node.table.find(job, incarnation, looked_at=True))


@PEER_ROUTES.put("/ended")
@takes_body(_MOST_PART_BYTES)
async def ended(job: str, request: Request) -> dict[str, bool]:
    """From the pod before this one: its part of the receipts of a run that has ended."""
    node = node_of(request.scope)
    try:
        part = RunPart.decode(await request.body())
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise InvalidInput(f"that is no part of a run: {error}") from error
    node.table.kept_parts.put(part)
    return {"kept": True}


@PEER_ROUTES.get("/runs/{epoch}")
async def runs(
    job: str, epoch: Number, request: Request, run: Annotated[str, Query(max_length=64)] = "", holder: Holder = ""
) -> list[dict[str, Any]]:
    node = node_of(request.scope)
    return await node.runs.parts_here(job, epoch, run, holder)


@PEER_ROUTES.get("/epochs/{epoch}/receipt")
async def receipt(job: str, epoch: Number, incarnation: Incarnation, request: Request) -> dict[str, Any]:
    node = node_of(request.scope)
    return await node.table.find(job, incarnation, looked_at=True).receipt_here(epoch)


@PEER_ROUTES.get("/epochs/{epoch}")
async def epoch_counts(job: str, epoch: Number, incarnation: Incarnation, request: Request) -> dict[str, Any]:
    node = node_of(request.scope)
    return counts_here(node.table.find(job, incarnation, looked_at=True), epoch)


def _most_unknown_bytes(at_pod: JobAtPod) -> int:
    return (1 << 10) + 32 * at_pod.job.spec.world_size


def _most_kept_bytes(at_pod: JobAtPod) -> int:
    """Of three epochs, 16 bytes for each sample and 8 for each position of a trace; and what ranks entered."""
    job = at_pod.job
    return (1 << 20) + 64 * (job.layout.num_samples + job.spec.world_size) + 8 * job.posted.most_positions
