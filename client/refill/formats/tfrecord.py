"""TFRecord: a sample is a record, most often a ``tf.train.Example``. Its features are the fields.

The protobuf is read here: no TensorFlow, no protobuf library. Of a feature of bytes with one value the field is that,
for ``decode``; of several a list; of numbers an array, float32 or int64, as the tfrecord package has them. What is no
Example is one field ``data``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refill.formats.parsed import Parser, damaged, named
from refill.protocol.crc32c import crc32c, is_fast, masked

__all__ = ["kind_of", "make_parser"]

_AROUND_BYTES = 16
_BYTES, _FLOATS, _INTS = 1, 2, 3
_VARINT, _FIXED_64, _LENGTH, _FIXED_32 = 0, 1, 2, 5


def make_parser(about: Mapping[str, Any]) -> Parser:
    holds = about["holds"]
    read = _READERS[holds]

    def parse(data: memoryview, sample_id: int) -> tuple[str, dict[str, Any]]:
        length = int.from_bytes(data[:8], "little")
        if length != len(data) - _AROUND_BYTES or masked(crc32c(data[:8])) != int.from_bytes(data[8:12], "little"):
            raise damaged(sample_id, "TFRecord", 0, f"{len(data)} bytes are not one whole record")
        record = data[12:-4]
        # Without a library it would take longer than all the rest; pods have compared the bytes with those at first.
        if is_fast and masked(crc32c(record)) != int.from_bytes(data[-4:], "little"):
            raise damaged(sample_id, "TFRecord", 12, "its checksum is wrong")
        try:
            return named(read(record), sample_id)
        except (ValueError, IndexError) as error:
            raise damaged(sample_id, "TFRecord", 12, f"no tf.{holds}: {str(error)[:200]}") from error

    return parse


def kind_of(record: memoryview, length: int) -> str:
    """What a record of this length holds: ``Example``, ``SequenceExample`` or ``bytes``. The start of a long one, some
    ten bytes, is enough."""
    if len(record) < length:
        try:
            tag, place = _varint(record, 0)
            size, place = _varint(record, place)
        except (ValueError, IndexError):
            return "bytes"
        if tag == 10 and place + size == length:
            return "Example"
        return "SequenceExample" if tag in (10, 18) and place + size <= length else "bytes"
    for kind, read in (("Example", _example), ("SequenceExample", _sequence_example)):
        try:
            if read(record):
                return kind
        except (ValueError, IndexError):
            continue
    return "bytes"


def _example(data: memoryview) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, value in _fields(data):
        if number != 1 or type(value) is not memoryview:
            raise ValueError(f"field {number} in an Example")
        found |= _features(value)
    return found


def _sequence_example(data: memoryview) -> dict[str, Any]:
    """Lists of values, one for each step, beside the features of the context."""
    found: dict[str, Any] = {}
    for number, value in _fields(data):
        if type(value) is not memoryview or number not in (1, 2):
            raise ValueError(f"field {number} in a SequenceExample")
        if number == 1:
            found |= _features(value)
            continue
        for name, steps in _entries(value):
            found[name] = [_own(_feature(_message(step))) for _, step in _fields(steps)]
    return found


def _features(data: memoryview) -> dict[str, Any]:
    return {name: _feature(value) for name, value in _entries(data)}


def _entries(data: memoryview) -> Iterator[tuple[str, memoryview]]:
    """A map of names to messages."""
    for number, entry in _fields(data):
        name, value = "", memoryview(b"")
        if number != 1:
            raise ValueError(f"field {number} in a map")
        for part, content in _fields(_message(entry)):
            if part == 1:
                name = str(_message(content), "utf-8")
            elif part == 2:
                value = _message(content)
        yield name, value


def _feature(data: memoryview) -> Any:
    found: Any = None
    for number, values in _fields(data):
        inner = list(_fields(_message(values)))
        if number == _BYTES:
            items = [_message(each) for _, each in inner]
            found = items[0] if len(items) == 1 else [bytes(each) for each in items]
        elif number == _FLOATS:
            found = np.frombuffer(b"".join(_message(each) for _, each in inner), "<f4").astype(np.float32)
        elif number == _INTS:
            packed = [_varints(each) if type(each) is memoryview else np.array([each], np.uint64) for _, each in inner]
            found = (np.concatenate(packed) if packed else np.zeros(0, np.uint64)).view(np.int64)
        else:
            raise ValueError(f"a feature of kind {number}")
    return found


def _own(value: Any) -> Any:
    return bytes(value) if type(value) is memoryview else value


def _message(value: memoryview | int) -> memoryview:
    if type(value) is not memoryview:
        raise ValueError("a number where bytes should be")
    return value


def _fields(data: memoryview) -> Iterator[tuple[int, memoryview | int]]:
    """``(number, value)`` of each field: bytes, also of numbers of a fixed size; or an integer."""
    place, end = 0, len(data)
    while place < end:
        tag, place = _varint(data, place)
        wire = tag & 7
        if wire == _VARINT:
            number, place = _varint(data, place)
            yield tag >> 3, number
            continue
        size = 4 if wire == _FIXED_32 else 8
        if wire == _LENGTH:
            size, place = _varint(data, place)
        elif wire not in (_FIXED_32, _FIXED_64):
            raise ValueError(f"a field of wire type {wire}")
        if place + size > end:
            raise ValueError(f"a field ends at byte {place + size} of {end}")
        yield tag >> 3, data[place : place + size]
        place += size


def _varint(data: memoryview, place: int) -> tuple[int, int]:
    """``(number, place behind it)``."""
    found = data[place]
    if found < 128:
        return found, place + 1
    found &= 127
    for shift in range(7, 70, 7):
        place += 1
        byte = data[place]
        found |= (byte & 127) << shift
        if byte < 128:
            return found & 0xFFFFFFFFFFFFFFFF, place + 1
    raise ValueError("a number of more than ten bytes")


def _varints(data: memoryview) -> NDArray[np.uint64]:
    """All of them, one after another."""
    digits = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(digits < 128)
    if not len(digits):
        return np.zeros(0, np.uint64)
    if not len(ends) or int(ends[-1]) != len(digits) - 1:
        raise ValueError("it ends within a number")
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    longest = int(lengths.max())
    if longest > 10:
        raise ValueError("a number of more than ten bytes")
    found = np.zeros(len(ends), np.uint64)
    for place in range(longest):
        there = lengths > place
        found[there] |= (digits[starts[there] + place] & 127).astype(np.uint64) << np.uint64(7 * place)
    return found


_READERS: dict[str, Callable[[memoryview], dict[str, Any]]] = {
    "Example": _example,
    "SequenceExample": _sequence_example,
    "bytes": lambda data: {"data": data},
}
