"""What does an owner answer, send ahead and read, in one epoch of one job?

The path of a request: ``take`` assigns a sample to each request and orders refills; when their bytes are here
(``refill_arrived``) and the answer has left, ``send_ahead`` chooses what else the rank can hold. Requests are
named by the sample that they *ask* for: within an epoch each is asked for once, so the table asked -> assigned is
the whole memory of who got what, and asking again gives the same answer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refill_service.cache_core.abstract_memory import AbstractMemory, Refill
from refill_service.cache_core.epoch_order import Traces
from refill_service.cache_core.prefetch_check import HeldByRank, UpcomingRequests, first_of_each
from refill_service.cache_core.refill_policies import REFILL_CHOICES
from refill_service.cache_core.sample_mapping import AbstractMapping, Int64Array

__all__ = ["Ahead", "EpochCounts", "OwnerEpoch", "Taken"]

_NONE_AHEAD = np.empty(0, dtype=np.int64)
_FIRST_PIECE = 256


@dataclass(frozen=True)
class Taken:
    """The answer to some requests of one rank, in their order."""

    samples: Int64Array
    """``(n,)`` local ids."""
    refills: list[Refill]
    """Orders; the samples of a refill may serve several of the requests."""
    repeated: NDArray[np.bool_] | None
    """``(n,)`` which requests had been answered before; None: none of them."""


@dataclass(frozen=True)
class Ahead:
    """What to send ahead: for each ``position`` of the rank, the local ``sample`` that answers it."""

    positions: Int64Array
    samples: Int64Array


@dataclass
class EpochCounts:
    """What happened at one owner in one epoch. Bytes are of whole samples."""

    takes: int = 0
    """Requests answered, each counted once, sent ahead or not."""
    misses: int = 0
    """Takes that needed a refill."""
    sent_ahead: int = 0
    """Takes that were sent ahead of their request."""
    samples_read: int = 0
    samples_filled: int = 0
    bytes_read: int = 0
    bytes_filled: int = 0

    @property
    def bytes_wasted(self) -> int:
        return self.bytes_read - self.bytes_filled


@dataclass
class _Rank:
    upcoming: UpcomingRequests
    held: HeldByRank = field(repr=False)


class OwnerEpoch:
    """One owner's share of one epoch.

    :param lengths: ``(num_samples,)`` bytes of each local sample.
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
    ) -> None:
        share = mapping.share
        self.mapping = mapping
        self.counts = EpochCounts()
        self._traces = traces
        self._lengths = lengths
        self._window = prefetch_window
        members = traces.members(share.first_sample, share.end_sample)
        self.num_requests = share.num_samples if members is None else int(np.count_nonzero(members))
        self.memory = AbstractMemory(mapping, REFILL_CHOICES[refill], random.Random(key), members)
        self._starts = share.starts - share.first_sample
        narrow = np.int32 if share.num_samples < 2**31 else np.int64
        self._assigned: NDArray[np.signedinteger[Any]] = np.full(share.num_samples, -1, dtype=narrow)
        self._assigned_view = self._assigned.data
        self._ranks: dict[int, _Rank] = {}

    def take(self, asked: Int64Array) -> Taken:
        """Answer requests for the local samples ``asked``, ``(n,)``, all different.

        Those that memory can answer are answered first, then the others in their order, each with its refill:
        so the refills of a batch find as many vacant slots as they can.
        """
        samples = self._assigned[asked].astype(np.int64)
        repeated = samples >= 0
        any_repeated = bool(repeated.any())
        todo = np.flatnonzero(~repeated) if any_repeated else np.arange(len(asked))
        locations = self.mapping.locations(asked[todo])
        valid = self.memory.take_valid(locations)
        samples[todo] = valid
        refills = []
        for i in np.flatnonzero(valid < 0).tolist():
            samples[todo[i]], refill = self.memory.take_one(int(locations[i]))
            if refill is not None:
                refills.append(refill)
                self._count(refill)
        self._assigned[asked] = samples
        self.counts.takes += len(todo)
        return Taken(samples, refills, repeated if any_repeated else None)

    def take_one(self, asked: int, location: int) -> tuple[int, Refill | None]:
        """``take`` for one request, with its location looked up before: what the simulation calls a million times."""
        assigned = self._assigned_view[asked]
        if assigned >= 0:
            return assigned, None
        sample, refill = self.memory.take_one(location)
        if refill is not None:
            self._count(refill)
        self._assigned_view[asked] = sample
        self.counts.takes += 1
        return sample, refill

    def send_ahead(self, rank: int, answered: Int64Array, ahead_from: int, room: int, started_below: int) -> Ahead:
        """Choose what to send with an answer, and take it.

        :param answered: locations of the requests just answered.
        :param ahead_from: the window starts at this position of the rank.
        :param room: bytes that the rank's home pod has reserved for this answer; never exceeded.
        :param started_below: the rank has asked for every position below this one.
        """
        if not self._window:
            return Ahead(_NONE_AHEAD, _NONE_AHEAD)
        state = self._ranks.get(rank)
        if state is None:
            state = _Rank(UpcomingRequests(self._traces, rank, self.mapping), HeldByRank(len(self.memory.sample_at)))
            self._ranks[rank] = state
        state.held.started_below(started_below)
        if room <= 0:
            return Ahead(_NONE_AHEAD, _NONE_AHEAD)
        positions, asked, locations = state.upcoming.after(ahead_from - 1, self._window)
        sent_positions, sent_samples = [_NONE_AHEAD], [_NONE_AHEAD]
        with state.held.also(answered):
            # Room is mostly short, so look at the window piece by piece and stop when it is used up.
            for piece in _pieces(len(positions)):
                chosen, samples, room = self._choose_ahead(state.held, asked[piece], locations[piece], room)
                state.held.sent(positions[piece][chosen], locations[piece][chosen])
                sent_positions.append(positions[piece][chosen])
                sent_samples.append(samples)
                if room <= 0:
                    break
        ahead = Ahead(np.concatenate(sent_positions), np.concatenate(sent_samples))
        self.counts.takes += len(ahead.samples)
        self.counts.sent_ahead += len(ahead.samples)
        return ahead

    def _choose_ahead(
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

    def refill_arrived(self, refill: Refill) -> None:
        """Fact: the bytes of a refill are in memory; they may be sent ahead from now on."""
        self.memory.refill_arrived(refill)

    def refill_failed(self, refill: Refill) -> None:
        """Fact: the bytes of a refill will not come. What no request was promised yet is unconsumed again."""
        self.memory.refill_failed(refill)

    @property
    def finished(self) -> bool:
        """Whether every request that this owner can get in the epoch was answered or sent ahead."""
        return self.counts.takes >= self.num_requests

    def _count(self, refill: Refill) -> None:
        counts = self.counts
        first, end = int(self._starts[refill.chunk]), int(self._starts[refill.chunk + 1])
        counts.misses += 1
        counts.samples_read += end - first
        counts.samples_filled += len(refill.samples)
        counts.bytes_read += int(self._lengths[first:end].sum())
        counts.bytes_filled += int(self._lengths[refill.samples].sum())


def _pieces(length: int) -> Iterator[slice]:
    """Slices that cover ``range(length)``, each twice as long as the one before."""
    start, size = 0, _FIRST_PIECE
    while start < length:
        yield slice(start, start + size)
        start, size = start + size, 2 * size
