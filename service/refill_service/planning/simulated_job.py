"""What do the epochs of a job read? Its pods with no I/O: what is read has arrived before anybody asks again.

The code that decides in pods decides here: of planned jobs the memory of their shares (``planned_pods.py``), of live
ones the machines of owners and home pods (``lockstep.py``). Ranks are in step, each asks for its next batch in turn.
``refill simulate`` and ``refill analyze`` stand on this file.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from refill.errors import InvalidInput, MemoryTooSmall
from refill.protocol.class_order import in_turns
from refill.protocol.dealing import Dealing
from refill.protocol.job_spec import JobSpec
from refill.protocol.plan_settings import PlanSettings
from refill_service.cache_core.epoch_order import KeyedTraces, Traces
from refill_service.cache_core.home_machine import HomeMachine
from refill_service.cache_core.planned.job_orders import JobOrders
from refill_service.cache_core.policies.registry import kind_of
from refill_service.cache_core.sample_mapping import (
    AbstractMapping,
    ChunkLayout,
    Int64Array,
    abstract_chunks_for_budget,
)
from refill_service.planning.lockstep import LocalOwner, epoch_in_lockstep
from refill_service.planning.planned_pods import KeptForOthers, PlannedPods, made_up_plan

LOOP_BATCH = 256
"""About what a training loop asks a pod for at once."""

Batch = tuple[Int64Array, Int64Array]
"""``(places, samples)``."""


@dataclass(frozen=True)
class SimulatedPods:
    """The pods of a simulated job, and what each has for it."""

    num_pods: int
    memory_bytes: int
    """For samples, on each."""
    remote_bytes: int = 0
    """What each can hold of what others send ahead."""
    at_once_bytes: int = 0
    """That loaders ask for at once, on each; 0: it is not known."""

    def __post_init__(self) -> None:
        for name, least in (("num_pods", 1), ("memory_bytes", 1), ("remote_bytes", 0), ("at_once_bytes", 0)):
            if getattr(self, name) < least:
                raise InvalidInput(f"{name} must be at least {least}, got {getattr(self, name)}")


@dataclass(frozen=True)
class EpochReads:
    """What one epoch read, over all pods; ``hits + misses`` are its positions."""

    epoch: int
    gets: int
    samples_read: int
    bytes_read: int
    hits: int
    """Positions whose sample was in memory when its turn came."""
    misses: int
    remote_requests: int | None
    """That home pods sent to owners; None, here and below: of planned jobs it is not counted."""
    sent_ahead: int | None
    """Samples that owners sent before they were asked for."""
    held_peak: int
    """The most bytes of samples in memory after a batch."""
    delivered: int
    """Different samples that ranks got."""
    duplicates: int
    """Deliveries of a sample that had come, to a position that repeats no other."""

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


class SimulatedJob(ABC):
    """A job on pods that it has to itself; its epochs are run one after another, from 0. Made by :meth:`of`."""

    plan: PlanSettings | None = None
    """Of a planned job."""
    num_pods: int
    chunks_in_memory: float
    """At once, on a pod, on average."""

    @classmethod
    def of(
        cls,
        spec: JobSpec,
        first_sample: Int64Array,
        lengths: Int64Array,
        pods: SimulatedPods,
        num_epochs: int,
        *,
        batch_size: int = LOOP_BATCH,
        orders: Sequence[Traces] = (),
        part: Int64Array | None = None,
        key: str = "",
        kept: KeptForOthers | None = None,
    ) -> SimulatedJob:
        """
        Raises :class:`InvalidInput` when no blob holds a chunk, :class:`MemoryTooSmall` when a pod's memory holds none.

        :param first_sample: ``(blobs + 1,)``, as of :class:`ChunkLayout`.
        :param lengths: ``(samples,)`` bytes of each.
        :param num_epochs: that are run; of an order that follows from the seed the one after them is known, too.
        :param batch_size: positions that a rank asks for at once.
        :param orders: that ranks have in lists, of each epoch; the job's ``order`` is ``explicit``. Pods know those
            that are there when an epoch begins: also the next one, unless it is appended later.
        :param part: ``(n,)`` ids, ascending: each epoch asks for these alone, in the plan's order, as ``EpochSampler``
            lists them. The job is planned, and its ``order`` is ``explicit``.
        :param key: of what live policies draw; as of a job with this seed if it is not given.
        :param kept: of a planned job with a ``read_seed``, as of :class:`PlannedPods`.
        """
        for name, value in (("chunk_size", spec.chunk_size), ("epochs", num_epochs), ("batch_size", batch_size)):
            if value < 1:
                raise InvalidInput(f"{name} must be at least 1, got {value}")
        layout = ChunkLayout(first_sample, spec.chunk_size)
        if spec.is_planned:
            return _PlannedJob(spec, layout, lengths, pods, batch_size, orders, part, kept)
        known = orders or [KeyedTraces.of_job(spec, epoch, layout.num_samples) for epoch in range(num_epochs + 1)]
        return _LiveJob(spec, layout, lengths, pods, batch_size, known, key or f"{spec.seed} 0")

    def __init__(self, lengths: Int64Array, pods: SimulatedPods) -> None:
        self.num_pods = pods.num_pods
        self.held: list[int] = []
        """Bytes of samples in memory after each batch of the epoch that was run last."""
        self._lengths = lengths
        self._came = np.zeros(len(lengths), dtype=np.int64)

    def epoch(self, number: int) -> Iterator[Batch]:
        """``(places, samples)`` of each batch of a rank, without positions that repeat others. Places are of all ranks
        together: a step is a run of them."""
        self._came[:] = 0
        self.held = []
        for places, samples in self._batches(number):
            np.add.at(self._came, samples, 1)
            self.held.append(self._held_bytes())
            yield places, samples

    def reads(self, number: int) -> EpochReads:
        """Of the epoch that was run last."""
        return EpochReads(
            number,
            **self._counts(number),
            held_peak=max(self.held, default=0),
            delivered=int(np.count_nonzero(self._came)),
            duplicates=int((self._came[self._came > 1] - 1).sum()),
        )

    def run(self, num_epochs: int) -> list[EpochReads]:
        found = []
        for number in range(num_epochs):
            for _ in self.epoch(number):
                pass
            found.append(self.reads(number))
        return found

    def most_sent_ahead(self) -> int:
        """Bytes that the fullest pod has now of what others sent ahead."""
        return 0

    @abstractmethod
    def _batches(self, number: int) -> Iterator[Batch]: ...

    @abstractmethod
    def _held_bytes(self) -> int: ...

    @abstractmethod
    def _counts(self, number: int) -> dict[str, Any]:
        """What an :class:`EpochReads` has of the pods."""


class _LiveJob(SimulatedJob):
    """A simulated job whose policy decides as it is asked."""

    def __init__(
        self,
        spec: JobSpec,
        layout: ChunkLayout,
        lengths: Int64Array,
        pods: SimulatedPods,
        batch_size: int,
        orders: Sequence[Traces],
        key: str,
    ) -> None:
        super().__init__(lengths, pods)
        self._orders, self._batch_size = orders, batch_size
        self._keeps_order, self._memory_bytes = kind_of(spec.policy).keeps_order, pods.num_pods * pods.memory_bytes
        self._num_ranks = orders[0].num_ranks
        self._owners = [
            self._owner(spec, layout, pod, pods.memory_bytes, f"{key} {pod}") for pod in range(pods.num_pods)
        ]
        bounds = layout.owner_bounds(pods.num_pods)
        self._homes: list[HomeMachine[int]] = [
            HomeMachine(rank % pods.num_pods, bounds, pods.remote_bytes) for rank in range(self._num_ranks)
        ]
        self._got_bytes = 0
        self.chunks_in_memory = sum(owner.mapping.num_abstract_chunks for owner in self._owners) / pods.num_pods

    def _owner(self, spec: JobSpec, layout: ChunkLayout, pod: int, memory_bytes: int, key: str) -> LocalOwner:
        """As a pod makes it."""
        share = layout.share(pod, self.num_pods)
        lengths = self._lengths[share.first_sample : share.end_sample]
        num_abstract_chunks = 0
        if share.num_chunks:
            chunk_bytes = np.add.reduceat(lengths, share.starts[:-1] - share.first_sample)
            num_abstract_chunks = abstract_chunks_for_budget(share.num_chunks, float(chunk_bytes.mean()), memory_bytes)
            _check_memory(memory_bytes, share.num_samples, layout.chunk_size, int(chunk_bytes.max()))
        return LocalOwner(
            spec.policy,
            AbstractMapping(share, num_abstract_chunks, spec.group_order),
            self._orders,
            self._num_ranks,
            lengths,
            memory_bytes,
            window=spec.prefetch_window if self.num_pods > 1 else 0,  # one pod has nobody to send ahead to
            key=key,
            settings=spec.settings_of_policy(),
        )

    def _batches(self, number: int) -> Iterator[Batch]:
        self._got_bytes, traces = 0, self._orders[number]
        for rank, positions, samples in epoch_in_lockstep(self._owners, self._homes, traces, self._batch_size, number):
            self._got_bytes += int(self._lengths[samples].sum())
            yield positions * self._num_ranks + rank, samples

    def most_sent_ahead(self) -> int:
        return max(home.remote_memory.used for home in self._homes)

    def _held_bytes(self) -> int:
        """With what was sent ahead. What keeps order gives copies: its samples stay in memory, and that is full."""
        if self._keeps_order:
            return self._memory_bytes
        return sum(owner.counts.bytes_filled for owner in self._owners) - self._got_bytes

    def _counts(self, number: int) -> dict[str, Any]:
        counts, traces = [owner.counts for owner in self._owners], self._orders[number]
        misses = sum(count.positions_missed for count in counts)
        return {
            "gets": sum(count.refills for count in counts),
            "samples_read": sum(count.samples_read for count in counts),
            "bytes_read": sum(count.bytes_read for count in counts),
            "hits": sum(traces.length(rank) for rank in range(traces.num_ranks)) - misses,
            "misses": misses,
            "remote_requests": sum(home.counts(number).remote_on_demand for home in self._homes),
            "sent_ahead": sum(count.sent_ahead for count in counts),
        }


class _PlannedJob(SimulatedJob):
    """Positions that pad the ranks' lists are left out."""

    def __init__(
        self,
        spec: JobSpec,
        layout: ChunkLayout,
        lengths: Int64Array,
        pods: SimulatedPods,
        batch_size: int,
        orders: Sequence[Traces],
        part: Int64Array | None,
        kept: KeptForOthers | None,
    ) -> None:
        super().__init__(lengths, pods)
        self.plan = made_up_plan(spec, layout, lengths, pods.memory_bytes, pods.num_pods, pods.at_once_bytes)
        chunk_bytes = np.add.reduceat(lengths, layout.starts(np.arange(layout.num_chunks, dtype=np.int64)))
        of_pod = -(-layout.num_samples // pods.num_pods)
        _check_memory(pods.memory_bytes, of_pod, layout.chunk_size, int(chunk_bytes.max()))
        self.chunks_in_memory = pods.memory_bytes * layout.num_chunks / int(lengths.sum())
        self._pods = PlannedPods(self.plan, layout, lengths, pods.memory_bytes, pods.num_pods, kept)
        self._dealing = Dealing(layout.num_samples, spec.world_size)
        self._batch_size, self._orders = batch_size, orders
        self._part, self._layout = part, layout
        self._num_positions = 0

    def _batches(self, number: int) -> Iterator[Batch]:
        self._num_positions = 0
        if self._orders:
            asked = self._listed(number)
        else:
            asked = self._keyed(number) if self._part is None else self._in_turns(number, self._part)
        for positions, samples in asked:
            self._num_positions += len(positions)
            yield positions, samples

    def _keyed(self, number: int) -> Iterator[Batch]:
        for first in range(0, self._dealing.per_rank, self._batch_size):
            places = np.arange(first, min(first + self._batch_size, self._dealing.per_rank), dtype=np.int64)
            for rank in range(self._dealing.num_ranks):
                positions = self._dealing.positions(rank, places)
                if len(positions := positions[positions < len(self._lengths)]):
                    yield positions, self._pods.ask(number, positions)

    def _listed(self, number: int) -> Iterator[Batch]:
        traces = self._orders[number]
        places = np.arange(traces.length(0), dtype=np.int64)
        lists = [traces.asked(rank, places) for rank in range(traces.num_ranks)]
        self._pods.lists_are_known(number, np.stack([asked for asked, _ in lists], axis=1).ravel())
        for first in range(0, len(places), self._batch_size):
            part = slice(first, first + self._batch_size)
            for rank, (asked, repeats) in enumerate(lists):
                positions = places[part] * traces.num_ranks + rank
                self._pods.ask_for(number, positions, asked[part])
                yield positions[~repeats[part]], asked[part][~repeats[part]]

    def _in_turns(self, number: int, part: Int64Array) -> Iterator[Batch]:
        assert self.plan is not None
        listed = in_turns(part, JobOrders(self.plan, self._layout, self._lengths.__getitem__).whole(number))
        self._pods.lists_are_known(number, listed)
        for first in range(0, len(listed), self._batch_size):
            samples = listed[first : first + self._batch_size]
            positions = np.arange(first, first + len(samples))
            self._pods.ask_for(number, positions, samples)
            yield positions, samples

    def _held_bytes(self) -> int:
        return self._pods.held_bytes

    def _counts(self, number: int) -> dict[str, Any]:
        counts = self._pods.counts[number]
        return {
            "gets": counts.gets,
            "samples_read": counts.samples_read,
            "bytes_read": counts.bytes_read,
            "hits": self._num_positions - counts.misses,
            "misses": counts.misses,
            "remote_requests": None,
            "sent_ahead": None,
        }


def _check_memory(memory_bytes: int, num_samples: int, chunk_size: int, largest_bytes: int) -> None:
    if largest_bytes > memory_bytes:
        raise MemoryTooSmall(
            f"memory too small: {memory_bytes:,} bytes for the {num_samples:,} samples of a pod do not hold its "
            f"largest chunk of {chunk_size}, {largest_bytes:,} bytes: raise the memory or lower the chunk size",
            chunk_bytes=largest_bytes,
        )
