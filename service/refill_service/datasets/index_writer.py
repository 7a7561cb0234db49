"""How is an index of any size written with little memory? Records go to a temporary file, blob by blob."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refill_service.cache_core.dataset_index import (
    BLOCK_SAMPLES,
    BlobTable,
    SampleRecords,
    encode_block,
    encode_head,
    fingerprint_of_blobs,
)

__all__ = ["RECORD", "IndexWriter", "RecordArray"]

RECORD = np.dtype([("offset", "<i8"), ("length", "<i8"), ("checksum", "<u8")])
RecordArray = NDArray[np.void]
"""Records of dtype :data:`RECORD`, in the order of their offsets."""


class IndexWriter:
    """Collects blobs in their order, then writes the index as one file in ``folder`` (temporary, the caller's)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Without a name: gone with the process, however that ends.
        self._spool = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._names: list[str] = []
        self._sizes: list[int] = []
        self._first_sample = [0]
        self._sample_bytes = 0
        self._wide = False

    def __enter__(self) -> IndexWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._spool.close()

    @property
    def num_samples(self) -> int:
        return self._first_sample[-1]

    @property
    def num_blobs(self) -> int:
        return len(self._names)

    @property
    def sample_bytes(self) -> int:
        return self._sample_bytes

    @property
    def blob_bytes(self) -> int:
        return sum(self._sizes)

    def add_blob(self, name: str, size_bytes: int, records: Iterable[RecordArray]) -> None:
        """``records``: those of all samples of the blob, in one or more arrays."""
        count = 0
        for batch in records:
            self._spool.write(batch.tobytes())
            self._sample_bytes += int(batch["length"].sum())
            count += len(batch)
        self._names.append(name)
        self._sizes.append(size_bytes)
        self._first_sample.append(self.num_samples + count)
        self._wide = self._wide or size_bytes >= 2**32

    def finish(self, metadata: dict[str, Any]) -> Path:
        """The file that holds the index; to be stored under ``INDEX_KEY``."""
        blobs = BlobTable(self._names, np.array(self._first_sample, np.int64), np.array(self._sizes, np.int64))
        hasher = fingerprint_of_blobs(blobs)
        for batch in self._batches():
            hasher.update(batch.tobytes())
        fingerprint = hasher.intdigest()
        _, head = encode_head(
            blobs, sample_bytes=self._sample_bytes, fingerprint=fingerprint, wide=self._wide, metadata=metadata
        )
        path = self._folder / "index"
        with path.open("wb") as file:
            file.write(head)
            for block, batch in enumerate(self._batches()):
                records = SampleRecords(
                    block * BLOCK_SAMPLES, batch["offset"], batch["length"], batch["checksum"].astype(np.uint64)
                )
                file.write(encode_block(records, block=block, fingerprint=fingerprint, wide=self._wide))
        return path

    def _batches(self) -> Iterable[RecordArray]:
        self._spool.seek(0)
        while data := self._spool.read(BLOCK_SAMPLES * RECORD.itemsize):
            yield np.frombuffer(data, dtype=RECORD)
