"""What do parsers of formats hand over? The fields of a sample, decoded as far as the format says how."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from refill.errors import SampleDamaged

Parser = Callable[[memoryview, int], tuple[str, dict[str, Any]]]
"""``(bytes of a sample, its id) -> (key, fields)``. A field is a value, or bytes that ``decode`` is about: a
``memoryview`` that is decoded by the field's name, as a tar's member, or :class:`Coded`."""

Decoder = Callable[[memoryview], Any]
"""Bytes of a value -> the value."""


class Coded(NamedTuple):
    """Bytes whose format is known, whatever the field is called."""

    kind: str
    """An extension that ``decode`` knows."""
    data: memoryview


def named(fields: dict[str, Any], sample_id: int) -> tuple[str, dict[str, Any]]:
    """``(key, fields)``: a field ``__key__`` is the key, else the id is; ``__id__`` is always refill's."""
    fields.pop("__id__", None)
    key = fields.pop("__key__", None)
    if type(key) is str:
        return key, fields
    return str(sample_id) if key is None else _key_of(key), fields


def _key_of(value: Any) -> str:
    """Of what is no text: bytes are read as UTF-8."""
    if isinstance(value, (bytes, memoryview)):
        return str(value, "utf-8", "backslashreplace")
    return str(value.item() if isinstance(value, np.ndarray) and value.size == 1 else value)


def damaged(sample_id: int, what: str, at: int, why: str) -> SampleDamaged:
    return SampleDamaged(f"sample {sample_id} is no {what}, at its byte {at}: {why}", sample=sample_id, at=at)


def parser_of_values(what: str, part: str, values: Sequence[tuple[str, Decoder, int]]) -> Parser:
    """As MDS and LitData have samples: a u32 size of each value whose size varies, in their order, then all values.

    :param what: a sample is called, and ``part`` a value, in errors.
    :param values: ``(name, decoder, bytes)`` of each; 0 bytes: they vary.
    """
    sizes = struct.Struct(f"<{sum(not size for _, _, size in values)}I")

    def parse(data: memoryview, sample_id: int) -> tuple[str, dict[str, Any]]:
        if len(data) < sizes.size:
            raise damaged(sample_id, what, len(data), "it ends within the sizes of its values")
        varying = iter(sizes.unpack_from(data))
        place, fields = sizes.size, dict[str, Any]()
        for name, decode, size in values:
            end = place + (size or next(varying))
            if end > len(data):
                raise damaged(sample_id, what, place, f"{part} {name!r} ends at byte {end} of {len(data)}")
            try:
                fields[name] = decode(data[place:end])
            except _WRONG as error:
                why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                raise damaged(sample_id, what, place, f"{part} {name!r} can't be decoded: {why}") from error
            place = end
        if place != len(data):
            raise damaged(sample_id, what, place, f"its values end there, and it has {len(data)} bytes")
        return named(fields, sample_id)

    return parse


_WRONG = (ValueError, ArithmeticError, LookupError, RecursionError, struct.error, TypeError)
"""What decoders of values raise at bytes that are none."""


_PIXELS = {
    "L": (1, "u1"), "P": (1, "u1"), "LA": (2, "u1"), "RGB": (3, "u1"), "YCbCr": (3, "u1"), "LAB": (3, "u1"),
    "HSV": (3, "u1"), "RGBA": (4, "u1"), "CMYK": (4, "u1"), "I": (1, "<i4"), "F": (1, "<f4"), "I;16": (1, "<u2"),
}  # fmt: skip
"""Pillow's names of modes: how many numbers a pixel has, and of which type."""


def pil_pixels(data: memoryview) -> NDArray[Any]:
    """A picture as raw pixels: u32 width, height, letters of the mode | mode | pixels."""
    width, height, letters = struct.unpack_from("<3I", data)
    mode, raw = bytes(data[12 : 12 + letters]).decode(), data[12 + letters :]
    if mode == "1":  # a bit each, rows of whole bytes
        rows = np.frombuffer(raw, "u1").reshape(height, (width + 7) // 8)
        return np.unpackbits(rows, axis=1)[:, :width].astype(bool)
    channels, dtype = _PIXELS[mode]
    shape = (height, width) if channels == 1 else (height, width, channels)
    return np.frombuffer(raw, dtype).reshape(shape).copy()


def items_of(data: memoryview, start: int) -> list[memoryview]:
    """A list: u32 n | u32 sizes[n] | items, from a byte on."""
    (count,) = struct.unpack_from("<I", data, start)
    place = start + 4 + 4 * count
    if place > len(data):
        raise ValueError(f"it has no room for the sizes of {count} items")
    found: list[memoryview] = []
    for size in struct.unpack_from(f"<{count}I", data, start + 4):
        if place + size > len(data):
            raise ValueError(f"item {len(found)} ends at byte {place + size} of {len(data)}")
        found.append(data[place : place + size])
        place += size
    return found
