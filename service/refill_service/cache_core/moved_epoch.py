"""What does each position of an epoch ask for when other pods go on with it?

Owners change with the number of pods, and each of them must be asked for as many samples as it has left. So a position
that was answered asks for the sample that it got, and what is left of the samples is dealt to what is left of the
positions.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from refill_service.cache_core.epoch_order import KeyedPermutation, Traces
from refill_service.cache_core.sample_mapping import Int64Array

__all__ = ["moved_traces"]


def moved_traces(
    before: Traces, world_size: int, num_samples: int, received: Mapping[int, tuple[Int64Array, Int64Array]], key: str
) -> dict[int, Int64Array]:
    """The trace of each rank, for :class:`ExplicitTraces`: as long as it was, and asking for the same samples together.

    :param before: the traces of the epoch as it was asked for so far.
    :param received: by rank, ``(positions, samples)`` of what it has received, each position once.
    :param key: names the order in which the samples that are left are dealt.

    Raises :class:`ValueError` when a sample was received twice, or one that the epoch does not ask for.
    """
    members = before.members(0, num_samples)
    left = np.ones(num_samples, dtype=bool) if members is None else members.copy()
    traces: dict[int, Int64Array] = {}
    open_: dict[int, Int64Array] = {}
    for rank in range(world_size):
        asked, repeats = before.asked(rank, np.arange(before.length(rank), dtype=np.int64))
        positions, samples = received.get(rank, (np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)))
        answered = ~repeats[positions]  # a repeat got what it asked for, and takes it from nobody
        positions, samples = positions[answered], samples[answered]
        if len(np.unique(samples)) < len(samples) or not left[samples].all():
            raise ValueError(f"rank {rank} has received samples that were another's, or twice")
        left[samples] = False
        traces[rank] = asked.copy()
        traces[rank][positions] = samples
        is_open = ~repeats
        is_open[positions] = False
        open_[rank] = np.flatnonzero(is_open)
    vacant: dict[int, Int64Array] = {}
    for rank, places in open_.items():
        asked = traces[rank][places]
        vacant[rank] = places[~left[asked]]  # another position got that one
        left[asked] = False
    to_deal = np.flatnonzero(left)
    if len(to_deal):
        to_deal = to_deal[KeyedPermutation(len(to_deal), key).forward(np.arange(len(to_deal), dtype=np.int64))]
    dealt = 0
    for rank, places in vacant.items():
        traces[rank][places] = to_deal[dealt : dealt + len(places)]
        dealt += len(places)
    return traces
