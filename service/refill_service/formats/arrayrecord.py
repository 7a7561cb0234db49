"""ArrayRecord: where do records lie? The footer says where each chunk begins; a record is a sample if each has its own.

A file ends with a block of 64 KiB that says where the footer begins, a chunk of its own with a line for each chunk of
records. Files of several records a chunk (``group_size``) are refused: those are packed together, or no footer says
where each lies. Layout: ``refill.formats.arrayrecord``.

So write ``ArrayRecordWriter(path, "group_size:1")``, as Grain wants it. Fields are those of ``tfrecord``. Unless files
are ``uncompressed``, ``index`` and the client need zstandard: ``pip install 'refill-cache[arrayrecord]'``.

Refused: several records a chunk, brotli and snappy, ``transpose``. Checksums in the file are not checked. Tested
against array-record 0.8.6.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

import numpy as np

from refill.errors import EmptyDataset, InvalidInput
from refill.formats.arrayrecord import (
    BLOCK_BYTES,
    CUT_BYTES,
    HEADER_BYTES,
    Chunk,
    chunk_in,
    header_in,
    unpacked,
    without_cuts,
)
from refill.formats.protobuf import fields, message, varint, varints
from refill.formats.tfrecord import kind_of
from refill_service.cache_core.dataset_index import Int64Array, RecordArray
from refill_service.formats.interface import Listing, Options, Plan, Shard, ShardBytes, ShardReport, Source, records_of

NAME = "arrayrecord"

_NAME = re.compile(r"\.array_?record(s?|-\d+-of-\d+)$", re.IGNORECASE)
_FIRST_CHUNK = 64
"""Where it begins: a signature lies before it."""
_MAGIC = 0x71930E704FDAE05E
_LAST_BYTES = 160
"""Of the last block: more is padding."""
_LOOKED_AT_BYTES = 4096
"""Of the largest file, to see what records hold; all of its first record, where that is packed."""
_MOST_LOOKED_AT_BYTES = 16 << 20
_LEAST_FOOTER_READ_BYTES = 4096
_MOST_FOOTER_BYTES = 256 << 20
"""Of some twenty million records in a file."""
_PIECE_BYTES = 1 << 20
_NUMBERS_A_LINE = 6
"""A tag before each of place, bytes unpacked, number of records."""
_TAGS = np.array([8, 16, 24], np.uint64)
_DAMAGED = (ValueError, IndexError, struct.error)
_GROUPED = (
    "chunks of several records, which are packed together: write it with group_size:1 (as Grain wants it for random "
    "access), or as TFRecord"
)


def found(listing: Listing, options: Options) -> bool:
    return any(_NAME.search(each.key) for each in listing.objects)


async def plan(listing: Listing, source: Source, options: Options) -> Plan:
    files = [each for each in listing.objects if _NAME.search(each.key)] or listing.objects
    if not files:
        raise EmptyDataset(f"{listing.url} holds no files of ArrayRecord")
    largest = max(files, key=lambda each: each.size_bytes)
    where = f"{listing.url}/{largest.key}"
    if largest.size_bytes < 2 * BLOCK_BYTES:
        raise InvalidInput(
            f"{where} is no ArrayRecord: it has {largest.size_bytes} bytes, and one has two blocks of 64 KiB"
        )
    try:
        head = await source.read(largest, _FIRST_CHUNK, _FIRST_CHUNK + _LOOKED_AT_BYTES)
        size, _, _ = header_in(head)
        if _is_packed(head) and len(head) < size <= _MOST_LOOKED_AT_BYTES:
            head = await source.read(largest, _FIRST_CHUNK, _end(_FIRST_CHUNK, size))
            head = without_cuts(head, BLOCK_BYTES - _FIRST_CHUNK)
        holds = _what_it_holds(head)
    except _DAMAGED as error:
        raise InvalidInput(f"{where} is no ArrayRecord that can be read: {str(error)[:200]}") from error
    said = f"records of {'bytes' if holds == 'bytes' else f'tf.{holds}'}"
    return Plan(
        f"{len(files):,} files of ArrayRecord with {said}", [Shard.of(each) for each in files], {"holds": holds}, False
    )


def scan(shard: Shard, data: ShardBytes, report: ShardReport) -> Iterator[RecordArray]:
    end = shard.size_bytes - BLOCK_BYTES
    if end < BLOCK_BYTES or end % BLOCK_BYTES:
        raise data.damaged("it is no ArrayRecord, or cut off: it is not of whole blocks of 64 KiB", shard.size_bytes)
    try:
        last = chunk_in(data.read(end, end + _LAST_BYTES)[CUT_BYTES:])
        tag, start, magic_tag, magic = varints(last.records)[:4].tolist()
        if (tag, magic_tag, magic) != (8, 16, _MAGIC) or last.packing:
            raise ValueError("it does not say where the footer is")
    except _DAMAGED as error:
        why = f"it is no ArrayRecord, or cut off: {str(error)[:200]}"
        raise data.damaged(why, end) from error
    if not _FIRST_CHUNK <= start < end:
        raise data.damaged(f"its footer can't begin at byte {start}", end)
    try:
        footer = _footer(data, start, end)
        lines = unpacked(footer.records, footer.packing, footer.num_bytes)
        about_bytes, _ = varint(unpacked(footer.sizes, footer.packing), 0)
        _check_head(lines[:about_bytes], footer.num_records - 1)
        before: int | None = None
        for place in _places(lines[about_bytes:], footer.num_records - 1):
            yield from _records(place, before, start)
            before = int(place[-1])
        if before is not None:
            yield _one(before, start)
    except InvalidInput as error:
        raise data.damaged(error.message, start) from error
    except _DAMAGED as error:
        raise data.damaged(f"its footer can't be read: {str(error)[:200]}", start) from error


def _is_packed(head: memoryview) -> bool:
    return head[HEADER_BYTES] != 0


def _what_it_holds(head: memoryview) -> str:
    """:param head: of a chunk: all of it where it is packed and not too long."""
    size, num_records, num_bytes = header_in(head)
    if num_records != 1:
        raise ValueError(f"its records lie in {_GROUPED}")
    if not _is_packed(head):
        sizes_bytes, place = varint(head, HEADER_BYTES + 1)
        return kind_of(head[place + sizes_bytes :][:num_bytes], num_bytes) or "bytes"
    if size > len(head):
        return "bytes"
    chunk = chunk_in(head)
    return kind_of(unpacked(chunk.records, chunk.packing, num_bytes), num_bytes) or "bytes"


def _end(start: int, size: int) -> int:
    """Of bytes that begin in a file outside of a cut, with the cuts between them."""
    in_block = BLOCK_BYTES - CUT_BYTES
    return start + size + CUT_BYTES * ((size + (start + in_block - 1) % BLOCK_BYTES) // in_block)


def _footer(data: ShardBytes, start: int, end: int) -> Chunk:
    """Most often by one read: of 1/2000 of the file, since padding up to a block's end follows."""
    read_to = min(end, start + max(_LEAST_FOOTER_READ_BYTES, end // 2000))
    raw, cut = data.read(start, read_to), -start % BLOCK_BYTES
    size, _, _ = header_in(without_cuts(raw, cut))
    if (whole := _end(start, size)) > end or size > _MOST_FOOTER_BYTES:
        raise ValueError(f"it has {size} bytes, and {end - start} are left of the file")
    if whole > read_to:
        raw = memoryview(b"".join([raw, data.read(read_to, whole)]))
    return chunk_in(without_cuts(raw, cut))


def _check_head(head: memoryview, num_chunks: int) -> None:
    about = dict(fields(message(dict(fields(head)).get(1, 0))))
    if (about.get(1), about.get(2)) != (1, num_chunks):
        raise ValueError(f"it is of version {about.get(1)}, with {about.get(2)} chunks of which {num_chunks} are there")
    options = about.get(4)
    if isinstance(options, memoryview) and b"transpose:true" in bytes(options):
        raise InvalidInput("its records are transposed, and no ranges of bytes: write it with transpose:false")


def _places(lines: memoryview, count: int) -> Iterator[Int64Array]:
    """Where chunks begin, some at a time."""
    start, seen = 0, 0
    left = np.zeros(0, np.uint64)
    while start < len(lines):
        end = min(len(lines), start + _PIECE_BYTES)
        for _ in range(10):  # to the end of a number
            end += end < len(lines) and lines[end - 1] > 127
        numbers = np.concatenate([left, varints(lines[start:end])])
        start = end
        whole = len(numbers) - len(numbers) % _NUMBERS_A_LINE
        table, left = numbers[:whole].reshape(-1, _NUMBERS_A_LINE), numbers[whole:]
        if (table[:, ::2] != _TAGS).any() or (table[:, 1] >= 2**62).any():
            raise ValueError(f"a line of it is none of the first {seen + len(table)}")
        if (table[:, 5] != 1).any():
            raise InvalidInput(f"its records lie in {_GROUPED}")
        seen += len(table)
        if len(table):
            yield table[:, 1].astype(np.int64)
    if seen != count or len(left):
        raise ValueError(f"it has {seen} lines, and should have {count}")


def _records(places: Int64Array, before: int | None, end: int) -> Iterator[RecordArray]:
    """Of all chunks but the last one of these; and of the one before them."""
    starts = places if before is None else np.concatenate([[before], places])
    lengths = np.diff(starts)
    if int(starts[0]) < _FIRST_CHUNK or int(starts[-1]) >= end or (lengths < HEADER_BYTES).any():
        raise ValueError(f"chunks can't lie as it says, between {int(starts[0])} and {int(starts[-1])}")
    if len(lengths):
        yield records_of(starts[:-1], lengths)


def _one(start: int, end: int) -> RecordArray:
    return records_of(np.array([start], np.int64), np.array([end - start], np.int64))
