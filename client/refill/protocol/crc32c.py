"""CRC-32C (Castagnoli), masked as TFRecord has it: by google-crc32c where it is installed, else here."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any

Buffer = bytes | bytearray | memoryview

_POLYNOMIAL = 0x82F63B78


def masked(crc: int) -> int:
    """As it is stored."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _entry(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ _POLYNOMIAL if byte & 1 else byte >> 1
    return byte


_TABLE = [_entry(byte) for byte in range(256)]


def slow_crc32c(data: Buffer, crc: int = 0) -> int:
    """Byte by byte: good for the few bytes of a head.

    :param crc: of what comes before.
    """
    crc ^= 0xFFFFFFFF
    for byte in memoryview(data).cast("B"):
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _fast() -> Callable[..., int] | None:
    with contextlib.suppress(ImportError):
        google: Any = importlib.import_module("google_crc32c")
        if google.implementation == "c":
            return lambda data, crc=0: int(google.extend(crc, bytes(data)))
    return None


_found = _fast()
is_fast = _found is not None
"""Whether the library computes it, which takes 0.1 s/GB; :func:`slow_crc32c` takes 50."""
crc32c: Callable[..., int] = _found or slow_crc32c
"""``(data, crc of what comes before = 0) -> crc``."""
