"""A folder of a web server: read by ranges, never written or listed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import quote

from refill.errors import InvalidInput, RefillError, StoreDenied, StoreNotFound, StoreUnavailable
from refill_service.object_store.base import ListedVersion, ObjectStore, StoredRange, WritableData
from refill_service.object_store.store_counters import StoreCounters
from refill_service.object_store.store_settings import StoreSettings
from refill_service.object_store.store_url import StoreUrl
from refill_service.object_store.web_client import WebAnswer, WebClient, origin_of


class HttpStore(ObjectStore):
    """Keys are paths below the URL. No credentials are sent.

    :param server: URL of the one that is asked; None: the one that ``named`` names.
    """

    def __init__(
        self,
        named: StoreUrl,
        settings: StoreSettings,
        *,
        counters: StoreCounters | None = None,
        server: str | None = None,
    ) -> None:
        super().__init__(str(named), counters, pause_seconds=settings.max_backoff_seconds)
        self._server = (server or f"{named.scheme}://{named.segments[0]}").rstrip("/")
        self._https_only = self._server.lower().startswith("https://")
        self._client = WebClient(settings, https_only=self._https_only)
        self._slots = asyncio.Semaphore(settings.max_connections)

    async def close(self) -> None:
        await self._client.close()

    async def _read_range(
        self, key: str, start: int, end: int, *, etag: str | None = None, once: bool = False
    ) -> StoredRange:
        wanted = {"range": f"bytes={start}-{end - 1}"}
        answer = await self._ask(key, wanted, end - start, etag=etag, once=once)
        if answer.status == 412:
            raise self._replaced(key, etag or "", None)
        if answer.status == 416:
            raise self._too_short(key, start, end, "the object ends before")
        self._check(key, answer)
        if answer.first_byte != start:
            if answer.status == 200:
                raise InvalidInput(
                    f"{self.url_of(key)}: {self._server} answers a range with the whole file; it must know ranges"
                )
            raise StoreUnavailable(f"{self.url_of(key)}: {self._server} answered with bytes that were not asked for")
        return StoredRange(answer.data, answer.version)

    async def _read_start(self, key: str, most_bytes: int) -> tuple[memoryview, int]:
        answer = await self._ask(key, {"range": f"bytes=0-{most_bytes - 1}"}, most_bytes)
        if answer.status == 416:  # no range of an empty object is one
            return memoryview(b""), 0
        self._check(key, answer)
        return answer.data, self._size(key, answer)

    async def _head(self, key: str) -> tuple[int, str | None]:
        answer = await self._ask(key, {}, 0, method="HEAD")
        self._check(key, answer)
        return self._size(key, answer), answer.version

    async def _write(self, key: str, data: WritableData) -> int:
        raise self._only_read(key)

    async def _delete(self, key: str) -> None:
        raise self._only_read(key)

    async def _list(self, prefix: str) -> AsyncIterator[ListedVersion]:
        raise InvalidInput(f"{self.url}: a web server does not list what it has; name the files by --files")
        yield  # it is a generator

    async def _ask(
        self,
        key: str,
        headers: dict[str, str],
        most_bytes: int,
        *,
        method: str = "GET",
        etag: str | None = None,
        once: bool = False,
    ) -> WebAnswer:
        """What the server says at last."""
        url = f"{self.url}/{'/'.join(quote(part, safe='') for part in key.split('/'))}"
        if etag is not None and etag.startswith('"'):  # a weak one matches nothing
            headers = headers | {"if-match": etag}
        async with self._slots:
            return await self._client.ask(self.url_of(key), url, headers, most_bytes, method=method, once=once)

    def _check(self, key: str, answer: WebAnswer) -> None:
        """Raises what an answer without the bytes means."""
        if answer.status in (200, 206):
            if answer.headers.get("content-encoding", "identity") != "identity":
                raise InvalidInput(f"{self.url_of(key)}: {self._server} compresses it, so that its ranges are others")
            return
        raise self._refusal(key, answer)

    def _refusal(self, key: str, answer: WebAnswer) -> RefillError:
        url, facts = self.url_of(key), {"key": key, "http_status": answer.status}
        if answer.status in (404, 410):
            return StoreNotFound(f"{url}: no such object at {self._server}", **facts)
        if answer.status in (401, 403, 407):
            return StoreDenied(f"{url}: {self._server} does not allow to read it (status {answer.status})", **facts)
        if 300 <= answer.status < 400:
            scheme, host, port = origin_of(answer.headers.get("location", ""))
            return StoreDenied(
                f"{url}: {self._server} redirects to {scheme}://{host}:{port}, and refill follows on the same server"
                " only; name the dataset by the URL where it is",
                **facts,
            )
        return InvalidInput(f"{url}: {self._server} refused to read it with status {answer.status}", **facts)

    def _size(self, key: str, answer: WebAnswer) -> int:
        if answer.size_bytes is None:
            raise InvalidInput(f"{self.url_of(key)}: {self._server} does not say how large it is")
        return answer.size_bytes

    def _only_read(self, key: str) -> StoreDenied:
        return StoreDenied(
            f"{self.url_of(key)}: refill only reads there; write the index elsewhere by --output", key=key
        )
