"""What do the pods of a planned job read? Their shares with no I/O: what is read has arrived before anybody asks again.

Which pod has a share, what memory it has there and what is read of it are decided by the code that decides in pods.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from refill.protocol.job_spec import JobSpec
from refill.protocol.plan_settings import PlanSettings
from refill.protocol.share_owners import share_owners
from refill_service.cache_core.fair_queue import Need
from refill_service.cache_core.planned.job_orders import JobOrders
from refill_service.cache_core.planned.job_plan import plan_of, with_plan
from refill_service.cache_core.planned.placed_order import ChunkRead
from refill_service.cache_core.planned.share_memory import ShareMemory
from refill_service.cache_core.planned.shared_chunks import SharedChunks
from refill_service.cache_core.sample_mapping import ChunkLayout, Int64Array


def made_up_plan(
    spec: JobSpec, layout: ChunkLayout, lengths: Int64Array, pod_bytes: int, num_pods: int, at_once_bytes: int = 0
) -> PlanSettings:
    """The plan that pods would make for a job with so much memory for samples on each of them.

    :param at_once_bytes: that loaders ask for at once on each of them; 0: not known.
    """
    sample_bytes = int(lengths.sum()) / max(1, len(lengths))
    spec = with_plan(spec, pod_bytes, num_pods, layout.chunk_size, sample_bytes, at_once_bytes)
    return plan_of(spec, f"{len(lengths)} simulated samples", layout)


@dataclass
class PlannedCounts:
    """What one epoch read, over all pods."""

    gets: int = 0
    samples_read: int = 0
    bytes_read: int = 0
    misses: int = 0
    """Samples that were not in memory when they were asked for."""
    single_reads: int = 0
    """GETs for one sample."""

    def read(self, lengths: Int64Array) -> None:
        """Fact: one GET brings samples of these lengths."""
        self.gets += 1
        self.samples_read += len(lengths)
        self.bytes_read += int(lengths.sum())
        self.single_reads += len(lengths) == 1


@dataclass
class KeptForOthers:
    """What simulated jobs with one ``read_seed`` have read for each other."""

    pod_bytes: int
    """That each of them may keep on a pod, beside its memory for samples."""
    unit_bytes: int = 1
    """What a byte of a sample stands for there."""
    of_shares: dict[int, SharedChunks[bool]] = field(default_factory=lambda: defaultdict(SharedChunks))
    """A sample is there, or not."""


class PlannedPods:
    """The pods of a simulated planned job, which read as real ones would, without a store.

    :param lengths: ``(samples,)`` bytes of each sample of the dataset.
    :param pod_bytes: memory for samples on each pod.
    :param kept: of a job with a ``read_seed``, the same for all that have it; None: it reads alone.
    """

    def __init__(
        self,
        settings: PlanSettings,
        layout: ChunkLayout,
        lengths: Int64Array,
        pod_bytes: int,
        num_pods: int,
        kept: KeptForOthers | None = None,
    ) -> None:
        self.counts: dict[int, PlannedCounts] = defaultdict(PlannedCounts)
        """By epoch: also of what is read before anybody asks for it."""
        self._orders = JobOrders(settings, layout, lengths.__getitem__)
        self._shares = [_ShareAtPod(self._orders, number, self.counts, kept) for number in range(settings.num_shares)]
        owners, sizes = share_owners(settings.num_shares, num_pods), self._orders.shares.sizes
        of_pods = np.zeros(num_pods, dtype=np.int64)
        np.add.at(of_pods, owners, sizes)
        for share, owner, size in zip(self._shares, owners.tolist(), sizes.tolist(), strict=True):
            of_pod = max(1, int(of_pods[owner]))
            if kept is not None:
                share.may_keep(kept.pod_bytes * size // of_pod)
            share.memory_is(pod_bytes * size // of_pod)

    @property
    def held_bytes(self) -> int:
        """Of samples in memory that nobody has asked for."""
        return sum(share.memory.held_bytes for share in self._shares)

    def lists_are_known(self, epoch: int, samples: Int64Array) -> None:
        """Fact: ranks ask for ``(n,)`` samples in this order, and all pods know it."""
        for share in self._shares:
            share.list_is_known(epoch, samples, self._orders.shares_of(samples))

    def ask_for(self, epoch: int, positions: Int64Array, samples: Int64Array) -> None:
        """Samples at ``(n,)`` positions of a list that is known, all different."""
        shares = self._orders.shares_of(samples)
        for number in np.unique(shares).tolist():
            here = np.flatnonzero(shares == number)
            self._shares[number].ask_for(epoch, positions[here], samples[here])

    def ask(self, epoch: int, positions: Int64Array) -> Int64Array:
        """The samples at ``(n,)`` positions of an epoch, all different."""
        shares, places = self._orders.places(epoch, positions)
        found = np.empty(len(positions), dtype=np.int64)
        for number in np.unique(shares).tolist():
            here = np.flatnonzero(shares == number)
            found[here] = self._shares[number].ask(epoch, places[here])
        return found


class _ShareAtPod:
    """Carries out what the memory of a share decides."""

    def __init__(
        self, orders: JobOrders, number: int, counts: dict[int, PlannedCounts], kept: KeptForOthers | None
    ) -> None:
        share, self._lengths = orders.share(number)
        self.memory = ShareMemory(share.starts, self._lengths, orders.planned_bytes(number))
        self._orders, self._number, self._samples, self._counts = orders, number, share.samples, counts
        self._num_entries = len(share.samples)
        """At most, of the order of an epoch: there may be more than samples where it is a list."""
        self._here: dict[int, NDArray[np.bool_]] = {}
        """By epoch, which samples are in memory."""
        self._others = None if kept is None else kept.of_shares[number]
        self._unit_bytes = 1 if kept is None else kept.unit_bytes
        if self._others is not None:
            self._others.joined(self.memory)

    def may_keep(self, num_bytes: int) -> None:
        if self._others is not None:
            self._others.may_keep(self.memory, num_bytes)

    def memory_is(self, capacity_bytes: int) -> None:
        self.memory.memory_is(capacity_bytes)
        self._read_ahead()

    def ask(self, epoch: int, places: Int64Array) -> Int64Array:
        if not self.memory.knows(epoch):
            self._plan(epoch)
        samples = self._asked(epoch, places)
        while (wanted := self.memory.next_wanted()) is not None:
            self._plan(wanted)
        return samples

    def list_is_known(self, epoch: int, samples: Int64Array, shares: Int64Array) -> None:
        """Fact: ranks ask for ``(n,)`` samples of these shares in this order."""
        positions = np.flatnonzero(shares == self._number)
        placed = self.memory.placed_list(np.searchsorted(self._samples, samples[positions]), positions)
        self._here.pop(epoch, None)
        self.memory.grown(epoch, placed)
        self._num_entries = max(self._num_entries, len(placed.lengths))
        self.memory.warmed(epoch, 0)
        self._read_ahead()

    def ask_for(self, epoch: int, positions: Int64Array, samples: Int64Array) -> None:
        self._asked(epoch, self.memory.places_of(epoch, positions, np.searchsorted(self._samples, samples)))

    def _asked(self, epoch: int, places: Int64Array) -> Int64Array:
        asked, counts = self.memory.asked(epoch, places), self._counts[epoch]
        missing = np.unique(asked.samples[~self._in_memory(epoch)[asked.samples]])
        counts.misses += len(missing)
        ordered = [read.samples for read in asked.reads if read.epoch == epoch]
        for sample in np.setdiff1d(missing, np.concatenate([missing[:0], *ordered])).tolist():
            counts.read(self._lengths[sample : sample + 1])
        self._in_memory(epoch)[asked.samples] = asked.stay & self._in_memory(epoch)[asked.samples]
        self._gone(epoch, asked.samples[~asked.stay])
        for number, dropped in asked.dropped:
            self._in_memory(number)[dropped] = False
            self._gone(number, dropped)
        self._arrive(asked.reads)
        self._read_ahead()
        return self._samples[asked.local]

    def _plan(self, epoch: int) -> None:
        order = self._orders.order(epoch, self._number, self._lengths)
        self.memory.planned(epoch, self.memory.placed(order))
        self._read_ahead()

    def _read_ahead(self) -> None:
        ordered: list[ChunkRead] = []
        while (reads := self.memory.read_ahead()) is not None:
            ordered += reads
        self._arrive(ordered)

    def _arrive(self, reads: list[ChunkRead]) -> None:
        for read in reads:
            if self._others is not None:
                self._arrive_for_all(read, self._others)
                continue
            self._counts[read.epoch].read(self._lengths[read.local[0] : read.local[-1] + 1])
            self._in_memory(read.epoch)[read.samples] = self.memory.arrived(read)

    def _arrive_for_all(self, read: ChunkRead, others: SharedChunks[bool]) -> None:
        """From another job that has it, or else from the store, for the others, too."""
        memory, epoch = self.memory, read.epoch
        places = memory.places_in(read.chunk, read.samples)
        if others.find(memory, epoch, read.chunk, places) is not None:
            self._in_memory(epoch)[read.samples] = memory.arrived(read)
            others.has(memory, epoch, read.chunk)
            return
        under_way = others.begins(memory, epoch, read.chunk, places, Need(read.due))
        self._counts[epoch].read(self._lengths[read.local[0] : read.local[-1] + 1])
        self._in_memory(epoch)[read.samples] = memory.arrived(read)
        gone = ~memory.are_here(epoch, read.samples)
        others.came(under_way, [True] * len(places), self._sizes(read.local[gone]))
        others.ended(under_way)

    def _gone(self, epoch: int, samples: Int64Array) -> None:
        """Fact: these have left memory."""
        if self._others is not None and self._others.kept_bytes(self.memory):
            chunks = self.memory.chunks_of(samples).tolist()
            self._others.gone(self.memory, epoch, zip(chunks, self._sizes(samples), strict=True))

    def _sizes(self, samples: Int64Array) -> list[int]:
        """What these take where they are kept for others."""
        found: list[int] = (self._unit_bytes * self._lengths[samples]).tolist()
        return found

    def _in_memory(self, epoch: int) -> NDArray[np.bool_]:
        if epoch not in self._here:
            self._here = {number: here for number, here in self._here.items() if here.any()}
            self._here[epoch] = np.zeros(self._num_entries, dtype=bool)
        return self._here[epoch]
