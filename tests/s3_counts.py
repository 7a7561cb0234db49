"""How often do pods read blobs, and how much? Counted at the S3 server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import ThreadingHTTPServer
from urllib.parse import urlsplit

from tests.s3_gate import Gate

__all__ = ["Served", "counting"]


@dataclass
class Served:
    """Ranged GETs of blobs that the server answered."""

    url: str = ""
    sizes: list[int] = field(default_factory=list)
    heads: int = 0
    """Requests for no more than a blob's size and ETag."""


@contextmanager
def counting(upstream: str) -> Iterator[Served]:
    """A relay on loopback, in threads of this process."""
    served = Served()

    class Counting(Gate):
        disable_nagle_algorithm = True

        def refused(self) -> bool:
            served.heads += self.command == "HEAD" and self.path.partition("?")[0].endswith(".tar")
            return super().refused()

        def given(self, data: bytes) -> bytes:
            if self.headers.get("range") and self.path.partition("?")[0].endswith(".tar"):
                served.sizes.append(len(data))
            return data

    Counting.upstream, Counting.secrets, Counting.read_only = urlsplit(upstream).netloc, {}, set()
    Counting.fail_first = Counting.cut_first = 0
    Counting.stall, Counting.delay_seconds = False, 0.0
    server = ThreadingHTTPServer(("127.0.0.1", 0), Counting)
    served.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
