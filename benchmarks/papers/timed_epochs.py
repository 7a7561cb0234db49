"""How long does an epoch take, if reads take time? The machines of pods and the loops of ranks on one virtual clock.

What ``lockstep.py`` lets arrive at once arrives here when the store of :class:`~.loop_clock.FetchService` would have
brought it: each pod has so many GETs under way, and bytes come one after another through its bandwidth, and through the
link of all pods. A rank's loader asks for batches ahead of the loop, one after another; the loop waits for each, and
computes. Ranks begin an epoch together. The network between pods, and what pods and loaders do themselves, take no time
but ``h``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush, heapreplace
from typing import Any

import numpy as np
from benchmarks.papers.loop_clock import FetchService, LoopClock
from benchmarks.papers.scored_owner import ScoredOwner

from refill_service.cache_core.epoch_order import Traces
from refill_service.cache_core.home_machine import HomeMachine
from refill_service.cache_core.owner_machine import OpenEpoch
from refill_service.cache_core.policies.interface import Read
from refill_service.cache_core.sample_mapping import Int64Array
from refill_service.planning.lockstep import ask_batch

__all__ = ["TimedEpochs", "TimedOwner"]

Computed = Callable[[int, int, int], None]
"""Told the epoch, the rank and which of its batches, when its loop has computed one."""


class _Pipe:
    """Bytes one after another."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._free_at = 0.0

    def over_at(self, begins: float, num_bytes: float) -> float:
        self._free_at = max(begins, self._free_at) + num_bytes / self._bytes_per_second
        return self._free_at


class _Store:
    """When do one pod's reads come?"""

    def __init__(self, service: FetchService, link: _Pipe) -> None:
        self._service = service
        self._free = [0.0] * service.parallel
        """When each of the GETs that may be under way at once is over, the first one first."""
        self._link, self._own = link, _Pipe(service.bandwidth)

    def comes_at(self, now: float, num_samples: int) -> float:
        """Of a read of so many samples that is ordered now."""
        service, num_bytes = self._service, num_samples * self._service.size
        first_byte = max(now, self._free[0]) + service.fixed + service.latency
        over = max(self._link.over_at(first_byte, num_bytes), self._own.over_at(first_byte, num_bytes))
        heapreplace(self._free, over)
        return over


class TimedOwner(ScoredOwner):
    """An owner whose reads arrive when its store brings them: ``begin`` and ``requested`` order them. Made by
    :meth:`TimedEpochs.owner`."""

    def __init__(self, clocked: TimedEpochs, store: _Store, *arguments: Any, **settings: Any) -> None:
        self._clocked = clocked
        self._store = store
        self._comes_at: dict[int, float] = {}
        """Of samples that are on their way, by their ids in the share."""
        super().__init__(*arguments, **settings)

    def comes_at(self, samples: Int64Array) -> float:
        """When the last of these has come, ids of the dataset; 0 if all are here."""
        if not self._comes_at:
            return 0.0
        local = samples[self.mapping.share.holds(samples)] - self.mapping.share.first_sample
        return max((self._comes_at.get(sample, 0.0) for sample in local.tolist()), default=0.0)

    def _order(self, epoch: OpenEpoch, read: Read) -> None:
        at = self._store.comes_at(self._clocked.now, read.end - read.first)
        self._comes_at.update(dict.fromkeys(read.samples.tolist(), at))
        self._clocked.at(at, _Came(self, epoch, read))

    def came(self, epoch: OpenEpoch, read: Read) -> None:
        for sample in read.samples.tolist():
            if self._comes_at.get(sample, 0.0) <= self._clocked.now:
                self._comes_at.pop(sample, None)
        self._arrived(epoch, read)


@dataclass(frozen=True)
class _Came:
    owner: TimedOwner
    epoch: OpenEpoch
    read: Read


@dataclass(frozen=True)
class _Trained:
    report: Callable[[], None]


@dataclass
class _Loop:
    """A rank's loop in one epoch, and the loader that asks for it."""

    rank: int
    length: int
    wants_at: float
    """When the loop wants the batch that it has not got."""
    position: int = 0
    """The first that was not asked for."""
    got_at: list[float] = field(default_factory=list)
    """When the loop got each batch."""
    loaded: float = 0.0
    """What the loop has waited."""
    waits_for: float = 0.0
    """When the samples have come of the batch that is being assembled."""
    assembles: int = 0
    """Positions of that batch; 0: none is."""


class TimedEpochs:
    """All epochs of a run on one clock."""

    def __init__(self, clock: LoopClock, batch_size: int) -> None:
        self.now = 0.0
        self.load_seconds = self.run_seconds = 0.0
        """Of the slowest rank, in the epoch that was run last."""
        self._clock = clock
        self._batch_size = batch_size
        self._coming: list[tuple[float, int, int, _Came | _Trained | _Loop]] = []
        """By time; of what comes at the same time reads first, then what was known first."""
        self._num_events = 0
        self._link = _Pipe(clock.link)
        self._owners: list[TimedOwner] = []

    def owner(self, *arguments: Any, **settings: Any) -> TimedOwner:
        """Of one more pod; parameters as of ``LocalOwner``."""
        self._owners.append(TimedOwner(self, _Store(self._clock.svc, self._link), *arguments, **settings))
        return self._owners[-1]

    def at(self, time: float, event: _Came | _Trained | _Loop) -> None:
        """A read has come then, a loop has computed its batch, or a loader asks."""
        self._num_events += 1
        heappush(self._coming, (time, type(event) is _Loop, self._num_events, event))

    def epoch(
        self, homes: Sequence[HomeMachine[int]], traces: Traces, number: int, computed: Computed | None = None
    ) -> Iterator[int]:
        """Requests made, a batch at a time; one rank for each home."""
        if number:
            for rank, home in enumerate(homes):
                home.entered(number, rank)
            for owner in self._owners:
                owner.begin(number)
        began = self.now
        loops = [_Loop(rank, traces.length(rank), began) for rank in range(len(homes))]
        for loop in loops:
            if loop.length:
                self.at(began, loop)
        while any(loop.position < loop.length or loop.assembles for loop in loops):
            self.now, _, _, event = heappop(self._coming)
            if type(event) is _Came:
                event.owner.came(event.epoch, event.read)
            elif type(event) is _Trained:
                event.report()
            elif isinstance(event, _Loop):
                yield self._ask(event, homes[event.rank], traces, number)
            for loop in loops:
                if loop.assembles and self._completes(loop) and computed is not None:
                    self.at(loop.wants_at, _Trained(partial(computed, number, loop.rank, len(loop.got_at) - 1)))
        ended = max(loop.wants_at for loop in loops)
        while self._coming and self._coming[0][0] <= ended:
            self.now, _, _, event = heappop(self._coming)
            if type(event) is _Came:
                event.owner.came(event.epoch, event.read)
            elif type(event) is _Trained:
                event.report()
        self.now = ended
        self.load_seconds = max(loop.loaded for loop in loops)
        self.run_seconds = ended - began

    def _ask(self, loop: _Loop, home: HomeMachine[int], traces: Traces, number: int) -> int:
        owners = self._owners
        positions = np.arange(loop.position, min(loop.position + self._batch_size, loop.length), dtype=np.int64)
        asked, repeats = traces.asked(loop.rank, positions)
        _, _, samples = ask_batch(owners, home, number, loop.rank, positions, asked, repeats)
        loop.position += len(positions)
        loop.assembles = len(positions)
        wanted = np.concatenate((samples, asked[repeats])) if repeats.any() else samples
        loop.waits_for = max(owner.comes_at(wanted) for owner in owners)
        return len(positions)

    def _completes(self, loop: _Loop) -> bool:
        """If all is here that its batch waits for, the loop gets it when it wants it, and the next one is asked for."""
        if loop.waits_for > self.now:
            return False
        done = self.now + loop.assembles * self._clock.h
        loop.assembles = 0
        got = max(loop.wants_at, done)
        loop.loaded += got - loop.wants_at
        loop.got_at.append(got)
        loop.wants_at = got + self._clock.comp
        if loop.position < loop.length:
            ahead, num_done = self._clock.ahead, len(loop.got_at)
            taken = loop.got_at[num_done - ahead] if 0 < ahead <= num_done else 0.0
            self.at(max(done, taken) if ahead else loop.wants_at, loop)
        return True
