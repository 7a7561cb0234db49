"""Policy ``planned``: an order computed ahead is carried out; each request gets the very sample that it asks for.

The order reads each chunk once where memory holds what it was planned for (``planned/share_order.py``): all that is
left to do is to read chunks in the order of their first use, as far ahead as memory goes, and to keep each sample until
it is asked for. Nothing is chosen, so nothing has to be remembered to answer the same again.

Where memory is smaller, or ranks are further apart, a sample is asked for whose chunk has no room yet. Then what will
be asked for last gives way, and is read again when its turn comes anew: what gave way last would give way again if it
were read as soon as there is room. A sample that has to be read alone is.

Any order that is known can be carried out so. One that was not planned reads chunks again and again.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from refill_service.cache_core.planned.spread import RAMP_START
from refill_service.cache_core.policies.drain import default_chunk_size
from refill_service.cache_core.policies.interface import (
    NO_ORDERS,
    NO_SAMPLES,
    NONE_AHEAD,
    Ahead,
    EpochBegan,
    Orders,
    Policy,
    PolicyKind,
    Read,
)
from refill_service.cache_core.prefetch_check import UpcomingRequests
from refill_service.cache_core.sample_mapping import Int64Array

__all__ = ["KIND", "PlannedPolicy"]

_BLOCK = 1 << 12
"""Samples that are looked at together for those that give way."""


class PlannedPolicy(Policy):
    """One owner's share of one epoch. Samples in memory and on their way stay within the memory that there is; only
    when there are none is a chunk read that does not fit."""

    def __init__(self, began: EpochBegan) -> None:
        super().__init__(began)
        share = self.mapping.share
        samples = np.arange(share.num_samples, dtype=np.int64)
        self._to_come = np.ones(share.num_samples, dtype=bool) if self._left is None else self._left.copy()
        """Samples that are left to be answered with."""
        if self._left is None:
            left, members = samples, None
        else:
            left, members = samples[self._left], began.traces.members(share.first_sample, share.end_sample)
        known = samples if members is None else samples[members]
        ranks, positions = began.traces.position_of(known + share.first_sample)
        self._asked_for = known[np.argsort(positions * began.traces.num_ranks + ranks)].astype(self._assigned.dtype)
        """Samples in the order in which they are asked for, if ranks are in step."""
        self._place = np.full(share.num_samples, len(known), dtype=self._assigned.dtype)
        """Of each sample in that order."""
        self._place[self._asked_for] = np.arange(len(known), dtype=self._assigned.dtype)
        self._here_below = 0
        """No sample at this place or behind it is in memory."""
        self._chunk = np.repeat(np.arange(share.num_chunks, dtype=np.int64), np.diff(self._starts))
        self._first_use = np.full(share.num_chunks, len(known), dtype=np.int64)
        """The place of the first sample of each chunk that was left when the epoch began."""
        np.minimum.at(self._first_use, self._chunk[left], self._place[left])
        self._in_order = np.argsort(self._first_use, kind="stable")
        self._in_order = self._in_order[: np.count_nonzero(self._first_use < len(known))]
        """Chunks in the order of their first use."""
        self._turn = np.empty(share.num_chunks, dtype=np.int64)
        self._turn[self._in_order] = np.arange(len(self._in_order), dtype=np.int64)
        self._next = 0
        """All chunks whose turn was before have been ordered."""
        self._again: list[tuple[int, int]] = []
        """``(place of the first sample that is to be read, chunk)``, a heap, of chunks that were read before, or a
        sample of them. It is out of date where that sample has been read."""
        self._here = np.zeros(share.num_samples, dtype=bool)
        """Samples in memory that no request was promised."""
        self._coming = np.zeros(share.num_samples, dtype=bool)
        """Samples on their way, promised or not."""
        self._capacity_bytes = 0

    def memory_changed(self, capacity_bytes: int) -> Orders:
        """What is in memory stays, should it be less."""
        self._capacity_bytes = capacity_bytes
        return Orders(self._read_ahead([]))

    @property
    def nothing_left_to_read(self) -> bool:
        return self._next == len(self._in_order) and not self._again

    def _answer(self, rank: int, asked: Int64Array) -> tuple[Int64Array, Orders]:
        here = self._here[asked]
        missing = asked[~here & ~self._coming[asked]]
        promised = asked[here | self._coming[asked]]
        self._promise(asked, promised)
        self._count_misses(asked[~here])
        reads: list[Read] = []
        drops = [self._read_now(chunk, missing, reads) for chunk in dict.fromkeys(self._chunk[missing].tolist())]
        return asked.copy(), Orders(self._read_ahead(reads), np.concatenate([NO_SAMPLES, *drops]))

    def _promise(self, asked: Int64Array, held: Int64Array) -> None:
        """Requests for these get them; of them, ``held`` are in memory or on their way."""
        self.held_bytes -= int(self._lengths[held].sum())
        self._here[asked] = self._to_come[asked] = False

    def _count_misses(self, samples: Int64Array) -> None:
        for chunk, count in zip(*np.unique(self._chunk[samples], return_counts=True), strict=True):
            first, end = self._starts[chunk : chunk + 2].tolist()
            self.counts.misses += 0 if self._at_hand(first, end) else int(count)

    def _read_now(self, chunk: int, asked: Int64Array, reads: list[Read]) -> Int64Array:
        """Read what is asked for of a chunk that has not been read, or was given up: with all that is left of it if
        that finds room. Returns what gives way to it."""
        asked = np.sort(asked[self._chunk[asked] == chunk])
        rest = self._unread(chunk)
        wanted_bytes = int(self._lengths[rest].sum())
        given_up = NO_SAMPLES
        if len(rest) and self.held_bytes and self.held_bytes + wanted_bytes > self._capacity_bytes:
            given_up = self._give_up(wanted_bytes, int(self._place[rest].max()))
        if self.held_bytes and self.held_bytes + wanted_bytes > self._capacity_bytes:
            rest = NO_SAMPLES
        wanted = np.union1d(asked, rest)
        spans = [wanted] if len(rest) else [wanted[place : place + 1] for place in range(len(wanted))]
        for samples in spans:
            self._order(chunk, samples, reads)
        self.held_bytes += int(self._lengths[rest].sum())
        self._to_be_read(chunk)
        return given_up

    def _give_up(self, wanted_bytes: int, place: int) -> Int64Array:
        """Samples in memory that are asked for behind a place, those last asked for first, as many as make room for so
        much; they are read again. None if they do not."""
        to_free = self.held_bytes + wanted_bytes - self._capacity_bytes
        parts, freed_bytes, end = [NO_SAMPLES], 0, self._here_below
        while freed_bytes < to_free and end > place + 1:
            start = max(place + 1, end - _BLOCK)
            last_first = self._asked_for[start:end][::-1]
            parts.append(last_first[self._here[last_first]])
            freed_bytes += int(self._lengths[parts[-1]].sum())
            end = start
        if freed_bytes < to_free:
            return NO_SAMPLES
        given_up = np.concatenate(parts).astype(np.int64)
        freed = np.cumsum(self._lengths[given_up])
        count = int(np.searchsorted(freed, to_free)) + 1
        given_up = given_up[:count]
        self.held_bytes -= int(freed[count - 1])
        self._here[given_up] = False
        self._here_below = int(self._place[given_up[-1]])
        for chunk in np.unique(self._chunk[given_up]).tolist():
            self._to_be_read(chunk)
        return given_up

    def _to_be_read(self, chunk: int) -> None:
        """What is left of a chunk is to be read when it is next used."""
        rest = self._unread(chunk)
        if len(rest):
            heappush(self._again, (int(self._place[rest].min()), chunk))

    def _read_ahead(self, reads: list[Read]) -> list[Read]:
        while self._again or self._next < len(self._in_order):
            chunk = int(self._in_order[self._next]) if self._next < len(self._in_order) else -1
            again = bool(self._again) and (chunk < 0 or self._again[0][0] < self._first_use[chunk])
            if again:
                chunk = self._again[0][1]
            rest = self._unread(chunk)
            # Where a sample was read alone since, the chunk has a later place in the heap, too.
            if len(rest) and not (again and int(self._place[rest].min()) != self._again[0][0]):
                wanted_bytes = int(self._lengths[rest].sum())
                if self.held_bytes + wanted_bytes > self._capacity_bytes:
                    break
                self._order(chunk, rest, reads)
                self.held_bytes += wanted_bytes
            if again:
                heappop(self._again)
            else:
                self._next += 1
        return reads

    def _unread(self, chunk: int) -> Int64Array:
        """Samples of a chunk that are left to be answered with, and neither in memory nor on their way."""
        span = slice(int(self._starts[chunk]), int(self._starts[chunk + 1]))
        there: NDArray[np.intp] = np.flatnonzero(self._to_come[span] & ~self._here[span] & ~self._coming[span])
        return there + span.start

    def _order(self, chunk: int, samples: Int64Array, reads: list[Read]) -> None:
        """A read from the first of these samples to the last."""
        self._coming[samples] = True
        self.counts.refills += 1
        reads.append(Read(int(samples[0]), int(samples[-1]) + 1, samples, chunk))

    def _choose_ahead(
        self, rank: int, upcoming: UpcomingRequests, asked: Int64Array, ahead_from: int, room: int, started_below: int
    ) -> Ahead:
        """What is in memory for the rank's next requests."""
        positions, samples, _ = upcoming.after(ahead_from - 1, self._window)
        here = np.flatnonzero(self._here[samples])
        here = here[: int(np.searchsorted(np.cumsum(self._lengths[samples[here]]), room, side="right"))]
        if not len(here):
            return NONE_AHEAD
        sent = samples[here]
        self._assigned[sent] = sent
        self._promise(sent, sent)
        return Ahead(positions[here], sent, Orders(self._read_ahead([])))

    def _arrived(self, read: Read, kept: Int64Array) -> Orders:
        self._coming[read.samples] = False
        fresh = kept[self._to_come[kept]]
        self._here[fresh] = True
        if len(fresh):
            self._here_below = max(self._here_below, int(self._place[fresh].max()) + 1)
        # What did not come with it is read alone by who asks for it, and gets the reason.
        lost = np.setdiff1d(read.samples, kept, assume_unique=True)
        self._lost(lost[self._to_come[lost]])
        return NO_ORDERS

    def failed(self, read: Read) -> Orders:
        self._coming[read.samples] = False
        self._lost(read.samples[self._to_come[read.samples]])
        if read.chunk >= 0:
            self._next = min(self._next, int(self._turn[read.chunk]))
        return NO_ORDERS

    def _lost(self, samples: Int64Array) -> None:
        self.held_bytes -= int(self._lengths[samples].sum())


def _first_batch_gets(asked: int, chunk_size: int, chunks_in_memory: float) -> int:
    """A job begins with a part of memory, and each request may be for any of it."""
    chunks = max(1.0, chunks_in_memory / RAMP_START)
    return round(chunks * (1 - (1 - 1 / chunks) ** asked))


KIND = PolicyKind(
    "planned",
    PlannedPolicy,
    default_chunk_size=default_chunk_size,
    first_batch_gets=_first_batch_gets,
    analysed_chunk_sizes=(8, 16, 32, 64),
)
