"""LitData: a sample is the leaves of a tree, each serialized as the index says: a u32 size of each, then their bytes.

Fields are named by the way to a leaf: ``image``, ``meta.id``, ``0`` in a tuple; ``data`` where a sample is one leaf.
Values are those of litdata's own reader, but that tensors are arrays of numpy, and pictures and other media are for
``decode``.
Pickles are bytes, for a ``decode`` of the caller's own.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refill.formats import tokens
from refill.formats.parsed import Coded, Decoder, Parser, items_of, parser_of_values, pil_pixels

LITDATA_TORCH = {
    0: "float32", 1: "float32", 2: "float64", 3: "float64", 8: "float16", 9: "float16", 11: "uint8", 12: "int8",
    13: "int16", 14: "int16", 15: "int32", 16: "int32", 17: "int64", 18: "int64", 19: "bool", 20: "uint16",
}  # fmt: skip
"""Of tensors in LitData's chunks; what is left out has no type in numpy."""
LITDATA_NUMPY = {
    0: "int8", 1: "int16", 2: "int32", 3: "int64", 4: "uint8", 5: "uint16", 6: "uint32", 7: "uint64", 8: "float16",
    9: "float32", 10: "float64", 13: "bool",
}  # fmt: skip
"""Of arrays; what is left out is no number, or a complex one."""

LITDATA_MEDIA = {
    "image": "jpg", "video": "mp4", "audio": "wav", "nifti": "nii", "mesh": "glb", "pdf": "pdf", "tiff": "tif",
    "tifffile": "tif", "file": "bin",
}  # fmt: skip
"""Leaves that are a file's bytes, and what they are unless the index says it."""

_MOST_NESTING = 64


def make_parser(about: Mapping[str, Any]) -> Parser:
    if "leaves" not in about:
        return tokens.make_parser(about)
    leaves = [(str(name), _decoder(str(kind)), 0) for name, kind in about["leaves"]]
    return parser_of_values("LitData sample", "leaf", leaves)


def _decoder(kind: str) -> Decoder:
    name, _, more = kind.partition(":")
    if name == "no_header_numpy":
        return _array(LITDATA_NUMPY[int(more)])
    if name == "no_header_tensor":
        return _array(LITDATA_TORCH[int(more)])
    if name in LITDATA_MEDIA:
        return lambda data: Coded(more or LITDATA_MEDIA[name], data)
    return _DECODERS[name]


def _array(name: str) -> Decoder:
    dtype = np.dtype(name).newbyteorder("<")
    return lambda data: np.frombuffer(data, dtype).astype(name)


def _known(kind: int, types: Mapping[int, str]) -> str:
    if kind not in types:
        raise ValueError(f"its numbers are complex, bfloat16 or of another type that is not read (litdata's {kind})")
    return types[kind]


def _tensor(data: memoryview) -> NDArray[Any]:
    kind, axes = struct.unpack_from(">II", data)
    shape = struct.unpack_from(f">{axes}I", data, 8) if axes <= _MOST_NESTING else ()
    found: NDArray[Any] = _array(_known(kind, LITDATA_TORCH))(data[8 + 4 * axes :])
    return found.reshape(shape)


def _numpy(data: memoryview) -> NDArray[Any]:
    kind, axes = struct.unpack_from("<II", data)
    shape = struct.unpack_from(f"<{axes}I", data, 8) if axes <= _MOST_NESTING else ()
    found: NDArray[Any] = _array(_known(kind, LITDATA_NUMPY))(data[8 + 4 * axes :])
    return found.reshape(shape)


def _nested(data: memoryview) -> Any:
    """Lists and dicts: JSON, or litdata's compact form of it."""
    if not len(data) or data[0] > 0x20:
        return json.loads(bytes(data))
    return _Nested(data).value(0)


class _Nested:
    """A tag, then what it says; u32 counts and sizes before what they are of."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._place = data, 0

    def value(self, depth: int) -> Any:
        tag = self._number("<B")
        match tag:
            case 0:
                return json.loads(bytes(self._take(self._number("<I"))))
            case 1:
                return [self._text() for _ in range(self._count(4))]
            case 2 | 3:
                numbers = self._take(8 * self._count(8))
                return np.frombuffer(numbers, "<i8" if tag == 2 else "<f8").tolist()
            case 4:
                return [bool(each) for each in self._take(self._count(1))]
            case 5 if depth < _MOST_NESTING:
                return {self._text(): self.value(depth + 1) for _ in range(self._count(5))}
            case 6:
                return self._rows()
            case 7:
                return self._text()
            case 8 | 9:
                return self._number("<q" if tag == 8 else "<d")
            case 10:
                return bool(self._number("<B"))
            case 11:
                return None
        raise ValueError(f"nested values of kind {tag}, {depth} deep")

    def _rows(self) -> list[dict[str, Any]]:
        num_rows, num_keys = self._number("<I"), self._number("<I")
        if num_rows * num_keys + 4 * num_keys > len(self._data) or (num_rows and not num_keys):
            raise ValueError(f"it has no room for {num_rows} rows of {num_keys}")
        keys = [self._text() for _ in range(num_keys)]
        return [{key: self._cell() for key in keys} for _ in range(num_rows)]

    def _cell(self) -> Any:
        match tag := self._number("<B"):
            case 0x10:
                return None
            case 0x11:
                return self._text()
            case 0x12 | 0x13:
                return self._number("<q" if tag == 0x12 else "<d")
            case 0x14:
                return bool(self._number("<B"))
        raise ValueError(f"a value of kind {tag}")

    def _count(self, least_bytes: int) -> int:
        """Of items of so many bytes each, or more."""
        count = self._number("<I")
        if self._place + count * least_bytes > len(self._data):
            raise ValueError(f"it has no room for {count} items")
        return int(count)

    def _text(self) -> str:
        return str(self._take(self._number("<I")), "utf-8")

    def _number(self, layout: str) -> Any:
        (found,) = struct.unpack_from(layout, self._data, self._place)
        self._place += struct.calcsize(layout)
        return found

    def _take(self, size: int) -> memoryview:
        if self._place + size > len(self._data):
            raise ValueError(f"it ends at byte {self._place + size} of {len(self._data)}")
        self._place += size
        return self._data[self._place - size : self._place]


_DECODERS: dict[str, Decoder] = {
    "bytes": lambda data: data,
    "str": lambda data: str(data, "utf-8"),
    "text": lambda data: str(data, "utf-8"),
    "bool": lambda data: data[0] != 0,
    "int": lambda data: struct.unpack("<q", data)[0],
    "float": lambda data: struct.unpack("<d", data)[0],
    "pickle": lambda data: Coded("pkl", data),
    "jpeg": lambda data: Coded("jpg", data),
    "jpeg_array": lambda data: [Coded("jpg", each) for each in items_of(data, 0)],
    "pil": pil_pixels,
    "tensor": _tensor,
    "numpy": _numpy,
    "json": _nested,
}
