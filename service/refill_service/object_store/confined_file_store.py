"""How does a pod read a folder that its clients name, and that others may write to? Below what is served, only reading.

What the operator lists is opened as it is, links and all. From there to the dataset's folder, and from that to its
files, no link is followed that leads out: who may write to a dataset's folder could else have the pod read its secrets.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from refill.errors import StoreDenied
from refill_service.object_store.base import WritableData
from refill_service.object_store.file_store import FileStore
from refill_service.object_store.open_beneath import open_beneath, regular
from refill_service.object_store.store_counters import StoreCounters
from refill_service.object_store.store_url import StoreUrl

__all__ = ["ConfinedFileStore"]

_FOLDER = os.O_PATH | os.O_DIRECTORY


class ConfinedFileStore(FileStore):
    """Keys are paths below the folder ``named``.

    :param served: what the operator has listed, which holds ``named``.
    """

    def __init__(
        self, named: StoreUrl, served: StoreUrl, *, max_threads: int = 32, counters: StoreCounters | None = None
    ) -> None:
        super().__init__(named.folder, max_threads=max_threads, counters=counters)
        self._served = served.folder
        self._below = "/".join(named.segments[len(served.segments) :])

    def _open(self, key: str) -> int:
        return regular(self._open_beneath(key, os.O_RDONLY | os.O_NONBLOCK))

    def _stat(self, key: str) -> os.stat_result:
        with self._translated("head", key):
            file = regular(self._open_beneath(key, os.O_PATH))
            try:
                return os.fstat(file)
            finally:
                os.close(file)

    def _scandir(self, folder: str) -> AbstractContextManager[Iterator[os.DirEntry[str]]]:
        return self._scanned(folder)

    @contextmanager
    def _scanned(self, folder: str) -> Iterator[Iterator[os.DirEntry[str]]]:
        opened = self._open_beneath(folder or ".", os.O_RDONLY | os.O_DIRECTORY)
        try:
            with os.scandir(opened) as entries:
                yield (entry for entry in entries if not entry.is_symlink())
        finally:
            os.close(opened)

    def _replace(self, key: str, data: WritableData) -> int:
        raise self._only_read(key)

    def _unlink(self, key: str) -> None:
        raise self._only_read(key)

    def _only_read(self, key: str) -> StoreDenied:
        return StoreDenied(f"{self.url_of(key)}: pods only read it", key=key)

    def _open_beneath(self, path: str, flags: int) -> int:
        """The folder is looked up anew each time: it may be replaced while the store is open."""
        served = os.open(self._served, _FOLDER)
        try:
            if self._served == "/":  # nothing leads out of it
                folder = os.open(f"/{self._below}", _FOLDER)
            else:
                folder = open_beneath(served, self._below or ".", _FOLDER)
        finally:
            os.close(served)
        try:
            return open_beneath(folder, path, flags)
        finally:
            os.close(folder)
