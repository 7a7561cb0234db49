"""How people wrap the iterable form: a generator. Apart from its tests: a worker that is spawned imports this alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

__all__ = ["Divided", "Wrapped", "in_first_only"]


class Wrapped(IterableDataset[Any]):
    """It ends in each worker after as many samples as ``most`` says."""

    def __init__(self, inner: Any, most: Callable[[int], int | None] = lambda worker: None) -> None:
        self.inner = inner
        self.most = most

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        most = self.most(0 if worker is None else worker.id)
        if most != 0:
            inner = self.inner() if callable(self.inner) else self.inner
            yield from (sample["__id__"] for sample in islice(inner, most))


def in_first_only(worker: int) -> int | None:
    """What ``datasets.IterableDataset.from_generator`` does, which has one shard."""
    return None if worker == 0 else 0


class Divided(IterableDataset[Any]):
    """What people write who know that each worker runs the whole dataset, as those of others do.

    :param per_worker: samples of a worker, one worker after another; None: they take turns.
    """

    def __init__(self, inner: Any, per_worker: int | None = None) -> None:
        self.inner = inner
        self.per_worker = per_worker

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number, workers = (0, 2) if worker is None else (worker.id, worker.num_workers)  # without workers, 2 ranks
        if self.per_worker is None:
            return islice(iter(self.inner), number, None, workers)
        return islice(iter(self.inner), number * self.per_worker, (number + 1) * self.per_worker)
