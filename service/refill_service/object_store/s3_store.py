"""S3 and what speaks its protocol.

obstore (Rust) moves the bytes: natively asynchronous, without the GIL, 2 to 4 times the requests of boto3 for
small ranges and level with it for large ones
(docs/decisions/store-library.md). boto3's session finds the credentials, so that
profiles, SSO, web identity (IRSA), containers and instance roles work as users know them.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import obstore
from obstore.exceptions import BaseError, PermissionDeniedError, PreconditionError, UnauthenticatedError
from obstore.store import S3Store as ObstoreS3

from refill.errors import InvalidInput, RefillError, StoreDenied, StoreNotFound, StoreUnavailable
from refill_service.cache_core.dataset_index import MOST_ETAG_LETTERS
from refill_service.object_store.base import ListedVersion, ObjectStore, StoredRange, WritableData
from refill_service.object_store.store_counters import StoreCounters
from refill_service.object_store.store_settings import StoreSettings

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import ClientConfig, S3Config, S3Credential

__all__ = ["S3Store"]

_MULTIPART_BYTES = 8 << 20
_MAX_PARTS = 9_000  # S3 allows 10,000

_CREDENTIALS_LIVE = timedelta(minutes=10)
"""How long credentials are used before boto3 is asked again; it renews those that expire 10 to 15 minutes ahead."""

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([^<]{1,100})</Code>")
_MESSAGE = re.compile(r"<Message>([^<]{1,300})</Message>")
_WRONG_REGION = ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException")
_BAD_CREDENTIALS = ("InvalidToken", "ExpiredToken", "TokenRefreshRequired", "InvalidAccessKeyId")


class S3Store(ObjectStore):
    """Keys are relative to ``prefix`` in ``bucket``. Credentials are looked for at the first request."""

    def __init__(
        self, bucket: str, prefix: str, settings: StoreSettings, *, counters: StoreCounters | None = None
    ) -> None:
        super().__init__(f"s3://{bucket}/{prefix}", counters, pause_seconds=settings.max_backoff_seconds)
        self._bucket = bucket
        self._prefix = prefix
        self._settings = settings
        self._where = settings.endpoint_url or "AWS"
        self._slots = asyncio.Semaphore(settings.max_connections)
        self._opening = asyncio.Lock()
        self._opened: dict[bool, ObstoreS3] = {}
        """By whether it makes each request once only."""

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
                    found = _kept(answer.meta["e_tag"])
                    return StoredRange(memoryview(await answer.bytes_async()), found)
                except PreconditionError as error:
                    raise self._replaced(key, etag or "", None) from error
                except BaseError as error:
                    if _status(error) == 416:
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
                    if _status(error) == 416:  # no range of an empty object is one
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
        # obstore's prefixes are whole folders; ours are any text, as S3's own.
        folder = prefix.rpartition("/")[0]
        with self._translated("list", prefix):
            store = await self._store()
            async for page in obstore.list(store, folder or None):
                for found in page:
                    if found["path"].startswith(prefix):
                        yield ListedVersion(found["path"], found["size"], _kept(found["e_tag"]))

    async def _head(self, key: str) -> tuple[int, str | None]:
        with self._translated("read", key):
            store = await self._store()
            async with self._slots:
                found = await obstore.head_async(store, key)
                return found["size"], _kept(found["e_tag"])

    async def _delete(self, key: str) -> None:
        with self._translated("delete", key):
            store = await self._store()
            async with self._slots:
                await obstore.delete_async(store, key)

    async def _store(self, *, once: bool = False) -> ObstoreS3:
        if once not in self._opened:
            async with self._opening:
                if once not in self._opened:
                    # Profiles are read from disk and roles from the network.
                    self._opened[once] = await asyncio.to_thread(self._open, once=once)
        return self._opened[once]

    def _open(self, *, once: bool) -> ObstoreS3:
        settings = self._settings
        region, credentials = settings.region, None
        if not settings.anonymous:
            credentials, profile_region = _find_credentials(settings.profile, self.url)
            region = region or profile_region
        options: ClientConfig = {
            # Signed requests and session tokens go in clear only where the operator says so.
            "allow_http": (settings.endpoint_url or "").lower().startswith("http://"),
            "connect_timeout": timedelta(seconds=settings.connect_timeout_seconds),
            "timeout": timedelta(seconds=settings.request_timeout_seconds),
            "pool_max_idle_per_host": str(settings.max_connections),
        }
        if settings.ca_bundle is not None:
            try:
                options["root_certificate"] = Path(settings.ca_bundle).read_bytes()
            except OSError as error:
                raise InvalidInput(f"can't read ca_bundle {settings.ca_bundle}: {error.strerror}") from error
        config: S3Config = {
            "region": region or "us-east-1",
            "virtual_hosted_style_request": not settings.uses_path_style,
            "skip_signature": settings.anonymous,
            # Not every server has DeleteObjects, and its answers bury refusals in a 200.
            "disable_bulk_delete": True,
        }
        if settings.endpoint_url is not None:
            config["endpoint"] = _endpoint(settings, self._bucket)
        return ObstoreS3(
            self._bucket,
            prefix=self._prefix or None,
            config=config,
            client_options=options,
            retry_config={
                "max_retries": 0 if once else settings.max_retries,
                "retry_timeout": timedelta(seconds=settings.retry_timeout_seconds),
                "backoff": {
                    "init_backoff": timedelta(seconds=settings.first_backoff_seconds),
                    "max_backoff": timedelta(seconds=settings.max_backoff_seconds),
                    "base": 2,
                },
            },
            credential_provider=credentials,
        )

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
        if code == "NoSuchBucket":
            return StoreNotFound(
                f"{url}: there is no bucket {self._bucket!r} at {self._where}; check its name", **facts
            )
        if isinstance(error, FileNotFoundError) or status == 404:
            return StoreNotFound(f"{url}: no such object at {self._where}", **facts)
        if code in _WRONG_REGION or "redirect without LOCATION" in text or status == 301:
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
        tried = f" after {count} retries" if (count := _first(re.compile(r"after (\d+) retries"), text)) else ""
        why = f"status {status}{said}" if status else _reason(text)
        return StoreUnavailable(f"{url}: can't {verb} it at {self._where}{tried}: {why}", **facts)


class _Credentials:
    """What obstore asks for credentials; boto3's may go to the network, so it is asked in a thread."""

    def __init__(self, credentials: Any) -> None:
        self._credentials = credentials

    async def __call__(self) -> S3Credential:
        frozen = await asyncio.to_thread(self._credentials.get_frozen_credentials)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": datetime.now(UTC) + _CREDENTIALS_LIVE,
        }


def _find_credentials(profile: str | None, url: str) -> tuple[_Credentials, str | None]:
    """Credentials by boto3's chain, and the region of the profile."""
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        session = boto3.Session(profile_name=profile)
        credentials = session.get_credentials()
        if credentials is not None:
            credentials.get_frozen_credentials()
    except (BotoCoreError, ClientError) as error:  # the second: STS refused
        raise StoreDenied(f"{url}: can't get credentials: {error}") from error
    if credentials is None:
        raise StoreDenied(
            f"{url}: found no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile or a role,"
            " or read a public bucket with --no-sign-request"
        )
    return _Credentials(credentials), session.region_name


def _endpoint(settings: StoreSettings, bucket: str) -> str:
    """obstore wants the bucket in the endpoint where requests are to name it in the host."""
    assert settings.endpoint_url is not None
    url = settings.endpoint_url.rstrip("/")
    if settings.uses_path_style:
        return url
    scheme, _, host = url.partition("://")
    return url if host.startswith(f"{bucket}.") else f"{scheme}://{bucket}.{host}"


def _kept(etag: str | None) -> str | None:
    return etag if etag is not None and len(etag) <= MOST_ETAG_LETTERS else None


def _status(error: Exception) -> int | None:
    found = _first(_STATUS, str(error))
    return int(found) if found else None


def _reason(text: str) -> str:
    """The last cause that obstore's debug text names, or the end of its first line."""
    line = text.partition("\n")[0].rpartition(" - ")[2].strip()
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
