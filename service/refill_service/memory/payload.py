"""What are the bytes of a sample, how many of them does somebody hold, and how do they leave?

How large an answer may be is asked before its bytes are read, as far as they are known then. What has just left is kept
for a while, in case it is asked for again: an answer can be lost, and a home pod can ask for a sample while it is being
sent ahead. The assignment says which sample it must be; here are its bytes, so that no read of its own is needed.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from copy import copy
from itertools import accumulate, chain, repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from refill.errors import MemoryTooSmall, RequestTooLarge
from refill.protocol.wire_format import Int64Array, encode_frame_head

Payload = bytes | memoryview
"""The bytes of a sample: its own, or a view into the buffer that it came with, which it keeps whole."""

Samples = tuple[Int64Array, list[Payload]]
"""``(sample ids, their bytes)`` of some positions."""

_MOVED_AT_ONCE = 1 << 10
"""Samples."""
_JOINED_AT_ONCE = 1 << 12
"""Samples of an answer."""

_PART_FORGOTTEN = 4
"""Of what is kept of samples that have left: an answer that is no more goes as a whole."""


class Damage(bytes):
    """Stands in place of a sample that can't be read: the error, as JSON."""


class Payloads:
    """Bytes by number, such as that of a sample, and how many they are."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._by_sample: dict[int, Payload] = {}
        self._moving: list[Moving] = []
        """What has yet to come from others, or to be moved to others."""

    def __len__(self) -> int:
        return len(self._by_sample)

    def put(self, sample: int, payload: Payload) -> None:
        if self._moving:
            self._moved((sample,))
        self._place(sample, payload)

    def _place(self, sample: int, payload: Payload) -> None:
        self.num_bytes += len(payload) - len(self._by_sample.get(sample, b""))
        self._by_sample[sample] = payload

    def put_all(self, samples: list[int], payloads: list[Payload]) -> None:
        if self._moving:
            self._moved(samples)
        if not self._by_sample.keys().isdisjoint(samples):
            for sample in samples:
                self.pop(sample)
        self._by_sample.update(zip(samples, payloads, strict=True))
        self.num_bytes += sum(map(len, payloads))

    def get(self, sample: int) -> Payload | None:
        if self._moving:
            self._moved((sample,))
        return self._by_sample.get(sample)

    def pop(self, sample: int) -> Payload | None:
        if self._moving:
            self._moved((sample,))
        payload = self._by_sample.pop(sample, None)
        if payload is not None:
            self.num_bytes -= len(payload)
        return payload

    def drop(self, samples: list[int]) -> None:
        """Those of them that are there."""
        if self._moving:
            self._moved(samples)
        found = [payload for payload in map(self._by_sample.pop, samples, repeat(b"")) if payload]
        self.num_bytes -= sum(map(len, found))

    def drop_some(self, count: int) -> None:
        """So many, if there are, whichever. None of them is to be moved."""
        # The last ones: what has left the front of a dict is gone through again each time.
        found = [self._by_sample.popitem()[1] for _ in range(min(count, len(self._by_sample)))]
        self.num_bytes -= sum(map(len, found))

    def taken(self, samples: list[int], stay: NDArray[np.bool_]) -> list[Payload]:
        """The bytes of these, all of which are there. They leave, but for those that are to stay.

        :param stay: ``(n,)``
        """
        if self._moving:
            self._moved(samples)
        by_sample = self._by_sample
        if np.count_nonzero(stay):  # far quicker than any()
            found = [by_sample[sample] for sample in samples]
            for sample, stays in zip(samples, stay.tolist(), strict=True):
                if not stays:
                    self.pop(sample)
            return found
        found = list(map(by_sample.pop, samples))
        self.num_bytes -= sum(map(len, found))
        return found

    def take_over(self, others: Payloads, samples: Int64Array) -> Moving:
        """As many of these samples as the others have are this one's from now on. They may be very many: so each is
        moved when either is asked for it, and the rest by :meth:`Moving.some`, whenever there is time.

        :param samples: different ones.
        """
        moving = Moving(others, self, samples)
        others._moving.append(moving)
        self._moving.append(moving)
        return moving

    def _moved(self, samples: Iterable[int]) -> None:
        """Whatever is to be moved of these, is."""
        for moving in tuple(self._moving):
            moving.move(samples)

    def clear(self) -> None:
        """Forget all of it, but for what is to be moved to others. Its memory is given back a little at a time."""
        left = copy(self)
        for moving in left._moving:
            moving.is_of(left, self)
        self._by_sample, self._moving, self.num_bytes = {}, [], 0
        _in_pieces(left._given_back())

    def _given_back(self) -> Iterator[None]:
        for moving in tuple(self._moving):
            while moving.some():
                yield
        while self._by_sample:
            self.drop_some(_MOVED_AT_ONCE)
            yield


class Moving:
    """What is moved from some payloads to others, a little at a time."""

    def __init__(self, before: Payloads, after: Payloads, samples: Int64Array) -> None:
        self._before, self._after, self._samples = before, after, samples
        self._num_looked_at = 0
        self._left = np.zeros(int(samples.max(initial=-1)) + 1, dtype=bool)
        """By sample, what has yet to be moved."""
        self._left[samples] = True

    def is_of(self, new: Payloads, old: Payloads) -> None:
        """Fact: what it moves is in the new ones in place of the old ones, or comes there."""
        self._before = new if self._before is old else self._before
        self._after = new if self._after is old else self._after

    def some(self) -> bool:
        """Move some of them. Returns whether there may be more."""
        piece = self._samples[self._num_looked_at : self._num_looked_at + _MOVED_AT_ONCE]
        self._num_looked_at += len(piece)
        self.move(piece.tolist())
        if len(piece) == _MOVED_AT_ONCE:
            return True
        for each in (self._before, self._after):
            if self in each._moving:
                each._moving.remove(self)
        return False

    def move(self, samples: Iterable[int]) -> None:
        """Those of these samples that have yet to be moved."""
        left, num_known = self._left.data, len(self._left)
        for sample in samples:
            if sample < num_known and left[sample]:
                left[sample] = False
                if (payload := self._before.pop(sample)) is not None:
                    self._after._place(sample, payload)  # from where it may be moved on


class OutgoingFrame:
    """A frame to be sent, not copied so far: ``head`` holds header and arrays, ``payloads`` the samples as they are."""

    def __init__(self, positions: Int64Array, sample_ids: Int64Array, payloads: Sequence[Payload]) -> None:
        lengths = np.fromiter(map(len, payloads), dtype=np.int64, count=len(payloads))
        num_bytes = int(lengths.sum())
        if Damage in set(map(type, payloads)):
            lengths[[type(payload) is Damage for payload in payloads]] *= -1
        self.head = encode_frame_head(positions, sample_ids, lengths)
        self.payloads = payloads
        self.total_bytes = len(self.head) + num_bytes

    def parts(self) -> list[Payload]:
        return [self.head, *self.payloads]


class AnswerSize:
    """Counts the bytes of one answer, whose parts come from several owners, and refuses it past its limit."""

    def __init__(self, limit_bytes: int, whole: AnswerSize | None = None) -> None:
        self._limit_bytes = limit_bytes
        self._whole = whole
        self._size_bytes = 0

    def part(self) -> AnswerSize:
        """Of it, which may be tried again."""
        return AnswerSize(self._limit_bytes, self)

    def add(self, more_bytes: int) -> None:
        """Fact: so much more will be part of it. Raises :class:`RequestTooLarge` when that is too much."""
        if self._whole is not None:
            self._whole.add(more_bytes)
        self.check(self._size_bytes + more_bytes)
        self._size_bytes += more_bytes

    def forget(self) -> None:
        """Fact: what was added to this part does not come."""
        if self._whole is not None:
            self._whole._size_bytes -= self._size_bytes
        self._size_bytes = 0

    def check(self, size_bytes: int) -> None:
        """Raises :class:`RequestTooLarge` when an answer may not have so many bytes."""
        if size_bytes > self._limit_bytes:
            raise RequestTooLarge(
                f"these samples take about {size_bytes:,} bytes, and a pod answers with {self._limit_bytes:,} at most: "
                "ask for fewer at once, or raise sending_bytes",
                limit_bytes=self._limit_bytes,
            )


def check_largest_sample(job: str, lengths: Int64Array, limit_bytes: int) -> None:
    """When a job is made: raises :class:`MemoryTooSmall` where a sample, alone, would be more than an answer may have.

    :param lengths: ``(n,)`` of samples that this pod serves.
    """
    largest = int(lengths.max(initial=0))
    if largest > limit_bytes:
        raise MemoryTooSmall(
            f"memory too small: job {job} has a sample of {largest:,} bytes, and a pod answers with {limit_bytes:,} at "
            "most: raise sending_bytes or REFILL_MEMORY_BYTES, or cut such samples into smaller ones",
            limit_bytes=limit_bytes,
            largest_sample_bytes=largest,
        )


class _Sent(NamedTuple):
    """One answer."""

    epoch: int
    samples: list[int]
    payloads: Sequence[Payload]
    num_bytes: int


class RecentlySent:
    """The samples sent last, up to ``limit_bytes``, by epoch and sample.

    Nearly none is asked for again: so it is found out where a sample is when the first one is.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        """What was sent twice may count twice, until something is asked for."""
        self._new: deque[_Sent] = deque()
        """Whose samples can't be found so far, the oldest first."""
        self._payloads: dict[int, dict[int, Payload]] = {}
        """By epoch."""
        self._known: deque[_Sent] = deque()
        """Where these are from, all older than what is new, the oldest first."""
        self._num_forgotten = 0
        """Of the oldest one."""

    def put(self, epoch: int, samples: list[int], payloads: Sequence[Payload]) -> None:
        if not self.limit_bytes or not samples:
            return
        for first in range(0, len(samples), _MOVED_AT_ONCE):
            some = tuple(payloads[first : first + _MOVED_AT_ONCE])
            sent = _Sent(epoch, samples[first : first + _MOVED_AT_ONCE], some, sum(map(len, some)))
            self._new.append(sent)
            self.used_bytes += sent.num_bytes
        self.limit(self.limit_bytes)

    def limit(self, limit_bytes: int) -> None:
        """Forget what is more than so much, a little at a time."""
        self.limit_bytes = limit_bytes
        if self.used_bytes > limit_bytes:
            _in_pieces(self._forgotten())

    def _forgotten(self) -> Iterator[None]:
        num_forgotten = 0
        while (excess_bytes := self.used_bytes - self.limit_bytes) > 0:
            num_forgotten += self._forget_some() if self._known else self._forget_new(excess_bytes)
            if num_forgotten >= _MOVED_AT_ONCE:
                num_forgotten = 0
                yield

    def _forget_new(self, excess_bytes: int) -> int:
        """The oldest answer, or of one that is large so many samples, as bytes are too many. Returns how many."""
        sent = self._new.popleft()
        if sent.num_bytes > max(excess_bytes, self.limit_bytes // _PART_FORGOTTEN):
            ends = list(accumulate(map(len, sent.payloads)))
            count = bisect_left(ends, excess_bytes) + 1
            num_bytes = sent.num_bytes - ends[count - 1]
            self._new.appendleft(_Sent(sent.epoch, sent.samples[count:], sent.payloads[count:], num_bytes))
            self.used_bytes -= ends[count - 1]
            return count
        self.used_bytes -= sent.num_bytes
        return len(sent.samples)

    def _forget_some(self) -> int:
        """Returns how many."""
        sent, before = self._known[0], self._num_forgotten
        of_epoch = self._payloads[sent.epoch]
        if self._num_forgotten == 0 and sent.num_bytes <= self.limit_bytes // _PART_FORGOTTEN:
            for _ in map(of_epoch.__delitem__, sent.samples):  # the quickest way
                pass
            self.used_bytes -= sent.num_bytes
            self._num_forgotten = len(sent.samples)
        else:
            self.used_bytes -= len(of_epoch.pop(sent.samples[self._num_forgotten]))
            self._num_forgotten += 1
        num_forgotten = self._num_forgotten - before
        if self._num_forgotten == len(sent.samples):
            self._known.popleft()
            self._num_forgotten = 0
            if not of_epoch:
                del self._payloads[sent.epoch]
        return num_forgotten

    def _know(self, sent: _Sent) -> None:
        of_epoch = self._payloads.get(sent.epoch, {})
        if not of_epoch.keys().isdisjoint(sent.samples):
            new = {each: one for each, one in zip(sent.samples, sent.payloads, strict=True) if each not in of_epoch}
            num_bytes = sum(map(len, new.values()))
            self.used_bytes -= sent.num_bytes - num_bytes
            sent = _Sent(sent.epoch, list(new), list(new.values()), num_bytes)
        if sent.samples:
            self._payloads.setdefault(sent.epoch, of_epoch).update(zip(sent.samples, sent.payloads, strict=True))
            self._known.append(sent._replace(payloads=()))

    @property
    def has_new(self) -> bool:
        """Whether the next :meth:`get` has to find out where samples are, of which there may be very many."""
        return bool(self._new)

    def find_out_some(self) -> None:
        """Do some of that before."""
        num_known = 0
        while self._new and num_known < _MOVED_AT_ONCE:
            num_known += len(self._new[0].samples)
            self._know(self._new.popleft())

    def get(self, epoch: int, sample: int) -> Payload | None:
        while self._new:
            self.find_out_some()
        return self._payloads.get(epoch, {}).get(sample)

    def clear(self) -> None:
        """Its memory is given back a little at a time."""
        left = copy(self)
        self._new, self._payloads, self._known = deque(), {}, deque()
        self.used_bytes = self._num_forgotten = left.limit_bytes = 0
        _in_pieces(left._given_back())

    def _given_back(self) -> Iterator[None]:
        num_forgotten = 0
        while self._known or self._new:
            if self._known:
                num_forgotten += self._forget_some()
            else:
                num_forgotten += len(self._new.popleft().samples)
            if num_forgotten >= _MOVED_AT_ONCE:
                num_forgotten = 0
                yield


def _in_pieces(pieces: Iterator[None]) -> None:
    """One in each turn of the loop that runs, the first at once; all of them where none runs."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        deque(pieces, maxlen=0)
        return

    def go_on() -> None:
        if next(pieces, pieces) is not pieces:
            loop.call_soon(go_on)

    go_on()


def joined(count: int, parts: list[tuple[Int64Array, Samples]]) -> Samples:
    """:param parts: each with the places of its samples among all."""
    if len(parts) == 1 and len(at := parts[0][0]) == count and (at[1:] > at[:-1]).all():
        return parts[0][1]
    ids, payloads, order = _in_turn_of_parts(count, parts)
    return ids, list(map(payloads.__getitem__, order.tolist()))


async def joined_in_pieces(count: int, parts: list[tuple[Int64Array, Samples]]) -> Samples:
    """As :func:`joined`, of very many: others have their turns meanwhile."""
    if count <= _JOINED_AT_ONCE:
        return joined(count, parts)
    ids, found, order = _in_turn_of_parts(count, parts)
    payloads: list[Payload] = []
    for first in range(0, count, _JOINED_AT_ONCE):
        await asyncio.sleep(0)
        payloads += map(found.__getitem__, order[first : first + _JOINED_AT_ONCE].tolist())
    return ids, payloads


def _in_turn_of_parts(
    count: int, parts: list[tuple[Int64Array, Samples]]
) -> tuple[Int64Array, list[Payload], Int64Array]:
    """``(ids, bytes of one part after another, which of these is at each place)``."""
    order = np.empty(count, dtype=np.int64)
    order[np.concatenate([places for places, _ in parts])] = np.arange(count)
    payloads = list(chain.from_iterable(found for _, (_, found) in parts))
    return np.concatenate([found_ids for _, (found_ids, _) in parts])[order], payloads, order
