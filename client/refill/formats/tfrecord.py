"""TFRecord: a sample is a record, most often a ``tf.train.Example``. Its features are the fields.

The protobuf is read here: no TensorFlow, no protobuf library. Of a feature of bytes with one value the field is that,
for ``decode``; of several a list; of numbers an array, float32 or int64, as the tfrecord package has them. What is no
Example is one field ``data``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from refill.formats.parsed import Parser, damaged, named
from refill.formats.protobuf import fields, message, varint, varints
from refill.protocol.crc32c import crc32c, is_fast, masked

_AROUND_BYTES = 16
_BYTES, _FLOATS, _INTS = 1, 2, 3


class _NameTwice(ValueError):
    """In a record, of which one value would take the other's place."""


def make_parser(about: Mapping[str, Any]) -> Parser:
    holds = about["holds"]
    read = READERS[holds]

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
    """What a record of this length holds: ``Example``, ``SequenceExample`` or ``bytes``; empty: it has no features, and
    may be any. Of the start of one, some ten bytes, what it may hold."""
    if len(record) < length:
        try:
            tag, place = varint(record, 0)
            size, place = varint(record, place)
        except (ValueError, IndexError):
            return "bytes"
        if tag == 10 and place + size == length:
            return "Example"
        return "SequenceExample" if tag in (10, 18) and place + size <= length else "bytes"
    for kind, read in (("Example", _example), ("SequenceExample", _sequence_example)):
        try:
            return kind if read(record) else ""
        except _NameTwice:
            return kind  # whose parser refuses it, rather than that it comes as bytes
        except (ValueError, IndexError):
            continue
    return "bytes"


def _example(data: memoryview) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, value in fields(data):
        if number != 1 or type(value) is not memoryview:
            raise ValueError(f"field {number} in an Example")
        found |= _features(value)
    return found


def _sequence_example(data: memoryview) -> dict[str, Any]:
    """Lists of values, one for each step, beside the features of the context."""
    found: dict[str, Any] = {}
    for number, value in fields(data):
        if type(value) is not memoryview or number not in (1, 2):
            raise ValueError(f"field {number} in a SequenceExample")
        if number == 1:
            context = _features(value)
            if both := sorted(found.keys() & context):
                raise _NameTwice(f"{both[0][:100]!r} is in its context and a list, or there twice")
            found |= context
            continue
        for name, steps in _entries(value):
            if name in found:
                raise _NameTwice(f"{name[:100]!r} is in its context and a list, or there twice")
            found[name] = [_own(_feature(message(step))) for _, step in fields(steps)]
    return found


def _features(data: memoryview) -> dict[str, Any]:
    return {name: _feature(value) for name, value in _entries(data)}


def _entries(data: memoryview) -> Iterator[tuple[str, memoryview]]:
    """A map of names to messages."""
    for number, entry in fields(data):
        name, value = "", memoryview(b"")
        if number != 1:
            raise ValueError(f"field {number} in a map")
        for part, content in fields(message(entry)):
            if part == 1:
                name = str(message(content), "utf-8")
            elif part == 2:
                value = message(content)
        yield name, value


def _feature(data: memoryview) -> Any:
    found: Any = None
    for number, values in fields(data):
        inner = list(fields(message(values)))
        if number == _BYTES:
            items = [message(each) for _, each in inner]
            found = items[0] if len(items) == 1 else [bytes(each) for each in items]
        elif number == _FLOATS:
            found = np.frombuffer(b"".join(message(each) for _, each in inner), "<f4").astype(np.float32)
        elif number == _INTS:
            packed = [varints(each) if type(each) is memoryview else np.array([each], np.uint64) for _, each in inner]
            found = (np.concatenate(packed) if packed else np.zeros(0, np.uint64)).view(np.int64)
        else:
            raise ValueError(f"a feature of kind {number}")
    return found


def _own(value: Any) -> Any:
    return bytes(value) if type(value) is memoryview else value


READERS: dict[str, Callable[[memoryview], dict[str, Any]]] = {
    "Example": _example,
    "SequenceExample": _sequence_example,
    "bytes": lambda data: {"data": data},
}
"""By what a record holds: its fields."""
