"""What does a cache read and keep that must return each sample in the order asked, reads whole chunks, and knows
what comes to the end of the next epoch?

At a miss the whole chunk is read, by one GET, and a plan says which of its samples stay until the chunk's next GET.
Keeping a sample until its next use saves that use a GET of the whole chunk, and costs memory for as long. With a
*price* for memory (GETs for each byte and unit of time), the cheapest plan for one chunk can be told without looking at
the others. Both plans below keep every known use before a planned time, the chunk's next GET. The price rises while
memory is full and falls while there is room. Keeping the samples with the earliest next use, as Belady's rule has it
for single samples, is not best here: memory fills for all chunks at once and runs dry at once; it is ``earliest``, to
compare with.

Plans end where nothing is known any more, so that they leave memory empty where there is much of it. If there is memory
for more than half of the samples, whole chunks are held for good, so many that the others have memory for half of them.

Of plans, ``uses``, ``(m,)`` and ascending, are the times at which samples of the chunk are used after the GET;
``before``, ``(m,)``, the place among them of the same sample's use before, -1 where there is none; ``sizes``, ``(m,)``,
are bytes. If all uses are kept, the sample of each is held for it since the use before, or the time of the GET.
"""

from __future__ import annotations

import heapq
import math
import random
import sys
from collections.abc import Callable, Generator, Iterator, Set
from itertools import pairwise
from typing import Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.random import default_rng  # is imported when it is looked up, in milliseconds
from numpy.typing import NDArray

from refill_service.cache_core.sample_mapping import Int64Array


class Uses(Protocol):
    """When samples are used next, as far as it is known. A *use* is a request for a sample; its *time* counts the
    requests of all ranks in turn: position * ranks + rank."""

    known_until: int
    """Nothing is known of what comes from this time on."""

    @property
    def goes_on(self) -> bool:
        """Whether anything is to come then."""
        ...

    def after(self, first: int, end: int, time: int) -> tuple[Int64Array, Int64Array]:
        """``(times, samples)`` in the order of their times: the known uses after ``time`` of the samples
        ``first <= sample < end``."""
        ...


Plan = Literal["renewal", "rolling"]

_FILL = 0.97
"""Of memory: what the price aims at, so that plans seldom have to be cut."""

_SOON = 2
"""Times as many requests as a chunk has samples: what is used within them belongs together, as where an order follows
chunks. In a random order hardly anything is."""

_FOR_GOOD = 255
"""In place of a number of uses."""

_MOST_USES = 254
"""Of a sample that are counted; after so many it is read again."""


class ChunkRead(NamedTuple):
    """What a cache orders at a miss: read ``first <= sample < end``, one chunk. The sample asked for is used at
    once."""

    first: int
    end: int
    kept: Int64Array
    """Of the chunk, ascending; those in memory before included."""
    forgotten: Int64Array
    """That were in memory."""


class _PlanOfChunk(NamedTuple):
    """What is known of a chunk that is to be read, as arrays for its plan."""

    first: int
    """Of its samples."""
    time: int
    price: float
    """Of memory, then."""
    times: Int64Array
    samples: Int64Array
    before: Int64Array
    sizes: Int64Array
    rolling: RollingPlan


_STEPS = 1 << 5
"""Of work to look up what is known of samples, beside one for each of them."""

_FEW = 1 << 6
"""Samples that are drawn at first where some have to be forgotten."""

_LOOKED_UP = 1 << 13
"""Samples whose uses are looked up in one piece."""

_NEVER = np.iinfo(np.int64).min
"""In place of a next use: not in memory."""

_NEAR = 1 << 11
"""Requests: samples that are used within so many lie together until they are the last ones."""

_FEW_NEAR = 1 << 8
"""Samples that are put in their order at once, where they are the last ones."""


_BLOCK_BITS = 10
"""Of a sample's number within its block."""


class BlockCounts:
    """How many of the samples of each block there are: by that :func:`nth_of` finds one of millions without a look at
    all of them."""

    def __init__(self, num_samples: int) -> None:
        self.in_block = np.zeros((num_samples >> _BLOCK_BITS) + 1, dtype=np.int64)

    def add(self, samples: Int64Array) -> None:
        """Fact: these came, ``(n,)``, all different."""
        self._count(samples, 1)

    def remove(self, samples: Int64Array) -> None:
        """Fact: these have left, ``(n,)``, all different."""
        self._count(samples, -1)

    def _count(self, samples: Int64Array, sign: int) -> None:
        if len(samples) == 1:
            self.in_block[int(samples[0]) >> _BLOCK_BITS] += sign
        elif len(samples):
            blocks = samples >> _BLOCK_BITS
            first = int(blocks.min())
            counts = np.bincount(blocks - first)
            self.in_block[first : first + len(counts)] += sign * counts


def nth_of(in_block: Int64Array, are_there: Callable[[int, int], NDArray[np.bool_]], place: int) -> int:
    """The sample with so many before it.

    :param in_block: as of :class:`BlockCounts`.
    :param are_there: which of the samples ``first <= sample < end`` these counts are of.
    """
    ends = np.cumsum(in_block)
    block = int(np.searchsorted(ends, place, side="right"))
    first = block << _BLOCK_BITS
    there = np.flatnonzero(are_there(first, first + (1 << _BLOCK_BITS)))
    return first + int(there[place - int(ends[block]) + len(there)])


class ClairvoyantCache:
    """Decides which samples of one owner stay in memory, by what the rest of this epoch and the next one ask for.

    :param starts: ``(chunks + 1,)`` the first sample of each chunk, and the end of the last.
    :param lengths: ``(samples,)`` bytes.
    :param key: seeds where a chunk's first plan is cut, and what is forgotten where there is no room.
    :param all_bytes: of all samples, where they were added up before.
    """

    def __init__(
        self,
        starts: Int64Array,
        lengths: Int64Array,
        capacity_bytes: int,
        plan: Plan = "rolling",
        key: str = "",
        all_bytes: int | None = None,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.held_bytes = 0
        self._starts, self._lengths = starts, lengths
        self._all_bytes = int(lengths.sum()) if all_bytes is None else all_bytes
        self._rolling = plan == "rolling"
        self._random = random.Random(key)
        self._uses_left = np.zeros(len(lengths), dtype=np.uint8)
        """Of each sample, the planned uses that it stays for; 0: it is not in memory."""
        self._for_uses, self._for_good = BlockCounts(len(lengths)), BlockCounts(len(lengths))
        """What is in memory, as it stays there."""
        self._staying_bytes = 0
        """Of chunks that were taken in for good."""
        num_chunks = len(starts) - 1
        self._was_read = np.zeros(num_chunks, dtype=bool)
        self._step = 1 / max(1, num_chunks)
        """Of the price, after each GET: over an epoch with one GET a chunk it may change by a factor of e."""
        self._price = _first_price(num_chunks, len(lengths), self._all_bytes, capacity_bytes)
        self._found: _PlanOfChunk | None = None
        """For what is asked for next."""

    def steps(self, sample: int) -> int:
        """As of :class:`ExactCache`: a plan is made where a chunk is read."""
        return 1 if self._uses_left[sample] else _steps_of_chunk(self._starts, sample)

    def holds(self, sample: int) -> bool:
        return bool(self._uses_left[sample])

    def held(self, samples: Int64Array | slice) -> NDArray[np.bool_]:
        """:meth:`holds` of each."""
        return self._uses_left[samples] > 0

    def used(self, sample: int, time: int, uses: Uses) -> bool:
        """Fact: a sample in memory was used. Returns whether it stays: for good, or for a use before the chunk's next
        GET."""
        if self._uses_left[sample] == _FOR_GOOD:
            return True
        self._uses_left[sample] -= 1
        if self._uses_left[sample]:
            return True
        self._for_uses.remove(np.array([sample]))
        self.held_bytes -= int(self._lengths[sample])
        return False

    def forget(self, samples: Int64Array) -> None:
        """Fact: these are not in memory any more, or never came."""
        held = samples[self._uses_left[samples] > 0]
        for_good = held[self._uses_left[held] == _FOR_GOOD]
        for chunk in np.unique(self._chunks_of(for_good)).tolist() if len(for_good) else ():
            first, end = int(self._starts[chunk]), int(self._starts[chunk + 1])
            self._staying_bytes -= int(self._lengths[first:end].sum())
            self._uses_left[first:end] = 1  # a part of it stays for no longer than a use
            self._for_good.remove(np.arange(first, end))
            self._for_uses.add(np.arange(first, end))
        self._for_uses.remove(held)
        self.held_bytes -= int(self._lengths[held].sum())
        self._uses_left[held] = 0

    def epoch_over(self, end: int) -> None:
        """Fact: times count from ``end`` on."""

    def planning(self, sample: int, time: int, uses: Uses) -> Iterator[None]:
        """As of :class:`ExactCache`."""
        if not self._rolling or self.holds(sample):
            return
        _, first, end = _chunk_of(self._starts, sample)
        if self._stays_for_good(first, end):
            return
        plan = yield from self._plan_of(first, end, time, uses)
        while plan.rolling.go_on():
            yield
        plan.rolling.num_kept()
        self._found = plan
        if end - first > _LOOKED_UP:
            yield

    def missed(self, sample: int, time: int, uses: Uses) -> ChunkRead:
        """Fact: a sample that is not in memory is asked for."""
        chunk, first, end = _chunk_of(self._starts, sample)
        before = first + np.flatnonzero(self._uses_left[first:end])
        stays_for_good = self._stays_for_good(first, end)
        self.forget(before)
        if stays_for_good:
            chunk_bytes = int(self._lengths[first:end].sum())
            self._uses_left[first:end] = _FOR_GOOD
            self._for_good.add(np.arange(first, end))
            self._staying_bytes += chunk_bytes
            self.held_bytes += chunk_bytes
            return ChunkRead(first, end, np.arange(first, end, dtype=np.int64), np.empty(0, dtype=np.int64))

        plan, self._found = self._found, None
        if plan is None or (plan.first, plan.time, plan.price) != (first, time, self._price):
            plan = _in_one_piece(self._plan_of(first, end, time, uses))
        times, samples, sizes = plan.times, plan.samples, plan.sizes
        if self._rolling:
            num_kept = plan.rolling.num_kept()
        else:
            ends_at = None if uses.goes_on else uses.known_until
            num_kept = renewal(time, ends_at, times, plan.before, sizes, self._price)
        # A sample takes memory from the first of its kept uses on.
        more_bytes = np.where(plan.before < 0, sizes, 0)
        num_soon = min(num_kept, int(np.searchsorted(times, time + _SOON * (end - first), side="right")))
        if not self._was_read[chunk]:  # else all chunks would be read in step for ever
            self._was_read[chunk] = True
            num_kept = self._random.randint(num_soon, num_kept)
        others = self._make_room(int(more_bytes[:num_soon].sum()))
        num_kept, was_cut = self._as_fits(more_bytes[:num_kept])
        num_uses = np.bincount(samples[:num_kept] - first, minlength=end - first)
        self._uses_left[first:end] = np.minimum(num_uses, _MOST_USES)
        kept = first + np.flatnonzero(num_uses)
        self._for_uses.add(kept)
        self.held_bytes += int(self._lengths[kept].sum())
        fill = (self.held_bytes - self._staying_bytes) / max(1.0, _FILL * (self.capacity_bytes - self._staying_bytes))
        self._price *= math.exp(self._step * (1 if was_cut else min(1.0, fill - 1)))
        gone = before[num_uses[before - first] == 0]
        at = np.searchsorted(others, first)
        return ChunkRead(first, end, kept, np.concatenate([others[:at], gone, others[at:]]))

    def _make_room(self, num_bytes: int) -> Int64Array:
        """Forget samples of other chunks, for what is used soon of one that nothing is in memory of; returns them.
        Otherwise memory that is full of what is used much later would have a chunk read again for each of its samples
        where an order follows chunks."""
        has_room = not num_bytes or num_bytes <= self.capacity_bytes - self.held_bytes
        if has_room or num_bytes > self.capacity_bytes // 2:
            return np.empty(0, dtype=np.int64)

        def may_go(first: int, end: int) -> NDArray[np.bool_]:
            uses_left = self._uses_left[first:end]
            return np.asarray((uses_left > 0) & (uses_left != _FOR_GOOD))

        return self._forget_some(self._for_uses.in_block, may_go, self.held_bytes + num_bytes - self.capacity_bytes)

    def shrink(self, spared: Set[int] = frozenset()) -> Int64Array:
        """Forget what there is no room for since ``capacity_bytes`` became less; returns it. It is read again.

        :param spared: stays, however little room there is.
        """
        stays = np.sort(np.fromiter(spared, np.int64, len(spared)))
        stays = stays[self._uses_left[stays] > 0]

        def may_go(first: int, end: int) -> NDArray[np.bool_]:
            held = self._uses_left[first:end] > 0
            held[stays[slice(*np.searchsorted(stays, (first, end)))] - first] = False
            return held

        staying = BlockCounts(len(self._lengths))
        staying.add(stays)
        in_block = self._for_uses.in_block + self._for_good.in_block - staying.in_block
        return self._forget_some(in_block, may_go, self.held_bytes - self.capacity_bytes)

    def _forget_some(
        self, in_block: Int64Array, may_go: Callable[[int, int], NDArray[np.bool_]], num_bytes: int
    ) -> Int64Array:
        """So many bytes of samples that may go, any of them, or all; returns them, ascending.

        :param in_block: how many may go, as of :class:`BlockCounts`.
        :param may_go: which of the samples ``first <= sample < end``.
        """
        if num_bytes <= 0:
            return np.empty(0, dtype=np.int64)
        num_held = int(in_block.sum())
        left, drawn = num_bytes, list[int]()
        for place in self._random.sample(range(num_held), min(_FEW, num_held)):
            drawn.append(nth_of(in_block, may_go, place))
            left -= int(self._lengths[drawn[-1]])
            if left <= 0:
                forgotten = np.array(sorted(drawn), dtype=np.int64)
                break
        else:  # they are many, so that a look at all is worth it
            held = default_rng(self._random.getrandbits(64)).permutation(np.flatnonzero(may_go(0, len(self._lengths))))
            too_much = np.searchsorted(np.cumsum(self._lengths[held]), num_bytes)
            forgotten = np.sort(held[: int(too_much) + 1])
        self.forget(forgotten)
        return forgotten

    def _chunks_of(self, samples: Int64Array) -> Int64Array:
        return np.searchsorted(self._starts, samples, side="right") - 1

    def _plan_of(self, first: int, end: int, time: int, uses: Uses) -> Generator[None, None, _PlanOfChunk]:
        """In pieces."""
        times, samples = yield from _uses_of_chunk(first, end, time, uses)
        before, sizes = uses_before(samples), self._lengths[samples]
        if end - first > _LOOKED_UP:
            yield
        rolling = RollingPlan(time, times, before, sizes, self._price)
        return _PlanOfChunk(first, time, self._price, times, samples, before, sizes, rolling)

    def _stays_for_good(self, first: int, end: int) -> bool:
        """Asked of a chunk that is to be read: whether it is one of those that came first."""
        sizes = self._lengths[first:end]
        chunk_bytes, more_bytes = int(sizes.sum()), int(sizes[self._uses_left[first:end] == 0].sum())
        most = 2 * self.capacity_bytes - self._all_bytes
        return self._staying_bytes + chunk_bytes <= most and self.held_bytes + more_bytes <= self.capacity_bytes

    def _as_fits(self, more_bytes: Int64Array) -> tuple[int, bool]:
        """How many uses there is room for, the earliest first, and whether that cuts the plan.

        :param more_bytes: ``(uses,)`` by which each adds to what is held.
        """
        num_fit = int(np.searchsorted(np.cumsum(more_bytes), self.capacity_bytes - self.held_bytes, side="right"))
        return num_fit, num_fit < len(more_bytes)


class EarliestUseCache:
    """The same, keeping the samples that are used earliest (Belady): a yardstick."""

    def __init__(self, starts: Int64Array, lengths: Int64Array, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.held_bytes = 0
        self._starts, self._lengths = starts, lengths
        self._next_use = np.full(len(lengths), _NEVER)
        """Of each sample in memory, in times of the first epoch."""
        self._began = 0
        """When this epoch did."""
        self._by_use = _ByUse(self._next_use)
        self._found: tuple[int, int, Int64Array, Int64Array] | None = None
        """``(first, time, times, samples)`` for what is asked for next."""

    def steps(self, sample: int) -> int:
        """As of :class:`ExactCache`: each request looks up what comes."""
        return _STEPS + 1 if self.holds(sample) else _steps_of_chunk(self._starts, sample)

    def planning(self, sample: int, time: int, uses: Uses) -> Iterator[None]:
        """As of :class:`ExactCache`."""
        _, first, end = _chunk_of(self._starts, sample)
        if self.holds(sample) or end - first <= _LOOKED_UP:
            return
        times, samples = yield from _uses_of_chunk(first, end, time, uses)
        self._found = first, time, times, samples
        yield

    def holds(self, sample: int) -> bool:
        return bool(self._next_use[sample] != _NEVER)

    def held(self, samples: Int64Array | slice) -> NDArray[np.bool_]:
        """:meth:`holds` of each."""
        return np.asarray(self._next_use[samples] != _NEVER)

    def used(self, sample: int, time: int, uses: Uses) -> bool:
        self.forget(np.array([sample]))
        times, _ = uses.after(sample, sample + 1, time)
        if not len(times) or self.held_bytes + int(self._lengths[sample]) > self.capacity_bytes:
            return False
        self._keep(np.array([sample]), self._began + times[:1])
        return True

    def forget(self, samples: Int64Array) -> None:
        held = samples[self.held(samples)]
        self._next_use[held] = _NEVER
        self.held_bytes -= int(self._lengths[held].sum())

    def epoch_over(self, end: int) -> None:
        """Fact: times count from ``end`` on."""
        self._began += end

    def missed(self, sample: int, time: int, uses: Uses) -> ChunkRead:
        _, first, end = _chunk_of(self._starts, sample)
        found, self._found = self._found, None
        if found is None or found[:2] != (first, time):
            found = (first, time, *_in_one_piece(_uses_of_chunk(first, end, time, uses)))
        times, samples = found[2:]
        was_held = self._next_use[first:end] != _NEVER
        places = np.full(end - first, -1)
        places[samples[::-1] - first] = np.arange(len(samples) - 1, -1, -1)  # what is written last stays
        added = np.zeros(len(samples), dtype=bool)  # in the order of their uses, which makes sorting them quick
        added[places[(places >= 0) & ~was_held]] = True
        self._keep(samples[added], self._began + times[added])
        gone = self.shrink()
        is_new = (gone >= first) & (gone < end)
        is_new[is_new] = ~was_held[gone[is_new] - first]
        return ChunkRead(first, end, first + np.flatnonzero(self._next_use[first:end] != _NEVER), gone[~is_new])

    def _keep(self, samples: Int64Array, next_uses: Int64Array) -> None:
        """None of them is in memory."""
        self._next_use[samples] = next_uses
        self.held_bytes += int(self._lengths[samples].sum())
        self._by_use.add(samples)

    def shrink(self, spared: Set[int] = frozenset()) -> Int64Array:
        """Forget what is used last and there is no room for; returns it.

        :param spared: stays, however little room there is.
        """
        dropped, stay = [np.empty(0, dtype=np.int64)], list[int]()
        while (over_bytes := self.held_bytes - self.capacity_bytes) > 0:
            if not len(last := self._by_use.pop(self._lengths, over_bytes)):
                break
            if spared:
                spares = np.fromiter(map(spared.__contains__, last.tolist()), dtype=bool, count=len(last))
                stay += last[spares].tolist()
                last = last[~spares]
            self.forget(last)
            dropped.append(last)
        self._by_use.add(np.array(stay, dtype=np.int64))
        return np.sort(np.concatenate(dropped))


class _ByUse:
    """Samples in memory by their next uses, the last to be used first. What is outdated stays among them until it comes
    up.

    Uses that are near each other in time lie together, in no order, until they are the last ones: so a chunk of very
    many samples comes and goes in few steps.

    :param next_use: of each sample, as it is now; ``_NEVER`` for one that is not in memory.
    """

    def __init__(self, next_use: Int64Array) -> None:
        self._next_use = next_use
        self._together: dict[int, list[Int64Array]] = {}
        """Samples, by their use in units of ``_NEAR``."""
        self._latest: list[int] = []
        """A heap of the negatives of these units."""
        self._in_order: list[tuple[int, int]] = []
        """A heap of ``(-next use, sample)``: of all in ``_in_order_from`` and later units."""
        self._in_order_from = sys.maxsize

    def add(self, samples: Int64Array) -> None:
        """Fact: these came into memory, or stay there though they were popped."""
        if len(samples) > _FEW_NEAR and self._in_order_from < sys.maxsize:
            in_order, self._in_order, self._in_order_from = self._in_order, [], sys.maxsize
            samples = np.concatenate([samples, np.array([sample for _, sample in in_order], dtype=np.int64)])
            samples = samples[self._next_use[samples] != _NEVER]
        next_uses = self._next_use[samples]
        order = np.argsort(next_uses, kind="stable")
        samples, units = samples[order], next_uses[order] // _NEAR
        starts = np.flatnonzero(np.append(True, units[1:] != units[:-1])).tolist() if len(units) else []
        for start, end in pairwise([*starts, len(units)]):
            unit = int(units[start])
            if unit >= self._in_order_from:
                for sample in samples[start:end].tolist():
                    heapq.heappush(self._in_order, (-int(self._next_use[sample]), sample))
            elif (together := self._together.get(unit)) is not None:
                together.append(samples[start:end])
            else:
                self._together[unit] = [samples[start:end]]
                heapq.heappush(self._latest, -unit)

    def pop(self, lengths: Int64Array, over_bytes: int) -> Int64Array:
        """The sample that is used last, of those used at the same time the smallest, or more of the last ones, as many
        as it takes for so many bytes. None where there is none."""
        while True:
            while self._in_order:
                use, sample = heapq.heappop(self._in_order)
                if self._next_use[sample] == -use:
                    return np.array([sample])
            if not self._latest:
                return np.empty(0, dtype=np.int64)
            samples = self._last_units(lengths, over_bytes)
            if len(samples) and int(lengths[samples].sum()) < over_bytes:
                return samples
            samples = samples[np.argsort(-self._next_use[samples], kind="stable")]
            cut = int(np.searchsorted(np.cumsum(lengths[samples]), over_bytes)) + 1
            rest = samples[cut:]
            self._in_order = list(zip((-self._next_use[rest]).tolist(), rest.tolist(), strict=True))
            if len(samples):
                return samples[:cut]

    def _last_units(self, lengths: Int64Array, over_bytes: int) -> Int64Array:
        """Take out the last unit, or more of the last ones if all of them are less than so many bytes: to look at each
        alone takes long where they are many. Returns what is there of them, ascending."""
        parts, units = list[Int64Array](), list[int]()
        while self._latest:
            unit = -self._latest[0]
            part = np.concatenate(self._together[unit])
            over_bytes -= int(lengths[part].sum())
            if units and over_bytes <= 0:
                break
            parts.append(part)
            units.append(unit)
            heapq.heappop(self._latest)
            del self._together[unit]
        self._in_order_from = units[-1]
        samples = np.concatenate(parts)
        unit_of_each = np.repeat(units, [len(part) for part in parts])
        samples = np.sort(samples[self._next_use[samples] // _NEAR == unit_of_each])
        is_first = np.ones(len(samples), dtype=bool)
        is_first[1:] = samples[1:] != samples[:-1]
        return samples[is_first]


Found = TypeVar("Found")


def _in_one_piece(steps: Generator[None, None, Found]) -> Found:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: Found = end.value
            return found


def _chunk_of(starts: Int64Array, sample: int) -> tuple[int, int, int]:
    """Its number, and its samples, ``first <= sample < end``."""
    chunk = int(np.searchsorted(starts, sample, side="right")) - 1
    return chunk, int(starts[chunk]), int(starts[chunk + 1])


def _uses_of_chunk(first: int, end: int, time: int, uses: Uses) -> Generator[None, None, tuple[Int64Array, Int64Array]]:
    """As of :meth:`Uses.after`, in pieces."""
    times, samples = uses.after(first, min(first + _LOOKED_UP, end), time)
    if end - first > _LOOKED_UP:
        found = [(times, samples)]
        for start in range(first + _LOOKED_UP, end, _LOOKED_UP):
            yield
            found.append(uses.after(start, min(start + _LOOKED_UP, end), time))
        times, samples = map(np.concatenate, zip(*found, strict=True))
        yield
        order = np.argsort(times, kind="stable")
        times, samples = times[order], samples[order]
        yield
    return times, samples


def _steps_of_chunk(starts: Int64Array, sample: int) -> int:
    _, first, end = _chunk_of(starts, sample)
    return _STEPS + end - first


def _first_price(num_chunks: int, num_samples: int, num_bytes: int, capacity_bytes: int) -> float:
    """Such that plans fill memory, about; it is moved from there. In GETs for each byte and unit of time."""
    if not num_samples:
        return 1.0  # of a pod that owns nothing, as there are fewer chunks than pods
    share = min(1.0, capacity_bytes / max(1, num_bytes))
    mean_chunk = num_samples / max(1, num_chunks)
    window = share + math.sqrt(share * share + 2 * share / mean_chunk)
    in_samples = 1 / (num_samples * (window + mean_chunk * window * window / 2)) if window else 1.0
    return in_samples * num_samples / max(1, num_bytes)


_CELLS = 1 << 13
"""Of the table of costs that is made at a time."""
_LEAST_ROWS = 1 << 5
"""Of it, about."""
_FAR = 1 << 8
"""Uses that may be kept from a GET on: beyond, it is first told which can be the next GET of many."""
_MANY = 1 << 6
"""Of these, looked at together."""
_MOST_CELLS = 1 << 17
"""Of work in one piece: 1 to 2 ms."""


def uses_before(samples: Int64Array) -> Int64Array:
    """``(m,)``, ``before`` of uses of these samples, ``(m,)``, in the order of their times."""
    before = np.full(len(samples), -1, dtype=np.int64)
    ids = samples - samples.min(initial=np.iinfo(np.int64).max)
    by_sample = np.argsort(ids.astype(np.uint16) if ids.max(initial=0) < 1 << 16 else ids, kind="stable")  # by radix
    again = samples[by_sample[1:]] == samples[by_sample[:-1]]
    before[by_sample[1:][again]] = by_sample[:-1][again]
    return before


def renewal(
    time: int, ends_at: int | None, uses: Int64Array, before: Int64Array, sizes: Int64Array, price: float
) -> int:
    """How many of the uses to keep, so that the cost for each unit of time until the next GET is least.

    The next GET is at the first use that is not kept.

    :param ends_at: when the run ends, so that all may be kept; None: it goes on beyond what is known. Then the last
        known use is not kept, since nobody can say until when that would save a GET.
    """
    holding = np.concatenate([[0.0], np.cumsum((uses - _held_since(time, uses, before)) * sizes)])
    if ends_at is not None:
        ends = np.append(uses, ends_at)
    elif len(uses):
        ends, holding = uses, holding[:-1]
    else:
        return 0
    return int(np.argmin((1 + price * holding) / np.maximum(1, ends - time)))


class RollingPlan:
    """How many of the uses to keep up to the next GET of the cheapest schedule over all that is known of the chunk.

    A schedule is a set of GETs, each at a use; its cost the GETs and the price of what is held between them. Nothing is
    paid for what comes when nothing is known any more. It is found in pieces, so that who has other things to do can do
    them between two.

    What a use adds to what is held falls with the GET before it. So of an earlier GET the next one is no later than of
    a later GET (Monge; Wilber, *The concave least-weight subsequence problem revisited*, 1988), and no others are
    looked at. Where l uses are kept between two GETs and l is large, that is not all of l for each: the next GETs of
    ``_MANY`` uses in a row lie between those of the first and of the last. O(m l / ``_MANY`` + m ``_MANY``).
    """

    def __init__(self, time: int, uses: Int64Array, before: Int64Array, sizes: Int64Array, price: float) -> None:
        self._uses, self._before, self._sizes, self._price = uses, before, sizes, price
        self._since = _held_since(time, uses, before)
        num_uses = len(uses)
        again = before >= 0
        self._after = np.full(num_uses, num_uses, dtype=np.int64)
        """The place of the same sample's next use; the number of uses where there is none."""
        self._after[before[again]] = np.flatnonzero(again)
        self._cheapest = np.zeros(num_uses + 1)
        """From a GET at each use on, that GET included; the last: nothing is known any more."""
        self._end = num_uses
        """From this use on it is known."""
        self._latest = num_uses
        """The next GET of a use before is not later."""
        self._num_kept: int | None = None

    def go_on(self, most_cells: int = _MOST_CELLS) -> bool:
        """Find a part of it. Returns whether there is more to be found."""
        while self._end and most_cells > 0:
            most_cells -= self._from_near() if self._latest - self._end < _FAR else self._from_far()
        return self._end > 0

    def num_kept(self) -> int:
        """So many of the uses, the first ones. What was not found yet is found first."""
        if self._num_kept is None:
            while self.go_on():
                pass
            costs = self._cheapest.copy()
            costs[1:] += self._price * np.cumsum((self._uses - self._since) * self._sizes)
            self._num_kept = int(np.argmin(costs))
        return self._num_kept

    def _from_near(self) -> int:
        """The cheapest from some more uses on, by the costs of all next GETs of each. Returns the work of it."""
        cheapest, end, latest = self._cheapest, self._end, self._latest
        start = max(0, end - max(1, _CELLS // (latest - end + _LEAST_ROWS)))
        costs = self._price * np.cumsum(self._held(start, end, start, latest), axis=1)
        for each in range(end - 1, start - 1, -1):
            found = cheapest[each + 1 : latest + 1] + costs[each - start, each - start : latest - start]
            best = int(found.argmin())
            cheapest[each], latest = 1 + found[best], each + 1 + best
        self._end, self._latest = start, latest
        return costs.size + (end - start) * _LEAST_ROWS

    def _from_far(self) -> int:
        """The same, if hardly one of them has its next GET among them."""
        cheapest, end, latest = self._cheapest, self._end, self._latest
        start, work = max(0, end - _MANY), 0
        while True:
            from_start = np.cumsum(self._held(start, start + 1, start + 1, latest)[0])
            """To each next GET from the use behind the next one on."""
            work += latest - start
            first = end
            if end - start > 1:
                first += int((cheapest[end : latest + 1] + self._price * from_start[end - start - 2 :]).argmin())
            if end - start == 1 or (end - start) * (latest - first) <= _CELLS:
                break
            start = end - (end - start) // 2

        held = np.empty((end - start, latest - first + 1), dtype=np.int64)
        held[:, 0] = self._held_until(first, start, end, int(from_start[first - start - 2]) if first > start + 1 else 0)
        held[:, 1:] = self._held(start, end, first, latest)
        costs = cheapest[first : latest + 1] + self._price * np.cumsum(held, axis=1)
        found = costs.min(axis=1)

        among = self._price * np.cumsum(self._held(start, end, start, end), axis=1)
        cheapest[start:end] = 1 + found
        latest = first + int(costs[0].argmin())
        if bool(np.triu(cheapest[start + 1 : end] + among[:, :-1] < found[:, None]).any()):
            for each in range(end - 2, start - 1, -1):
                nearest = cheapest[each + 1 : end] + among[each - start, each - start : -1]
                if (best := nearest.min()) < found[each - start]:
                    cheapest[each] = 1 + best
                    latest = each + 1 + int(nearest.argmin()) if each == start else latest
        self._end, self._latest = start, latest
        return work + costs.size + among.size

    def _held(self, start: int, end: int, first: int, latest: int) -> Int64Array:
        """``(end - start, latest - first)``: with the GET before at use ``start + i``, what use ``first + j`` adds to
        what is held; nothing where it is not behind that."""
        from_each, to_each = self._uses[start:end, None], slice(first, latest)
        held = (self._uses[to_each] - np.maximum(from_each, self._since[to_each])) * self._sizes[to_each]
        if first < end:
            held[np.arange(first, latest) <= np.arange(start, end)[:, None]] = 0
        return held

    def _held_until(self, first: int, start: int, end: int, from_start: int) -> Int64Array:
        """``(end - start,)`` what is held from a GET at each of these uses until one at ``first``, behind them.

        :param from_start: from that at the first one.
        """
        uses, before, sizes = self._uses, self._before, self._sizes
        at, after = np.arange(start, end - 1), self._after[start : end - 1]
        # From a GET to one a use later, what had its use before at the first or before it is held for less long.
        shorter = np.empty(end - start, dtype=np.int64)
        shorter[0] = sizes[start + 1 : first][before[start + 1 : first] < start].sum()
        comes = (after > at + 1) & (after < first)
        shorter[1:] = np.where(comes, sizes[np.where(comes, after, 0)], 0)
        shorter[1:] -= np.where(before[at + 1] < at, sizes[at + 1], 0)
        own = (uses[at + 1] - np.maximum(uses[at], self._since[at + 1])) * sizes[at + 1]
        less = np.cumsum(np.cumsum(shorter)[1:] * (uses[at + 1] - uses[at]) + own)
        return np.concatenate([[from_start], from_start - less])


def _held_since(time: int, uses: Int64Array, before: Int64Array) -> Int64Array:
    return np.where(before < 0, time, uses[before]) if len(uses) else uses
