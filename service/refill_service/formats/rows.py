"""How do groups of rows of tables become samples? A pod, or ``refill index``, decodes a group, once, by pyarrow.

A row of Parquet or Arrow is no range of bytes. So a blob of such a dataset is a *group*: the rows of a Parquet row
group, or of an Arrow record batch, one after another as ``refill/formats/rows.py`` describes them. Its name is
``KEY#PLACE``, the file's key and the group's place there. Everything above reads groups as it reads blobs, by ranges of
samples; what the range is cut from is decoded here.

How long each row is nobody knows before the group is decoded. An index that was made from headers alone (``MEANS``)
says what the rows of a group take together, at most, and that each is as long as their mean. Orders are planned by
that; a pod counts what rows take when it has them.

Files come from strangers: what a group takes is checked against :data:`MOST_GROUP_BYTES` before it is allocated.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from refill.errors import InvalidInput
from refill.formats.clips import VIDEO, Cut
from refill.formats.rows import FIXED
from refill_service.cache_core.dataset_index import RECORD, RecordArray
from refill_service.formats.interface import (
    Options,
    Plan,
    Shard,
    ShardBytes,
    ShardReport,
    checked_windows,
    records_of,
)
from refill_service.object_store.base import ListedVersion

if TYPE_CHECKING:
    import pyarrow as pa

MEANS = "mean_lengths"
"""Of a format, as an index describes it: lengths of rows are means of their groups."""
MOST_GROUP_BYTES = 256 << 20
"""Of a group's rows, decoded; and of its pages, before they are rows."""
_MOST_COLUMNS = 2000
_MOST_JSON_VALUES = 4_000_000
"""Of a column, decoded at once: each becomes a value of Python's for a moment, of some 100 bytes."""


class ReadFile(Protocol):
    """Bytes ``[start, end)`` of a group's file, or of the one with this key."""

    def __call__(self, start: int, end: int, key: str | None = None, /) -> Awaitable[memoryview]: ...


WRONG = (ValueError, OSError, ArithmeticError, LookupError, TypeError, NotImplementedError, MemoryError)
"""What pyarrow raises at bytes that are none of its format: its own errors are such."""


class GroupDamaged(ValueError):
    """Why a group can't be decoded."""


class Block(NamedTuple):
    """Some rows of a group, one after another."""

    data: bytes
    lengths: NDArray[np.int64]
    """Of each row, ``(n,)``."""


class Group(NamedTuple):
    """What is read of a file for a group, and what makes rows of it, in a thread."""

    ranges: list[tuple[int, int]]
    decode: Callable[[Sequence[memoryview]], Iterator[Block]]
    """Of the bytes of these ranges, and of those of other files. Raises :class:`GroupDamaged`."""
    num_rows: int
    most_bytes: int | None
    """That its rows take, as far as headers say; None: they do not."""
    unsaid: str = ""
    """Why they do not."""
    of_others: Sequence[tuple[str, int, int]] = ()
    """What is read beside it: ``(key, start, end)``."""


class Column(NamedTuple):
    """A leaf of a table that is a field of samples."""

    name: str
    kind: str
    """As ``refill/formats/rows.py`` names it."""
    way: tuple[int, ...]
    """Through structs, from the columns that are read."""


class Columns(NamedTuple):
    """Which columns of a table are read, and which fields they become."""

    read: list[str]
    """Columns of the table, in its order."""
    leaves: list[Column]
    """The fields that they become."""


class Reach(NamedTuple):
    """What has to be read of a group for some of its rows, where they are no good alone: ``(rows,)`` each."""

    first: NDArray[np.int64]
    """For a window that begins with this row, the first row that is read; -1: it can't begin there."""
    end: NDArray[np.int64]
    """For a window that ends with this row, where the rows that are read end; more than there are: it can't end
    there."""


class RowFormat(Protocol):
    """What a format of tables has beside what each format has."""

    NAME: str

    async def group(self, place: str, about: dict[str, Any], read: ReadFile, kept: dict[str, Any]) -> Group:
        """The group at a place, as its blob's name has it. Raises :class:`GroupDamaged`.

        :param kept: what may be kept of the file for its other groups.
        """


def need_pyarrow() -> None:
    """Raises :class:`InvalidInput` where it is not installed."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise InvalidInput(
            "rows of Parquet and Arrow are decoded by pyarrow, which is not installed here: "
            "pip install 'refill-cache[parquet]'"
        ) from error


def plan_of_tables(
    what: str, unit: str, schema: pa.Schema, files: Sequence[ListedVersion], options: Options, where: str
) -> Plan:
    """:param schema: of the first file, which the others must have, too."""
    read, leaves = chosen_columns(schema, options.columns, where)
    about: dict[str, Any] = {"columns": [[each.name, each.kind] for each in leaves], "read": read}
    if options.windows is not None:
        about |= {"windows": checked_windows(*options.windows), "episodes": options.episodes}
        if dict(about["columns"]).get(options.episodes, "").lstrip("u") not in ("int8", "int16", "int32", "int64"):
            raise InvalidInput(
                f"{where}: windows lie within episodes, and it has no column {options.episodes!r:.60} of whole numbers "
                f"that says which row is of which: --episodes names it; it has {_few(schema.names)}"
            )
    few = ", ".join(f"{each.name} ({each.kind})" for each in leaves[:4]) + ", ..." * (len(leaves) > 4)
    why = f"{len(files):,} files of {what} with columns {few}; a chunk is {unit}, which pods decode"
    folders = [part.partition("=")[0] for each in files for part in each.key.split("/")[:-1] if "=" in part]
    if folders:
        few = ", ".join(dict.fromkeys(folders))[:100]
        why += f"; columns that folders name ({few}) are left out: to have them, write them into the files"
    how = "these columns are read and decoded once, for lengths and checksums of rows"
    shards, overlaps = [Shard.of(each, AboutFile(about)) for each in files], False
    if options.windows is not None:
        length, stride = options.windows
        why += f"; a sample is {length:,} rows of an episode, one each {stride:,}"
        overlaps = stride < length
    return Plan(why, shards, about, True, in_parts=True, how=how, overlaps=overlaps, passed_over="rows")


class AboutFile(NamedTuple):
    """What a scan is to know."""

    format: dict[str, Any]
    """As the index describes it."""
    by_headers: bool = False
    """Whether no more than headers is to be read."""
    known: Any = None
    """What has been read of them already."""


def by_headers(plan: Plan, known: Mapping[str, Any]) -> Plan:
    """The same, by what headers say alone.

    :param known: what has been read of files already, by key.
    """
    if "windows" in plan.about:
        return plan  # which row is of which episode is in the rows
    is_varying = any(kind not in FIXED for _, kind in plan.about["columns"])
    about = plan.about | ({MEANS: True} if is_varying else {})
    shards = [replace(each, about=AboutFile(about, True, known.get(each.key))) for each in plan.shards]
    return replace(plan, shards=shards, about=about, reads_all=False)


def type_of(schema: pa.Schema, columns: Columns, leaf: Column) -> pa.DataType:
    return _type_at(schema.field(columns.read[leaf.way[0]]).type, leaf.way)


def head_bytes(columns: Sequence[Column]) -> int:
    """What each row takes beside values of varying length."""
    return _head_type(columns).itemsize


def same_columns(schema: pa.Schema, about: dict[str, Any], where: str) -> Columns:
    """Those that the first file has, in this one. Raises :class:`GroupDamaged` where they are others."""
    try:
        found = chosen_columns(schema, [str(each) for each in about["read"]], where)
        is_same = [[each.name, each.kind] for each in found.leaves] == [list(each) for each in about["columns"]]
    except InvalidInput as error:
        raise GroupDamaged(error.message) from error
    except (LookupError, TypeError) as error:
        raise GroupDamaged("the index describes its columns in an unknown way") from error
    if not is_same:
        raise GroupDamaged(
            "its columns are not those of the first file, in order and types: index what is alike, in a folder of its"
            " own"
        )
    return found


def chosen_columns(schema: pa.Schema, wanted: Sequence[str] | None, where: str) -> Columns:
    """Raises :class:`InvalidInput` for a column that is not there, and for one of a type that no row here may have."""
    try:
        return _chosen(schema, wanted, where)
    except UnicodeDecodeError as error:
        raise InvalidInput(f"{where} has a column whose name is no UTF-8") from error


def _chosen(schema: pa.Schema, wanted: Sequence[str] | None, where: str) -> Columns:
    names = list(schema.names)
    repeated = {name for name in names if names.count(name) > 1}
    if missing := [name for name in wanted or () if name not in names]:
        raise InvalidInput(f"{where} has no column {missing[0]!r:.60}; it has {_few(names)}")
    read = names if wanted is None else [name for name in names if name in wanted]
    if not read or repeated.intersection(read) or len(read) > _MOST_COLUMNS:
        raise InvalidInput(
            f"{where} has no columns, more than {_MOST_COLUMNS}, or two of one name: choose by --columns"
        )
    images = _images(schema)
    columns = []
    for place, name in enumerate(read):
        field = schema.field(name)
        found = list(_leaves(field.type, name, (place,), is_image=name in images))
        if refused := next((each for each in found if not each.kind), None):
            others = [each for each in names if _is_plain(schema.field(each).type)]
            raise InvalidInput(
                f"{where}: column {refused.name[:60]!r} is of type {str(_type_at(field.type, refused.way))[:80]}, and "
                "rows hold numbers, text, bytes, and lists and structs of numbers and text. Write it anew as one of "
                f"them (as text, say), or leave it out: --columns {','.join(others)[:200]}"
            )
        columns += found
    if len({each.name for each in columns}) != len(columns):
        raise InvalidInput(f"{where} has two columns of one name, as a.b and b in a struct a: choose by --columns")
    return Columns(read, columns)


def rows_of(batch: pa.RecordBatch, columns: Sequence[Column], most_bytes: int) -> Block:
    """:param most_bytes: that they may take."""
    num_rows, head = batch.num_rows, _head_type(columns)
    if num_rows * head.itemsize > most_bytes:
        raise GroupDamaged(too_large(num_rows * head.itemsize))
    heads = np.zeros(num_rows, dtype=head)
    varying: list[tuple[NDArray[np.int64], NDArray[np.int64], memoryview]] = []
    lengths = np.full(num_rows, head.itemsize, dtype=np.int64)
    for place, column in enumerate(columns):
        array, is_null = _leaf(batch, column.way)
        if is_null is not None:
            heads["nulls"][:, place >> 3] |= is_null.astype(np.uint8) << (place & 7)
        if column.kind in FIXED_DTYPES:
            values = _numbers(array, column.kind)
            heads[str(place)] = values if is_null is None else np.where(is_null, 0, values)
            continue
        if column.kind == "json":
            starts, ends, data = _as_json(array, column, most_bytes)
        else:
            starts, ends, data = _spans(array, column, is_null)
        sizes = ends - starts if is_null is None else np.where(is_null, 0, ends - starts)
        lengths += sizes
        if int(sizes.max(initial=0)) > most_bytes:
            raise GroupDamaged(f"a value of column {column.name!r:.60} is too large: {too_large(int(sizes.max()))}")
        heads[str(place)] = sizes
        varying.append((starts, starts + sizes, data))
    if int(lengths.sum()) > most_bytes:
        raise GroupDamaged(too_large(int(lengths.sum())))
    width, heads_data = head.itemsize, memoryview(heads.tobytes())
    step = 1 + len(varying)
    parts: list[Any] = [b""] * (num_rows * step)
    parts[::step] = [heads_data[at : at + width] for at in range(0, num_rows * width, width)]
    for place, (starts, ends, data) in enumerate(varying, 1):
        parts[place::step] = [data[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]
    return Block(b"".join(parts), lengths)


def _head_type(columns: Sequence[Column]) -> np.dtype[Any]:
    types = [(str(place), FIXED_DTYPES.get(each.kind, "<u4")) for place, each in enumerate(columns)]
    return np.dtype([("nulls", "u1", ((len(columns) + 7) // 8,)), *types])


def unsaid_of(columns: Columns) -> str:
    """Why no header can say what rows with these columns take; empty: it can."""
    name = next((each.name for each in columns.leaves if each.kind == "json"), None)
    return "" if name is None else f"no header says how long the lists of column {name[:60]!r} are as JSON"


def too_large(num_bytes: int) -> str:
    return (
        f"it takes {num_bytes:,} bytes decoded, and a group may take {MOST_GROUP_BYTES:,}, since it is read and "
        "decoded whole: write it with smaller row groups (row_group_size=), or choose fewer columns by --columns"
    )


def null_in_list(column: str) -> str:
    return (
        f"column {column!r:.60} has a null in a list, and arrays of numbers have none: write it anew without, or choose"
        " other columns by --columns"
    )


def scanned_groups(
    about: AboutFile, data: ShardBytes, report: ShardReport, groups: Sequence[tuple[str, int, Group]]
) -> Iterator[RecordArray]:
    """The records of the rows of ``(place, byte where it begins, group)`` of one file, each group a blob of its own."""
    for place, at, group in groups:
        windows = about.format.get("windows")
        try:
            if about.by_headers:
                yield _mean_records(group)
                report.parts.append((f"#{place}", group.num_rows, group.most_bytes or 0))
                continue
            offset, batches, blocks = 0, [], []
            for block in group.decode([data.read(start, end) for start, end in group.ranges]):
                if windows is None:
                    batches.append(_records(block, offset))
                else:
                    blocks.append(block)
                offset += len(block.data)
                if offset > MOST_GROUP_BYTES:
                    raise GroupDamaged(too_large(offset))
            if blocks:
                batches = window_records(blocks, about.format, report)
        except GroupDamaged as error:
            raise data.damaged(f"group {place.partition(',')[0]}: {error}", at) from error
        if batches:
            report.parts.append((f"#{place}", sum(map(len, batches)), offset))
            yield from batches


def window_records(
    blocks: Sequence[Block], about: dict[str, Any], report: ShardReport, reach: Reach | None = None
) -> list[RecordArray]:
    """The records of the windows of a group. Rows behind the last whole one of an episode are in none."""
    length, stride = about["windows"]
    data, starts, ends = joined(blocks)
    episodes = fixed_values(data, starts, about["columns"], about["episodes"])
    bounds = bounds_of(episodes).tolist()
    first = np.concatenate([np.arange(low, high - length + 1, stride) for low, high in pairwise(bounds)])
    low, high = first, first + length
    if reach is not None:
        low, high = reach.first[first], reach.end[first + length - 1]
        fits = (low >= 0) & (high <= len(starts))
        first, low, high = first[fits], low[fits], high[fits]
        _check_reach(first, low, high, about)
    covered = np.zeros(len(starts) + 1, dtype=np.int64)
    np.add.at(covered, first, 1)
    np.add.at(covered, first + length, -1)
    report.num_passed_over += int((np.cumsum(covered[:-1]) == 0).sum())
    if not len(first):
        return []
    found = np.empty(len(first), dtype=RECORD)
    found["offset"], found["length"] = starts[low], ends[high - 1] - starts[low]
    view, digest = memoryview(data), xxhash.xxh3_64_intdigest
    found["checksum"] = [
        digest(view[start : start + size])
        for start, size in zip(found["offset"].tolist(), found["length"].tolist(), strict=True)
    ]
    return [found]


def joined(blocks: Sequence[Block]) -> tuple[bytes, NDArray[np.int64], NDArray[np.int64]]:
    """All rows of a group, and where each begins and ends."""
    ends = np.cumsum(np.concatenate([np.zeros(0, np.int64), *(block.lengths for block in blocks)]))
    return b"".join(block.data for block in blocks), np.concatenate([[0], ends])[:-1].astype(np.int64), ends


def bounds_of(episodes: NDArray[Any]) -> NDArray[np.int64]:
    """Where episodes begin among rows, and the last one ends."""
    return np.concatenate([[0], np.flatnonzero(episodes[1:] != episodes[:-1]) + 1, [len(episodes)]])


def _check_reach(
    first: NDArray[np.int64], low: NDArray[np.int64], high: NDArray[np.int64], about: dict[str, Any]
) -> None:
    """Windows share rows with their neighbours alone, and each says by its rows alone where it begins."""
    length, stride = about["windows"]
    cut = Cut(length, stride, [VIDEO], 1)
    before, most = int((first - low).max(initial=0)), int((high - low).max(initial=0))
    shares_more = (np.diff(low) <= 0).any() or (low[2:] < high[:-2]).any()
    if before >= stride or most > cut.most_rows or shares_more:
        raise GroupDamaged(
            f"a window is read from the keyframe before it on, which is up to {before} frames away, and "
            f"--windows {length},{stride} would share frames with more than its neighbours: give a stride that "
            "is a multiple of the distance of keyframes, or write the videos with a keyframe each 2 frames (g=2), as "
            "LeRobot does"
        )


def fixed_values(data: bytes, starts: NDArray[np.int64], columns: Sequence[Sequence[str]], name: str) -> NDArray[Any]:
    """``(n,)`` values of a column of one size, of rows that begin at these bytes; 0 where they are null."""
    place, dtype = (len(columns) + 7) // 8, np.dtype("u1")
    for each, kind in columns:
        dtype = np.dtype(FIXED_DTYPES.get(kind, "<u4"))
        if each == name:
            break
        place += dtype.itemsize
    at = starts[:, None] + place + np.arange(dtype.itemsize)
    found: NDArray[Any] = np.frombuffer(data, np.uint8)[at].view(dtype)[:, 0]
    return found


def _mean_records(group: Group) -> RecordArray:
    if group.most_bytes is None:
        raise GroupDamaged(f"{group.unsaid}: index it with --checksums all, which reads and decodes all files")
    if group.most_bytes > MOST_GROUP_BYTES or group.num_rows > MOST_GROUP_BYTES:
        raise GroupDamaged(too_large(max(group.most_bytes, group.num_rows)))
    ends = np.arange(group.num_rows + 1, dtype=np.int64) * group.most_bytes // group.num_rows
    return records_of(ends[:-1], np.diff(ends))


def _records(block: Block, offset: int) -> RecordArray:
    found = np.empty(len(block.lengths), dtype=RECORD)
    ends = np.cumsum(block.lengths)
    found["offset"], found["length"] = offset + ends - block.lengths, block.lengths
    view, digest = memoryview(block.data), xxhash.xxh3_64_intdigest
    found["checksum"] = [digest(view[start:end]) for start, end in pairwise([0, *ends.tolist()])]
    return found


FIXED_DTYPES = {kind: "?" if kind == "bool" else np.dtype(kind).newbyteorder("<").str for kind in FIXED}


def _leaves(type_: pa.DataType, name: str, way: tuple[int, ...], *, is_image: bool = False) -> Iterator[Column]:
    """Those of a column; of one that no row may have, ``kind`` is empty."""
    import pyarrow as pa

    if not pa.types.is_struct(type_):
        yield Column(name, _kind(type_), way)
        return
    fields = [type_.field(place) for place in range(type_.num_fields)]
    is_file = [each.name for each in fields] == ["bytes", "path"]
    if len(way) > 8 or not fields:
        yield Column(name, "", way)
        return
    for place, field in enumerate(fields):
        # As datasets has pictures and sounds: their bytes are what the column is about.
        below = name if is_file and field.name == "bytes" else f"{name}.{field.name}"
        for each in _leaves(field.type, below, (*way, place)):
            is_picture = is_image and each.name == name and each.kind == "bytes"
            yield each._replace(kind="image") if is_picture else each


def _kind(type_: pa.DataType) -> str:
    import pyarrow as pa

    types = pa.types
    if types.is_dictionary(type_):
        type_ = type_.value_type
    if types.is_string(type_) or types.is_large_string(type_):
        return "str"
    if types.is_binary(type_) or types.is_large_binary(type_) or types.is_fixed_size_binary(type_):
        return "bytes"
    if types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_):
        below = _number(type_.value_type)
        return f"list:{below}" if below else "json" * _is_json(type_)
    return _number(type_)


def _is_json(type_: pa.DataType, depth: int = 0) -> bool:
    """Whether JSON has its values, and to_pylist gives them as they are."""
    import pyarrow as pa

    types = pa.types
    if types.is_struct(type_) or types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_):
        fields = [type_.field(place) for place in range(type_.num_fields)]
        names = {each.name for each in fields}
        return depth < 8 and len(names) == len(fields) and all(_is_json(each.type, depth + 1) for each in fields)
    return types.is_string(type_) or types.is_large_string(type_) or types.is_null(type_) or bool(_number(type_))


def _number(type_: pa.DataType) -> str:
    import pyarrow as pa

    if not (pa.types.is_integer(type_) or pa.types.is_floating(type_) or pa.types.is_boolean(type_)):
        return ""
    return {"halffloat": "float16", "float": "float32", "double": "float64"}.get(str(type_), str(type_))


def _leaf(batch: pa.RecordBatch, way: tuple[int, ...]) -> tuple[pa.Array, NDArray[np.bool_] | None]:
    """And which of its values are null, also where a struct above is; None: no one."""
    import pyarrow as pa

    array = batch.column(way[0])
    is_null = _nulls(array)
    for place in way[1:]:
        array = array.field(place)  # with the struct's offset, without its nulls
        below = _nulls(array)
        is_null = below if is_null is None else is_null if below is None else is_null | below
    if isinstance(array.type, pa.BaseExtensionType):  # a UUID is 16 bytes
        array = array.storage
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
        below = _nulls(array)
        is_null = below if is_null is None else is_null if below is None else is_null | below
    return array, is_null


def _nulls(array: pa.Array) -> NDArray[np.bool_] | None:
    if not array.null_count:
        return None
    found: NDArray[np.bool_] = array.is_null().to_numpy(zero_copy_only=False)
    return found


def _numbers(array: pa.Array, kind: str) -> NDArray[Any]:
    """Of an array's values; those of nulls may be anything."""
    data = array.buffers()[1]
    if data is None:
        return np.zeros(len(array), dtype=FIXED_DTYPES[kind])
    if kind == "bool":
        bits = np.frombuffer(data, np.uint8)[array.offset >> 3 : (array.offset + len(array) + 7) >> 3]
        low = array.offset & 7
        return np.unpackbits(bits, bitorder="little")[low : low + len(array)].astype(bool)
    return np.frombuffer(data, FIXED_DTYPES[kind])[array.offset : array.offset + len(array)]


def _spans(
    array: pa.Array, column: Column, is_null: NDArray[np.bool_] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64], memoryview]:
    """Where the bytes of each value begin and end in a buffer."""
    import pyarrow as pa

    num_rows, types = len(array), pa.types
    if types.is_fixed_size_binary(array.type):
        bounds = np.arange(array.offset, array.offset + num_rows + 1, dtype=np.int64) * array.type.byte_width
        return bounds[:-1], bounds[1:], _bytes(array.buffers()[1])
    if types.is_fixed_size_list(array.type):
        bounds = np.arange(array.offset, array.offset + num_rows + 1, dtype=np.int64) * array.type.list_size
    else:
        is_large = types.is_large_list(array.type) or str(array.type).startswith("large_")
        offsets = array.buffers()[1]
        if offsets is None or num_rows == 0:
            none = np.zeros(num_rows, np.int64)
            return none, none, memoryview(b"")
        width = "<i8" if is_large else "<i4"
        bounds = np.frombuffer(offsets, width)[array.offset : array.offset + num_rows + 1].astype(np.int64)
    if not column.kind.startswith("list:"):
        return bounds[:-1], bounds[1:], _bytes(array.buffers()[2])
    values = array.values
    if (null_values := _nulls(values)) is not None:
        before = np.concatenate([[0], np.cumsum(null_values)])
        inside = before[bounds[1:]] - before[bounds[:-1]]
        if (inside if is_null is None else inside[~is_null]).any():
            raise GroupDamaged(null_in_list(column.name))
    numbers = np.ascontiguousarray(_numbers(values, column.kind.removeprefix("list:")))
    size = numbers.dtype.itemsize
    return bounds[:-1] * size, bounds[1:] * size, _bytes(numbers)


def _as_json(
    array: pa.Array, column: Column, most_bytes: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], memoryview]:
    """As :func:`_spans`."""
    if (num_values := _num_values(array)) > _MOST_JSON_VALUES:
        raise GroupDamaged(
            f"column {column.name!r:.60} has {num_values:,} values within lists and structs, and "
            f"{_MOST_JSON_VALUES:,} are read together: write it with smaller row groups or batches"
        )
    found, ends = bytearray(), np.zeros(len(array), np.int64)
    for place in range(len(array)):  # one by one: as Python's values they take far more
        value = array[place].as_py()
        if value is not None:
            found += json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
        if len(found) > most_bytes:
            raise GroupDamaged(f"column {column.name!r:.60}: {too_large(len(found))}")
        ends[place] = len(found)
    return np.concatenate([[0], ends[:-1]]).astype(np.int64), ends, memoryview(bytes(found))


def _num_values(array: pa.Array) -> int:
    """Of an array, and of what is in it."""
    import pyarrow as pa

    if pa.types.is_struct(array.type):
        return len(array) + sum(_num_values(array.field(place)) for place in range(array.type.num_fields))
    return len(array) + (_num_values(array.flatten()) if array.type.num_fields else 0)


def _bytes(data: Any) -> memoryview:
    """A buffer of Arrow's, or an array; None: it has no bytes."""
    if data is None or not len(data):
        return memoryview(b"")
    return data.data.cast("B") if isinstance(data, np.ndarray) else memoryview(data)


def _images(schema: pa.Schema) -> set[str]:
    """Columns that datasets says are pictures."""
    try:
        said = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        features = said["info"]["features"]
        return {name for name, each in features.items() if isinstance(each, dict) and each.get("_type") == "Image"}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return set()


def _is_plain(type_: pa.DataType) -> bool:
    return all(each.kind for each in _leaves(type_, "", (0,)))


def _type_at(type_: pa.DataType, way: tuple[int, ...]) -> pa.DataType:
    for place in way[1:]:
        type_ = type_.field(place).type
    return type_


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:20])[:300] + ", ..." * (len(names) > 20)
