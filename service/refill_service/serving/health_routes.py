"""What does a pod answer to probes and to Prometheus?"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

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
    node = node_of(request.scope)
    if node.quotas.there_are_several and (team := request.scope.get(HOLDER)) is not None:
        return Response(generate_latest(node_registry(node, team)), media_type=CONTENT_TYPE_LATEST)
    return Response(generate_latest(request.app.state.registry), media_type=CONTENT_TYPE_LATEST)
