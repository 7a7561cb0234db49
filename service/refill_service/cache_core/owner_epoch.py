"""What does an owner answer, send ahead and read, in one epoch of one job?

The path of a request: ``take`` assigns a sample to each request and orders refills; when their bytes are here
(``refill_arrived``) and the answer has left, ``send_ahead`` chooses what else the rank can hold. Requests are
named by the sample that they *ask* for: within an epoch each is asked for once, so the table asked -> assigned is
the whole memory of who got what, and asking again gives the same answer.

This file holds what every policy shares; which sample answers and which chunk is read is in ``redox_epoch.py`` and
``drain_epoch.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refill_service.cache_core.epoch_order import Traces
from refill_service.cache_core.prefetch_check import UpcomingRequests
from refill_service.cache_core.refill import Refill
from refill_service.cache_core.sample_mapping import AbstractMapping, Int64Array

__all__ = ["NONE_AHEAD", "Ahead", "EpochCounts", "OwnerEpoch", "Taken", "pieces"]

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
    answer_after: int = 0
    """The answer waits until ``came_bytes`` is so much, or no read is under way."""


@dataclass(frozen=True)
class Ahead:
    """What to send ahead: for each ``position`` of the rank, the local ``sample`` that answers it."""

    positions: Int64Array
    samples: Int64Array
    refills: list[Refill] = field(default_factory=list)
    """Orders that follow from what left memory."""


NONE_AHEAD = Ahead(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))


@dataclass
class EpochCounts:
    """What happened at one owner in one epoch. Bytes are of whole samples. No count ever falls."""

    takes: int = 0
    """Requests answered, each counted once, sent ahead or not."""
    misses: int = 0
    """Takes that had to wait for the store: none of their policy's choices was in memory."""
    refills: int = 0
    """Chunks ordered, whether the store or the pinned tier has them."""
    sent_ahead: int = 0
    """Takes that were sent ahead of their request."""
    samples_read: int = 0
    samples_filled: int = 0
    bytes_read: int = 0
    bytes_filled: int = 0
    refills_pinned: int = 0
    """Refills that the pinned tier served. What it serves is not read from the store, and not counted as read."""
    bytes_pinned: int = 0

    @property
    def bytes_wasted(self) -> int:
        return self.bytes_read - self.bytes_filled


class OwnerEpoch(ABC):
    """One owner's share of one epoch.

    :param lengths: ``(num_samples,)`` bytes of each local sample.
    :param prefetch_window: P, how many of a rank's next requests are considered to be sent ahead.
    :param answered: of an epoch that goes on after a restart, ``(asked, samples)``: requests, by the local samples that
        they asked for, and those that answered them. Raises ValueError when they can't be of this epoch.
    """

    def __init__(
        self,
        mapping: AbstractMapping,
        traces: Traces,
        lengths: NDArray[np.int64],
        *,
        prefetch_window: int = 0,
        answered: tuple[Int64Array, Int64Array] | None = None,
    ) -> None:
        share = mapping.share
        self.mapping = mapping
        self.counts = EpochCounts()
        self.came_bytes = 0
        """Bytes of samples that arrived with no request waiting for them, or whose read failed."""
        self.at_hand: Callable[[int], bool] = lambda chunk: False
        """Whether a chunk needs no store: then nobody waits for its refill, and that is no miss."""
        self.held_bytes = 0
        """Bytes of samples in memory or on their way that no request was promised, of policies that count them."""
        self._traces = traces
        self._lengths = lengths
        self._window = prefetch_window
        self._left = traces.members(share.first_sample, share.end_sample)
        """Which samples are left to be read when the epoch begins, or goes on; None: all."""
        self.num_requests = share.num_samples if self._left is None else int(np.count_nonzero(self._left))
        self._num_answered_before = 0
        self._starts = share.starts - share.first_sample
        narrow = np.int32 if share.num_samples < 2**31 else np.int64
        self._assigned: NDArray[np.signedinteger[Any]] = np.full(share.num_samples, -1, dtype=narrow)
        self._assigned_view = self._assigned.data
        self._upcoming: dict[int, UpcomingRequests] = {}
        if answered is not None:
            self._go_on_after(*answered)

    def _go_on_after(self, asked: Int64Array, samples: Int64Array) -> None:
        """Fact: these requests were answered before a restart."""
        asked, first = np.unique(asked, return_index=True)
        samples = samples[first]
        members = np.ones(self.mapping.share.num_samples, dtype=bool) if self._left is None else self._left
        for ids in (asked, samples):
            if len(ids) and not (0 <= int(ids.min()) <= int(ids.max()) < len(members) and members[ids].all()):
                raise ValueError("requests were answered that this epoch does not have")
        self._assigned[asked] = samples
        self._num_answered_before = len(asked)
        self._left = members.copy()
        self._left[samples] = False

    def answered(self) -> tuple[Int64Array, Int64Array]:
        """``(asked, samples)`` of all requests that were answered, local ids."""
        asked = np.flatnonzero(self._assigned >= 0)
        return asked, self._assigned[asked].astype(np.int64)

    def has_answered(self, asked: Int64Array) -> bool:
        """Whether all of these requests were answered before."""
        return bool((self._assigned[asked] >= 0).all())

    def start(self) -> list[Refill]:
        """Orders to begin the epoch with."""
        return []

    def capacity_changed(self, capacity_bytes: int) -> list[Refill]:
        """Fact: samples may take so much memory from now on. Returns orders for what there is room for now."""
        return []

    @property
    def nothing_left_to_read(self) -> bool:
        """Whether every chunk was ordered, so that the memory that is freed from now on is for the next epoch."""
        return False

    def take(self, asked: Int64Array) -> Taken:
        """Answer requests for the local samples ``asked``, ``(n,)``, all different."""
        samples = self._assigned[asked].astype(np.int64)
        repeated = samples >= 0
        any_repeated = bool(repeated.any())
        todo = np.flatnonzero(~repeated) if any_repeated else np.arange(len(asked))
        samples[todo], refills = self._take_new(self.mapping.locations(asked[todo]))
        self._assigned[asked] = samples
        self.counts.takes += len(todo)
        return Taken(samples, refills, repeated if any_repeated else None, self._answer_after() if len(todo) else 0)

    def take_one(self, asked: int, location: int) -> tuple[int, list[Refill]]:
        """``take`` for one request, with its location looked up before: what the simulation calls a million times."""
        assigned = self._assigned_view[asked]
        if assigned >= 0:
            return assigned, []
        sample, refills = self._take_new_one(location)
        self._assigned_view[asked] = sample
        self.counts.takes += 1
        return sample, refills

    def send_ahead(self, rank: int, answered: Int64Array, ahead_from: int, room: int, started_below: int) -> Ahead:
        """Choose what to send with an answer, and take it.

        :param answered: locations of the requests just answered.
        :param ahead_from: the window starts at this position of the rank.
        :param room: bytes that the rank's home pod has reserved for this answer; never exceeded.
        :param started_below: the rank has asked for every position below this one.
        """
        if not self._window:
            return NONE_AHEAD
        upcoming = self._upcoming.get(rank)
        if upcoming is None:
            upcoming = self._upcoming[rank] = UpcomingRequests(self._traces, rank, self.mapping)
        ahead = self._choose_ahead(rank, upcoming, answered, ahead_from, room, started_below)
        self.counts.takes += len(ahead.samples)
        self.counts.sent_ahead += len(ahead.samples)
        return ahead

    @abstractmethod
    def _take_new(self, locations: Int64Array) -> tuple[Int64Array, list[Refill]]:
        """Samples for requests at ``locations`` that were never answered before, and the orders that this needs."""

    def _answer_after(self) -> int:
        return 0

    @abstractmethod
    def _take_new_one(self, location: int) -> tuple[int, list[Refill]]: ...

    @abstractmethod
    def _choose_ahead(
        self,
        rank: int,
        upcoming: UpcomingRequests,
        answered: Int64Array,
        ahead_from: int,
        room: int,
        started_below: int,
    ) -> Ahead: ...

    def refill_arrived(self, refill: Refill, *, pinned: bool = False) -> None:
        """Fact: the bytes of a refill are in memory; they may be sent ahead from now on.

        Its ``samples`` may be fewer than were ordered: the bytes of the others are damaged, and are never sent ahead.

        :param pinned: they came from the pinned tier, not from the store.
        """
        # Counted here and not when it was ordered, so that no count ever has to be taken back.
        counts = self.counts
        if pinned:
            counts.refills_pinned += 1
            counts.bytes_pinned += int(self._lengths[refill.samples].sum())
            self._arrived(refill)
            return
        first, end = int(self._starts[refill.chunk]), int(self._starts[refill.chunk + 1])
        counts.samples_read += end - first
        counts.samples_filled += len(refill.samples)
        counts.bytes_read += int(self._lengths[first:end].sum())
        counts.bytes_filled += int(self._lengths[refill.samples].sum())
        self._arrived(refill)

    @abstractmethod
    def _arrived(self, refill: Refill) -> None: ...

    @abstractmethod
    def refill_failed(self, refill: Refill) -> None:
        """Fact: the bytes of a refill will not come. What no request was promised yet is unconsumed again."""

    @property
    def num_answered(self) -> int:
        """Requests that were answered or sent ahead, before a restart or since."""
        return self.counts.takes + self._num_answered_before

    @property
    def finished(self) -> bool:
        """Whether every request that this owner can get in the epoch was answered or sent ahead."""
        return self.num_answered >= self.num_requests


def pieces(length: int) -> Iterator[slice]:
    """Slices that cover ``range(length)``, each twice as long as the one before."""
    start, size = 0, _FIRST_PIECE
    while start < length:
        yield slice(start, start + size)
        start, size = start + size, 2 * size
