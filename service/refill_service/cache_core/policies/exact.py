"""Policy ``exact``: each request gets the very sample that it asks for, from a cache that knows what comes.

The order of every rank is known: the owner goes through the requests to its share in the order in which ranks in step
would make them, a little ahead of the ranks, and orders what has to be read. What stays in memory until when is decided
by a cache of :mod:`refill_service.cache_core.exact`, which lives over all epochs. Each run gives the same samples for
the same requests; what it reads for that differs a little, since ranks are not always in step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Set
from functools import partial
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from refill_service.cache_core.epoch_order import Traces
from refill_service.cache_core.exact.chunk_caches import ChunkRead, ClairvoyantCache, EarliestUseCache, Plan, Uses
from refill_service.cache_core.exact.sample_caches import FifoCache, ImportanceCache, LruCache, NeverEvictCache
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
    default_chunk_size,
    reads_of_chunk,
)
from refill_service.cache_core.prefetch_check import UpcomingRequests
from refill_service.cache_core.sample_mapping import Int64Array

_BLOCK = 1 << 12
"""Requests whose order is looked up at once, of all ranks."""
_ALL = slice(None)
"""Samples."""
_MOST_DUE = 1 << 13
"""Requests that are gone through before they are made."""
_FIRST_DUE = 1 << 8
"""Of these, before any was made; then as many more as were made."""
_MOST_STEPS = 1 << 8
"""Of work in one piece, while a pod does nothing else. A request for what is in memory is one, some 15 us."""


class ExactCache(Protocol):
    """What is kept, of one owner over all epochs. Times are of the epoch that runs."""

    capacity_bytes: int
    held_bytes: int

    def steps(self, sample: int) -> int:
        """The work of a request for a sample; 1 where there is nothing to decide."""
        ...

    def planning(self, sample: int, time: int, uses: Uses) -> Iterator[None]:
        """What is to be found out before a request for a sample, which is the next that it is told of: a little with
        each step. Who does not go through it waits for all of it then."""
        ...

    def holds(self, sample: int) -> bool: ...
    def held(self, samples: Int64Array | slice) -> NDArray[np.bool_]: ...
    def used(self, sample: int, time: int, uses: Uses) -> bool: ...
    def missed(self, sample: int, time: int, uses: Uses) -> ChunkRead: ...
    def shrink(self, spared: Set[int]) -> Int64Array: ...
    def forget(self, samples: Int64Array) -> None: ...
    def epoch_over(self, end: int) -> None: ...


def _planned(
    lengths: Int64Array, capacity_bytes: int, starts: Int64Array, key: str, all_bytes: int, *, plan: Plan
) -> ExactCache:
    if len(starts) == len(lengths) + 1:  # chunks of one sample: to know what comes gains nothing
        return NeverEvictCache(lengths, capacity_bytes)
    return ClairvoyantCache(starts, lengths, capacity_bytes, plan, key, all_bytes)


_CACHES: dict[str, Callable[[Int64Array, int, Int64Array, str, int], ExactCache]] = {
    "rolling": partial(_planned, plan="rolling"),
    "renewal": partial(_planned, plan="renewal"),
    "earliest": lambda lengths, capacity_bytes, starts, *_: EarliestUseCache(starts, lengths, capacity_bytes),
    "never": lambda lengths, capacity_bytes, *_: NeverEvictCache(lengths, capacity_bytes),
    "fifo": lambda lengths, capacity_bytes, *_: FifoCache(lengths, capacity_bytes),
    "lru": lambda lengths, capacity_bytes, *_: LruCache(lengths, capacity_bytes),
    "importance": lambda lengths, capacity_bytes, *_: ImportanceCache(lengths, capacity_bytes),
}


class ExactPolicy(Policy):
    """One owner's share of one epoch, each request bound to its own sample."""

    def __init__(self, began: EpochBegan) -> None:
        super().__init__(began)
        share = self.mapping.share
        self._uses = _UsesOfShare(
            began.traces, began.next_traces, share.first_sample, share.first_sample + share.num_samples, self._members
        )
        self._was_through = self._uses.was_through
        self._in_order = self._requests_in_order()
        self._next = next(self._in_order, None)
        """The next request to go through, ``(time, sample)``; None: all were gone through."""
        self._due: set[int] = set()
        """Samples whose request was gone through and not yet made; in memory or on their way."""
        self._is_due = np.zeros(share.num_samples, dtype=bool)
        self._only_due: set[int] = set()
        """Those that stay for nothing else."""
        self._due_bytes = 0
        """Of those."""
        self._most_due = _FIRST_DUE
        self._here = np.zeros(share.num_samples, dtype=bool)
        """Samples in memory or on their way."""
        self._arrived_here = np.zeros(share.num_samples, dtype=bool)
        """Samples in memory."""
        for known in (self._here, self._arrived_here):
            known[began.carried.samples] = True
        self._handed_on = np.zeros(share.num_samples, dtype=bool)
        """Samples in memory when the next epoch opened: their bytes are its own, also those that this epoch's last
        requests are answered with."""
        self.untouched += [self._was_through, self._is_due, self._here, self._arrived_here]
        self._num_on_their_way = 0
        """Reads."""
        self._awaited: set[int] = set()
        """Samples on their way that requests wait for, which take them when they arrive."""
        self._made_early = self._uses.made_early
        self._cache: ExactCache | None = began.carried.state
        self._make_cache = _CACHES[str(began.settings["eviction"])]
        self._key = began.key
        self._read_ahead = float(began.settings["read_ahead"])
        """Of memory: what samples may take that are read before they are asked for, and stay for nothing else."""
        self._capacity_bytes = 0
        self._share_bytes = began.share_bytes

    def memory_changed(self, capacity_bytes: int) -> Orders:
        self._capacity_bytes = capacity_bytes
        if self._cache is None:
            starts = self.mapping.share.local_starts
            self._cache = self._make_cache(self._lengths, self._bytes_for_cache, starts, self._key, self._share_bytes)
        return self._settled([], [])

    def planning(self, asked: Int64Array | None, *, repeats: bool = False) -> Iterator[None]:
        cache = self._cache
        if cache is None:
            return iter(())
        if asked is None:
            due = self._next_due()
            return iter(()) if due is None or due[2] else cache.planning(due[1], due[0], self._uses)
        sample = int(asked[0])
        if repeats:
            return iter(()) if sample in self._due else self._planning_of_repeat(cache, sample)
        if self._was_through[sample]:
            return iter(())
        return cache.planning(sample, int(self._uses.times_of(asked[:1])[0]), self._uses)

    def in_one_piece(self, asked: Int64Array) -> int:
        left = _MOST_STEPS
        for place, sample in enumerate(asked[:_MOST_STEPS].tolist()):
            left -= 1 if sample in self._due else self._steps(sample)
            if left < 0:
                return max(1, place)
        return min(len(asked), _MOST_STEPS)

    @property
    def may_go_on(self) -> bool:
        return self._next_due() is not None

    def go_on(self) -> Orders:
        """Go through requests that come next, as long as there is room for what is read ahead."""
        reads: list[Read] = []
        drops: list[Int64Array] = []
        steps, is_first = 0, True
        while steps < _MOST_STEPS and (due := self._next_due()) is not None:
            time, sample, repeats = due
            steps += self._steps(sample)
            if steps > _MOST_STEPS and not is_first:
                break  # it is planned first
            is_first = False
            self._advance()
            if repeats:  # who asks for it may do so at another pod's pace, or never
                self._made_early[sample] -= 1
            else:
                self._due.add(sample)
                self._is_due[sample] = True
                self._was_through[sample] = True
                self.counts.misses += self._go_through(sample, time, reads, drops)
            self._skip_done()
        return self._settled(reads, drops)

    def close(self) -> Carried:
        due = np.fromiter(self._due, dtype=np.int64, count=len(self._due))
        held = self._here & self._held(_ALL)  # tables of all samples: by their numbers it takes ten times as long
        goes = held & self._arrived_here
        goes[due] = False
        if self._cache is not None:
            self._cache.forget(np.flatnonzero(held ^ goes))
            self._cache.epoch_over(self._uses.next_start)
        cache, self._cache = self._cache, None
        for sample in due.tolist():
            self._note(sample)
        self._count_bytes()
        for known in (self._here, self._arrived_here):
            known &= ~goes
        self._handed_on |= goes
        return Carried(np.flatnonzero(goes), cache)

    def _answer(self, rank: int, asked: Int64Array) -> tuple[Int64Array, Orders]:
        was_in_memory = self._arrived_here[asked].tolist()  # and leaves with this answer, whatever is evicted now
        reads: list[Read] = []
        drops: list[Int64Array] = []
        made_early, gone = [], []
        for sample, time in zip(asked.tolist(), self._uses.times_of(asked).tolist(), strict=True):
            made_early.append(not self._was_through[sample])
            if made_early[-1] and self._cache is not None:
                self.counts.misses += self._go_through(sample, time, reads, drops)
            self._was_through[sample] = True
        for sample, was_there, early in zip(asked.tolist(), was_in_memory, made_early, strict=True):
            if self._here[sample] and not was_there:
                self._awaited.add(sample)
            if early:
                self._unless_wanted_forget(sample)
            else:
                self._leaves(sample)
            if was_there and not self._arrived_here[sample]:  # and may be read again with what is read ahead
                gone.append(sample)
        drops.append(np.array(gone, dtype=np.int64))
        self._were_made(len(asked))
        return asked, self._settled(reads, drops)

    def repeated(self, samples: Int64Array) -> Orders:
        reads: list[Read] = []
        drops: list[Int64Array] = []
        for sample in samples.tolist():
            was_there = bool(self._arrived_here[sample])
            self._skip_done()
            self._made_early[sample] += 1
            if sample not in self._due and self._cache is not None:
                self.counts.repeats_missed += self._go_through(sample, self._now, reads, drops)
            self._unless_wanted_forget(sample)
            if was_there and not self._arrived_here[sample]:  # and may be read again for the next repeat of it
                drops.append(np.array([sample], dtype=np.int64))
        return self._settled(reads, drops)

    def _planning_of_repeat(self, cache: ExactCache, sample: int) -> Iterator[None]:
        """As if it was asked for."""
        self._skip_done()
        self._made_early[sample] += 1
        planning = cache.planning(sample, self._now, self._uses)
        is_more = next(planning, planning) is not planning
        self._made_early[sample] -= 1
        if is_more:
            yield
            yield from planning

    @property
    def _now(self) -> int:
        """The time of the next request to go through."""
        return self._uses.next_start if self._next is None else self._next[0]

    def kept(self) -> Int64Array:
        return np.flatnonzero(self._arrived_here & self._held(_ALL))

    def stays(self, samples: Int64Array) -> NDArray[np.bool_] | None:
        return (
            np.fromiter(map(self._is_wanted, samples.tolist()), dtype=bool, count=len(samples))
            | self._handed_on[samples]
        )

    def _choose_ahead(
        self, rank: int, upcoming: UpcomingRequests, asked: Int64Array, ahead_from: int, room: int, started_below: int
    ) -> Ahead:
        """What is in memory for the rank's next requests, up to the first that is not: those after it are not due."""
        positions, samples, _ = upcoming.after(ahead_from - 1, self._window)
        sent: list[tuple[int, int]] = []
        for position, sample in zip(positions.tolist(), samples.tolist(), strict=True):
            if self._assigned_view[sample]:
                continue
            room -= int(self._lengths[sample])
            if room < 0 or not self._may_be_sent(sample):
                break
            if not self._arrived_here[sample]:
                continue
            sent.append((position, sample))
        if not sent:
            return NONE_AHEAD
        columns = np.array(sent, dtype=np.int64)
        self._assigned[columns[:, 1]] = columns[:, 1] + 1
        for _, sample in sent:
            self._leaves(sample)
        self._were_made(len(sent))
        return Ahead(columns[:, 0], columns[:, 1], self._settled([], []))

    def _may_be_sent(self, sample: int) -> bool:
        """Whether its request is near, so that it is in memory or on its way for it."""
        return sample in self._due

    def _arrived(self, read: Read, kept: Int64Array) -> Orders:
        self._num_on_their_way -= 1
        if len(kept) < len(read.samples):
            self._lost(np.setdiff1d(read.samples, kept, assume_unique=True))
        wanted = self._held(kept)
        wanted |= self._is_due[kept]
        self._arrived_here[kept[wanted]] = True
        self._here[kept[~wanted]] = False
        drops = [sample for sample in kept[~wanted].tolist() if sample not in self._awaited]
        self._awaited.difference_update(read.samples.tolist())
        return Orders(drops=np.array(drops, dtype=np.int64))

    def failed(self, read: Read) -> Orders:
        """Who is promised one of its samples has it read alone."""
        self._num_on_their_way -= 1
        self._lost(read.samples)
        return NO_ORDERS

    def scored(self, samples: Int64Array, scores: NDArray[np.floating]) -> Orders:
        if isinstance(self._cache, ImportanceCache):  # others look at the order alone
            self._cache.scored(samples, scores)
        return NO_ORDERS

    @property
    def nothing_left_to_read(self) -> bool:
        """And all that was read has come and gone: what is on its way can't be handed on to the next epoch."""
        return self._next is None and not self._due and not self._num_on_their_way

    @property
    def _ahead_bytes(self) -> int:
        return int(self._capacity_bytes * self._read_ahead)

    @property
    def _bytes_for_cache(self) -> int:
        """All of memory if it holds the whole share, as what is read ahead then takes no room beside what stays."""
        if self._share_bytes <= self._capacity_bytes:
            return self._capacity_bytes
        return max(0, self._capacity_bytes - max(self._due_bytes, self._ahead_bytes))

    def _requests_in_order(self) -> Iterator[tuple[int, int, bool]]:
        """``(time, sample, repeats)`` of all requests to the share."""
        traces, share = self._traces, self.mapping.share
        length = traces.longest
        block = max(1, _BLOCK // max(1, traces.num_ranks))
        for start in range(0, length, block):
            times, samples, repeats = traces.in_step(start, min(start + block, length))
            here = np.flatnonzero(share.holds(samples))
            yield from zip(
                times[here].tolist(), (samples[here] - share.first_sample).tolist(), repeats[here].tolist(), strict=True
            )

    def _skip_done(self) -> None:
        """Requests that were made before their turn."""
        while self._next is not None:
            _, sample, repeats = self._next
            if not repeats:
                if not self._was_through[sample]:
                    return
            elif self._made_early[sample] > 0:
                self._made_early[sample] -= 1
            else:
                return
            self._advance()

    def _advance(self) -> None:
        self._next = next(self._in_order, None)
        self._uses.turn = self._uses.next_start if self._next is None else self._next[0]

    def _were_made(self, num_requests: int) -> None:
        self._most_due = min(_MOST_DUE, self._most_due + num_requests)

    def _next_due(self) -> tuple[int, int, bool] | None:
        """The request that is to be gone through now; None: it is early for that, or there is no room."""
        if self._cache is None or self._next is None or len(self._due) >= self._most_due:
            return None
        room = self._ahead_bytes - self._due_bytes
        if room <= 0 or (self._only_due and room < self._lengths[self._next[1]]):
            return None
        return self._next

    def _steps(self, sample: int) -> int:
        return 1 if self._cache is None else self._cache.steps(sample)

    def _settled(self, reads: list[Read], drops: list[Int64Array]) -> Orders:
        """Have the cache give up what there is no room for. Returns these orders, too."""
        cache = self._cache
        if cache is None:
            return NO_ORDERS
        self._skip_done()
        if cache.held_bytes and self._due_bytes + cache.held_bytes > self._capacity_bytes:
            cache.capacity_bytes = max(0, self._capacity_bytes - self._due_bytes)
            # What is due stays until it is asked for, so that to give it up frees nothing.
            drops.append(self._gone(cache.shrink(self._due)))
        self._count_bytes()
        if not reads and not drops:
            return NO_ORDERS
        some = [dropped for dropped in drops if len(dropped)]
        return Orders(reads, some[0] if len(some) == 1 else np.unique(np.concatenate([NO_SAMPLES, *some])))

    def _go_through(self, sample: int, time: int, reads: list[Read], drops: list[Int64Array]) -> bool:
        """A request's turn has come: its sample is in memory, or read now. Returns whether that is a miss."""
        cache = self._cache
        if cache is None:
            raise RuntimeError("requests are gone through before there is memory")
        if cache.holds(sample):
            cache.used(sample, time, self._uses)
            self._note(sample)
            return False
        cache.capacity_bytes = self._bytes_for_cache
        was_there = self._arrived_here[sample]
        read = cache.missed(sample, time, self._uses)
        self._note(sample)
        for changed in (read.kept, read.forgotten):
            for each in changed[self._is_due[changed]].tolist():
                self._note(each)
        at = int(np.searchsorted(read.kept, sample))
        is_kept = at < len(read.kept) and read.kept[at] == sample
        wanted = read.kept if is_kept else np.insert(read.kept, at, sample)
        wanted = wanted[~self._here[wanted]]
        if len(wanted):
            self._here[wanted] = True
            parts = reads_of_chunk(read.first, read.end, wanted)
            reads += parts
            self.counts.refills += 1
            self._num_on_their_way += len(parts)
        drops.append(self._gone(read.forgotten))
        return not was_there and not self._at_hand(read.first, read.end)

    def _gone(self, samples: Int64Array) -> Int64Array:
        """Those of these samples in memory that nothing wants there any more. What is still on its way is judged when
        it arrives: it may be wanted again by then."""
        here = samples[self._arrived_here[samples]]
        found = here[~(self._held(here) | self._is_due[here])]
        self._here[found] = self._arrived_here[found] = False
        return found

    def _leaves(self, sample: int) -> None:
        """Fact: a request for the sample was answered."""
        if sample in self._due:
            self._due.remove(sample)
            self._is_due[sample] = False
            self._note(sample)
        self._unless_wanted_forget(sample)

    def _unless_wanted_forget(self, sample: int) -> None:
        if self._arrived_here[sample] and not self._is_wanted(sample):
            self._here[sample] = self._arrived_here[sample] = False

    def _note(self, sample: int) -> None:
        """Whether a sample stays for its request alone may have changed."""
        if sample in self._due and not self._holds(sample):
            if sample not in self._only_due:
                self._only_due.add(sample)
                self._due_bytes += int(self._lengths[sample])
        elif sample in self._only_due:
            self._only_due.remove(sample)
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

    def _held(self, samples: Int64Array | slice) -> NDArray[np.bool_]:
        return np.zeros_like(self._here[samples]) if self._cache is None else self._cache.held(samples)

    def _count_bytes(self) -> None:
        self.held_bytes = self._due_bytes + (0 if self._cache is None else self._cache.held_bytes)


class _UsesOfShare:
    """When are the samples of a share used, in this epoch and in the next? Nothing is stored: orders are looked up.

    :param members: ``(samples,)`` those that this epoch asks for; None: all.
    """

    def __init__(
        self, traces: Traces, next_traces: Traces | None, first: int, end: int, members: NDArray[np.bool_] | None
    ) -> None:
        self.num_ranks = traces.num_ranks
        self._traces, self._next_traces = traces, next_traces
        self._first = first
        self._members = members
        self.was_through = np.zeros(end - first, dtype=bool)
        """Samples whose request of this epoch has had its turn; repeats are not meant."""
        self.made_early: Counter[int] = Counter()
        """How many repeats of a sample were made before their turn; less than 0: so many have had it and were not."""
        self.turn = 0
        """The time of the request whose turn it is."""
        self._next_members = None if next_traces is None else next_traces.members(first, end)
        self.next_start = self.known_until = self.num_ranks * traces.longest
        """When the next epoch begins."""
        self.goes_on = next_traces is not None
        if next_traces is not None:
            self.known_until += next_traces.num_ranks * next_traces.longest

    def times_of(self, samples: Int64Array) -> Int64Array:
        """When each sample, ``(n,)``, that this epoch asks for is asked for."""
        ranks, positions = self._traces.position_of(samples + self._first)
        return positions * self.num_ranks + ranks

    def after(self, first: int, end: int, time: int) -> tuple[Int64Array, Int64Array]:
        samples = np.arange(first, end, dtype=np.int64)
        left = ~self.was_through[first:end]
        this = samples[left if self._members is None else left & self._members[first:end]]
        repeats_at, repeats = self._not_made(*self._repeats(self._traces, first, end))
        times = np.concatenate([self.times_of(this), repeats_at])
        # A rank that asks for a batch is ahead of others: what they have yet to ask for comes now.
        times[(times >= self.turn) & (times < time)] = time + 1
        all_times, all_samples = [times], [this, repeats]
        if self._next_traces is not None:
            members = samples if self._next_members is None else samples[self._next_members[first:end]]
            ranks, positions = self._next_traces.position_of(members + self._first)
            repeats_at, repeats = self._repeats(self._next_traces, first, end)
            all_times += [
                self.next_start + positions * self._next_traces.num_ranks + ranks,
                self.next_start + repeats_at,
            ]
            all_samples += [members, repeats]
        found, of_samples = np.concatenate(all_times), np.concatenate(all_samples)
        known = (found > time) & (found < self.known_until)
        found, of_samples = found[known], of_samples[known]
        order = np.argsort(found, kind="stable")
        return found[order], of_samples[order]

    def _repeats(self, traces: Traces, first: int, end: int) -> tuple[Int64Array, Int64Array]:
        """``(times, samples)`` of an epoch, in any order."""
        samples, ranks, positions = traces.repeats_of(self._first + first, self._first + end)
        return positions * traces.num_ranks + ranks, samples - self._first

    def _not_made(self, times: Int64Array, samples: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Without repeats that were made before their turn: a use that is over would have memory keep its sample for
        ever. Which of a sample's repeats were made is not said; the first ones are taken for them."""
        left = np.ones(len(times), dtype=bool)
        for sample in set(samples.tolist()):
            if (num_made := self.made_early[sample]) > 0:
                to_come = np.flatnonzero((samples == sample) & (times >= self.turn))
                left[to_come[np.argsort(times[to_come])][:num_made]] = False
        return times[left], samples[left]


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
