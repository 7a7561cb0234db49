"""A pod whose answers say how much CPU its process had used when they were sent. Nothing else of it is changed."""

from __future__ import annotations

import time
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from refill_service.serving import app
from refill_service.serving.request_guard import RequestGuard
from refill_service.serving.serve import serve
from refill_service.settings import load_settings

BEGUN_HEADER = "x-begun-cpu-nanoseconds"
SENT_HEADER = "x-sent-cpu-nanoseconds"
"""The same, of the answer before on this connection: when all of it had left."""


_SENT: dict[Any, int] = {}
"""By connection."""


class Clocked(RequestGuard):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection = tuple(scope["client"])

        async def clocked(message: Message) -> None:
            if message["type"] == "http.response.start":
                clocks = {BEGUN_HEADER: time.process_time_ns(), SENT_HEADER: _SENT.get(connection, 0)}
                added = [(name.encode(), b"%d" % at) for name, at in clocks.items()]
                message["headers"] = [*message["headers"], *added]
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                _SENT[connection] = time.process_time_ns()

        await super().__call__(scope, receive, clocked)


if __name__ == "__main__":
    app.RequestGuard = Clocked  # type: ignore[misc]
    serve(load_settings())
