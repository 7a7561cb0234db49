"""How far has a training loop come? Counted in the batches that a DataLoader gave it, not in what workers fetched."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch.utils.data

from refill.epoch_sampler import PlacedSampler
from refill.errors import InvalidInput
from refill.iterable_dataset import CacheIterableDataset
from refill.loops.epoch_place import Iteration
from refill.loops.nested_loops import NestedLoops, Steps
from refill.pods.planned_place import DealtConnection

__all__ = ["LoopProgress"]

_COUNT = "a loop that counts for itself has state_after(consumed) of the sampler"
_GIVE_SAMPLER = (
    "give it a DataLoader with sampler=refill.EpochSampler(dataset); a loop that counts for itself has "
    "state_after(consumed) of that sampler"
)

Source = PlacedSampler | CacheIterableDataset


class LoopProgress:
    """The state of the loop over one loader. Any loader may be counted; whether its state is known is asked later.

    :param dataset: what the loop reads, as :func:`refill.timed` is given it.
    """

    def __init__(self, loader: Any, dataset: object) -> None:
        self._loader = loader
        self._dataset = dataset
        self._loops = NestedLoops()
        self._newest: Iteration | None = None
        """The one that the loader began last."""

    def begins(self) -> Steps:
        """Fact: a loop is about to begin an iteration. Returns what counts it."""
        if isinstance(self._dataset, CacheIterableDataset):
            self._dataset.dataset.register()  # its length is needed here; workers inherit the answer
        with suppress(InvalidInput):
            if self._source()[0].iteration is not self._newest:
                self._loops.give_up()
        return Steps()

    def asked(self, steps: Steps) -> None:
        """Fact: a batch was asked for, and so, the first time, the sampler has begun an iteration."""
        if not steps.has_begun:
            with suppress(InvalidInput):  # for a loader whose state is unknown
                self._newest = steps.iteration = self._source()[0].iteration
        self._loops.asked(steps)

    def came(self, steps: Steps) -> None:
        """Fact: the loop has a batch. Receipts say which."""
        steps.batches += 1 + steps.failed
        steps.failed = 0
        if (iteration := steps.iteration) is None:
            return
        source, batch_size, _ = self._source()
        connection = source.dataset.connection
        if isinstance(connection, DealtConnection):
            end = iteration.start + steps.batches * batch_size
            connection.loop_has(iteration.epoch, end - batch_size, min(end, iteration.length))

    def failed(self, steps: Steps) -> None:
        """Fact: in place of a batch came an error, and the loader goes on behind it."""
        steps.failed += 1
        dataset = self._dataset
        if isinstance(dataset, CacheIterableDataset) and getattr(self._loader, "batch_size", 0) != dataset.batch_size:
            steps.is_uneven = True

    def ended(self, steps: Steps) -> None:
        """Fact: the loader has no further batch. One that has failed before its first batch may have begun none."""
        steps.at_end = bool(steps.batches or not steps.failed)

    def left(self, steps: Steps) -> None:
        """Fact: the loop has left the iteration, at its end or before."""
        if not self._loops.left(steps) or (iteration := steps.iteration) is None:
            return
        source, batch_size, drop_last = self._source()
        if isinstance(source, PlacedSampler) and iteration is source.iteration:
            at_end = _position(steps, iteration, batch_size, drop_last=drop_last) == iteration.length
            (source.place.was_had if at_end else source.place.was_left)(iteration.epoch)

    def state_dict(self) -> dict[str, Any]:
        """Raises :class:`InvalidInput` when batches of this loader don't show how many samples were consumed."""
        source, batch_size, drop_last = self._source()
        steps = self._loops.counts()
        if steps is None or (iteration := steps.iteration) is None:
            return source.next_state()
        if not self._loops.is_under_way(steps) and self._newest is not source.iteration:
            return source.next_state()
        if steps.is_uneven:
            raise _unknown_progress(
                f"one failed, and the DataLoader makes batches of {batch_size} of what fails together: give "
                "CacheIterableDataset and DataLoader the same batch_size"
            )
        position = _position(steps, iteration, batch_size, drop_last=drop_last)
        return source.state_of(iteration, position)

    def load_state_dict(self, state: Any) -> None:
        """The next iteration goes on there. Errors as :meth:`refill.CacheDataset.checked_state`."""
        if not self._loops.is_left:
            raise InvalidInput("a state is loaded before the loop begins to iterate, not within")
        self._source()[0].load_state_dict(state)
        self._loops.give_up()

    def _source(self) -> tuple[Source, int, bool]:
        """What hands out positions, how many there are in a batch, and whether a short last batch is dropped."""
        loader = self._loader
        if not isinstance(loader, torch.utils.data.DataLoader):
            raise _unknown_progress(
                f"what iterates is a {type(loader).__name__} and no torch DataLoader", _GIVE_SAMPLER
            )
        if loader.num_workers > 0 and not getattr(loader, "in_order", True):
            raise _unknown_progress("with in_order=False batches come in any order")
        if isinstance(self._dataset, CacheIterableDataset):
            return self._iterable(loader, self._dataset)
        sampler, batch_size, drop_last = loader.sampler, 1, False
        batches = sampler if isinstance(sampler, torch.utils.data.BatchSampler) else loader.batch_sampler
        if batches is not None:
            if not isinstance(batches, torch.utils.data.BatchSampler) or _makes_its_own_batches(batches):
                raise _unknown_progress(f"a {type(batches).__name__} may make batches of any size")
            sampler, batch_size, drop_last = batches.sampler, batches.batch_size, batches.drop_last
        if not isinstance(sampler, PlacedSampler):
            raise _unknown_progress(f"its sampler is a {type(sampler).__name__}, none of refill's", _GIVE_SAMPLER)
        return sampler, batch_size, drop_last

    def _iterable(self, loader: Any, dataset: CacheIterableDataset) -> tuple[Source, int, bool]:
        if loader.dataset is not dataset:
            raise _unknown_progress(f"it reads a {type(loader.dataset).__name__}, which may leave samples out")
        if loader.num_workers > 1 and loader.batch_size != dataset.batch_size:
            raise _unknown_progress(
                f"its workers make batches of {loader.batch_size} from runs of {dataset.batch_size}: give batch_size="
                f"{dataset.batch_size} to the DataLoader"
            )
        return dataset, loader.batch_size or 1, loader.drop_last


def _position(steps: Steps, iteration: Iteration, batch_size: int, *, drop_last: bool) -> int:
    """The first that the loop has not had."""
    position = min(iteration.start + steps.batches * batch_size, iteration.length)
    if steps.at_end or (drop_last and steps.batches and iteration.length - position < batch_size):
        return iteration.length
    return position


def _makes_its_own_batches(batches: torch.utils.data.BatchSampler) -> bool:
    return type(batches).__iter__ is not torch.utils.data.BatchSampler.__iter__


def _unknown_progress(why: str, instead: str = _COUNT) -> InvalidInput:
    return InvalidInput(f"what the loop has consumed can't be told from its batches: {why}; {instead}")
