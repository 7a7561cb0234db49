"""Policy ``drain`` within classes: answer from any sample of the class that a position asks for, and read bytes once.

A request names a sample of its class, so an owner is asked for as many of each class as it has. What is needed when is
known from the traces (:mod:`refill_service.cache_core.class_demand`). So the chunk that is read next is one with a
sample of the class that memory runs out of first; the rest of the chunk is there for later requests. Where the trace
asks for classes about as often as the store has them, this reads each chunk whole, once.

Where it does not (all of one class, then all of the next), memory fills with what is needed late. A part of it is kept
for that: what is needed soon, and does not come with a whole chunk, is read out of its chunk alone. Nothing that was
read is dropped, or read again, so bytes are read once with any memory; it costs more and smaller GETs. And who asks for
a class of which nothing is in memory or on its way has a sample of it read, however full memory is: what is promised
takes no place. So no request waits for another one.
"""

from __future__ import annotations

import hashlib
import random
from bisect import bisect_right
from collections import Counter
from itertools import accumulate, islice, pairwise

import numpy as np
from numpy.typing import NDArray

from refill_service.cache_core.class_demand import ClassDemand
from refill_service.cache_core.policies.interface import (
    NO_ORDERS,
    NONE_AHEAD,
    Ahead,
    EpochBegan,
    Orders,
    Policy,
    Read,
    pieces,
)
from refill_service.cache_core.prefetch_check import UpcomingRequests
from refill_service.cache_core.sample_mapping import Int64Array

__all__ = ["DrainWithinClasses"]

_SPREAD_SAMPLES = 64
"""With nothing of a class in memory, one of so many that come next is promised."""
_KEPT_FOR_SOON = 8
"""One part of memory of so many is for what is needed soon and has to be read alone."""


class DrainWithinClasses(Policy):
    """One owner's share of one epoch whose positions name classes.

    Samples that no request was promised stay within the memory that there is. Only when there are none at all is a
    chunk read that does not fit.

    :param classes: ``(samples of the share,)`` the class of each.

    Raises ValueError when requests were answered by samples of other classes, too.
    """

    def __init__(self, began: EpochBegan, classes: Int64Array) -> None:
        super().__init__(began)
        share = self.mapping.share
        everything = np.ones(share.num_samples, dtype=bool)
        members = began.traces.members(share.first_sample, share.end_sample)
        self._is_asked = everything if members is None else members
        """Samples that the epoch asks for; others are read through where they lie in a chunk."""
        unread = (self._is_asked if self._left is None else self._left).astype(np.uint8)
        self._unread = unread.data
        """Of a memoryview, since numpy is slow with a few values; so are those below."""
        self._num_unread = int(np.count_nonzero(unread))
        upto, bytes_upto = (np.concatenate([[0], np.cumsum(each)]) for each in (unread, unread * began.lengths))
        self._num_left = np.diff(upto[self._starts]).data
        """Of each chunk, samples that were not read; and their bytes."""
        self._bytes_left = np.diff(bytes_upto[self._starts]).astype(np.int64).data
        self._read_in_part: set[int] = set()
        """Chunks of which some classes were read alone."""
        names, class_of = np.unique(classes, return_inverse=True)
        self._class_of = class_of.astype(np.int32)
        self._class_view = self._class_of.data
        asked = np.flatnonzero(self._is_asked & (self._assigned < 0))
        at = began.traces.position_of(asked + share.first_sample)
        self._demand = ClassDemand(class_of[asked], len(names), *at, began.traces.num_ranks)
        if (self._demand.counts != np.bincount(self._class_of[unread > 0], minlength=len(names))).any():
            raise ValueError("requests were answered by samples of other classes")
        self._random = random.Random(began.key)
        self._chunks, self._chunks_end = self._chunks_by_class(np.flatnonzero(unread), len(names), began.key)
        self._ready: list[list[int]] = [[] for _ in names]
        """Samples in memory, by class."""
        self._num_ready = np.zeros(len(names), dtype=np.int64)
        self._coming: list[dict[int, Read]] = [{} for _ in names]
        """By class, samples on their way that no request was promised, those ordered first first."""
        self._num_coming = 0
        self._damaged: list[list[int]] = [[] for _ in names]
        """Samples whose bytes are not right: the shell says why to the next who asks for the class."""
        self._failed: list[Read] = []
        """Of samples that no request was promised: ordered again with the next request. They keep their place in
        memory: another epoch may have been given all that is free."""
        self._lengths_view = np.ascontiguousarray(began.lengths, dtype=np.int64).data
        self._mean_bytes = max(1.0, float(began.lengths.mean())) if len(began.lengths) else 1.0
        self._capacity_bytes = 0
        self._ready_bytes = 0
        self._given_bytes = 0
        self._num_given = 0
        self._num_promised = 0
        """Samples given before they were here."""

    def _chunks_by_class(self, samples: Int64Array, num_classes: int, key: str) -> tuple[NDArray[np.int32], list[int]]:
        """``(chunks, ends)``: for each class the chunks that hold unread samples of it, in random order, one class
        after the other; the next one is the last. A chunk stays in there for some classes when it has been read."""
        num_chunks = max(1, self.mapping.share.num_chunks)
        chunks = np.searchsorted(self._starts, samples, side="right") - 1
        pairs = np.sort(self._class_of[samples].astype(np.int64) * num_chunks + chunks)
        pairs = pairs[np.diff(pairs, prepend=-1) > 0]  # np.unique takes ten times as long
        of_class = pairs // num_chunks
        seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=16).digest(), "little")
        in_random_order = np.lexsort((np.random.default_rng(seed).random(len(pairs)), of_class))
        self._chunks_start: list[int] = np.concatenate(
            [[0], np.cumsum(np.bincount(of_class, minlength=num_classes))]
        ).tolist()
        return (pairs % num_chunks)[in_random_order].astype(np.int32), self._chunks_start[1:]

    # Facts.

    def memory_changed(self, capacity_bytes: int) -> Orders:
        """What is in memory stays, should it be less."""
        self._capacity_bytes = capacity_bytes
        reads = self._read_ahead()
        return Orders(reads) if reads else NO_ORDERS

    def _answer(self, rank: int, asked: Int64Array) -> tuple[Int64Array, Orders]:
        classes = self._class_of[asked].tolist()
        left, samples, reads = Counter(classes), [], self._order_again()
        for each in classes:
            sample, ordered = self._take(each, left[each])
            left[each] -= 1
            samples.append(sample)
            reads += ordered
        return np.array(samples, dtype=np.int64), Orders(reads + self._read_ahead())

    def _arrived(self, read: Read, kept: Int64Array) -> Orders:
        intact = None if len(kept) == len(read.samples) else set(kept.tolist())
        for sample in read.samples.tolist():
            of_class = self._class_view[sample]
            if self._coming[of_class].pop(sample, None) is None:
                continue  # promised
            self._num_coming -= 1
            if intact is not None and sample not in intact:
                self._damaged[of_class].append(sample)
                continue
            self._ready[of_class].append(sample)
            self._num_ready[of_class] += 1
            self._ready_bytes += self._lengths_view[sample]
            self.came_bytes += self._lengths_view[sample]
        return NO_ORDERS

    def failed(self, read: Read) -> Orders:
        left = [
            sample
            for sample in read.samples.tolist()
            if self._coming[self._class_view[sample]].pop(sample, None) is not None
        ]
        self._num_coming -= len(left)
        if left:
            samples = np.array(left, dtype=np.int64)
            self.came_bytes += int(self._lengths[samples].sum())  # nobody waits for what will not come
            self._failed.append(Read(left[0], left[-1] + 1, samples))
        return NO_ORDERS

    # What answers.

    def _take(self, of_class: int, wanted: int) -> tuple[int, list[Read]]:
        """A sample for a request, and the reads that this needs.

        :param wanted: so many of the requests that are being answered want one of the class, this one among them.
        """
        if self._damaged[of_class]:
            return self._left_memory(self._damaged[of_class].pop()), []
        if self._ready[of_class]:
            return self._give(of_class), []
        coming, reads = self._coming[of_class], list[Read]()
        if not coming:
            reads = self._read_for(of_class, wanted)
        first = list(islice(coming, 1 + min(_SPREAD_SAMPLES, self._num_promised)))
        sample = first[int(self._random.random() * len(first))]
        read = coming.pop(sample)
        self._num_coming -= 1
        self._num_promised += 1
        self.counts.misses += not self._at_hand(read.first, read.end)
        return self._left_memory(sample), reads

    def _give(self, of_class: int) -> int:
        """Take a random one of those in memory."""
        ready = self._ready[of_class]
        place = int(self._random.random() * len(ready))
        ready[place], ready[-1] = ready[-1], ready[place]
        sample = ready.pop()
        self._num_ready[of_class] -= 1
        self._ready_bytes -= self._lengths_view[sample]
        return self._left_memory(sample)

    def _left_memory(self, sample: int) -> int:
        self.held_bytes -= self._lengths_view[sample]
        self._given_bytes += self._lengths_view[sample]
        self._num_given += 1
        return sample

    def _choose_ahead(
        self, rank: int, upcoming: UpcomingRequests, asked: Int64Array, ahead_from: int, room: int, started_below: int
    ) -> Ahead:
        """Only what no request of the class that comes earlier, of whichever rank, will lack."""
        room = min(room, self._ready_bytes - self._reserve_bytes)
        if room <= 0:
            return NONE_AHEAD
        positions, wanted, _ = upcoming.after(ahead_from - 1, self._window)
        sent: list[tuple[int, int]] = []
        for piece in pieces(len(positions)):
            classes = self._class_of[wanted[piece]]
            able = (self._num_ready[classes] > 0) & (self._assigned[wanted[piece]] < 0)
            able &= self._demand.times(rank, positions[piece]) < self._demand.short_at[classes]
            for place in np.flatnonzero(able).tolist():
                of_class = int(classes[place])
                if not self._ready[of_class]:
                    continue
                sample = self._give(of_class)
                room -= self._lengths_view[sample]
                if room < 0:
                    self._take_back(of_class, sample)
                    break
                sent.append((int(positions[piece][place]), sample))
                self._assigned_view[int(wanted[piece][place])] = sample
            if room <= 0:
                break
        if not sent:
            return NONE_AHEAD
        columns = np.array(sent, dtype=np.int64)
        return Ahead(columns[:, 0], columns[:, 1], Orders(self._read_ahead()))

    def _take_back(self, of_class: int, sample: int) -> None:
        self._ready[of_class].append(sample)
        self._num_ready[of_class] += 1
        self.held_bytes += self._lengths_view[sample]
        self._ready_bytes += self._lengths_view[sample]
        self._given_bytes -= self._lengths_view[sample]
        self._num_given -= 1

    # What is read.

    @property
    def nothing_left_to_read(self) -> bool:
        return not self._num_unread and not self._failed

    @property
    def _reserve_bytes(self) -> int:
        """As of ``drain``: what should stay in memory, so that samples of a chunk are spread."""
        return 0 if self.nothing_left_to_read else min(self._capacity_bytes, self._given_bytes) // 2

    def _wait_until_bytes(self) -> int:
        missing = self._reserve_bytes - self._ready_bytes
        return self.came_bytes + missing if missing > 0 and self._num_coming else 0

    def _read_ahead(self) -> list[Read]:
        """What memory runs out of first, as far as there is room."""
        reads: list[Read] = []
        while (shortest := self._demand.shortest()) is not None:
            at, of_class = shortest
            chunk = self._next_chunk(of_class)
            if self._fits_whole(chunk):
                reads += self._order(chunk, self._samples_left(chunk))
                continue
            num_soon = int(self._capacity_bytes // _KEPT_FOR_SOON / self._mean_bytes)
            if not self._demand.is_among_next(at, self._num_given, num_soon):
                break
            samples = self._samples_left(chunk, of_class)
            if not (num_that_fit := self._num_that_fit(samples)):
                break
            reads += self._order(chunk, samples[:num_that_fit])
        return reads

    def _read_for(self, of_class: int, wanted: int) -> list[Read]:
        """For requests for a class of which nothing is here or on its way."""
        chunk = self._next_chunk(of_class)
        if self._fits_whole(chunk):
            return self._order(chunk, self._samples_left(chunk))
        samples = self._samples_left(chunk, of_class)
        return self._order(chunk, samples[: max(wanted, self._num_that_fit(samples))])

    def _fits_whole(self, chunk: int) -> bool:
        most_bytes = self._capacity_bytes - self._capacity_bytes // _KEPT_FOR_SOON
        return self.held_bytes + self._bytes_left[chunk] <= most_bytes or not self.held_bytes

    def _num_that_fit(self, samples: list[int]) -> int:
        room = self._capacity_bytes - self.held_bytes
        return bisect_right(list(accumulate(map(self._lengths_view.__getitem__, samples))), room)

    def _next_chunk(self, of_class: int) -> int:
        """One that has unread samples of the class. Raises RuntimeError when there is none."""
        while self._chunks_end[of_class] > self._chunks_start[of_class]:
            chunk = int(self._chunks[self._chunks_end[of_class] - 1])
            if self._num_left[chunk] and (chunk not in self._read_in_part or self._samples_left(chunk, of_class)):
                return chunk
            self._chunks_end[of_class] -= 1
        raise RuntimeError("an owner was asked for more samples of a class than its share has")

    def _samples_left(self, chunk: int, of_class: int = -1) -> list[int]:
        """Those that were not read; of one class, or of all."""
        unread, classes = self._unread, self._class_view
        samples = range(self._starts_view[chunk], self._starts_view[chunk + 1])
        return [s for s in samples if unread[s] and (of_class < 0 or classes[s] == of_class)]

    def _order(self, chunk: int, samples: list[int]) -> list[Read]:
        """Read these samples of a chunk, and nothing again that the epoch asks for."""
        num_bytes = 0
        for sample in samples:
            self._unread[sample] = 0
            num_bytes += self._lengths_view[sample]
        self._num_unread -= len(samples)
        self._num_coming += len(samples)
        self._num_left[chunk] -= len(samples)
        self._bytes_left[chunk] -= num_bytes
        if self._num_left[chunk]:
            self._read_in_part.add(chunk)
        else:
            self._read_in_part.discard(chunk)
        self.held_bytes += num_bytes
        for of_class, count in Counter(map(self._class_view.__getitem__, samples)).items():
            self._demand.covered(of_class, count)
        return self._on_their_way([Read(run[0], run[-1] + 1, np.array(run)) for run in self._runs(samples)])

    def _runs(self, samples: list[int]) -> list[list[int]]:
        """Stretches between which no other sample lies that the epoch asks for."""
        runs = [[samples[0]]]
        for before, sample in pairwise(samples):
            if sample > before + 1 and self._is_asked[before + 1 : sample].any():
                runs.append([])
            runs[-1].append(sample)
        return runs

    def _order_again(self) -> list[Read]:
        reads, self._failed = self._failed, []
        self._num_coming += sum(len(read.samples) for read in reads)
        return self._on_their_way(reads)

    def _on_their_way(self, reads: list[Read]) -> list[Read]:
        for read in reads:
            for sample in read.samples.tolist():
                self._coming[self._class_view[sample]][sample] = read
        self.counts.refills += len(reads)
        return reads
