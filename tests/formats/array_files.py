"""Files of ArrayRecord as their layout says, without the library that writes them, and without hashes."""

from __future__ import annotations

import struct
from collections.abc import Sequence

BLOCK, CUT, MAGIC = 1 << 16, 24, 0x71930E704FDAE05E

__all__ = ["array_file", "chunk", "footer", "last_block", "varint"]


def varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])


def chunk(records: Sequence[bytes], kind: bytes = b"r", packing: int = 0, num_bytes: int | None = None) -> bytes:
    """:param num_bytes: that it says there are, unpacked."""
    sizes = b"".join(varint(len(each)) for each in records)
    data = bytes([packing]) + varint(len(sizes)) + sizes + b"".join(records)
    about = len(records) << 8 | kind[0]
    return struct.pack("<8xQ8xQQ", len(data), about, sum(map(len, records)) if num_bytes is None else num_bytes) + data


def footer(places: Sequence[int], per_chunk: int = 1, options: bytes = b"group_size:1") -> bytes:
    said = b"\x08\1\x10" + varint(len(places)) + b"\x18" + varint(len(places) * per_chunk)
    said += b"\x22" + varint(len(options)) + options
    lines = [b"\x08" + varint(place) + b"\x10\0\x18" + varint(per_chunk) for place in places]
    return chunk([b"\x0a" + varint(len(said)) + said, *lines])


def last_block(footer_start: int, magic: int = MAGIC) -> bytes:
    said = chunk([b"\x08" + varint(footer_start) + b"\x10" + varint(magic)] * 3)
    return (struct.pack("<8xQQ", 0, CUT + len(said)) + said).ljust(BLOCK, b"\0")


def array_file(records: Sequence[bytes], per_chunk: int = 1, **more: bytes) -> bytes:
    out, places = bytearray(64), []
    for first in range(0, len(records), per_chunk):
        places.append(_put(out, chunk(records[first : first + per_chunk])))
    start = _put(out, footer(places, per_chunk, **more))
    return bytes(out) + bytes(-len(out) % BLOCK) + last_block(start)


def _put(out: bytearray, data: bytes) -> int:
    """Each block begins with a cut, which says where the chunk that it cuts begins and ends."""
    start, cuts, left = len(out), [], memoryview(data)
    while left:
        if len(out) % BLOCK == 0:
            cuts.append(len(out))
            out += bytes(CUT)
        room = BLOCK - len(out) % BLOCK
        out += left[:room]
        left = left[room:]
    for place in cuts:
        struct.pack_into("<8xQQ", out, place, place - start, len(out) - place)
    return start
