"""What was a sample when a pod first read it? Where an index has no checksums, it is compared with that ever after.

An index that was made from headers alone (``refill index --checksums first-read``) can't say which bytes are right. The
ETags in it say that an object is still the one that was indexed; this says that each read of a sample, from the store,
from memory or from disk, gave the same bytes as the first one of this pod. It goes with the pod.
"""

from __future__ import annotations

import numpy as np

from refill_service.cache_core.dataset_index import UInt64Array

_BLOCK_SAMPLES = 4096
_UNUSED_BYTES = 32 << 20
"""Kept of datasets that no job reads: of 4 million samples. Those that a job reads are within what it has set aside for
its records."""


class SeenChecksums:
    """Compares the samples of one dataset with what they were when the pod first read them."""

    def __init__(self) -> None:
        self.num_readers = 0
        self._blocks: dict[int, UInt64Array] = {}

    @property
    def num_bytes(self) -> int:
        return 8 * _BLOCK_SAMPLES * len(self._blocks)

    def is_as_before(self, sample: int, checksum: int) -> bool:
        """Whether a sample has the checksum that it had at first; the first that is told is right."""
        block, place = divmod(sample, _BLOCK_SAMPLES)
        known = self._blocks.get(block)
        if known is None:
            known = self._blocks[block] = np.zeros(_BLOCK_SAMPLES, dtype=np.uint64)
        checksum = checksum or 1  # 0 is none yet
        if not known[place]:
            known[place] = checksum
        return bool(known[place] == checksum)


class FirstChecksums:
    """Lends jobs these checksums, one set for each dataset that the pod reads."""

    def __init__(self) -> None:
        self._seen: dict[str, SeenChecksums] = {}
        """By what says that indexes, and the objects that they name, are the same; the one longest unused first."""

    def lease(self, name: str) -> SeenChecksums:
        found = self._seen.pop(name, None) or SeenChecksums()
        self._seen[name] = found
        found.num_readers += 1
        return found

    def release(self, found: SeenChecksums) -> None:
        found.num_readers -= 1
        unused = {name: each for name, each in self._seen.items() if not each.num_readers}
        too_many = sum(each.num_bytes for each in unused.values()) - _UNUSED_BYTES
        for name, each in unused.items():
            if too_many <= 0:
                break
            too_many -= each.num_bytes
            del self._seen[name]
