"""What is a pod made of, for who comes to it? Its doors, for clients, for other pods and for metrics, each with its
routes. Those that say how the pod is, and ``/docs``, are here.

``/docs`` is one page that loads nothing from elsewhere. FastAPI's own pages load their scripts from the internet: they
stay empty where there is none, and run others' code in a page of the pod.
"""

from __future__ import annotations

import json
from html import escape
from typing import Annotated, Any, Literal, NamedTuple

from fastapi import APIRouter, FastAPI, Query, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from refill import __version__
from refill.build import commit
from refill_service.memory.loop_turns import LoopTurns
from refill_service.pod.cache_node import CacheNode, PodPhase
from refill_service.serving.access_log import HOLDER
from refill_service.serving.batch_door import BatchAtOnce, BatchDoor
from refill_service.serving.client_routes import CLIENT_ROUTES, RECEIPT_ROUTES
from refill_service.serving.door import HEALTH, METRICS, READY, Door, PodNames
from refill_service.serving.error_answers import ERROR_ANSWERS, add_error_answers
from refill_service.serving.metrics import text_of
from refill_service.serving.peer_routes import ALIVE_ROUTES, PEER_ROUTES
from refill_service.serving.planned_peer_routes import PLANNED_PEER_ROUTES
from refill_service.serving.planned_routes import PLANNED_ROUTES, PLANNED_ROUTES_OF_SEVERAL
from refill_service.serving.rank_routes import RANK_ROUTES
from refill_service.serving.request_guard import RequestGuard, node_of
from refill_service.serving.sampler_routes import SAMPLER_ROUTES
from refill_service.serving.silent_peers import SilentPeers
from refill_service.serving.tokens import Tokens

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
    team = request.scope.get(HOLDER) if node.quotas.there_are_several else None
    return Response(await text_of(node, team), media_type=CONTENT_TYPE_LATEST)


ROUTES_FOR_CLIENTS = (
    PLANNED_ROUTES,
    PLANNED_ROUTES_OF_SEVERAL,
    HEALTH_ROUTES,
    CLIENT_ROUTES,
    SAMPLER_ROUTES,
    RANK_ROUTES,
    RECEIPT_ROUTES,
)
"""In this order they are tried: those of batches first."""


class Doors(NamedTuple):
    """The ways by which requests of clients come into one pod.

    :param at_once: answers batches of clients in the moment in which they have come, where it can.
    """

    clients: RequestGuard
    at_once: BatchAtOnce
    pods: RequestGuard
    metrics: RequestGuard | None


def doors_of(
    node: CacheNode,
    turns: LoopTurns,
    silent_peers: SilentPeers,
    client_tokens: Tokens | None = None,
    peer_tokens: Tokens | None = None,
) -> Doors:
    """:param turns: in which teams are answered, at all doors."""
    settings, job_holder = node.settings, node.table.holder
    names = None if client_tokens else PodNames(settings)  # who has a token may call the pod what they like
    for_clients = Door(settings, job_holder, client_tokens, names=names, of_runs=RECEIPT_ROUTES.routes)
    clients = RequestGuard(
        BatchDoor(client_app(node)), for_clients, node.bodies, node.requests, turns, access_log=settings.access_log
    )
    pods = RequestGuard(
        _peer_app(node),
        Door(settings, job_holder, peer_tokens, of_pods=silent_peers),
        node.bodies_of_pods,
        node.requests,
        turns,
        settings.client_timeout_seconds,
        access_log=settings.access_log,
    )
    metrics = None
    if settings.metrics_port:
        for_anybody = Door(settings, job_holder, names=PodNames(settings), for_keepers=True)
        metrics = RequestGuard(_metrics_app(node), for_anybody, node.bodies, node.requests, turns)
    return Doors(clients, BatchAtOnce(node, clients), pods, metrics)


def client_app(node: CacheNode) -> FastAPI:
    """What clients and people talk to; ``/docs`` shows it."""
    app = FastAPI(
        title="refill",
        description="A cache pod: hands out samples of a dataset, each exactly once an epoch.",
        version="1",
        docs_url=None,
        redoc_url=None,
    )
    _serve(node, app, *ROUTES_FOR_CLIENTS)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(_page_of(app.openapi()))

    return app


def _metrics_app(node: CacheNode) -> FastAPI:
    """What Prometheus and the kubelet talk to, on a port of its own."""
    app = FastAPI(title="refill metrics", openapi_url=None)
    _serve(node, app, HEALTH_ROUTES)
    return app


def _peer_app(node: CacheNode) -> FastAPI:
    """What other pods talk to."""
    app = FastAPI(title="refill peers", openapi_url=None)
    _serve(node, app, PLANNED_PEER_ROUTES, ALIVE_ROUTES, PEER_ROUTES)
    return app


def _serve(node: CacheNode, app: FastAPI, *routers: APIRouter) -> None:
    """The routes as they are: ``include_router`` would make each of them anew, half of what a pod's start costs."""
    add_error_answers(app)
    app.state.node = node
    for router in routers:
        app.router.routes.extend(router.routes)


_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font: 13px/1.4 ui-monospace, monospace; }
h2 { margin-top: 2.5rem; } section { border-top: 1px solid #ccc; padding: .6rem 0; }
table { border-collapse: collapse; } td { padding: .1rem 1rem .1rem 0; vertical-align: top; }
"""


def _page_of(openapi: dict[str, Any]) -> str:
    """What ``/docs`` shows.

    :param openapi: the description that ``/openapi.json`` is.
    """
    info = openapi["info"]
    by_tag: dict[str, list[str]] = {}
    for path, methods in openapi["paths"].items():
        for method, operation in methods.items():
            by_tag.setdefault(operation.get("tags", ["others"])[0], []).append(_operation(method, path, operation))
    groups = "".join(f"<h2>{escape(tag)}</h2>{''.join(found)}" for tag, found in by_tag.items())
    schemas = json.dumps(openapi.get("components", {}).get("schemas", {}), indent=2)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(info["title"])}</title>'
        f"<style>{_STYLE}</style><h1>{escape(info['title'])}</h1><p>{escape(info.get('description', ''))}</p>"
        f'<p>For programs: <a href="openapi.json">openapi.json</a>.</p>{groups}'
        f"<h2>Schemas</h2><pre>{escape(schemas)}</pre></html>"
    )


def _operation(method: str, path: str, operation: dict[str, Any]) -> str:
    rows = [
        (each["name"], f"{each['in']}{', required' if each.get('required') else ''}", each.get("description", ""))
        for each in operation.get("parameters", [])
    ]
    if body := operation.get("requestBody"):
        rows.append(("body", ", ".join(body["content"]), _name_of(body)))
    rows += [(f"answer {status}", "", found["description"]) for status, found in operation["responses"].items()]
    table = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return (
        f"<section><p><code><b>{method.upper()}</b> {escape(path)}</code></p>"
        f"<p>{escape(operation.get('summary', ''))}</p><table>{table}</table></section>"
    )


def _name_of(body: dict[str, Any]) -> str:
    """Of its schema, where it has one."""
    schema: dict[str, Any] = next(iter(body["content"].values())).get("schema", {})
    return str(schema.get("$ref", "")).rpartition("/")[2]
