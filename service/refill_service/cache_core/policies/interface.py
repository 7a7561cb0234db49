"""What does a policy get to know, and what does it decide, for one owner's share of one epoch?

Facts come in as calls: the epoch begins (the constructor, with :class:`EpochBegan`), memory changed, requests came,
bytes arrived or will not, losses were scored, the next epoch opens (``close``). Decisions go out as what these return:
:class:`Answers` and :class:`Ahead` say which samples leave, :class:`Orders` what to read, what to keep of it and what
to drop. The shell (``owner_machine.py``, ``jobs/``) carries them out; it knows no policy by name.

Requests are named by the sample that they *ask* for: within an epoch each is asked for once, so the table asked ->
assigned is the whole memory of who got what, and asking again gives the same answer. :class:`Policy` keeps that table
and the counts; which sample answers, what is read and what stays is in a file for each policy, and ``registry.py``
lists them. All sample ids here are *local*: they count from the start of the share.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from refill_service.cache_core.epoch_order import Traces
from refill_service.cache_core.prefetch_check import UpcomingRequests
from refill_service.cache_core.sample_mapping import AbstractMapping, Int64Array

_FIRST_PIECE = 256

_PAGE_BYTES = 1 << 12
_TOUCHED_AT_ONCE = 1 << 10
"""Pages."""
_MOST_OF_READ = 1 << 11
"""Samples: what comes is taken in read by read, and a pod does nothing else meanwhile."""

NO_SAMPLES: Int64Array = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False, slots=True)
class Read:
    """An order: read the samples ``first <= sample < end``, which lie side by side in one blob, and keep ``samples``.

    The very same object comes back with the fact of what became of it.
    """

    first: int
    end: int
    samples: Int64Array
    """Those to be kept, ascending."""
    chunk: int = -1
    """Of a policy that reads whole chunks, which one, counted from the start of the share. For the policy alone."""


def reads_of_chunk(first: int, end: int, samples: Int64Array, chunk: int = -1) -> list[Read]:
    """A chunk as reads, neighbours that one GET may read, whether or not something of each is to be kept: one, but for
    a very large chunk. Parameters as of :class:`Read`."""
    if end - first <= _MOST_OF_READ:
        return [Read(first, end, samples, chunk)]
    starts = list(range(first, end, _MOST_OF_READ))
    parts = np.split(samples, np.searchsorted(samples, starts[1:]))
    ends = [*starts[1:], end]
    return [Read(*each, chunk) for each in zip(starts, ends, parts, strict=True)]


class Orders(NamedTuple):
    """What the shell has to do. Drops first: they make room for the reads."""

    reads: Sequence[Read] = ()
    drops: Int64Array = NO_SAMPLES
    """Samples whose bytes are to be forgotten. Who was promised one all the same has it read alone."""


NO_ORDERS = Orders()


class Answers(NamedTuple):
    """The answers to some requests of one rank, in their order."""

    samples: Int64Array
    """``(n,)``."""
    orders: Orders
    """The samples of a read may serve several of the requests."""
    repeated: NDArray[np.bool_] | None = None
    """``(n,)`` which requests had been answered before; None: none of them."""


class Ahead(NamedTuple):
    """What to send ahead: for each ``position`` of the rank, the ``sample`` that answers it. They leave memory."""

    positions: Int64Array
    samples: Int64Array
    orders: Orders = NO_ORDERS
    """What follows from what left memory."""


NONE_AHEAD = Ahead(NO_SAMPLES, NO_SAMPLES)


class Carried(NamedTuple):
    """What an epoch leaves to the next one of the same owner."""

    samples: Int64Array = NO_SAMPLES
    """Whose bytes are in memory and are the next epoch's from now on."""
    state: Any = None
    """What the policy wants to go on with: scores, prices, plans. The shell hands it on and does not look at it."""


NOTHING_CARRIED = Carried()


@dataclass(frozen=True, eq=False)
class EpochBegan:
    """Fact: an owner begins an epoch. There is no memory for it yet."""

    mapping: AbstractMapping
    traces: Traces
    lengths: NDArray[np.int64]
    """``(num_samples,)`` bytes of each sample of the share."""
    prefetch_window: int = 0
    """P, how many of a rank's next requests are considered to be sent ahead."""
    key: str = ""
    """Seeds every choice; the same key and the same calls give the same decisions."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The policy's own, all of them."""
    at_hand: Callable[[int, int], bool] = lambda first, end: False
    """Whether samples ``first <= sample < end`` need no store: nobody waits for their read, and that is no miss."""
    carried: Carried = NOTHING_CARRIED
    """What the epoch before left."""
    next_traces: Traces | None = None
    """Of the next epoch, where they are known by now."""
    known_bytes: int | None = None
    """Of all samples, where they were added up before: of millions that takes a while."""

    @property
    def share_bytes(self) -> int:
        return int(self.lengths.sum()) if self.known_bytes is None else self.known_bytes


@dataclass
class EpochCounts:
    """What happened at one owner in one epoch. Bytes are of whole samples. No count ever falls."""

    takes: int = 0
    """Requests answered, each counted once, sent ahead or not."""
    misses: int = 0
    """Takes that had to wait for the store: none of their policy's choices was in memory."""
    repeats_missed: int = 0
    """Repeats that had to wait for it."""
    refills: int = 0
    """Reads ordered, whether the store or the pinned tier has them."""
    sent_ahead: int = 0
    """Takes that were sent ahead of their request."""
    samples_read: int = 0
    samples_filled: int = 0
    bytes_read: int = 0
    bytes_filled: int = 0
    refills_pinned: int = 0
    """Reads that the pinned tier served. What it serves is not read from the store, and not counted as read."""
    bytes_pinned: int = 0
    bytes_shared: int = 0
    """That another job of the same read order has read. They are not counted as read either."""

    @property
    def positions_missed(self) -> int:
        """That had to wait for the store, repeats or not."""
        return self.misses + self.repeats_missed

    @property
    def bytes_wasted(self) -> int:
        return self.bytes_read - self.bytes_filled


class Policy(ABC):
    """One owner's share of one epoch."""

    def __init__(self, began: EpochBegan) -> None:
        share = began.mapping.share
        self.mapping = began.mapping
        self.counts = EpochCounts()
        self.held_bytes = 0
        """Bytes of samples in memory or on their way that no request was promised, of policies that count them."""
        self._traces = began.traces
        self._lengths = began.lengths
        self._window = began.prefetch_window
        self._at_hand = began.at_hand
        self._members = began.traces.members(share.first_sample, share.end_sample)
        """Which samples the epoch asks for; None: all."""
        self.num_requests = share.num_samples if self._members is None else int(np.count_nonzero(self._members))
        narrow = np.int32 if share.num_samples < 2**31 else np.int64
        self._assigned: NDArray[np.signedinteger[Any]] = np.zeros(share.num_samples, dtype=narrow)
        """By request, the sample that answers it + 1; 0: none so far. Memory of zeros comes when it is touched, while
        to fill it takes long where samples are many, and others wait for it."""
        self._assigned_view = self._assigned.data
        self.untouched: list[NDArray[Any]] = [self._assigned]
        """Tables that requests touch all over, and whose memory has yet to come: see :meth:`touching`."""
        self._upcoming: dict[int, UpcomingRequests] = {}

    # Facts.

    def memory_changed(self, capacity_bytes: int) -> Orders:
        """Fact: samples may take so much memory from now on; once before the first request, too."""
        return NO_ORDERS

    def planning(self, asked: Int64Array | None, *, repeats: bool = False) -> Iterator[None]:
        """What is to be found out before these requests, ``(n,)`` and at least one, are told of, or these
        ``repeats``; None: before :meth:`go_on`. A little with each step; between two a pod may do other things, but
        tells of nothing else that is asked for. Who does not go through it waits for all of it then."""
        return iter(())

    def touching(self) -> Iterator[None]:
        """Before the first request: has the memory of large tables come, which takes long where a request touches them
        all over. A little with each step."""
        while self.untouched:
            table = self.untouched.pop()
            step = _PAGE_BYTES // table.itemsize
            for first in range(0, len(table), _TOUCHED_AT_ONCE * step):
                table[first : first + _TOUCHED_AT_ONCE * step : step] |= False
                yield

    def in_one_piece(self, asked: Int64Array) -> int:
        """How many of these requests, ``(n,)``, the first ones, are little work to decide: 1 at least. A pod does
        nothing else meanwhile, and tells of the others as requests of their own."""
        return len(asked)

    def requested(self, rank: int, asked: Int64Array) -> Answers:
        """Fact: a rank asks for ``asked``, ``(n,)``, all different."""
        samples = self._assigned[asked].astype(np.int64) - 1
        repeated = samples >= 0
        new, orders = np.flatnonzero(~repeated), NO_ORDERS
        if len(new):
            samples[new], orders = self._answer(rank, asked[new])
        self._assigned[asked] = samples + 1
        self.counts.takes += len(new)
        return Answers(samples, orders, repeated if len(new) < len(asked) else None)

    def repeated(self, samples: Int64Array) -> Orders:
        """Fact: positions that repeat these, ``(n,)``, ask for them, and get exactly them. Whose bytes are neither in
        memory then nor on their way is read alone. Who waits for bytes takes them when they arrive: they need not
        stay for him."""
        return NO_ORDERS

    def go_on(self) -> Orders:
        """Fact: there is time to decide what is read before it is asked for. Decides a little of it; to be told again
        while :attr:`may_go_on`. Who tells of it later, or never, has samples read later."""
        return NO_ORDERS

    def looking_ahead(self, rank: int, ahead_from: int) -> Iterator[None]:
        """What is to be found out before :meth:`send_ahead`, a little with each step."""
        return self._upcoming_of(rank).reading(ahead_from - 1, self._window) if self._window else iter(())

    def send_ahead(self, rank: int, asked: Int64Array, ahead_from: int, room: int, started_below: int) -> Ahead:
        """Choose what to send with an answer, and answer with it.

        :param asked: of the requests just answered.
        :param ahead_from: the window starts at this position of the rank.
        :param room: bytes that the rank's home pod has reserved for this answer; never exceeded.
        :param started_below: the rank has asked for every position below this one.
        """
        if not self._window:
            return NONE_AHEAD
        ahead = self._choose_ahead(rank, self._upcoming_of(rank), asked, ahead_from, room, started_below)
        self.counts.takes += len(ahead.samples)
        self.counts.sent_ahead += len(ahead.samples)
        return ahead

    def _upcoming_of(self, rank: int) -> UpcomingRequests:
        upcoming = self._upcoming.get(rank)
        if upcoming is None:
            upcoming = self._upcoming[rank] = UpcomingRequests(self._traces, rank, self.mapping)
        return upcoming

    def arrived(self, read: Read, damaged: Int64Array = NO_SAMPLES, *, pinned: bool = False) -> Orders:
        """Fact: the bytes of a read are in memory; they may be sent ahead from now on.

        :param damaged: of its ``samples`` those whose bytes are not right: they are never sent ahead, and who they are
            promised to gets the reason.
        :param pinned: they came from the pinned tier, not from the store.
        """
        # Counted here and not when it was ordered, so that no count ever has to be taken back.
        counts = self.counts
        kept = read.samples if not len(damaged) else np.setdiff1d(read.samples, damaged, assume_unique=True)
        kept_bytes = int(self._lengths[kept].sum())
        if pinned:
            counts.refills_pinned += 1
            counts.bytes_pinned += kept_bytes
        else:
            counts.samples_read += read.end - read.first
            counts.samples_filled += len(kept)
            counts.bytes_read += int(self._lengths[read.first : read.end].sum())
            counts.bytes_filled += kept_bytes
        return self._arrived(read, kept)

    @abstractmethod
    def failed(self, read: Read) -> Orders:
        """Fact: the bytes of a read will not come. What no request was promised yet is unconsumed again."""

    def scored(self, samples: Int64Array, scores: NDArray[np.floating]) -> Orders:
        """Fact: the training gave these samples these scores, ``(n,)``: the higher, the more worth keeping."""
        return NO_ORDERS

    def close(self) -> Carried:
        """Fact: the next epoch opens. What is handed on is this one's no more; it may be asked all the same, by ranks
        that are behind."""
        return NOTHING_CARRIED

    # What a policy decides.

    @abstractmethod
    def _answer(self, rank: int, asked: Int64Array) -> tuple[Int64Array, Orders]:
        """Samples for requests that were never answered before, each once an epoch, and the orders that this needs."""

    def _choose_ahead(
        self, rank: int, upcoming: UpcomingRequests, asked: Int64Array, ahead_from: int, room: int, started_below: int
    ) -> Ahead:
        """See ``send_ahead``. Enters into the table what it sends."""
        return NONE_AHEAD

    @abstractmethod
    def _arrived(self, read: Read, kept: Int64Array) -> Orders:
        """See ``arrived``; ``kept`` are those of the read's samples whose bytes are right."""

    # What the shell wants to know.

    @property
    def may_go_on(self) -> bool:
        """Whether anything more is to be decided that may be read before it is asked for."""
        return False

    @property
    def nothing_left_to_read(self) -> bool:
        """Whether everything was ordered, so that the memory that is freed from now on is for the next epoch."""
        return False

    @property
    def num_answered(self) -> int:
        """Requests that were answered or sent ahead."""
        return self.counts.takes

    @property
    def finished(self) -> bool:
        """Whether every request that this owner can get in the epoch was answered or sent ahead."""
        return self.num_answered >= self.num_requests

    def kept(self) -> Int64Array:
        """Samples in memory that stay there for who asks for them again."""
        return NO_SAMPLES

    def stays(self, samples: Int64Array) -> NDArray[np.bool_] | None:
        """Which of these samples, ``(n,)``, stay in memory when their bytes leave with an answer now; None: none of
        them."""
        return None

    def answered(self) -> tuple[Int64Array, Int64Array]:
        """``(asked, samples)`` of all requests that were answered."""
        asked = np.flatnonzero(self._assigned)
        return asked, self._assigned[asked].astype(np.int64) - 1

    def has_answered(self, asked: Int64Array) -> bool:
        """Whether all of these requests were answered before."""
        return bool((self._assigned[asked] > 0).all())


@dataclass(frozen=True)
class PolicyKind:
    """What else is to be known of a policy: an entry of the registry. Its label and its own settings, which clients
    check, too, are in ``refill.protocol.policies``."""

    name: str
    new: Callable[[EpochBegan], Policy]
    default_chunk_size: Callable[[int, float, int, bool], int]
    """``(samples of the dataset, mean bytes of a sample, samples of the largest blob, whether neighbours share labels)
    -> K`` for a job that names none. Follows from the dataset alone, so that all pods agree; no chunk is larger than
    the largest blob."""
    first_batch_gets: Callable[[int, int, float], int]
    """``(requests, K, abstract chunks) -> GETs`` of one pod before it can answer the first requests of a job."""
    analysed_chunk_sizes: tuple[int, ...]
    """K that ``refill analyze`` tries unless it is given others."""
    keeps_order: bool = False
    """Whether each request gets the very sample that it asks for."""


def pieces(length: int) -> Iterator[slice]:
    """Slices that cover ``range(length)``, each twice as long as the one before."""
    start, size = 0, _FIRST_PIECE
    while start < length:
        yield slice(start, start + size)
        start, size = start + size, 2 * size


_SMALLEST, _LARGEST = 8, 64
_WORTH_A_REQUEST_BYTES = 512 << 10
"""At 100 MB/s a transfer of 5 ms: a request's latency of some 25 ms is hidden by a handful of them in flight."""

_ENOUGH_CHUNKS = 2048
"""Of a dataset: a tenth of them in memory shuffles well, see docs/TRAINING_QUALITY.md."""

_LARGE_CHUNK_BYTES = 16 << 20
"""More than this takes memory and gains nothing."""


def default_chunk_size(num_samples: int, sample_bytes: float, largest_blob: int, by_class: bool) -> int:
    """Small chunks spread samples: the smallest power of two from 8 to 64 whose chunks are worth a request of their
    own; fewer than that where chunks would be very large, or so few that memory holds only a handful. 8 at most where
    the samples of a chunk are of one class (docs/TRAINING_QUALITY.md)."""
    chunk_size = _SMALLEST if by_class else _LARGEST
    while chunk_size > _SMALLEST and (
        chunk_size // 2 * sample_bytes >= _WORTH_A_REQUEST_BYTES or num_samples // chunk_size < _ENOUGH_CHUNKS
    ):
        chunk_size //= 2
    while chunk_size > 1 and chunk_size * sample_bytes > _LARGE_CHUNK_BYTES:
        chunk_size //= 2
    return min(chunk_size, largest_blob)
