"""What are the bytes of the values of a column? As blocks beside the index have them, and as a pod's answer.

    kind, two letters: ``u1``, ``u2``, ``u4``, ``i8``, ``f8`` or ``tx``
    numbers    so many bytes each, as few as hold all whole numbers of the block
    text       ends u32[n] | letters of all, UTF-8, one after another

All integers are little-endian. A column is whole numbers, numbers or text of all samples of a dataset, by id.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK_VALUES = 1 << 15
"""Of a request, and of what is read of the store for it."""
MOST_TEXT_BYTES = 512
"""Of each."""
KEYS = "__key__"
"""The column of the samples' keys."""

LABELS = "cls"
"""The column of the samples' labels: what the member of this name holds, where each sample has one, a number."""

ColumnValues = NDArray[np.int64] | NDArray[np.float64] | list[str]
"""``(n,)``"""

_KINDS = {b"u1": "<u1", b"u2": "<u2", b"u4": "<u4", b"i8": "<i8", b"f8": "<f8"}
_TEXT = b"tx"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


def is_column_name(text: str) -> bool:
    """Whether a column may be called so: it is a part of the name of an object."""
    return _NAME.fullmatch(text) is not None


def encode_values(values: ColumnValues) -> bytes:
    """:param values: ``(n,)`` with texts of ``MOST_TEXT_BYTES`` at most."""
    if isinstance(values, list):
        encoded = [value.encode() for value in values]
        ends = np.cumsum([len(each) for each in encoded], dtype="<u4")
        return b"".join((_TEXT, ends.astype("<u4").tobytes(), *encoded))
    kind = b"f8" if values.dtype.kind == "f" else b"i8"
    if kind == b"i8" and len(values) and values.min() >= 0:
        kind = next((each for each in (b"u1", b"u2", b"u4") if values.max() < 1 << 8 * int(each[1:])), kind)
    return kind + values.astype(_KINDS[kind]).tobytes()


def decode_values(data: memoryview, count: int) -> ColumnValues:
    """Raises :class:`ValueError` for anything but ``count`` values."""
    kind, data = bytes(data[:2]), data[2:]
    if kind in _KINDS and len(data) == int(kind[1:]) * count:
        found = np.frombuffer(data, _KINDS[kind])
        return found.astype(np.float64) if kind == b"f8" else found.astype(np.int64)
    if kind != _TEXT or len(data) < 4 * count:
        raise ValueError(f"it is no column of {count} values")
    ends = np.frombuffer(data[: 4 * count], "<u4").astype(np.int64)
    sizes, letters = np.diff(ends, prepend=0), bytes(data[4 * count :])
    if len(letters) != (ends[-1] if count else 0) or not ((sizes >= 0) & (sizes <= MOST_TEXT_BYTES)).all():
        raise ValueError("its texts do not lie one after another")
    return [letters[end - size : end].decode() for end, size in zip(ends.tolist(), sizes.tolist(), strict=True)]


def joined_values(parts: Sequence[ColumnValues]) -> ColumnValues:
    """Raises :class:`ValueError` for parts of several kinds."""
    if all(isinstance(part, list) for part in parts):
        return [value for part in parts for value in part]
    arrays: list[Any] = [part for part in parts if isinstance(part, np.ndarray)]
    if len(arrays) != len(parts) or len({part.dtype for part in arrays}) > 1:
        raise ValueError("its values are of several kinds")
    joined: ColumnValues = np.concatenate(arrays)
    return joined
