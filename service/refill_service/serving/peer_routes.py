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
from refill_service.jobs.trace_posting import keep_trace
from refill_service.membership.resuming import Checkpoint
from refill_service.memory.outgoing_frame import OutgoingFrame
from refill_service.peers.peers import PODS_HEADER, TABLE_HEADER
from refill_service.pod.cache_node import CacheNode
from refill_service.serving.answer_room import AnswerRoom
from refill_service.serving.frame_response import FrameResponse
from refill_service.serving.http_routes import BATCH_BODY_BYTES, SAMPLES_BODY_BYTES, CheckpointBody, checked_ids
from refill_service.serving.request_body import takes_body
from refill_service.serving.request_guard import resources_of
from refill_service.serving.trace_stream import coming_trace, most_trace_bytes

__all__ = ["lives_routes", "peer_routes"]

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


class Resume(BaseModel):
    """See :meth:`Resuming.resume`."""

    spec: dict[str, Any]
    checkpoint: CheckpointBody


def lives_routes(node: CacheNode) -> APIRouter:
    """Which run of each pod is the newest; see :mod:`refill_service.cache_core.pod_lives`."""
    routes = APIRouter(prefix="/peer/v1/lives", dependencies=[_same_number_of_pods(node)])
    fence = node.fence

    @routes.get("")
    async def confirm() -> dict[str, bool]:
        """To a pod that asks whether it has a successor: it was refused before, if so."""
        return {"confirmed": True}

    @routes.put("/{pod}")
    async def announced(pod: Ordinal, life: PodLifeText) -> dict[str, Any]:
        return fence.announced(pod, PodLife.decode(life)).to_dict()

    @routes.delete("/{pod}")
    async def ended(pod: Ordinal, life: PodLifeText) -> dict[str, bool]:
        fence.lives.ended(pod, PodLife.decode(life))
        return {"ended": True}

    return routes


def peer_routes(node: CacheNode) -> APIRouter:
    def known_spec(told: dict[str, Any]) -> JobSpec:
        """Another pod has checked it, by its own settings."""
        spec = JobSpec.from_dict(told)
        node.settings.check_dataset(spec.dataset)
        return spec

    routes = APIRouter(prefix="/peer/v1/jobs/{job}", dependencies=[_same_number_of_pods(node)])

    def count_sent(pod: int, sent: int) -> None:
        node.peer_bytes_sent[pod] = node.peer_bytes_sent.get(pod, 0) + sent

    @routes.put("")
    async def register(job: str, body: Registration) -> dict[str, Any]:
        return await node.jobs_here.register(
            known_spec(body.spec), body.incarnation, body.fingerprint, begun=body.begun
        )

    @routes.post("/opening")
    async def opening(job: str, body: Opening) -> dict[str, bool]:
        node.settings.check_dataset(body.dataset)
        if job not in node.jobs:
            node.opening.begin(body.dataset)
        return {"opening": True}

    @routes.get("")
    async def known(job: str) -> dict[str, Any]:
        return node.jobs_here.known(job).to_dict()

    @routes.delete("")
    async def remove(job: str, holder: Holder = "") -> dict[str, bool]:
        return {"removed": await node.table.remove(job, holder)}

    @routes.post("/take")
    @takes_body(BATCH_BODY_BYTES)
    async def take(
        job: str, incarnation: Incarnation, pod: Pod, request: Request, damaged: Damaged = "raise", table: str = ""
    ) -> Response:
        """Three frames: what will be sent ahead (no payload), what was asked for, what is sent ahead."""
        at_pod = node.table.find(job, incarnation)
        resources_of(request).enter_context(at_pod.in_use())
        at_pod.peers.heard.told(pod, table)
        wanted = BatchRequest.decode(await request.body())
        asked, epoch = await at_pod.asked_of_this_pod(wanted)
        room = AnswerRoom(request, node.sending_to_pods, at_pod, node.settings.wait_seconds)
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
        response = FrameResponse(frames, lambda sent: count_sent(pod, sent))
        if (size := at_pod.owner.table_size()) is not None:
            response.headers[TABLE_HEADER] = encode_count(*size)
        return response

    @routes.get("/heard")
    async def heard(job: str, incarnation: Incarnation, pod: Pod) -> dict[int, int]:
        """For a pod that goes on from its journal: by epoch, how much it has answered, as far as is known here."""
        return node.table.find(job, incarnation, looked_at=True).peers.heard.of(pod)

    @routes.post("/samples")
    @takes_body(SAMPLES_BODY_BYTES)
    async def samples(
        job: str, incarnation: Incarnation, pod: Pod, request: Request, damaged: Damaged = "raise"
    ) -> Response:
        at_pod = node.table.find(job, incarnation)
        resources_of(request).enter_context(at_pod.in_use())
        ids = checked_ids(at_pod, await request.body())
        room = AnswerRoom(request, node.sending_to_pods, at_pod, node.settings.wait_seconds)
        await room.enter(len(ids))
        payloads = await at_pod.owner.exact(ids, says_damage=damaged == "say")
        frame = OutgoingFrame(np.full(len(ids), -1), ids, payloads)
        room.holds(frame.total_bytes)
        return FrameResponse([frame], lambda sent: count_sent(pod, sent))

    @routes.post("/epochs/{epoch}/ranks/{rank}")
    async def rank_opens(
        job: str, epoch: Number, rank: Number, incarnation: Incarnation, pod: Pod, body: Opens | None = None
    ) -> dict[str, bool]:
        life = None if body is None else RankLife.decode(body.life)
        node.table.find(job, incarnation).rank_opens(epoch, rank, pod, life)
        return {"opened": True}

    @routes.post("/ranks/{rank}/asks")
    async def rank_asks(job: str, rank: Number, incarnation: Incarnation, body: Opens) -> dict[str, bool]:
        """Whether a process may ask as a rank by way of another pod. Changes nothing."""
        at_pod = node.table.find(job, incarnation)
        at_pod.job.check_rank(rank)
        at_pod.home.leases.asks(rank, RankLife.decode(body.life), takes=False)
        return {"asks": True}

    @routes.post("/ranks/{rank}/ended")
    async def rank_ended(job: str, rank: Number, incarnation: Incarnation, body: Ended) -> dict[str, bool]:
        at_pod = node.table.find(job, incarnation)
        at_pod.job.check_rank(rank)
        ended, by = RankLife.decode(body.life), RankLife.decode(body.by)
        at_pod.home.leases.ended(rank, ended, by, takes=False)  # its home keeps the lease: a rank counts once
        return {"ended": True}

    @routes.put("/epochs/{epoch}/ranks/{rank}/trace")
    @takes_body(lambda job: most_trace_bytes(node.table.find(job).job), in_pieces=True)
    async def trace(
        job: str, epoch: Number, rank: Number, incarnation: Incarnation, request: Request
    ) -> dict[str, int]:
        at_pod = node.table.find(job, incarnation)
        async with coming_trace(request, at_pod.job, epoch, rank) as ids:
            await keep_trace(at_pod, epoch, rank, ids)
        return {"positions": len(ids)}

    @routes.get("/told")  # the name that pods of earlier versions ask for
    async def records_for_pod(
        job: str,
        incarnation: Incarnation,
        pod: Pod,
        life: Annotated[str, Query(max_length=64)],
        everything: bool = False,
    ) -> Response:
        """For a pod that was restarted: records of what it had answered (refill.protocol.records)."""
        at_pod = node.table.find(job, incarnation)
        if not 0 <= pod < at_pod.job.num_pods:
            raise InvalidInput(f"there is no pod {pod}; job {job} runs on {at_pod.job.num_pods}")
        records = at_pod.records.records_for(pod, life, everything=everything)
        return Response(records, media_type="application/octet-stream")

    @routes.put("/kept")
    @takes_body(lambda job: _most_kept_bytes(node.table.find(job)))
    async def keep(
        job: str, incarnation: Incarnation, pod: Pod, request: Request, of: Pod | None = None, run: str = ""
    ) -> dict[str, bool]:
        """From a pod that ends: records of what it has answered, handed over for its next run; or of what another pod
        has, whose run ``run`` has ended before, and that has not started again."""
        records, of_pod = await request.body(), pod if of is None else of
        newest = node.fence.lives.newest(of_pod)
        kept = node.table.find(job, incarnation).records
        kept.hands_over(of_pod, records, run, newest.name if run and newest is not None else None)
        node.journal.keep(job, of_pod, records)
        return {"kept": True}

    @routes.put("/unknown")
    @takes_body(lambda job: _most_unknown_bytes(node.table.find(job)))
    async def unknown(job: str, incarnation: Incarnation, pod: Pod, request: Request) -> dict[str, bool]:
        """From a pod that recovered: records of which of its answers are unknown."""
        records = await request.body()
        node.table.find(job, incarnation).records.unknown[pod] = records
        return {"kept": True}

    @routes.post("/resume")
    async def resume(job: str, body: Resume) -> dict[str, Any]:
        return await node.resuming.resume(known_spec(body.spec), Checkpoint(**body.checkpoint.model_dump()))

    @routes.post("/move")
    async def move(job: str, body: Registration) -> dict[str, Any]:
        return await node.moving.move(known_spec(body.spec), body.incarnation)

    @routes.get("/consumed")
    async def consumed(job: str, incarnation: Incarnation, epoch: Count, position: Count, resumed: str) -> Response:
        """For pod 0, which resumes a job: int64, see :meth:`Resuming.consumed`."""
        found = node.resuming.consumed(job, Checkpoint(incarnation, epoch, position), resumed)
        return Response(found.astype("<i8").tobytes(), media_type="application/octet-stream")

    @routes.put("/resumed")
    async def replace(job: str, body: Registration) -> dict[str, bool]:
        await node.jobs_here.replace(known_spec(body.spec), body.incarnation)
        return {"resumed": True}

    @routes.get("/resumed")
    async def resumed(job: str, incarnation: Incarnation) -> Response:
        """Of what is left of the epoch (:class:`ResumedEpoch`)."""
        return Response(node.jobs_here.resumed(job, incarnation).encode(), media_type="application/octet-stream")

    @routes.post("/again")
    async def again(job: str, body: Again) -> dict[str, bool]:
        """For pod 0: see :meth:`NewRuns.begin`."""
        return {"begun": await node.new_runs.begin(job, body.incarnation, body.may_wait)}

    @routes.get("/run")
    async def run(job: str, incarnation: Incarnation) -> dict[str, Any]:
        return node.new_runs.run_here(node.table.find(job, incarnation, looked_at=True))

    @routes.put("/ended")
    @takes_body(_MOST_PART_BYTES)
    async def ended(job: str, request: Request) -> dict[str, bool]:
        """From the pod before this one: its part of the receipts of a run that has ended."""
        try:
            part = RunPart.decode(await request.body())
        except (ValueError, KeyError, TypeError, zlib.error) as error:
            raise InvalidInput(f"that is no part of a run: {error}") from error
        node.table.kept_parts.put(part)
        return {"kept": True}

    @routes.get("/runs/{epoch}")
    async def runs(
        job: str, epoch: Number, run: Annotated[str, Query(max_length=64)] = "", holder: Holder = ""
    ) -> list[dict[str, Any]]:
        return await node.runs.parts_here(job, epoch, run, holder)

    @routes.get("/epochs/{epoch}/receipt")
    async def receipt(job: str, epoch: Number, incarnation: Incarnation) -> dict[str, Any]:
        return await node.table.find(job, incarnation, looked_at=True).receipt_here(epoch)

    @routes.get("/epochs/{epoch}")
    async def epoch_counts(job: str, epoch: Number, incarnation: Incarnation) -> dict[str, Any]:
        return counts_here(node.table.find(job, incarnation, looked_at=True), epoch)

    return routes


def _same_number_of_pods(node: CacheNode) -> Any:
    def check(pods: Annotated[int | None, Header(alias=PODS_HEADER)] = None) -> None:
        if pods is not None and pods != node.settings.num_pods:
            raise PodRecovering(
                f"pod {node.settings.ordinal} is one of {node.settings.num_pods} and was asked by one of {pods}: pods "
                "are being replaced",
                pod=node.settings.ordinal,
            )

    return Depends(check)


def _most_unknown_bytes(at_pod: JobAtPod) -> int:
    return (1 << 10) + 32 * at_pod.job.spec.world_size


def _most_kept_bytes(at_pod: JobAtPod) -> int:
    """Of three epochs, 16 bytes for each sample and 8 for each position of a trace; and what ranks entered."""
    job = at_pod.job
    return (1 << 20) + 64 * (job.layout.num_samples + job.spec.world_size) + 8 * job.posted.most_positions
