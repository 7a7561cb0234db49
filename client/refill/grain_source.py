"""How does Grain read a planned epoch? By positions: what its threads ask for one by one comes by one request each
stretch.

Grain asks a source for items by number, from several threads, roughly in order, and saves the number of the next. An
item here is a position of this rank's epochs, one after another. So the order is the one that pods have planned, and a
saved number is all that it takes to go on.
"""

from __future__ import annotations

import operator
import threading
from concurrent.futures import Future
from typing import Any, NoReturn

import numpy as np

from refill.errors import InvalidInput
from refill.job_samples import JobSamples

__all__ = ["GrainSource"]

_KEPT_STRETCHES = 64
"""More than Grain's threads are apart. What is left of older ones is asked for again."""


class GrainSource(JobSamples):
    """A ``RandomAccessDataSource`` of Grain: docs/trainers/grain.md. Imports neither Grain nor torch.

        source = refill.GrainSource("http://refill:8000", dataset="s3://bucket/images", job="run-1", epochs=90,
                                    rank=jax.process_index(), world_size=jax.process_count())
        loader = iter(grain.MapDataset.source(source).map(augment).batch(256).to_iter_dataset())

    The order is random already, and divided among ranks: no ``shuffle``, ``repeat`` or sharding of Grain's behind it.

    :param epochs: so many, one after another; ``len(source)`` is of all.
    :param stretch: how many positions in a row one request gets. The same for all ranks, and after a restart.
    :param arguments: as of :class:`CacheDataset`.
    """

    _called = "GrainSource"

    def __init__(self, service_url: str, *, epochs: int, stretch: int = 64, **arguments: Any) -> None:
        for name, value in (("epochs", epochs), ("stretch", stretch)):
            if type(value) is not int or value < 1:
                raise InvalidInput(f"{name} must be a whole number of at least 1, got {value!r:.50}")
        super().__init__(service_url, **arguments)
        self._epochs, self._stretch = epochs, stretch
        self._lock = threading.Lock()
        self._coming: dict[int, Future[Any]] = {}
        """By number, what was asked for and not taken yet, the oldest first."""
        self.configure(order="keyed")
        self.register()
        self.asks_in_batches(stretch)

    def __len__(self) -> int:
        """Samples of this rank in all epochs."""
        return self._epochs * self.samples_per_rank

    def __repr__(self) -> str:
        """What Grain compares with a checkpoint's."""
        return f"GrainSource(job={self.job!r}, rank={self.rank}, world_size={self.world_size}, stretch={self._stretch})"

    def __getitem__(self, index: int) -> Any:
        """The sample at a place of all epochs of this rank."""
        number, count = operator.index(index), len(self)
        if not -count <= number < count:
            raise IndexError(f"there is no sample {number}; there are {count} in {self._epochs} epochs")
        number %= count
        with self._lock:
            found = self._coming.pop(number, None)
            asked = [] if found is not None else self._asks(number)
        if found is not None:
            return found.result()
        try:
            samples = self._samples([place for place, _ in asked])
        except BaseException as error:
            for _, each in asked[1:]:
                each.set_exception(error)
            raise
        for (_, each), sample in zip(asked, samples, strict=True):
            each.set_result(sample)
        return samples[0]

    def _asks(self, number: int) -> list[tuple[int, Future[Any]]]:
        """From here to the end of its stretch, what nobody has asked for."""
        per_rank = self.samples_per_rank
        begins = number - number % per_rank
        end = min(number + self._stretch - (number - begins) % self._stretch, begins + per_rank)
        asked = [(place, Future[Any]()) for place in range(number, end) if place not in self._coming]
        self._coming.update(asked[1:])
        while len(self._coming) > _KEPT_STRETCHES * self._stretch:
            del self._coming[next(iter(self._coming))]
        return asked

    def _samples(self, numbers: list[int]) -> list[Any]:
        epoch, first = divmod(numbers[0], self.samples_per_rank)
        positions = np.array(numbers, dtype=np.int64) - numbers[0] + first
        return self._answered(self.connection, epoch, positions, self.connection.batch(epoch, positions), as_many=True)

    def __getstate__(self) -> NoReturn:
        raise InvalidInput(
            "a GrainSource stays in its process, whose threads share what one request brings: read it without "
            "mp_prefetch, with more threads (grain.ReadOptions(num_threads=...))"
        )
