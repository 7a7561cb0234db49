"""Arrow files, as Hugging Face's ``save_to_disk`` and cache have them: a sample is a row, a record batch is a chunk.

A file is messages one after another: ``FFFFFFFF``, u32 size of the metadata, metadata (a flatbuffer), body. The first
one is the schema; ``.arrow`` files of the IPC file format begin with ``ARROW1`` and have a footer besides, which is not
needed. A record batch is read and decoded whole (``rows.py``).

The metadata of a batch says how many rows it has, and how long the buffers of its columns are. So an index needs no
more than that of each batch; but where the next batch lies only the one before it says, which makes a request for each.
Of small batches that takes longer than to read all.

So batches of 8 MiB or more take 1 kB each, and files of smaller ones are read whole, once, and decoded. Fields, chunks
and all else are as of ``parquet``. A pod's CPU for a GB: 0.2 to 0.3 s of pictures, 0.8 to 1.3 of text and tokens, 29 of
numbers alone (``make bench-rows``; AMD EPYC, 2 cores).

Refused: what is refused of ``parquet``; compressed Arrow (Feather), and Arrow with dictionaries. Tested against pyarrow
26 and datasets 5.2.0.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from refill.errors import EmptyDataset, InvalidInput
from refill_service.cache_core.dataset_index import RecordArray
from refill_service.formats.interface import Listing, Options, Plan, Shard, ShardBytes, ShardReport, Source
from refill_service.formats.rows import (
    MOST_GROUP_BYTES,
    WRONG,
    Block,
    Columns,
    Group,
    GroupDamaged,
    ReadFile,
    by_headers,
    head_bytes,
    need_pyarrow,
    null_in_list,
    one_line,
    plan_of_tables,
    rows_of,
    same_columns,
    scanned_groups,
    too_large,
    unsaid_of,
)
from refill_service.object_store.base import ListedVersion

if TYPE_CHECKING:
    import pyarrow as pa

NAME = "arrow"

_ENDINGS = (".arrow", ".feather")
_MAGIC = b"ARROW1\0\0"
_START = struct.Struct("<II")
_MARK = 0xFFFFFFFF
_MOST_METADATA_BYTES = 16 << 20
_LOOKED_AT_BYTES = 64 << 10
"""Of the first file: most schemas are in it."""
_SCHEMA, _DICTIONARY, _RECORD_BATCH = 1, 2, 3
_LARGE_BATCH_BYTES = 8 << 20
"""From there on a request for each batch costs less than all bytes do, in requests of as many."""
_FIRST_METADATA_BYTES = 1 << 10


def found(listing: Listing, options: Options) -> bool:
    return bool(listing.named(*_ENDINGS))


async def plan(listing: Listing, source: Source, options: Options) -> Plan:
    need_pyarrow()
    files = listing.named(*_ENDINGS)
    if not files:
        raise EmptyDataset(f"{listing.url} holds no .arrow")
    first = files[0]
    where = f"{listing.url}/{first.key}"
    try:
        data = await source.read(first, 0, _LOOKED_AT_BYTES)
        start = len(_MAGIC) if data[:8] == _MAGIC else 0
        end = _metadata_end(data[start:], start, first.size_bytes)
        if end > len(data):
            data = await source.read(first, 0, end)
        schema = _schema(data[start:end])
        first_bytes = await _batch_bytes(source, first, data, end)
    except GroupDamaged as error:
        raise InvalidInput(f"{where}: {error}") from error
    found = plan_of_tables("Arrow", "a record batch", schema, files, options, where)
    if unsaid := unsaid_of(same_columns(schema, found.about, where)):
        return replace(found, how=f"{found.how}: {unsaid}")
    if options.checksums == "first-read" or (options.checksums is None and first_bytes >= _LARGE_BATCH_BYTES):
        return by_headers(found, {})
    return found


async def _batch_bytes(source: Source, file: ListedVersion, data: memoryview, place: int) -> int:
    """Of the first record batch; 0: there is none.

    :param data: the start of the file; the batch is at this place, or not in the file at all.
    """
    if place + _START.size > file.size_bytes:
        return 0
    if place + _START.size > len(data):
        data = await source.read(file, 0, place + _LOOKED_AT_BYTES)
    end = _metadata_end(data[place:], place, file.size_bytes)
    if end == place + _START.size:
        return 0
    if end > len(data):
        data = await source.read(file, 0, end)
    return _Message.of(data[place:end]).body_bytes


def scan(shard: Shard, data: ShardBytes, report: ShardReport) -> Iterator[RecordArray]:
    size = shard.size_bytes
    groups: list[tuple[str, int, Group]] = []
    columns: Columns | None = None
    schema, schema_place, place = None, "", 0
    try:
        for place, end, metadata in _messages(data, size):
            message = _Message.of(metadata)
            body_end = end + message.body_bytes
            if body_end > size:
                raise GroupDamaged(f"a record batch ends at byte {body_end} of {size}, truncated?")
            if schema is None:
                schema = _schema(metadata)
                columns = same_columns(schema, shard.about.format, data.source)
                schema_place = f"{place},{end}"
            elif message.kind == _RECORD_BATCH:
                assert columns is not None
                named = f"{len(groups)},{place},{body_end},{schema_place}"
                if message.num_rows:
                    groups.append((named, place, _group(schema, columns, place, body_end, message)))
            else:
                what = f"a message of kind {message.kind}"
                raise GroupDamaged(_DICTIONARIES if message.kind == _DICTIONARY else what)
    except GroupDamaged as error:
        raise data.damaged(str(error), place) from error
    if schema is None:
        raise data.damaged("it is no file of Arrow: it holds no schema", place)
    return scanned_groups(shard.about, data, report, groups)


def _messages(data: ShardBytes, size: int) -> Iterator[tuple[int, int, memoryview]]:
    """``(where it begins, where its metadata ends, the bytes up to there)`` of each message but the end mark."""
    few = _FIRST_METADATA_BYTES
    start = data.read(0, min(size, few))
    is_file = start[: len(_MAGIC)] == _MAGIC
    place = len(_MAGIC) if is_file else 0
    start = start[place:]
    while place + _START.size <= size:
        end = _metadata_end(start, place, size)
        if end == place + _START.size:
            return
        few = max(few, -(-(end - place) // 1024) << 10)  # those of a file are about as long
        metadata = start[: end - place] if end - place <= len(start) else data.read(place, end)
        yield place, end, metadata
        place = end + _Message.of(metadata).body_bytes
        start = data.read(place, min(size, place + few)) if place < size else memoryview(b"")
    if is_file:
        raise GroupDamaged("it ends without the mark of its end, truncated?")


async def group(place: str, about: dict[str, Any], read: ReadFile, kept: dict[str, Any]) -> Group:
    """:param place: the number of the record batch, where its message begins and ends, and where the schema's does."""
    numbers = [int(each) if each.isdigit() and len(each) < 19 else -1 for each in place.split(",")]
    if len(numbers) != 5 or min(numbers) < 0:
        raise GroupDamaged(f"{place[:60]!r} is no place of a record batch")
    _, start, end, schema_start, schema_end = numbers
    if not start <= end <= start + MOST_GROUP_BYTES + _MOST_METADATA_BYTES or not (
        schema_start <= schema_end <= schema_start + _MOST_METADATA_BYTES
    ):
        raise GroupDamaged(f"{place[:60]!r} is no place of a record batch")
    schema = kept.get("schema")
    if schema is None:
        schema = kept["schema"] = _schema(await read(schema_start, schema_end))
    return _group(schema, same_columns(schema, about, ""), start, end, None)


def _group(schema: pa.Schema, columns: Columns, start: int, end: int, message: _Message | None) -> Group:
    """:param message: its metadata, where that is known."""
    if end - start > MOST_GROUP_BYTES:
        raise GroupDamaged(too_large(end - start))
    num_rows, most_bytes, unsaid = 0, None, ""
    if message is not None:
        message.check_plain()
        num_rows, (most_bytes, unsaid) = message.num_rows, _most_bytes(schema, columns, message)

    def decode(pieces: Sequence[memoryview]) -> Iterator[Block]:
        import pyarrow as pa

        (data,) = pieces
        _Message.of(data[: _metadata_end(data, 0, len(data))]).check_plain()
        try:
            batch = pa.ipc.read_record_batch(pa.py_buffer(data), schema)
            batch.validate(full=True)
            yield rows_of(batch.select(columns.read), columns.leaves, MOST_GROUP_BYTES)
        except GroupDamaged:
            raise
        except WRONG as error:
            raise GroupDamaged(f"it can't be decoded: {one_line(error)}") from error

    return Group([(start, end)], decode, num_rows, most_bytes, unsaid)


def _most_bytes(schema: pa.Schema, columns: Columns, message: _Message) -> tuple[int | None, str]:
    """What the rows of a batch take at most, as far as that is said, and why it is not."""
    if unsaid := unsaid_of(columns):
        return None, unsaid
    found, place, node = message.num_rows * head_bytes(columns.leaves), 0, 0
    for name in schema.names:
        layout = _layout(schema.field(name).type)
        if layout is None:
            return None, f"it is not known how column {name[:60]!r} lies in a batch"
        buffers, are_items = layout
        lengths = message.buffers[place : place + len(buffers)]
        nulls = message.nulls[node : node + len(are_items)]
        if len(lengths) != len(buffers) or len(nulls) != len(are_items):
            raise GroupDamaged(f"a record batch of {len(message.buffers)} buffers, which are too few for its columns")
        if name in columns.read:
            if any(count for count, is_item in zip(nulls, are_items, strict=True) if is_item):
                return None, null_in_list(name)  # or no more than a null in place of a list
            found += sum(length * times for length, times in zip(lengths, buffers, strict=True))
        place, node = place + len(buffers), node + len(are_items)
    return found, ""


class _Layout(NamedTuple):
    """Where the buffers of a column are in a batch, as its metadata says."""

    buffers: list[int]
    """Of each, in their order, how many bytes of rows each of its bytes is at most. Numbers outside of lists are in the
    head of a row."""
    are_items: list[bool]
    """Of each field, it and those below it, whether lists are of it."""


def _layout(type_: pa.DataType, *, is_item: bool = False) -> _Layout | None:
    """None: it is not known of this type."""
    import pyarrow as pa

    types = pa.types
    unknown = (
        types.is_union, types.is_run_end_encoded, types.is_string_view, types.is_binary_view, types.is_list_view,
        types.is_large_list_view,
    )  # fmt: skip
    if any(is_one(type_) for is_one in unknown):
        return None
    if types.is_struct(type_) or type_.num_fields:
        found = _Layout([0] if types.is_struct(type_) or types.is_fixed_size_list(type_) else [0, 0], [is_item])
        for place in range(type_.num_fields):
            below = _layout(type_.field(place).type, is_item=not types.is_struct(type_))
            if below is None:
                return None
            found = _Layout(found.buffers + below.buffers, found.are_items + below.are_items)
        return found
    if types.is_null(type_):
        buffers: list[int] = []
    elif types.is_fixed_size_binary(type_):
        buffers = [0, 1]
    elif types.is_primitive(type_) or types.is_dictionary(type_) or types.is_decimal(type_):
        buffers = [0, (8 if types.is_boolean(type_) else 1) if is_item else 0]
    else:
        buffers = [0, 0, 1]
    return _Layout(buffers, [is_item])


def _schema(data: memoryview) -> pa.Schema:
    import pyarrow as pa

    if _Message.of(data).kind != _SCHEMA:
        raise GroupDamaged("it is no file of Arrow: it does not begin with a schema")
    try:
        return pa.ipc.read_schema(pa.py_buffer(data))
    except WRONG as error:
        raise GroupDamaged(f"its schema can't be read: {one_line(error)}") from error


def _metadata_end(data: memoryview, place: int, size_bytes: int) -> int:
    """Where the metadata of the message that begins with ``data``, at ``place`` of a file, ends."""
    if len(data) < _START.size:
        raise GroupDamaged("it ends within a message, truncated?")
    mark, length = map(int, _START.unpack_from(data))
    if mark != _MARK:
        raise GroupDamaged("it is no file of Arrow, or of a version before 0.15: a message begins without its mark")
    if length > _MOST_METADATA_BYTES or place + _START.size + length > size_bytes:
        raise GroupDamaged(f"the metadata of a message has {length:,} bytes: the file is cut off, or damaged")
    return place + _START.size + length


_DICTIONARIES = (
    "it has columns of dictionaries, which lie in messages of their own: write them anew as text or numbers, or as"
    " Parquet"
)


class _Message(NamedTuple):
    """A message of a stream: what it is, and where its body is."""

    kind: int
    body_bytes: int
    is_compressed: bool
    num_rows: int
    buffers: list[int]
    """Bytes of each, of a record batch."""
    nulls: list[int]
    """Of each field, how many."""

    @classmethod
    def of(cls, data: memoryview) -> _Message:
        """:param data: up to the end of its metadata."""
        try:
            message = _Table.root(data[_START.size :])
            kind, body_bytes = message.number(1, "<B"), message.number(3, "<q")
            header = message.table(2)
            num_rows, is_compressed, buffers, nulls = 0, False, list[int](), list[int]()
            if kind == _RECORD_BATCH and header is not None:
                num_rows, is_compressed = header.number(0, "<q"), header.place_of(3) is not None
                nulls, buffers = header.second_of_pairs(1), header.second_of_pairs(2)
        except (struct.error, ValueError) as error:
            raise GroupDamaged(f"the metadata of a message is none: {one_line(error)}") from error
        if min(body_bytes, num_rows, *buffers) < 0:
            raise GroupDamaged(f"a message of {body_bytes} bytes, {num_rows} rows, or buffers of a negative size")
        return cls(kind, body_bytes, is_compressed, num_rows, buffers, nulls)

    def check_plain(self) -> None:
        if self.kind != _RECORD_BATCH:
            raise GroupDamaged("it is no record batch")
        if self.is_compressed:
            raise GroupDamaged(
                "it is compressed, as Feather is: write it anew without (compression=None, or 'uncompressed'), or as"
                " Parquet"
            )


class _Table:
    """A table of a flatbuffer: its fields by their numbers."""

    def __init__(self, data: memoryview, place: int) -> None:
        self._data, self._place = data, place
        self._fields = place - self._read("<i", place)
        self._size = self._read("<H", self._fields)

    @classmethod
    def root(cls, data: memoryview) -> _Table:
        return cls(data, struct.unpack_from("<I", data)[0])

    def place_of(self, field: int) -> int | None:
        """None: it is not there."""
        if 4 + 2 * field + 2 > self._size:
            return None
        offset = self._read("<H", self._fields + 4 + 2 * field)
        return self._place + offset if offset else None

    def number(self, field: int, layout: str) -> int:
        place = self.place_of(field)
        return 0 if place is None else self._read(layout, place)

    def table(self, field: int) -> _Table | None:
        place = self.place_of(field)
        return None if place is None else _Table(self._data, place + self._read("<I", place))

    def second_of_pairs(self, field: int) -> list[int]:
        """Of a vector of pairs of 64 bits."""
        place = self.place_of(field)
        if place is None:
            return []
        place += self._read("<I", place)
        count = self._read("<I", place)
        found: list[int] = np.frombuffer(self._data, "<i8", 2 * count, place + 4)[1::2].tolist()
        return found

    def _read(self, layout: str, place: int) -> int:
        if place < 0:
            raise ValueError("it leads to a place before it")
        return int(struct.unpack_from(layout, self._data, place)[0])
