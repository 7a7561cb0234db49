"""Is the one that asks a pod, or the pod itself, an earlier run that has a successor? Around all routes.

A pod that stood still learns of its successor only when it asks others. It asks before an answer leaves for a client
that gave it something to keep, or that gets something which nobody else may get: all but GET. Else the client would
take for kept what the successor has never seen, and for the job's end what is none. "Come again" may be said by both.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from refill.errors import InvalidInput, PodReplaced, PodUnreachable, RefillError
from refill.protocol.pod_life import LIFE_HEADER, PodLife, pod_life_of
from refill_service.peers.fence import Fence
from refill_service.peers.lease_clock import lease_time
from refill_service.peers.peers import ASKED_LIFE_HEADER, life_header
from refill_service.serving.request_guard import wire_answer

__all__ = ["ANNOUNCEMENTS", "LifeCheck"]

_JOBS = "/v1/jobs/"

ANNOUNCEMENTS = "/peer/v1/lives/"
_COME_AGAIN = PodUnreachable.status


class LifeCheck:
    """ASGI middleware. Every answer says which run of the pod it is of.

    :param of_pods: whether it is pods that ask, whose token was checked before. What others say of lives is not
        listened to.
    """

    def __init__(self, app: ASGIApp, fence: Fence, *, of_pods: bool) -> None:
        self._app = app
        self._fence = fence
        self._of_pods = of_pods

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        changes = scope["method"] not in ("GET", "HEAD") and not _is_planned(scope["path"])
        confirms = changes and not self._of_pods
        was_refused = False

        async def with_life(message: Message) -> None:
            if message["type"] == "http.response.start":
                header = (LIFE_HEADER.encode(), life_header(self._fence.lives).encode())
                message["headers"] = [*message.get("headers", ()), header]
            await send(message)

        async def refuse(error: RefillError) -> None:
            status, headers, body = wire_answer(error)
            await with_life({"type": "http.response.start", "status": status, "headers": headers})
            await with_life({"type": "http.response.body", "body": body})

        async def answer(message: Message) -> None:
            nonlocal was_refused
            if confirms and message["type"] == "http.response.start" and message["status"] != _COME_AGAIN:
                try:
                    await self._fence.confirm()
                except RefillError as error:
                    was_refused = True
                    await refuse(error)
            if not was_refused:
                await with_life(message)

        try:
            if self._of_pods:
                self._check_asker(scope)
            self._fence.check_not_replaced()
        except RefillError as error:
            await refuse(error)
            return
        await self._app(scope, receive, answer)

    def _check_asker(self, scope: Scope) -> None:
        lives = self._fence.lives
        asker = pod_life_of(_only(scope, LIFE_HEADER))
        if asker is not None:
            self._fence.check_begun(*asker)
        if (text := _only(scope, ASKED_LIFE_HEADER)) is not None:
            asked = PodLife.decode(text)
            self._fence.check_begun(lives.ordinal, asked)
            lives.named(asked)
        if asker is None or scope["path"].startswith(ANNOUNCEMENTS):
            return
        pod, life = asker
        is_newest = lives.came_from(pod, life, lease_time())
        self._fence.leave_earlier_runs()
        if not is_newest:
            newest = lives.newest(pod) or life
            raise PodReplaced(f"pod {pod} asks as a run of it that has a successor", pod=pod, newest=newest.encode())


def _is_planned(path: str) -> bool:
    """Whether it is of a job whose order is planned: an earlier process of a pod answers the same as its successor."""
    return path.startswith(_JOBS) and path[len(_JOBS) :].split("/")[1:2] == ["planned"]


def _only(scope: Scope, header: str) -> str | None:
    """Its value; None where it is missing. Raises :class:`InvalidInput` where it comes twice."""
    found = [value for name, value in scope["headers"] if name == header.encode()]
    if len(found) > 1:
        raise InvalidInput(f"header {header} comes {len(found)} times, and once is right")
    return found[0].decode("latin-1") if found else None
