"""Which store does a URL mean?"""

from __future__ import annotations

from urllib.parse import unquote

from refill.errors import InvalidInput
from refill_service.object_store.base import ObjectStore
from refill_service.object_store.store_counters import StoreCounters
from refill_service.object_store.store_settings import StoreSettings

__all__ = ["open_store"]


def open_store(
    url: str, settings: StoreSettings | None = None, *, counters: StoreCounters | None = None
) -> ObjectStore:
    """The store rooted at ``s3://bucket/prefix`` or ``file:///folder``. No request is made yet.

    ``settings`` defaults to what the environment says. Raises :class:`InvalidInput` for any other URL.
    """
    scheme, separator, rest = url.partition("://")
    settings = StoreSettings.from_environment() if settings is None else settings
    if separator and scheme.lower() == "file":
        from refill_service.object_store.file_store import FileStore

        host, _, path = rest.partition("/")
        if host not in ("", "localhost"):
            raise InvalidInput(f"{url!r}: a file URL has three slashes, as in file:///{rest}")
        return FileStore("/" + unquote(path).strip("/"), max_threads=settings.max_connections, counters=counters)
    if separator and scheme.lower() == "s3":
        from refill_service.object_store.s3_store import S3Store

        bucket, _, prefix = rest.partition("/")
        if not bucket:
            raise InvalidInput(f"{url!r} names no bucket; write s3://bucket/prefix")
        return S3Store(bucket, prefix.strip("/"), settings, counters=counters)
    raise InvalidInput(f"{url!r} is not a URL of a store; write s3://bucket/prefix or file:///folder")
