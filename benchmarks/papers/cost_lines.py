"""What does a run cost under each way to read its dataset, and where do the lines cross?

GETs and bytes of an epoch are simulated with the code that decides in pods, on a part of the dataset; they go with the
part of it that memory holds, and not with the size of a sample. Times are the floor of ``analysis.read_seconds``, for
all ways the same. So a cost is a sum over epochs, and what is cheapest is looked up at each number of epochs, and at
each size of a sample; with more or less memory it is simulated anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from benchmarks.papers.deli_cost import Run, RunCost, run_cost
from benchmarks.papers.ordered_reads import EpochReads, OrderedRun, keyed_orders, simulate_orders

from refill.errors import InvalidInput
from refill_service.cache_core.policies.fetching_exact import HALF, Fetching
from refill_service.planning.analysis import Analysis, DatasetShape, StoreTerms, analyze, read_seconds
from refill_service.planning.run_cost import PROVIDERS, ProviderPrices
from refill_service.planning.simulated_job import LOOP_BATCH

__all__ = [
    "MEMORY_PARTS",
    "MOST_EPOCHS",
    "SAMPLE_SIZES",
    "WAYS",
    "ComparedRun",
    "Line",
    "Reads",
    "Way",
    "cheapest_by_epochs",
    "cheapest_by_memory",
    "cheapest_by_sample_size",
    "line_of",
    "with_memory_parts",
]

MOST_EPOCHS = 1000
"""Beyond it no crossing is looked for."""
SAMPLE_SIZES = tuple(round(1000 * 1.05**step) for step in range(237))
"""From 1 kB to 100 MB, each 5 % larger than the one before: so exactly is a crossing known."""
MEMORY_PARTS = (0.02, 0.05, 0.1, 0.15, 0.2, 0.35, 0.5, 1.0)
"""Of the dataset; a crossing is known to lie between two of them. Each is simulated, so they are few."""
_PAGE = 1000
"""Objects that one request lists."""
_Place = TypeVar("_Place", int, float)


@dataclass(frozen=True)
class ComparedRun:
    num_samples: int
    sample_bytes: int
    memory_fraction: float
    """Part of the dataset that all machines together have memory for; DELI's disks the same."""
    epochs: int
    nodes: int = 1
    """Machines, each with a pod."""
    vm_hour: float = 0.0
    """Dollars for a machine."""
    memory_gb_hour: float = 0.0
    """Dollars for memory that is rented for pods; 0: machines have it."""
    disk_gb: float = 0.0
    """Dollars for a gigabyte of a machine's disk, a month."""
    elsewhere: bool = False
    """Machines are not at the provider, so that what they read is traffic that is billed."""
    compute_samples_per_second: float | None = None
    """How fast all machines train if data were always there; None: an epoch takes as long as its reads."""
    store: StoreTerms = field(default_factory=StoreTerms)
    most_simulated: int = 8192
    seed: int = 1

    def __post_init__(self) -> None:
        if not self.simulated_memory:
            raise InvalidInput(
                f"{self.memory_fraction:.3%} of {self.simulated:,} simulated samples is none: raise the memory"
            )

    @property
    def simulated(self) -> int:
        return min(self.num_samples, self.most_simulated)

    @property
    def simulated_memory(self) -> int:
        return int(self.simulated * self.memory_fraction)

    @property
    def data_gb(self) -> float:
        return self.num_samples * self.sample_bytes / 1e9


@dataclass(frozen=True)
class Reads:
    """What an epoch reads, for each sample of the dataset."""

    gets: float
    samples: float


@dataclass(frozen=True)
class Way:
    """A way to read a dataset."""

    name: str
    keeps_order: bool
    """Whether a loop gets the samples in the order in which it asks for them."""
    simulate: Callable[[ComparedRun], tuple[Reads, Reads]]
    """``(first epoch, later ones)``."""
    lists: bool = False
    """Whether each sample is an object, and the bucket is listed."""
    fetches: bool = False
    """Whether it is listed for each fetch of half of a machine's cache, as DELI does, and not once an epoch."""
    on_disk: bool = False
    """Whether each machine has a disk for it: of the whole dataset, or of its cache if it fetches."""
    in_memory: bool = False
    chunk_size: int = 1
    """Samples that are read together; a dataset that has fewer is not read in this way."""


@dataclass(frozen=True)
class Line:
    """A way, and what it reads in a run."""

    name: str
    first: Reads
    later: Reads

    @property
    def way(self) -> Way:
        return WAYS[self.name]

    def hours(self, run: ComparedRun) -> float:
        return (self._seconds(run, self.first) + (run.epochs - 1) * self._seconds(run, self.later)) / 3600

    def cost(self, run: ComparedRun, prices: ProviderPrices) -> RunCost:
        """Of the whole run."""
        first, later = self.cost_parts(run, prices)
        more = run.epochs - 1
        return RunCost(
            first.api + more * later.api,
            first.storage,
            first.vms + more * later.vms,
            first.traffic + more * later.traffic,
        )

    def cost_parts(self, run: ComparedRun, prices: ProviderPrices) -> tuple[RunCost, RunCost]:
        """Of the first epoch with a month of storage, and what each later one adds."""
        return self._cost(run, prices, self.first), self._cost(run, prices, self.later)

    def _cost(self, run: ComparedRun, prices: ProviderPrices, reads: Reads) -> RunCost:
        on_a_disk = run.data_gb if self.way.on_disk else 0.0
        if self.way.fetches:
            on_a_disk *= run.memory_fraction / run.nodes
        seconds = self._seconds(run, reads)
        cost = run_cost(
            Run(
                prices=prices,
                run_seconds=seconds,
                vm_hour=run.vm_hour,
                nodes=run.nodes,
                gets=round(reads.gets * run.num_samples),
                listed=run.num_samples if self.way.lists and reads.gets else 0,
                fetch_size=self._fetch_size(run),
                page=_PAGE,
                disk_gb=run.disk_gb,
                cache_gb=on_a_disk,
                data_gb=run.data_gb,
                read_gb=reads.samples * run.data_gb if run.elsewhere else 0.0,
            )
        )
        memory_gb = run.memory_fraction * run.data_gb if self.way.in_memory else 0.0
        return RunCost(cost.api, cost.storage, cost.vms + memory_gb * run.memory_gb_hour * seconds / 3600, cost.traffic)

    def _seconds(self, run: ComparedRun, reads: Reads) -> float:
        reading = 0.0
        if reads.gets:
            gets = reads.gets * run.num_samples
            chunk_bytes = reads.samples / reads.gets * run.sample_bytes
            reading = read_seconds(gets / run.nodes, chunk_bytes, run.store)
            if self.way.lists:
                pages = -(-run.num_samples // _PAGE)
                fetches = max(1.0, gets / run.nodes / self._fetch_size(run)) if self.way.fetches else 1
                reading += pages * fetches * run.store.latency_seconds
        if run.compute_samples_per_second is None:
            return reading
        return max(reading, run.num_samples / run.compute_samples_per_second)

    def _fetch_size(self, run: ComparedRun) -> int:
        return max(1, int(run.num_samples * run.memory_fraction) // run.nodes // 2) if self.way.fetches else 0


def line_of(name: str, run: ComparedRun) -> Line:
    """Simulated: seconds for some of them."""
    return Line(name, *WAYS[name].simulate(run))


def with_memory_parts(run: ComparedRun) -> list[ComparedRun]:
    """The run itself, and with each other part of the dataset in memory that crossings are looked for at."""
    own = run.memory_fraction
    others = [part for part in MEMORY_PARTS if int(run.simulated * part) and abs(part - own) > own / 100]
    return [replace(run, memory_fraction=part) for part in sorted([own, *others])]


def _one_by_one(run: ComparedRun) -> tuple[Reads, Reads]:
    return Reads(1.0, 1.0), Reads(1.0, 1.0)


def _copied(run: ComparedRun) -> tuple[Reads, Reads]:
    return Reads(run.nodes, run.nodes), Reads(0.0, 0.0)


def _deli(run: ComparedRun) -> tuple[Reads, Reads]:
    memory = max(1, run.simulated_memory // run.nodes)
    return _ordered(
        OrderedRun(
            run.simulated,
            memory,
            num_pods=run.nodes,
            batch_size=max(1, min(LOOP_BATCH, memory // 8)),  # what is simulated may have room for no larger one
            eviction="fifo",
            private=True,
            seed=run.seed,
            fetching=Fetching.of(HALF, "auto", memory),
        )
    )


def _exact(eviction: str, chunk_size: int) -> Callable[[ComparedRun], tuple[Reads, Reads]]:
    def simulate(run: ComparedRun) -> tuple[Reads, Reads]:
        return _ordered(
            OrderedRun(run.simulated, run.simulated_memory, chunk_size, 1, LOOP_BATCH, eviction, seed=run.seed)
        )

    return simulate


def _ordered(run: OrderedRun) -> tuple[Reads, Reads]:
    def of_each(epoch: EpochReads) -> Reads:
        return Reads(epoch.gets / run.num_samples, epoch.samples_read / run.num_samples)

    first, later = map(of_each, simulate_orders(run, keyed_orders(run, 2), 2))
    return first, later


def _redirected(policy: str, chunk_size: int) -> Callable[[ComparedRun], tuple[Reads, Reads]]:
    def simulate(run: ComparedRun) -> tuple[Reads, Reads]:
        # Of more samples: where there are few chunks the ends of an epoch weigh, and these take little time.
        simulated = min(run.num_samples, 8 * run.simulated)
        shape = DatasetShape.uniform(simulated, 1000, simulated)
        row = analyze(Analysis(shape, int(shape.total_bytes * run.memory_fraction), seed=run.seed), policy, chunk_size)
        reads = Reads(row.gets / simulated, row.read_amplification)
        return reads, reads  # whatever the order, a job's first epoch reads what the others read

    return simulate


WAYS = {
    way.name: way
    for way in (
        Way("bucket alone", True, _one_by_one, lists=True),
        Way("copied to disks", True, _copied, lists=True, on_disk=True),
        Way("DELI 50/50", True, _deli, lists=True, fetches=True, on_disk=True),
        Way("exact, never", True, _exact("never", 1), in_memory=True),
        *(
            Way(f"{name} K={chunk_size}", keeps_order, simulate(chunk_size), in_memory=True, chunk_size=chunk_size)
            for name, keeps_order, simulate, chunk_sizes in (
                ("exact", True, partial(_exact, "rolling"), (8, 64)),
                ("planned", False, partial(_redirected, "planned"), (16,)),
                ("redox", False, partial(_redirected, "redox"), (64,)),
            )
            for chunk_size in chunk_sizes
        ),
    )
}


def cheapest_by_epochs(lines: Sequence[Line], run: ComparedRun, provider: str) -> list[tuple[int, str]]:
    """``(from so many epochs on, the cheapest way)``, up to ``MOST_EPOCHS``."""
    epochs = np.arange(1, MOST_EPOCHS + 1)
    parts = [line.cost_parts(run, PROVIDERS[provider]) for line in lines]
    totals = [first.total + (epochs - 1) * (later.total - later.storage) for first, later in parts]
    return _changes(epochs.tolist(), _cheapest(np.array(totals), lines))


def cheapest_by_sample_size(lines: Sequence[Line], run: ComparedRun, provider: str) -> list[tuple[int, str]]:
    """``(from samples of so many bytes on, the cheapest way)``, with the same number of them, and the same part of the
    dataset in memory."""
    totals = [
        [line.cost(replace(run, sample_bytes=size), PROVIDERS[provider]).total for size in SAMPLE_SIZES]
        for line in lines
    ]
    return _changes(SAMPLE_SIZES, _cheapest(np.array(totals), lines))


def cheapest_by_memory(lines: Mapping[ComparedRun, Sequence[Line]], provider: str) -> list[tuple[float, str]]:
    """``(from so large a part of the dataset in memory on, the cheapest way)``.

    :param lines: of the run :func:`with_memory_parts`; those that such a part has room for.
    """
    totals = {run: [line.cost(run, PROVIDERS[provider]).total for line in of_run] for run, of_run in lines.items()}
    cheapest = [lines[run][int(np.argmin(of_run))].name for run, of_run in totals.items()]
    return _changes([run.memory_fraction for run in lines], cheapest)


def _cheapest(totals: np.ndarray[Any, Any], lines: Sequence[Line]) -> list[str]:
    return [lines[which].name for which in totals.argmin(axis=0)]


def _changes(at: Iterable[_Place], cheapest: Iterable[str]) -> list[tuple[_Place, str]]:
    found: list[tuple[_Place, str]] = []
    for place, name in zip(at, cheapest, strict=True):
        if not found or found[-1][1] != name:
            found.append((place, name))
    return found
