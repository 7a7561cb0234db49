"""How far has a training loop come? Counted in the batches that a DataLoader gave it, not in what workers fetched."""

from __future__ import annotations

from typing import Any

import torch.utils.data

from refill.epoch_sampler import PlacedSampler
from refill.errors import InvalidInput
from refill.iterable_dataset import CacheIterableDataset
from refill.loops.epoch_place import Iteration
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
        self._under_way = False
        self._iteration: Iteration | None = None
        self._batches = 0
        self._at_end = False
        self._batch_size = 0
        """Of the iteration, if its state is known."""

    def began(self) -> None:
        """Fact: the loop is about to begin an iteration."""
        if isinstance(self._dataset, CacheIterableDataset):
            self._dataset.dataset.register()  # its length is needed here; workers inherit the answer
        self._iteration = None
        self._batches = 0
        self._at_end = False

    def tried(self) -> None:
        """Fact: the first batch was asked for, so that the sampler has begun an iteration."""
        self._under_way = True
        try:
            source, self._batch_size, _ = self._source()
            self._iteration = source.iteration
        except InvalidInput:
            self._iteration = None  # a loader whose state is unknown

    def came(self) -> None:
        """Fact: the loop has a batch. Receipts say which."""
        self._batches += 1
        if (iteration := self._iteration) is None:
            return
        connection = self._source()[0].dataset.connection
        if isinstance(connection, DealtConnection):
            end = iteration.start + self._batches * self._batch_size
            connection.loop_has(iteration.epoch, end - self._batch_size, min(end, iteration.length))

    def ended(self) -> None:
        """Fact: the loader has no further batch."""
        self._at_end = True

    def left(self) -> None:
        """Fact: the loop has left the iteration, at its end or before."""
        self._under_way = False

    def state_dict(self) -> dict[str, Any]:
        """Raises :class:`InvalidInput` when batches of this loader don't show how many samples were consumed."""
        source, batch_size, drop_last = self._source()
        iteration = self._iteration
        if iteration is None or not (self._under_way or iteration is source.iteration):
            return source.next_state()
        position = min(iteration.start + self._batches * batch_size, iteration.length)
        if self._at_end or (drop_last and self._batches and iteration.length - position < batch_size):
            position = iteration.length
        return source.state_of(iteration, position)

    def load_state_dict(self, state: Any) -> None:
        """The next iteration goes on there. Errors as :meth:`refill.CacheDataset.checked_state`."""
        if self._under_way:
            raise InvalidInput("a state is loaded before the loop begins to iterate, not within")
        self._source()[0].load_state_dict(state)

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


def _makes_its_own_batches(batches: torch.utils.data.BatchSampler) -> bool:
    return type(batches).__iter__ is not torch.utils.data.BatchSampler.__iter__


def _unknown_progress(why: str, instead: str = _COUNT) -> InvalidInput:
    return InvalidInput(f"what the loop has consumed can't be told from its batches: {why}; {instead}")
