"""Does a trainer divide what a sampler yields among its processes, and how?

refill deals an epoch to ranks itself, so a sampler yields the positions of one rank. Hugging Face Accelerate, and
Trainer with it, expects samplers of the whole dataset: each process keeps every n-th batch (``BatchSamplerShard``), or
process 0 reads for all (``dispatch_batches``). Such a sampler yields as many positions as Accelerate expects, placed
so that each process is left with those of its own rank.

Accelerate says nothing to samplers; so the one that asks is looked for among the callers. Where it is not found, or is
another trainer's, :mod:`refill.loops.hole_guard` notices that positions are missing. What it divides that something
else makes of a rank's samples can't be placed: that is an error (:func:`check_whole`), since nobody would ask for the
rest.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from refill.errors import InvalidInput
from refill.loops.callers import callers

_MODULE = "accelerate.data_loader"
_TRAINER = "transformers.trainer"
_STREAM = "datasets.iterable_dataset"

_ONE_FILE = (
    "use_stateful_dataloader, where process 0 reads for all (dispatch_batches=True, and the iterable form unless it is "
    "False): save_state writes the states of all processes to one file, so that a run may go on from a wrong one. Set "
    "dispatch_batches=False, or use skip_first_batches in place of states (docs/trainers/accelerate.md)"
)

Place = tuple[int, int]
"""A rank, and the place in what it is dealt."""


class MayBeDivided(Protocol):
    """What reads a job's samples."""

    @property
    def may_be_divided(self) -> bool:
        """Whether a trainer may keep a part of a rank's samples, and no sample is lost that the job promises."""
        ...


class DealtToRanks:
    """A sampler that yields the samples of one rank, and says so itself: no trainer's division is looked for in it."""


@dataclass(frozen=True)
class Division:
    """Runs of ``run`` items go to processes 0, 1, ..., ``num_processes - 1``, and again from 0 on."""

    num_processes: int
    process: int
    run: int
    drop_last: bool
    dispatched: bool = False
    """Whether process 0 reads for all, in place of each process for itself."""
    single_batches: int = 0
    """So many batches are skipped as if each were a step of all processes, and they are not."""

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
        if self.single_batches:
            raise InvalidInput(
                f"{self.single_batches} batches are to be skipped, and where process 0 reads for all "
                f"(dispatch_batches=True) Accelerate takes one for each of {self.num_processes} processes in a step, "
                "but skips single ones: some samples would come again, and as many never. Go on without "
                "dispatch_batches, which gives the same batches, or say skip_first_batches(loader, steps * "
                "num_processes)"
            )

    @property
    def reads_nothing(self) -> bool:
        """Whether another process reads what this one is given."""
        return self.dispatched and self.process != 0


def division_of_sampler(sampler: object) -> Division | None:
    """How what the sampler yields now is divided; None: not at all, as far as one can tell."""
    for accelerate, caller, frame in _callers():
        if type(caller) is accelerate.BatchSamplerShard and _leads_to(caller.batch_sampler, sampler):
            return None if caller.batch_size is None else _sharded(caller)  # None: batches of any size
        if type(caller) is accelerate.DataLoaderDispatcher:
            said = _said_to_dispatcher(caller, frame)
            if _leads_to(said["batch_sampler"], sampler):
                return _dispatched(accelerate, said, _innermost(said["batch_sampler"]).batch_size)
    return None


def division_of_dataset(dataset: object) -> Division | None:
    """How what an iterable dataset yields now is divided."""
    for accelerate, caller, frame in _callers():
        if type(caller) is accelerate.IterableDatasetShard and caller.dataset is dataset:
            return _sharded(caller)
        if type(caller) is accelerate.DataLoaderDispatcher:
            said = _said_to_dispatcher(caller, frame)
            if said["dataset"] is dataset:
                return _dispatched(accelerate, said, said["batch_size"])
    return None


def is_a_loaders_count() -> bool:
    """Whether the epoch that is being set is only how often a loader of Accelerate was iterated in this process.

    It sets that at the start of each iteration, whatever epoch a loop is in that was resumed.
    """
    names = [frame.f_code.co_name for _, _, frame in _callers()]
    return next((name == "__iter__" for name in names if name != "set_epoch"), False)


def check_whole(reads: str, dataset: MayBeDivided) -> None:
    """Called before a rank's samples are read where no division of them is known. Raises :class:`InvalidInput` when a
    trainer divides what something else makes of them: its other processes would not ask for theirs.

    :param reads: what reads them, by its class.
    """
    if (found := _divided()) is not None and not dataset.may_be_divided:
        whose, what, processes = found
        raise InvalidInput(
            f"{whose} divides what a {what} yields among {processes} processes, and the {reads} in it has "
            "the samples of one rank: those of the others would be lost. Give the trainer a CacheDataset with an "
            "EpochSampler, or the CacheIterableDataset itself, each with a transform; or give the dataset inside "
            "rank=0, world_size=1, where process 0 reads for all (docs/TRAINERS.md)"
        )


def check_divided_once() -> None:
    """Called where plain integers are asked for, or a loader starts its workers. Raises :class:`InvalidInput` when
    Accelerate divides what a DistributedSampler of torch's yields: that has the samples of one process already.
    """
    for accelerate, caller, frame in _callers():
        if type(caller) is accelerate.DataLoaderDispatcher:
            batches, processes = _said_to_dispatcher(caller, frame)["batch_sampler"], caller.state.num_processes
        elif type(caller) is accelerate.DataLoaderShard:
            batches = caller.batch_sampler or caller.sampler
            processes = _num_shares(accelerate, batches)
        else:
            continue
        sampler = getattr(_innermost(batches), "sampler", None)
        if processes > 1 and (parts := _parts_of_torch(sampler)) > 1:
            raise InvalidInput(
                f"Accelerate divides what a {type(sampler).__name__} yields among {processes} processes, and it yields "
                f"one of {parts} parts already: the other samples would be lost. Give the DataLoader "
                "sampler=refill.EpochSampler(dataset) in its place (docs/TRAINERS.md). allow_skipped=True, given "
                "to the dataset, allows it"
            )


def _num_shares(accelerate: Any, batches: Any) -> int:
    """Among how many processes batches are divided."""
    while batches is not None:
        if type(batches) is accelerate.BatchSamplerShard:
            return int(batches.num_processes)
        batches = getattr(batches, "batch_sampler", None)
    return 1


def _parts_of_torch(sampler: object) -> int:
    """Of how many parts a sampler yields one, as torch's DistributedSampler; those of refill's are none of these."""
    from torch.utils.data import DistributedSampler

    is_torchs = isinstance(sampler, DistributedSampler) and not isinstance(sampler, DealtToRanks)
    return int(sampler.num_replicas) if is_torchs else 1  # type: ignore[attr-defined]  # mypy does not follow it


def _divided() -> tuple[str, str, int] | None:
    """``(who, which class, among how many)`` of what is divided now, other than what a sampler yields."""
    is_stream = False
    if (module := sys.modules.get(_STREAM)) is not None:
        streams = module.IterableDataset
        for frame in callers():
            if isinstance(stream := frame.f_locals.get("self"), streams):
                is_stream, split = True, getattr(stream, "_distributed", None)
                if split is not None and split.world_size > 1:
                    return "datasets", type(stream).__name__, split.world_size
    for accelerate, caller, frame in _callers():
        if type(caller) is accelerate.IterableDatasetShard:
            what, processes = type(caller.dataset).__name__, caller.num_processes
        elif type(caller) is accelerate.DataLoaderDispatcher:
            what = type(_said_to_dispatcher(caller, frame)["dataset"]).__name__
            processes = accelerate.PartialState().num_processes
        elif is_stream and type(caller) is accelerate.DataLoaderShard:  # it has given each process some of its shards
            what, processes = "datasets.IterableDataset", accelerate.PartialState().num_processes
        else:
            continue
        if processes > 1:
            return "Accelerate", what, processes
    return None


def _sharded(shard: Any) -> Division:
    run = shard.batch_size // shard.num_processes if shard.split_batches else shard.batch_size
    return Division(shard.num_processes, shard.process_index, run, shard.drop_last)


def _dispatched(accelerate: Any, said: dict[str, Any], batch_size: int) -> Division:
    state = accelerate.PartialState()
    if said["use_stateful_dataloader"] and state.num_processes > 1:
        warnings.warn(_ONE_FILE, stacklevel=2)
    run = batch_size // state.num_processes if said["split_batches"] else batch_size
    single = 0 if said["split_batches"] else _single_batches(accelerate, said["batch_sampler"], state.num_processes)
    return Division(state.num_processes, state.process_index, run, said["_drop_last"], True, single)


def _single_batches(accelerate: Any, batches: Any, num_processes: int) -> int:
    """How many batches a dispatcher skips that are no whole steps: Trainer counts steps, and others may."""
    skipped = 0
    while hasattr(batches, "batch_sampler"):
        skipped += batches.skip_batches if isinstance(batches, accelerate.SkipBatchSampler) else 0
        batches = batches.batch_sampler
    trainer = sys.modules.get(_TRAINER)
    are_steps = trainer is not None and any(frame.f_globals is trainer.__dict__ for frame in callers())
    return skipped if num_processes > 1 and (are_steps or skipped % num_processes) else 0


def _said_to_dispatcher(loader: Any, frame: FrameType) -> dict[str, Any]:
    """What a dispatcher was made with. A stateful one iterates while it is being made: those are its arguments then."""
    stateful = {"use_stateful_dataloader": loader.use_stateful_dataloader}
    if "base_dataloader" in vars(loader) and "_drop_last" in vars(loader):
        inner = loader.base_dataloader
        of_loader = {name: getattr(inner, name) for name in ("dataset", "batch_sampler", "batch_size")}
        return stateful | of_loader | {name: getattr(loader, name) for name in ("split_batches", "_drop_last")}
    while frame.f_code is not type(loader).__init__.__code__ and frame.f_back is not None:
        frame = frame.f_back
    arguments = frame.f_locals
    named = {name: arguments.get(name) for name in ("dataset", "split_batches", "_drop_last")}
    given = arguments.get("kwargs", {})
    return stateful | named | {name: given.get(name) for name in ("batch_sampler", "batch_size")}


def _callers() -> Iterator[tuple[Any, Any, FrameType]]:
    """``(accelerate.data_loader, object, frame)`` for each method of Accelerate's loaders that runs now, inner ones
    first."""
    accelerate = sys.modules.get(_MODULE)
    if accelerate is None:
        return
    for frame in callers():
        if frame.f_globals is accelerate.__dict__ and (caller := frame.f_locals.get("self")) is not None:
            yield accelerate, caller, frame


def _leads_to(batches: Any, sampler: object) -> bool:
    return getattr(_innermost(batches), "sampler", None) is sampler


def _innermost(batches: Any) -> Any:
    """What batch samplers are wrapped around."""
    while hasattr(batches, "batch_sampler"):
        batches = batches.batch_sampler
    return batches
