"""How much may be on its way at once, in bytes and in requests? A gate that lets through what fits, each job in its
turn."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Hashable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial

from refill_service.cache_core.fair_queue import FairQueue, Need, Waiting
from refill_service.cache_core.shared_room import Asker


class Passage:
    """What one visitor counts for while it is inside."""

    def __init__(self, gate: ByteGate, job: Hashable, size_bytes: int, need: Need) -> None:
        self._gate = gate
        if need.due is not None:
            gate._dues[job][self] = need.due
        self._job = job
        self.size_bytes = size_bytes

    def resize(self, size_bytes: int) -> None:
        """Fact: it is as large as this, which was not known before. Never waits."""
        self._gate._resized(self._job, self.size_bytes, size_bytes)
        self.size_bytes = size_bytes
        self._gate._admit()

    def leave(self) -> None:
        """Fact: it has passed. For who came in by :meth:`ByteGate.enter_now`."""
        self._gate._dues[self._job].pop(self, None)
        if not self._gate._dues[self._job]:
            del self._gate._dues[self._job]
        self._gate._leave(self._job, self.size_bytes)

    @contextmanager
    def doubled(self) -> Iterator[bool]:
        """It counts twice as long as this lasts, if there is room for that and nobody waits for it. Gives whether."""
        size_bytes = self.size_bytes
        if not self._gate._has_room_to_spare(self._job, size_bytes):
            yield False
            return
        self._gate._enter(self._job, size_bytes)
        try:
            yield True
        finally:
            self._gate._leave(self._job, size_bytes)


class ByteGate:
    """Lets at most ``limit_bytes`` in; something larger than the limit goes through alone. What somebody waits for goes
    before what nobody does, of the same job.

    A job may be an :class:`Asker`, which says whose job it is. Who waits is let in by start-time fair queueing over
    teams, and over the jobs of each (:mod:`.cache_core.fair_queue`), a job's own in order.

    :param opens_with_bytes: after a time with nobody inside, this much may be inside at first, and as much more as has
        come through since (TCP's slow start): what was asked for first need not share the store's bandwidth with all
        that follows. None: the limit.
    :param most_of_free: a job with something inside may have at most this many times the bytes there that are left
        free (as in :mod:`.cache_core.shared_room`), so that another job finds room even if nobody leaves; so may a
        team with all its jobs half as many times. What is larger than a job may have is counted as so much: others go
        on beside it, but no second one like it. None: no such rule.
    :param least_bytes: as which a visitor counts in its job's turns, however small it is. Else a job that asks a store
        for a byte, again and again, would do so ten thousand times before another reads its next chunk.
    """

    def __init__(
        self,
        limit_bytes: int,
        opens_with_bytes: int | None = None,
        *,
        limit_visitors: int | None = None,
        most_of_free: int | None = None,
        least_bytes: int = 0,
    ) -> None:
        self.limit_bytes = limit_bytes
        self._least_bytes = least_bytes
        self._limit_visitors = limit_visitors
        self._num_inside = 0
        self.used_bytes = 0
        """As counted."""
        self.inside_bytes = 0
        """All of it."""
        self._most_of_free = most_of_free
        self._most_for_one = limit_bytes if most_of_free is None else limit_bytes * most_of_free // (1 + most_of_free)
        self._used_by: Counter[Hashable] = Counter()
        self._used_by_team: Counter[str] = Counter()
        self._dues: defaultdict[Hashable, dict[Passage, int]] = defaultdict(dict)
        """Of those inside, by job."""
        self._opens_with_bytes = limit_bytes if opens_with_bytes is None else min(opens_with_bytes, limit_bytes)
        self._open_bytes = self._opens_with_bytes
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue(team_of=_team_of)

    @property
    def free_bytes(self) -> int:
        return max(0, self.limit_bytes - self.used_bytes)

    def enter_now(self, size_bytes: int, job: Hashable = None, need: Need | None = None) -> Passage | None:
        """In place of :meth:`passage`, for who need not wait, and leaves by :meth:`Passage.leave`; None: it must."""
        need = need or Need()
        if self._waiting or not self._fits(size_bytes) or self._has_its_share(job, size_bytes, need):
            return None
        self._enter(job, size_bytes)
        return Passage(self, job, size_bytes, need)

    @asynccontextmanager
    async def passage(
        self, size_bytes: int, job: Hashable = None, *, need: Need | None = None
    ) -> AsyncIterator[Passage]:
        """
        :param need: whether somebody waits for it; None: nobody does.
        """
        need = need or Need()
        if self._waiting or not self._fits(size_bytes, need.due) or self._has_its_share(job, size_bytes, need):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            entry = Waiting(job, size_bytes, turn, need.due, need.near, need.ahead)
            self._waiting.put(entry)
            self._admit()  # those before may all be of jobs that have their share
            try:
                with need.telling(partial(self._hasten, entry, need)):
                    await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._leave(job, size_bytes)  # let in and cancelled at once
                else:
                    with suppress(KeyError, ValueError):  # not there: it was passed over already
                        self._waiting.discard(entry)
                    self._admit()
                raise
        else:
            self._enter(job, size_bytes)
        inside = Passage(self, job, size_bytes, need)
        try:
            yield inside
        finally:
            inside.leave()

    def _hasten(self, entry: Waiting[asyncio.Future[None]], need: Need) -> None:
        if need.due is not None and not entry.item.done():
            self._waiting.hasten(entry, need.due)
            self._admit()

    def _counted(self, size_bytes: int) -> int:
        return size_bytes if self._most_of_free is None else min(size_bytes, self._most_for_one)

    def _fits(self, size_bytes: int, due: int | None = None) -> bool:
        if self._limit_visitors is not None and self._num_inside >= self._limit_visitors:
            return False
        most_bytes = self._open_bytes if due is None else self.limit_bytes
        return self.used_bytes == 0 or self.used_bytes + self._counted(size_bytes) <= most_bytes

    def _has_room_to_spare(self, job: Hashable, size_bytes: int) -> bool:
        return not self._waiting and self._fits(size_bytes, 0) and not self._has_its_share(job, size_bytes, Need())

    def _has_its_share(self, job: Hashable, size_bytes: int, need: Need | Waiting[asyncio.Future[None]]) -> bool:
        if self._most_of_free is None:
            return False
        size_bytes = self._counted(size_bytes)
        free_bytes = self.limit_bytes - self.used_bytes - size_bytes
        inside = self._used_by[job]
        if 2 * (inside + size_bytes) > self._most_for_one and self._is_far_ahead(job, need):
            return True
        if inside and inside + size_bytes > self._most_of_free * free_bytes:
            return True
        if not isinstance(job, Asker) or not job.team:
            return False
        inside = self._used_by_team[job.team]
        return inside > 0 and 2 * (inside + size_bytes) > self._most_of_free * free_bytes

    def _is_far_ahead(self, job: Hashable, need: Need | Waiting[asyncio.Future[None]]) -> bool:
        """Of another one of its job that is inside. All such may have half of its share: else loader workers that ask
        far ahead of their loop would keep out what it waits for."""
        if need.due is None or need.near is None or job not in self._dues:
            return False
        return need.due > min(self._dues[job].values()) + need.near

    def _resized(self, job: Hashable, had_bytes: int, size_bytes: int) -> None:
        """Fact: a visitor of so many bytes has so many now; 0: it was not there, or is no more."""
        self.inside_bytes += size_bytes - had_bytes
        counted = self._counted(size_bytes) - self._counted(had_bytes)
        if counted:
            self._count(job, counted)

    def _count(self, job: Hashable, counted: int) -> None:
        self.used_bytes += counted
        self._used_by[job] += counted
        if self._used_by[job] == 0:
            del self._used_by[job]
        if isinstance(job, Asker):
            self._used_by_team[job.team] += counted
            if self._used_by_team[job.team] == 0:
                del self._used_by_team[job.team]

    def _enter(self, job: Hashable, size_bytes: int) -> None:
        self._num_inside += 1
        self._resized(job, 0, size_bytes)

    def _leave(self, job: Hashable, size_bytes: int) -> None:
        self._num_inside -= 1
        self._resized(job, size_bytes, 0)
        self._open_bytes = min(self.limit_bytes, self._open_bytes + size_bytes)
        if self.used_bytes == 0 and not self._waiting:
            self._open_bytes = self._opens_with_bytes
        self._admit()

    def _admit(self) -> None:
        while self._waiting and (entry := self._next()) is not None:
            if entry.item.cancelled():  # and has not run since
                self._waiting.discard(entry)
            else:
                self._waiting.serve(entry)
                self._waiting.charge(entry.job, max(0, self._least_bytes - entry.size_bytes))
                self._enter(entry.job, entry.size_bytes)
                entry.item.set_result(None)

    def _next(self) -> Waiting[asyncio.Future[None]] | None:
        """Who is to be let in now. Nobody overtakes who waits for room, or large requests would wait for ever."""
        for entry in self._waiting.heads():
            if entry.item.cancelled():
                return entry
            if not self._has_its_share(entry.job, entry.size_bytes, entry):
                return entry if self._fits(entry.size_bytes, entry.due) else None
        return None


def _team_of(job: Hashable) -> Hashable:
    return job.team if isinstance(job, Asker) else job
