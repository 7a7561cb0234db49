"""The order of one epoch of a share: what of it is read together, when is each of that asked for, and how far is it?

A planned order has each sample once, and what is read together is a chunk. A list that ranks have posted may have a
sample several times, or not at all, and in any order: then memory does not hold all of a chunk from its first use to
its last. So a chunk is read in *parts*: what is asked for within so many places from the part's first, and what comes
later is read again. That number is the largest, the same for all chunks, with which memory holds what has been read and
is still to be asked for. Where all of that fits, each chunk is one part.

An *entry* is a sample in a part. It stays in memory from the part's read to its own last use in that part. The entries
of a planned order are its samples, and the parts its chunks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from refill.protocol.keyed_hash import key_of, numbers
from refill_service.cache_core.sample_mapping import Int64Array

IndexArray = NDArray[np.signedinteger[Any]]

_GAPS_PART = 1.0
"""Of what is wanted of chunks that are read once more, when a pod begins in mid-epoch."""

_STEPS_OF_TWO = 8
_MOST_HALVINGS = 12
"""Of the places over which a part may reach: at least 1/4096 of all, however small memory is."""


class PlacedOrder:
    """The order of one epoch, and what follows from it. It takes a while to make, for a large share.

    :param order: ``(n,)`` the entry at each place.
    :param part_of: ``(entries,)`` the part of each, ascending; ``starts``: ``(parts + 1,)`` the first entry of each.
    :param lengths: ``(entries,)`` bytes of each.
    :param samples: ``(entries,)`` the local sample that each is; None: each sample is an entry.
    :param positions: ``(n,)`` the position of the epoch that each place is, ascending; None: nobody asks by them.
    """

    def __init__(
        self,
        order: IndexArray,
        part_of: IndexArray,
        starts: Int64Array,
        lengths: Int64Array,
        samples: Int64Array | None = None,
        positions: Int64Array | None = None,
    ) -> None:
        self.order = order.astype(part_of.dtype, copy=False)
        self.part_of, self.starts, self.lengths = part_of, starts, lengths
        self.num_uses = None if samples is None else np.bincount(order, minlength=len(lengths)).astype(np.int64)
        """``(entries,)`` how often each is asked for; None: once."""
        self._samples, self._positions = samples, positions
        if self.num_uses is None:
            self._place = np.empty_like(self.order)
            self._place[self.order] = np.arange(len(order), dtype=self.order.dtype)
        else:
            uses = np.argsort(order, kind="stable")
            self._uses = order[uses].astype(np.int64) * len(order) + uses
            """``(n,)`` entry times n, plus place, of all uses: those of an entry beside each other, ascending."""
            self._end_of_uses = np.cumsum(self.num_uses)
        self.first_use, self.in_order = self.first_uses(0)

    def first_uses(self, first_place: int) -> tuple[Int64Array, NDArray[np.intp]]:
        """If nobody asks for what comes before a place: ``(parts,)`` the place of the first use of each part, n where
        there is none, and the parts in the order of it."""
        num_places = len(self.order)
        first_use = np.full(len(self.starts) - 1, num_places, dtype=np.int64)
        parts = self.part_of[self.order[first_place:]]
        np.minimum.at(first_use, parts, np.arange(first_place, num_places, dtype=np.int64))
        num_used = int(np.count_nonzero(first_use < num_places))
        return first_use, np.argsort(first_use, kind="stable")[:num_used]

    def local(self, entries: Int64Array) -> Int64Array:
        """``(n,)`` the local samples that entries are."""
        return entries if self._samples is None else self._samples[entries]

    def next_places(self, entries: Int64Array, uses_left: Int64Array) -> IndexArray:
        """Where each of ``(n,)`` entries is asked for next, if so many of its uses are left: at least one."""
        if self.num_uses is None:
            return self._place[entries]
        found: Int64Array = self._uses[self._end_of_uses[entries] - uses_left] - entries * len(self.order)
        return found

    def uses_from(self, entries: Int64Array, place: int) -> Int64Array:
        """``(n,)`` how many uses of each entry come at this place or behind it."""
        if self.num_uses is None:
            return (self._place[entries] >= place).astype(np.int64)
        found: Int64Array = self._end_of_uses[entries] - np.searchsorted(self._uses, entries * len(self.order) + place)
        return found

    def places_of(self, positions: Int64Array, local: Int64Array) -> Int64Array:
        """``(n,)`` the place of each position of the epoch; -1: it is not known that this sample is asked for there."""
        known = self._positions
        assert known is not None  # a list's
        if not len(known):
            return np.full(len(positions), -1, dtype=np.int64)
        places = np.minimum(np.searchsorted(known, positions), len(known) - 1)
        is_known = (known[places] == positions) & (self.local(self.order[places].astype(np.int64)) == local)
        return np.where(is_known, places, -1)

    def place_from(self, position: int) -> int:
        """The first place whose position is not before this one."""
        assert self._positions is not None
        return int(np.searchsorted(self._positions, position))

    def position_at(self, place: int) -> int:
        assert self._positions is not None
        return int(self._positions[place])


def placed_list(
    samples: Int64Array,
    positions: Int64Array,
    chunk_of: IndexArray,
    lengths: Int64Array,
    memory_bytes: int,
    whole_bytes: int = 0,
) -> PlacedOrder:
    """The order of a list. It takes some two seconds for a million places.

    :param samples: ``(n,)`` the local sample at each place; ``positions``: of the epoch, ascending.
    :param chunk_of, lengths: ``(samples,)`` of each sample of the share.
    :param memory_bytes: that there is for what has been read and is still to be asked for; ``whole_bytes``: the same,
        if each chunk is read once with it.
    """
    uses = _Uses(samples, chunk_of, lengths)
    part = uses.parts(memory_bytes, max(memory_bytes, whole_bytes))
    key = part * max(1, len(lengths)) + samples
    named, order = np.unique(key, return_inverse=True)
    of_entries, part_of = named % max(1, len(lengths)), named // max(1, len(lengths))
    num_parts = int(part_of[-1]) + 1 if len(part_of) else 0
    starts = np.searchsorted(part_of, np.arange(num_parts + 1, dtype=np.int64))
    narrow = np.int32 if len(named) < 2**31 else np.int64
    part_of = part_of.astype(narrow)
    return PlacedOrder(order.reshape(-1), part_of, starts, lengths[of_entries], of_entries, positions)


class _Uses:
    """The uses of a list's samples, to be put together in parts."""

    def __init__(self, samples: Int64Array, chunk_of: IndexArray, lengths: Int64Array) -> None:
        self._num = len(samples)
        chunks = chunk_of[samples].astype(np.int64)
        self._in_chunks = np.argsort(chunks, kind="stable")
        """Places, those of a chunk beside each other, ascending."""
        self._keys = chunks[self._in_chunks] * (2 * self._num) + self._in_chunks
        of_chunk = np.flatnonzero(np.diff(chunks[self._in_chunks], prepend=-1))
        self._firsts, self._ends = of_chunk, np.append(of_chunk[1:], self._num)[: len(of_chunk)]
        self._turns = (numbers(key_of("turns"), len(of_chunk)) >> np.uint64(32)).astype(np.int64)
        """What part of a reach, in 2**-32, the first part of each chunk has."""
        self._lengths = lengths[samples]
        in_samples = np.argsort(samples, kind="stable")
        same = np.flatnonzero(np.diff(samples[in_samples]) == 0)
        self._again = in_samples[same], in_samples[same + 1]
        """Pairs of places where the same sample is asked for, the second one next after the first."""

    def parts(self, memory_bytes: int, whole_bytes: int) -> Int64Array:
        """``(n,)`` the part of each place: as few as memory allows."""
        whole, peak_bytes = self._reaching(self._num)
        if peak_bytes <= whole_bytes:
            return whole
        low, high = 1, _STEPS_OF_TWO * _MOST_HALVINGS
        while low < high:
            middle = (low + high) // 2
            if self._reaching(self._reach(middle))[1] <= memory_bytes:
                high = middle
            else:
                low = middle + 1
        return self._reaching(self._reach(low))[0]

    def _reach(self, step: int) -> int:
        return max(1, int(self._num / 2 ** (step / _STEPS_OF_TWO)))

    def _reaching(self, reach: int) -> tuple[Int64Array, int]:
        """The part of each place, if a part has the uses of a chunk within so many places; and the most bytes that are
        held at once, if each part is read when it is first used."""
        begins = np.zeros(self._num, dtype=bool)
        first, end = self._firsts, self._ends
        # Else all chunks would be read anew at about the same time, and memory be full, then empty.
        reaches = reach * self._turns >> 32 if reach < self._num else np.full(len(first), reach)
        while len(first):
            begins[first] = True
            first = np.searchsorted(self._keys, self._keys[first] + np.maximum(1, reaches))
            more = first < end
            first, end = first[more], end[more]
            reaches = np.full(len(first), reach)
        part = np.empty(self._num, dtype=np.int64)
        part[self._in_chunks] = np.cumsum(begins) - 1
        return part, self._peak_bytes(part, self._in_chunks[begins])

    def _peak_bytes(self, part: Int64Array, first_use: NDArray[np.intp]) -> int:
        """:param first_use: the place of each part's."""
        if not self._num:
            return 0
        is_first, is_last = np.ones(self._num, dtype=bool), np.ones(self._num, dtype=bool)
        one, next_one = self._again
        stays = part[one] == part[next_one]
        is_last[one[stays]] = is_first[next_one[stays]] = False
        comes = np.bincount(first_use[part[is_first]], self._lengths[is_first], self._num)
        goes = np.where(is_last, self._lengths, 0)
        return int((np.cumsum(comes) - np.cumsum(goes) + goes).max())


@dataclass(frozen=True, eq=False, slots=True)
class ChunkRead:
    """An order: read these samples of a chunk, of one that is large a part. The very same object comes back with what
    became of it."""

    epoch: int
    chunk: int
    samples: Int64Array
    """``(n,)`` ascending."""
    local: Int64Array
    """``(n,)`` which samples of the share they are, ascending: the span from the first to the last is read, and these
    are kept."""
    place: int
    """Where somebody asks for a sample of its chunk next, of the epoch's places."""
    due: int | None = None
    """The first place of the request that waits for it; None: nobody does."""


class OpenEpoch:
    """One epoch of the share, from a place on."""

    def __init__(self, number: int, placed: PlacedOrder, first_place: int, num_askers: int) -> None:
        num_samples = len(placed.lengths)
        self.number, self.placed, self.first_place, self.num_askers = number, placed, first_place, num_askers
        self.order = placed.order
        self.first_use, self.in_order = placed.first_use, placed.in_order
        self.to_come: NDArray[np.uint16] | Int64Array
        """How often each sample has yet to be asked for."""
        if placed.num_uses is None:
            self.to_come = np.full(num_samples, num_askers, dtype=np.uint16)
            self.to_come[self.order[:first_place]] = 0
        else:
            uses = placed.uses_from(np.arange(num_samples), first_place) if first_place else placed.num_uses
            self.to_come = uses * num_askers
        if first_place:
            self.first_use, self.in_order = placed.first_uses(first_place)
        self.num_to_come = int(np.count_nonzero(self.to_come))
        """Samples that somebody has yet to ask for."""
        self.here = np.zeros(num_samples, dtype=bool)
        """Of them, those in memory."""
        self.coming = np.zeros(num_samples, dtype=bool)
        """Samples on their way, asked for or not."""
        self.under_way: set[ChunkRead] = set()
        """What brings them."""
        self.next = 0
        """All chunks whose turn was before have been ordered."""
        self.again: list[tuple[int, int]] = []
        """``(place of the first sample that is to be read, chunk)``, a heap, of chunks that were read before, or a
        sample of them. It is out of date where that sample has been read."""
        self.gave_way: dict[int, None] = {}
        """Chunks with samples that gave way, which have yet to be put there."""
        self.here_below = 0
        """No sample at this place or behind it is in memory."""
        self.front = 0
        """Behind the last place that a request began with; 0: none came."""
        self.swept = 0
        """What lay before this place and was never asked for has been dropped."""
        self.first_asked = len(self.order)
        """The first place that anybody has asked for."""
        self.widest_gap_bytes = self._widest_gap_bytes(first_place)
        """A read goes over so many bytes that are not wanted, between two samples that are."""

    def _widest_gap_bytes(self, first_place: int) -> int | None:
        """An epoch that begins in its midst wants the rest of chunks that were in use there: some of their samples,
        which lie apart. What lies between them may take as much as ``_GAPS_PART`` of these; the narrowest gaps
        first. None, and of a list: all of it."""
        if not first_place or self.placed.num_uses is not None:
            return None
        parts, lengths = self.placed.part_of, self.placed.lengths
        wanted = np.flatnonzero(self.to_come)
        in_use = np.zeros(len(self.placed.starts) - 1, dtype=bool)
        in_use[parts[self.to_come == 0]] = True
        wanted = wanted[in_use[parts[wanted]]]
        ends = np.concatenate([[0], np.cumsum(lengths)])
        gaps = ends[wanted[1:]] - ends[wanted[:-1] + 1]
        gaps = np.sort(gaps[parts[wanted[1:]] == parts[wanted[:-1]]])
        num_read = int(np.searchsorted(np.cumsum(gaps), _GAPS_PART * int(lengths[wanted].sum()), side="right"))
        return None if num_read == len(gaps) else int(gaps[num_read]) - 1

    def is_of(self, number: int, placed: PlacedOrder, first_place: int, num_askers: int) -> bool:
        """Whether it was made of these."""
        return (self.number, self.first_place, self.num_askers) == (number, first_place, num_askers) and (
            self.placed is placed
        )

    @property
    def is_ordered(self) -> bool:
        """Whether all of it has been read, or is on its way."""
        return self.next == len(self.in_order) and not self.again and not self.gave_way

    def next_places(self, samples: Int64Array) -> IndexArray:
        """``(n,)`` where each of these is asked for next, which are to come."""
        return self.placed.next_places(samples, -(-self.to_come[samples].astype(np.int64) // self.num_askers))

    def are_here(self, samples: Int64Array) -> None:
        """Fact: these are in memory, and to come."""
        self.here[samples] = True
        if len(samples):
            self.here_below = max(self.here_below, int(self.next_places(samples).max()) + 1)

    def are_long(self, samples: Int64Array, lengths: Int64Array) -> int:
        """Fact: samples, which are different, have these lengths. Returns how much more those take that are to come."""
        is_to_come = self.to_come[samples] > 0
        more = (lengths - self.placed.lengths[samples])[is_to_come]
        self.placed.lengths[samples] = lengths
        return int(more.sum())

    def asked(self, samples: Int64Array) -> tuple[Int64Array, NDArray[np.bool_]]:
        """Fact: somebody asks for these, as often as they are there. Returns those that were to come, each once, and
        which of them nobody will ask for any more."""
        new = samples[self.to_come[samples] > 0]
        count: Int64Array | int = 1
        if self.placed.num_uses is not None:
            new, count = np.unique(new, return_counts=True)
            count = np.minimum(count, self.to_come[new])
        last = self.to_come[new] == count
        self.to_come[new] -= count
        self.num_to_come -= int(np.count_nonzero(last))
        return new, last

    def is_over_before(self, place: int, behind: Int64Array) -> Int64Array:
        """Fact: nobody will ask for any of ``(n,)`` samples before this place. Returns those that are asked for nowhere
        any more, and were to come."""
        left = behind[self.to_come[behind] > 0]
        if self.placed.num_uses is None:
            gone = left
        else:
            left = np.unique(left)
            uses = self.placed.uses_from(left, place) * self.num_askers
            self.to_come[left] = np.minimum(self.to_come[left], uses)
            gone = left[uses == 0]
        self.to_come[gone] = 0
        self.num_to_come -= len(gone)
        return gone
