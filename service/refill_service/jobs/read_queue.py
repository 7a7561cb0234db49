"""Which reads are begun next? All that are ordered, a few at a time: no decision and no beginning holds the loop long.

What somebody waits for goes first. The rest is put together with its neighbours once all of it is known, so that as few
GETs as can be read it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from refill_service.memory.loop_turns import in_turn_of_team

log = logging.getLogger(__name__)

_FEW = 64
"""Reads that are put together and begun in one go."""
_MOST_WAITING = 1 << 11
"""Reads that are ordered and not begun: each is an object, which the garbage collector looks at."""
_MOST_UNDER_WAY = 64
"""Groups: each is a task, and waits for the store."""

Ordered = TypeVar("Ordered")


class ReadQueue(Generic[Ordered]):
    """Begins the reads of one share, or of one owner's epoch, a few at a time.

    :param decide: orders some more of what it is time to read, and puts it here; whether there was any.
    :param bounds: ``first <= sample < end`` of a read.
    :param side_by_side: as :meth:`ChunkReader.side_by_side`.
    :param begin: begins to read these, which lie beside each other or are few.
    """

    def __init__(
        self,
        decide: Callable[[], bool],
        bounds: Callable[[Ordered], tuple[int, int]],
        side_by_side: Callable[[Sequence[tuple[int, int]], int], list[list[int]]],
        begin: Callable[[list[Ordered]], list[asyncio.Task[None]]],
    ) -> None:
        self._decide, self._bounds, self._side_by_side, self._begin = decide, bounds, side_by_side, begin
        self._urgent: deque[Ordered] = deque()
        self._ahead: list[Ordered] = []
        self._grouping: list[Ordered] = []
        """Those that a thread puts together."""
        self._hastened: set[Ordered] = set()
        """Of these, those that somebody waits for."""
        self._together: deque[list[Ordered]] = deque()
        """Those ahead, as they lie beside each other."""
        self._num_together = self._num_under_way = 0
        self._ended = asyncio.Event()
        """Set when a group has ended, or something urgent has come."""
        self._running: asyncio.Task[None] | None = None
        self._is_closed = False

    def put(self, orders: Sequence[Ordered], *, urgent: bool) -> None:
        """:param urgent: somebody waits for them."""
        if not orders:
            return
        (self._urgent if urgent else self._ahead).extend(orders)
        if urgent:
            self._ended.set()
        self.go_on()

    def hasten(self, wanted: set[Ordered]) -> None:
        """Fact: somebody waits for these now, which have not begun. They go first, with what lies beside them."""
        if not wanted:
            return
        found = [order for order in self._ahead if order in wanted]
        self._ahead = [order for order in self._ahead if order not in wanted]
        for group in [group for group in self._together if not wanted.isdisjoint(group)]:
            self._together.remove(group)
            self._num_together -= len(group)
            found += group
        self._hastened |= wanted.intersection(self._grouping)
        self.put(found, urgent=True)

    def go_on(self) -> None:
        """Fact: there may be something to decide."""
        if not self._is_closed and (self._running is None or self._running.done()):
            self._running = asyncio.create_task(in_turn_of_team(self._run))
            self._running.add_done_callback(self._stopped)

    def forget(self) -> list[Ordered]:
        """Fact: nobody needs what is ordered ahead any more. Returns those of it that have not begun, and will not."""
        left = [*self._ahead, *self._grouping, *(order for group in self._together for order in group)]
        self.put([order for order in left if order in self._hastened], urgent=True)
        left = [order for order in left if order not in self._hastened]
        self._ahead, self._grouping, self._hastened, self._num_together = [], [], set(), 0
        self._together.clear()
        return left

    async def close(self) -> None:
        """What was not begun is not, and what comes later neither."""
        self._is_closed = True
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    @staticmethod
    def _stopped(running: asyncio.Task[None]) -> None:
        if not running.cancelled() and (error := running.exception()) is not None:
            log.error("reads could not be begun", exc_info=error)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(0)
            if self._urgent:  # at once, however much is under way
                self._begin_all([self._urgent.popleft() for _ in range(min(_FEW, len(self._urgent)))])
            elif len(self._ahead) + self._num_together < _MOST_WAITING and self._decide():
                continue
            elif self._ahead:
                orders, self._ahead = self._ahead, []
                self._num_together += len(orders)
                if len(orders) <= _FEW:
                    self._together.append(orders)
                    continue
                self._grouping = orders
                groups = await asyncio.to_thread(self._grouped, orders)
                if self._grouping is not orders:
                    continue  # forgotten meanwhile
                self._together += groups
                hastened, self._hastened, self._grouping = self._hastened, set(), []
                self.hasten(hastened)
            elif self._together and self._num_under_way < _MOST_UNDER_WAY:
                num_begun = 0
                while self._together and num_begun < _FEW:
                    orders = self._together.popleft()
                    num_begun += len(orders)
                    self._begin_all(orders)
                self._num_together -= num_begun
            elif self._together:
                self._ended.clear()
                await self._ended.wait()
            else:
                return

    def _grouped(self, orders: list[Ordered]) -> list[list[Ordered]]:
        groups = self._side_by_side(list(map(self._bounds, orders)), _FEW)
        return [[orders[place] for place in group] for group in groups]

    def _begin_all(self, orders: list[Ordered]) -> None:
        for task in self._begin(orders):
            self._num_under_way += 1
            task.add_done_callback(self._has_ended)

    def _has_ended(self, _: asyncio.Task[None]) -> None:
        self._num_under_way -= 1
        self._ended.set()
