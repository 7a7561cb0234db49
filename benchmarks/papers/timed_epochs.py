"""How long does an epoch take, if reads take time? The machines of pods and the loops of ranks on one virtual clock.

What ``lockstep.py`` lets arrive at once arrives here when the store of :class:`~.loop_clock.FetchService` would have
brought it: each pod has so many GETs under way, and what they transfer shares the pod's bandwidth and the link of all
pods fairly (``processor_sharing.py``). A rank's loader asks for batches ahead of the loop, one after another; the loop
waits for each, and computes, in step with the other ranks unless the clock says otherwise. Ranks begin an epoch
together. The network between pods, and what pods and loaders do themselves, take no time but ``h``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from typing import Any

import numpy as np
from benchmarks.papers.loop_clock import FetchService, LoopClock
from benchmarks.papers.processor_sharing import FairLink
from benchmarks.papers.scored_owner import ScoredOwner

from refill_service.cache_core.epoch_order import Traces
from refill_service.cache_core.home_machine import HomeMachine
from refill_service.cache_core.owner_machine import OpenEpoch
from refill_service.cache_core.policies.interface import Read
from refill_service.cache_core.sample_mapping import Int64Array
from refill_service.planning.lockstep import ask_batch

__all__ = ["Machines", "TimedEpochs", "TimedOwner"]

Computed = Callable[[int, int, int], None]
"""Told the epoch, the rank and which of its batches, when its loop has computed one."""


@dataclass(frozen=True)
class Machines:
    """Pods whose memory is one cache, and the order of the ranks that use it, in one epoch."""

    owners: Sequence[TimedOwner]
    homes: Sequence[HomeMachine[int]]
    """One for each rank."""
    traces: Traces
    computed: Computed | None = None


@dataclass(frozen=True, eq=False)
class _Coming:
    """A read that was ordered and has not come."""

    owner: TimedOwner
    epoch: OpenEpoch
    read: Read
    loops: list[_Loop] = field(default_factory=list)
    """That wait for it."""


class TimedOwner(ScoredOwner):
    """An owner whose reads arrive when its store brings them: ``begin`` and ``requested`` order them. Made by
    :meth:`TimedEpochs.owner`."""

    def __init__(self, clocked: TimedEpochs, pod: int, parallel: int, *arguments: Any, **settings: Any) -> None:
        self._clocked = clocked
        self.pod = pod
        """Its number among all pods of the run."""
        self._num_free = parallel
        """GETs that may begin at once."""
        self._queue: deque[_Coming] = deque()
        """Reads that wait for others to be over."""
        self._coming: dict[int, _Coming] = {}
        """The read that brings each sample which is on its way, by its id in the share."""
        super().__init__(*arguments, **settings)

    def coming(self, samples: Int64Array) -> set[_Coming]:
        """The reads that bring these, ids of the dataset; none if all are here."""
        if not self._coming:
            return set()
        local = samples[self.mapping.share.holds(samples)] - self.mapping.share.first_sample
        return {read for sample in local.tolist() if (read := self._coming.get(sample)) is not None}

    def _order(self, epoch: OpenEpoch, read: Read) -> None:
        coming = _Coming(self, epoch, read)
        self._coming.update(dict.fromkeys(read.samples.tolist(), coming))
        self._queue.append(coming)
        self._begin()

    def came(self, coming: _Coming) -> None:
        self._num_free += 1
        self._begin()
        for sample in coming.read.samples.tolist():
            if self._coming.get(sample) is coming:  # it may be on its way again
                del self._coming[sample]
        self._arrived(coming.epoch, coming.read)
        self._go_on()  # the next epoch may have opened

    def _begin(self) -> None:
        while self._num_free and self._queue:
            self._num_free -= 1
            self._clocked.requested(self._queue.popleft())


@dataclass(frozen=True)
class _FirstByte:
    coming: _Coming


@dataclass(frozen=True)
class _Trained:
    report: Callable[[], None]


@dataclass(eq=False)
class _Loop:
    """A rank's loop in one epoch, and the loader that asks for it."""

    machines: Machines
    rank: int
    """Among those of these machines."""
    length: int
    num_batches: int
    position: int = 0
    """The first that was not asked for."""
    asks: bool = False
    """Whether it is known when the loader asks for its next batch."""
    assembles: int = 0
    """Positions of the batch that is being assembled; 0: none is."""
    waits_for: set[_Coming] = field(default_factory=set)
    """Reads that bring samples of that batch."""
    ready_at: list[float] = field(default_factory=list)
    """When the loader had each batch."""
    got_at: list[float] = field(default_factory=list)
    """When the loop got each."""
    loaded: float = 0.0
    """What the loop has waited for batches."""


@dataclass
class _Team:
    """Loops that compute each step together."""

    loops: list[_Loop]
    wants_at: float
    """When they have computed what they had, and want the next batch."""
    step: int = 0

    @property
    def is_over(self) -> bool:
        return all(self.step >= loop.num_batches for loop in self.loops)


class TimedEpochs:
    """All epochs of a run on one clock.

    :param num_pods: that have reads made.
    """

    def __init__(self, clock: LoopClock, batch_size: int, num_pods: int) -> None:
        self.now = 0.0
        self.load_seconds = self.run_seconds = 0.0
        """Of the rank that waits longest, and of all ranks, in the epoch that was run last."""
        self._clock = clock
        self._batch_size = batch_size
        self._coming: list[tuple[float, int, int, _FirstByte | _Trained | _Loop]] = []
        """By time; of what comes at the same time reads first, then what was known first."""
        self._num_events = 0
        self._link: FairLink[_Coming] = FairLink(num_pods, clock.svc.bandwidth, clock.link)
        self._num_owners = 0

    def owner(self, *arguments: Any, **settings: Any) -> TimedOwner:
        """Of one more pod; parameters as of ``LocalOwner``."""
        self._num_owners += 1
        return TimedOwner(self, self._num_owners - 1, self._clock.svc.parallel, *arguments, **settings)

    def requested(self, coming: _Coming) -> None:
        """Fact: a pod's GET leaves for the store now."""
        service: FetchService = self._clock.svc
        self._at(self.now + service.fixed + service.latency, _FirstByte(coming))

    def epoch(self, all_machines: Sequence[Machines], number: int) -> Iterator[int]:
        """Requests made, a batch at a time."""
        if number:
            for machines in all_machines:
                for rank, home in enumerate(machines.homes):
                    home.entered(number, rank)
                for owner in machines.owners:
                    owner.begin(number)
        began = self.now
        loops = [
            _Loop(machines, rank, length, -(-length // self._batch_size))
            for machines in all_machines
            for rank in range(len(machines.homes))
            if (length := machines.traces.length(rank))
        ]
        teams = [_Team(loops, began)] if self._clock.in_step else [_Team([loop], began) for loop in loops]
        for team in teams:
            self._go_on(team, number)
        while not all(team.is_over for team in teams):
            event = self._next()
            if isinstance(event, _Loop):
                yield self._ask(event, number)
            for team in teams:
                if self._assemble(team):
                    self._go_on(team, number)
        ended = max((team.wants_at for team in teams), default=began)
        while min(self._coming[0][0] if self._coming else ended + 1, self._link.next_over_at) <= ended:
            self._next()
        self.now = ended
        self.load_seconds = max((loop.loaded for loop in loops), default=0.0)
        self.run_seconds = ended - began

    def _at(self, time: float, event: _FirstByte | _Trained | _Loop) -> None:
        """A GET's first byte comes then, a loop has computed its batch, or a loader asks."""
        self._num_events += 1
        heappush(self._coming, (time, type(event) is _Loop, self._num_events, event))

    def _next(self) -> _FirstByte | _Trained | _Loop | None:
        """What happens next has happened; None: reads have come."""
        over_at = self._link.next_over_at
        if not self._coming or over_at <= self._coming[0][0]:
            self.now = over_at
            for coming in self._link.over(over_at):
                coming.owner.came(coming)
                for loop in coming.loops:
                    loop.waits_for.discard(coming)
            return None
        self.now, _, _, event = heappop(self._coming)
        if type(event) is _FirstByte:
            size = self._clock.svc.size * (event.coming.read.end - event.coming.read.first)
            self._link.begin(self.now, event.coming.owner.pod, size, event.coming)
        elif type(event) is _Trained:
            event.report()
        return event

    def _ask(self, loop: _Loop, number: int) -> int:
        machines, rank = loop.machines, loop.rank
        owners, traces = machines.owners, machines.traces
        positions = np.arange(loop.position, min(loop.position + self._batch_size, loop.length), dtype=np.int64)
        asked, repeats = traces.asked(rank, positions)
        _, _, samples = ask_batch(owners, machines.homes[rank], number, rank, positions, asked, repeats)
        loop.asks = False
        loop.position += len(positions)
        loop.assembles = len(positions)
        wanted = np.concatenate((samples, asked[repeats])) if repeats.any() else samples
        loop.waits_for = {coming for owner in owners for coming in owner.coming(wanted)}
        for coming in loop.waits_for:
            coming.loops.append(loop)
        return len(positions)

    def _assemble(self, team: _Team) -> bool:
        """Loaders have those of their batches of which all is here. Returns whether any has."""
        found = [loop for loop in team.loops if loop.assembles and not loop.waits_for]
        for loop in found:
            loop.ready_at.append(self.now + loop.assembles * self._clock.h)
            loop.assembles = 0
        return bool(found)

    def _go_on(self, team: _Team, number: int) -> None:
        """Loops get what is ready for their step; once all have it they compute it. Loaders ask for what comes then."""
        while not team.is_over:
            in_it = [loop for loop in team.loops if team.step < loop.num_batches]
            for loop in in_it:
                if len(loop.got_at) == team.step < len(loop.ready_at):
                    loop.got_at.append(max(team.wants_at, loop.ready_at[team.step]))
                    loop.loaded += loop.got_at[-1] - team.wants_at
            if any(len(loop.got_at) <= team.step for loop in in_it):
                break
            team.wants_at = max(loop.got_at[-1] for loop in in_it) + self._clock.comp
            for loop in in_it:
                if loop.machines.computed is not None:
                    self._at(team.wants_at, _Trained(partial(loop.machines.computed, number, loop.rank, team.step)))
            team.step += 1
        for loop in team.loops:
            at = self._asks_at(loop, team)
            if at is not None:
                loop.asks = True
                self._at(at, loop)

    def _asks_at(self, loop: _Loop, team: _Team) -> float | None:
        """When a loader asks for its next batch; None: that is not known yet, or was said, or it has asked for all."""
        num_ready, ahead = len(loop.ready_at), self._clock.ahead
        if loop.asks or loop.assembles or loop.position >= loop.length:
            return None
        if not ahead:
            return team.wants_at if team.step == num_ready else None
        if num_ready - ahead >= len(loop.got_at):
            return None
        taken = loop.got_at[num_ready - ahead] if num_ready >= ahead else self.now
        return max(loop.ready_at[-1] if num_ready else self.now, taken)
