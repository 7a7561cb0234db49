"""Policy ``redox``: answer from the slot that a request is bound to (Redox Algorithms 1-6, Brand 3.3 and 3.4).

Its memory follows the local access protocol: take, self-invalidation, refill, never evict (Redox Algorithms 1-3). It
holds state of one byte for each sample of the share and eight for each slot; bytes of samples are elsewhere.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

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
    reads_of_chunk,
)
from refill_service.cache_core.prefetch_check import HeldByRank, UpcomingRequests, first_of_each
from refill_service.cache_core.sample_mapping import AbstractMapping, Int64Array

_MOST_REFILLS = 1 << 8
"""In one piece, while a pod does nothing else: some 20 us each with the read that begins."""
_MOST_ANSWERS = 1 << 12
"""In one piece."""
EMPTY = 0
"""In a slot that is invalid. Others have the complement of a sample, ``~sample``: so all begin as zeros, whose memory
comes when it is touched. To fill it takes long where slots are many, and others wait for it."""


class RedoxPolicy(Policy):
    """One owner's share of one epoch, by the papers' slot rule. Its slots are its limit: nothing is ever evicted.

    Only where each chunk has slots of its own, as in the order of the dataset, there may be more slots than memory.
    Then chunks are used up one after another, unless a rank falls far behind the others: what came first makes room,
    and who was to get it has it read alone.

    Its setting ``refill`` is ``best`` or ``random``: which chunk of a group refills.
    """

    def __init__(self, began: EpochBegan) -> None:
        super().__init__(began)
        mapping = began.mapping
        choose = REFILL_CHOICES[began.settings["refill"]]
        self.memory = AbstractMemory(mapping, choose, random.Random(began.key), self._members)
        self.untouched.append(self.memory.slots)
        self._held: dict[int, HeldByRank] = {}
        self._share_bytes = began.share_bytes if mapping.group_size == 1 else 0
        self._memory_bytes: int | None = None
        """None: slots are the limit."""
        self._here: dict[int, int] = {}
        """Bytes of the samples in slots, those that came first first; kept only where memory is the limit."""
        self._here_bytes = 0

    def memory_changed(self, capacity_bytes: int) -> Orders:
        self._memory_bytes = capacity_bytes if self._share_bytes > capacity_bytes else None
        return NO_ORDERS

    def in_one_piece(self, asked: Int64Array) -> int:
        asked = asked[:_MOST_ANSWERS]
        empty = np.flatnonzero(self.memory.slots[self.mapping.locations(asked)] == EMPTY)
        return len(asked) if len(empty) <= _MOST_REFILLS else int(empty[_MOST_REFILLS])

    def _answer(self, rank: int, asked: Int64Array) -> tuple[Int64Array, Orders]:
        """What memory can answer is answered first, then the others in their order, each with its refill: so the
        refills of a batch find as many vacant slots as they can."""
        locations = self.mapping.locations(asked)
        samples = self.memory.take_valid(locations)
        reads: list[Read] = []
        for i in np.flatnonzero(samples < 0).tolist():
            samples[i], read = self.memory.take_one(int(locations[i]))
            if read is not None:
                self._ordered(read)
                reads += reads_of_chunk(read.first, read.end, read.samples, read.chunk)
        if self._here:
            self._gone(samples)
        return samples, Orders(reads)

    def _ordered(self, read: Read) -> None:
        self.counts.misses += not self._at_hand(read.first, read.end)
        self.counts.refills += 1

    def _choose_ahead(
        self, rank: int, upcoming: UpcomingRequests, asked: Int64Array, ahead_from: int, room: int, started_below: int
    ) -> Ahead:
        held = self._held.get(rank)
        if held is None:
            held = self._held[rank] = HeldByRank(len(self.memory.slots))
        held.started_below(started_below)
        if room <= 0:
            return NONE_AHEAD
        answered = self.mapping.locations(asked)
        positions, wanted, locations = upcoming.after(ahead_from - 1, self._window)
        sent_positions, sent_samples = [NONE_AHEAD.positions], [NONE_AHEAD.samples]
        with held.also(answered):
            # Room is mostly short, so look at the window piece by piece and stop when it is used up.
            for piece in pieces(len(positions)):
                chosen, samples, room = self._choose_of_piece(held, wanted[piece], locations[piece], room)
                held.sent(positions[piece][chosen], locations[piece][chosen])
                sent_positions.append(positions[piece][chosen])
                sent_samples.append(samples)
                if room <= 0:
                    break
        return Ahead(np.concatenate(sent_positions), np.concatenate(sent_samples))

    def _choose_of_piece(
        self, held: HeldByRank, asked: Int64Array, locations: Int64Array, room: int
    ) -> tuple[NDArray[np.intp], Int64Array, int]:
        """Take what can be sent of one piece of a window: (indices into the piece, samples, room left)."""
        able = self.memory.resident[locations]
        able &= ~held.occupied[locations]
        chosen = np.flatnonzero(able)
        chosen = chosen[(self.memory.slots[locations[chosen]] != EMPTY) & (self._assigned[asked[chosen]] == 0)]
        chosen = chosen[first_of_each(locations[chosen])]
        samples = ~self.memory.slots[locations[chosen]]
        used = np.cumsum(self._lengths[samples])
        fitting = int(np.searchsorted(used, room, side="right"))
        # What does not fit ends the window: a later, smaller sample must not overtake it for ever.
        room = 0 if fitting < len(chosen) else room - (int(used[-1]) if fitting else 0)
        chosen, samples = chosen[:fitting], samples[:fitting]
        self.memory.slots[locations[chosen]] = EMPTY
        self._assigned[asked[chosen]] = samples + 1
        self._gone(samples)
        return chosen, samples, room

    def _arrived(self, read: Read, kept: Int64Array) -> Orders:
        in_slots = self.memory.arrived(read, kept)
        if self._memory_bytes is None:
            return NO_ORDERS
        return Orders((), self._evicted(kept[in_slots], self._memory_bytes))

    def _evicted(self, came: Int64Array, memory_bytes: int) -> Int64Array:
        """What makes room for samples that came into their slots."""
        sizes = self._lengths[came].tolist()
        self._here.update(zip(came.tolist(), sizes, strict=True))
        self._here_bytes += sum(sizes)
        evicted = []
        while self._here_bytes > memory_bytes:
            sample = next(iter(self._here))
            self._here_bytes -= self._here.pop(sample)
            evicted.append(sample)
        samples = np.array(evicted, dtype=np.int64)
        self.memory.evicted(self.mapping.locations(samples))
        return samples

    def _gone(self, samples: Int64Array) -> None:
        if self._here:
            self._here_bytes -= sum(self._here.pop(sample, 0) for sample in samples.tolist())

    def failed(self, read: Read) -> Orders:
        self.memory.failed(read)
        return NO_ORDERS


def _first_batch_gets(asked: int, chunk_size: int, abstract_chunks: float) -> int:
    """A slot answers only what is bound to it, so that a chunk is read for every abstract chunk that the requests
    touch: of M, 1 - (1 - 1/M)**asked are expected to be."""
    return max(1, round(abstract_chunks * -math.expm1(asked * math.log1p(-1 / max(abstract_chunks, 1 + 1e-9)))))


KIND = PolicyKind(
    "redox",
    RedoxPolicy,
    # Re-reads spread samples, so that chunks can be as large as the papers'.
    default_chunk_size=lambda num_samples, sample_bytes, largest_blob, by_class: min(64, largest_blob),
    first_batch_gets=_first_batch_gets,
    analysed_chunk_sizes=(64,),
)


RefillChoice = Callable[[NDArray[np.bool_], int, random.Random], int]
"""``(fillable, slot, generator) -> row``.

``fillable``, shape ``(chunks of the group, K)``, is true where a chunk's sample is unconsumed and its slot vacant.
The row chosen is fillable at the wanted ``slot``; -1 when no chunk is.
"""


def choose_best(fillable: NDArray[np.bool_], slot: int, generator: random.Random) -> int:
    """The chunk that fills most slots, ties at random."""
    able = fillable[:, slot].nonzero()[0]
    if len(able) < 2:
        return able.item() if len(able) else -1
    filled = fillable.sum(axis=1, dtype=np.int32)[able]
    best = able[filled == filled.max()]
    return int(best[0] if len(best) == 1 else best[generator.randrange(len(best))])


def choose_random(fillable: NDArray[np.bool_], slot: int, generator: random.Random) -> int:
    """Any chunk that can answer the wanted slot."""
    able = fillable[:, slot].nonzero()[0]
    return int(able[generator.randrange(len(able))]) if len(able) else -1


REFILL_CHOICES: dict[str, RefillChoice] = {"best": choose_best, "random": choose_random}


class AbstractMemory:
    """The abstract chunks of one owner.

    A sample is *consumed* from the moment that it fills a slot: it will be delivered from there (Redox 3.3).
    A slot may be filled by an order whose bytes are still on their way; ``resident`` says when they are here.

    :param members: which local samples the epoch asks for, ``(num_samples,)``; None for all.
    """

    def __init__(
        self,
        mapping: AbstractMapping,
        choose: RefillChoice,
        generator: random.Random,
        members: NDArray[np.bool_] | None = None,
    ) -> None:
        share, size = mapping.share, mapping.chunk_size
        self.mapping = mapping
        self._choose = choose
        self._generator = generator
        self._starts = share.local_starts
        self._starts_view = self._starts.data
        self._consumed = np.zeros((share.num_chunks, size), dtype=bool)
        # Slots past the end of a short chunk, as a blob may end with, hold nothing, ever: consumed from the start.
        short = share.last_of_blobs
        self._consumed[short] = np.arange(size) >= (self._starts[short + 1] - self._starts[short])[:, None]
        if members is not None:
            self._consumed[~self._consumed] = ~members
        self.slots = np.zeros(mapping.num_abstract_chunks * size, dtype=np.int64)
        """``(M * K,)`` the complement of the local sample in each slot, ``EMPTY`` where the slot is invalid."""
        self.resident = np.zeros(mapping.num_abstract_chunks * size, dtype=bool)
        """``(M * K,)`` whether the bytes of the slot's sample have arrived."""
        # Indexing a memoryview costs a third of indexing an array; both see the same memory.
        self._slots = self.slots.data

    def take_one(self, location: int) -> tuple[int, Read | None]:
        """The sample that answers a request for ``location``, and the read of the refill that this needs, if any."""
        refill = self._refill(location) if self._slots[location] == EMPTY else None
        sample = ~self._slots[location]
        self._slots[location] = EMPTY
        return sample, refill

    def take_valid(self, locations: Int64Array) -> Int64Array:
        """Samples of ``locations``, -1 where a slot is invalid or was taken earlier in the same call."""
        samples = ~self.slots[locations]
        # The first to ask for a location gets it: write the order in reverse, so that the first one's stays.
        self.slots[locations[::-1]] = np.arange(len(locations) - 1, -1, -1)
        first = self.slots[locations] == np.arange(len(locations))
        self.slots[locations] = EMPTY
        return np.where(first, samples, -1)

    def _refill(self, location: int) -> Read:
        size = self.mapping.chunk_size
        abstract_chunk, slot = divmod(location, size)
        group = self.mapping.group(abstract_chunk)
        slots = slice(abstract_chunk * size, abstract_chunk * size + size)
        consumed = self._consumed[group]
        fillable = ~consumed & (self.slots[slots] == EMPTY)
        row = self._choose(fillable, slot, self._generator)
        if row < 0:
            raise RuntimeError(
                f"abstract chunk {abstract_chunk} slot {slot}: asked for more often than its group has samples"
            )
        chunk = group.start + row * (group.step or 1)
        filled = fillable[row].nonzero()[0]
        samples = filled + self._starts[chunk]
        locations = filled + slots.start
        consumed[row, filled] = True
        self.slots[locations] = ~samples
        self.resident[locations] = False
        first, end = self._starts_view[chunk], self._starts_view[chunk + 1]
        return Read(first, end, samples, chunk)

    def arrived(self, read: Read, kept: Int64Array) -> NDArray[np.bool_]:
        """Fact: the bytes of a refill are in memory; those of ``kept`` are right. Returns which of them are in their
        slots now; the others were promised already."""
        locations = self._locations(read.chunk, kept)
        # A slot may have been taken meanwhile, and filled again by a refill that is still under way.
        still_there: NDArray[np.bool_] = self.slots[locations] == ~kept
        self.resident[locations[still_there]] = True
        return still_there

    def evicted(self, locations: Int64Array) -> None:
        """Fact: the bytes of what lies in these slots are gone. They keep their samples, for who asks."""
        self.resident[locations] = False

    def failed(self, read: Read) -> None:
        """Fact: the bytes will not come. Samples still in their slots are unconsumed again.

        The others are assigned to requests already and stay so: who asks again gets the same sample.
        """
        locations = self._locations(read.chunk, read.samples)
        waiting = self.slots[locations] == ~read.samples
        self.slots[locations[waiting]] = EMPTY
        row = self._consumed[read.chunk]
        row[(read.samples - self._starts_view[read.chunk])[waiting]] = False

    def _locations(self, chunk: int, samples: Int64Array) -> Int64Array:
        """Of samples of one chunk."""
        start = self.mapping.abstract_chunk_of(chunk) * self.mapping.chunk_size
        return samples + (start - self._starts_view[chunk])
