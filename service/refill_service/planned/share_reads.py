"""Which reads of one share are begun next, and who waits for them?

The path of a read: it is ordered -> the queue begins it in its turn, with its neighbours -> ``arrived`` takes what it
brings, or ``failed`` is told that it brings nothing -> who waits for it goes on.

All that are ordered are begun a few at a time: no decision and no beginning holds the loop long. What somebody waits
for goes first. The rest is put together with its neighbours once all of it is known, so that as few GETs as can be read
it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from refill.errors import RefillError, StoreUnavailable
from refill_service.cache_core.fair_queue import Need
from refill_service.cache_core.planned.placed_order import ChunkRead
from refill_service.cache_core.planned.shares import Share
from refill_service.cache_core.policies.interface import Read
from refill_service.jobs.chunk_reader import ChunkReader, ReadChunk
from refill_service.memory.loop_turns import given_up, in_turn_of_team
from refill_service.planned.shared_reads import SharedReads

log = logging.getLogger(__name__)

_FEW = 64
"""Reads that are put together and begun in one go."""
_MOST_WAITING = 1 << 11
"""Reads that are ordered and not begun: each is an object, which the garbage collector looks at."""
_MOST_UNDER_WAY = 64
"""Groups: each is a task, and waits for the store."""

Ordered = TypeVar("Ordered")


class ReadQueue(Generic[Ordered]):
    """Begins the reads of one share, a few at a time.

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


@dataclass
class _Ordered:
    """A read that has yet to arrive."""

    need: Need
    """Once it has begun, that of all that are read together."""
    has_begun: bool = False


class HeldBack:
    """Reads ahead of one job at one pod: where nothing was in memory when ranks asked, these wait until ranks have
    their first batches."""

    def __init__(self) -> None:
        self._num_first = 0
        """Requests that came when nothing was in memory."""
        self._starts: set[asyncio.Future[None]] = set()
        self.last_ended = 0.0
        """When a read did so, of any share: a store is silent that brings nothing to all of them."""

    @property
    def holds_back(self) -> bool:
        return self._num_first > 0

    @contextmanager
    def first(self, *, is_first: bool) -> Iterator[None]:
        """While a request lasts that is one of the first."""
        self._num_first += is_first
        try:
            yield
        finally:
            self._num_first -= is_first
            if not self.holds_back:
                for start in self._starts:
                    self._begin(start)

    async def may_begin(self, need: Need) -> None:
        """Wait until a read may begin: at once, if somebody waits for it."""
        if need.due is not None or not self.holds_back:
            return
        start: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._starts.add(start)
        try:
            with need.telling(partial(self._begin, start)):
                await start
        finally:
            self._starts.discard(start)

    @staticmethod
    def _begin(start: asyncio.Future[None]) -> None:
        if not start.done():
            start.set_result(None)


class ShareReads:
    """Carries out the reads of one share.

    :param share: whose samples are read; ``chunks`` reads them, by their ids.
    :param held_back: reads ahead of the job, when ranks begin.
    :param shared: its reads, and those of other jobs that read in the same order; None: it reads alone.
    :param decide: as of :class:`ReadQueue`.
    :param arrived: takes what a read has brought; ``failed`` is told why one brings nothing.
    :param name: of the job, for errors.
    :param wait_seconds: for the store.
    """

    def __init__(
        self,
        share: Share,
        chunks: ChunkReader,
        held_back: HeldBack,
        shared: SharedReads | None,
        *,
        decide: Callable[[], bool],
        arrived: Callable[[ChunkRead, ReadChunk], None],
        failed: Callable[[ChunkRead, BaseException | None], None],
        name: str,
        wait_seconds: float,
    ) -> None:
        self._share, self._chunks = share, chunks
        self._held_back, self._shared = held_back, shared
        self._arrived, self._failed = arrived, failed
        self._name, self._wait_seconds = name, wait_seconds
        self._queue = ReadQueue(decide, self._bounds, chunks.side_by_side, self._begin)
        self._ordered: dict[ChunkRead, _Ordered] = {}
        """What has yet to arrive."""
        self._bringing: defaultdict[int, dict[int, ChunkRead]] = defaultdict(dict)
        """By epoch: the read under way that brings a sample."""
        self._begun: dict[asyncio.Task[None], list[ChunkRead]] = {}
        """What each of those brings that read."""
        self._awaited: dict[ChunkRead, asyncio.Future[None]] = {}
        """Done when a read that somebody waits for has arrived, or failed."""
        self._over: RefillError | None = None
        """Why nothing is read any more."""

    @property
    def are_under_way(self) -> bool:
        return bool(self._begun or self._ordered)

    def go_on(self) -> None:
        """Fact: there may be something to read ahead."""
        self._queue.go_on()

    def order(self, reads: Sequence[ChunkRead]) -> None:
        """What somebody waits for goes first; what is pinned arrives at once."""
        to_read = []
        for read in reads:
            order = self._read_of(read)
            if (chunk := self._chunks.pinned(order)) is not None:
                self._arrived(read, chunk)
            else:
                self._bringing[read.epoch].update(dict.fromkeys(order.samples.tolist(), read))
                self._ordered[read] = _Ordered(Need(None if read.due is None else _due(read.epoch, read.due)))
                to_read.append(read)
        self._queue.put([read for read in to_read if read.due is not None], urgent=True)
        self._queue.put([read for read in to_read if read.due is None], urgent=False)

    async def have_brought(self, epoch: int, samples: list[int], due: int) -> None:
        """Wait for the reads that bring these samples, which are due now at this place, and raise what went wrong with
        the first that failed."""
        bringing = self._bringing.get(epoch, {})
        reads = {bringing[sample] for sample in samples if sample in bringing}
        self._are_due(reads, _due(epoch, due))
        arriving = [self._awaited.setdefault(read, asyncio.Future()) for read in reads]
        started = now = time.monotonic()
        while pending := [each for each in arriving if not each.done()]:
            if (patience := max(started, self._held_back.last_ended) + self._wait_seconds - now) <= 0:
                raise StoreUnavailable(
                    f"job {self._name} waits for the store: nothing has come for {self._wait_seconds:g} s"
                )
            # Not woken by each read that others wait for: thousands may wait, for thousands of reads.
            await asyncio.wait(pending, timeout=patience)
            now = time.monotonic()
        for each in arriving:
            each.result()

    def forget(self) -> None:
        """Fact: nobody needs what is read ahead any more."""
        left = self._queue.forget()
        for task, reads in self._begun.items():
            if self._shared is None and self._awaited.keys().isdisjoint(reads):  # else others wait for it
                left += reads
                task.cancel()
        for read in left:
            self._done(read, None)

    async def close(self, why: RefillError) -> None:
        """Stop all. Who waits gets this error."""
        self._over = why
        if self._shared is not None:
            self._shared.close()
        await self._queue.close()
        await given_up(list(self._begun))
        self._ordered.clear()
        self._bringing.clear()
        for awaited in self._awaited.values():
            awaited.set_exception(why)
            awaited.exception()  # known: who waited may have gone
        self._awaited.clear()

    def _bounds(self, read: ChunkRead) -> tuple[int, int]:
        return int(self._share.samples[read.local[0]]), int(self._share.samples[read.local[-1]]) + 1

    def _read_of(self, read: ChunkRead) -> Read:
        ids = self._share.samples[read.local]
        return Read(int(ids[0]), int(ids[-1]) + 1, ids, read.chunk)

    def _begin(self, reads: list[ChunkRead]) -> list[asyncio.Task[None]]:
        of_orders = {self._read_of(read): read for read in reads}
        return [self._begin_together(group, of_orders) for group in self._chunks.together(list(of_orders))]

    def _begin_together(self, group: list[Read], reads: dict[Read, ChunkRead]) -> asyncio.Task[None]:
        ordered = [self._ordered[reads[order]] for order in group]
        need = Need(
            min((each.need.due for each in ordered if each.need.due is not None), default=None),
            ahead=min(_due(reads[order].epoch, reads[order].place) for order in group),
        )
        for each in ordered:
            each.need, each.has_begun = need, True

        def arrived(chunk: ReadChunk) -> None:
            self._arrived(reads[chunk.read], chunk)
            self._done(reads[chunk.read], None)

        def ended(task: asyncio.Task[None]) -> None:
            """Whatever became of it, even if it was cancelled before it began: nobody waits for it any more."""
            del self._begun[task]
            error = self._over if task.cancelled() else task.exception()
            self._will_not_come([reads[order] for order in group], error)

        async def fetch() -> None:
            await self._held_back.may_begin(need)
            if self._shared is None:
                await self._chunks.read(group, arrived, need=need)
            else:
                await self._shared.read(group, reads, arrived, need=need)

        task = asyncio.create_task(in_turn_of_team(fetch))
        self._begun[task] = [reads[order] for order in group]
        task.add_done_callback(ended)
        return task

    def _will_not_come(self, reads: list[ChunkRead], error: BaseException | None) -> None:
        """Those of these reads that have not arrived."""
        for read in reads:
            if read in self._ordered:
                self._failed(read, error)
                self._done(read, error)

    def _done(self, read: ChunkRead, error: BaseException | None) -> None:
        self._ordered.pop(read, None)
        bringing = self._bringing[read.epoch]
        for sample in self._share.samples[read.local].tolist():
            if bringing.get(sample) is read:
                del bringing[sample]
        if not bringing:
            del self._bringing[read.epoch]
        if (awaited := self._awaited.pop(read, None)) is not None:
            if error is None:
                awaited.set_result(None)
            else:
                awaited.set_exception(error)
                awaited.exception()  # known: who waited may have gone
        self._held_back.last_ended = time.monotonic()

    def _are_due(self, reads: set[ChunkRead], due: int) -> None:
        """Fact: somebody waits for these."""
        waiting = set()
        for read in reads:
            ordered = self._ordered[read]
            if not ordered.has_begun and ordered.need.due is None:
                waiting.add(read)
            ordered.need.is_due(due)
        self._queue.hasten(waiting)


def _due(epoch: int, place: int) -> int:
    """Of a request, among those for all epochs and shares of the job: shares come about evenly."""
    return (epoch << 40) + place
