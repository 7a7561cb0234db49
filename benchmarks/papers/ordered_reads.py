"""What do epochs cost, one after another? The machines of pods in lockstep, or on a clock (``timed_epochs.py``).

Beyond what ``refill simulate`` does, the papers' caches: with ``private`` ones each node has its own that only its rank
uses (DELI, section 3; CoorDL), what training finds may say what stays and what comes (SHADE), and reads may take time.
A sample counts as one byte, so memory is in samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.papers.drawn_orders import DrawnOrders
from benchmarks.papers.fetched_reads import FetchingNode
from benchmarks.papers.loop_clock import NO_TIME, LoopClock
from benchmarks.papers.scored_owner import ScoredOwner
from benchmarks.papers.timed_epochs import Machines, TimedEpochs
from numpy.typing import NDArray

from refill.errors import InvalidInput
from refill.protocol.importance import rank_scores
from refill.protocol.policies import terms_of
from refill_service.cache_core.epoch_order import ExplicitTraces, KeyedTraces, Traces
from refill_service.cache_core.home_machine import HomeMachine
from refill_service.cache_core.policies.fetching_exact import Fetching
from refill_service.cache_core.sample_mapping import AbstractMapping, ChunkLayout, Int64Array
from refill_service.planning.lockstep import ask_batch, epoch_in_lockstep

__all__ = [
    "EpochReads",
    "OrderedRun",
    "keyed_orders",
    "losses_of_file",
    "losses_of_samples",
    "simulate_orders",
]

Losses = NDArray[np.float64]
"""``(positions,)``: what training found at each of a rank's positions in an epoch."""

READ_ONE_BY_ONE = ("never", "fifo", "lru", "importance")
"""Evictions that read no chunks."""


@dataclass(frozen=True)
class OrderedRun:
    """What to simulate. There are as many ranks as the orders have: of :func:`keyed_orders` one for each pod."""

    num_samples: int
    memory_samples: int
    """Of each pod."""
    chunk_size: int = 64
    num_pods: int = 1
    batch_size: int = 1
    """Positions that a rank asks for at once."""
    eviction: str = "rolling"
    private: bool = False
    read_ahead: float = 0.0
    """Part of memory that is set aside for it. Reads arrive at once here, so that it gains nothing."""
    seed: int = 0
    fetching: Fetching | None = None
    """Of ``fifo``: what is fetched before it is asked for, by nodes or by pods."""
    renews: bool = True
    """Of nodes that fetch: as of :class:`FetchingNode`."""
    clock: LoopClock | None = None
    """Of each rank's loop; None: only reads are counted."""
    policy: str = "exact"
    """Or ``redox``, which has no order to keep, no caches but one, and nothing of what is above from ``eviction`` to
    ``fetching`` but the seed."""
    group_order: str = "consecutive"
    """Here and below: of ``redox``."""
    refill: str = "best"
    window: int = 0
    """How many of a rank's next requests are looked at, to send ahead; and into what."""
    remote_memory_samples: int = 0

    def __post_init__(self) -> None:
        terms_of(self.policy)
        for name in ("num_samples", "memory_samples", "chunk_size", "num_pods", "batch_size"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.policy != "exact" and self.memory_samples < min(self.chunk_size, self.num_samples):
            raise InvalidInput(f"memory for {self.memory_samples} samples holds no chunk of {self.chunk_size}")

    @property
    def read_size(self) -> int:
        """Samples that are read at once."""
        return 1 if self.policy == "exact" and self.eviction in READ_ONE_BY_ONE else self.chunk_size


@dataclass(frozen=True)
class EpochReads:
    """Over all pods; ``hits + misses`` are the positions of the epoch."""

    epoch: int
    gets: int
    samples_read: int
    hits: int
    """Positions whose sample was in memory when its turn came."""
    misses: int
    distinct: int | None = None
    """Samples that come in an epoch which was drawn by importance; None: it was not."""
    load_seconds: float | None = None
    """What the slowest rank waits for its samples; None: there is no clock."""
    run_seconds: float | None = None
    """From the slowest rank's first request to the end of its last batch."""

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}


def keyed_orders(run: OrderedRun, num_epochs: int) -> list[Traces]:
    """The orders that jobs with this seed have, and the one after them: a job that goes on knows it."""
    if num_epochs < 1:
        raise InvalidInput(f"epochs must be at least 1, got {num_epochs}")
    return [KeyedTraces(run.num_samples, run.num_pods, seed=run.seed, epoch=epoch) for epoch in range(num_epochs + 1)]


def losses_of_file(
    path: Path, run: OrderedRun, num_epochs: int, of_file: Sequence[Int64Array] | None
) -> list[list[Losses]]:
    """The losses of each epoch's positions, by rank, of a file with one loss a line.

    :param of_file: the orders of a trace, whose lines they are of. None: as :func:`losses_of_samples`.
    """
    ranks = range(run.num_pods)
    if of_file is not None:
        found = _losses_in(path)
        lengths = [len(order) for order in of_file]
        if len(found) != sum(lengths):
            raise InvalidInput(f"losses {path} has {len(found):,} lines, and the trace {sum(lengths):,}")
        of_epochs = np.split(found, np.cumsum(lengths)[:-1])
        padded = [np.resize(losses, -(-len(losses) // run.num_pods) * run.num_pods) for losses in of_epochs]
        return [[losses[rank :: run.num_pods] for rank in ranks] for losses in padded]
    return [
        [losses[traces.asked(rank, np.arange(traces.length(rank)))[0]] for rank in ranks]
        for losses, traces in zip(losses_of_samples(path, run, num_epochs), keyed_orders(run, num_epochs), strict=False)
    ]


def losses_of_samples(path: Path, run: OrderedRun, num_epochs: int) -> Losses:
    """``(epochs, samples)``: of a file with one loss a line, of samples by their ids, the same in every epoch, or those
    of one epoch after another."""
    found = _losses_in(path)
    if len(found) not in (run.num_samples, run.num_samples * num_epochs):
        raise InvalidInput(
            f"losses {path} has {len(found):,} lines; there are {run.num_samples:,} samples, and {num_epochs} epochs"
        )
    return np.resize(found, (num_epochs, run.num_samples))


def _losses_in(path: Path) -> Losses:
    try:
        found = np.array(path.read_text().split(), dtype=np.float64)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "one loss a line, a number"
        raise InvalidInput(f"can't read losses {path}: {why}") from error
    if len(wrong := np.flatnonzero(~np.isfinite(found))):
        raise InvalidInput(f"losses {path} line {int(wrong[0]) + 1}: {found[wrong[0]]} is no loss")
    return found


def simulate_orders(
    run: OrderedRun,
    orders: Sequence[Traces],
    num_epochs: int,
    losses: Sequence[Sequence[Losses]] = (),
    drawn: DrawnOrders | None = None,
) -> Iterator[EpochReads]:
    """What each epoch reads; this epoch and the next are known.

    :param orders: of each epoch, for its ranks; there may be more than are run. With private caches there are as many
        ranks as pods.
    :param losses: of each epoch and rank, for eviction ``importance``: after each batch its samples are ranked by them.
    :param drawn: draws each epoch when it begins, of eviction ``importance`` with one cache; then there are neither
        orders nor losses.
    """
    clock = run.clock or NO_TIME
    timed = TimedEpochs(clock, run.batch_size, run.num_pods) if clock.reads_take_time else None
    caches: list[_Cluster | _FetchingNode] = [
        _FetchingNode(run, each) if run.private and run.fetching else _Cluster(run, each, of_ranks, drawn, timed)
        for each, of_ranks in (_each_rank(orders, losses, run) if run.private else [(list(orders), list(losses))])
    ]
    for epoch in range(num_epochs):
        clusters = [cache for cache in caches if isinstance(cache, _Cluster)]
        nodes = [cache for cache in caches if isinstance(cache, _FetchingNode)]
        if timed is not None and clusters:
            for _ in timed.epoch([cluster.machines(epoch) for cluster in clusters], epoch):
                pass
        else:
            for cluster in clusters:
                cluster.run(epoch)
        run_seconds = _run_together(nodes, epoch, clock)
        found = _all_of([cache.reads(epoch) for cache in caches])
        if run.clock is None:
            yield found
        elif timed is not None and clusters:
            yield replace(found, load_seconds=timed.load_seconds, run_seconds=timed.run_seconds)
        elif nodes:
            yield replace(found, load_seconds=max(node.load_seconds for node in nodes), run_seconds=run_seconds)
        else:
            loads = [of_rank for cluster in clusters for of_rank in cluster.load_seconds]
            yield replace(found, load_seconds=max(map(sum, loads)), run_seconds=_seconds(loads, clock))


def _run_together(nodes: Sequence[_FetchingNode], epoch: int, clock: LoopClock) -> float:
    """The seconds of the slowest."""
    for node in nodes:
        node.begin(epoch)
    while any([node.load() for node in nodes]):  # all of them
        last = max(node.now for node in nodes)
        for node in nodes:
            node.compute_from(last if clock.in_step else node.now)
    return max((node.run_seconds for node in nodes), default=0.0)


def _seconds(loads: Sequence[Sequence[float]], clock: LoopClock) -> float:
    """Of an epoch whose ranks load each of their batches for so long."""
    if clock.in_step:
        return sum(max(of_step) + clock.comp for of_step in zip_longest(*loads, fillvalue=0.0))
    return max(sum(of_rank) + clock.comp * len(of_rank) for of_rank in loads)


def _all_of(parts: Sequence[EpochReads]) -> EpochReads:
    gets, samples_read, hits, misses = (
        sum(getattr(part, name) for part in parts) for name in ("gets", "samples_read", "hits", "misses")
    )
    return EpochReads(parts[0].epoch, gets, samples_read, hits, misses, parts[0].distinct)


def _each_rank(
    orders: Sequence[Traces], losses: Sequence[Sequence[Losses]], run: OrderedRun
) -> Iterator[tuple[list[Traces], list[Sequence[Losses]]]]:
    """Of each rank the order that its own cache sees, and its losses."""
    for rank in range(run.num_pods):
        alone = (traces.asked(rank, np.arange(traces.length(rank)))[0] for traces in orders)
        yield (
            [ExplicitTraces(run.num_samples, {0: asked}) for asked in alone],
            [[of_epoch[rank]] for of_epoch in losses],
        )


class _Cluster:
    """Pods whose memory is one cache."""

    def __init__(
        self,
        run: OrderedRun,
        orders: list[Traces],
        losses: list[Sequence[Losses]],
        drawn: DrawnOrders | None,
        timed: TimedEpochs | None,
    ) -> None:
        self._run, self._orders, self._losses, self._drawn = run, orders, losses, drawn
        self._owners: list[Any] = []
        self._draw(0)
        num_pods, num_ranks = 1 if run.private else run.num_pods, orders[0].num_ranks
        layout = ChunkLayout(np.array([0, run.num_samples], dtype=np.int64), run.read_size)
        make: Callable[..., ScoredOwner] = timed.owner if timed else ScoredOwner
        self._owners = [self._owner(make, layout, pod, num_pods, num_ranks) for pod in range(num_pods)]
        bounds = layout.owner_bounds(num_pods)
        self._homes: list[HomeMachine[int]] = [
            HomeMachine(rank % num_pods, bounds, run.remote_memory_samples) for rank in range(num_ranks)
        ]
        self.load_seconds: list[list[float]] = []
        """Of each rank and each of its batches, in the epoch that was run last by a clock without a store."""

    def _draw(self, number: int) -> None:
        """Nobody knows before what an epoch asks for that is drawn when it begins."""
        if self._drawn is not None and number == len(self._orders):
            traces, losses = self._drawn.draw(number, [owner.kept() for owner in self._owners])
            self._orders.append(traces)
            self._losses.append(losses)

    def machines(self, number: int) -> Machines:
        """For a clock."""
        self._draw(number)
        return Machines(self._owners, self._homes, self._orders[number], self._scored if self._losses else None)

    def run(self, number: int) -> None:
        self._draw(number)
        traces, clock = self._orders[number], self._run.clock or NO_TIME
        self.load_seconds = [[] for _ in range(traces.num_ranks)]
        before = 0
        batches = self._in_turn if self._run.eviction == "importance" else epoch_in_lockstep
        for rank, _, _ in batches(self._owners, self._homes, traces, self._run.batch_size, number):
            misses = sum(owner.counts.positions_missed for owner in self._owners)
            of_rank = self.load_seconds[rank]
            num_positions = min(self._run.batch_size, traces.length(rank) - len(of_rank) * self._run.batch_size)
            of_rank.append(num_positions * clock.h + (misses - before) * clock.g)
            before = misses

    def _in_turn(
        self,
        owners: Sequence[ScoredOwner],
        homes: Sequence[HomeMachine[int]],
        traces: Traces,
        batch_size: int,
        epoch: int,
    ) -> Iterator[tuple[int, Int64Array, Int64Array]]:
        """As :func:`epoch_in_lockstep`, where a batch is asked for position by position, and training finds what each
        step of all ranks is worth before the next one is asked for."""
        if epoch:
            for rank, home in enumerate(homes):
                home.entered(epoch, rank)
            for owner in owners:
                owner.begin(epoch)
        for step, first in enumerate(range(0, traces.length(0), batch_size)):
            positions = np.arange(first, min(first + batch_size, traces.length(0)), dtype=np.int64)
            for rank, home in enumerate(homes):
                asked, repeats = traces.asked(rank, positions)
                for place in range(len(positions)):
                    each = slice(place, place + 1)
                    ask_batch(owners, home, epoch, rank, positions[each], asked[each], repeats[each])
                yield rank, positions, asked[~repeats]
            for rank in range(len(homes) if self._losses else 0):
                self._scored(epoch, rank, step)

    def _scored(self, number: int, rank: int, step: int) -> None:
        """Fact: a rank has trained with its batch of this step."""
        start = step * self._run.batch_size
        of_batch = self._losses[number][rank][start : start + self._run.batch_size]
        samples, _ = self._orders[number].asked(rank, np.arange(start, start + len(of_batch)))
        scores = rank_scores(of_batch)
        for owner in self._owners:
            owner.scored(samples, scores)
        if self._drawn is not None:
            self._drawn.scored(samples, scores)

    def reads(self, number: int) -> EpochReads:
        """Of the epoch that was run last."""
        counts = [owner.counts for owner in self._owners]
        traces = self._orders[number]
        num_positions = sum(traces.length(rank) for rank in range(traces.num_ranks))
        misses = sum(count.positions_missed for count in counts)
        gets = sum(count.refills for count in counts)
        samples_read = sum(count.samples_read for count in counts)
        distinct = None
        if self._drawn is not None:
            distinct = num_positions - len(traces.repeats_of(0, self._run.num_samples)[0])
        return EpochReads(number, gets, samples_read, num_positions - misses, misses, distinct)

    def _owner(
        self, make: Callable[..., ScoredOwner], layout: ChunkLayout, pod: int, num_pods: int, num_ranks: int
    ) -> ScoredOwner:
        share = layout.share(pod, num_pods)
        run, keeps_order = self._run, self._run.policy == "exact"
        own: dict[str, Any] = {"refill": run.refill}
        if keeps_order:
            own = {"eviction": run.eviction, "read_ahead": run.read_ahead}
            if run.fetching is not None:
                own |= {"fetch_size": run.fetching.size, "fetch_threshold": run.fetching.threshold}
        in_memory = 1 if keeps_order else max(1, run.memory_samples // run.chunk_size)
        return make(
            run.policy,
            AbstractMapping(share, min(in_memory, share.num_chunks), run.group_order),
            self._orders,
            num_ranks,
            np.ones(share.num_samples, dtype=np.int64),
            run.memory_samples,
            window=run.window,
            key=f"{run.seed} 0 {pod}",  # as of a job with this seed
            settings=terms_of(run.policy).settings_with(run.policy, own),
        )


class _FetchingNode(FetchingNode):
    """One rank whose node fetches ahead of it."""

    def __init__(self, run: OrderedRun, orders: list[Traces]) -> None:
        if run.fetching is None:
            raise ValueError("a node that fetches nothing ahead")
        self._orders = orders
        clock = run.clock or NO_TIME
        super().__init__(run.num_samples, run.memory_samples, run.fetching, clock, run.batch_size, renews=run.renews)

    def begin(self, number: int) -> None:
        traces = self._orders[number]
        self.asks_for(traces.asked(0, np.arange(traces.length(0)))[0])

    def reads(self, number: int) -> EpochReads:
        """Of the epoch that was run last."""
        return EpochReads(number, self.gets, self.gets, self._orders[number].length(0) - self.misses, self.misses)
