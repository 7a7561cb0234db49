"""How are bytes had from a web server? GETs that are tried again, that follow a redirect on the same server only, and
that hold no more bytes than were asked for.

pyreqwest (Rust) sends them, as between pods: obstore's client follows redirects anywhere, so that a server could have
pods fetch from machines that it can't reach itself.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from email.utils import parsedate_to_datetime
from typing import Protocol
from urllib.parse import urljoin, urlsplit

import numpy as np
from pyreqwest.client import Client, ClientBuilder
from pyreqwest.exceptions import PyreqwestError, RequestTimeoutError
from pyreqwest.response import Response

from refill.errors import StoreUnavailable
from refill_service.cache_core.dataset_index import MOST_ETAG_LETTERS
from refill_service.object_store.store_settings import StoreSettings

_MOST_REDIRECTS = 5
_MOST_REFUSALS = 3
"""By a server that says when to come again."""
_TRIED_AGAIN = (408, 429)
"""And 5xx."""
_QUERY = re.compile(r"\?[^\s)]*")
"""Of a URL: a signature, perhaps."""
_RANGE = re.compile(r"bytes (?:([0-9]{1,18})-[0-9]{1,18}|\*)/([0-9]{1,18}|\*)")
_SIZE = re.compile("[0-9]{1,18}")


@dataclass(frozen=True)
class WebAnswer:
    """What a web server answered, after redirects."""

    status: int
    headers: Mapping[str, str]
    """By names in small letters."""
    data: memoryview

    @property
    def first_byte(self) -> int | None:
        """Of the object, that the body begins with; None: no such thing is said."""
        if self.status == 200:
            return 0
        found = _RANGE.fullmatch(self.headers.get("content-range", ""))
        return int(found[1]) if found and found[1] is not None else None

    @property
    def size_bytes(self) -> int | None:
        """Of the whole object; None: it is not said."""
        found = _RANGE.fullmatch(self.headers.get("content-range", ""))
        text = found[2] if found else self.headers.get("content-length", "") if self.status == 200 else ""
        return int(text) if _SIZE.fullmatch(text) else None

    @property
    def version(self) -> str | None:
        """The ETag; where there is none, time and size, as for files."""
        etag, modified = self.headers.get("etag"), self.headers.get("last-modified")
        if etag is None and modified is not None and self.size_bytes is not None:
            etag = f"{modified}, {self.size_bytes} bytes"
        return etag if etag and len(etag) <= MOST_ETAG_LETTERS else None


class Pace(Protocol):
    """When may a server be asked, by its own word?"""

    async def ready(self) -> None: ...

    def heard(self, answer: WebAnswer) -> bool:
        """Fact: it answered. Returns whether it refused only since it was asked too often, and says until when."""


class WebClient:
    """Keeps connections. Belongs to one event loop; close it there.

    :param https_only: whether a redirect to ``http://`` is an error.
    """

    def __init__(self, settings: StoreSettings, *, https_only: bool) -> None:
        self._settings = settings
        self._https_only = https_only
        self._client: Client | None = None
        self._opening = asyncio.Lock()

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def ask(
        self,
        what: str,
        url: str,
        headers: Mapping[str, str],
        most_bytes: int,
        *,
        method: str = "GET",
        once: bool = False,
        pace: Pace | None = None,
    ) -> WebAnswer:
        """Any answer but one that says to come again. A redirect to another server is such an answer, too.

        :param what: is to be had, for errors.
        :param headers: sent to no other server.
        :param most_bytes: of the body that are held, and read.
        :param once: it is not tried again.

        Raises :class:`StoreUnavailable` after the retries.
        """
        settings = self._settings
        client = await self._opened()
        retries, refusals, started, host = 0, 0, time.monotonic(), urlsplit(url).netloc
        while True:
            if pace is not None:
                await pace.ready()
            wait_seconds = 0.0
            try:
                answer = await self._followed(client, method, url, headers, most_bytes)
                if pace is not None and pace.heard(answer) and refusals < _MOST_REFUSALS:
                    refusals, started = refusals + 1, time.monotonic()
                    continue
                if answer.status not in _TRIED_AGAIN and answer.status < 500:
                    return answer
                why, wait_seconds = f"status {answer.status}", seconds_to_wait(answer)
            except PyreqwestError as error:
                why = _cause(error, settings)
            backoff = min(settings.max_backoff_seconds, settings.first_backoff_seconds * 2**retries)
            wait_seconds = max(wait_seconds, backoff * random.uniform(0.5, 1))
            waited = time.monotonic() - started
            if once or retries >= settings.max_retries or waited + wait_seconds > settings.retry_timeout_seconds:
                tried = f" after {retries} retries" if retries else ""
                raise StoreUnavailable(f"{what}: can't read it at {host}{tried}: {why}")
            await asyncio.sleep(wait_seconds)
            retries += 1

    async def _followed(
        self, client: Client, method: str, url: str, headers: Mapping[str, str], most_bytes: int
    ) -> WebAnswer:
        origin = origin_of(url)
        for _ in range(_MOST_REDIRECTS):
            answer = await _asked(client, method, url, headers, most_bytes)
            target = joined(url, answer.headers.get("location", url))
            if answer.status not in (301, 302, 303, 307, 308) or origin_of(target) != origin:
                return answer
            url = target
        return answer

    async def _opened(self) -> Client:
        async with self._opening:
            if self._client is None:
                # Certificates are read from disk.
                self._client = await asyncio.to_thread(self._made)
            return self._client

    def _made(self) -> Client:
        settings = self._settings
        builder = (
            ClientBuilder()
            .user_agent("refill")
            .follow_redirects(False)
            .referer(False)
            .gzip(False)
            .brotli(False)
            .zstd(False)
            .deflate(False)
            .http1_only()
            .https_only(self._https_only)
            .connect_timeout(timedelta(seconds=settings.connect_timeout_seconds))
            .timeout(timedelta(seconds=settings.request_timeout_seconds))
            .pool_max_idle_per_host(settings.max_connections)
        )
        if (certificates := settings.ca_certificates()) is not None:
            builder = builder.add_root_certificate_pem(certificates)
        return builder.build()


def origin_of(url: str) -> tuple[str, str | None, int | None]:
    """Scheme, host and port; equal for one server."""
    scheme = ""
    try:
        parts = urlsplit(url)
        scheme = parts.scheme.lower()
        return scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(scheme)
    except ValueError:  # a host or a port that is none
        return scheme, None, None


def joined(url: str, location: str) -> str:
    """Where a server says that something is; empty where it says what is no URL."""
    try:
        return urljoin(url, location)
    except ValueError:
        return ""


def seconds_to_wait(answer: WebAnswer) -> float:
    """What Retry-After says, in either way to write it; 0 where it says nothing."""
    text = answer.headers.get("retry-after", "")
    if text.isascii() and text.isdigit():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (OverflowError, TypeError, ValueError):
        return 0.0


async def _asked(client: Client, method: str, url: str, headers: Mapping[str, str], most_bytes: int) -> WebAnswer:
    request = client.request(method, url).header("accept-encoding", "identity")
    for name, value in headers.items():
        request = request.header(name, value, is_sensitive=name == "authorization")
    async with request.build_streamed() as response:
        found = {name.lower(): value for name, value in response.headers.items()}
        data = memoryview(b"")
        if method == "GET" and response.status in (200, 206):
            data = await _body(response, found.get("content-length", ""), most_bytes)
        return WebAnswer(response.status, found, data)


async def _body(response: Response, length: str, most_bytes: int) -> memoryview:
    size = min(int(length), most_bytes) if length.isascii() and length.isdigit() else most_bytes
    buffer = np.empty(size, np.uint8).data  # not filled with zeros first
    filled = 0
    while filled < size and (piece := await response.body_reader.read_chunk()) is not None:
        part = memoryview(piece)[: size - filled]
        buffer[filled : filled + len(part)] = part
        filled += len(part)
    return buffer[:filled]


def _cause(error: PyreqwestError, settings: StoreSettings) -> str:
    """In the words of the other stores."""
    if isinstance(error, RequestTimeoutError):  # of connecting, too; they are not told apart
        return f"no answer in time ({settings.connect_timeout_seconds:g} s, {settings.request_timeout_seconds:g} s)"
    causes = (getattr(error, "details", None) or {}).get("causes") or []
    texts = [str(error), *(str(cause.get("message", "")) for cause in causes)]
    for marker, meaning in (
        ("Connection refused", "connection refused"),
        ("failed to lookup address", "its name can't be resolved"),
        ("dns error", "its name can't be resolved"),
        ("invalid peer certificate", "its TLS certificate is not trusted; set ca_bundle"),
    ):
        if any(marker in text for text in texts):
            return meaning
    return _QUERY.sub("", texts[-1].partition("\n")[0])[:200]
