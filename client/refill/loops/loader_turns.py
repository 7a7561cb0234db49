"""To which workers does the loader still deal batches? Seen by one of them, from the numbers of its own batches.

torch's loaders, and torchdata's, deal batches to their workers in turn, and pass over those that have come to their
end. No loader tells its workers; but their loop has the number of the batch, and it is found among the callers.
Without ``in_order`` a loader deals to whoever is free, and nothing follows from the numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple

import torch.utils.data

from refill.loops.callers import callers

_LOOP = "_worker_loop"
_NUMBER = "idx"
_loop: FrameType | None = None
"""Of this process. Kept here: an iterator that kept it would be kept by it."""


def is_iterated_by_loader() -> bool:
    """Whether it is a loader itself that calls ``__iter__`` of a dataset, and no wrapper: then each worker does."""
    fetcher = sys._getframe(2).f_locals.get("self")
    return any(each.__name__ == "_BaseDatasetFetcher" for each in type(fetcher).__mro__)


def batch_of_next() -> int:
    """How many samples the loader that calls ``__next__`` of a dataset's iterator puts into a batch; 0: it is no loader
    that does, or it makes none."""
    wanted = sys._getframe(2).f_locals.get("possibly_batched_index")
    return len(wanted) if isinstance(wanted, list) else 0


class LoaderDeals(NamedTuple):
    """How a loader deals batches to its workers."""

    in_order: bool = True
    under_way: int = 0
    """With ``in_order``, no worker is asked for more samples than these before another is done with its first batch."""


def loader_deals() -> LoaderDeals | None:
    """Of the loader that starts workers now, or has forked this one; None: there is none to be seen."""
    for frame in callers(past=1):
        loader = frame.f_locals.get("loader")
        if isinstance(loader, torch.utils.data.DataLoader):
            in_order = bool(getattr(loader, "in_order", True))  # older ones know nothing else
            return LoaderDeals(in_order, ((loader.prefetch_factor or 0) + 1) * (loader.batch_size or 1))
    return None


def batch_of_loader(sampler: object) -> int:
    """How many of a sampler's positions the loader that iterates it now puts into a batch; 0: not to be seen."""
    for known in _objects():
        if known.get("sampler") is sampler and isinstance(batch_size := known.get("batch_size"), int):
            return max(0, batch_size)
    return 0


def workers_of_loader() -> int:
    """How many workers the loader has that iterates a sampler now; 0: none, or not to be seen."""
    found = (known.get("_num_workers") for known in _objects())
    return next((workers for workers in found if isinstance(workers, int)), 0)


def is_forwarded(sampler: object) -> bool:
    """Whether a StatefulDataLoader asks for a sampler's first position to pass over it, and those that a loop has had:
    it does where what makes its batches has no state."""
    for known in _objects():
        if known.get("_sampler_iter_yielded"):
            batches: Any = known.get("_index_sampler")
            while hasattr(batches, "batch_sampler"):
                batches = batches.batch_sampler
            return sampler in (batches, getattr(batches, "sampler", None))
    return False


def num_forwarded() -> int:
    """Batches that a StatefulDataLoader which is given a state is about to take and throw away: those that a loop has
    had since the loader's last snapshot (``snapshot_every_n_steps``)."""
    for frame in callers(past=1):
        said = frame.f_locals.get("next_iter_state")
        if isinstance(said, dict):
            return int(said.get("_steps_since_snapshot", 0))
    return 0


class LoaderTurns:
    """Watches, in one worker, to which workers an iteration still deals batches."""

    def __init__(self) -> None:
        global _loop
        _loop = next((frame for frame in callers(past=1) if frame.f_code.co_name == _LOOP), None)
        self._last: int | None = None
        self._least: int | None = None

    def look(self) -> None:
        """To be called for each sample, so that no batch is missed."""
        number = None if _loop is None else _loop.f_locals.get(_NUMBER)
        if isinstance(number, int):
            self.deals(number)

    def deals(self, number: int) -> None:
        """Fact: the worker is at work on this batch."""
        if number == self._last:
            return
        if self._last is not None:
            step = number - self._last
            if step < 0:  # the loader begins anew
                self._least = None
            elif self._least is None or step < self._least:
                self._least = step
        self._last = number

    def ended(self, workers: int) -> int:
        """How many of the workers have come to their end, at least: between two batches of one, each other that goes on
        is dealt one."""
        return 0 if self._least is None else max(0, workers - self._least)


def _objects() -> Iterator[dict[str, Any]]:
    """What is known of the objects whose methods have called."""
    return (getattr(frame.f_locals.get("self"), "__dict__", {}) for frame in callers(past=1))
