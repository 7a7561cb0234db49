"""Does a trainer divide what a sampler yields among its processes, and how?

refill deals an epoch to ranks itself, so a sampler yields the positions of one rank. Hugging Face Accelerate, and
Trainer with it, expects samplers of the whole dataset: each process keeps every n-th batch (``BatchSamplerShard``), or
process 0 reads for all (``dispatch_batches``). Such a sampler yields as many positions as Accelerate expects, placed
so that each process is left with those of its own rank.

Accelerate says nothing to samplers; so the one that asks is looked for among the callers. Where it is not found, or is
another trainer's, :mod:`refill.hole_guard` notices that positions are missing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

from refill.errors import InvalidInput

__all__ = ["Division", "Place", "division_of_dataset", "division_of_sampler"]

_MODULE = "accelerate.data_loader"
_MOST_CALLERS = 60
"""Frames between a trainer and the sampler that it iterates; there are some ten."""

Place = tuple[int, int]
"""A rank, and the place in what it is dealt."""


@dataclass(frozen=True)
class Division:
    """Runs of ``run`` items go to processes 0, 1, ..., ``num_processes - 1``, and again from 0 on."""

    num_processes: int
    process: int
    run: int
    drop_last: bool
    dispatched: bool = False
    """Whether process 0 reads for all, in place of each process for itself."""

    def length(self, count: int) -> int:
        """How many items stand for ``count`` positions of each rank: whole rounds, so that nothing is made even."""
        rounds = count // self.run if self.drop_last else -(-count // self.run)
        return rounds * self.num_processes * self.run

    def place(self, item: int, count: int) -> Place | None:
        """Whose position an item stands for, and which; None: one that this process is not left with, or that fills
        the last round up."""
        run, offset = divmod(item, self.run)
        turn, process = divmod(run, self.num_processes)
        position = turn * self.run + offset
        if position >= count or not (self.dispatched or process == self.process):
            return None
        return process, position

    def check(self, world_size: int) -> None:
        """Raises :class:`InvalidInput` when the job was not dealt to these processes."""
        if self.num_processes != world_size:
            raise InvalidInput(
                f"Accelerate divides batches among {self.num_processes} processes, and the job has world_size "
                f"{world_size}: make the dataset after Accelerator(), or give it rank= and world_size= of its processes"
            )

    @property
    def reads_nothing(self) -> bool:
        """Whether another process reads what this one is given."""
        return self.dispatched and self.process != 0


def division_of_sampler(sampler: object) -> Division | None:
    """How what the sampler yields now is divided; None: not at all, as far as one can tell."""
    for accelerate, caller in _callers():
        if type(caller) is accelerate.BatchSamplerShard and _leads_to(caller.batch_sampler, sampler):
            return None if caller.batch_size is None else _sharded(caller)  # None: batches of any size
        if type(caller) is accelerate.DataLoaderDispatcher:
            batches = caller.base_dataloader.batch_sampler
            if _leads_to(batches, sampler):
                return _dispatched(caller, _innermost(batches).batch_size)
    return None


def division_of_dataset(dataset: object) -> Division | None:
    """How what an iterable dataset yields now is divided."""
    for accelerate, caller in _callers():
        if type(caller) is accelerate.IterableDatasetShard and caller.dataset is dataset:
            return _sharded(caller)
        if type(caller) is accelerate.DataLoaderDispatcher and caller.base_dataloader.dataset is dataset:
            return _dispatched(caller, caller.base_dataloader.batch_size)
    return None


def _sharded(shard: Any) -> Division:
    run = shard.batch_size // shard.num_processes if shard.split_batches else shard.batch_size
    return Division(shard.num_processes, shard.process_index, run, shard.drop_last)


def _dispatched(loader: Any, batch_size: int) -> Division:
    processes = loader.state.num_processes
    run = batch_size // processes if loader.split_batches else batch_size
    return Division(processes, loader.state.process_index, run, loader._drop_last, dispatched=True)


def _callers() -> Iterator[tuple[Any, Any]]:
    """``(accelerate.data_loader, object)`` for each method of Accelerate's loaders that runs now, inner ones first."""
    accelerate = sys.modules.get(_MODULE)
    if accelerate is None:
        return
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MOST_CALLERS):
        if frame is None:
            return
        if frame.f_globals is accelerate.__dict__ and (caller := frame.f_locals.get("self")) is not None:
            yield accelerate, caller
        frame = frame.f_back


def _leads_to(batches: Any, sampler: object) -> bool:
    return getattr(_innermost(batches), "sampler", None) is sampler


def _innermost(batches: Any) -> Any:
    """What batch samplers are wrapped around."""
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    return batches
