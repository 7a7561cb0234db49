"""Rows of tables (Parquet, Arrow): a sample is a row, as pods write it when they have decoded a group of them.

    head    null bits, u8[(columns + 7) // 8], the first column in the lowest bit; then, in the order of the columns,
            the value of each whose size is fixed (little endian, no padding), or u32 the bytes that another one takes
    values  of those others, one after another

A null has no bytes, or zeros. So one ``struct`` reads a row's numbers and sizes at once, and the client needs no
library for tables. It takes 2 to 3 us a row, where an Arrow stream of one row takes 16 to 26, and JSON has no bytes
(``make bench-rows``).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from refill.formats.clips import VIDEO, Cut, cut_window
from refill.formats.parsed import Coded, Decoder, Parser, damaged, named
from refill.formats.tokens import NUMBER_TYPES

FIXED = {
    "bool": "?", "int8": "b", "uint8": "B", "int16": "h", "uint16": "H", "int32": "i", "uint32": "I", "int64": "q",
    "uint64": "Q", "float16": "e", "float32": "f", "float64": "d",
}  # fmt: skip
"""Kinds of columns whose values have one size, as ``struct`` writes them. Those of ``str``, ``bytes``, ``image`` and
``json`` have not, nor those of ``list:TYPE``, an array of numbers. ``json`` is lists of text, of structs and of lists,
as JSON. ``video`` is a frame, as it is coded, of windows alone."""
_RowParser = Callable[[memoryview, int, int], tuple[dict[str, Any], int]]
"""``(bytes, where a row begins, the sample's id) -> (fields, where it ends)``"""


def make_parser(about: Mapping[str, Any]) -> Parser:
    parse_row = _row_parser(about)
    if "windows" in about:
        return _window_parser(parse_row, about)

    def parse(data: memoryview, sample_id: int) -> tuple[str, dict[str, Any]]:
        fields, end = parse_row(data, 0, sample_id)
        if end != len(data):
            raise damaged(sample_id, "row", end, f"its columns end there, and it has {len(data)} bytes")
        return named(fields, sample_id)

    return parse


def _window_parser(parse_row: _RowParser, about: Mapping[str, Any]) -> Parser:
    """Of rows one after another: each field has the values of all, numbers and arrays of one shape as one array."""
    length, stride = (int(each) for each in about["windows"])
    cameras = [str(name) for name, kind in about["columns"] if kind == VIDEO]
    cut = Cut.checked(length, stride, cameras, float(about.get("fps", 1)))

    def parse(data: memoryview, sample_id: int) -> tuple[str, dict[str, Any]]:
        rows, place = list[dict[str, Any]](), 0
        while place < len(data) and len(rows) <= cut.most_rows:
            fields, place = parse_row(data, place, sample_id)
            rows.append(fields)
        try:
            if place != len(data):
                raise ValueError(f"it has {len(data)} bytes, which are not {length} rows")
            rows, clips = cut_window(rows, cut)
        except ValueError as error:
            raise damaged(sample_id, "window", place, str(error)) from error
        fields = {name: _joined([row[name] for row in rows]) for name in rows[0] if name not in cut.cameras}
        return named(fields | clips, sample_id)

    return parse


def _joined(values: list[Any]) -> Any:
    arrays = all(isinstance(value, int | float | np.ndarray) for value in values)
    if not arrays or len({np.shape(value) for value in values}) != 1:
        return values
    if all(isinstance(value, int) for value in values) and max(values) >= 1 << 63:  # else numpy rounds them
        return np.array(values, dtype=np.uint64)
    return np.array(values)


def _row_parser(about: Mapping[str, Any]) -> _RowParser:
    columns = [(str(name), None if kind in FIXED else _decoder(str(kind))) for name, kind in about["columns"]]
    codes = "".join(FIXED.get(kind, "I") for _, kind in about["columns"])
    head = struct.Struct(f"<{(len(columns) + 7) // 8}s{codes}")

    def parse(data: memoryview, start: int, sample_id: int) -> tuple[dict[str, Any], int]:
        if len(data) - start < head.size:
            raise damaged(sample_id, "row", len(data), f"it ends within its head of {head.size} bytes")
        null_bits, *values = head.unpack_from(data, start)
        nulls, place, fields = int.from_bytes(null_bits, "little"), start + head.size, dict[str, Any]()
        for (name, decode), value in zip(columns, values, strict=True):
            end = place if decode is None else place + value
            if nulls & 1:
                fields[name] = None
            elif decode is None:
                fields[name] = value
            else:
                if end > len(data):
                    raise damaged(sample_id, "row", place, f"column {name!r} ends at byte {end} of {len(data)}")
                try:
                    fields[name] = decode(data[place:end])
                except (ValueError, RecursionError) as error:
                    why = f"column {name!r} can't be decoded: {str(error)[:200]}"
                    raise damaged(sample_id, "row", place, why) from error
            place, nulls = end, nulls >> 1
        return fields, place

    return parse


def _decoder(kind: str) -> Decoder:
    if kind in ("bytes", VIDEO):
        return lambda data: data
    if kind == "str":
        return lambda data: str(data, "utf-8")
    if kind == "image":
        return lambda data: Coded("jpg", data)
    if kind == "json":
        return lambda data: json.loads(bytes(data))
    name = kind.removeprefix("list:")
    if name == kind or name not in (*NUMBER_TYPES, "bool"):
        raise ValueError(f"no kind of columns {kind!r:.40}")
    dtype = np.dtype(name).newbyteorder("<")
    # A copy: one sample kept by the caller must not keep the whole batch's buffer, and torch wants to write.
    return lambda data: np.frombuffer(data, dtype).astype(name)
