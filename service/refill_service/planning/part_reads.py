"""What does an epoch of a part of a dataset read, and when is the part worth packing alone?

Pods' own code decides, with no I/O: each chunk is read from the first to the last of its samples that are wanted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from refill.errors import InvalidInput
from refill.protocol.class_order import in_turns
from refill.protocol.job_spec import JobSpec
from refill_service.cache_core.planned.job_orders import JobOrders
from refill_service.cache_core.sample_mapping import ChunkLayout, Int64Array
from refill_service.planning.analysis import Analysis
from refill_service.planning.planned_pods import PlannedPods, made_up_plan

__all__ = ["PartReads", "part_reads"]


@dataclass(frozen=True)
class PartReads:
    """Of one epoch, over all pods; of the whole dataset, where a part of it was simulated."""

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

    Raises :class:`InvalidInput` where none is left, or no blob holds a chunk.
    """
    shape, num_pods, lengths = analysis.shape, analysis.num_pods, analysis.shape.lengths
    scale = shape.num_samples / shape.simulated
    ids = ids[ids < shape.simulated]
    if not len(ids):
        raise InvalidInput(f"the part has none of the {shape.simulated:,} samples that are simulated")
    layout = ChunkLayout(shape.first_sample, chunk_size)
    pod_bytes = int(analysis.memory_of("planned", chunk_size) / scale) // num_pods
    spec = JobSpec(
        "analysis",
        "memory://analysis",
        world_size=num_pods,
        seed=analysis.seed,
        chunk_size=chunk_size,
        order="explicit",
    )
    plan = made_up_plan(spec, layout, lengths, pod_bytes, num_pods)
    pods, epoch = PlannedPods(plan, layout, lengths, pod_bytes, num_pods), 1
    listed = in_turns(ids, JobOrders(plan, layout, lengths.__getitem__).whole(epoch))
    pods.lists_are_known(epoch, listed)
    for start in range(0, len(listed), analysis.simulated_batch):
        samples = listed[start : start + analysis.simulated_batch]
        pods.ask_for(epoch, np.arange(start, start + len(samples)), samples)
    counts = pods.counts[epoch]
    return PartReads(
        chunk_size,
        round(len(ids) * scale),
        round(int(lengths[ids].sum()) * scale),
        round(counts.gets * scale),
        round(counts.bytes_read * scale),
    )
