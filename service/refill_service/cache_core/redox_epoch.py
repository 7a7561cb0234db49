"""Policy ``redox``: answer from the slot that a request is bound to (Redox Algorithms 1-6, Brand 3.3 and 3.4)."""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

from refill_service.cache_core.abstract_memory import AbstractMemory
from refill_service.cache_core.epoch_order import Traces
from refill_service.cache_core.owner_epoch import NONE_AHEAD, Ahead, OwnerEpoch, pieces
from refill_service.cache_core.prefetch_check import HeldByRank, UpcomingRequests, first_of_each
from refill_service.cache_core.refill import Refill
from refill_service.cache_core.refill_policies import REFILL_CHOICES
from refill_service.cache_core.sample_mapping import AbstractMapping, Int64Array

__all__ = ["RedoxEpoch"]


class RedoxEpoch(OwnerEpoch):
    """One owner's share of one epoch, by the papers' slot rule.

    :param refill: ``best`` or ``random``.
    :param key: seeds every choice; the same key and the same calls give the same decisions.
    """

    def __init__(
        self,
        mapping: AbstractMapping,
        traces: Traces,
        lengths: NDArray[np.int64],
        *,
        refill: str = "best",
        prefetch_window: int = 0,
        key: str = "",
        answered: tuple[Int64Array, Int64Array] | None = None,
    ) -> None:
        super().__init__(mapping, traces, lengths, prefetch_window=prefetch_window, answered=answered)
        if answered is not None and (mapping.locations(answered[0]) != mapping.locations(answered[1])).any():
            raise ValueError("requests were answered from other slots than theirs: memory was divided otherwise")
        self.memory = AbstractMemory(mapping, REFILL_CHOICES[refill], random.Random(key), self._left)
        self._held: dict[int, HeldByRank] = {}

    def _take_new(self, locations: Int64Array) -> tuple[Int64Array, list[Refill]]:
        """What memory can answer is answered first, then the others in their order, each with its refill: so the
        refills of a batch find as many vacant slots as they can."""
        samples = self.memory.take_valid(locations)
        refills = []
        for i in np.flatnonzero(samples < 0).tolist():
            samples[i], ordered = self._take_new_one(int(locations[i]))
            refills += ordered
        return samples, refills

    def _take_new_one(self, location: int) -> tuple[int, list[Refill]]:
        sample, refill = self.memory.take_one(location)
        if refill is None:
            return sample, []
        self.counts.misses += not self.at_hand(refill.chunk)
        self.counts.refills += 1
        return sample, [refill]

    def _choose_ahead(
        self,
        rank: int,
        upcoming: UpcomingRequests,
        answered: Int64Array,
        ahead_from: int,
        room: int,
        started_below: int,
    ) -> Ahead:
        held = self._held.get(rank)
        if held is None:
            held = self._held[rank] = HeldByRank(len(self.memory.sample_at))
        held.started_below(started_below)
        if room <= 0:
            return NONE_AHEAD
        positions, asked, locations = upcoming.after(ahead_from - 1, self._window)
        sent_positions, sent_samples = [NONE_AHEAD.positions], [NONE_AHEAD.samples]
        with held.also(answered):
            # Room is mostly short, so look at the window piece by piece and stop when it is used up.
            for piece in pieces(len(positions)):
                chosen, samples, room = self._choose_of_piece(held, asked[piece], locations[piece], room)
                held.sent(positions[piece][chosen], locations[piece][chosen])
                sent_positions.append(positions[piece][chosen])
                sent_samples.append(samples)
                if room <= 0:
                    break
        return Ahead(np.concatenate(sent_positions), np.concatenate(sent_samples))

    def _choose_of_piece(
        self, held: HeldByRank, asked: Int64Array, locations: Int64Array, room: int
    ) -> tuple[NDArray[np.intp], Int64Array, int]:
        """Take what can be sent of one piece of a window: (indices into the piece, samples, room left)."""
        able = self.memory.resident[locations]
        able &= ~held.occupied[locations]
        chosen = np.flatnonzero(able)
        chosen = chosen[(self.memory.sample_at[locations[chosen]] >= 0) & (self._assigned[asked[chosen]] < 0)]
        chosen = chosen[first_of_each(locations[chosen])]
        samples = self.memory.sample_at[locations[chosen]]
        used = np.cumsum(self._lengths[samples])
        fitting = int(np.searchsorted(used, room, side="right"))
        # What does not fit ends the window: a later, smaller sample must not overtake it for ever.
        room = 0 if fitting < len(chosen) else room - (int(used[-1]) if fitting else 0)
        chosen, samples = chosen[:fitting], samples[:fitting]
        self.memory.sample_at[locations[chosen]] = -1
        self._assigned[asked[chosen]] = samples
        return chosen, samples, room

    def _arrived(self, refill: Refill) -> None:
        self.memory.refill_arrived(refill)

    def refill_failed(self, refill: Refill) -> None:
        self.memory.refill_failed(refill)
