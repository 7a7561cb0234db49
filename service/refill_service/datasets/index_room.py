"""How much may a pod hold of datasets' indexes? What an index claims is set aside before it is read, or refused.

Beside the samples, so it is what the pod's memory promise leaves for it: an eighth of the memory and 64 MiB.
"""

from __future__ import annotations

from refill.errors import MemoryTooSmall
from refill_service.datasets.first_checksums import FirstChecksums

_MIN_BYTES = 64 << 20


class IndexRoom:
    """Bytes of indexes, over all jobs of a pod."""

    def __init__(self, memory_bytes: int) -> None:
        self.limit_bytes = memory_bytes // 8 + _MIN_BYTES
        self.used_bytes = 0
        self.first_checksums = FirstChecksums()
        """Of samples whose indexes have none."""

    def check(self, source: str, wanted_bytes: int) -> None:
        """Raises :class:`MemoryTooSmall` when there is no room for so much."""
        if self.used_bytes + wanted_bytes > self.limit_bytes:
            raise MemoryTooSmall(
                f"memory too small: what a pod needs of {source} takes {wanted_bytes:,} bytes, and of the "
                f"{self.limit_bytes:,} that it has for indexes {self.used_bytes:,} are taken; raise "
                "REFILL_MEMORY_BYTES, run more pods, or end other jobs"
            )

    def reserve(self, source: str, wanted_bytes: int) -> None:
        """Raises as :meth:`check` does."""
        self.check(source, wanted_bytes)
        self.used_bytes += wanted_bytes

    def release(self, size_bytes: int) -> None:
        self.used_bytes -= size_bytes
