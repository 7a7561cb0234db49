"""Which samples does a WebDataset tar hold, and what are their checksums? Read once, front to back.

The rules are those of the webdataset library: a sample is a run of regular files whose names are the same up to
the first dot of the base name; directories, links and files without an extension are passed over.
"""

from __future__ import annotations

import io
import struct
import tarfile
from array import array
from collections.abc import Callable, Iterator

import numpy as np
import xxhash

from refill.errors import SampleDamaged
from refill_service.cache_core.dataset_index import RECORD, RecordArray
from refill_service.cache_core.dataset_labels import label_of
from refill_service.formats.interface import ShardReport

_BATCH = 4096
RANGE_BYTES = 8 << 20
"""Of one request."""
_LONGEST_LABEL = 100
_MAX_HEADER_BYTES = 1 << 20
"""Of the headers of one member, and of those that hold for all that follow: tarfile would take any number."""
_GZIP = b"\x1f\x8b"
_CANT_BE_READ = (
    tarfile.TarError, EOFError, ValueError, OverflowError, struct.error, LookupError, TypeError, RecursionError,
)  # fmt: skip
"""What tarfile raises at headers that contradict themselves or are chained without end."""


def read_shard(
    name: str, source: str, size_bytes: int, read_range: Callable[[int, int], memoryview], report: ShardReport
) -> Iterator[RecordArray]:
    """The records of a shard, in batches. Holds one range of bytes and 8 bytes for each sample.

    :param name: key of the shard, and ``source`` its URL, for errors.
    :param read_range: gives the bytes ``[start, end)``; asked for ranges of ``RANGE_BYTES`` one after another.

    Raises :class:`SampleDamaged` with the byte where the tar can't be read on.
    """
    stream = ShardStream(size_bytes, read_range)
    batch: list[tuple[int, int, int]] = []
    key: str | None = None
    start = end = 0
    hasher = until_end = xxhash.xxh3_64()
    for member, header, header_start in members_of(name, source, size_bytes, stream):
        found = key_of(member.name) if member.isreg() else None
        if found is None:
            report.num_passed_over += 1
            if until_end is hasher:
                # It counts to the sample around it only if that goes on behind it.
                until_end = hasher.copy()
        elif found != key:
            if key is not None:
                batch.append((start, end - start, until_end.intdigest()))
            if len(batch) == _BATCH:
                yield _records(batch)
                batch.clear()
            key, start = found, member.offset
            hasher = xxhash.xxh3_64()
            # A global pax header may come before the member, and is not its own.
            header = header[start - header_start :]
            report.num_samples += 1
            report.labels.append(-1)
            report.key_hashes.append(xxhash.xxh3_64_intdigest(key.encode("utf-8", "surrogateescape")))
        hasher.update(header)
        is_label = found is not None and member.name[len(found) :].lower() == ".cls"
        content = b""
        for piece in stream.pieces_to(stream.archive_offset):
            hasher.update(piece)
            if is_label and len(content) < member.size <= _LONGEST_LABEL:
                content += piece
        if is_label:
            report.labels[-1] = label_of(content[: member.size])
        if found is not None:
            until_end, end = hasher, stream.archive_offset
    if key is not None:
        batch.append((start, end - start, until_end.intdigest()))
    if batch:
        yield _records(batch)
    report.repeated = repeated_keys(report.key_hashes)


def members_of(
    name: str, source: str, size_bytes: int, stream: ShardStream
) -> Iterator[tuple[tarfile.TarInfo, bytes, int]]:
    """Members with the bytes read for their headers and where those start; ``stream`` then is behind them.

    The caller takes the rest of the member, up to ``stream.archive_offset``, before the next.
    """
    start = 0

    def damaged(why: str) -> SampleDamaged:
        return SampleDamaged(
            f"{source}: can't be read as a tar from byte {start} on (of {size_bytes}): {why}",
            blob=name,
            sample=None,
            start=start,
            end=size_bytes,
        )

    tar: tarfile.TarFile | None = None
    while True:
        try:
            if tar is None:
                # Reads the first header; copes with pax and GNU headers, long names and huge files.
                tar = tarfile.TarFile(fileobj=stream, mode="r", errorlevel=2)
            member = tar.next()
        except _CANT_BE_READ as error:
            why = "headers without end" if isinstance(error, RecursionError) else " ".join(str(error).split())[:200]
            if start == 0 and stream.take_header()[:2] == _GZIP:
                raise damaged("it is compressed with gzip; unpack it (gunzip)") from error
            raise damaged("truncated" if start + 512 > size_bytes else why) from error
        header = stream.take_header()
        if member is None:
            # tarfile also ends silently at garbage, or where nothing follows.
            if len(header) < 512:
                raise damaged("it has no mark at its end; was it cut off?")
            if header.count(0) != len(header):
                raise damaged("no tar header there")
            if any(bytes(piece).count(0) != len(piece) for piece in stream.pieces_to(size_bytes)):
                raise damaged(
                    "bytes follow the mark of its end: it has a hole of zeros, or is several tars one behind the other "
                    "(tar --concatenate joins them)"
                )
            return
        tar.members.clear()  # type: ignore[attr-defined]  # unknown to typeshed; else it holds every member
        if member.issparse():
            raise damaged(f"{member.name[:200]!r} is a sparse member, which refill does not read; write it in full")
        if sum(len(name) + len(value) for name, value in tar.pax_headers.items()) > _MAX_HEADER_BYTES:
            raise damaged("its global headers take more than 1 MiB")
        stream.archive_offset = tar.offset
        if tar.offset > size_bytes:
            raise damaged(f"truncated, {member.name!r} ends at byte {tar.offset}")
        yield member, header, start
        start = stream.tell()


class ShardStream(io.RawIOBase):
    """What tarfile reads headers from, and what hands out the data behind them: every byte is fetched once."""

    def __init__(self, size_bytes: int, read_range: Callable[[int, int], memoryview]) -> None:
        self.archive_offset = 0
        """Where the next header is."""
        self._size = size_bytes
        self._read_range = read_range
        self._place = 0
        self._range_start = 0
        self._range = memoryview(b"")
        self._header = bytearray()

    def tell(self) -> int:
        return self._place

    def seek(self, place: int, whence: int = 0) -> int:
        if whence != 0 or place != self._place:
            raise tarfile.ReadError(f"no header where one must be, looking at byte {place}")
        return place

    def read(self, size: int = -1) -> bytes:
        """For tarfile: header bytes, which are kept for :meth:`take_header`. It asks for as many as a header names."""
        if size < 0 or len(self._header) + size > _MAX_HEADER_BYTES:
            raise tarfile.ReadError("the headers of one member take more than 1 MiB")
        data = b"".join(self.pieces_to(min(self._size, self._place + size)))
        self._header += data
        return data

    def take_header(self) -> bytes:
        header = bytes(self._header)
        self._header.clear()
        return header

    def pieces_to(self, end: int) -> Iterator[memoryview]:
        """The bytes from here to ``end``, as they come."""
        while self._place < end:
            if self._place == self._range_start + len(self._range):
                self._range_start = self._place
                self._range = self._read_range(self._place, min(self._size, self._place + RANGE_BYTES))
            here = self._place - self._range_start
            piece = self._range[here : here + end - self._place]
            self._place += len(piece)
            yield piece


def key_of(name: str) -> str | None:
    """The path up to the first dot of its base name, as ``refill.formats.tar_samples.split_name`` has it, in a time
    that grows no faster than the name; None where there is none."""
    base = name.rfind("/") + 1
    dot = name.find(".", base)
    if dot == base and base > 0:  # the dot of a hidden file ends its folder's name, if that has none
        above = name.rfind("/", 0, base - 1) + 1
        return name[:dot] if "." not in name[above:base] else None
    return name[:dot] if dot > 0 else None


def _records(batch: list[tuple[int, int, int]]) -> RecordArray:
    return np.array(batch, dtype=RECORD)


def repeated_keys(keys: array[int]) -> tuple[int, int] | None:
    """Numbers of two samples of one key, by the hashes of all keys; None: there are none."""
    hashes = np.frombuffer(keys, dtype=np.uint64) if keys else np.zeros(0, np.uint64)
    order = np.argsort(hashes, kind="stable")
    same = np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]])
    return (int(order[same[0]]), int(order[same[0] + 1])) if len(same) else None
