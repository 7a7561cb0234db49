"""What is a pod made of? Assembly only: one node, one application for clients, one for peers."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI
from fastapi.responses import HTMLResponse

from refill_service.pod.cache_node import CacheNode
from refill_service.serving.api_page import api_page
from refill_service.serving.client_routes import CLIENT_ROUTES
from refill_service.serving.error_answers import add_error_answers
from refill_service.serving.health_routes import HEALTH_ROUTES
from refill_service.serving.last_answer import LastAnswer
from refill_service.serving.metrics import node_registry
from refill_service.serving.peer_routes import ALIVE_ROUTES, PEER_ROUTES
from refill_service.serving.planned_peer_routes import PLANNED_PEER_ROUTES
from refill_service.serving.planned_routes import PLANNED_ROUTES, PLANNED_ROUTES_OF_SEVERAL
from refill_service.serving.rank_routes import RANK_ROUTES
from refill_service.serving.receipt_routes import RECEIPT_ROUTES
from refill_service.serving.sampler_routes import SAMPLER_ROUTES

__all__ = ["ROUTES_FOR_CLIENTS", "client_app", "metrics_app", "peer_app"]

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


def client_app(node: CacheNode) -> FastAPI:
    """What clients and people talk to; ``/docs`` shows it."""
    app = FastAPI(
        title="refill",
        description="A cache pod: hands out samples of a dataset, each exactly once an epoch.",
        version="1",
        docs_url=None,
        redoc_url=None,
    )
    add_error_answers(app)
    app.add_middleware(LastAnswer, ordinal=node.settings.ordinal)
    _serve(node, app, *ROUTES_FOR_CLIENTS)
    app.state.registry = node_registry(node)

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(api_page(app.openapi()))

    return app


def metrics_app(node: CacheNode) -> FastAPI:
    """What Prometheus and the kubelet talk to, on a port of its own."""
    app = FastAPI(title="refill metrics", openapi_url=None)
    add_error_answers(app)
    _serve(node, app, HEALTH_ROUTES)
    app.state.registry = node_registry(node)
    return app


def peer_app(node: CacheNode) -> FastAPI:
    """What other pods talk to."""
    app = FastAPI(title="refill peers", openapi_url=None)
    add_error_answers(app)
    _serve(node, app, PLANNED_PEER_ROUTES, ALIVE_ROUTES, PEER_ROUTES)
    return app


def _serve(node: CacheNode, app: FastAPI, *routers: APIRouter) -> None:
    """The routes as they are: ``include_router`` would make each of them anew, half of what a pod's start costs."""
    app.state.node = node
    for router in routers:
        app.router.routes.extend(router.routes)
