"""What do the bytes of a column of a dataset mean?

A column is an object of its own beside the index, a version of the dataset each, so that one can be added to an index
that is there, and what reads an earlier version goes on with its columns. All integers are little-endian:

    header    40 bytes: magic "REFILLCO" | version u32 | reserved u32 | num_samples u64 | fingerprint u64
              | checksum of the table u64
    table     end of each block in the object, u64
    blocks    of ``BLOCK_VALUES`` values (the last may hold fewer), as ``refill/protocol/column_values.py`` has them,
              each followed by its checksum u64

Checksums are xxh3_64, seeded with the fingerprint; that of a block with the fingerprint plus the block's number plus 1.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from refill.errors import IndexDamaged
from refill.protocol.column_values import BLOCK_VALUES, MOST_TEXT_BYTES

_MAGIC = b"REFILLCO"
_VERSION = 1
_HEADER = struct.Struct("<8sII3Q")
HEADER_BYTES = _HEADER.size
CHECKSUM_BYTES = 8
MOST_BLOCK_BYTES = 2 + BLOCK_VALUES * (4 + MOST_TEXT_BYTES) + CHECKSUM_BYTES


def _num_blocks(num_samples: int) -> int:
    return -(-num_samples // BLOCK_VALUES)


def head_bytes(num_samples: int) -> int:
    """Of header and table."""
    return HEADER_BYTES + 8 * _num_blocks(num_samples)


def encode_head(sizes: Sequence[int], num_samples: int, fingerprint: int) -> bytes:
    """:param sizes: of the blocks, with their checksums."""
    table = (head_bytes(num_samples) + np.cumsum(sizes, dtype="<u8")).astype("<u8").tobytes()
    return _HEADER.pack(_MAGIC, _VERSION, 0, num_samples, fingerprint, _checksum(table, fingerprint)) + table


def encode_block(body: bytes, block: int, fingerprint: int) -> bytes:
    return body + _checksum(body, fingerprint + block + 1).to_bytes(CHECKSUM_BYTES, "little")


def decode_table(head: bytes, num_samples: int, fingerprint: int, source: str) -> NDArray[np.int64]:
    """``(blocks + 1,)`` where blocks begin, and the last one ends. Raises :class:`IndexDamaged`."""
    table = head[HEADER_BYTES:]
    if head[:HEADER_BYTES] != _HEADER.pack(
        _MAGIC, _VERSION, 0, num_samples, fingerprint, _checksum(table, fingerprint)
    ):
        raise IndexDamaged(f"{source} is damaged, or no column of this index; write it again", index=source)
    found = np.concatenate([[len(head)], np.frombuffer(table, "<u8").astype(np.int64)])
    if bool(((sizes := np.diff(found)) <= CHECKSUM_BYTES).any()) or bool((sizes > MOST_BLOCK_BYTES).any()):
        raise IndexDamaged(f"{source} has blocks of sizes that can't be; write it again", index=source)
    return found


def block_body(data: memoryview, block: int, fingerprint: int, source: str) -> memoryview:
    """What a block holds, verified. Raises :class:`IndexDamaged`."""
    body = data[:-CHECKSUM_BYTES]
    if _checksum(body, fingerprint + block + 1) != int.from_bytes(data[-CHECKSUM_BYTES:], "little"):
        raise IndexDamaged(f"{source} is damaged in its block {block}; write it again", index=source)
    return body


def _checksum(data: bytes | memoryview, seed: int) -> int:
    return xxhash.xxh3_64_intdigest(data, seed=seed % 2**64)
