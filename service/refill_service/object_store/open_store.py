"""Which store does a URL mean?"""

from __future__ import annotations

from refill_service.object_store.base import ObjectStore
from refill_service.object_store.store_counters import StoreCounters
from refill_service.object_store.store_settings import StoreSettings
from refill_service.object_store.store_url import WEB, StoreUrl, parse_url

__all__ = ["open_store"]


def open_store(
    url: str,
    settings: StoreSettings | None = None,
    *,
    counters: StoreCounters | None = None,
    within: StoreUrl | None = None,
) -> ObjectStore:
    """The store rooted at a URL of :mod:`.store_url`. No request is made yet.

    ``settings`` defaults to what the environment says. Raises :class:`InvalidInput` for any other URL.

    :param within: the URL was named by somebody who may read what lies below this one, and nothing else: no link is
        followed out of it, and nothing is written.
    """
    named = parse_url(url)
    settings = StoreSettings.from_environment() if settings is None else settings
    # Each one is imported by who uses it.
    if named.scheme == "file":
        from refill_service.object_store.confined_file_store import ConfinedFileStore
        from refill_service.object_store.file_store import FileStore

        if within is not None:
            return ConfinedFileStore(named, within, max_threads=settings.max_connections, counters=counters)
        return FileStore(named.folder, max_threads=settings.max_connections, counters=counters)
    if named.scheme == "gs":
        from refill_service.object_store.gcs_store import GCSStore

        return GCSStore(named.bucket, named.prefix, settings, counters=counters)
    if named.scheme == "az":
        from refill_service.object_store.azure_store import AzureStore

        return AzureStore(named.bucket, named.prefix, settings, counters=counters)
    if named.scheme == "hf":
        from refill_service.object_store.hub_store import HubStore

        return HubStore(named, settings, counters=counters)
    if named.scheme in WEB:
        from refill_service.object_store.http_store import HttpStore

        return HttpStore(named, settings, counters=counters)
    from refill_service.object_store.s3_store import S3Store

    return S3Store(named.bucket, named.prefix, settings, counters=counters)
