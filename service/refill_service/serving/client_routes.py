"""What does a pod answer to clients that register jobs and ask for samples? Parses, asks the node, responds."""

from __future__ import annotations

import asyncio
import logging
from heapq import nsmallest
from typing import Annotated, Any, Literal

import numpy as np
from fastapi import APIRouter, Body, Query, Request, Response

from refill import __version__
from refill.build import VERSION_FIELD
from refill.errors import UnknownJob
from refill.protocol.wire_format import BatchRequest
from refill_service.memory.payload import OutgoingFrame
from refill_service.serving.access_log import was_done
from refill_service.serving.client_requests import (
    ANSWERS_FRAME,
    BATCH_BODY_BYTES,
    SAMPLES_BODY_BYTES,
    DatasetUrl,
    Incarnation,
    JobName,
    Life,
    Number,
    answered,
    checked_ids,
    in_use,
    is_the_rank,
    opened_dataset,
    spec_of,
)
from refill_service.serving.door import holder_of
from refill_service.serving.error_answers import ERROR_ANSWERS
from refill_service.serving.frame_response import AnswerRoom
from refill_service.serving.request_guard import node_of, takes_body

_DESCRIBED_AT_ONCE = 50
LISTED_JOBS = 500
"""In one answer: who wants more asks again, after the last."""


log = logging.getLogger(__name__)

CLIENT_ROUTES = APIRouter(responses=ERROR_ANSWERS)


@CLIENT_ROUTES.get("/v1/pods", tags=["health"], summary="URLs of all pods for clients, as this pod was told them.")
async def pods(request: Request) -> dict[str, Any]:
    node = node_of(request.scope)
    return {"ordinal": node.settings.ordinal, "pods": list(node.settings.pod_urls)}


@CLIENT_ROUTES.get(
    "/v1/dataset",
    tags=["data"],
    summary="How many samples and bytes a dataset has, and what a job may keep for itself here, without a job.",
)
async def dataset(url: DatasetUrl, request: Request) -> dict[str, Any]:
    node, found = node_of(request.scope), await opened_dataset(request, url)
    memory = node.settings.pod_memory
    return {
        "dataset": found.url,
        "num_samples": found.num_samples,
        "total_bytes": found.index.sample_bytes,
        "fingerprint": found.version,
        "metadata": found.index.metadata,
        "job_memory_bytes": int(memory.for_jobs_bytes * memory.kept_fraction),
        "most_memory_bytes": node.planned.most_memory(found),
        "num_pods": memory.num_pods,
    }


@CLIENT_ROUTES.get("/v1/jobs", tags=["jobs"], summary=f"The jobs of this pod by name, {LISTED_JOBS} at most.")
async def jobs(
    request: Request,
    after: Annotated[str, Query(max_length=128, description="The last name of those that are known already.")] = "",
) -> list[dict[str, Any]]:
    node = node_of(request.scope)
    team = holder_of(request)
    live = node.table.of_team(team)
    planned = {name: job for name, job in node.planned.jobs.items() if job.spec.holder in ("", team)}
    found: list[dict[str, Any]] = []
    for name in nsmallest(LISTED_JOBS, (name for name in (*live, *planned) if name > after)):
        if name in live:
            found.append(live[name].job.info() | live[name].users())
        else:
            found.append(planned[name].info() | planned[name].users())
        if len(found) % _DESCRIBED_AT_ONCE == 0:
            await asyncio.sleep(0)
    return [{name: value for name, value in each.items() if name not in ("metadata", "share_sizes")} for each in found]


@CLIENT_ROUTES.put(
    "/v1/jobs/{job}", tags=["jobs"], summary="Register a job on all pods. Doing it again changes nothing."
)
async def register(
    job: JobName,
    settings: Annotated[dict[str, Any], Body()],
    request: Request,
    incarnation: Incarnation = None,
) -> dict[str, Any]:
    node = node_of(request.scope)
    spec = spec_of(job, settings, request)
    if spec.is_planned:
        planned = await node.planned.register(spec, None, begun=False, again=False)
        was_done(request, "registered", spec.dataset)
        return planned | {VERSION_FIELD: __version__}
    info = await node.live.register(spec, incarnation or "")
    was_done(request, "registered", info["spec"]["dataset"])
    return info | {VERSION_FIELD: __version__}


@CLIENT_ROUTES.get("/v1/jobs/{job}", tags=["jobs"], summary="Settings and state of a job.")
async def describe(job: JobName, request: Request) -> dict[str, Any]:
    node = node_of(request.scope)
    if job in node.planned.jobs:
        return node.planned.find(job, looked_at=True).info()
    return node.table.find(job, looked_at=True).job.info()


@CLIENT_ROUTES.delete("/v1/jobs/{job}", tags=["jobs"], summary="End a job on all pods and free its memory.")
async def end(job: JobName, request: Request) -> dict[str, Any]:
    """``warning``: which pods could not be told of it, if there are such."""
    node = node_of(request.scope)
    removed, away = await node.end(job, holder_of(request))
    if not removed:
        raise UnknownJob(f"no pod knows a job {job}", job=job)
    was_done(request, "ended")
    if not away:
        return {"removed": True}
    pods, seconds = ", ".join(map(str, away)), f"{node.settings.job_idle_seconds:,.0f}"
    warning = (
        f"job {job} was ended, but not on pods that are away ({pods}): one that comes back without a restart may have "
        f"it for {seconds} s more. End it once more then, or give the next run another name"
    )
    log.warning("%s", warning)
    return {"removed": True, "warning": warning}


@CLIENT_ROUTES.post(
    "/v1/jobs/{job}/batch",
    summary="The samples of one batch of positions.",
    **ANSWERS_FRAME,
)
@takes_body(BATCH_BODY_BYTES)
async def batch(
    job: JobName,
    request: Request,
    incarnation: Incarnation = None,
    life: Life = None,
    allow_skipped: Annotated[
        bool, Query(description="Whether the rank may have left out positions of earlier epochs.")
    ] = False,
    damaged: Annotated[
        Literal["raise", "say"],
        Query(description="What comes for a damaged sample: an error in place of the batch, or in place of its bytes."),
    ] = "raise",
) -> Response:
    at_pod = in_use(request, job, incarnation)
    wanted = BatchRequest.decode(await request.body())
    is_the_rank(request, at_pod, wanted.rank, life)
    opened = await at_pod.home.open(wanted, allow_skipped=allow_skipped, says_damage=damaged == "say")
    room = AnswerRoom(request, node_of(request.scope).sending_to_clients, at_pod.job)
    await room.enter(len(wanted.positions))  # nothing was taken yet
    batch = await at_pod.home.assemble(opened)
    return answered(request, room, OutgoingFrame(batch.positions, batch.sample_ids, batch.payloads))


@CLIENT_ROUTES.post(
    "/v1/jobs/{job}/samples",
    summary="The samples with these ids (int64), outside of any epoch.",
    **ANSWERS_FRAME,
)
@takes_body(SAMPLES_BODY_BYTES)
async def samples(job: JobName, request: Request, incarnation: Incarnation = None) -> Response:
    at_pod = in_use(request, job, incarnation)
    ids = checked_ids(at_pod, await request.body())
    room = AnswerRoom(request, node_of(request.scope).sending_to_clients, at_pod.job)
    await room.enter(len(ids))
    return answered(request, room, OutgoingFrame(np.full(len(ids), -1), ids, await at_pod.home.exact.read(ids)))


Run = Annotated[
    str,
    Query(
        max_length=64,
        description="Which run of this job: its id as in /v1/runs, or the beginning of that. None: the one "
        "that runs, else the one that ended last.",
    ),
]

RECEIPT_ROUTES = APIRouter(responses=ERROR_ANSWERS)


@RECEIPT_ROUTES.get(
    "/v1/jobs/{job}/epochs/{epoch}", tags=["jobs"], summary="What an epoch cost: counts of each pod, and their sum."
)
async def epoch_counts(job: JobName, epoch: Number, request: Request, run: Run = "") -> dict[str, Any]:
    node = node_of(request.scope)
    if (found := await node.planned.receipts.counts(job, epoch, holder_of(request), run)) is not None:
        return found
    return await node.runs.counts(job, epoch, run, holder_of(request))


@RECEIPT_ROUTES.get(
    "/v1/jobs/{job}/epochs/{epoch}/receipt",
    tags=["jobs"],
    summary="The receipt of an epoch: what it delivered to whom.",
)
async def receipt(job: JobName, epoch: Number, request: Request, run: Run = "") -> dict[str, Any]:
    node = node_of(request.scope)
    if (found := await node.planned.receipts.receipt(job, epoch, holder_of(request), run)) is not None:
        return found
    return await node.runs.receipt(job, epoch, run, holder_of(request))


@RECEIPT_ROUTES.get("/v1/runs", tags=["jobs"], summary="Runs that have ended, and whose receipts this pod keeps.")
async def runs(request: Request) -> list[dict[str, Any]]:
    node = node_of(request.scope)
    return node.runs.ended(holder_of(request)) + node.planned.receipts.ended(holder_of(request))
