"""Who may ask what of a pod? Bearer tokens of clients and of other pods, checked before any route.

A job belongs to the holder of the token that it was registered with: others may not read its data, look at it or end
it. Where there are no tokens, everybody may do everything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from starlette.requests import Request
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from refill.errors import NotAuthenticated, PodBusy, RefillError
from refill_service.cache_core.job_holder import check_holder
from refill_service.memory.loop_turns import STRANGERS, LoopTurns
from refill_service.serving.access_log import HOLDER
from refill_service.serving.probes import is_health
from refill_service.serving.request_guard import wire_answer
from refill_service.serving.silent_peers import SilentPeers
from refill_service.serving.tokens import Tokens

__all__ = ["CONNECTION", "Access", "ForStrangers", "holder_of"]

_JOBS = "/v1/jobs/"
_JOBS_OF_PODS = "/peer/v1/jobs/"

CONNECTION = "refill.connection"
"""In a request's scope: what it came over, where that wants to know whose it is."""


class Access:
    """An ASGI application around another one, which sees requests of those only who may make them.

    :param tokens: None: anybody may ask.
    :param of_pods: other pods ask here, and not clients: nothing is answered without a token, and who has one is no
        silent peer. To clients, probes are answered, for the kubelet, which has none. They say nothing but whether the
        pod works.
    :param job_holder: who holds a job of this pod; None when it has none of that name.
    :param of_runs: routes whose path has a job's name, and that answer of all runs that had it: these look themselves
        at who holds each run. The name may be another team's by now.
    """

    def __init__(
        self,
        app: ASGIApp,
        tokens: Tokens | None,
        turns: LoopTurns,
        job_holder: Callable[[str], str | None],
        *,
        of_pods: SilentPeers | None = None,
        of_runs: Iterable[BaseRoute] = (),
    ) -> None:
        self._app = app
        self._tokens = tokens
        self._turns = turns
        self._job_holder = job_holder
        self._of_pods = of_pods
        self._of_runs = list(of_runs)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = None
        try:
            self.check(scope)
        except RefillError as error:
            refused = error
        await self._turns.run(self._team(scope), self._answer(scope, receive, send, refused))

    async def _answer(self, scope: Scope, receive: Receive, send: Send, refused: RefillError | None) -> None:
        if refused is None:
            await self._app(scope, receive, send)
            return
        status, headers, body = wire_answer(refused)
        if status == NotAuthenticated.status:
            headers.append((b"www-authenticate", b"Bearer"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _team(self, scope: Scope) -> str | None:
        """Whose turn it is answered in. What pods ask for a job is asked by the job's team."""
        if self._tokens is not None and HOLDER not in scope:
            return STRANGERS
        if self._of_pods:
            return self._job_holder(scope["path"].removeprefix(_JOBS_OF_PODS).split("/", 1)[0]) or ""
        return str(scope.get(HOLDER, ""))

    def check(self, scope: Scope) -> None:
        """Raises what is wrong with who asks."""
        if not self._of_pods and is_health(scope["path"]) and scope["method"] in ("GET", "HEAD"):
            return
        if self._tokens is None:
            self._is_known(scope, "")
            return
        holder = self._tokens.holder_of(_presented(scope))
        if holder is None:
            raise NotAuthenticated(self._unknown(shown=bool(_presented(scope))))
        scope[HOLDER] = holder  # also of what is refused below
        self._is_known(scope, holder)
        path: str = scope["path"]
        if path.startswith(_JOBS):
            job = path.removeprefix(_JOBS).split("/", 1)[0]  # the server has decoded it, for the routes too
            held_by = self._job_holder(job)
            if held_by not in (None, "", holder) and not self._is_of_runs(scope):
                check_holder(job, held_by, holder)

    def _is_known(self, scope: Scope, team: str) -> None:
        if self._of_pods is not None:
            self._of_pods.is_known(scope["client"])
        else:
            _check_connection(scope, team)

    def _is_of_runs(self, scope: Scope) -> bool:
        return any(route.matches(scope)[0] is Match.FULL for route in self._of_runs)

    def _unknown(self, *, shown: bool) -> str:
        rule = "the pod takes only requests with a token that it knows"
        if self._of_pods:
            return f"{rule}: give all pods the same peer_token"
        if shown:
            return (
                f"{rule}, and yours is none of them: is it whole, and that of these pods? It comes from token_file "
                "(--token-file), REFILL_TOKEN_FILE or REFILL_TOKEN; the pods' are in their client_tokens"
            )
        return f"{rule}: give REFILL_TOKEN_FILE, or token_file= (--token-file), the file that holds yours"


class ForStrangers:
    """An ASGI application around another one, which anybody may ask, in the turn of strangers."""

    def __init__(self, app: ASGIApp, turns: LoopTurns) -> None:
        self._app = app
        self._turns = turns

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._turns.run(STRANGERS, _asked(self._app, scope, receive, send))


async def _asked(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    await app(scope, receive, send)


def holder_of(request: Request) -> str:
    """Whose token a request came with."""
    return str(request.scope.get(HOLDER, ""))


def _check_connection(scope: Scope, team: str) -> None:
    connection = scope.get(CONNECTION)
    if connection is not None and not connection.belongs_to(team):
        raise PodBusy(
            "you have as many connections to this pod as one team may have while others may want some "
            "(max_connections, team_reserved_fraction)"
        )


def _presented(scope: Scope) -> bytes:
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    value: Any = next((value for name, value in headers if name == b"authorization"), b"")
    scheme, _, token = bytes(value).partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else b""
