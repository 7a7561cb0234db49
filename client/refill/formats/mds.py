"""MosaicML's MDS: a sample is its columns, each encoded as the index says.

Values are those that mosaicml-streaming's own reader gives, but for pictures: those of ``jpeg`` and ``png`` are for
``decode``, as a tar's members, and those of ``pil``, which lie there as raw pixels, are arrays. Pickles are bytes,
for a ``decode`` of the caller's own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refill.formats.parsed import Coded, Decoder, Parser, items_of, parser_of_values, pil_pixels
from refill.formats.tokens import NUMBER_TYPES

_NDARRAY_TYPES = {
    8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 18: "float16", 32: "uint32", 33: "int32", 34: "float32",
    64: "uint64", 65: "int64", 66: "float64",
}  # fmt: skip


def make_parser(about: Mapping[str, Any]) -> Parser:
    columns = [(str(name), _decoder(str(encoding)), int(size or 0)) for name, encoding, size in about["columns"]]
    return parser_of_values("MDS sample", "column", columns)


def _decoder(encoding: str) -> Decoder:
    name, _, more = encoding.partition(":")
    if name == "ndarray":
        return _ndarray(more)
    if name in NUMBER_TYPES and not more:
        dtype = np.dtype(name).newbyteorder("<")
        return lambda data: np.frombuffer(data, dtype, count=1).astype(name)[0]
    return _DECODERS[encoding]


def _ndarray(given: str) -> Decoder:
    """:param given: ``""``, ``"int32"`` or ``"int32:3,4"``: what is not said comes with each value."""
    said_type, _, said_shape = given.partition(":")
    if said_type and said_type not in NUMBER_TYPES:
        raise ValueError(f"no type of numbers {said_type!r:.40}")
    fixed_shape = tuple(int(each) for each in said_shape.split(",")) if said_shape else None

    def decode(data: memoryview) -> NDArray[Any]:
        place, name, shape = 0, said_type, fixed_shape
        if not name:
            name, place = _NDARRAY_TYPES[data[0]], 1
        if shape is None:
            axes, width = data[place] >> 2, 1 << (data[place] & 3)
            values = np.frombuffer(data[place + 1 : place + 1 + axes * width], f"<u{width}")
            if len(values) != axes:
                raise ValueError(f"it has no room for the sizes of {axes} axes")
            shape, place = tuple(values.tolist()), place + 1 + axes * width
        dtype = np.dtype(name).newbyteorder("<")
        return np.frombuffer(data[place:], dtype).astype(name).reshape(shape)

    return decode


def _coded(kind: str) -> Decoder:
    return lambda data: Coded(kind, data)


def _list_of(decode: Decoder, start: int = 4) -> Decoder:
    """:param start: where it begins; the first four bytes of most lists mean nothing yet."""
    return lambda data: [decode(each) for each in items_of(data, start)]


def _text(data: memoryview) -> str:
    return str(data, "utf-8")


_DECODERS: dict[str, Decoder] = {
    "bytes": lambda data: data,
    "str": _text,
    "int": lambda data: int.from_bytes(data[:8], "little", signed=True),
    "str_int": lambda data: int(_text(data)),
    "str_float": lambda data: float(_text(data)),
    "str_decimal": lambda data: Decimal(_text(data)),
    "json": lambda data: json.loads(_text(data)),
    "pkl": _coded("pkl"),
    "jpeg": _coded("jpg"),
    "png": _coded("png"),
    "pil": pil_pixels,
    "jpeg_array": _list_of(_coded("jpg"), 0),
    "jpegarray": _list_of(_coded("jpg"), 0),
    "list[jpeg]": _list_of(_coded("jpg")),
    "list[png]": _list_of(_coded("png")),
    "list[pil]": _list_of(pil_pixels),
}
