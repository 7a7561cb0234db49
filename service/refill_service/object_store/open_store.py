"""Which store does a URL mean, and which stay open from job to job?

Those over a network do, so that the next job finds warm connections. Connecting takes a round trip, with TLS two or
three, and a connection reaches the rate of its link only after several.
"""

from __future__ import annotations

from collections import OrderedDict

from refill_service.object_store.base import ObjectStore
from refill_service.object_store.store_counters import StoreCounters
from refill_service.object_store.store_settings import StoreSettings
from refill_service.object_store.store_url import WEB, StoreUrl, parse_url

_MOST_KEPT = 8


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
        from refill_service.object_store.file_store import ConfinedFileStore, FileStore

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


class WarmStores:
    """The stores used last, by URL."""

    def __init__(self, settings: StoreSettings, counters: StoreCounters) -> None:
        self._settings = settings
        self._counters = counters
        self._kept: OrderedDict[StoreUrl, ObjectStore] = OrderedDict()

    def get(self, url: str, within: StoreUrl | None = None) -> tuple[ObjectStore, bool]:
        """``(store, whether it is kept here)``. One that is not belongs to the caller; one that is, is never closed by
        its users: its connections end with the last reference to it.

        :param within: as of :func:`open_store`.
        """
        named = parse_url(url)
        if named.scheme == "file":
            return open_store(url, self._settings, counters=self._counters, within=within), False
        store = self._kept.pop(named, None) or open_store(url, self._settings, counters=self._counters)
        self._kept[named] = store
        if len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
        return store, True

    def forget(self, url: str) -> None:
        """After an error: the next one who asks gets a new one, with the credentials of then."""
        self._kept.pop(parse_url(url), None)
