"""Which documents, or pieces of them, are packed into which sequence? A function of their lengths, in an epoch's order.

``best_fit``: documents of a *window*, so many in a row, go into sequences one by one, the longest first, each to where
it leaves the least room. One that is longer than a sequence is cut, and its rest is packed; no other one is. The
sequences of a window come in an order that is drawn.

``contiguous``: all tokens of the epoch in a row, cut every ``length`` tokens. Only the last sequence is not full.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np

from refill.errors import InvalidInput
from refill.protocol.keyed_hash import key_of, numbers
from refill.protocol.wire_format import Int64Array

METHODS = ("best_fit", "contiguous")


class PackedEpoch(NamedTuple):
    """Pieces of documents, ``(pieces,)`` each, in the order of the sequences that they are in."""

    firsts: Int64Array
    """``(sequences + 1,)`` the first piece of each sequence, and the number of pieces."""
    positions: Int64Array
    """Of the document in the epoch's order."""
    offsets: Int64Array
    """The first token of it."""
    lengths: Int64Array
    """Tokens."""

    @property
    def num_sequences(self) -> int:
        return len(self.firsts) - 1

    def pieces(self, sequence: int) -> range:
        return range(int(self.firsts[sequence]), int(self.firsts[sequence + 1]))

    def had_before(self, sequence: int) -> tuple[int, Int64Array]:
        """``(first, positions)``: all positions below ``first``, and these, have nothing in this sequence or later."""
        ahead, before = np.split(self.positions, [int(self.firsts[sequence])])[::-1]
        first = int(ahead.min()) if len(ahead) else int(self.positions.max(initial=-1)) + 1
        return first, np.setdiff1d(before[before > first], ahead)


def packed_epoch(lengths: Int64Array, length: int, method: str, window: int, key: int) -> PackedEpoch:
    """
    :param lengths: ``(documents,)`` tokens of each, in the epoch's order. Those of 0 are in no sequence.
    :param length: tokens of a sequence.
    :param window: documents that are packed together; of ``best_fit``.
    :param key: what the order within windows is drawn by.
    """
    if method not in METHODS:
        raise InvalidInput(f"method must be {' or '.join(METHODS)}, got {method!r:.50}")
    if len(lengths) and int(lengths.min()) < 0:
        raise InvalidInput("a document has a negative number of tokens")
    if method == "contiguous":
        return _contiguous(lengths, length)
    parts, num_sequences = [], 0
    for number, first in enumerate(range(0, len(lengths), window)):
        sequences, positions, offsets, sizes = _best_fit(lengths[first : first + window], length)
        count = int(sequences.max(initial=-1)) + 1
        turns = np.argsort(np.argsort(numbers(key_of("window", number, key), count), kind="stable"), kind="stable")
        parts.append((turns[sequences] + num_sequences, positions + first, offsets, sizes))
        num_sequences += count
    if not parts:
        return _in_order(*(np.empty(0, dtype=np.int64) for _ in range(4)), num_sequences=0)
    return _in_order(*(np.concatenate(column) for column in zip(*parts, strict=True)), num_sequences=num_sequences)


def _in_order(
    sequences: Int64Array, positions: Int64Array, offsets: Int64Array, lengths: Int64Array, *, num_sequences: int
) -> PackedEpoch:
    order = np.lexsort((offsets, positions, sequences))
    firsts = np.searchsorted(sequences[order], np.arange(num_sequences + 1))
    return PackedEpoch(firsts, positions[order], offsets[order], lengths[order])


def _best_fit(lengths: Int64Array, length: int) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """``(sequences, documents, offsets, lengths)`` of pieces."""
    whole, rests = np.divmod(lengths, length)
    documents = np.repeat(np.arange(len(lengths)), whole)
    nth = np.arange(len(documents)) - np.repeat(np.cumsum(whole) - whole, whole)
    found = [
        (sequence, document, offset * length, length)
        for sequence, (document, offset) in enumerate(zip(documents.tolist(), nth.tolist(), strict=True))
    ]
    num_sequences = len(found)
    room: list[tuple[int, int]] = []
    """Ascending: the room that is left, and of which sequence."""
    for document in np.argsort(-rests, kind="stable").tolist():
        rest = int(rests[document])
        if not rest:
            break
        place = bisect_left(room, (rest, -1))
        if place == len(room):
            left, sequence = length, num_sequences
            num_sequences += 1
        else:
            left, sequence = room.pop(place)
        if left > rest:
            insort(room, (left - rest, sequence))
        found.append((sequence, document, int(whole[document]) * length, rest))
    columns = np.array(found, dtype=np.int64).reshape(-1, 4).T
    return columns[0], columns[1], columns[2], columns[3]


def _contiguous(lengths: Int64Array, length: int) -> PackedEpoch:
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    num_sequences = -(-total // length)
    cuts = np.union1d(ends - lengths, np.arange(num_sequences, dtype=np.int64) * length)
    cuts = cuts[cuts < total]
    documents = np.searchsorted(ends, cuts, side="right")
    sizes = np.diff(np.append(cuts, total))
    offsets = cuts - (ends - lengths)[documents] if len(cuts) else cuts
    firsts = np.searchsorted(cuts, np.arange(num_sequences + 1, dtype=np.int64) * length)
    return PackedEpoch(firsts, documents, offsets, sizes)
