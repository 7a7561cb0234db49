"""Arrow files, as Hugging Face's ``save_to_disk`` and cache have them: a sample is a row, a record batch is a chunk.

A file is messages one after another: ``FFFFFFFF``, u32 size of the metadata, metadata (a flatbuffer), body. The first
one is the schema; ``.arrow`` files of the IPC file format begin with ``ARROW1`` and have a footer besides, which is not
needed. A record batch is read and decoded whole (``rows.py``).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from refill.errors import EmptyDataset, InvalidInput
from refill_service.datasets.index_writer import RecordArray
from refill_service.formats.interface import (
    Listing,
    Options,
    Plan,
    Shard,
    ShardBytes,
    ShardReport,
    Source,
    refuse_options,
)
from refill_service.formats.rows import (
    MOST_GROUP_BYTES,
    WRONG,
    Block,
    Columns,
    Group,
    GroupDamaged,
    ReadFile,
    need_pyarrow,
    one_line,
    plan_of_tables,
    rows_of,
    same_columns,
    scanned_groups,
    too_large,
)

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


def found(listing: Listing, options: Options) -> str | None:
    files = len(listing.named(*_ENDINGS))
    return f"{files:,} files of Arrow" if files else None


async def plan(listing: Listing, source: Source, options: Options) -> Plan:
    refuse_options(NAME, options)
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
    except GroupDamaged as error:
        raise InvalidInput(f"{where}: {error}") from error
    return plan_of_tables("Arrow", "a record batch", schema, files, options, where)


def scan(shard: Shard, data: ShardBytes, report: ShardReport) -> Iterator[RecordArray]:
    size = shard.size_bytes
    place = len(_MAGIC) if size >= len(_MAGIC) and data.read(0, len(_MAGIC)) == _MAGIC else 0
    groups: list[tuple[str, int, Group]] = []
    columns: Columns | None = None
    schema, schema_place = None, ""
    try:
        while place + _START.size <= size:
            end = _metadata_end(data.read(place, place + _START.size), place, size)
            if end == place + _START.size:
                break  # the end mark
            message = _Message.of(data.read(place, end))
            body_end = end + message.body_bytes
            if body_end > size:
                raise GroupDamaged(f"a record batch ends at byte {body_end} of {size}, truncated?")
            if schema is None:
                schema = _schema(data.read(place, end))
                columns = same_columns(schema, shard.about, data.source)
                schema_place = f"{place},{end}"
            elif message.kind == _RECORD_BATCH:
                about = f"{len(groups)},{place},{body_end},{schema_place}"
                assert columns is not None
                groups.append((about, place, _group(schema, columns, place, body_end, message)))
            else:
                what = f"a message of kind {message.kind}"
                raise GroupDamaged(_DICTIONARIES if message.kind == _DICTIONARY else what)
            place = body_end
    except GroupDamaged as error:
        raise data.damaged(str(error), place) from error
    if schema is None:
        raise data.damaged("it is no file of Arrow: it holds no schema", place)
    return scanned_groups(shard, data, report, groups)


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
    if message is not None:
        message.check_plain()

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

    return Group([(start, end)], decode)


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
    kind: int
    body_bytes: int
    is_compressed: bool

    @classmethod
    def of(cls, data: memoryview) -> _Message:
        """:param data: up to the end of its metadata."""
        try:
            message = _Table.root(data[_START.size :])
            kind, body_bytes = message.number(1, "<B"), message.number(3, "<q")
            header = message.table(2)
            is_compressed = kind == _RECORD_BATCH and header is not None and header.place_of(3) is not None
        except (struct.error, ValueError) as error:
            raise GroupDamaged(f"the metadata of a message is none: {one_line(error)}") from error
        if body_bytes < 0:
            raise GroupDamaged(f"a message of {body_bytes} bytes")
        return cls(kind, body_bytes, is_compressed)

    def check_plain(self) -> None:
        if self.kind != _RECORD_BATCH:
            raise GroupDamaged("it is no record batch")
        if self.is_compressed:
            raise GroupDamaged(
                "it is compressed, as Feather is: write it anew without (compression=None, or 'uncompressed'), or as"
                " Parquet"
            )


class _Table:
    """Of a flatbuffer."""

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

    def _read(self, layout: str, place: int) -> int:
        if place < 0:
            raise ValueError("it leads to a place before it")
        return int(struct.unpack_from(layout, self._data, place)[0])
