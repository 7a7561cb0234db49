"""ArrayRecord: a sample is a chunk of one record (``group_size:1``). Its fields are as those of TFRecord.

A chunk is a header of 40 bytes, how it is packed, the sizes of its records, and these. Each 64 KiB of a *file* begins
with 24 bytes that cut through the chunk that lies there, and say how far away its start and its end are. A sample does
not know where in its file it lies, so the first cut is found by what it says. Layout: riegeli,
``doc/riegeli_records_file_format.md``; array_record, ``cpp/layout.proto``. Their hashes are not checked: pods compare
checksums of samples.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from refill.errors import InvalidInput
from refill.formats.parsed import Parser, damaged, named
from refill.formats.protobuf import varint
from refill.formats.tfrecord import READERS

BLOCK_BYTES = 1 << 16
CUT_BYTES = 24
_HEADER = struct.Struct("<8xQ8xQQ")
"""Bytes that follow; kind (the lowest byte) and number of records; bytes of these, unpacked."""
HEADER_BYTES = _HEADER.size
_CUT = struct.Struct("<8xQQ")
"""Bytes back to the start of the chunk, and on to its end."""
_RECORDS = ord("r")
_PACKINGS = {0: "none", 0x62: "brotli", 0x7A: "zstd", 0x73: "snappy"}
_MOST_BYTES = 256 << 20
"""Of what a chunk holds, unpacked."""
_PIECE_BYTES = 1 << 20
_PLACES = np.arange(BLOCK_BYTES, dtype="<u2").view(np.uint8).reshape(-1, 2)


class Chunk(NamedTuple):
    """A chunk of records, as it stands in a file."""

    num_records: int
    num_bytes: int
    """Of all records, unpacked."""
    packing: int
    sizes: memoryview
    """Packed: a varint of each record."""
    records: memoryview
    """Packed, one behind the other."""


def make_parser(about: Mapping[str, Any]) -> Parser:
    holds = about["holds"]
    read = READERS[holds]

    def parse(data: memoryview, sample_id: int) -> tuple[str, dict[str, Any]]:
        try:
            chunk = chunk_in(_bare(data))
            if chunk.num_records != 1:
                raise ValueError(f"it has {chunk.num_records} records")
            record = unpacked(chunk.records, chunk.packing, chunk.num_bytes)
        except (ValueError, IndexError, struct.error) as error:
            raise damaged(sample_id, "chunk of ArrayRecord", 0, str(error)[:200]) from error
        try:
            return named(read(record), sample_id)
        except (ValueError, IndexError) as error:
            raise damaged(sample_id, "record of ArrayRecord", 0, f"no tf.{holds}: {str(error)[:200]}") from error

    return parse


def chunk_in(bare: memoryview) -> Chunk:
    """The chunk that begins these bytes, which have no cuts. Raises :class:`ValueError`, :class:`IndexError` or
    :class:`struct.error` where there is none, or not all of it; what it says of sizes is not checked."""
    size, num_records, num_bytes = header_in(bare)
    if size > len(bare):
        raise ValueError(f"it ends at byte {size} of {len(bare)}")
    data = bare[HEADER_BYTES:size]
    sizes_bytes, place = varint(data, 1)
    if place + sizes_bytes > len(data):
        raise ValueError(f"the sizes of its records end at byte {place + sizes_bytes} of {len(data)}")
    return Chunk(num_records, num_bytes, data[0], data[place : place + sizes_bytes], data[place + sizes_bytes :])


def header_in(bare: memoryview) -> tuple[int, int, int]:
    """``(bytes of the chunk, records, bytes of these, unpacked)``. Raises as :func:`chunk_in`."""
    size, records, num_bytes = _HEADER.unpack_from(bare)
    kind = records & 0xFF
    if kind != _RECORDS:
        hint = ": transposed records can't be read, write it with transpose:false" if kind == ord("t") else ""
        raise ValueError(f"a chunk of kind {chr(kind)!r}{hint}")
    return HEADER_BYTES + size, records >> 8, num_bytes


def unpacked(data: memoryview, packing: int, num_bytes: int | None = None) -> memoryview:
    """:param num_bytes: that must come out; None: data says it itself.

    Raises :class:`ValueError` where they do not, and :class:`InvalidInput` for a packing that can't be read here.
    """
    if packing == 0:
        if num_bytes not in (None, len(data)):
            raise ValueError(f"its records have {len(data)} bytes, and should have {num_bytes}")
        return data
    if packing != 0x7A:
        name = _PACKINGS.get(packing, str(packing))
        raise InvalidInput(f"ArrayRecord packed by {name} can't be read: write it by zstd, or uncompressed")
    claimed, place = varint(data, 0)
    if num_bytes not in (None, claimed) or claimed > _MOST_BYTES:
        raise ValueError(f"its records should have {num_bytes} bytes, and {claimed} are said to be packed")
    return _from_zstd(data[place:], claimed)


def _from_zstd(data: memoryview, num_bytes: int) -> memoryview:
    """Memory is taken for what comes, not for what is claimed."""
    try:
        import zstandard
    except ImportError as error:
        raise InvalidInput(
            "ArrayRecord packed by zstd needs zstandard: pip install 'refill-cache[arrayrecord]'"
        ) from error
    found = bytearray()
    try:
        with zstandard.ZstdDecompressor().stream_reader(data) as reader:
            while len(found) <= num_bytes and (piece := reader.read(min(_PIECE_BYTES, num_bytes + 1 - len(found)))):
                found += piece
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from error
    if len(found) != num_bytes:
        raise ValueError(f"{num_bytes} bytes are said to be packed, and others are")
    return memoryview(found)


def _bare(data: memoryview) -> memoryview:
    """A chunk without what cuts through it. Something may follow: padding, where chunks begin at blocks."""
    (size,) = struct.unpack_from("<Q", data, 8)
    if HEADER_BYTES + size == len(data):
        return data
    # A cut in the first 65,536 bytes says how far it lies from their start: its own place.
    start = np.frombuffer(data[: BLOCK_BYTES + CUT_BYTES - 1], np.uint8)
    count = max(0, len(start) - CUT_BYTES + 1)
    places, near = _PLACES[:count], start[8:]
    for cut in np.flatnonzero((near[:count] == places[:, 0]) & (near[1 : count + 1] == places[:, 1])).tolist():
        before, behind = _CUT.unpack_from(data, cut)
        if before == cut and CUT_BYTES < behind <= len(data) - cut:
            bare = without_cuts(data[: cut + behind], cut)
            if HEADER_BYTES + struct.unpack_from("<Q", bare, 8)[0] == len(bare):
                return bare
    return data


def without_cuts(data: memoryview, cut: int) -> memoryview:
    """:param cut: where the first one lies; another 64 KiB after each."""
    pieces = [data[:cut]]
    pieces += [data[place + CUT_BYTES : place + BLOCK_BYTES] for place in range(cut, len(data), BLOCK_BYTES)]
    return memoryview(b"".join(pieces))
