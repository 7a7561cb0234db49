"""DLIO's own readers, of objects in place of files: DLIO's own reading of S3 has no JPEGs.

Its loader of torch asks for a file by its name, which is the object's, and gets it by one GET. Loaded by DLIO.
"""

from __future__ import annotations

import io
import os
from typing import Any

from dlio.workloads import OBJECTS_VARIABLE
from dlio_benchmark.reader.image_reader import ImageReader
from dlio_benchmark.reader.npy_reader import NPYReader
from dlio_benchmark.reader.npz_reader import NPZReader
from obstore.store import S3Store

__all__ = ["JpegOfStore", "NpyOfStore", "NpzOfStore"]


class _OfStore:
    _store: S3Store | None = None

    def open(self, filename: str) -> Any:
        if self._store is None:  # made in the worker: its threads do not survive a fork
            bucket, _, prefix = os.environ[OBJECTS_VARIABLE].partition("/")
            self._store = S3Store(bucket, prefix=prefix, client_options={"allow_http": True})
        data = self._store.get(os.path.basename(filename)).bytes()
        return super().open(io.BytesIO(memoryview(data)))  # type: ignore[misc]


class JpegOfStore(_OfStore, ImageReader):  # type: ignore[misc]
    pass


class NpyOfStore(_OfStore, NPYReader):  # type: ignore[misc]
    pass


class NpzOfStore(_OfStore, NPZReader):  # type: ignore[misc]
    pass
