"""How is an index of any size written with little memory? Records go to a temporary file, blob by blob."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from refill.protocol.column_values import BLOCK_VALUES, LABELS, encode_values
from refill_service.cache_core import dataset_columns
from refill_service.cache_core.dataset_index import (
    BLOCK_SAMPLES,
    RECORD,
    BlobTable,
    RecordArray,
    SampleRecords,
    column_key,
    encode_block,
    encode_head,
    fingerprint_of_blobs,
)
from refill_service.cache_core.dataset_labels import LabelCounts, LabelSummary

LARGE_SAMPLE_BYTES = 64 << 20
"""What a pod of any size sends."""


class IndexWriter:
    """Collects blobs in their order, then writes the index as one file in ``folder`` (temporary, the caller's).

    :param has_checksums: whether records have them. If not, blobs have ETags.
    :param overlaps: whether samples may share bytes with their neighbours.
    """

    def __init__(self, folder: Path, *, has_checksums: bool = True, overlaps: bool = False) -> None:
        self._has_checksums, self._overlaps = has_checksums, overlaps
        self._etags: list[str] = []
        self._folder = folder
        # Without a name: gone with the process, however that ends.
        self._spool = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._names: list[str] = []
        self._sizes: list[int] = []
        self._first_sample = [0]
        self._sample_bytes = 0
        self._largest = 0, "", 0
        """Bytes of the largest sample, its blob, and its number there."""
        self._wide = False
        self._labels: IO[bytes] | None = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        """One int32 a sample; None when a sample has no label."""
        self._num_labelled = 0
        self.labels: tuple[str, Path] | None = None
        """After :meth:`finish`: the column of the labels, if all samples have one: its key, and the file that holds it;
        to be stored before the index."""

    def __enter__(self) -> IndexWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._spool.close()
        self._drop_labels()

    def check_room(self, num_samples: int) -> None:
        """Raises OSError where the folder has no room for the index of so many samples, its blobs and labels aside."""
        with tempfile.TemporaryFile(dir=self._folder) as file:
            os.posix_fallocate(file.fileno(), 0, 2 * RECORD.itemsize * max(1, num_samples))

    @property
    def num_samples(self) -> int:
        return self._first_sample[-1]

    @property
    def blobs(self) -> list[tuple[str, int]]:
        """``(name, bytes)`` of each."""
        return list(zip(self._names, self._sizes, strict=True))

    @property
    def num_blobs(self) -> int:
        return len(self._names)

    @property
    def blob_bytes(self) -> int:
        return sum(self._sizes)

    def add_blob(
        self,
        name: str,
        size_bytes: int,
        records: Iterable[RecordArray],
        labels: NDArray[np.int32] | None = None,
        etag: str | None = None,
    ) -> None:
        """``records``: those of all samples of the blob, in one or more arrays. ``labels``: of all of them, or None.
        ``etag``: kept where there are no checksums."""
        count = 0
        for batch in records:
            self._spool.write(batch.tobytes())
            if len(batch) and int(batch["length"].max()) > self._largest[0]:
                place = int(batch["length"].argmax())
                self._largest = int(batch["length"][place]), name, count + place
            self._sample_bytes += int(batch["length"].sum())
            count += len(batch)
        self._num_labelled += 0 if labels is None else int((labels >= 0).sum())
        if count and (labels is None or len(labels) != count or bool((labels < 0).any())):
            self._drop_labels()
        elif count and self._labels is not None and labels is not None:
            self._labels.write(labels.astype("<i4").tobytes())
        self._names.append(name)
        self._sizes.append(size_bytes)
        self._etags.append(etag or "")
        self._first_sample.append(self.num_samples + count)
        self._wide = self._wide or size_bytes >= 2**32

    @property
    def warnings(self) -> list[str]:
        """What whoever made the samples may not expect."""
        found = []
        size, blob, number = self._largest
        if size > LARGE_SAMPLE_BYTES:
            found.append(
                f"the largest sample, number {number} of {blob}, has {size:,} bytes: pods need memory for all of its "
                "chunk (with chunk_size=1 that is the sample), and sending_bytes of as much, or refuse jobs. Cut such "
                "samples into smaller ones"
            )
        if 0 < self._num_labelled < self.num_samples:
            left = self.num_samples - self._num_labelled
            found.append(
                f"{left:,} of {self.num_samples:,} samples have no label (a number from 0 in member cls): so the "
                "dataset has no labels, and a DataLoader does not put both kinds into one batch"
            )
        return found

    def finish(self, metadata: dict[str, Any], data_url: str | None = None) -> Path:
        """The file that holds the index; to be stored under ``INDEX_KEY``. What labels say is added to ``metadata``.

        :param data_url: where the blobs lie; None: beside the index.
        """
        blobs = BlobTable(
            self._names,
            np.array(self._first_sample, np.int64),
            np.array(self._sizes, np.int64),
            None if self._has_checksums else self._etags,
        )
        hasher = fingerprint_of_blobs(blobs)
        for batch in self._batches():
            hasher.update(batch.tobytes())  # checksums are 0 where there are none
        fingerprint = hasher.intdigest()
        if self._labels is not None and self.num_samples:
            metadata = metadata | {"labels": self._finish_labels(self._labels, fingerprint).to_dict()}
        _, head = encode_head(
            blobs,
            sample_bytes=self._sample_bytes,
            fingerprint=fingerprint,
            wide=self._wide,
            metadata=metadata,
            has_checksums=self._has_checksums,
            overlaps=self._overlaps,
            data_url=data_url,
        )
        path = self._folder / "index"
        with path.open("wb") as file:
            file.write(head)
            for block, batch in enumerate(self._batches()):
                records = SampleRecords(
                    block * BLOCK_SAMPLES,
                    batch["offset"],
                    batch["length"],
                    batch["checksum"].astype(np.uint64),
                    self._has_checksums,
                )
                file.write(encode_block(records, block=block, fingerprint=fingerprint, wide=self._wide))
        return path

    def _finish_labels(self, spool: IO[bytes], fingerprint: int) -> LabelSummary:
        counts = LabelCounts()
        sizes = []
        for labels in _label_batches(spool):
            counts.add(labels)
            sizes.append(len(encode_values(labels)) + dataset_columns.CHECKSUM_BYTES)
        path = self._folder / "labels"
        with path.open("wb") as file:
            file.write(dataset_columns.encode_head(sizes, self.num_samples, fingerprint))
            for block, labels in enumerate(_label_batches(spool)):
                file.write(dataset_columns.encode_block(encode_values(labels), block, fingerprint))
        self.labels = column_key(LABELS, fingerprint), path
        return counts.summary()

    def _drop_labels(self) -> None:
        if self._labels is not None:
            self._labels.close()
            self._labels = None

    def _batches(self) -> Iterable[RecordArray]:
        self._spool.seek(0)
        while data := self._spool.read(BLOCK_SAMPLES * RECORD.itemsize):
            yield np.frombuffer(data, dtype=RECORD)


def _label_batches(spool: IO[bytes]) -> Iterable[NDArray[np.int64]]:
    spool.seek(0)
    while data := spool.read(4 * BLOCK_VALUES):
        yield np.frombuffer(data, dtype="<i4").astype(np.int64)
