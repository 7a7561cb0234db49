"""A store that does not answer some requests for ever, on order: an HTTP relay before an S3 server."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from urllib.parse import urlsplit

from tests.s3_gate import Gate

__all__ = ["Asked", "Stalls", "stalling"]

Asked = tuple[str, int]
"""The name of an object, without its folders, and the first byte of the range."""


class Stalls:
    """What becomes of ranged GETs: ``hangs(asked, time)`` and ``refuses(asked, time)`` say of which, each time that
    it is asked for, from 1 on."""

    def __init__(self) -> None:
        self.url = ""
        self.requests: Counter[Asked] = Counter()
        self.hangs: Callable[[Asked, int], bool] = lambda asked, time: False
        self.refuses: Callable[[Asked, int], bool] = lambda asked, time: False
        self.goes_on = threading.Event()
        """What hangs goes on."""
        self._lock = threading.Lock()

    def came(self, asked: Asked) -> int:
        with self._lock:
            self.requests[asked] += 1
            return self.requests[asked]


@contextmanager
def stalling(upstream: str) -> Iterator[Stalls]:
    """In threads of this process, before the S3 server."""
    stalls = Stalls()

    class Stalling(Gate):
        disable_nagle_algorithm = True

        def refused(self) -> bool:
            found = self.headers.get("range")
            if self.command != "GET" or found is None:
                return False
            name = self.path.partition("?")[0].rpartition("/")[2]
            asked = name, int(found.removeprefix("bytes=").partition("-")[0])
            time = stalls.came(asked)
            if stalls.hangs(asked, time):
                stalls.goes_on.wait(100)
            return stalls.refuses(asked, time)

        def given(self, data: bytes) -> bytes:
            return data

    class Server(ThreadingHTTPServer):
        block_on_close = False

        def handle_error(self, *_: object) -> None:
            """Who asked has given up."""

    Stalling.upstream, Stalling.secrets, Stalling.read_only = urlsplit(upstream).netloc, {}, set()
    server = Server(("127.0.0.1", 0), Stalling)
    stalls.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield stalls
    finally:
        stalls.goes_on.set()
        server.shutdown()
        server.server_close()
        thread.join(10)
