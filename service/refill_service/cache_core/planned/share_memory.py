"""What of a share is in memory, what is read next, and what gives way? An order that is known ahead is carried out.

Samples are asked for by their place in the share's order of an epoch. What is read together (``placed_order.py``: a
chunk, or a part of one) is read in the order of first uses, as far ahead as memory goes, over the end of an epoch, too;
each sample stays until it is asked for. So each chunk is read once where memory holds what the order was planned for.

Below, a *sample* is an entry of the order, and a *chunk* one of its parts: of a planned order they are just that. What
ranks have posted as a list may become known late, or grow: then the share begins anew where it is asked for.

Nothing here has to be remembered for an answer to be right: which sample is at a place is a function. A pod that
begins in the midst of an epoch takes what lies well before the first place that it is asked for as gone; who asks for
it all the same, or asks again, has that sample read alone. Should more and more do so, a run has gone back: then the
share begins anew there.

Where memory is smaller than planned, or ranks are further apart, a sample is asked for whose chunk has no room yet.
Then what will be asked for last gives way, and is read again when its turn comes anew: what gave way last would give
way again if it were read as soon as there is room. What a loop has left of an epoch, and broken off, gives way first.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple

import numpy as np
import numpy.ma  # np.unique does, when it is first called, and that takes a while
from numpy.typing import NDArray

from refill_service.cache_core.planned.placed_order import ChunkRead, IndexArray, OpenEpoch, PlacedOrder, placed_list
from refill_service.cache_core.sample_mapping import Int64Array

_BLOCK = 1 << 12
"""Places that are looked at together for samples that give way, or that nobody has asked for."""
_SWEPT_AT_ONCE = 1 << 16
"""Places that are looked at together for what nobody will ask for any more."""
_BACK_PART = 8
"""A share begins this part of its memory before the first place that it is asked for: loader workers are not in
order."""
KEPT_ORDERS = 3
AT_ONCE, _SAMPLES_AT_ONCE = 64, 2048
"""Chunks and samples that are ordered ahead in one go, and most samples of one read: nothing takes a pod long."""
MOST_STRAY = 512
"""Samples that are asked for again before a share begins anew where they are asked for; of a small share, 1/8. One
request alone counts for half of them at most: it may be curious, or asked again since its answer was lost."""

_PART_FOR_LISTS = 0.8
"""Of memory: loader workers ask out of order, ranks are not in step, and chunks are read a little ahead."""
_PART_FOR_WHOLE_CHUNKS = 0.9
"""The same, where each chunk is then read once: a list that was planned within classes may need a little more than it
was planned for."""

_PORTION_CHUNKS, _PORTION_PART = 16, 16
"""Full memory is read into again when so many chunks find room, or one, and this part of it: each read for itself would
wake the store's threads and the loop once more, at any request."""

NO_SAMPLES: Int64Array = np.empty(0, dtype=np.int64)


class Asked(NamedTuple):
    """What requests for places come to. ``dropped`` first: it makes room for ``reads``."""

    samples: Int64Array
    """``(n,)`` in the order of the places."""
    local: Int64Array
    """``(n,)`` which samples of the share they are."""
    stay: NDArray[np.bool_]
    """``(n,)`` which of them stay in memory when their bytes leave: others will ask for them, too."""
    reads: list[ChunkRead]
    dropped: list[tuple[int, Int64Array]]
    """``(epoch, samples)`` whose bytes are to be forgotten."""
    place: int
    """The first of the places."""


class ShareMemory:
    """Decides for one share of a planned job what is read, what leaves memory, and what is answered. It does no I/O.

    :param starts: ``(chunks + 1,)`` first local sample of each chunk, then their number.
    :param lengths: ``(n,)`` bytes of each sample.
    :param planned_bytes: memory that the share's order is planned for.
    :param num_askers: how many ask for each sample: ranks that share their batches. It may change between epochs.
    :param are_means: whether these lengths are no more than expected, and the right ones come with the samples.
    """

    def __init__(
        self,
        starts: Int64Array,
        lengths: Int64Array,
        planned_bytes: int,
        num_askers: int = 1,
        *,
        are_means: bool = False,
    ) -> None:
        self.num_askers, self.are_means = num_askers, are_means
        self.given_up_bytes = 0
        """Of samples that gave way, in all epochs: they are read again when somebody asks for them."""
        self._starts = starts
        self._lengths = lengths
        self.capacity_bytes = 0
        self.held_bytes = 0
        """Of samples that are in memory or on their way, and that somebody has yet to ask for."""
        num_samples, num_chunks = len(lengths), len(starts) - 1
        narrow = np.int32 if num_samples < 2**31 else np.int64
        self._chunk_of: IndexArray = np.repeat(np.arange(num_chunks, dtype=narrow), np.diff(starts))
        """Of each sample of the share."""
        self._mean_bytes = max(1, int(lengths.sum()) // max(1, num_samples))
        self.planned_places = max(1, min(num_samples, planned_bytes // self._mean_bytes))
        self.most_stray = max(1, min(MOST_STRAY, num_samples // 8))
        self._sweep_places = max(1, min(_BLOCK, self.planned_places // _BACK_PART))
        """Places that are given up together, of a small share."""
        self._stray = 0
        """Samples asked for again, less those asked for the first time since."""
        self.orders: dict[int, PlacedOrder] = {}
        self.epochs: list[OpenEpoch] = []
        """Those under way, ascending."""
        self.most_at_first_bytes: int | None = None
        """When nothing is in memory, requests of the first batches of ranks have whole chunks read up to so many bytes;
        beyond that, their samples alone. None: any number."""
        self.num_ranks = 1
        self.is_cold = True
        """Nothing has arrived since it began."""
        self._no_room_for = 0
        """Bytes that must find room before more is read ahead, when what is next found none; 0: that is not known."""
        self._prepared: OpenEpoch | None = None
        """What :meth:`prepared` was told of, until an epoch begins."""
        self._asked_last = 0
        """The epoch of which somebody has asked for anything last: what a loop has left of an earlier one is not read
        ahead."""

    # The orders of epochs. Planning takes a while, so it is done elsewhere.

    def knows(self, epoch: int) -> bool:
        return epoch in self.orders or self._open_epoch(epoch) is not None

    def placed(self, order: Int64Array) -> PlacedOrder:
        """The order of an epoch, ``(n,)`` local samples, for :meth:`planned`. Any thread may call it, and the next."""
        lengths = self._lengths.copy() if self.are_means else self._lengths  # it learns what they are
        return PlacedOrder(order, self._chunk_of, self._starts, lengths)

    def placed_list(self, local: Int64Array, positions: Int64Array) -> PlacedOrder:
        """What is known of the order of an epoch: ``(n,)`` the local samples at positions that ascend."""
        memory_bytes = int(_PART_FOR_LISTS * self.capacity_bytes)
        whole_bytes = int(_PART_FOR_WHOLE_CHUNKS * self.capacity_bytes)
        return placed_list(local, positions, self._chunk_of, self._lengths, memory_bytes, whole_bytes)

    def planned(self, epoch: int, placed: PlacedOrder) -> None:
        """Fact: this is the order of an epoch."""
        self._keep_order(epoch, placed)

    def grown(self, epoch: int, placed: PlacedOrder, *, from_start: bool = False) -> list[tuple[int, Int64Array]]:
        """Fact: this is a list's order now, which was known in part. Returns what is to be forgotten before more is
        read: an epoch that is under way begins anew.

        :param from_start: where the list does; else where it is asked for.
        """
        at = self._open_epoch(epoch)
        dropped: list[tuple[int, Int64Array]] = []
        if at is None:
            self._keep_order(epoch, placed)
        elif not at.front:
            later = [each for each in self.epochs if each.number >= epoch]
            for each in later:
                dropped.append((each.number, self._forgotten(each)))
            self.epochs = self.epochs[: -len(later)]
            self._keep_order(epoch, placed)
            if not self.epochs:
                self._begin_at(epoch, 0)
        else:
            place = 0 if from_start else placed.place_from(at.placed.position_at(at.front - 1))
            self._keep_order(epoch, placed)
            dropped = self.forget()
            self._begin(epoch, place)
            self.epochs[0].front = 0 if from_start else place + 1
        return dropped

    def order_of(self, epoch: int) -> IndexArray | None:
        """The sample at each place of an epoch; None: it is not known."""
        at = self._open_epoch(epoch)
        if at is not None:
            return at.order
        return self.orders[epoch].order if epoch in self.orders else None

    def places_of(self, epoch: int, positions: Int64Array, local: Int64Array) -> Int64Array:
        """``(n,)`` the places of positions of an epoch whose order is a list that is known; -1: it is not known that
        these samples are asked for there."""
        return self._placed(epoch).places_of(positions, local)

    @property
    def place(self) -> int | None:
        """Behind the last place that a request began with, counted over all epochs; None: there was none."""
        newest = next((each for each in reversed(self.epochs) if each.front), None)
        return None if newest is None else newest.number * len(newest.order) + newest.front

    def lacks(self, epoch: int, chunk: int) -> bool:
        """Whether samples of a chunk will be asked for in an epoch that are not in memory."""
        at = self._open_epoch(epoch)
        if at is None:
            return bool(self.epochs) and epoch > self.epochs[-1].number
        span = slice(int(at.placed.starts[chunk]), int(at.placed.starts[chunk + 1]))
        return bool(((at.to_come[span] > 0) > at.here[span]).any())

    def size_of(self, chunk: int) -> int:
        """Samples of a chunk."""
        return int(self._starts[chunk + 1] - self._starts[chunk])

    def places_in(self, chunk: int, samples: Int64Array) -> list[int]:
        """Of these samples of a chunk."""
        places: list[int] = (samples - self._starts[chunk]).tolist()
        return places

    def chunks_of(self, samples: Int64Array) -> IndexArray:
        """``(n,)`` the chunk of each of these samples of the share."""
        return self._chunk_of[samples]

    def next_wanted(self) -> int | None:
        """The epoch whose order reading ahead will need next; None: it has all that it needs for now."""
        if not self.epochs or not self.epochs[-1].front:
            return None
        last = self.epochs[-1]
        half_read = 2 * last.next >= len(last.in_order)
        return last.number + 1 if half_read and last.number + 1 not in self.orders else None

    # Facts, and what is to be done then.

    @property
    def is_full(self) -> bool:
        """Whether what is to be read ahead next is known to find no room, or too little to begin again."""
        return self._no_room_for > 0 and self.held_bytes + self._no_room_for > self.capacity_bytes

    @property
    def is_all_ordered(self) -> bool:
        """Whether all is on its way, or was, that is to be read ahead by the orders that are known."""
        if not self.epochs or self._follower() is not None:
            return False
        return all(at.is_ordered for at in self.epochs if at.number >= self._asked_last)

    def memory_is(self, capacity_bytes: int) -> None:
        """Fact: samples may take so much memory. What is in memory stays, should it be less."""
        self.capacity_bytes = capacity_bytes

    def gives_back(self) -> list[tuple[int, Int64Array]]:
        """Fact: others wait for what samples take beyond the capacity. Returns what is forgotten, as ``Asked.dropped``:
        what will be asked for last, which is read again then."""
        if not self.epochs or self.held_bytes <= self.capacity_bytes:
            return []
        return self._give_up(self.epochs[0], 0, -1, at_most=True)

    def warmed(self, epoch: int, place: int) -> None:
        """Fact: somebody will ask for what comes from this place of an epoch on, whose order is known. Nothing comes of
        it where others ask already."""
        if not self.epochs:
            self._begin_at(epoch, place)

    def warmed_anew(self, epoch: int, place: int) -> list[tuple[int, Int64Array]]:
        """The same fact, in place of what was said before. Returns what is to be forgotten, as ``Asked.dropped``."""
        is_asked = any(each.front for each in self.epochs)
        if is_asked or [(each.number, each.first_place) for each in self.epochs[:1]] == [(epoch, place)]:
            return []
        placed = self._placed(epoch)
        dropped = self.forget()
        self._keep_order(epoch, placed)
        self._begin_at(epoch, place)
        return dropped

    def to_prepare(self, epoch: int, places: Int64Array) -> Callable[[], OpenEpoch] | None:
        """What a thread can do for a request for these places, as of :meth:`asked`, which would have the epoch begin in
        its midst: that looks at each sample of the share. For :meth:`prepared`. None: nothing of that kind."""
        first_place = self._first_place(int(places.min()))
        if not first_place or any(each.front for each in self.epochs) or self._was_warmed_for(epoch, places):
            return None
        placed, num_askers = self._placed(epoch), self.num_askers
        return lambda: OpenEpoch(epoch, placed, first_place, num_askers)

    def prepared(self, epoch: OpenEpoch) -> None:
        """Fact: this was done. It is used if it is that epoch, from there on, which begins next."""
        self._prepared = epoch

    def asked(self, epoch: int, places: Int64Array, *, is_rest: bool = False) -> Asked:
        """Fact: somebody asks for ``(n,)`` places of an epoch whose order is known, all different, at least one.

        :param is_rest: of a request that was told of in part, and has counted for as many as one may.
        """
        dropped: list[tuple[int, Int64Array]] = []
        first = int(places.min())
        at = self._open_epoch(epoch)
        if at is None or not at.front:  # the first request for it
            if not self.epochs:
                self._begin(epoch, first)
            elif not any(each.front for each in self.epochs) and not self._was_warmed_for(epoch, places):
                dropped += self._begin_anew(epoch, first)
            elif epoch == self._follower():
                self._open(epoch)
            at = self._open_epoch(epoch)
        placed = self.orders[epoch] if at is None else at.placed
        samples = placed.order[places].astype(np.int64)
        local = placed.local(samples)
        num_new = 0 if at is None else int(np.count_nonzero(at.to_come[samples]))
        if num_new:
            self._asked_last = epoch
        num_again = min(len(samples) - num_new, self.most_stray // 2 + 1)
        self._stray = max(0, self._stray + (0 if is_rest else num_again) - num_new)
        if self._stray > self.most_stray:
            dropped += self._begin_anew(epoch, first)
            at = self.epochs[0]
        if at is None:
            return Asked(samples, local, np.zeros(len(samples), dtype=bool), [], [], first)
        reads = self._ask(at, samples, first, dropped)
        at.front = max(at.front, first + 1)
        dropped += self._drop_stale()
        return Asked(samples, local, at.to_come[samples] > 0, reads, dropped, first)

    def _ask(
        self, at: OpenEpoch, samples: Int64Array, place: int, dropped: list[tuple[int, Int64Array]]
    ) -> list[ChunkRead]:
        """What is asked for, and neither in memory nor on its way, is read now.

        :param place: the first of these.
        """
        new, last = at.asked(samples)
        here = at.here[new]
        held = here | at.coming[new]
        self.held_bytes -= int(at.placed.lengths[new[held & last]].sum())
        at.here[new[last]] = False
        if at.placed.num_uses is not None:
            at.are_here(new[here & ~last])  # where they are asked for next
        reads: list[ChunkRead] = []
        at.first_asked = min(at.first_asked, place)
        if at.placed.num_uses is None and np.count_nonzero(held) == len(held):
            return []
        self._no_room_for = 0
        missing = new[~held]
        chunks = at.placed.part_of[missing]
        alone = self.is_cold and self._is_much_for_first(at, np.unique(chunks), place, len(samples))
        for chunk in dict.fromkeys(chunks.tolist()):
            self._read_now(at, chunk, np.sort(missing[chunks == chunk]), place, reads, dropped, alone=alone)
        if at.placed.num_uses is not None and self.held_bytes > self.capacity_bytes:
            dropped += self._give_up(at, 0, -1)  # in place of what stays to be asked for again
        return reads

    def _is_much_for_first(self, at: OpenEpoch, chunks: IndexArray, place: int, num_asked: int) -> bool:
        """Whether these chunks would take long to come, for who waits for the first batch of a rank."""
        if self.most_at_first_bytes is None or place >= at.first_asked + self.num_ranks * num_asked:
            return False
        lengths = at.placed.lengths
        wanted = (int(lengths[at.placed.starts[each] : at.placed.starts[each + 1]].sum()) for each in chunks.tolist())
        return sum(wanted) > self.most_at_first_bytes

    def read_ahead(self) -> list[ChunkRead] | None:
        """What else it is time to read, some of it. None: nothing."""
        if self.is_full:
            return None
        self._no_room_for = 0
        reads: list[ChunkRead] = []
        for at in self.epochs:
            if at.number >= self._asked_last and not at.is_ordered:
                is_cut = self._read_ahead_in(at, reads)
                if is_cut or not at.is_ordered:
                    return reads if reads or is_cut else None
        # The first chunks of the next epoch take the place of the last ones of this.
        if self.epochs and (follower := self._follower()) is not None:
            self._open(follower)
            return reads
        return reads or None

    def arrived(
        self, read: ChunkRead, damaged: Int64Array = NO_SAMPLES, lengths: Int64Array | None = None
    ) -> NDArray[np.bool_]:
        """Fact: the bytes of a read are here. Returns which of its samples stay in memory, ``(n,)``.

        :param damaged: of its samples those whose bytes are not right: who asks for one has it read alone.
        :param lengths: ``(n,)`` of its samples, where others were only expected. Should they take more than there is
            memory for, :meth:`gives_back` says what gives way.
        """
        stay = np.zeros(len(read.samples), dtype=bool)
        at = self._no_longer_under_way(read)
        if at is None:
            return stay
        self.is_cold = False
        if lengths is not None:
            self.held_bytes += at.are_long(read.samples, lengths)
        if not len(damaged):  # as ever
            stay = at.to_come[read.samples] > 0
            at.are_here(read.samples[stay])
            return stay
        intact = np.ones(len(read.samples), dtype=bool)
        intact[np.searchsorted(read.samples, damaged)] = False
        stay = (at.to_come[read.samples] > 0) & intact
        at.are_here(read.samples[stay])
        self._lost(at, read.samples[~intact])
        return stay

    def are_here(self, epoch: int, samples: Int64Array) -> NDArray[np.bool_]:
        """Which of these samples are in memory for an epoch, ``(n,)``."""
        at = self._open_epoch(epoch)
        return np.zeros(len(samples), dtype=bool) if at is None else at.here[samples]

    def failed(self, read: ChunkRead) -> None:
        """Fact: the bytes of a read will not come. What nobody has asked for yet is read when it is."""
        at = self._no_longer_under_way(read)
        self._no_room_for = 0
        if at is not None:
            self._lost(at, read.samples)
            self._to_be_read(at, read.chunk)

    def forget(self) -> list[tuple[int, Int64Array]]:
        """Fact: nobody asks here any more, or not for what follows. Returns what is in memory."""
        dropped = [(each.number, self._forgotten(each)) for each in self.epochs]
        self.epochs = []
        self.held_bytes = self._stray = self._no_room_for = 0
        return dropped

    def _forgotten(self, at: OpenEpoch) -> Int64Array:
        """Fact: nobody asks for the rest of an epoch. Returns what is in memory."""
        held = (at.here | at.coming) & (at.to_come > 0)
        self.held_bytes -= int(at.placed.lengths[held].sum())
        return np.flatnonzero(at.here)

    # How it comes to that.

    @property
    def _portion_bytes(self) -> int:
        chunk_bytes = self._mean_bytes * len(self._lengths) // max(1, len(self._starts) - 1)
        return min(_PORTION_CHUNKS * chunk_bytes, self.capacity_bytes // _PORTION_PART)

    def _keep_order(self, epoch: int, placed: PlacedOrder) -> None:
        self.orders.pop(epoch, None)
        self.orders[epoch] = placed
        for old in list(self.orders)[:-KEPT_ORDERS]:
            del self.orders[old]

    def _was_warmed_for(self, epoch: int, places: Int64Array) -> bool:
        at = self._open_epoch(epoch)
        return at is not None and bool(at.to_come[at.order[places]].all())

    def _begin_anew(self, epoch: int, place: int) -> list[tuple[int, Int64Array]]:
        """Returns what was in memory."""
        placed = self._placed(epoch)
        dropped = self.forget()
        self._keep_order(epoch, placed)
        self._begin(epoch, place)
        return dropped

    def _begin(self, epoch: int, place: int) -> None:
        """Somebody asks for this place, and others may ask for some before it."""
        self._begin_at(epoch, self._first_place(place))

    def _first_place(self, place: int) -> int:
        back = place if place < self.planned_places // 2 else self.planned_places // _BACK_PART
        return max(0, place - back)

    def _begin_at(self, epoch: int, first_place: int) -> None:
        self._stray, self._asked_last, self.is_cold, self._no_room_for = 0, epoch, True, 0
        placed, (prepared, self._prepared) = self.orders[epoch], (self._prepared, None)
        if prepared is None or not prepared.is_of(epoch, placed, first_place, self.num_askers):
            prepared = OpenEpoch(epoch, placed, first_place, self.num_askers)
        self.epochs = [prepared]

    def _open(self, epoch: int) -> None:
        self._no_room_for = 0
        self.epochs.append(OpenEpoch(epoch, self.orders[epoch], 0, self.num_askers))

    def _follower(self) -> int | None:
        """The epoch that comes after those under way, if its order is known: the next one, or another one that a list
        was posted for."""
        last = self.epochs[-1]
        if not last.front and last.num_to_come:
            return None
        known = (each for each, placed in self.orders.items() if each == last.number + 1 or placed.num_uses is not None)
        return min((each for each in known if each > last.number), default=None)

    def _placed(self, epoch: int) -> PlacedOrder:
        at = self._open_epoch(epoch)
        return self.orders[epoch] if at is None else at.placed

    def _open_epoch(self, number: int) -> OpenEpoch | None:
        for each in self.epochs:  # a few
            if each.number == number:
                return each
        return None

    def _no_longer_under_way(self, read: ChunkRead) -> OpenEpoch | None:
        """Take a read off its epoch. None: that was forgotten, and perhaps begun anew since."""
        at = self._open_epoch(read.epoch)
        if at is None or read not in at.under_way:
            return None
        at.under_way.remove(read)
        at.coming[read.samples] = False
        return at

    def _lost(self, at: OpenEpoch, samples: Int64Array) -> None:
        self.held_bytes -= int(at.placed.lengths[samples[at.to_come[samples] > 0]].sum())

    def _read_now(
        self,
        at: OpenEpoch,
        chunk: int,
        asked: Int64Array,
        place: int,
        reads: list[ChunkRead],
        dropped: list[tuple[int, Int64Array]],
        *,
        alone: bool,
    ) -> None:
        """Read what is asked for of a chunk that has not been read, or was given up: with all that is left of it if
        that finds room, or what is asked for later makes some.

        :param alone: without that, in any case.
        """
        rest = self._unread(at, chunk)[: 0 if alone else None]
        wanted_bytes = int(at.placed.lengths[rest].sum())
        if len(rest) and self.held_bytes and self.held_bytes + wanted_bytes > self.capacity_bytes:
            dropped += self._give_up(at, wanted_bytes, int(at.next_places(rest).max()))
        if not len(rest) or (self.held_bytes and self.held_bytes + wanted_bytes > self.capacity_bytes):
            reads += self._order(at, chunk, np.split(asked, np.flatnonzero(np.diff(asked) > 1) + 1), place, due=True)
            # What others will ask for in a moment stays for them, though memory be full.
            rest = asked[at.to_come[asked] > 0]
        else:
            spans = self._spans(at, np.union1d(asked, rest))
            for span in spans:
                is_asked = len(spans) == 1 or bool(np.isin(asked, span).any())
                reads += self._order(at, chunk, [span], place, due=is_asked)
        self.held_bytes += int(at.placed.lengths[rest].sum())

    def _give_up(
        self, at: OpenEpoch, wanted_bytes: int, place: int, *, at_most: bool = False
    ) -> list[tuple[int, Int64Array]]:
        """Samples in memory that are left of an earlier epoch, or asked for after a place of this one, those last asked
        for first, as many as make room for so much; they are read again. None if they do not, unless ``at_most`` as
        many are to be given up as there are."""
        self._no_room_for = 0
        to_free = self.held_bytes + wanted_bytes - self.capacity_bytes
        found: list[tuple[OpenEpoch, Int64Array]] = []
        earlier = [epoch for epoch in self.epochs if epoch.number < at.number]
        for epoch in [*earlier, *reversed(self.epochs[len(earlier) :])]:
            last, end = place + 1 if epoch is at else 0, epoch.here_below
            while to_free > 0 and end > last:
                start = max(last, end - _BLOCK)
                last_first = epoch.order[start:end][::-1].astype(np.int64)
                is_next = epoch.here[last_first]
                if epoch.placed.num_uses is not None:  # only where it is asked for next
                    is_next[is_next] = epoch.next_places(last_first[is_next]) == np.arange(start, end)[::-1][is_next]
                here = last_first[is_next]
                if not len(here) and end == epoch.here_below:
                    epoch.here_below = start
                freed = np.cumsum(epoch.placed.lengths[here])
                count = min(len(here), int(np.searchsorted(freed, to_free)) + 1)
                if count:
                    found.append((epoch, here[:count]))
                    to_free -= int(freed[count - 1])
                end = start
        if to_free > 0 and not at_most:
            return []
        for epoch, samples in found:
            self._drop(epoch, samples)
            self.given_up_bytes += int(epoch.placed.lengths[samples].sum())
            epoch.here_below = int(epoch.next_places(samples[-1:])[0])
            epoch.gave_way.update(dict.fromkeys(np.unique(epoch.placed.part_of[samples]).tolist()))
        return [(epoch.number, samples) for epoch, samples in found]

    def _drop_stale(self) -> list[tuple[int, Int64Array]]:
        """What lies so far behind that nobody is likely to ask for it any more: positions that a loop leaves out, and
        the last of an epoch that ranks do not divide. A rank may be behind others by the memory that is planned for,
        and no more than an epoch."""
        dropped: list[tuple[int, Int64Array]] = []
        newest = next(each for each in reversed(self.epochs) if each.front)
        past = newest.front - max(self.planned_places, self.capacity_bytes // self._mean_bytes)
        while (first := self.epochs[0]) is not newest and (
            past > 0 or not first.num_to_come or first.number < newest.number - 1
        ):
            self._sweep(first, min(len(first.order), first.swept + _SWEPT_AT_ONCE), dropped)
            if first.swept < len(first.order):
                return dropped  # the rest with the next request
            self.epochs.pop(0)
        if past >= newest.swept + self._sweep_places:
            self._sweep(newest, min(past, newest.swept + _SWEPT_AT_ONCE), dropped)
        return dropped

    def _sweep(self, at: OpenEpoch, end: int, dropped: list[tuple[int, Int64Array]]) -> None:
        """Nobody will ask for what lies before this place."""
        behind = at.order[at.swept : end].astype(np.int64)
        at.swept = end
        gone = at.is_over_before(end, behind)
        here = gone[at.here[gone]]
        self._drop(at, here)
        self.held_bytes -= int(at.placed.lengths[gone[at.coming[gone]]].sum())
        if len(here):
            dropped.append((at.number, here))

    def _drop(self, at: OpenEpoch, samples: Int64Array) -> None:
        self.held_bytes -= int(at.placed.lengths[samples].sum())
        at.here[samples] = False

    def _to_be_read(self, at: OpenEpoch, chunk: int) -> None:
        """What is left of a chunk is to be read when it is next used."""
        rest = self._unread(at, chunk)
        if len(rest):
            heappush(at.again, (int(at.next_places(rest).min()), chunk))

    def _read_ahead_in(self, at: OpenEpoch, reads: list[ChunkRead]) -> bool:
        """Order what there is room for. Returns whether that was cut short, as it is enough for once."""
        num_chunks = num_samples = 0
        while not at.is_ordered:
            if num_chunks >= AT_ONCE or num_samples >= _SAMPLES_AT_ONCE:
                return True
            num_chunks += 1
            if at.gave_way:
                self._to_be_read(at, at.gave_way.popitem()[0])
                continue
            chunk = int(at.in_order[at.next]) if at.next < len(at.in_order) else -1
            again = bool(at.again) and (chunk < 0 or at.again[0][0] < at.first_use[chunk])
            if again:
                chunk = at.again[0][1]
            rest = self._unread(at, chunk)
            if again and len(rest) and (place := int(at.next_places(rest).min())) != at.again[0][0]:
                heapreplace(at.again, (place, chunk))  # since then a sample was read alone, or is no longer to come
                continue
            if len(rest):
                wanted_bytes = int(at.placed.lengths[rest].sum())
                if self.held_bytes + wanted_bytes > self.capacity_bytes:
                    self._no_room_for = max(wanted_bytes, self._portion_bytes)
                    return False
                num_samples += len(rest)
                place = at.again[0][0] if again else int(at.first_use[chunk])
                reads += self._order(at, chunk, self._spans(at, rest), place, due=False)
                self.held_bytes += wanted_bytes
            if again:
                heappop(at.again)
            else:
                at.next += 1
        return False

    def _unread(self, at: OpenEpoch, chunk: int) -> Int64Array:
        """Samples of a chunk that somebody has yet to ask for, and that are neither in memory nor on their way."""
        span = slice(int(at.placed.starts[chunk]), int(at.placed.starts[chunk + 1]))
        is_wanted, is_there = at.to_come[span] > 0, at.here[span] | at.coming[span]
        found: Int64Array = (is_wanted > is_there).nonzero()[0]
        return found + span.start

    def _spans(self, at: OpenEpoch, samples: Int64Array) -> list[Int64Array]:
        """Samples of a chunk, as they are to be read together."""
        if at.widest_gap_bytes is None:
            return [samples]
        lengths, at_places = self._lengths[samples[0] : samples[-1] + 1], samples - samples[0]
        ends = np.cumsum(lengths)[at_places]
        gaps = ends[1:] - lengths[at_places[1:]] - ends[:-1]
        return np.split(samples, np.flatnonzero(gaps > at.widest_gap_bytes) + 1)

    def _order(self, at: OpenEpoch, chunk: int, spans: list[Int64Array], place: int, *, due: bool) -> list[ChunkRead]:
        """Read spans of a chunk, of which somebody asks for a sample at this place: does so now, where it is due."""
        reads: list[ChunkRead] = []
        for span in spans:
            at.coming[span] = True
            parts = (span[first : first + _SAMPLES_AT_ONCE] for first in range(0, len(span), _SAMPLES_AT_ONCE))
            due_at = place if due else None
            reads += [ChunkRead(at.number, chunk, part, at.placed.local(part), place, due_at) for part in parts]
        at.under_way.update(reads)
        return reads
