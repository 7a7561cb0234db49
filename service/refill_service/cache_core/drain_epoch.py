"""Policy ``drain``: answer from any sample of the abstract chunk, and read every byte once.

A request is bound to an abstract chunk, not to a slot of it. The abstract chunk is refilled when it runs low, ahead
of need, with the next unread chunk of its group in the epoch's own order, whole: what is read is kept, what is kept
is delivered. When nothing of an abstract chunk is in memory, another one of the owner answers, so that a slow read
stalls nobody while anything is here; the totals stay right, since in the end each has given all that it read.

What spreads the samples of a chunk over the epoch is that many others lie beside them in memory. Where training is
faster than the store, memory would run empty, and each chunk would be handed out as it comes. So half of memory is kept
as a *reserve*: requests that would take from it are answered at the pace at which chunks arrive. That costs no time but
what it takes to fill the reserve once, since the store is read at full speed meanwhile; and it is filled while the
first batches are answered, at two thirds of their pace.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from refill_service.cache_core.epoch_order import Traces
from refill_service.cache_core.owner_epoch import NONE_AHEAD, Ahead, OwnerEpoch, pieces
from refill_service.cache_core.prefetch_check import UpcomingRequests
from refill_service.cache_core.refill import Refill
from refill_service.cache_core.sample_mapping import AbstractMapping, Int64Array

__all__ = ["DrainEpoch"]

_SPREAD_SAMPLES = 64
"""With nothing in memory, requests are promised samples of so many that come next and are not promised yet."""


class DrainEpoch(OwnerEpoch):
    """One owner's share of one epoch, without waste.

    :param capacity_bytes: what samples in memory and on their way may take together. Only when nothing at all is in
        memory or on its way is a chunk read that does not fit.
    :param refill_below: an abstract chunk is refilled when it holds at most this part of K samples.
    :param key: seeds every choice; the same key and the same calls give the same decisions.
    """

    def __init__(
        self,
        mapping: AbstractMapping,
        traces: Traces,
        lengths: NDArray[np.int64],
        *,
        capacity_bytes: int,
        refill_below: float = 0.5,
        prefetch_window: int = 0,
        key: str = "",
        answered: tuple[Int64Array, Int64Array] | None = None,
    ) -> None:
        super().__init__(mapping, traces, lengths, prefetch_window=prefetch_window, answered=answered)
        self._capacity_bytes = capacity_bytes
        self._to_start = list(range(mapping.num_abstract_chunks))
        """Abstract chunks that there was no room for yet to begin the epoch with; the next one last."""
        self._lengths_view = np.ascontiguousarray(lengths, dtype=np.int64).data
        self._key = key
        self._random = random.Random(key)
        self._random.shuffle(self._to_start)
        self._low = int(mapping.chunk_size * refill_below)
        self._ready: list[list[int]] = [[] for _ in range(mapping.num_abstract_chunks)]
        """Samples in memory, by abstract chunk."""
        self._num_ready = np.zeros(mapping.num_abstract_chunks, dtype=np.int64)
        self._filled = _RandomSet()
        """Abstract chunks with samples in memory."""
        self._unread: list[list[int] | None] = [None] * mapping.num_abstract_chunks
        """Chunks that are left of each group, the next one last; None: all of them, not yet put in order."""
        self._wanted = self._num_wanted() > 0
        """Which chunks hold samples that the epoch asks for."""
        chunks = np.flatnonzero(self._wanted)
        self._with_unread = _RandomSet(np.unique(mapping.abstract_chunks_of(chunks)).tolist())
        """Abstract chunks whose group has chunks left that the epoch asks for."""
        self._coming: dict[int, list[int]] = {}
        """Refills under way, oldest first: chunk -> those of its samples that no request was promised."""
        self._refilling = np.zeros(mapping.num_abstract_chunks, dtype=np.int64)
        """Refills under way for each abstract chunk."""
        self._ready_bytes = 0
        self._given_bytes = 0
        self._num_promised = 0
        """Samples given before they were here."""
        self._damaged: list[int] = []
        """Samples whose bytes did not come with their chunk's: for the next who asks, whom the shell tells why."""
        self._left_of: dict[int, Int64Array] = {}
        """Samples that no request was promised of chunks whose read failed; counted as held."""

    def start(self) -> list[Refill]:
        """Fill every abstract chunk, as far as there is room."""
        refills: list[Refill] = []
        while self._to_start:
            ordered = self._refill_if_low(self._to_start[-1])
            if not ordered and self._needs_refill(self._to_start[-1]):
                break  # no room
            self._to_start.pop()
            refills += ordered
        return refills

    def capacity_changed(self, capacity_bytes: int) -> list[Refill]:
        """Fact: samples may take so much memory from now on. What is in memory stays, should it be less."""
        self._capacity_bytes = capacity_bytes
        return self.start()

    @property
    def nothing_left_to_read(self) -> bool:
        return not self._with_unread

    @property
    def _reserve_bytes(self) -> int:
        """What should stay in memory, so that samples of a chunk are spread. Nothing once all is on its way.

        Half, as is the level at which abstract chunks are refilled: with a store that keeps up it is always there.
        """
        return 0 if self.nothing_left_to_read else min(self._capacity_bytes, self._given_bytes) // 2

    def _answer_after(self) -> int:
        """When what the reserve lacks has come, in whichever chunks: one slow read must not hold up what follows it."""
        missing = self._reserve_bytes - self._ready_bytes
        return self.came_bytes + missing if missing > 0 and self._coming else 0

    def _take_new(self, locations: Int64Array) -> tuple[Int64Array, list[Refill]]:
        samples, refills = [], []
        for abstract_chunk in (locations // self.mapping.chunk_size).tolist():
            sample, ordered = self._take_of(abstract_chunk)
            samples.append(sample)
            refills += ordered
        return np.array(samples, dtype=np.int64), refills

    def _take_new_one(self, location: int) -> tuple[int, list[Refill]]:
        return self._take_of(location // self.mapping.chunk_size)

    def _take_of(self, abstract_chunk: int) -> tuple[int, list[Refill]]:
        if self._damaged:
            return self._pop(self._damaged), []
        if self._ready[abstract_chunk]:
            return self._give(abstract_chunk), self._refill_if_low(abstract_chunk)
        refills = self._refill_if_low(abstract_chunk)
        if self._filled:
            other = self._filled.pick(self._random)
            return self._give(other), refills + self._refill_if_low(other)
        coming = self._pick_coming()
        if coming is None:
            # Nothing is in memory or to come, so nothing can make room: read on, whether or not it fits.
            needed = abstract_chunk if abstract_chunk in self._with_unread else self._with_unread.pick(self._random)
            refill = self._refill(needed)
            refills.append(refill)
            coming = refill.chunk
        self.counts.misses += not self.at_hand(coming)
        return self._pop(self._coming[coming]), refills

    def _pick_coming(self) -> int | None:
        """One of the chunks on their way: not the next one alone, so that it is not handed out whole; but the first
        requests of an epoch need not wait for many."""
        candidates, num_samples = [], 0
        spread_samples = min(_SPREAD_SAMPLES, self._num_promised)
        self._num_promised += 1
        for chunk, samples in self._coming.items():
            if samples:
                candidates.append(chunk)
                num_samples += len(samples)
                if num_samples >= spread_samples:
                    break
        return self._random.choice(candidates) if candidates else None

    def _give(self, abstract_chunk: int) -> int:
        """Take a random sample of an abstract chunk that has one in memory."""
        ready = self._ready[abstract_chunk]
        self._num_ready[abstract_chunk] -= 1
        if len(ready) == 1:
            self._filled.remove(abstract_chunk)
        sample = self._pop(ready)
        self._ready_bytes -= self._lengths_view[sample]
        return sample

    def _pop(self, samples: list[int]) -> int:
        place = int(self._random.random() * len(samples))
        samples[place], samples[-1] = samples[-1], samples[place]
        sample = samples.pop()
        self.held_bytes -= self._lengths_view[sample]
        self._given_bytes += self._lengths_view[sample]
        return sample

    def _needs_refill(self, abstract_chunk: int) -> bool:
        return (
            not self._refilling[abstract_chunk]
            and len(self._ready[abstract_chunk]) <= self._low
            and abstract_chunk in self._with_unread
        )

    def _refill_if_low(self, abstract_chunk: int) -> list[Refill]:
        if not self._needs_refill(abstract_chunk):
            return []
        chunk = self._unread_of(abstract_chunk)[-1]
        if chunk not in self._left_of:  # whose bytes are counted still
            size = int(self._lengths[int(self._starts[chunk]) : int(self._starts[chunk + 1])].sum())
            if self.held_bytes + size > self._capacity_bytes:
                return []
        return [self._refill(abstract_chunk)]

    def _refill(self, abstract_chunk: int) -> Refill:
        """Order the next chunk of a group."""
        unread = self._unread_of(abstract_chunk)
        chunk = unread.pop()
        if not unread:
            self._with_unread.remove(abstract_chunk)
        if chunk in self._left_of:
            samples = self._left_of.pop(chunk)
        else:
            samples = self._wanted_of(chunk)
            self.held_bytes += int(self._lengths[samples].sum())
        refill = Refill(chunk, samples, self.mapping.locations(samples))
        self._coming[chunk] = samples.tolist()
        self._refilling[abstract_chunk] += 1
        self.counts.refills += 1
        return refill

    def _unread_of(self, abstract_chunk: int) -> list[int]:
        unread = self._unread[abstract_chunk]
        if unread is None:
            chunks = range(self.mapping.share.num_chunks)[self.mapping.group(abstract_chunk)]
            unread = [chunk for chunk in chunks if self._wanted[chunk]]
            random.Random(f"{self._key} group {abstract_chunk}").shuffle(unread)
            self._unread[abstract_chunk] = unread
        return unread

    def _num_wanted(self) -> Int64Array:
        """Samples of each chunk that the epoch asks for, and has not had."""
        if self._left is None:
            return np.diff(self._starts)
        upto = np.concatenate([[0], np.cumsum(self._left)])
        return np.asarray(upto[self._starts[1:]] - upto[self._starts[:-1]])

    def _wanted_of(self, chunk: int) -> Int64Array:
        """The samples of a chunk that the epoch asks for, and has not had."""
        samples = np.arange(self._starts[chunk], self._starts[chunk + 1], dtype=np.int64)
        return samples if self._left is None else samples[self._left[samples]]

    def _arrived(self, refill: Refill) -> None:
        abstract_chunk = self._abstract_chunk_of(refill)
        here = set(refill.samples.tolist())
        samples = [sample for sample in self._coming[refill.chunk] if sample in here]
        self._damaged += [sample for sample in self._coming.pop(refill.chunk) if sample not in here]
        self._refilling[abstract_chunk] -= 1
        if samples:
            if not self._ready[abstract_chunk]:
                self._filled.add(abstract_chunk)
            self._ready[abstract_chunk] += samples
            num_bytes = sum(self._lengths_view[sample] for sample in samples)
            self._ready_bytes += num_bytes
            self.came_bytes += num_bytes
            self._num_ready[abstract_chunk] += len(samples)

    def refill_failed(self, refill: Refill) -> None:
        abstract_chunk = self._abstract_chunk_of(refill)
        samples = np.array(sorted(self._coming.pop(refill.chunk)), dtype=np.int64)
        self._refilling[abstract_chunk] -= 1
        self.came_bytes += int(self._lengths[samples].sum())  # nobody waits for what will not come
        if len(samples):  # they keep their place in memory: another epoch may have been given all that is free
            self._left_of[refill.chunk] = samples
            self._unread_of(abstract_chunk).append(refill.chunk)
            if abstract_chunk not in self._with_unread:
                self._with_unread.add(abstract_chunk)

    def _abstract_chunk_of(self, refill: Refill) -> int:
        return int(self.mapping.abstract_chunks_of(np.array([refill.chunk]))[0])

    def _choose_ahead(
        self,
        rank: int,
        upcoming: UpcomingRequests,
        answered: Int64Array,
        ahead_from: int,
        room: int,
        started_below: int,
    ) -> Ahead:
        """No conflicts: a rank can hold any number of samples of an abstract chunk. Opportunistic all the same."""
        room = min(room, self._ready_bytes - self._reserve_bytes)
        if room <= 0:
            return NONE_AHEAD
        positions, asked, locations = upcoming.after(ahead_from - 1, self._window)
        sent: list[tuple[int, int]] = []
        refills: list[Refill] = []
        for piece in pieces(len(positions)):
            abstract_chunks = locations[piece] // self.mapping.chunk_size
            able = np.flatnonzero((self._num_ready[abstract_chunks] > 0) & (self._assigned[asked[piece]] < 0))
            for place in able.tolist():
                abstract_chunk = int(abstract_chunks[place])
                if not self._ready[abstract_chunk]:
                    continue
                sample = self._give(abstract_chunk)
                room -= self._lengths_view[sample]
                if room < 0:
                    self._take_back(abstract_chunk, sample)
                    break
                sent.append((int(positions[piece][place]), sample))
                self._assigned_view[int(asked[piece][place])] = sample
                refills += self._refill_if_low(abstract_chunk)
            if room <= 0:
                break
        if not sent:
            return NONE_AHEAD
        columns = np.array(sent, dtype=np.int64)
        return Ahead(columns[:, 0], columns[:, 1], refills)

    def _take_back(self, abstract_chunk: int, sample: int) -> None:
        if not self._ready[abstract_chunk]:
            self._filled.add(abstract_chunk)
        self._ready[abstract_chunk].append(sample)
        self._num_ready[abstract_chunk] += 1
        self.held_bytes += self._lengths_view[sample]
        self._ready_bytes += self._lengths_view[sample]
        self._given_bytes -= self._lengths_view[sample]


class _RandomSet:
    """A set of integers that a random one can be picked from, all in constant time."""

    def __init__(self, values: Iterable[int] = ()) -> None:
        self._values = list(values)
        self._place = {value: place for place, value in enumerate(self._values)}

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, value: int) -> bool:
        return value in self._place

    def add(self, value: int) -> None:
        self._place[value] = len(self._values)
        self._values.append(value)

    def remove(self, value: int) -> None:
        place, last = self._place.pop(value), self._values.pop()
        if last != value:
            self._values[place] = last
            self._place[last] = place

    def pick(self, generator: random.Random) -> int:
        """Raises RuntimeError when there is none."""
        if not self._values:
            raise RuntimeError("an owner was asked for more samples than its share has")
        return self._values[int(generator.random() * len(self._values))]
