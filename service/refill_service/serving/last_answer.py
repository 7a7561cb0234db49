"""What does a client hear whose request is cut short because the pod ends? To come again, as from a pod that is away.

The server cancels requests that take too long at its end, and would answer them with status 500, after which nobody
tries again.
"""

from __future__ import annotations

import asyncio

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from refill.errors import PodUnreachable

__all__ = ["LastAnswer"]


class LastAnswer:
    """ASGI middleware that answers a request which the end of the pod cuts short: come again."""

    def __init__(self, app: ASGIApp, ordinal: int) -> None:
        self._app = app
        self._ordinal = ordinal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except asyncio.CancelledError:
            if begun or scope["type"] != "http":
                raise
            stops = PodUnreachable(f"pod {self._ordinal} stops", pod=self._ordinal)
            await JSONResponse(stops.to_wire(), status_code=stops.status)(scope, receive, send)
