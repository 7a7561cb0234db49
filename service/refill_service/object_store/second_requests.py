"""Which reads of a store are asked for a second time? Seldom, those that take far longer than such reads have taken.

A server that hangs, a lost packet on a quiet connection or a disk that is failing holds a single request up, and
whoever waits for it. The same range asked for once more comes at once, as a rule. Where a store is slow as a whole a
second request would only make it slower: so there are no more than one for 50 first ones (of the first 50, one), and
the fewer are left of those, the longer a read has to take. One in five seconds is always left: what a pod waits for may
be all that it reads, and then no first ones come.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from refill.errors import RefillError
from refill_service.object_store.store_counters import StoreCounters

Answer = TypeVar("Answer")

_MOST_PART = 0.02
"""Of first requests."""
_MOST_LEFT = 5.0
"""Second requests that may come at once, when there were few for some time."""
_ALWAYS_LEFT_AFTER_SECONDS = 5.0
"""Since the last second request."""
_FAR_LONGER = 3.0
"""Times what nearly all such reads take, while none of those that are left has been used."""
_LEAST_PATIENCE_SECONDS = 0.2
"""Less than that can be the doing of this machine, where the store is near."""

_KEPT_READS = 256
_LEAST_READS = 8
"""Of a size, before it is known what they take."""
_NEARLY_ALL = 0.95
_LOOKED_AT_EVERY = 16
"""Reads."""

_LEAST_WAIT_SECONDS, _MOST_WAIT_SECONDS = 0.02, 1.0
"""Between two looks at a read."""


class Room(Protocol):
    """What a read's bytes are counted by."""

    def doubled(self) -> AbstractContextManager[bool]:
        """They count twice as long as this lasts, if there is room to spare. Gives whether."""


class UsualTimes:
    """How long have reads taken of late, by their size?"""

    def __init__(self) -> None:
        self._by_size: dict[int, _Times] = {}
        """Sizes within a factor of four are alike."""

    def took(self, size_bytes: int, seconds: float) -> None:
        """Fact: one took so long, or longer."""
        self._by_size.setdefault(_like(size_bytes), _Times()).add(seconds)

    def usual_seconds(self, size_bytes: int) -> float | None:
        """Nearly all of this size took no longer. Where few were read, it is what larger ones took, or smaller ones at
        the same rate; None: too few of any size were read."""
        like = _like(size_bytes)
        known = [size for size, times in self._by_size.items() if times.nearly_all is not None]
        if not known:
            return None
        larger = [size for size in known if size >= like]
        nearest = min(larger) if larger else max(known)
        seconds = self._by_size[nearest].nearly_all
        assert seconds is not None  # it is known
        return seconds * 4.0 ** max(0, like - nearest)


class _Times:
    """How long the last reads of about one size have taken."""

    def __init__(self) -> None:
        self._kept: deque[float] = deque(maxlen=_KEPT_READS)
        self._since_looked = 0
        self.nearly_all: float | None = None

    def add(self, seconds: float) -> None:
        self._kept.append(seconds)
        self._since_looked += 1
        if len(self._kept) >= _LEAST_READS and (self._since_looked >= _LOOKED_AT_EVERY or self.nearly_all is None):
            self._since_looked = 0
            self.nearly_all = sorted(self._kept)[int(_NEARLY_ALL * len(self._kept))]


def _like(size_bytes: int) -> int:
    return size_bytes.bit_length() // 2


class SecondRequests:
    """Asks one store a second time for reads that take far too long. Belongs to one event loop.

    :param pause_seconds: after a second request that failed, there is none for so long: the store has enough to do.
    """

    def __init__(self, counters: StoreCounters, pause_seconds: float) -> None:
        self._counters = counters
        self._pause_seconds = pause_seconds
        self._paused_until = 0.0
        self._times = UsualTimes()
        self._left = self._owed = 1.0
        """Second requests that may be made. The first one is lent."""
        self._last_at = float("-inf")

    async def read(
        self,
        size_bytes: int,
        first: Callable[[], Awaitable[Answer]],
        second: Callable[[], Awaitable[Answer]],
        room: Room,
    ) -> Answer:
        """The answer to the first request, whatever it is; or to the second one, if that succeeds before. The other one
        is given up."""
        if self._owed > 0:
            self._owed -= _MOST_PART
        else:
            self._left = min(_MOST_LEFT, self._left + _MOST_PART)
        started = time.monotonic()
        reading = asyncio.ensure_future(first())
        try:
            while not (await asyncio.wait([reading], timeout=self._next_look(size_bytes, started)))[0]:
                if time.monotonic() - started < self._patience_seconds(size_bytes):
                    continue
                with room.doubled() as there_is_room:
                    if there_is_room:
                        return await self._raced(reading, second)
            return reading.result()
        finally:
            if not reading.done() or (not reading.cancelled() and reading.exception() is None):
                self._times.took(size_bytes, time.monotonic() - started)
            await _given_up(reading)

    def _patience_seconds(self, size_bytes: int) -> float:
        usual, now = self._times.usual_seconds(size_bytes), time.monotonic()
        left = max(self._left, 1.0) if now >= self._last_at + _ALWAYS_LEFT_AFTER_SECONDS else self._left
        if usual is None or left < 1 or now < self._paused_until:
            return float("inf")
        return max(_LEAST_PATIENCE_SECONDS, usual * _FAR_LONGER) * _MOST_LEFT / left

    def _next_look(self, size_bytes: int, started: float) -> float:
        """In how many seconds. Where there is no patience to wait for, or no room yet, each look comes after some part
        of the time that has passed."""
        waited = time.monotonic() - started
        left = self._patience_seconds(size_bytes) - waited
        return max(_LEAST_WAIT_SECONDS, min(_MOST_WAIT_SECONDS, left if 0 < left < float("inf") else waited / 2))

    async def _raced(self, reading: asyncio.Future[Answer], second: Callable[[], Awaitable[Answer]]) -> Answer:
        self._left = max(0.0, self._left - 1)
        self._last_at = time.monotonic()
        self._counters.second_reads += 1
        again = asyncio.ensure_future(second())
        try:
            await asyncio.wait([reading, again], return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                try:
                    answer = again.result()
                except RefillError:
                    self._paused_until = time.monotonic() + self._pause_seconds
                    return await reading
                self._counters.second_reads_won += 1
                return answer
            return reading.result()
        finally:
            await _given_up(again)


async def _given_up(request: asyncio.Future[Answer]) -> None:
    request.cancel()
    await asyncio.gather(request, return_exceptions=True)
