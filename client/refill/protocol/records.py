"""How is it written down which sample answered which request? One format for journals, for pods and for clients.

A stream of records, each with a checksum of its own. All integers are little-endian:

    record    size u32 | checksum u32 | kind u8, zero u8 | head u16 | epoch u32 | rank u32 | payload u8[size]

    kind      rank          payload
    ANSWERED  0             asked i64[n] | samples i64[n]      an owner: this sample answers the request for that one
    RECEIVED  who received  positions i64[n] | samples i64[n]  a rank, or its home: what came for these positions
    OPENED    who entered   home pod i64[1]                    a rank has entered the epoch, by way of this pod
    TRACE     who posted    sample ids i64[n]                  a trace of the rank's own
    WHOLE     rank          nothing                            all that it has received from this epoch on is reported
    UNKNOWN   rank          nothing                            what it received in epochs before is not known
    UNUSED    rank          nothing                            its process that reports has received nothing
    DAMAGED   who received  positions i64[n] | samples i64[n]  a rank: these were damaged, and it went on without them

and of pods to each other, without a payload: ALL_RANKS, every rank that has begun is among the OPENED; WHOLE_TABLE, all
that the owner has answered is among the ANSWERED; NOT_RECOVERING, the pod that sends this is not recovering the job;
WILL_RECOVER, it is, and will recover it whatever other pods know.

``checksum`` is the CRC-32 of the payload. ``head`` is the low half of that of the other fields of the header, so that a
record that was cut, in a file whose writer was killed, is distinguished from one that is damaged. The records before it
hold.

There is no version in a record: a kind keeps its number and its payload for ever, and a new payload is a new kind. A
reader of an earlier version stops at it, as at a damaged one. Held by tests/protocol/test_golden_bytes.py.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from refill.protocol.wire_format import Int64Array

__all__ = ["RECORD_HEADER_BYTES", "Kind", "Record", "RecordReader", "encode_records", "record_bytes"]

_HEADER = struct.Struct("<IIBxHII")
RECORD_HEADER_BYTES = _HEADER.size


class Kind(IntEnum):
    ANSWERED = 1
    RECEIVED = 2
    OPENED = 3
    TRACE = 4
    WHOLE = 5
    ALL_RANKS = 6
    WHOLE_TABLE = 7
    NOT_RECOVERING = 8
    WILL_RECOVER = 9
    UNKNOWN = 10
    UNUSED = 11
    DAMAGED = 12
    PART = 13


_COLUMNS = {kind: 2 if kind in (Kind.ANSWERED, Kind.RECEIVED, Kind.DAMAGED) else 1 for kind in Kind}


class Record(NamedTuple):
    """One record. ``columns`` are the payload's arrays, each ``(n,)`` int64."""

    kind: Kind
    epoch: int
    rank: int = 0
    columns: tuple[Int64Array, ...] = ()

    def encode(self) -> bytes:
        columns = [np.ascontiguousarray(column, dtype="<i8") for column in self.columns]
        size = checksum = 0
        for column in columns:
            size, checksum = size + column.nbytes, zlib.crc32(column.data, checksum)
        return b"".join([_header(size, checksum, self.kind, self.epoch, self.rank), *(each.data for each in columns)])


def _header(size: int, checksum: int, kind: int, epoch: int, rank: int) -> bytes:
    head = zlib.crc32(_HEADER.pack(size, checksum, kind, 0, epoch, rank)) & 0xFFFF
    return _HEADER.pack(size, checksum, kind, head, epoch, rank)


def record_bytes(header: bytes | bytearray | memoryview) -> int:
    """The size of the record that begins with this header, as far as it can be believed."""
    return RECORD_HEADER_BYTES + int.from_bytes(header[:4], "little")


def encode_records(records: Iterable[Record]) -> bytes:
    return b"".join(record.encode() for record in records)


@dataclass
class RecordReader:
    """Iterates over the records of ``stream``, up to the first one that is cut or damaged."""

    stream: bytes | memoryview
    intact_bytes: int = field(default=0, init=False)
    """How far the stream was read."""
    damaged: bool = field(default=False, init=False)
    """Whether it ended with a record that is all there, but is not what was written. One that is cut is none."""

    def __iter__(self) -> Iterator[Record]:
        view = memoryview(self.stream)
        while len(view) - self.intact_bytes >= RECORD_HEADER_BYTES:
            start = self.intact_bytes
            size, checksum, number, _, epoch, rank = _HEADER.unpack_from(view, start)
            end = start + RECORD_HEADER_BYTES + size
            if view[start : start + RECORD_HEADER_BYTES] != _header(size, checksum, number, epoch, rank):
                self.damaged = True
                return
            if end > len(view):
                return
            columns = _COLUMNS.get(number, 0)
            payload = view[start + RECORD_HEADER_BYTES : end]
            if not columns or size % (8 * columns) or zlib.crc32(payload) != checksum:
                self.damaged = True
                return
            values = np.frombuffer(payload, dtype="<i8")
            self.intact_bytes = end
            yield Record(Kind(number), epoch, rank, tuple(values.reshape(columns, -1)))
