"""Values that MDS and LitData encode alike."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["WRONG", "items_of", "pil_pixels"]

_PIXELS = {
    "L": (1, "u1"), "P": (1, "u1"), "LA": (2, "u1"), "RGB": (3, "u1"), "YCbCr": (3, "u1"), "LAB": (3, "u1"),
    "HSV": (3, "u1"), "RGBA": (4, "u1"), "CMYK": (4, "u1"), "I": (1, "<i4"), "F": (1, "<f4"), "I;16": (1, "<u2"),
}  # fmt: skip
"""Pillow's names of modes: how many numbers a pixel has, and of which type."""
WRONG = (ValueError, ArithmeticError, LookupError, RecursionError, struct.error, TypeError)
"""What decoders of values raise at bytes that are none."""


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
