"""Which stores stay open from job to job? Those over a network, so that the next job finds warm connections.

Connecting takes a round trip, with TLS two or three, and a connection reaches the rate of its link only after several.
"""

from __future__ import annotations

from collections import OrderedDict

from refill_service.object_store.base import ObjectStore
from refill_service.object_store.open_store import open_store
from refill_service.object_store.store_counters import StoreCounters
from refill_service.object_store.store_settings import StoreSettings
from refill_service.object_store.store_url import StoreUrl, parse_url

__all__ = ["WarmStores"]

_MOST_KEPT = 8


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
