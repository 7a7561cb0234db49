"""What is a pod made of? Assembly only: one node, one application for clients, one for peers."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI
from fastapi.responses import HTMLResponse

from refill_service.pod.cache_node import CacheNode
from refill_service.serving.api_page import api_page
from refill_service.serving.http_routes import add_error_answers, client_routes, health_routes
from refill_service.serving.last_answer import LastAnswer
from refill_service.serving.life_check import LifeCheck
from refill_service.serving.peer_routes import lives_routes, peer_routes

__all__ = ["client_app", "metrics_app", "peer_app"]


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
    app.add_middleware(LifeCheck, fence=node.fence, of_pods=False)
    _serve(app, health_routes(node), client_routes(node))

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(api_page(app.openapi()))

    return app


def metrics_app(node: CacheNode) -> FastAPI:
    """What Prometheus and the kubelet talk to, on a port of its own."""
    app = FastAPI(title="refill metrics", openapi_url=None)
    add_error_answers(app)
    _serve(app, health_routes(node))
    return app


def peer_app(node: CacheNode) -> FastAPI:
    """What other pods talk to."""
    app = FastAPI(title="refill peers", openapi_url=None)
    add_error_answers(app)
    app.add_middleware(LifeCheck, fence=node.fence, of_pods=True)
    _serve(app, lives_routes(node), peer_routes(node))
    return app


def _serve(app: FastAPI, *routers: APIRouter) -> None:
    """The routes themselves: ``include_router`` would make each of them anew, half of what a pod's start costs."""
    for router in routers:
        app.router.routes.extend(router.routes)
