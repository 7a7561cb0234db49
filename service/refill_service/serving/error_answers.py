"""How does an error leave a pod? By its own name and status, in one form for all routes."""

from __future__ import annotations

import logging
import time
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Scope

from refill.errors import EpochNotReady, InvalidInput, RefillError
from refill_service.serving.request_guard import PeerGone

log = logging.getLogger(__name__)

_SAY_EVERY_SECONDS = 10.0
_MOST_SAID = 100


class ErrorAnswer(BaseModel):
    """What went wrong, as ``refill.errors`` has it."""

    error: str = Field(description="The kind: the name of a class of refill.errors.")
    message: str = Field(description="What was wrong and what to do, in one line.")
    details: dict[str, Any]


ERROR_ANSWERS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer, "description": "The request can't be answered, and has changed nothing."},
    "5XX": {"model": ErrorAnswer, "description": "The pod can't answer; a request that got 503 is made again later."},
}


class SaidErrors:
    """Logs the errors of one application: what is waited for now and then, what is unexpected always."""

    def __init__(self) -> None:
        self._said: dict[str, float] = {}

    def refused(self, error: RefillError) -> None:
        """Fact: a request is answered so."""
        if not isinstance(error, EpochNotReady):
            return
        now = time.monotonic()
        if now < self._said.get(error.message, -_SAY_EVERY_SECONDS) + _SAY_EVERY_SECONDS:
            return
        if len(self._said) >= _MOST_SAID:
            self._said.clear()
        self._said[error.message] = now
        log.info("requests wait: %s", error.message)

    def said(self, scope: Scope, error: Exception) -> RefillError:
        """Fact: a request is answered with this error, or failed by it. Returns what is answered."""
        if isinstance(error, RefillError):
            self.refused(error)
            return error
        if isinstance(error, RequestValidationError):
            return _invalid_query(error)
        return self.failed(scope["method"], scope["path"], error)

    def failed(self, method: str, path: str, error: Exception) -> RefillError:
        """Fact: a request failed by what is no answer. Returns what is answered."""
        if not isinstance(error, PeerGone):
            log.error("%s %s failed", method, path, exc_info=error)
        return RefillError(f"the pod failed unexpectedly ({type(error).__name__}: {error}); its log says more")


def _invalid_query(error: RequestValidationError) -> InvalidInput:
    """The first of what is wrong with a request's parameters, or with its JSON."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return InvalidInput(f"{where}: {first['msg']}")


def _let_go_of_frames(error: BaseException | None) -> None:
    """FastAPI keeps such an error, and what it came of, in the frame that raised it, which these keep: circular
    garbage."""
    while error is not None:
        error.__traceback__, error = None, error.__cause__ or error.__context__


def add_error_answers(app: FastAPI) -> None:
    """Every error leaves as ``RefillError.to_wire()`` with its status. What is waited for is logged now and then."""
    said = SaidErrors()

    @app.exception_handler(RefillError)
    async def refill_error(request: Request, error: RefillError) -> JSONResponse:
        said.refused(error)
        return JSONResponse(error.to_wire(), status_code=error.status)

    @app.exception_handler(HTTPException)
    async def refused_before_a_route(request: Request, error: HTTPException) -> JSONResponse:
        """No such path, no such method, a body that can't be parsed: the same form, with its own status."""
        _let_go_of_frames(error)  # of a body that did not come, too
        where = "/docs lists what there is" if app.openapi_url else "this is metrics_port, clients have another port"
        text = f"{request.method} {request.url.path}: {error.detail}; {where}"
        return JSONResponse(InvalidInput(text).to_wire(), status_code=error.status_code, headers=error.headers)

    @app.exception_handler(ClientDisconnect)
    async def gone(request: Request, error: ClientDisconnect) -> Response:
        return Response(status_code=InvalidInput.status)  # to nobody

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        answer = said.failed(request.method, request.url.path, error)
        return JSONResponse(answer.to_wire(), status_code=answer.status)

    @app.exception_handler(RequestValidationError)
    async def invalid_request(request: Request, error: RequestValidationError) -> JSONResponse:
        _let_go_of_frames(error)
        return JSONResponse(_invalid_query(error).to_wire(), status_code=InvalidInput.status)
