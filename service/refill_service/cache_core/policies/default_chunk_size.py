"""How many samples does a job read together that names no chunk size, where a dataset's samples alone say it?"""

from __future__ import annotations

__all__ = ["default_chunk_size"]

_SMALLEST, _LARGEST = 8, 64
_WORTH_A_REQUEST_BYTES = 512 << 10
"""At 100 MB/s a transfer of 5 ms: a request's latency of some 25 ms is hidden by a handful of them in flight."""

_ENOUGH_CHUNKS = 2048
"""Of a dataset: a tenth of them in memory shuffles well, see docs/TRAINING_QUALITY.md."""

_LARGE_CHUNK_BYTES = 16 << 20
"""More than this takes memory and gains nothing."""


def default_chunk_size(num_samples: int, sample_bytes: float, largest_blob: int, by_class: bool) -> int:
    """Small chunks spread samples: the smallest power of two from 8 to 64 whose chunks are worth a request of their
    own; fewer than that where chunks would be very large, or so few that memory holds only a handful. 8 at most where
    the samples of a chunk are of one class (docs/TRAINING_QUALITY.md)."""
    chunk_size = _SMALLEST if by_class else _LARGEST
    while chunk_size > _SMALLEST and (
        chunk_size // 2 * sample_bytes >= _WORTH_A_REQUEST_BYTES or num_samples // chunk_size < _ENOUGH_CHUNKS
    ):
        chunk_size //= 2
    while chunk_size > 1 and chunk_size * sample_bytes > _LARGE_CHUNK_BYTES:
        chunk_size //= 2
    return min(chunk_size, largest_blob)
