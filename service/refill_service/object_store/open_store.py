"""Which store does a URL mean?"""

from __future__ import annotations

from refill_service.object_store.base import ObjectStore
from refill_service.object_store.store_counters import StoreCounters
from refill_service.object_store.store_settings import StoreSettings
from refill_service.object_store.store_url import StoreUrl, parse_url

__all__ = ["open_store"]


def open_store(
    url: str,
    settings: StoreSettings | None = None,
    *,
    counters: StoreCounters | None = None,
    within: StoreUrl | None = None,
) -> ObjectStore:
    """The store rooted at ``s3://bucket/prefix`` or ``file:///folder``. No request is made yet.

    ``settings`` defaults to what the environment says. Raises :class:`InvalidInput` for any other URL.

    :param within: the URL was named by somebody who may read what lies below this one, and nothing else: no link is
        followed out of it, and nothing is written.
    """
    named = parse_url(url)
    settings = StoreSettings.from_environment() if settings is None else settings
    if named.scheme == "file":
        from refill_service.object_store.confined_file_store import ConfinedFileStore
        from refill_service.object_store.file_store import FileStore

        if within is not None:
            return ConfinedFileStore(named, within, max_threads=settings.max_connections, counters=counters)
        return FileStore(named.folder, max_threads=settings.max_connections, counters=counters)
    from refill_service.object_store.s3_store import S3Store

    return S3Store(named.bucket, named.prefix, settings, counters=counters)
