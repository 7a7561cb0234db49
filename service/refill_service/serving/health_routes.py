"""What does a pod answer to probes and to Prometheus?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from refill import __version__
from refill.build import commit
from refill_service.pod.pod_phase import PodPhase
from refill_service.serving.access_log import HOLDER
from refill_service.serving.error_answers import ERROR_ANSWERS
from refill_service.serving.metrics import node_registry
from refill_service.serving.node_of import node_of
from refill_service.serving.probes import HEALTH, METRICS, READY

__all__ = ["HEALTH_ROUTES"]

_READY_WHILE_ENDING = (
    "`ready`: a pod that ends is called ready, too. For a kubelet, which knows that it ends, and would warn of it."
)
_NOT_READY: dict[int | str, dict[str, Any]] = {503: {"description": "The pod starts or stops."}}

_PIECE_NANOSECONDS = 1_000_000

HEALTH_ROUTES = APIRouter(responses=ERROR_ANSWERS)


@HEALTH_ROUTES.get(HEALTH, tags=["health"], summary="The process answers.")
async def healthz() -> dict[str, str]:
    return {"status": "ok", "version": __version__, "commit": commit()}


@HEALTH_ROUTES.get(READY, tags=["health"], summary="The pod takes requests.", responses=_NOT_READY)
async def readyz(
    request: Request, ending: Annotated[Literal["ready", ""], Query(description=_READY_WHILE_ENDING)] = ""
) -> JSONResponse:
    node = node_of(request.scope)
    health = {"status": node.phase.value, "ordinal": node.settings.ordinal, "pods": node.settings.num_pods}
    is_ready = node.phase is PodPhase.READY or (bool(ending) and node.phase is PodPhase.STOPPING)
    return JSONResponse(health, status_code=200 if is_ready else 503)


@HEALTH_ROUTES.get(METRICS, tags=["health"], summary="Metrics in Prometheus' format.", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    node, registry = node_of(request.scope), request.app.state.registry
    if node.quotas.there_are_several and (team := request.scope.get(HOLDER)) is not None:
        registry = node_registry(node, team)
    return Response(await _in_pieces(registry), media_type=CONTENT_TYPE_LATEST)


class _One(Collector):
    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        yield self._metric


async def _in_pieces(registry: CollectorRegistry) -> bytes:
    """All metrics as text. It takes milliseconds, and others have their turns in between."""
    pieces, since = [], time.thread_time_ns()
    for metric in registry.collect():
        pieces.append(generate_latest(_One(metric)))
        if time.thread_time_ns() > since + _PIECE_NANOSECONDS:
            await asyncio.sleep(0)
            since = time.thread_time_ns()
    return b"".join(pieces)
