"""CRC-32C (Castagnoli), masked as TFRecord has it: by google-crc32c or crc32c where one is installed, else here."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["crc32c", "is_fast", "masked", "slow_crc32c"]

Buffer = bytes | bytearray | memoryview

_POLYNOMIAL = 0x82F63B78
_LANES = 256
"""A long buffer is cut into so many pieces, which are gone through side by side."""
_LONG = 4096


def masked(crc: int) -> int:
    """As it is stored."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _table() -> NDArray[np.uint32]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, table >> 1 ^ np.uint32(_POLYNOMIAL), table >> 1)
    return table.astype(np.uint32)


_TABLE = _table()
_SHORT_TABLE = _TABLE.tolist()


def _bytewise(data: Buffer, crc: int) -> int:
    for byte in data:
        crc = _SHORT_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc


def slow_crc32c(data: Buffer, crc: int = 0) -> int:
    """In numpy: 140 MB/s of large buffers. The CRC is linear: pieces of equal length are gone through side by side from
    0, and what each adds to the whole is what zeros after it make of it.

    :param crc: of what comes before.
    """
    crc ^= 0xFFFFFFFF
    view = memoryview(data).cast("B")
    if len(view) < _LONG:
        return _bytewise(view, crc) ^ 0xFFFFFFFF
    lanes = _LANES * max(1, min(64, len(view) >> 18))
    length = len(view) // lanes
    head = len(view) - lanes * length
    pieces = np.frombuffer(view[head:], np.uint8).reshape(lanes, length).T
    crcs = np.zeros(lanes, dtype=np.uint32)
    crcs[0] = _bytewise(view[:head], crc)
    for column in np.ascontiguousarray(pieces):
        crcs = _TABLE[(crcs ^ column) & 0xFF] ^ crcs >> 8
    zeros = _after_zeros(length)
    found = 0
    for each in crcs.tolist():
        found = _times(zeros, found) ^ each
    return found ^ 0xFFFFFFFF


def _after_zeros(count: int) -> list[int]:
    """What so many zero bytes make of each bit of a CRC."""
    found = [1 << bit for bit in range(32)]
    power = [_SHORT_TABLE[1 << bit & 0xFF] ^ 1 << bit >> 8 for bit in range(32)]
    while count:
        if count & 1:
            found = [_times(power, each) for each in found]
        power = [_times(power, each) for each in power]
        count >>= 1
    return found


def _times(matrix: list[int], vector: int) -> int:
    found, bit = 0, 0
    while vector:
        if vector & 1:
            found ^= matrix[bit]
        vector >>= 1
        bit += 1
    return found


def _fast() -> Callable[..., int] | None:
    with contextlib.suppress(ImportError):
        google: Any = importlib.import_module("google_crc32c")
        if google.implementation == "c":
            return lambda data, crc=0: int(google.extend(crc, bytes(data)))
    with contextlib.suppress(ImportError):
        other: Any = importlib.import_module("crc32c")
        return lambda data, crc=0: int(other.crc32c(data, crc))
    return None


_found = _fast()
is_fast = _found is not None
"""Whether a library computes it, which takes 0.1 s/GB; :func:`slow_crc32c` takes 7, and 30 of pieces of 100 KB."""
crc32c: Callable[..., int] = _found or slow_crc32c
"""``(data, crc of what comes before = 0) -> crc``."""
