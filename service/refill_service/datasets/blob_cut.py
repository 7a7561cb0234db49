"""Which samples of a row lie in one blob? As many as fit, less those that would be a short chunk at its end.

A chunk is never of two blobs. So a blob is closed behind a whole number of the largest chunks that jobs choose for
samples of its size, and of smaller ones, which are powers of two as these are: then none costs a GET for a few samples.
"""

from __future__ import annotations

from refill_service.cache_core.planned.job_plan import largest_chunk_size

__all__ = ["FillingBlob", "whole_chunks"]


class FillingBlob:
    """Counts the samples of the blob that is being filled, in their order.

    :param most_bytes: of the samples of a blob; one that is larger lies in a blob of its own.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._sizes: list[int] = []
        self._size_bytes = 0

    def add(self, size_bytes: int) -> list[int]:
        """Fact: another sample comes, of so many bytes. Returns how many of those before it make a blob each that is
        closed now, the first ones first; mostly none."""
        closed = []
        while self._sizes and self._size_bytes + size_bytes > self._most_bytes:
            count = whole_chunks(len(self._sizes), self._size_bytes)
            self._size_bytes -= sum(self._sizes[:count])
            del self._sizes[:count]
            closed.append(count)
        self._sizes.append(size_bytes)
        self._size_bytes += size_bytes
        return closed


def whole_chunks(num_samples: int, size_bytes: float) -> int:
    """How many of these samples make a whole number of chunks; all of them, where they are fewer than one has.

    :param size_bytes: of all of them.
    """
    chunk_size = largest_chunk_size(size_bytes / max(1, num_samples))
    return num_samples - num_samples % chunk_size or num_samples
