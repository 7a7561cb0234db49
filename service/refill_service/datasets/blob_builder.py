"""How do samples become WebDataset tars? Reads files ahead, in threads, and puts them into one blob at a time."""

from __future__ import annotations

import os
import tarfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from refill_service.cache_core.dataset_index import RECORD, RecordArray, sample_checksum
from refill_service.cache_core.dataset_labels import label_of
from refill_service.cache_core.planned.job_plan import USUAL_CHUNK, largest_chunk_size
from refill_service.datasets.source_scan import SourceMember, SourceSample, changed, unreadable

_BLOCK_BYTES = tarfile.BLOCKSIZE
END_OF_ARCHIVE = bytes(2 * _BLOCK_BYTES)

_READ_THREADS = 8
"""Latency of network file systems is hidden by reading several samples at once."""
_AHEAD_BYTES = 16 << 20
_AHEAD_SAMPLES = 256
_CHUNKS_OF_BLOB = 8
"""Of more than 64 samples each: fewer would leave more than an eighth of a blob to the next one."""

TarRange = tuple[list[bytes], int]
"""The bytes of a sample, and its label."""


@dataclass
class BuiltBlob:
    """A tar that was built in memory, with the records of its samples."""

    data: bytearray
    records: RecordArray
    labels: NDArray[np.int32]
    """Of the samples, -1 for one without."""


class GrowingTar:
    """The samples that are yet to be in a blob, in memory."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._records: list[tuple[int, int, int]] = []
        """Offset, length and checksum of each sample."""
        self._labels: list[int] = []

    def __len__(self) -> int:
        """Samples."""
        return len(self._records)

    def append(self, pieces: Iterable[bytes], label: int) -> None:
        """A sample, as :func:`tar_range` gives it."""
        start = len(self._data)
        for piece in pieces:
            self._data += piece
        with memoryview(self._data) as view:
            self._records.append((start, len(view) - start, sample_checksum(view[start:])))
        self._labels.append(label)

    def take(self, count: int) -> BuiltBlob:
        """The first ``count`` samples as a blob of their own, at least one."""
        end = sum(self._records[count - 1][:2])
        rest = self._data[end:]
        del self._data[end:]
        built = _finished_blob(self._data, self._records[:count], self._labels[:count])
        self._data = rest
        self._records = [(offset - end, length, checksum) for offset, length, checksum in self._records[count:]]
        del self._labels[:count]
        return built


def built_blob(
    folder: str,
    samples: Iterable[SourceSample],
    class_numbers: Mapping[str, int] | None,
    on_bytes: Callable[[int], None],
) -> BuiltBlob:
    """The samples of a blob, as :func:`blobs_of` cuts them. The bytes depend on them only: times and owners are fixed.

    :param class_numbers: class of a sample by its top folder; becomes a member ``cls`` unless the sample has one.
    :param on_bytes: called with the number of bytes of files as they are packed.

    Raises :class:`InvalidInput` for a file that changed or vanished since it was listed.
    """
    tar = GrowingTar()
    for sample, (pieces, label) in _read_ahead(folder, samples, class_numbers):
        tar.append(pieces, label)
        on_bytes(sum(member.size_bytes for member in sample.members))
    return tar.take(len(tar))


def blobs_of(
    samples: Iterable[SourceSample], *, blob_bytes: int, class_numbers: Mapping[str, int] | None
) -> Iterator[list[SourceSample]]:
    """The samples of each blob, known without a look at their files: blobs of at most ``blob_bytes`` (more only for a
    sample that is larger), cut as :class:`FillingBlob` has it."""
    left: list[SourceSample] = []
    filling = FillingBlob(blob_bytes - len(END_OF_ARCHIVE))
    for sample in samples:
        for count in filling.add(_tar_bytes(sample, class_numbers)):
            yield left[:count]
            del left[:count]
        left.append(sample)
    if left:
        yield left


def _tar_bytes(sample: SourceSample, class_numbers: Mapping[str, int] | None) -> int:
    """What :func:`_tar_pieces` will take."""
    contents = [(member.extension, member.size_bytes) for member in sample.members]
    if _gets_class(sample, class_numbers):
        contents.append(("cls", len(_class_of(sample, class_numbers))))
    return sum(
        _header_bytes(f"{sample.key}.{extension}", size_bytes) + -(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES
        for extension, size_bytes in contents
    )


def _header_bytes(name: str, size_bytes: int) -> int:
    if name.isascii() and len(name) <= tarfile.LENGTH_NAME and size_bytes < 8**11:
        return _BLOCK_BYTES
    return len(_header(name, size_bytes))


def _header(name: str, size_bytes: int) -> bytes:
    header = tarfile.TarInfo(name)
    header.size = size_bytes
    return header.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _gets_class(sample: SourceSample, class_numbers: Mapping[str, int] | None) -> bool:
    return class_numbers is not None and all(member.extension.lower() != "cls" for member in sample.members)


def _class_of(sample: SourceSample, class_numbers: Mapping[str, int] | None) -> bytes:
    return b"" if class_numbers is None else str(class_numbers[sample.key.partition("/")[0]]).encode()


def _finished_blob(data: bytearray, records: list[tuple[int, int, int]], labels: list[int]) -> BuiltBlob:
    """:param records: offset, length and checksum of each sample in ``data``, which gets the end of a tar."""
    data += END_OF_ARCHIVE
    built = np.zeros(len(records), dtype=RECORD)
    for name, column in zip(("offset", "length", "checksum"), zip(*records, strict=True), strict=True):
        built[name] = np.array(column, dtype=RECORD[name])
    return BuiltBlob(data, built, np.array(labels, dtype=np.int32))


def _read_ahead(
    folder: str, samples: Iterable[SourceSample], class_numbers: Mapping[str, int] | None
) -> Iterator[tuple[SourceSample, TarRange]]:
    """Each sample with its bytes in the tar, in order; at most ``_AHEAD_BYTES`` and one sample are read ahead."""
    waiting: deque[tuple[SourceSample, int, Future[TarRange]]] = deque()
    waiting_bytes = 0
    pool = ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="pack-read")
    try:
        for sample in samples:
            size_bytes = sum(member.size_bytes for member in sample.members)
            while waiting and (waiting_bytes + size_bytes > _AHEAD_BYTES or len(waiting) >= _AHEAD_SAMPLES):
                done, done_bytes, pieces = waiting.popleft()
                waiting_bytes -= done_bytes
                yield done, pieces.result()
            waiting.append((sample, size_bytes, pool.submit(_tar_pieces, folder, sample, class_numbers)))
            waiting_bytes += size_bytes
        while waiting:
            done, _, pieces = waiting.popleft()
            yield done, pieces.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _tar_pieces(folder: str, sample: SourceSample, class_numbers: Mapping[str, int] | None) -> TarRange:
    contents = [(member.extension, _file_bytes(folder, member)) for member in sample.members]
    if _gets_class(sample, class_numbers):
        contents.append(("cls", _class_of(sample, class_numbers)))
        contents.sort(key=lambda item: item[0])
    return tar_range(sample.key, contents)


def tar_range(key: str, contents: Iterable[tuple[str, bytes]]) -> TarRange:
    """A sample of these members, by extension, as it lies in a tar."""
    pieces = []
    label = -1
    for extension, content in contents:
        if extension.lower() == "cls":
            label = label_of(content)
        pieces.append(_header(f"{key}.{extension}", len(content)))
        pieces.append(content)
        pieces.append(bytes(-len(content) % _BLOCK_BYTES))
    return pieces, label


def _file_bytes(folder: str, member: SourceMember) -> bytes:
    path = os.path.join(folder, member.path)
    try:
        with open(path, "rb", buffering=0) as file:
            content = file.readall()
    except OSError as error:
        raise unreadable(path, error) from error
    if len(content) != member.size_bytes:
        raise changed(path, member.size_bytes, len(content))
    return content


class FillingBlob:
    """Counts the samples of the blob that is being filled, in their order.

    A chunk is never of two blobs. So a blob is closed behind a whole number of the largest chunks that jobs choose for
    samples of its size, and of smaller ones, which are powers of two as these are: then none costs a GET for a few
    samples.

    :param most_bytes: of the samples of a blob; one that is larger lies in a blob of its own.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._sizes: list[int] = []
        self._size_bytes = 0

    def add(self, size_bytes: int) -> list[int]:
        """Fact: another sample comes, of so many bytes. Returns how many of those before it make a blob each that is
        closed now, the first ones first; mostly none."""
        closed = []
        while self._sizes and self._size_bytes + size_bytes > self._most_bytes:
            count = whole_chunks(len(self._sizes), self._size_bytes)
            self._size_bytes -= sum(self._sizes[:count])
            del self._sizes[:count]
            closed.append(count)
        self._sizes.append(size_bytes)
        self._size_bytes += size_bytes
        return closed


def whole_chunks(num_samples: int, size_bytes: float) -> int:
    """How many of these samples make a whole number of chunks; all of them, where they are fewer than one has.

    :param size_bytes: of all of them.
    """
    chunk_size = largest_chunk_size(size_bytes / max(1, num_samples))
    while chunk_size > USUAL_CHUNK and _CHUNKS_OF_BLOB * chunk_size > num_samples:
        chunk_size //= 2  # a small blob would be much smaller than it may be
    return num_samples - num_samples % chunk_size or num_samples
