"""A pod whose answers say how much CPU its process had used when each of them began. Nothing else of it is changed."""

from __future__ import annotations

import time

from starlette.types import Message, Receive, Scope, Send

from refill_service.serving import app
from refill_service.serving.request_guard import RequestGuard
from refill_service.serving.serve import serve
from refill_service.settings import load_settings

CPU_HEADER = "x-cpu-nanoseconds"


class Clocked(RequestGuard):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def clocked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (CPU_HEADER.encode(), b"%d" % time.process_time_ns())]
            await send(message)

        await super().__call__(scope, receive, clocked)


if __name__ == "__main__":
    app.RequestGuard = Clocked  # type: ignore[misc]
    serve(load_settings())
