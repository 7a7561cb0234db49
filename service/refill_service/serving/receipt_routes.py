"""What does a pod answer of epochs that were delivered, and of runs that have ended? Counts and receipts."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request

from refill_service.serving.client_requests import JobName, Number
from refill_service.serving.door import holder_of
from refill_service.serving.error_answers import ERROR_ANSWERS
from refill_service.serving.request_guard import node_of

__all__ = ["RECEIPT_ROUTES"]

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
    if (found := await node.planned.counts(job, epoch, holder_of(request), run)) is not None:
        return found
    return await node.runs.counts(job, epoch, run, holder_of(request))


@RECEIPT_ROUTES.get(
    "/v1/jobs/{job}/epochs/{epoch}/receipt",
    tags=["jobs"],
    summary="The receipt of an epoch: what it delivered to whom.",
)
async def receipt(job: JobName, epoch: Number, request: Request, run: Run = "") -> dict[str, Any]:
    node = node_of(request.scope)
    if (found := await node.planned.receipt(job, epoch, holder_of(request), run)) is not None:
        return found
    return await node.runs.receipt(job, epoch, run, holder_of(request))


@RECEIPT_ROUTES.get("/v1/runs", tags=["jobs"], summary="Runs that have ended, and whose receipts this pod keeps.")
async def runs(request: Request) -> list[dict[str, Any]]:
    node = node_of(request.scope)
    return node.runs.ended(holder_of(request)) + node.planned.ended(holder_of(request))
