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

from refill_service.cache_core.policies.drain_within_classes import DrainWithinClasses
from refill_service.cache_core.policies.interface import (
    NO_ORDERS,
    NONE_AHEAD,
    Ahead,
    EpochBegan,
    Orders,
    Policy,
    PolicyKind,
    Read,
    pieces,
)
from refill_service.cache_core.prefetch_check import UpcomingRequests
from refill_service.cache_core.sample_mapping import Int64Array

__all__ = ["KIND", "DrainPolicy", "default_chunk_size"]

_SPREAD_SAMPLES = 64
"""With nothing in memory, requests are promised samples of so many that come next and are not promised yet."""

_SMALLEST_DEFAULT, _LARGEST_DEFAULT = 8, 64
_WORTH_A_REQUEST_BYTES = 512 << 10
"""At 100 MB/s a transfer of 5 ms: a request's latency of some 25 ms is hidden by a handful of them in flight."""

_ENOUGH_CHUNKS = 2048
"""Of a dataset: a tenth of them in memory shuffles well, see docs/TRAINING_QUALITY.md."""

_LARGE_CHUNK_BYTES = 16 << 20
"""More than this takes memory and gains nothing."""


class DrainPolicy(Policy):
    """One owner's share of one epoch, without waste.

    Samples in memory and on their way stay within the memory that there is. Only when nothing at all is in memory or on
    its way is a chunk read that does not fit.

    :param refill_below: an abstract chunk is refilled when it holds at most this part of K samples.
    """

    def __init__(self, began: EpochBegan, *, refill_below: float = 0.5) -> None:
        super().__init__(began)
        mapping = began.mapping
        self._capacity_bytes = 0
        self._to_start = list(range(mapping.num_abstract_chunks))
        """Abstract chunks that there was no room for yet to begin the epoch with; the next one last."""
        self._lengths_view = np.ascontiguousarray(began.lengths, dtype=np.int64).data
        self._key = began.key
        self._random = random.Random(began.key)
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
        """Samples whose bytes did not come with their chunk's: the shell says why to the next who asks."""
        self._left_of: dict[int, Int64Array] = {}
        """Samples that no request was promised of chunks whose read failed; counted as held."""
        self._given_back: dict[int, Int64Array] = {}
        """Samples of chunks that gave their memory back, and are to be read again."""

    def memory_changed(self, capacity_bytes: int) -> Orders:
        """What is in memory stays, should it be less. Else fill every abstract chunk that never was, as far as there is
        room."""
        self._capacity_bytes = capacity_bytes
        if not self._to_start:
            return NO_ORDERS
        reads: list[Read] = []
        while self._to_start:
            ordered = self._refill_if_low(self._to_start[-1])
            if not ordered and self._needs_refill(self._to_start[-1]):
                break  # no room
            self._to_start.pop()
            reads += ordered
        return Orders(reads)

    def gives_back(self, wanted_bytes: int) -> Orders:
        """Abstract chunks at random, whole: so a chunk is read again by one GET."""
        dropped: list[Int64Array] = []
        while wanted_bytes > 0 and self._filled:
            abstract_chunk = self._filled.pick(self._random)
            samples = np.array(sorted(self._ready[abstract_chunk]), dtype=np.int64)
            self._ready[abstract_chunk] = []
            self._num_ready[abstract_chunk] = 0
            self._filled.remove(abstract_chunk)
            num_bytes = int(self._lengths[samples].sum())
            wanted_bytes -= num_bytes
            self.held_bytes -= num_bytes
            self._ready_bytes -= num_bytes
            self.given_back_bytes += num_bytes
            chunks = np.searchsorted(self._starts, samples, side="right") - 1
            for chunk in np.unique(chunks).tolist():
                self._given_back[chunk] = samples[chunks == chunk]
                self._unread_of(abstract_chunk).append(chunk)
            if abstract_chunk not in self._with_unread:
                self._with_unread.add(abstract_chunk)
            self._to_start.append(abstract_chunk)
            dropped.append(samples)
        return Orders(drops=np.concatenate(dropped)) if dropped else NO_ORDERS

    @property
    def nothing_left_to_read(self) -> bool:
        return not self._with_unread

    @property
    def _reserve_bytes(self) -> int:
        """What should stay in memory, so that samples of a chunk are spread. Nothing once all is on its way.

        Half, as is the level at which abstract chunks are refilled: with a store that keeps up it is always there.
        """
        return 0 if self.nothing_left_to_read else min(self._capacity_bytes, self._given_bytes) // 2

    def _wait_until_bytes(self) -> int:
        """When what the reserve lacks has come, in whichever chunks: one slow read must not hold up what follows it."""
        missing = self._reserve_bytes - self._ready_bytes
        return self.came_bytes + missing if missing > 0 and self._coming else 0

    def _answer(self, rank: int, asked: Int64Array) -> tuple[Int64Array, Orders]:
        samples, reads = [], []
        for abstract_chunk in (self.mapping.locations(asked) // self.mapping.chunk_size).tolist():
            sample, ordered = self._take_of(abstract_chunk)
            samples.append(sample)
            reads += ordered
        return np.array(samples, dtype=np.int64), Orders(reads)

    def _answer_one(self, rank: int, asked: int) -> tuple[int, Orders]:
        sample, reads = self._take_of(self.mapping.location(asked) // self.mapping.chunk_size)
        return sample, Orders(reads) if reads else NO_ORDERS

    def _take_of(self, abstract_chunk: int) -> tuple[int, list[Read]]:
        if self._damaged:
            return self._pop(self._damaged), []
        if self._ready[abstract_chunk]:
            return self._give(abstract_chunk), self._refill_if_low(abstract_chunk)
        reads = self._refill_if_low(abstract_chunk)
        if self._filled:
            other = self._filled.pick(self._random)
            return self._give(other), reads + self._refill_if_low(other)
        coming = self._pick_coming()
        if coming is None:
            # Nothing is in memory or to come, so nothing can make room: read on, whether or not it fits.
            needed = abstract_chunk if abstract_chunk in self._with_unread else self._with_unread.pick(self._random)
            read = self._refill(needed)
            reads.append(read)
            coming = read.chunk
        self.counts.misses += not self._at_hand(self._starts_view[coming], self._starts_view[coming + 1])
        return self._pop(self._coming[coming]), reads

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

    def _refill_if_low(self, abstract_chunk: int) -> list[Read]:
        if not self._needs_refill(abstract_chunk):
            return []
        chunk = self._unread_of(abstract_chunk)[-1]
        if chunk not in self._left_of:  # whose bytes are counted still
            given_back = self._given_back.get(chunk)
            samples = (
                slice(int(self._starts[chunk]), int(self._starts[chunk + 1])) if given_back is None else given_back
            )
            size = int(self._lengths[samples].sum())
            if self.held_bytes + size > self._capacity_bytes:
                return []
        return [self._refill(abstract_chunk)]

    def _refill(self, abstract_chunk: int) -> Read:
        """Order the next chunk of a group."""
        unread = self._unread_of(abstract_chunk)
        chunk = unread.pop()
        if not unread:
            self._with_unread.remove(abstract_chunk)
        if chunk in self._left_of:
            samples = self._left_of.pop(chunk)
        elif chunk in self._given_back:
            samples = self._given_back.pop(chunk)
            num_bytes = int(self._lengths[samples].sum())
            self.given_back_bytes -= num_bytes
            self.held_bytes += num_bytes
        else:
            samples = self._wanted_of(chunk)
            self.held_bytes += int(self._lengths[samples].sum())
        read = Read(self._starts_view[chunk], self._starts_view[chunk + 1], samples, chunk)
        self._coming[chunk] = samples.tolist()
        self._refilling[abstract_chunk] += 1
        self.counts.refills += 1
        return read

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

    def _arrived(self, read: Read, kept: Int64Array) -> Orders:
        abstract_chunk = self.mapping.abstract_chunk_of(read.chunk)
        samples = self._coming.pop(read.chunk)
        if len(kept) < len(read.samples):
            here = set(kept.tolist())
            self._damaged += [sample for sample in samples if sample not in here]
            samples = [sample for sample in samples if sample in here]
        self._refilling[abstract_chunk] -= 1
        if samples:
            if not self._ready[abstract_chunk]:
                self._filled.add(abstract_chunk)
            self._ready[abstract_chunk] += samples
            num_bytes = sum(self._lengths_view[sample] for sample in samples)
            self._ready_bytes += num_bytes
            self.came_bytes += num_bytes
            self._num_ready[abstract_chunk] += len(samples)
        return NO_ORDERS

    def failed(self, read: Read) -> Orders:
        abstract_chunk = self.mapping.abstract_chunk_of(read.chunk)
        samples = np.array(sorted(self._coming.pop(read.chunk)), dtype=np.int64)
        self._refilling[abstract_chunk] -= 1
        self.came_bytes += int(self._lengths[samples].sum())  # nobody waits for what will not come
        if len(samples):  # they keep their place in memory: another epoch may have been given all that is free
            self._left_of[read.chunk] = samples
            self._unread_of(abstract_chunk).append(read.chunk)
            if abstract_chunk not in self._with_unread:
                self._with_unread.add(abstract_chunk)
        return NO_ORDERS

    def _choose_ahead(
        self, rank: int, upcoming: UpcomingRequests, asked: Int64Array, ahead_from: int, room: int, started_below: int
    ) -> Ahead:
        """No conflicts: a rank can hold any number of samples of an abstract chunk. Opportunistic all the same."""
        room = min(room, self._ready_bytes - self._reserve_bytes)
        if room <= 0:
            return NONE_AHEAD
        positions, wanted, locations = upcoming.after(ahead_from - 1, self._window)
        sent: list[tuple[int, int]] = []
        reads: list[Read] = []
        for piece in pieces(len(positions)):
            abstract_chunks = locations[piece] // self.mapping.chunk_size
            able = np.flatnonzero((self._num_ready[abstract_chunks] > 0) & (self._assigned[wanted[piece]] < 0))
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
                self._assigned_view[int(wanted[piece][place])] = sample
                reads += self._refill_if_low(abstract_chunk)
            if room <= 0:
                break
        if not sent:
            return NONE_AHEAD
        columns = np.array(sent, dtype=np.int64)
        return Ahead(columns[:, 0], columns[:, 1], Orders(reads))

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


def default_chunk_size(num_samples: int, sample_bytes: float, largest_blob: int, by_class: bool) -> int:
    """Small chunks spread samples: the smallest power of two from 8 to 64 whose chunks are worth a request of their
    own; fewer than that where chunks would be very large, or so few that memory holds only a handful. 8 at most where
    the samples of a chunk are of one class (docs/TRAINING_QUALITY.md)."""
    chunk_size = _SMALLEST_DEFAULT if by_class else _LARGEST_DEFAULT
    while chunk_size > _SMALLEST_DEFAULT and (
        chunk_size // 2 * sample_bytes >= _WORTH_A_REQUEST_BYTES or num_samples // chunk_size < _ENOUGH_CHUNKS
    ):
        chunk_size //= 2
    while chunk_size > 1 and chunk_size * sample_bytes > _LARGE_CHUNK_BYTES:
        chunk_size //= 2
    return min(chunk_size, largest_blob)


def _new(began: EpochBegan) -> Policy:
    share = began.mapping.share
    classes = began.traces.classes(share.first_sample, share.end_sample)
    return DrainPolicy(began) if classes is None else DrainWithinClasses(began, classes)


KIND = PolicyKind(
    "drain",
    _new,
    default_chunk_size=default_chunk_size,
    # Whatever comes first answers.
    first_batch_gets=lambda asked, chunk_size, abstract_chunks: -(-asked // chunk_size),
    analysed_chunk_sizes=(4, 8, 16, 32, 64, 128),
)
