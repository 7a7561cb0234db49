"""Parquet: a sample is a row, and a row group is a chunk, which is read and decoded whole (``rows.py``).

Nothing in a file says how long its rows are: that is known when a group has been decoded. But its footer says how much
all rows of a group take at most, where columns of text and bytes have their sizes in it, or no dictionaries: then an
index reads the footer alone. Else it reads the columns that are chosen, once, and decodes them.

The size statistics of pyarrow 20 or later say it. Each row then counts with the mean of its group: orders are planned
by that, and pods count what rows take when they have them. What needs each length (policies ``redox`` and ``exact``,
orders by length, the pinned tier) wants ``--checksums all``. A pod decodes a group in a thread, and ``chunk_size``
can't be chosen. Small groups shuffle better: 1 to 16 MB of rows are a good size.

Fields are the columns: numbers, text, bytes; lists of numbers are arrays, other lists are lists. Structs lie flat, as
``meta.id``; within lists they are dicts. A picture of ``datasets`` is the bytes of its file, for ``decode``, and has
its path in ``photo.path``. A null is ``None``.

A pod's CPU for a GB: 0.6 to 0.9 s of pictures, 1.3 to 2.2 of text and tokens, 8 of numbers alone (``make bench-rows``;
AMD EPYC, 2 cores). ``index`` and pods need pyarrow: ``pip install 'refill-cache[parquet]'``. The image has it; clients
need nothing.

Refused: a group of more than 256 MiB, of pages or of rows (write smaller ones: ``row_group_size``); lists of bytes,
nulls in lists of numbers, dates, decimals and other types (write them as text, or leave them out by ``--columns``);
encrypted files. Tested against pyarrow 26 and datasets 5.2.0.
"""

from __future__ import annotations

import asyncio
import io
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from refill.errors import EmptyDataset, InvalidInput
from refill.formats.rows import FIXED
from refill_service.cache_core.dataset_index import RecordArray
from refill_service.formats.interface import Listing, Options, Plan, Shard, ShardBytes, ShardReport, Source
from refill_service.formats.rows import (
    MOST_GROUP_BYTES,
    WRONG,
    Block,
    Column,
    Columns,
    Group,
    GroupDamaged,
    ReadFile,
    by_headers,
    head_bytes,
    need_pyarrow,
    one_line,
    plan_of_tables,
    rows_of,
    same_columns,
    scanned_groups,
    too_large,
    type_of,
    unsaid_of,
)
from refill_service.formats.thrift import INTEGERS, LIST, STRUCT, CompactReader, ThriftDamaged

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

NAME = "parquet"

_ENDINGS = (".parquet", ".parq", ".pq")
_MOST_FOOTER_BYTES = 16 << 20
_MAGIC, _ENCRYPTED = b"PAR1", b"PARE"
_END_BYTES = 8
"""The length of the footer, and the magic."""
_ENCRYPTION = 8
"""The field of what is said of a column that says how it is encrypted; the footer itself may not be."""
_NO_KEYS = "is encrypted, and pods have no keys: write it anew without encryption"
_GAP_BYTES = 1 << 20
"""Columns that are not wanted are read where they are smaller, rather than that another request is made."""
_BATCH_ROWS, _BATCH_BYTES = 1024, 8 << 20
"""Decoded at once, so that a group takes little more than its pages and its rows."""
_MOST_PAGE_HEADER = 1 << 20
"""It may hold the least and the largest value."""
_DICTIONARY_PAGE = 2
_NUM_VALUES = {0: 5, _DICTIONARY_PAGE: 7, 3: 8}
"""By the kind of a page, the field of its header that says how many values are in it, first of all."""
_MOST_ENCODINGS = 100
_MOST_LEVELS = 1000
"""Of definition: structs and lists in each other."""
_AS_LONG_AS_PAGES = {0, 3, 4, 6}
"""Encodings whose values take no more bytes than their pages: PLAIN, RLE, BIT_PACKED, DELTA_LENGTH_BYTE_ARRAY."""


def found(listing: Listing, options: Options) -> bool:
    return bool(listing.named(*_ENDINGS))


async def plan(listing: Listing, source: Source, options: Options) -> Plan:
    need_pyarrow()
    files = listing.named(*_ENDINGS)
    if not files:
        raise EmptyDataset(f"{listing.url} holds no .parquet")
    first = files[0]
    where = f"{listing.url}/{first.key}"
    size = first.size_bytes
    try:
        start = _footer_start(await source.read(first, max(0, size - _END_BYTES), size), size)
        footer = Footer.of(await source.read(first, start, size - _END_BYTES))
    except GroupDamaged as error:
        raise InvalidInput(f"{where}: {error}") from error
    found = plan_of_tables("Parquet", "a row group", footer.schema, files, options, where)
    if options.checksums == "all":
        return found
    if unsaid := footer.unsaid(same_columns(footer.schema, found.about, where), start):
        return replace(found, how=f"{found.how}: {unsaid}")
    return by_headers(found, {first.key: (start, bytes(footer.data))})


def scan(shard: Shard, data: ShardBytes, report: ShardReport) -> Iterator[RecordArray]:
    end = shard.size_bytes
    about, known = shard.about.format, shard.about.known
    try:
        if known is None:
            start, footer = footer_in(data, end)
        else:
            start, footer = known[0], Footer.of(memoryview(known[1]))
        columns = same_columns(footer.schema, about, data.source)
    except GroupDamaged as error:
        raise data.damaged(str(error), max(0, end - _END_BYTES)) from error
    groups = []
    for number in range(footer.metadata.num_row_groups):
        if not footer.metadata.row_group(number).num_rows:
            continue
        place = f"{number},{start},{end}"
        try:
            group = footer.group(number, columns, start, is_indexed=True)
        except GroupDamaged as error:
            raise data.damaged(f"row group {number}: {error}", start) from error
        groups.append((place, group.ranges[0][0] if group.ranges else start, group))
    return scanned_groups(shard.about, data, report, groups)


async def group(place: str, about: dict[str, Any], read: ReadFile, kept: dict[str, Any]) -> Group:
    """:param place: as :func:`footer_at` has it."""
    number, start, footer = await footer_at(place, read, kept)
    # In a thread, as all that reads a footer: it may have a hundred thousand columns.
    return await asyncio.to_thread(footer.group, number, same_columns(footer.schema, about, ""), start)


async def footer_at(place: str, read: ReadFile, kept: dict[str, Any]) -> tuple[int, int, Footer]:
    """The number of a row group, where the footer of its file begins, and the footer. Raises :class:`GroupDamaged`.

    :param place: that number, and where the footer begins and the file ends, so that one request gets it.
    """
    numbers = [int(each) if each.isdigit() and len(each) < 19 else -1 for each in place.split(",")]
    if len(numbers) != 3 or min(numbers) < 0 or not 0 < numbers[2] - _END_BYTES - numbers[1] <= _MOST_FOOTER_BYTES:
        raise GroupDamaged(f"{place[:60]!r} is no place of a row group")
    number, start, end = numbers
    footer: Footer | None = kept.get("footer")
    if footer is None:
        footer = kept["footer"] = await asyncio.to_thread(Footer.of, await read(start, end - _END_BYTES))
    if number >= footer.metadata.num_row_groups:
        raise GroupDamaged(f"there are {footer.metadata.num_row_groups} row groups")
    return number, start, footer


def footer_in(data: ShardBytes, size_bytes: int) -> tuple[int, Footer]:
    """Where a file's footer begins, and the footer. Raises :class:`GroupDamaged`."""
    start = _footer_start(data.read(max(0, size_bytes - _END_BYTES), size_bytes), size_bytes)
    return start, Footer.of(data.read(start, size_bytes - _END_BYTES))


class Beside(Protocol):
    """Columns of a group that lie in other files."""

    @property
    def ranges(self) -> Sequence[tuple[str, int, int]]:
        """What is read of them: ``(key, start, end)``."""

    def joined_to(
        self, batch: pa.RecordBatch, leaves: list[Column], first_row: int, pieces: Sequence[memoryview]
    ) -> tuple[pa.RecordBatch, list[Column]]:
        """Rows from this one on with these columns, too. Raises :class:`GroupDamaged`."""


class Footer:
    """What a file says at its end."""

    def __init__(self, metadata: pq.FileMetaData, data: memoryview) -> None:
        self.metadata, self.data = metadata, data
        self.schema = metadata.schema.to_arrow_schema()
        self._group_starts = _group_starts(data)

    @classmethod
    def of(cls, data: memoryview) -> Footer:
        import pyarrow as pa
        import pyarrow.parquet as pq

        # The smallest file with this footer: its magic, the footer, its length, its magic.
        whole = b"".join((_MAGIC, data, len(data).to_bytes(4, "little"), _MAGIC))
        try:
            return cls(pq.read_metadata(pa.BufferReader(whole)), data)
        except WRONG as error:
            raise GroupDamaged(f"its footer can't be read: {one_line(error)}") from error

    def group(
        self,
        number: int,
        columns: Columns,
        footer_start: int,
        *,
        is_indexed: bool = False,
        beside: Beside | None = None,
    ) -> Group:
        """:param is_indexed: whether it is to say what its rows take, which pods know by their index.
        :param beside: columns that come of other files.
        """
        import pyarrow.parquet as pq

        said = self.metadata.row_group(number)
        chunks = []
        for place, column in enumerate(self._columns_of(number)):
            path = column.path
            if not any(path == name or path.startswith(f"{name}.") for name in columns.read):
                continue
            if column.is_encrypted:
                raise GroupDamaged(f"column {path!r:.60} {_NO_KEYS}, or leave it out: --columns")
            start, end = column.pages_start, column.pages_start + column.compressed_bytes
            if column.dictionary_start is not None and 0 < column.dictionary_start < start:
                start, end = column.dictionary_start, column.dictionary_start + column.compressed_bytes
            if start < 4 or end < start or end > footer_start or column.num_values < 0:
                raise GroupDamaged(f"column {path!r:.60} can't lie at bytes {start}-{end}")
            chunks.append(_Chunk(path, start, end, column.uncompressed_bytes, column.num_values, place, column))
        pages_bytes = sum(max(each.uncompressed_bytes, each.end - each.start) for each in chunks)
        if pages_bytes > MOST_GROUP_BYTES:
            raise GroupDamaged(too_large(pages_bytes))
        ranges: list[tuple[int, int]] = []
        for each in sorted(chunks, key=lambda chunk: chunk.start):
            if ranges and each.start - ranges[-1][1] <= _GAP_BYTES:
                ranges[-1] = ranges[-1][0], max(each.end, ranges[-1][1])
            else:
                ranges.append((each.start, each.end))
        if sum(end - start for start, end in ranges) > MOST_GROUP_BYTES:
            raise GroupDamaged(too_large(sum(end - start for start, end in ranges)))

        def decode(pieces: Sequence[memoryview]) -> Iterator[Block]:
            file, row = _Pieces(ranges, pieces[: len(ranges)], footer_start), 0
            largest = max((_checked_pages(each, file) for each in chunks), default=0)
            # A value may be any of its dictionary, so that few bytes become many.
            of_row = pages_bytes // max(1, said.num_rows)
            batch_rows = max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, of_row), MOST_GROUP_BYTES // max(1, largest)))
            left = MOST_GROUP_BYTES
            try:
                table = pq.ParquetFile(
                    file,
                    metadata=self.metadata,
                    pre_buffer=False,
                    page_checksum_verification=True,
                )
                batches = table.iter_batches(batch_rows, row_groups=[number], columns=columns.read, use_threads=False)
                for batch in batches:
                    batch, leaves = batch.select(columns.read), columns.leaves  # "a.b" is b in a struct a, too
                    if beside is not None:
                        batch, leaves = beside.joined_to(batch, leaves, row, pieces[len(ranges) :])
                    block = rows_of(batch, leaves, left)
                    left -= len(block.data)
                    row += batch.num_rows
                    yield block
            except GroupDamaged:
                raise
            except WRONG as error:
                raise GroupDamaged(f"it can't be decoded: {one_line(error)}") from error

        most_bytes, unsaid = self._most_bytes(said.num_rows, columns, chunks) if is_indexed else (None, "")
        return Group(ranges, decode, said.num_rows, most_bytes, unsaid, () if beside is None else beside.ranges)

    def _columns_of(self, number: int) -> list[_ColumnSaid]:
        """What is said of the columns of a row group.

        Not by ``row_group(number).column(place)``: what C++ throws there ends the process.
        """
        num_groups = self.metadata.num_row_groups
        if len(self._group_starts) != num_groups:
            raise GroupDamaged(f"its footer has {len(self._group_starts)} row groups, and {num_groups}")
        reader = CompactReader(self.data)
        reader.place = self._group_starts[number]
        try:
            found = _columns_in_group(reader)
        except ThriftDamaged as error:
            raise GroupDamaged(f"its footer: {error}") from error
        if len(found) != self.metadata.num_columns:
            raise GroupDamaged(f"it has {len(found)} columns, and the file {self.metadata.num_columns}")
        return found

    def unsaid(self, columns: Columns, footer_start: int) -> str:
        """Why it does not say how long the rows of some group are at most. Empty: it does, or is damaged."""
        try:
            every = range(self.metadata.num_row_groups)
            groups = (self.group(each, columns, footer_start, is_indexed=True) for each in every)
            return next((group.unsaid for group in groups if group.most_bytes is None), "")
        except GroupDamaged:
            return ""

    def _most_bytes(self, num_rows: int, columns: Columns, chunks: Sequence[_Chunk]) -> tuple[int | None, str]:
        """What the rows of a group take at most, as far as that is said, and why it is not."""
        if unsaid := unsaid_of(columns):
            return None, unsaid
        if len(columns.leaves) != len(chunks):
            return None, "its columns can't be told apart by their names"
        found = num_rows * head_bytes(columns.leaves)
        for leaf, chunk in zip(columns.leaves, chunks, strict=True):
            column, of_said = self.metadata.schema.column(chunk.place), chunk.said
            size = of_said.text_bytes
            if leaf.kind in FIXED:
                continue
            if leaf.kind.startswith("list:"):
                if of_said.null_items != 0 and type_of(self.schema, columns, leaf).value_field.nullable:
                    return None, f"the footer does not say that no list of column {leaf.name[:60]!r} has nulls in it"
                found += chunk.num_values * np.dtype(leaf.kind.removeprefix("list:")).itemsize
            elif column.physical_type == "FIXED_LEN_BYTE_ARRAY":
                found += chunk.num_values * column.length
            elif size is not None:
                if size < 0:
                    raise GroupDamaged(f"column {leaf.name!r:.60} is said to have {size} bytes")
                found += size
            elif of_said.dictionary_start is None and _AS_LONG_AS_PAGES.issuperset(of_said.encodings):
                found += chunk.uncompressed_bytes
            else:
                return None, (
                    f"the footer does not say how long the values of column {leaf.name[:60]!r} are, which has a "
                    "dictionary (size statistics do, as pyarrow writes them from version 20 on)"
                )
        return found, ""


class _Chunk(NamedTuple):
    """A column of a row group."""

    path: str
    start: int
    end: int
    uncompressed_bytes: int
    num_values: int
    place: int
    """Among the columns of the file."""
    said: _ColumnSaid


class _Pieces(io.RawIOBase):
    """A file of which ranges are here."""

    def __init__(self, ranges: Sequence[tuple[int, int]], pieces: Sequence[memoryview], size_bytes: int) -> None:
        self._ranges = [(start, end, piece) for (start, end), piece in zip(ranges, pieces, strict=True)]
        self._size, self._place = size_bytes, 0

    def part(self, start: int, end: int) -> memoryview:
        for low, high, piece in self._ranges:
            if low <= start and end <= high:
                return piece[start - low : end - low]
        raise GroupDamaged(f"its pages lead to bytes {start}-{end}, which are not its own")

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = 0) -> int:
        self._place = offset + (0, self._place, self._size)[whence]
        return self._place

    def read(self, size: int = -1) -> bytes:
        end = self._size if size < 0 else self._place + size
        for low, high, piece in self._ranges:
            if low <= self._place < high:
                found = bytes(piece[self._place - low : min(end, high) - low])
                self._place += len(found)
                return found
        return b""


def _checked_pages(chunk: _Chunk, file: _Pieces) -> int:
    """The bytes of its dictionary, uncompressed. What its pages say that they become, before any of them is."""
    place, num_bytes, num_values, dictionary_bytes = chunk.start, 0, 0, 0
    while place < chunk.end:
        header = _PageHeader(file.part(place, min(chunk.end, place + _MOST_PAGE_HEADER)))
        place += header.num_bytes + header.compressed_bytes
        if place > chunk.end:
            raise GroupDamaged(f"a page of column {chunk.path!r:.60} ends at byte {place} of {chunk.end}")
        num_bytes += header.uncompressed_bytes
        if header.is_dictionary:
            dictionary_bytes = max(dictionary_bytes, header.uncompressed_bytes)
        num_values += 0 if header.is_dictionary else header.num_values
        if num_bytes > MOST_GROUP_BYTES or 8 * num_values > MOST_GROUP_BYTES:
            raise GroupDamaged(too_large(max(num_bytes, 8 * num_values)))
    if num_values != chunk.num_values:
        raise GroupDamaged(f"pages of column {chunk.path!r:.60} hold {num_values} values, and not {chunk.num_values}")
    return dictionary_bytes


class _PageHeader:
    """As much of a page's header as says how large the page is."""

    def __init__(self, data: memoryview) -> None:
        said: dict[int, int] = {}
        num_values = dict[int, int]()
        reader = CompactReader(data)
        try:
            for number, kind in reader.fields():
                if 1 <= number <= 3 and kind in INTEGERS:
                    said[number] = reader.integer()
                elif number in _NUM_VALUES.values() and kind == STRUCT:
                    for below, of_kind in reader.fields():
                        if below == 1 and of_kind in INTEGERS:
                            num_values[number] = reader.integer()
                        else:
                            reader.pass_over(of_kind)
                else:
                    reader.pass_over(kind)
        except ThriftDamaged as error:
            raise GroupDamaged(f"the header of a page: {error}") from error
        if len(said) < 3:
            raise GroupDamaged("the header of a page says no sizes")
        self.num_bytes = reader.place
        self.is_dictionary = said[1] == _DICTIONARY_PAGE
        self.uncompressed_bytes, self.compressed_bytes = said[2], said[3]
        self.num_values = num_values.get(_NUM_VALUES.get(said[1], 0), 0)
        if min(self.uncompressed_bytes, self.compressed_bytes, self.num_values) < 0:
            raise GroupDamaged("the header of a page says sizes that can't be")


class _ColumnSaid(NamedTuple):
    """What a footer says of one column of a row group."""

    path: str
    num_values: int
    uncompressed_bytes: int
    compressed_bytes: int
    pages_start: int
    dictionary_start: int | None
    encodings: list[int]
    text_bytes: int | None
    """Of all its values, where they are text or bytes, and size statistics say it."""
    null_items: int | None
    """Of lists whose items may be null, how many are, where size statistics say it."""
    is_encrypted: bool = False


def _group_starts(footer: memoryview) -> array[int]:
    """Where in the footer each row group begins. Raises :class:`GroupDamaged`."""
    found, reader = array("q"), CompactReader(footer)
    try:
        for number, kind in reader.fields():
            if (number, kind) != (4, LIST):  # of row groups
                reader.pass_over(kind)
                continue
            for _ in range(_structs(reader)):
                found.append(reader.place)
                reader.pass_over(STRUCT)
    except ThriftDamaged as error:
        raise GroupDamaged(f"its footer: {error}") from error
    return found


def _columns_in_group(reader: CompactReader) -> list[_ColumnSaid]:
    found: list[_ColumnSaid] = []
    for number, kind in reader.fields():
        if (number, kind) != (1, LIST):  # of columns
            reader.pass_over(kind)
            continue
        for place in range(_structs(reader)):
            said, is_encrypted = None, False
            for about, about_kind in reader.fields():
                if (about, about_kind) == (3, STRUCT):  # its metadata
                    said = _said_of_column(reader, place)
                else:
                    is_encrypted = is_encrypted or about == _ENCRYPTION
                    reader.pass_over(about_kind)
            if said is None:
                raise GroupDamaged(
                    f"column {place} {_NO_KEYS}" if is_encrypted else f"nothing is said of column {place}"
                )
            found.append(said._replace(is_encrypted=is_encrypted))
    return found


def _said_of_column(reader: CompactReader, place: int) -> _ColumnSaid:
    numbers, path, encodings = dict[int, int](), list[bytes](), list[int]()
    text_bytes, levels = None, list[int]()
    for number, kind in reader.fields():
        if (number, kind) == (2, LIST):
            encodings = reader.integers(_MOST_ENCODINGS)
        elif (number, kind) == (3, LIST):
            path = reader.texts(_MOST_LEVELS)
        elif number in (5, 6, 7, 9, 11) and kind in INTEGERS:
            numbers[number] = reader.integer()
        elif (number, kind) == (16, STRUCT):  # size statistics
            for below, of_kind in reader.fields():
                if below == 1 and of_kind in INTEGERS:
                    text_bytes = reader.integer()
                elif (below, of_kind) == (3, LIST):  # how many have each definition level
                    levels = reader.integers(_MOST_LEVELS)
                else:
                    reader.pass_over(of_kind)
        else:
            reader.pass_over(kind)
    try:
        name = b".".join(path).decode()
    except UnicodeDecodeError as error:
        raise GroupDamaged(f"the name of column {place} is no text") from error
    num_values, uncompressed, compressed, start = (numbers.get(each, 0) for each in (5, 6, 7, 9))
    null_items = levels[-2] if len(levels) > 1 else None
    dictionary = numbers.get(11)
    return _ColumnSaid(name, num_values, uncompressed, compressed, start, dictionary, encodings, text_bytes, null_items)


def _structs(reader: CompactReader) -> int:
    """How many follow."""
    count, kind = reader.items()
    if count and kind != STRUCT:
        raise ThriftDamaged(f"items of kind {kind}")
    return count


def _footer_start(tail: memoryview, size_bytes: int) -> int:
    """:param tail: the last bytes of a file."""
    magic, length = bytes(tail[4:]), int.from_bytes(tail[:4], "little")
    if magic == _ENCRYPTED:
        raise GroupDamaged(f"it {_NO_KEYS}")
    if magic != _MAGIC or not 0 < length <= size_bytes - 12:
        raise GroupDamaged("it is no file of Parquet, or cut off: it does not end with its magic")
    if length > _MOST_FOOTER_BYTES:
        raise GroupDamaged(f"its footer has {length:,} bytes, and {_MOST_FOOTER_BYTES:,} are read")
    return size_bytes - _END_BYTES - length
