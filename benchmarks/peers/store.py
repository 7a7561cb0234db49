"""How much is read from the store? ministack's S3 server, which counts what it is asked and what it sends.

    python -m peers.store COUNTS_FILE [HOLD_SECONDS]

Counted in the server, so that it is the same for all loaders and costs them nothing. Each GET is held for so long
before it is answered, others meanwhile. BIND_HOST and GATEWAY_PORT say where it listens.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import ministack.app
from peers.store_counts import new_counts


def main(path: str, hold_seconds: float) -> None:
    counts = new_counts(path)
    serve = ministack.app.app

    async def counting(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["method"] not in ("GET", "HEAD"):
            return await serve(scope, receive, send)
        listing = b"list-type" in scope["query_string"] or b"prefix=" in scope["query_string"]
        counts[1 if listing or scope["method"] == "HEAD" else 0] += 1

        if scope["method"] == "GET" and hold_seconds:
            await asyncio.sleep(hold_seconds)

        async def counted(message: Any) -> None:
            if scope["method"] == "GET":
                counts[2] += len(message.get("body", b""))
            await send(message)

        await serve(scope, receive, counted)

    ministack.app.app = counting
    sys.argv = sys.argv[:1]
    ministack.app.main()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 0.0)
