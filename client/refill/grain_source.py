"""How does Grain read a planned epoch? By positions: what its threads ask for one by one comes by one request each
stretch.

Grain asks a source for items by number, from several threads, roughly in order, and saves the number of the next. An
item here is a position of this rank's epochs, one after another. So the order is the one that pods have planned, and a
saved number is all that it takes to go on.

An order of Grain's own is listed before it is asked for, an epoch at a time: pods read ahead of it.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn

import numpy as np

from refill.errors import InvalidInput
from refill.job_samples import JobSamples
from refill.loops.given_counts import is_whole
from refill.pods.planned_connection import PlannedConnection
from refill.pods.pod_connection import PodConnection
from refill.pods.received_batch import ReceivedBatch
from refill.protocol.position_set import PositionSet
from refill.protocol.wire_format import Int64Array

__all__ = ["GrainSource"]

_KEPT_STRETCHES = 64
"""More than Grain's threads are apart. What is left of older ones is asked for again."""
_KEPT_LISTS = 2
_MOST_APART_SECONDS = 60.0
"""So long a thread that is ahead waits for those that are still in the epoch before. A loop that has left that epoch
waits as long, once."""


class GrainSource(JobSamples):
    """A ``RandomAccessDataSource`` of Grain: docs/trainers/grain.md. Imports neither Grain nor torch.

        source = refill.GrainSource("http://refill:8000", dataset="s3://bucket/images", job="run-1", epochs=90,
                                    rank=jax.process_index(), world_size=jax.process_count())
        loader = iter(grain.MapDataset.source(source).map(augment).batch(256).to_iter_dataset())

    The order is random already, and divided among ranks: no ``shuffle``, ``repeat`` or sharding of Grain's behind it.

    :param epochs: so many, one after another; ``len(source)`` is of all.
    :param stretch: how many positions in a row one request gets. The same for all ranks, and after a restart.
    :param order: an order of your own, to be kept: the ids of this rank's samples in all epochs, one after another,
        such as a ``grain.MapDataset`` that Grain has shuffled and sharded. With ``policy="exact"`` it is read in few
        requests to the store; by default it outlives pods. None: the order that pods plan.
    :param arguments: as of :class:`CacheDataset`.

    Raises :class:`InvalidInput` for an order that does not divide into epochs, or names an id that is none.
    """

    _called = "GrainSource"

    def __init__(
        self,
        service_url: str,
        *,
        epochs: int,
        stretch: int = 64,
        order: Sequence[int] | None = None,
        **arguments: Any,
    ) -> None:
        for name, value in (("epochs", epochs), ("stretch", stretch)):
            if not is_whole(value) or value < 1:
                raise InvalidInput(f"{name} must be a whole number of at least 1, got {value!r:.50}")
        super().__init__(service_url, **arguments)
        self._epochs, self._stretch, self._order = int(epochs), int(stretch), order
        if order is not None and len(order) % epochs:
            raise InvalidInput(f"order has {len(order)} ids, which are not the same number in each of {epochs} epochs")
        if order is not None and self.policy not in ("planned", "exact"):
            raise InvalidInput(f"policy {self.policy} keeps no order: take planned, which is the default, or exact")
        self._lock = threading.Lock()
        self._coming: dict[int, Future[Any]] = {}
        """By number, what was asked for and not taken yet, the oldest first."""
        self._listing = threading.Lock()
        self._lists: dict[int, Int64Array] = {}
        """Of an order of one's own: the ids of the last epochs that were asked for."""
        self._turn = threading.Condition()
        self._came: dict[int, PositionSet] = {}
        """What came of each epoch, with a live policy."""
        self.configure(order="keyed" if order is None else "explicit")
        self.register()
        self.asks_in_batches(stretch)

    @property
    def _per_epoch(self) -> int:
        return self.samples_per_rank if self._order is None else len(self._order) // self._epochs

    def __len__(self) -> int:
        """Samples of this rank in all epochs."""
        return self._epochs * self._per_epoch

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
        per_epoch = self._per_epoch
        begins = number - number % per_epoch
        end = min(number + self._stretch - (number - begins) % self._stretch, begins + per_epoch)
        asked = [(place, Future[Any]()) for place in range(number, end) if place not in self._coming]
        self._coming.update(asked[1:])
        while len(self._coming) > _KEPT_STRETCHES * self._stretch:
            del self._coming[next(iter(self._coming))]
        return asked

    def _samples(self, numbers: list[int]) -> list[Any]:
        epoch, first = divmod(numbers[0], self._per_epoch)
        positions = np.array(numbers, dtype=np.int64) - numbers[0] + first
        connection = self.connection
        if is_live := isinstance(connection, PodConnection):
            self._wait_until_over(epoch - 1)
        if self._order is None:
            batch = connection.batch(epoch, positions)
        else:
            batch = self._in_order(epoch, positions, self._order)
        if is_live:
            with self._turn:
                self._came.setdefault(epoch, PositionSet()).add_all(positions)
                self._came.pop(epoch - 2, None)
                self._turn.notify_all()
        return self._answered(connection, epoch, positions, batch, as_many=True)

    def _wait_until_over(self, epoch: int) -> None:
        """Pods of a live job leave an epoch when the next one is asked for; Grain's threads are not that much in
        step."""
        per_epoch = self._per_epoch

        def is_over() -> bool:
            came = self._came.get(epoch)
            return came is None or came.first_missing(next(iter(came))[0], per_epoch) is None

        with self._turn:
            self._turn.wait_for(is_over, _MOST_APART_SECONDS)
            self._came.pop(epoch, None)

    def _in_order(self, epoch: int, positions: Int64Array, order: Sequence[int]) -> ReceivedBatch:
        connection = self.connection
        with self._listing:  # threads may be in two epochs at once
            listed = self._lists.get(epoch)
            if listed is None:
                length = self._per_epoch
                listed = self._checked(order[place] for place in range(epoch * length, (epoch + 1) * length))
                if isinstance(connection, PlannedConnection):
                    connection.post_list(epoch, listed, int(positions[0]) // self._stretch * self._stretch)
                elif isinstance(connection, PodConnection):
                    connection.post_trace(epoch, listed)
                self._lists[epoch] = listed
                while len(self._lists) > _KEPT_LISTS:
                    del self._lists[next(iter(self._lists))]
        if isinstance(connection, PlannedConnection):
            return connection.batch(epoch, positions, listed[positions])
        return connection.batch(epoch, positions)

    def _checked(self, ids: Iterable[Any]) -> Int64Array:
        try:
            found = np.fromiter(map(operator.index, ids), dtype=np.int64)
        except (TypeError, OverflowError) as error:
            raise InvalidInput(f"order must be ids of samples, whole numbers: {error}") from error
        if len(found) and not 0 <= int(found.min()) <= int(found.max()) < self.num_samples:
            raise InvalidInput(
                f"order names ids {found.min()} to {found.max()}, and there are {self.num_samples} samples"
            )
        return found

    def __getstate__(self) -> NoReturn:
        raise InvalidInput(
            "a GrainSource stays in its process, whose threads share what one request brings: read it without "
            "mp_prefetch, with more threads (grain.ReadOptions(num_threads=...))"
        )
