"""Where in which epoch does Lightning go on, when it was given a checkpoint?

It keeps the state of a loader that has one. Of a plain DataLoader it keeps the number of batches: it would begin the
epoch anew and stop that many batches earlier. It also starts the loader's workers before it sets the epoch.
As :mod:`refill.loops.trainer_division`, this looks for Lightning's loop among the callers.
"""

from __future__ import annotations

import re
import sys
from typing import Any, NamedTuple

from refill.errors import JobConflict, RankTaken
from refill.loops.callers import callers

_MODULES = ("lightning.pytorch.loops.fit_loop", "pytorch_lightning.loops.fit_loop")
_MADE_EARLY = "If this is one run, its dataset was made before the ranks were known: make the dataset"
_IN_THE_MODULE = "and its loader in train_dataloader of the LightningModule or LightningDataModule"


class LightningPlace(NamedTuple):
    """Where a loop goes on that has loaded a checkpoint and has not had a batch since."""

    epoch: int | None
    """The epoch that is set before the first batch is taken; None: it is set already."""
    batches: int
    """Batches of its epoch that the checkpoint counts; 0 at the end of one."""


def lightning_place(sampler: object) -> LightningPlace | None:
    """None: the sampler is not asked for the training batches of a Lightning loop that goes on from a checkpoint."""
    loops = [module.__dict__ for name in _MODULES if (module := sys.modules.get(name)) is not None]
    for frame in callers(past=1) if loops else ():
        if any(frame.f_globals is loop for loop in loops) and (caller := frame.f_locals.get("self")) is not None:
            loaders = getattr(getattr(caller, "_combined_loader", None), "flattened", ())
            trains = any(_is_of(loader, sampler) for loader in loaders)
            return _place_of(caller, frame.f_code.co_name) if trains and _goes_on(caller) else None
    return None


def said_of_ranks(error: JobConflict) -> JobConflict:
    """The error, with what to do where the job was registered for one rank, and this process is one of several: by the
    main script of the same run, perhaps, before Lightning or another launcher had started the other processes."""
    differences = error.details.get("differences")
    if not isinstance(differences, list) or len(differences) != 1:
        return error
    if re.fullmatch(r"world_size: yours is \d+, the job's 1", str(differences[0])) is None:
        return error
    where = "after init_process_group, or give it rank= and world_size="
    if _has_lightning():
        where = _IN_THE_MODULE
    return JobConflict(f"{error}. {_MADE_EARLY} {where}", **error.details)


def said_of_rank(error: RankTaken) -> RankTaken:
    """The error, with what to do where Lightning starts the main script again for each rank, before it says which."""
    return type(error)(f"{error}. {_MADE_EARLY} {_IN_THE_MODULE}", **error.details) if _has_lightning() else error


def _has_lightning() -> bool:
    return any(name in sys.modules for name in _MODULES)


def _goes_on(fit_loop: Any) -> bool:
    """Whether a checkpoint was loaded, and no epoch has ended since. ``restarting`` is for those within an epoch."""
    return bool(getattr(fit_loop, "_loaded_from_state_dict", False) or fit_loop.restarting)


def _place_of(fit_loop: Any, method: str) -> LightningPlace:
    epochs, batches = fit_loop.epoch_progress, fit_loop.epoch_loop.batch_progress
    in_epoch = epochs.total.processed < epochs.total.started
    epoch = None
    if method == "setup_data":
        # A checkpoint of the last batch's end: Lightning counts the epoch as over when it has set its loaders up.
        over = in_epoch and batches.is_last_batch and batches.current.completed < batches.current.ready
        epoch = epochs.current.processed + over
    return LightningPlace(epoch, batches.current.ready if in_epoch and not batches.is_last_batch else 0)


def _is_of(loader: Any, sampler: object) -> bool:
    """Whether a loader iterates the sampler, as it is or in batches."""
    given = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    return any(found is sampler or getattr(found, "sampler", None) is sampler for found in given)
