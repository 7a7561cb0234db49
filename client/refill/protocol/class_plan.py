"""Which sample does each position of an epoch have, where positions ask for classes, and each chunk is read once?

Which class each position asks for is given. Which sample of it comes is chosen here, by what memory would hold:

- **Reads.** Each share has the memory that it is planned for, and a chunk is read whole as soon as its share has room.
  It is one with the class that memory runs out of soonest, of those the one whose turn it is by nested halves
  (``nested_halves.py``). An eighth of memory is kept free: a position whose class is not in memory has a chunk read
  into that.
- **Stays.** Each sample draws how long it stays (``spread.py``): those of a chunk from equal parts of the distribution,
  and those of a chunk and class from parts that lie far apart. A position has the sample of its class whose time is
  over first. Each class has a clock of its own, which says when the time was over of whom it delivered last: so it does
  not matter how evenly the class is asked for.

All of it is in integers. Whatever changes an order is a new version of the plan.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from refill.protocol.keyed_hash import key_of, numbers
from refill.protocol.nested_halves import chunks_in_order
from refill.protocol.plan_settings import PlanSettings
from refill.protocol.spread import RAMP_PART, RAMP_START, stays
from refill.protocol.weaving import epoch_key
from refill.protocol.wire_format import Int64Array

_HALF = np.uint64(32)
_COMMON = np.uint64(3)
"""Parts of four that samples of a chunk have in common in where they are in their part of the stays."""
_FINER = 12
"""Bits of a time that make no difference here."""
_ID_BITS = 40
_ID_MASK = (1 << _ID_BITS) - 1
_SHARE_BITS = 16
_KEPT_FREE = 8
"""One part of so many of memory, for chunks with a class that is not there when it is asked for."""


class StoredSamples(NamedTuple):
    """The chunk, share and length of each sample of the dataset, ``(n,)``."""

    chunks: Int64Array
    """Ascending from 0 on."""
    shares: Int64Array
    """The same for all samples of a chunk."""
    lengths: Int64Array
    """Bytes."""


class ClassPlan(NamedTuple):
    """The order of an epoch whose positions ask for classes."""

    samples: Int64Array
    """``(n,)`` at each position."""
    keeps_rule: bool
    """Whether no share ever holds more than it is planned for. False: memory is too small for the order of classes."""


def plan_epoch_within_classes(
    in_turn: Int64Array, order: Int64Array, classes: Int64Array, stored: StoredSamples, plan: PlanSettings, epoch: int
) -> Int64Array:
    """The sample of each position of an epoch's order, ``(n,)``.

    :param in_turn: ``(n,)`` its positions as ranks ask for them, as of ``positions_in_turn``.
    :param order: ``(n,)`` the class of each position.
    """
    found = np.empty(len(order), dtype=np.int64)
    key = key_of("within classes", epoch_key(plan, epoch))
    planned = plan_within_classes(
        order[in_turn], classes, stored, plan.memory_bytes, plan.num_shares, key, ramped=epoch == 0
    )
    found[in_turn] = planned.samples
    return found


def plan_within_classes(
    asked: Int64Array,
    classes: Int64Array,
    stored: StoredSamples,
    memory_bytes: int,
    num_shares: int,
    key: int,
    *,
    ramped: bool = False,
) -> ClassPlan:
    """Each sample once. It takes three to five seconds for a million positions.

    :param asked: ``(n,)`` the class of each position; ``classes``: of each sample. Each class is as often in both.
    :param memory_bytes: that all shares together are planned for.
    :param key: of the epoch, ``key_of``.
    :param ramped: a job's first epoch, which begins with little memory.
    """
    if not len(asked):
        return ClassPlan(np.empty(0, dtype=np.int64), True)
    return _Epoch(asked, classes, stored, memory_bytes, num_shares, key, ramped=ramped).planned()


def chunk_entries(chunks: Int64Array, shares: Int64Array) -> Int64Array:
    """As pods send the chunk of each sample, and its share: ``(n,)``."""
    return chunks << _SHARE_BITS | shares


def chunks_and_shares(entries: Int64Array) -> tuple[Int64Array, Int64Array]:
    """The inverse."""
    return entries >> _SHARE_BITS, entries & ((1 << _SHARE_BITS) - 1)


class _Epoch:
    """Lists in place of arrays, since they are looked at one by one."""

    def __init__(
        self,
        asked: Int64Array,
        classes: Int64Array,
        stored: StoredSamples,
        memory_bytes: int,
        num_shares: int,
        key: int,
        *,
        ramped: bool,
    ) -> None:
        num_samples, num_classes = len(classes), int(classes.max()) + 1
        self._asked, self._num_samples, self._ramped = asked, num_samples, ramped
        sizes = np.bincount(stored.chunks)
        ends = np.cumsum(sizes)
        self._starts = np.concatenate([[0], ends]).tolist()
        share_of_chunk = stored.shares[ends - 1]
        self._share_of_chunk: list[int] = share_of_chunk.tolist()
        bytes_of = np.concatenate([[0], np.cumsum(stored.lengths)])
        chunk_bytes = np.diff(bytes_of[np.concatenate([[0], ends])])
        self._chunk_bytes: list[int] = chunk_bytes.tolist()
        self._class_of, self._share_of = classes.tolist(), stored.shares.tolist()
        self._lengths = stored.lengths.tolist()

        own = np.zeros(num_shares, dtype=np.int64)
        np.add.at(own, stored.shares, 1)
        self._memory = [memory_bytes * each // num_samples for each in own.tolist()]
        self._held: list[int] = [0] * num_shares
        self._read_bytes = [0] * num_shares
        self._due = [0] * num_shares
        """When a share holds no more than this, there may be room for a chunk."""

        stay_of = _stays_in_chunks(classes, stored.chunks, sizes, key_of("stays", key)) >> _FINER
        self._times = ((stay_of << _ID_BITS) | np.arange(num_samples, dtype=np.int64)).tolist()
        """Of each sample: how long it stays, and its id."""
        self._heaps: list[list[int]] = [[] for _ in range(num_classes)]
        """Of each class: of the samples in memory, when their time is over, and their ids."""
        self._clocks = [0] * num_classes

        self._queues = _queues(classes, stored.chunks, share_of_chunk, num_shares, key)
        self._num_shares = num_shares
        self._was_read = bytearray(len(sizes))

        in_order = np.argsort(asked, kind="stable")
        counts = np.bincount(classes, minlength=num_classes)
        self._wanted_at = np.insert(in_order, np.cumsum(counts), num_samples).tolist()
        """The positions of each class, then the number of positions."""
        self._runs_out = (np.cumsum(counts) - counts + np.arange(num_classes)).tolist()
        """Of each class, the place there of the first position for which nothing has been read."""
        self._soonest = [(self._wanted_at[place], each) for each, place in enumerate(self._runs_out)]
        """``(position, class)`` of where memory runs out of it: a heap, in part out of date."""
        heapify(self._soonest)
        self.keeps_rule = True

    def planned(self) -> ClassPlan:
        heaps, clocks, held, due = self._heaps, self._clocks, self._held, self._due
        share_of, lengths = self._share_of, self._lengths
        found: list[int] = []
        for share in range(self._num_shares):
            self._read_ahead(share)
        for wanted in self._asked.tolist():
            heap = heaps[wanted]
            if not heap:
                self._read_now(wanted)
            time = heappop(heap)
            sample = time & _ID_MASK
            clocks[wanted] = time - sample
            found.append(sample)
            share = share_of[sample]
            held[share] -= lengths[sample]
            if held[share] <= due[share]:
                self._read_ahead(share)
        return ClassPlan(np.array(found, dtype=np.int64), self.keeps_rule)

    def _read_now(self, wanted: int) -> None:
        """A chunk with this class, in the share that has most room for it."""
        chunks = [chunk for share in range(self._num_shares) if (chunk := self._next_with(wanted, share)) >= 0]
        chunk = max(chunks, key=lambda each: self._memory[self._share_of_chunk[each]] - self._after_read(each))
        share = self._share_of_chunk[chunk]
        if self._held[share] and self._after_read(chunk) > self._memory[share]:
            self.keeps_rule = False
        self._read(chunk)
        self._read_ahead(share)

    def _after_read(self, chunk: int) -> int:
        return self._held[self._share_of_chunk[chunk]] + self._chunk_bytes[chunk]

    def _read_ahead(self, share: int) -> None:
        """What the share has room for."""
        while (chunk := self._next_in(share)) >= 0:
            lacks = self._after_read(chunk) - self._allowed(share)
            if lacks > 0 and self._held[share]:
                if self._ramped:  # what is delivered makes room, and lets a quarter of that more be read
                    lacks = max(1, lacks * RAMP_PART // (RAMP_PART + 1))
                self._due[share] = max(0, self._held[share] - lacks)
                return
            self._read(chunk)
        self._due[share] = -1

    def _allowed(self, share: int) -> int:
        memory = self._memory[share]
        most = memory - memory // _KEPT_FREE
        if not self._ramped:
            return most
        return min(most, memory // RAMP_START + (self._read_bytes[share] - self._held[share]) // RAMP_PART)

    def _read(self, chunk: int) -> None:
        self._was_read[chunk] = 1
        share, size = self._share_of_chunk[chunk], self._chunk_bytes[chunk]
        self._held[share] += size
        self._read_bytes[share] += size
        heaps, clocks, times, runs_out = self._heaps, self._clocks, self._times, self._runs_out
        start, end = self._starts[chunk], self._starts[chunk + 1]
        classes = self._class_of[start:end]
        for sample, each in enumerate(classes, start):
            heappush(heaps[each], times[sample] + clocks[each])
            runs_out[each] += 1
        for each in set(classes):
            heappush(self._soonest, (self._wanted_at[runs_out[each]], each))

    def _next_in(self, share: int) -> int:
        """The chunk of a share that has the class which memory runs out of soonest, of those that it has; -1: all are
        read."""
        soonest, later = self._soonest, []
        found = -1
        while soonest:
            position, wanted = soonest[0]
            if position == self._num_samples or position != self._wanted_at[self._runs_out[wanted]]:
                heappop(soonest)
                continue
            found = self._next_with(wanted, share)
            if found >= 0:
                break
            later.append(heappop(soonest))
        for each in later:
            heappush(soonest, each)
        return found

    def _next_with(self, wanted: int, share: int) -> int:
        """The next chunk of a share that has a class; -1: none that is not read."""
        queue = self._queues.get(wanted * self._num_shares + share)
        while queue and self._was_read[queue[-1]]:
            queue.pop()
        return queue[-1] if queue else -1


def _queues(
    classes: Int64Array, chunks: Int64Array, share_of_chunk: Int64Array, num_shares: int, key: int
) -> dict[int, list[int]]:
    """By class times shares, plus share: its chunks with the class, in the order in which they are read, the last one
    first."""
    num_chunks = len(share_of_chunk)
    turns = np.empty(num_chunks, dtype=np.int64)
    for share in range(num_shares):
        of_share = np.flatnonzero(share_of_chunk == share)
        in_order = chunks_in_order(len(of_share), key, share, num_shares) if len(of_share) else of_share
        turns[of_share[in_order]] = np.arange(len(of_share), 0, -1)
    by_turn = np.argsort(turns, kind="stable")
    rank = np.empty(num_chunks, dtype=np.int64)
    rank[by_turn] = np.arange(num_chunks)
    named = np.unique((classes * num_shares + share_of_chunk[chunks]) * num_chunks + rank[chunks])
    queues, places = np.divmod(named, num_chunks)
    firsts = np.flatnonzero(np.diff(queues, prepend=-1))
    ends = np.append(firsts[1:], len(queues)).tolist()
    found = by_turn[places].tolist()
    return {
        queue: found[first:end]
        for queue, first, end in zip(queues[firsts].tolist(), firsts.tolist(), ends, strict=True)
    }


def _stays_in_chunks(classes: Int64Array, chunks: Int64Array, sizes: Int64Array, key: int) -> Int64Array:
    """How long each sample stays: those of a chunk, at random, one in each of equal parts of all stays, and those of a
    chunk and class in parts that lie as far apart as can be."""
    num_samples = len(classes)
    draws = (numbers(key_of("parts", key), num_samples) >> _HALF).astype(np.int64)
    groups = chunks * (int(classes.max()) + 1) + classes
    in_groups = np.lexsort((draws, groups))
    firsts = np.flatnonzero(np.diff(groups[in_groups], prepend=-1))
    counts = np.diff(np.append(firsts, num_samples))
    of_group = np.repeat(np.arange(len(firsts)), counts)
    nth = np.arange(num_samples, dtype=np.int64) - firsts[of_group]
    phases = draws[in_groups[firsts]] & 0xFFFF
    # Below 2**28: how far each is within its group.
    within = ((nth << 16) + phases[of_group] << 12) // counts[of_group]
    by_part = in_groups[np.argsort((chunks[in_groups] << 28) | within, kind="stable")]
    parts = np.empty(num_samples, dtype=np.int64)
    parts[by_part] = np.arange(num_samples, dtype=np.int64) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    common = np.repeat(numbers(key_of("common", key), len(sizes)) >> _HALF, sizes)
    own = numbers(key_of("own", key), num_samples) >> _HALF
    inside = (common * _COMMON + own) >> np.uint64(2)
    return stays(((parts.astype(np.uint64) << _HALF) + inside) // np.repeat(sizes.astype(np.uint64), sizes))
