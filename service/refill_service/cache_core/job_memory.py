"""How is a job's memory on a pod divided, and how much of each part is left for the bytes of samples?

Python needs an object and places in dicts for each sample. With small samples that is most of what they take, and it
has to stay within the memory that was promised, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["GOOD_CHUNKS", "JobMemory", "least_memory", "memory_for_chunks", "most_memory"]

_BESIDE_RESIDENT_BYTES = 250
"""Beside a sample that fills a slot."""
_BESIDE_SENT_BYTES = 400
"""Beside one that was sent ahead, or has just left: it is found by its request."""
_SHARE_MARGIN = 1.25
_LEAST_JOB_BYTES = 1 << 20
GOOD_CHUNKS = 128
"""With as many in memory, a batch of 64 samples has those of 50 different chunks."""


@dataclass(frozen=True)
class JobMemory:
    """Parts of ``memory_bytes``; what none of them has is for reads in flight."""

    memory_bytes: int
    remote_fraction: float
    """For what owners send ahead; 0 with one pod."""
    recent_fraction: float
    """For what has just left."""
    in_flight_fraction: float
    sample_bytes: float
    """Of a sample, on average."""

    @property
    def abstract_bytes(self) -> int:
        """Of samples, in abstract memory."""
        rest = 1 - self.remote_fraction - self.recent_fraction - self.in_flight_fraction
        return int(self.memory_bytes * rest * self._payload_part(_BESIDE_RESIDENT_BYTES))

    @property
    def remote_bytes(self) -> int:
        """Of samples that were sent ahead."""
        return int(self.memory_bytes * self.remote_fraction * self._payload_part(_BESIDE_SENT_BYTES))

    @property
    def recent_bytes(self) -> int:
        """Of samples that have just left."""
        return int(self.memory_bytes * self.recent_fraction * self._payload_part(_BESIDE_SENT_BYTES))

    def _payload_part(self, beside_bytes: int) -> float:
        sample_bytes = max(1.0, self.sample_bytes)
        return sample_bytes / (sample_bytes + beside_bytes)


def memory_for_chunks(abstract_bytes: float, of: JobMemory) -> int:
    """The ``memory_bytes`` with which a job has so much abstract memory, divided as ``of`` is."""
    whole = JobMemory(1 << 50, of.remote_fraction, of.recent_fraction, of.in_flight_fraction, of.sample_bytes)
    return math.ceil(abstract_bytes * whole.memory_bytes / whole.abstract_bytes)


def most_memory(share_bytes: float, of: JobMemory) -> int:
    """More than this a job can't use that owns so many bytes of samples on a pod: all of them are in memory then.

    Shares differ by a chunk or so, and a chunk may reach over bytes between its samples.
    """
    return memory_for_chunks(_SHARE_MARGIN * share_bytes, of) + _LEAST_JOB_BYTES


def least_memory(chunk_bytes: float, most_bytes: int, of: JobMemory) -> int:
    """With less than this a job's samples are spread badly: too few chunks are in memory to choose from."""
    return min(most_bytes, memory_for_chunks(GOOD_CHUNKS * chunk_bytes, of))
