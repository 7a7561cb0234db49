"""What do epochs cost whose order is kept (policy ``exact``)? The machines of pods in lockstep, epoch after epoch.

Orders are keyed, as jobs have them, or come from a file. A sample counts as one byte, so memory is in samples. The
memory of all pods is one cache; with ``private`` caches each node has one of its own that only its rank uses, as in the
papers (DELI, section 3; CoorDL).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from refill.errors import InvalidInput
from refill_service.cache_core.epoch_order import ExplicitTraces, KeyedTraces, Traces
from refill_service.cache_core.exact.fetching import Fetching
from refill_service.cache_core.home_machine import HomeMachine
from refill_service.cache_core.sample_mapping import AbstractMapping, ChunkLayout, Int64Array
from refill_service.planning.fetched_reads import FetchingNode
from refill_service.planning.lockstep import LocalOwner, epoch_in_lockstep
from refill_service.planning.loop_clock import NO_TIME, LoopClock

__all__ = ["EpochReads", "OrderedRun", "dealt", "keyed_orders", "orders_of_file", "simulate_orders"]

Progress = Callable[[int, int], None]

READ_ONE_BY_ONE = ("never", "fifo", "lru")
"""Evictions that read no chunks."""


@dataclass(frozen=True)
class OrderedRun:
    """What to simulate; one rank for each pod."""

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
    clock: LoopClock | None = None
    """Of each rank's loop; None: only reads are counted."""

    def __post_init__(self) -> None:
        for name in ("num_samples", "memory_samples", "chunk_size", "num_pods", "batch_size"):
            if getattr(self, name) < 1:
                raise InvalidInput(f"{name} must be at least 1, got {getattr(self, name)}")

    @property
    def read_size(self) -> int:
        """Samples that are read at once."""
        return 1 if self.eviction in READ_ONE_BY_ONE else self.chunk_size


@dataclass(frozen=True)
class EpochReads:
    """Over all pods; ``hits + misses`` are the positions of the epoch."""

    epoch: int
    gets: int
    samples_read: int
    hits: int
    """Positions whose sample was in memory when its turn came."""
    misses: int
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


def orders_of_file(path: Path, num_samples: int | None, num_epochs: int | None) -> tuple[int, list[Int64Array]]:
    """``(samples, the order of each epoch)`` of a file with one sample id a line.

    As many epochs as are told, of as many lines as there are samples; one epoch may have any length. Where nothing is
    told, there are epochs if each run of so many lines names every sample once, else all is one order.

    :param num_samples: None: as the largest id says.
    """
    asked = _ids_of(path)
    if not len(asked):
        raise InvalidInput(f"trace {path} names no sample")
    if num_samples is None:
        num_samples = int(asked.max()) + 1
    if len(wrong := np.flatnonzero(asked >= num_samples)):
        line = int(wrong[0])
        raise InvalidInput(f"trace {path} line {line + 1}: sample {asked[line]}; there are 0 to {num_samples - 1}")
    if num_epochs is None:
        whole = len(asked) % num_samples == 0 and _each_once(asked.reshape(-1, num_samples))
        num_epochs = len(asked) // num_samples if whole else 1
    if num_epochs < 1:
        raise InvalidInput(f"epochs must be at least 1, got {num_epochs}")
    if num_epochs > 1 and len(asked) != num_epochs * num_samples:
        raise InvalidInput(
            f"trace {path} names {len(asked):,} samples; {num_epochs} epochs of {num_samples:,} are "
            f"{num_epochs * num_samples:,}"
        )
    return num_samples, list(asked.reshape(num_epochs, -1))


def _ids_of(path: Path) -> Int64Array:
    try:
        lines = path.read_text().rstrip().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise InvalidInput(f"can't read trace {path}: {why}") from error
    if lines == [""]:
        return np.empty(0, dtype=np.int64)
    ids = np.empty(len(lines), dtype=np.int64)
    for number, line in enumerate(lines):
        text = line.strip()
        if not (text.isascii() and text.isdigit() and len(text) <= 18):
            raise InvalidInput(f"trace {path} line {number + 1}: {text[:40]!r} is no sample id")
        ids[number] = int(text)
    return ids


def _each_once(orders: Int64Array) -> bool:
    return bool((np.sort(orders, axis=1) == np.arange(orders.shape[1])).all())


def dealt(orders: Sequence[Int64Array], run: OrderedRun) -> list[Traces]:
    """To ranks, as torch's DistributedSampler deals them: padded from the front."""
    found: list[Traces] = []
    for order in orders:
        padded = np.resize(order, -(-len(order) // run.num_pods) * run.num_pods)
        found.append(
            ExplicitTraces(run.num_samples, {rank: padded[rank :: run.num_pods] for rank in range(run.num_pods)})
        )
    return found


def simulate_orders(
    run: OrderedRun, orders: Sequence[Traces], num_epochs: int, progress: Progress | None = None
) -> Iterator[EpochReads]:
    """What each epoch reads; this epoch and the next are known.

    :param orders: of each epoch, for as many ranks as there are pods; there may be more than are run.
    :param progress: called now and then with (requests made, all requests).
    """
    num_requests = sum(traces.length(0) * traces.num_ranks for traces in orders[:num_epochs])
    done = 0
    caches: list[_Caches] = [
        _FetchingNode(run, each) if run.private and run.fetching else _Cluster(run, each)
        for each in (_each_rank(orders, run) if run.private else [list(orders)])
    ]
    for epoch in range(num_epochs):
        found = []
        for cache in caches:
            for requests in cache.epoch(epoch):
                done += requests
                if progress is not None:
                    progress(done, num_requests)
            found.append(cache.reads(epoch))
        yield _all_of(found)


class _Caches(Protocol):
    """One cache, and the ranks that use it."""

    def epoch(self, number: int) -> Iterator[int]:
        """Requests made, a batch at a time."""
        ...

    def reads(self, number: int) -> EpochReads:
        """Of the epoch that was run last."""
        ...


def _all_of(parts: Sequence[EpochReads]) -> EpochReads:
    gets, samples_read, hits, misses = (
        sum(getattr(part, name) for part in parts) for name in ("gets", "samples_read", "hits", "misses")
    )
    load_seconds, run_seconds = (
        max((seconds for part in parts if (seconds := getattr(part, name)) is not None), default=None)
        for name in ("load_seconds", "run_seconds")
    )
    return EpochReads(parts[0].epoch, gets, samples_read, hits, misses, load_seconds, run_seconds)


def _each_rank(orders: Sequence[Traces], run: OrderedRun) -> Iterator[list[Traces]]:
    """Of each rank the order that its own cache sees."""
    for rank in range(run.num_pods):
        alone = (traces.asked(rank, np.arange(traces.length(rank)))[0] for traces in orders)
        yield [ExplicitTraces(run.num_samples, {0: asked}) for asked in alone]


class _Cluster:
    """Pods whose memory is one cache."""

    def __init__(self, run: OrderedRun, orders: list[Traces]) -> None:
        self._run, self._orders = run, orders
        num_pods = orders[0].num_ranks
        layout = ChunkLayout(np.array([0, run.num_samples], dtype=np.int64), run.read_size)
        self._owners = [self._owner(layout, pod, num_pods) for pod in range(num_pods)]
        bounds = layout.owner_bounds(num_pods)
        self._homes: list[HomeMachine[int]] = [HomeMachine(pod, bounds, 0) for pod in range(num_pods)]
        self._misses: list[int] = []
        """Of each rank, in the running epoch."""

    def epoch(self, number: int) -> Iterator[int]:
        traces = self._orders[number]
        self._misses = [0] * traces.num_ranks
        before = 0
        for rank, positions, _ in epoch_in_lockstep(self._owners, self._homes, traces, self._run.batch_size, number):
            if self._run.clock is not None:
                misses = sum(owner.counts.misses for owner in self._owners)
                self._misses[rank] += misses - before
                before = misses
            yield len(positions)

    def reads(self, number: int) -> EpochReads:
        counts = [owner.counts for owner in self._owners]
        traces, clock = self._orders[number], self._run.clock
        lengths = [traces.length(rank) for rank in range(traces.num_ranks)]
        misses = sum(count.misses for count in counts)
        gets = sum(count.refills for count in counts)
        samples_read = sum(count.samples_read for count in counts)
        found = EpochReads(number, gets, samples_read, sum(lengths) - misses, misses)
        if clock is None:
            return found
        loading = [length * clock.h + of_rank * clock.g for length, of_rank in zip(lengths, self._misses, strict=True)]
        running = [
            load + clock.computing_seconds(length, self._run.batch_size)
            for load, length in zip(loading, lengths, strict=True)
        ]
        return replace(found, load_seconds=max(loading), run_seconds=max(running))

    def _owner(self, layout: ChunkLayout, pod: int, num_pods: int) -> LocalOwner:
        share = layout.share(pod, num_pods)
        run = self._run
        own: dict[str, Any] = {"eviction": run.eviction, "read_ahead": run.read_ahead}
        if run.fetching is not None:
            own |= {"fetch_size": run.fetching.size, "fetch_threshold": run.fetching.threshold}
        return LocalOwner(
            "exact",
            AbstractMapping(share, min(1, share.num_chunks)),
            self._orders,
            num_pods,
            np.ones(share.num_samples, dtype=np.int64),
            run.memory_samples,
            key=f"{run.seed} 0 {pod}",  # as of a job with this seed
            own=own,
        )


class _FetchingNode:
    """One rank whose node fetches ahead of it."""

    def __init__(self, run: OrderedRun, orders: list[Traces]) -> None:
        if run.fetching is None:
            raise ValueError("a node that fetches nothing ahead")
        self._run, self._orders = run, orders
        self._node = FetchingNode(run.num_samples, run.memory_samples, run.fetching, run.clock or NO_TIME)

    def epoch(self, number: int) -> Iterator[int]:
        traces = self._orders[number]
        asked, _ = traces.asked(0, np.arange(traces.length(0)))
        return self._node.epoch(asked, self._run.batch_size)

    def reads(self, number: int) -> EpochReads:
        node, length = self._node, self._orders[number].length(0)
        found = EpochReads(number, node.gets, node.gets, length - node.misses, node.misses)
        if self._run.clock is None:
            return found
        return replace(found, load_seconds=node.load_seconds, run_seconds=node.run_seconds)
