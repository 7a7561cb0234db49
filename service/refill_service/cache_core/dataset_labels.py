"""What do the bytes of a dataset's labels mean, and what do labels say of its order?

Labels are an object of their own beside the index, so that a refill which does not know them reads the dataset all the
same. The index names them in its metadata (``labels``), with what is to be known without reading them. All integers are
little-endian:

    header    32 bytes: magic "REFILLLB" | version u32 | item_bytes u32 | num_samples u64 | fingerprint u64
    blocks    of ``BLOCK_LABELS`` labels (the last may hold fewer), ``item_bytes`` each, followed by their checksum u64

A label is what the member ``cls`` of a sample holds, a number from 0 on. The fingerprint is that of the index that the
labels belong to. The checksum of a block is xxh3_64, seeded with the fingerprint plus the block's number.
"""

from __future__ import annotations

import struct
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from refill.errors import IndexDamaged

__all__ = [
    "BLOCK_LABELS",
    "HEADER_BYTES",
    "LABELS_KEY",
    "MOST_LABELS",
    "LabelCounts",
    "LabelSummary",
    "blocks_range",
    "decode_labels",
    "encode_block",
    "encode_header",
    "item_bytes_of",
    "label_of",
    "summary_in",
]

LABELS_KEY = "refill.labels"
"""Name of the object beside the index."""
MOST_LABELS = 1 << 20
"""Numbers beyond are no classes."""
BLOCK_LABELS = 1 << 16

_MAGIC = b"REFILLLB"
_VERSION = 1
_HEADER = struct.Struct("<8sIIQQ")
HEADER_BYTES = _HEADER.size
_CHECKSUM_BYTES = 8
_ITEMS = {1: "<u1", 2: "<u2", 4: "<u4"}
_LONGEST_NUMBER = 20
_BY_CLASS = 0.5

LabelArray = NDArray[np.int32]


def label_of(content: bytes) -> int:
    """The label that a member ``cls`` holds; -1 for none."""
    try:
        label = int(content) if len(content) <= _LONGEST_NUMBER else -1
    except ValueError:
        return -1
    return label if 0 <= label < MOST_LABELS else -1


@dataclass(frozen=True)
class LabelSummary:
    """What the index says of the labels."""

    classes: int
    """Different labels that there are."""
    least: int
    """Samples of the rarest of them."""
    most: int
    item_bytes: int
    same_neighbours: float
    """Share of samples that have the label of the sample before."""
    same_by_chance: float
    """What that would be if the dataset were shuffled."""

    @property
    def by_class(self) -> bool:
        """Whether neighbours share labels far more often than by chance, as where a dataset is stored by class."""
        return self.same_neighbours - self.same_by_chance > _BY_CLASS * (1 - self.same_by_chance)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def summary_in(metadata: dict[str, Any]) -> LabelSummary | None:
    """Of an index's metadata; None where there are no labels, or nothing that could be believed."""
    labels = metadata.get("labels")
    if not isinstance(labels, dict):
        return None
    values = [labels.get(field.name) for field in fields(LabelSummary)]
    if not all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        return None
    classes, least, most, item_bytes, same, by_chance = values
    if item_bytes not in _ITEMS or not (0 <= same <= 1 and 0 <= by_chance <= 1):  # type: ignore[operator]
        return None
    return LabelSummary(int(classes), int(least), int(most), int(item_bytes), float(same), float(by_chance))  # type: ignore[arg-type]


class LabelCounts:
    """Counts labels in the order of the samples."""

    def __init__(self) -> None:
        self._counts = np.zeros(0, dtype=np.int64)
        self._same = 0
        self._last = -1

    def add(self, labels: LabelArray) -> None:
        if not len(labels):
            return
        counts = np.bincount(labels, minlength=len(self._counts))
        counts[: len(self._counts)] += self._counts
        self._counts = counts
        self._same += int(labels[0]) == self._last
        self._same += int(np.count_nonzero(labels[1:] == labels[:-1]))
        self._last = int(labels[-1])

    def summary(self) -> LabelSummary:
        counts = self._counts[self._counts > 0]
        total = int(counts.sum())
        pairs = max(1, total - 1)
        by_chance = float((counts * (counts - 1)).sum()) / max(1, total * (total - 1))
        return LabelSummary(
            len(counts),
            int(counts.min()),
            int(counts.max()),
            item_bytes_of(len(self._counts) - 1),
            round(self._same / pairs, 4),
            round(by_chance, 4),
        )


def item_bytes_of(largest: int) -> int:
    return 1 if largest < 1 << 8 else 2 if largest < 1 << 16 else 4


def encode_header(item_bytes: int, num_samples: int, fingerprint: int) -> bytes:
    return _HEADER.pack(_MAGIC, _VERSION, item_bytes, num_samples, fingerprint)


def encode_block(labels: LabelArray, *, block: int, item_bytes: int, fingerprint: int) -> bytes:
    """One block, with its checksum. All blocks but the last hold ``BLOCK_LABELS`` labels."""
    body = labels.astype(_ITEMS[item_bytes]).tobytes()
    return body + _checksum(body, fingerprint, block).to_bytes(_CHECKSUM_BYTES, "little")


def blocks_range(first: int, end: int, item_bytes: int, num_samples: int) -> tuple[int, int]:
    """Bytes ``[start, stop)`` of the object with the whole blocks that hold the labels of samples ``[first, end)``."""
    block_bytes = BLOCK_LABELS * item_bytes + _CHECKSUM_BYTES
    num_blocks = -(-num_samples // BLOCK_LABELS)
    all_bytes = HEADER_BYTES + num_samples * item_bytes + num_blocks * _CHECKSUM_BYTES
    stop = HEADER_BYTES + -(-end // BLOCK_LABELS) * block_bytes
    return HEADER_BYTES + first // BLOCK_LABELS * block_bytes, min(stop, all_bytes)


def decode_labels(
    header: bytes, blocks: memoryview, first: int, end: int, *, item_bytes: int, num_samples: int, fingerprint: int,
    source: str,
) -> LabelArray:  # fmt: skip
    """Labels of samples ``[first, end)`` from the header and the bytes of :func:`blocks_range`, each block verified.

    Raises :class:`IndexDamaged`, also for labels of another index than the one with this fingerprint.
    """
    if header != encode_header(item_bytes, num_samples, fingerprint):
        raise IndexDamaged(f"{source} holds no labels of this index; make the index again", index=source)
    block_bytes = BLOCK_LABELS * item_bytes + _CHECKSUM_BYTES
    parts = []
    for place in range(0, len(blocks), block_bytes):
        block = first // BLOCK_LABELS + place // block_bytes
        stored = blocks[place : place + block_bytes]
        body = stored[:-_CHECKSUM_BYTES]
        if _checksum(body, fingerprint, block) != int.from_bytes(stored[-_CHECKSUM_BYTES:], "little"):
            raise IndexDamaged(f"{source} is damaged in its block {block}; make the index again", index=source)
        parts.append(np.frombuffer(body, dtype=_ITEMS[item_bytes]))
    labels = np.concatenate(parts).astype(np.int32)
    start = first - first // BLOCK_LABELS * BLOCK_LABELS
    return labels[start : start + end - first]


def _checksum(body: bytes | memoryview, fingerprint: int, block: int) -> int:
    return xxhash.xxh3_64_intdigest(body, seed=(fingerprint + block) % 2**64)
