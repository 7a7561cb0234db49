"""Where do batches of planned jobs come in? By a door of their own, ahead of all routes.

A route is behind ten layers of its framework, which take as long as the pod takes for a whole batch. Nothing is left
out here that those see to: who asks has been checked before (:mod:`.access`), as what a request may hold; errors leave
in the one form; and a pod that ends says so.
"""

from __future__ import annotations

import asyncio

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from refill.errors import PodUnreachable, RefillError
from refill_service.pod.cache_node import CacheNode
from refill_service.serving.error_answers import SaidErrors, invalid_query
from refill_service.serving.planned_routes import batch, batches
from refill_service.serving.request_guard import PeerGone, wire_answer

__all__ = ["BatchDoor"]

_JOBS, _BATCH, _BATCHES = "/v1/jobs/", "/planned/batch", "/v1/batches"


class BatchDoor:
    """An ASGI application around that of clients, which answers all else.

    :param routes: whose pod this is.
    """

    def __init__(self, routes: FastAPI) -> None:
        self._routes = routes
        self._node: CacheNode = routes.state.node
        self._errors = SaidErrors()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST" and scope["path"] == _BATCHES:
            scope["endpoint"], scope["path_params"] = batches, {}
        elif (job := _job_of(scope)) is not None:
            scope["endpoint"], scope["path_params"] = batch, {"job": job}
        else:
            await self._routes(scope, receive, send)
            return
        scope["app"], begun = self._routes, False

        async def answer(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
            await send(message)

        try:
            response = await self._answer_of(scope, receive)
            if response is not None:
                await response(scope, receive, answer)
        except asyncio.CancelledError:
            if begun:
                raise
            ordinal = self._node.settings.ordinal
            await _refusal(PodUnreachable(f"pod {ordinal} stops", pod=ordinal))(scope, receive, answer)

    async def _answer_of(self, scope: Scope, receive: Receive) -> Response | None:
        """None: it has been answered, or nobody is there to read it."""
        try:
            found: Response = await scope["endpoint"](Request(scope, receive))
            return found
        except RefillError as error:
            self._errors.refused(error)
            return _refusal(error)
        except RequestValidationError as error:
            return _refusal(invalid_query(error))
        except (HTTPException, ClientDisconnect):  # its body was refused, or did not come
            return None
        except PeerGone:
            raise
        except Exception as error:
            return _refusal(self._errors.failed(scope["method"], scope["path"], error))


def _job_of(scope: Scope) -> str | None:
    """The job that a batch is of; None: it is another request."""
    path: str = scope["path"]
    if scope["method"] != "POST" or not path.endswith(_BATCH) or not path.startswith(_JOBS):
        return None
    job = path[len(_JOBS) : -len(_BATCH)]
    return job if job and "/" not in job else None


def _refusal(error: RefillError) -> Response:
    status, headers, body = wire_answer(error)
    response = Response(body, status)
    response.raw_headers = headers
    return response
