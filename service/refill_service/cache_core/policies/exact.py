"""Policy ``exact``: each request gets the very sample that it asks for, from a cache that knows what comes.

The order of every rank is known, so what to read and what to keep follows from it alone: the owner goes through the
requests to its share in the order in which ranks in step would make them, a little ahead of the ranks, and orders what
has to be read. What stays in memory until when is decided by a cache of :mod:`refill_service.cache_core.exact`, which
lives over all epochs. Each run gives the same samples for the same requests; what it reads for that differs a little,
since samples that wait for a rank that is behind take memory from the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from refill_service.cache_core.epoch_order import Traces
from refill_service.cache_core.exact.chunk_caches import ChunkRead, ClairvoyantCache, EarliestUseCache
from refill_service.cache_core.exact.known_uses import Uses
from refill_service.cache_core.exact.sample_caches import FifoCache, LruCache, NeverEvictCache
from refill_service.cache_core.policies.drain import default_chunk_size
from refill_service.cache_core.policies.interface import (
    NO_ORDERS,
    NO_SAMPLES,
    NONE_AHEAD,
    Ahead,
    Carried,
    EpochBegan,
    Orders,
    Policy,
    PolicyKind,
    Read,
)
from refill_service.cache_core.prefetch_check import UpcomingRequests
from refill_service.cache_core.sample_mapping import Int64Array

__all__ = ["KIND", "ExactPolicy"]

_AHEAD_PART = 32
"""Of memory: what samples may take that are read before they are asked for, and stay for nothing else."""
_LATE_PART = 4
"""Of memory: what they may take where a rank is behind the others. Then its oldest are dropped, and read alone."""
_BLOCK = 1 << 12


class ExactCache(Protocol):
    """What is kept, of one owner over all epochs. Times are of the epoch that runs."""

    capacity_bytes: int
    held_bytes: int

    def holds(self, sample: int) -> bool: ...
    def used(self, sample: int, time: int, uses: Uses) -> bool: ...
    def missed(self, sample: int, time: int, uses: Uses) -> ChunkRead: ...
    def shrink(self) -> Int64Array: ...
    def forget(self, samples: Int64Array) -> None: ...


def _clairvoyant(starts: Int64Array, lengths: Int64Array, capacity_bytes: int, key: str) -> ExactCache:
    return ClairvoyantCache(starts, lengths, capacity_bytes, "rolling", key)


def _renewal(starts: Int64Array, lengths: Int64Array, capacity_bytes: int, key: str) -> ExactCache:
    return ClairvoyantCache(starts, lengths, capacity_bytes, "renewal", key)


def _earliest(starts: Int64Array, lengths: Int64Array, capacity_bytes: int, key: str) -> ExactCache:
    return EarliestUseCache(starts, lengths, capacity_bytes)


_CACHES: dict[str, Callable[[Int64Array, Int64Array, int, str], ExactCache]] = {
    "rolling": _clairvoyant,
    "renewal": _renewal,
    "earliest": _earliest,
    "never": lambda starts, lengths, capacity_bytes, key: NeverEvictCache(lengths, capacity_bytes),
    "fifo": lambda starts, lengths, capacity_bytes, key: FifoCache(lengths, capacity_bytes),
    "lru": lambda starts, lengths, capacity_bytes, key: LruCache(lengths, capacity_bytes),
}


class ExactPolicy(Policy):
    """One owner's share of one epoch, each request bound to its own sample."""

    def __init__(self, began: EpochBegan) -> None:
        super().__init__(began)
        share = self.mapping.share
        self._uses = _UsesOfShare(
            began.traces, began.next_traces, share.first_sample, share.first_sample + share.num_samples, self._left
        )
        self._in_order = self._requests_in_order()
        self._next = next(self._in_order, None)
        """The next request to go through, ``(time, sample)``; None: all were gone through."""
        self._due: dict[int, None] = {}
        """Samples whose request was gone through and not yet made, the first first; in memory or on their way."""
        self._only_due: dict[int, None] = {}
        """Those that stay for nothing else."""
        self._due_bytes = 0
        """Of those."""
        self._here = np.zeros(share.num_samples, dtype=bool)
        """Samples in memory or on their way."""
        self._arrived_here = np.zeros(share.num_samples, dtype=bool)
        """Samples in memory."""
        for known in (self._here, self._arrived_here):
            known[began.carried.samples] = True
        self._awaited: set[int] = set()
        """Samples on their way that requests wait for, which take them when they arrive."""
        self._cache: ExactCache | None = began.carried.state
        self._make_cache = _CACHES[str(began.settings["eviction"])]
        self._key = began.key
        self._capacity_bytes = 0

    def memory_changed(self, capacity_bytes: int) -> Orders:
        self._capacity_bytes = capacity_bytes
        if self._cache is None:
            for_cache = capacity_bytes - capacity_bytes // _AHEAD_PART
            self._cache = self._make_cache(self._starts, self._lengths, for_cache, self._key)
        return self._within_memory(self._go_on(until=-1))

    def close(self) -> Carried:
        held = np.array([each for each in np.flatnonzero(self._here).tolist() if self._holds(each)], dtype=np.int64)
        due = np.fromiter(self._due, dtype=np.int64, count=len(self._due))
        going = np.setdiff1d(held[self._arrived_here[held]], due)
        if self._cache is not None:
            self._cache.forget(np.setdiff1d(held, going))
        cache, self._cache = self._cache, None
        for sample in due.tolist():
            self._note(sample)
        self._count_bytes()
        self._here[going] = self._arrived_here[going] = False
        return Carried(going, cache)

    def _answer(self, rank: int, asked: Int64Array) -> tuple[Int64Array, Orders]:
        was_in_memory = self._arrived_here[asked].tolist()  # and leaves with this answer, whatever is evicted now
        orders = self._go_on(until=int(self._uses.times_of(asked).max()))
        for sample, was_there in zip(asked.tolist(), was_in_memory, strict=True):
            if self._here[sample] and not was_there:
                self._awaited.add(sample)
            self._leaves(sample)
        return asked, self._within_memory(orders)

    def stays(self, samples: Int64Array) -> NDArray[np.bool_] | None:
        return np.fromiter(map(self._holds, samples.tolist()), dtype=bool, count=len(samples))

    def _choose_ahead(
        self, rank: int, upcoming: UpcomingRequests, asked: Int64Array, ahead_from: int, room: int, started_below: int
    ) -> Ahead:
        """What is in memory for the rank's next requests, up to the first that is not: those after it are not due."""
        positions, samples, _ = upcoming.after(ahead_from - 1, self._window)
        sent: list[tuple[int, int]] = []
        for position, sample in zip(positions.tolist(), samples.tolist(), strict=True):
            if self._assigned_view[sample] >= 0:
                continue
            room -= int(self._lengths[sample])
            if room < 0 or sample not in self._due:
                break
            if not self._arrived_here[sample]:
                continue
            sent.append((position, sample))
        if not sent:
            return NONE_AHEAD
        columns = np.array(sent, dtype=np.int64)
        self._assigned[columns[:, 1]] = columns[:, 1]
        for _, sample in sent:
            self._leaves(sample)
        self._count_bytes()
        return Ahead(columns[:, 0], columns[:, 1], self._go_on(until=-1))

    def _arrived(self, read: Read, kept: Int64Array) -> Orders:
        damaged = np.setdiff1d(read.samples, kept, assume_unique=True)
        self._lost(damaged)
        wanted = np.array([self._is_wanted(sample) for sample in kept.tolist()], dtype=bool)
        self._arrived_here[kept[wanted]] = True
        self._here[kept[~wanted]] = False
        drops = [sample for sample in kept[~wanted].tolist() if sample not in self._awaited]
        self._awaited.difference_update(read.samples.tolist())
        return Orders(drops=np.array(drops, dtype=np.int64))

    def failed(self, read: Read) -> Orders:
        """Who is promised one of its samples has it read alone."""
        self._lost(read.samples)
        return NO_ORDERS

    @property
    def nothing_left_to_read(self) -> bool:
        return self._next is None

    def _requests_in_order(self) -> Iterator[tuple[int, int]]:
        """``(time, sample)`` of all requests to the share that were not answered when the epoch began, or went on."""
        traces, share, num_ranks = self._traces, self.mapping.share, self._uses.num_ranks
        lengths = [traces.length(rank) for rank in range(num_ranks)]
        for start in range(0, max(lengths, default=0), _BLOCK):
            times, asked = [NO_SAMPLES], [NO_SAMPLES]
            for rank, length in enumerate(lengths):
                positions = np.arange(start, min(start + _BLOCK, length), dtype=np.int64)
                if not len(positions):
                    continue
                samples, repeats = traces.asked(rank, positions)
                here = share.holds(samples) & ~repeats
                local = samples[here] - share.first_sample
                left = slice(None) if self._left is None else self._left[local]
                times.append((positions[here] * num_ranks + rank)[left])
                asked.append(local[left])
            all_times, all_asked = np.concatenate(times), np.concatenate(asked)
            order = np.argsort(all_times)
            yield from zip(all_times[order].tolist(), all_asked[order].tolist(), strict=True)

    def _go_on(self, until: int) -> Orders:
        """Go through the requests up to a time, and on as long as there is room for what is read ahead."""
        if self._cache is None:
            return NO_ORDERS
        reads: list[Read] = []
        drops: list[Int64Array] = []
        ahead_bytes = self._capacity_bytes // _AHEAD_PART
        while self._next is not None and (self._next[0] <= until or self._due_bytes < ahead_bytes):
            time, sample = self._next
            self._next = next(self._in_order, None)
            if self._assigned_view[sample] >= 0 and not self._holds(sample):
                continue  # it was sent ahead before its turn
            self._go_through(self._cache, sample, time, reads, drops)
        while self._only_due and self._due_bytes > self._capacity_bytes // _LATE_PART:
            drops.append(self._drop_oldest())
        self._count_bytes()
        if not reads and not drops:
            return NO_ORDERS
        return Orders(reads, np.unique(np.concatenate([NO_SAMPLES, *drops])))

    def _go_through(
        self, cache: ExactCache, sample: int, time: int, reads: list[Read], drops: list[Int64Array]
    ) -> None:
        """A request's turn has come: its sample is in memory, or read now."""
        self._due[sample] = None
        if cache.holds(sample):
            cache.used(sample, time, self._uses)
            self._note(sample)
            return
        ahead_bytes = max(self._due_bytes, self._capacity_bytes // _AHEAD_PART)
        cache.capacity_bytes = max(0, self._capacity_bytes - ahead_bytes)
        read = cache.missed(sample, time, self._uses)
        for each in (sample, *read.kept.tolist(), *read.forgotten.tolist()):
            self._note(each)
        wanted = np.union1d(read.kept, [sample])
        wanted = wanted[~self._here[wanted]]
        if len(wanted):
            self._here[wanted] = True
            reads.append(Read(read.first, read.end, wanted))
            self.counts.misses += not self._at_hand(read.first, read.end)
            self.counts.refills += 1
        drops.append(self._gone(read.forgotten))

    def _gone(self, samples: Int64Array) -> Int64Array:
        """Those of these samples in memory that nothing wants there any more. What is still on its way is judged when
        it arrives: it may be wanted again by then."""
        gone = [sample for sample in samples.tolist() if self._arrived_here[sample] and not self._is_wanted(sample)]
        found = np.array(gone, dtype=np.int64)
        self._here[found] = self._arrived_here[found] = False
        return found

    def _within_memory(self, orders: Orders) -> Orders:
        """And what the cache gives up for samples that wait for a rank that is behind, or as there is less memory."""
        cache, gone = self._cache, [NO_SAMPLES]
        while cache is not None and cache.held_bytes and self._due_bytes + cache.held_bytes > self._capacity_bytes:
            cache.capacity_bytes = max(0, self._capacity_bytes - self._due_bytes)
            evicted = cache.shrink()
            for sample in evicted.tolist():
                self._note(sample)  # it may be due, and then stays all the same
            gone.append(self._gone(evicted))
        self._count_bytes()
        return orders if len(gone) == 1 else Orders(orders.reads, np.unique(np.concatenate([orders.drops, *gone])))

    def _drop_oldest(self) -> Int64Array:
        """Of a rank that is behind, the sample that it would ask for next; it is read alone then."""
        sample = next(iter(self._only_due))
        was_here = bool(self._arrived_here[sample])
        self._leaves(sample)
        return np.array([sample] if was_here else [], dtype=np.int64)

    def _leaves(self, sample: int) -> None:
        """Fact: a request for the sample was answered."""
        if sample not in self._due:
            return
        del self._due[sample]
        self._note(sample)
        if self._arrived_here[sample] and not self._holds(sample):
            self._here[sample] = self._arrived_here[sample] = False

    def _note(self, sample: int) -> None:
        """Whether a sample stays for its request alone may have changed."""
        if sample in self._due and not self._holds(sample):
            if sample not in self._only_due:
                self._only_due[sample] = None
                self._due_bytes += int(self._lengths[sample])
        elif sample in self._only_due:
            del self._only_due[sample]
            self._due_bytes -= int(self._lengths[sample])

    def _lost(self, samples: Int64Array) -> None:
        """Fact: these did not come."""
        if self._cache is not None:
            self._cache.forget(samples)
        self._awaited.difference_update(samples.tolist())
        for sample in samples.tolist():
            self._leaves(sample)
        self._here[samples] = self._arrived_here[samples] = False
        self._count_bytes()

    def _is_wanted(self, sample: int) -> bool:
        return sample in self._due or self._holds(sample)

    def _holds(self, sample: int) -> bool:
        return self._cache is not None and self._cache.holds(sample)

    def _count_bytes(self) -> None:
        self.held_bytes = self._due_bytes + (0 if self._cache is None else self._cache.held_bytes)


class _UsesOfShare:
    """When are the samples of a share used, in this epoch and in the next? Nothing is stored: orders are looked up.

    :param left: ``(samples,)`` those that this epoch has not been answered with; None: all.
    """

    def __init__(
        self, traces: Traces, next_traces: Traces | None, first: int, end: int, left: NDArray[np.bool_] | None
    ) -> None:
        self.num_ranks = traces.num_ranks
        self._traces, self._next_traces = traces, next_traces
        self._first = first
        self._left = left
        self._next_members = None if next_traces is None else next_traces.members(first, end)
        num_times = self.num_ranks * max((traces.length(rank) for rank in range(self.num_ranks)), default=0)
        self._next_start = self.known_until = num_times
        if next_traces is not None:
            longest = max((next_traces.length(rank) for rank in range(next_traces.num_ranks)), default=0)
            self.known_until += next_traces.num_ranks * longest

    def times_of(self, samples: Int64Array) -> Int64Array:
        """When each sample, ``(n,)``, that this epoch asks for is asked for."""
        ranks, positions = self._traces.position_of(samples + self._first)
        return positions * self.num_ranks + ranks

    def after(self, first: int, end: int, time: int) -> tuple[Int64Array, Int64Array]:
        samples = np.arange(first, end, dtype=np.int64)
        this = samples if self._left is None else samples[self._left[first:end]]
        times = self.times_of(this)
        later = times > time
        all_times, all_samples = [times[later]], [this[later]]
        if self._next_traces is not None:
            members = samples if self._next_members is None else samples[self._next_members[first:end]]
            ranks, positions = self._next_traces.position_of(members + self._first)
            all_times.append(self._next_start + positions * self._next_traces.num_ranks + ranks)
            all_samples.append(members)
        found, of_samples = np.concatenate(all_times), np.concatenate(all_samples)
        known = found < self.known_until
        found, of_samples = found[known], of_samples[known]
        order = np.argsort(found)
        return found[order], of_samples[order]


KIND = PolicyKind(
    "exact",
    ExactPolicy,
    # Chunks have no say in its order.
    default_chunk_size=lambda num_samples, sample_bytes, largest_blob, by_class: default_chunk_size(
        num_samples, sample_bytes, largest_blob, False
    ),
    # Each request of an empty cache reads a chunk of its own.
    first_batch_gets=lambda asked, chunk_size, abstract_chunks: asked,
    analysed_chunk_sizes=(),  # its plans take some ten times as long to simulate: only where they are asked for
    keeps_order=True,
)
