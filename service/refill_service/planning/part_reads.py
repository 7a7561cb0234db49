"""What does an epoch of a part of a dataset read, and when is the part worth packing alone?

Pods' own code decides, with no I/O: each chunk is read from the first to the last of its samples that are wanted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from refill.errors import InvalidInput
from refill_service.cache_core.sample_mapping import Int64Array
from refill_service.planning.analysis import Analysis
from refill_service.planning.simulated_job import SimulatedJob

_LATER_EPOCH = 1
"""The first one begins with little memory."""


@dataclass(frozen=True)
class PartReads:
    """What an epoch of a part reads, over all pods; of the whole dataset, where only some of it was simulated."""

    chunk_size: int
    samples: int
    part_bytes: int
    gets: int
    bytes_read: int

    @property
    def amplification(self) -> float:
        """Bytes read for each byte that is wanted."""
        return self.bytes_read / max(1, self.part_bytes)

    @property
    def epochs_until_packed_is_less(self) -> float:
        """Packing reads as much as an epoch does, and each epoch then the part alone: from so many epochs on that is
        less, all together. Infinite: never."""
        saved = self.bytes_read - self.part_bytes
        return math.inf if saved <= 0 else math.floor(self.bytes_read / saved) + 1


def part_reads(analysis: Analysis, ids: Int64Array, chunk_size: int) -> PartReads:
    """An epoch of a planned job that reads these samples ``(n,)`` in the plan's order, as ``EpochSampler`` lists them.

    :param ids: ascending; those beyond what is simulated are left out, and what is found is scaled.

    Raises :class:`InvalidInput` where none is left, or no blob holds a chunk, :class:`MemoryTooSmall` when no pod holds
    one.
    """
    shape = analysis.shape
    ids = ids[ids < shape.simulated]
    if not len(ids):
        raise InvalidInput(f"the part has none of the {shape.simulated:,} samples that are simulated")
    spec, pods = analysis.simulated_job("planned", chunk_size, order="explicit")
    job = SimulatedJob.of(
        spec, shape.first_sample, shape.lengths, pods, 1, batch_size=analysis.simulated_batch, part=ids
    )
    for _ in job.epoch(_LATER_EPOCH):
        pass
    reads, times = job.reads(_LATER_EPOCH), shape.num_samples / shape.simulated
    return PartReads(
        chunk_size,
        round(len(ids) * times),
        round(int(shape.lengths[ids].sum()) * analysis.scale),
        round(reads.gets * times),
        round(reads.bytes_read * analysis.scale),
    )
