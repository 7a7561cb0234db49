"""How does a pod know that another one has taken its answer? By small pieces at its end.

granian takes four pieces of an answer ahead, and one more that waits for its stream; the next one only when those
before have left, but for ``SEND_BUFFER_BYTES``. So whoever has handed over an answer that ends with six small pieces
knows that no more than five of these and that buffer are left of it. That is charged to nobody, nor are short answers:
the number of connections bounds it, and that of requests on each (:mod:`.peer_server`).
"""

from __future__ import annotations

import sys

from refill_service.memory.payload import Payload

SEND_BUFFER_BYTES = 16 << 10
_NUM_PIECES, _PIECE_BYTES = 6, 4 << 10
_SHORT_BYTES = 16 << 10
"""An answer that is no longer is sent as it is."""


class LastPieces:
    """Cuts the end of one answer into small pieces, so that a pod knows when the other one has taken it.

    :param total_bytes: all of it.
    """

    def __init__(self, total_bytes: int) -> None:
        last = range(total_bytes, max(0, total_bytes - _NUM_PIECES * _PIECE_BYTES - 1), -_PIECE_BYTES)
        self._ends = list(last) if total_bytes > _SHORT_BYTES else []
        """Where a piece has to end, the last one first."""
        self.begin = self._ends[-1] if self._ends else sys.maxsize
        """What ends before this byte of the answer need not be cut."""

    def cut(self, part: Payload, at: int) -> list[tuple[Payload, bool]]:
        """What comes next of the answer, in so many parts that a piece ends only behind one: where True stands.

        :param at: where in the answer it begins.
        """
        ends = self._ends
        found: list[tuple[Payload, bool]] = []
        while ends and at + len(part) >= ends[-1]:
            size_bytes = ends.pop() - at
            at += size_bytes
            found.append((memoryview(part)[:size_bytes], True))
            part = memoryview(part)[size_bytes:]
        if len(part) or not found:
            found.append((part, False))
        return found
