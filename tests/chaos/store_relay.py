"""How does an object store go wrong, on order? An HTTP relay in front of an S3 server, switched while pods read.

Wrong bytes are wrong once only: what was damaged on its way is right when it is read again, as from a store that has
the right bytes. Bytes that are wrong in the store itself are another matter (tests/integration/test_faults.py).
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from urllib.parse import urlsplit

from tests.s3_gate import Gate

__all__ = ["StoreFaults", "store_relay"]

_SLOW_SECONDS = 0.3
_STALL_SECONDS = 12.0
_RANGE = re.compile(r"bytes=(\d+)-(\d+)")


class StoreFaults:
    """What goes wrong, as shares of requests from 0 to 1. May be set at any time."""

    def __init__(self, seed: int) -> None:
        self.url = ""
        """Where pods find the store."""
        self.counts: Counter[str] = Counter()
        """How often each has happened."""
        self.refused = self.slow = self.stalled = self.short = self.wrong = 0.0
        self.answers = threading.Event()
        """Not set: it takes requests, and answers none."""
        self.answers.set()
        self._chooser = random.Random(seed)
        self._damaged: dict[str, list[tuple[int, int]]] = {}
        self._lock = threading.Lock()

    def happens(self, what: str) -> bool:
        with self._lock:
            happens = self._chooser.random() < float(getattr(self, what))
            self.counts[what] += happens
            return happens

    def damaged(self, blob: str, first: int, end: int, data: bytes) -> bytes:
        """The body with a flipped byte, unless some of these bytes were damaged before."""
        with self._lock:
            before = self._damaged.setdefault(blob, [])
            if any(first < other_end and other < end for other, other_end in before):
                return data
            before.append((first, end))
            self.counts["damaged"] += 1
            wrong = bytearray(data)
            wrong[self._chooser.randrange(len(wrong))] ^= 1 << self._chooser.randrange(8)
            return bytes(wrong)


@contextmanager
def store_relay(upstream: str, seed: int) -> Iterator[StoreFaults]:
    """A relay on loopback, in threads of this process."""
    faults = StoreFaults(seed)

    class Relay(Gate):
        def refused(self) -> bool:
            faults.answers.wait()
            if faults.happens("slow"):
                time.sleep(_SLOW_SECONDS)
            if faults.happens("stalled"):
                time.sleep(_STALL_SECONDS)
            return faults.happens("refused")

        def given(self, data: bytes) -> bytes:
            asked = _RANGE.match(self.headers.get("range") or "")
            if asked is not None and data and faults.happens("wrong"):
                data = faults.damaged(self.path, int(asked[1]), int(asked[2]) + 1, data)
            return data[: len(data) // 2] if faults.happens("short") else data

    Relay.upstream = urlsplit(upstream).netloc
    Relay.secrets, Relay.read_only = {}, set()
    server = _Server(("127.0.0.1", 0), Relay)
    faults.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), name="store relay", daemon=True)
    thread.start()
    try:
        yield faults
    finally:
        faults.answers.set()
        server.shutdown()
        server.server_close()
        thread.join(10)


class _Server(ThreadingHTTPServer):
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        """A pod that is killed while it reads is no error here."""
