"""What do buckets of all clouds have in common? obstore (Rust) moves their bytes, and its errors become ours.

It is natively asynchronous, without the GIL, 2 to 4 times the requests of boto3 for small ranges and level with it for
large ones (docs/decisions/store-library.md). It must not be used in a process that forks afterwards: its threads do not
come along.
"""

from __future__ import annotations

import asyncio
import re
from abc import abstractmethod
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, PreconditionError, UnauthenticatedError

from refill.errors import InvalidInput, RefillError, StoreDenied, StoreNotFound, StoreUnavailable
from refill_service.cache_core.dataset_index import MOST_ETAG_LETTERS
from refill_service.object_store.base import ListedVersion, ObjectStore, StoredRange, WritableData
from refill_service.object_store.store_counters import StoreCounters
from refill_service.object_store.store_settings import StoreSettings

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import AzureStore, ClientConfig, GCSStore, RetryConfig, S3Store

    Opened = S3Store | GCSStore | AzureStore

_MULTIPART_BYTES = 8 << 20
_MAX_PARTS = 9_000  # S3 allows 10,000, as does Google; Azure 50,000

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([^<]{1,100})</Code>")
_MESSAGE = re.compile(r"<Message>([^<\n]{1,300})")
_RETRIES = re.compile(r"after (\d+) retries")
_QUERY = re.compile(r"\?[^\s)]*")
"""Of a URL: a SAS token, perhaps."""
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound")
_BAD_CREDENTIALS = ("InvalidToken", "ExpiredToken", "TokenRefreshRequired", "InvalidAccessKeyId")


class BucketStore(ObjectStore):
    """Keys are relative to ``prefix`` in ``bucket``. Credentials are looked for at the first request.

    :param where: the service or server, for errors.
    """

    NO_CREDENTIALS: ClassVar[str]
    """What to do where the machine gives none."""

    def __init__(
        self,
        url: str,
        bucket: str,
        prefix: str,
        where: str,
        settings: StoreSettings,
        counters: StoreCounters | None,
    ) -> None:
        super().__init__(url, counters, pause_seconds=settings.max_backoff_seconds)
        self._bucket = bucket
        self._prefix = prefix
        self._where = where
        self._settings = settings
        self._slots = asyncio.Semaphore(settings.max_connections)
        self._opening = asyncio.Lock()
        self._opened: dict[bool, Opened] = {}
        """By whether it makes each request once only."""

    @abstractmethod
    def _open(self, *, once: bool) -> Opened:
        """In a thread: credentials are read from disk, or from the network."""

    async def _read_range(
        self, key: str, start: int, end: int, *, etag: str | None = None, once: bool = False
    ) -> StoredRange:
        with self._translated("read", key):
            store = await self._store(once=once)
            options: GetOptions = {"range": (start, end)}
            if etag is not None and not etag.startswith("W/"):  # a weak one matches nothing
                options["if_match"] = etag
            async with self._slots:
                try:
                    answer = await obstore.get_async(store, key, options=options)
                    found = kept_etag(answer.meta["e_tag"])
                    return StoredRange(memoryview(await answer.bytes_async()), found)
                except PreconditionError as error:
                    raise self._replaced(key, etag or "", None) from error
                except BaseError as error:
                    if _is_past_the_end(error):
                        raise self._too_short(key, start, end, "the object ends before") from error
                    raise

    async def _read_start(self, key: str, most_bytes: int) -> tuple[memoryview, int]:
        with self._translated("read", key):
            store = await self._store()
            async with self._slots:
                try:
                    answer = await obstore.get_async(store, key, options={"range": (0, most_bytes)})
                    return memoryview(await answer.bytes_async()), answer.meta["size"]
                except BaseError as error:
                    if _is_past_the_end(error):  # no range of an empty object is one
                        return memoryview(b""), 0
                    raise

    async def _write(self, key: str, data: WritableData) -> int:
        with self._translated("write", key):
            num_bytes = data.stat().st_size if isinstance(data, Path) else len(memoryview(data).cast("B"))
            store = await self._store()
            async with self._slots:
                await obstore.put_async(
                    store,
                    key,
                    data,
                    chunk_size=max(_MULTIPART_BYTES, -(-num_bytes // _MAX_PARTS)),
                    max_concurrency=min(4, self._settings.max_connections),
                )
            return num_bytes

    async def _list(self, prefix: str) -> AsyncIterator[ListedVersion]:
        # obstore's prefixes are whole folders; ours are any text, as the servers' own.
        folder = prefix.rpartition("/")[0]
        with self._translated("list", prefix):
            store = await self._store()
            async for page in obstore.list(store, folder or None):
                for found in page:
                    if found["path"].startswith(prefix):
                        yield ListedVersion(found["path"], found["size"], kept_etag(found["e_tag"]))

    async def _head(self, key: str) -> tuple[int, str | None]:
        with self._translated("read", key):
            store = await self._store()
            async with self._slots:
                found = await obstore.head_async(store, key)
                return found["size"], kept_etag(found["e_tag"])

    async def _delete(self, key: str) -> None:
        with self._translated("delete", key):
            store = await self._store()
            async with self._slots:
                await obstore.delete_async(store, key)

    async def _store(self, *, once: bool = False) -> Opened:
        if once not in self._opened:
            async with self._opening:
                if once not in self._opened:
                    self._opened[once] = await asyncio.to_thread(self._open, once=once)
        return self._opened[once]

    @contextmanager
    def _translated(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except RefillError:
            raise
        except (BaseError, FileNotFoundError, PermissionError, ValueError) as error:
            raise self._translation(error, verb, key) from error

    def _translation(self, error: Exception, verb: str, key: str) -> RefillError:
        """One line of ours for obstore's error, which spells out the answer and its own structure over many."""
        text = str(error)
        status, code, url = _status(error), _first(_CODE, text), self.url_of(key)
        facts = {"bucket": self._bucket, "key": key, "code": code, "http_status": status}
        said = f" ({code}: {_first(_MESSAGE, text)})" if code else ""
        if "performing token request" in text:
            return StoreDenied(f"{url}: can't get credentials, {_reason(text)}; {self.NO_CREDENTIALS}", **facts)
        if code in _NO_BUCKET:
            return StoreNotFound(
                f"{url}: there is no bucket {self._bucket!r} at {self._where}; check its name", **facts
            )
        if isinstance(error, FileNotFoundError) or status == 404:
            return StoreNotFound(f"{url}: no such object at {self._where}", **facts)
        if self._is_elsewhere(code, status, text):
            return InvalidInput(f"{url}: the bucket is in another region{said}; give its region", **facts)
        if (
            isinstance(error, (PermissionError, PermissionDeniedError, UnauthenticatedError))
            or status in (401, 403)
            or code in _BAD_CREDENTIALS
        ):
            return StoreDenied(
                f"{url}: {self._where} does not allow to {verb} it{said}; check credentials and their rights", **facts
            )
        if status is not None and 400 <= status < 500 and status not in (408, 429):
            return InvalidInput(f"{url}: {self._where} refused to {verb} it with status {status}{said}", **facts)
        tried = f" after {count} retries" if (count := _first(_RETRIES, text)) else ""
        why = f"status {status}{said}" if status else _reason(text)
        return StoreUnavailable(f"{url}: can't {verb} it at {self._where}{tried}: {why}", **facts)

    def _is_elsewhere(self, code: str | None, status: int | None, text: str) -> bool:
        """Whether an answer says that the bucket is in another region."""
        return False


def client_options(settings: StoreSettings, endpoint_url: str | None) -> ClientConfig:
    """Raises :class:`InvalidInput` for a ``ca_bundle`` that can't be read."""
    options: ClientConfig = {
        # Signed requests and session tokens go in clear only where the operator says so.
        "allow_http": (endpoint_url or "").lower().startswith("http://"),
        "connect_timeout": timedelta(seconds=settings.connect_timeout_seconds),
        "timeout": timedelta(seconds=settings.request_timeout_seconds),
        "pool_max_idle_per_host": str(settings.max_connections),
    }
    if (certificates := settings.ca_certificates()) is not None:
        options["root_certificate"] = certificates
    return options


def retry_config(settings: StoreSettings, *, once: bool) -> RetryConfig:
    return {
        "max_retries": 0 if once else settings.max_retries,
        "retry_timeout": timedelta(seconds=settings.retry_timeout_seconds),
        "backoff": {
            "init_backoff": timedelta(seconds=settings.first_backoff_seconds),
            "max_backoff": timedelta(seconds=settings.max_backoff_seconds),
            "base": 2,
        },
    }


def kept_etag(etag: str | None) -> str | None:
    return etag if etag is not None and len(etag) <= MOST_ETAG_LETTERS else None


def _status(error: Exception) -> int | None:
    found = _first(_STATUS, str(error))
    return int(found) if found else None


def _is_past_the_end(error: BaseError) -> bool:
    """Some servers answer with no bytes, which obstore refuses."""
    return _status(error) == 416 or "StartTooLarge" in str(error)


def _reason(text: str) -> str:
    """The last cause that obstore's debug text names, or the end of its first line."""
    line = _QUERY.sub("", text.partition("\n")[0].rpartition(" - ")[2]).strip()
    for marker, meaning in (
        ("ConnectionRefused", "connection refused"),
        ("dns error", "its name can't be resolved"),
        ("TimedOut", "no answer in time"),
        ("timed out", "no answer in time"),
        ("invalid peer certificate", "its TLS certificate is not trusted; set ca_bundle"),
    ):
        if marker in text:
            return f"{meaning} ({line[:200]})"
    return line[:300]


def _first(pattern: re.Pattern[str], text: str) -> str | None:
    found = pattern.search(text)
    return found.group(1) if found else None
