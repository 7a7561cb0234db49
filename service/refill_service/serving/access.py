"""Who may ask what of a pod? Bearer tokens of clients and of other pods, checked before any route.

A job belongs to the holder of the token that it was registered with: others may not read its data, look at it or end
it. Where there are no tokens, everybody may do everything.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from refill.errors import NotAllowed, NotAuthenticated, RefillError
from refill_service.serving.access_log import HOLDER
from refill_service.serving.request_guard import wire_answer
from refill_service.serving.tokens import Tokens

__all__ = ["Access", "check_holder", "holder_of"]

_OPEN = ("/healthz", "/readyz")
"""For the kubelet, which has no token. They tell nothing but whether the pod works."""
_JOBS = "/v1/jobs/"


class Access:
    """An ASGI application around another one, which sees requests of those only who may make them.

    :param tokens: None: anybody may ask.
    :param job_holder: who holds a job of this pod; None when it has none of that name.
    """

    def __init__(self, app: ASGIApp, tokens: Tokens | None, job_holder: Callable[[str], str | None]) -> None:
        self._app = app
        self._tokens = tokens
        self._job_holder = job_holder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            self._check(scope)
        except RefillError as error:
            status, headers, body = wire_answer(error)
            if status == NotAuthenticated.status:
                headers.append((b"www-authenticate", b"Bearer"))
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": body})
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        if self._tokens is None or scope["path"] in _OPEN:
            return
        holder = self._tokens.holder_of(_presented(scope))
        if holder is None:
            raise NotAuthenticated(
                "the pod takes requests with a token that it knows only: give REFILL_TOKEN_FILE, or token_file=, the "
                "file that holds yours"
            )
        scope[HOLDER] = holder  # also of what is refused below
        path: str = scope["path"]
        if path.startswith(_JOBS):
            job = path.removeprefix(_JOBS).split("/", 1)[0]  # the server has decoded it, for the routes too
            if (held_by := self._job_holder(job)) is not None:
                check_holder(job, held_by, holder)


def holder_of(request: Request) -> str:
    """Whose token a request came with."""
    return str(request.scope.get(HOLDER, ""))


def check_holder(job: str, held_by: str, asked_by: str) -> None:
    """Raises :class:`NotAllowed` for a job of another token. What was registered without one is everybody's."""
    if held_by not in ("", asked_by):
        raise NotAllowed(f"job {job} belongs to another token: use another name, or the token it was registered with")


def _presented(scope: Scope) -> bytes:
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    value: Any = next((value for name, value in headers if name == b"authorization"), b"")
    scheme, _, token = bytes(value).partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""
