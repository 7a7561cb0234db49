"""How does a rank ask for classes? Each position names a class, and the plan says which sample of it comes there.

Batches are composed as asked, each sample comes once an epoch, and bytes are read once: docs/ORDERS.md. The order of
classes follows from the job's seed and the epoch, so each rank knows all of it and posts its part.

The sample of every position is planned within its class (``protocol/class_plan.py``). Where samples come again, each
position gets the sample of its class whose turn it is in the plan's order: then what lies beside each other is asked
for at about the same time. That takes policy ``planned``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from refill.dataset_parts import dataset_alone
from refill.epoch_sampler import PlacedSampler
from refill.errors import InvalidInput
from refill.loops.epoch_place import Iteration
from refill.loops.given_counts import check_count, is_whole
from refill.pods.planned_connection import PlannedConnection, list_digest
from refill.pods.resume_state import ResumeState
from refill.protocol.class_order import (
    balanced_order,
    bucket_boundaries,
    bucket_order,
    positions_in_turn,
    positions_of_rank,
    rank_part,
    samples_for,
    stage_boundaries,
    stage_order,
)
from refill.protocol.class_plan import StoredSamples, plan_epoch_within_classes
from refill.protocol.plan_settings import WITHIN_CLASSES, WITHIN_CLASSES_VERSION, PlanSettings
from refill.protocol.wire_format import Int64Array

if TYPE_CHECKING:
    from refill.torch_dataset import CacheDataset

__all__ = ["BucketSampler", "ClassBalancedSampler", "ClassSampler", "CurriculumSampler"]

_MOST_CLASSES = (1 << 16) - 1


class ClassSampler(PlacedSampler):
    """Asks for classes in an order of your own: a curriculum in stages, sources in proportions. Which sample of the
    class a position gets is for the plan to choose. Each sample comes once an epoch.

    :param batch_size: of the DataLoader; all ranks have the same.
    :param order: the class of each position of all ranks, batch after batch: the first batch is rank 0's, the next one
        rank 1's, and so on. Or a function of the epoch alone that returns that. It asks for each class as often as the
        dataset has it.
    :param classes: the class of each sample, by id: whole numbers. None: ``dataset.labels``.

    Raises :class:`InvalidInput` for classes or an order that do not fit the dataset, and for a policy other than
    ``planned``.
    """

    _each_comes_once = True
    _follows_from_batches = False
    """Whether the order of an epoch does so even of one rank: with several, it is dealt to them in batches."""

    def __init__(
        self,
        dataset: CacheDataset,
        batch_size: int,
        order: Sequence[int] | Int64Array | Callable[[int], Sequence[int] | Int64Array],
        classes: ArrayLike | None = None,
    ) -> None:
        by = "labels" if classes is None else classes
        _configure(type(self).__name__, dataset, batch_size, by, once=self._each_comes_once)
        self._names, self._classes = _numbered(dataset, classes)
        self._order = order
        self._is_asked_twice = False
        self._stored: StoredSamples | None = None
        super().__init__(dataset)
        self.batch_size = self.composes = batch_size
        self._num_parts = dataset.connection.spec.num_groups

    def _num_positions(self) -> int:
        return positions_of_rank(self._num_asked(), self._num_parts, drop_last=self.drop_last)

    def _num_asked(self) -> int:
        """Positions of all ranks, before what does not divide is dropped or filled up."""
        return len(self._classes)

    def begin(self) -> Iteration:
        epoch, resumed = self.place.begin(shuffled=self.shuffle)
        samples, connection = self._samples(epoch), self.dataset.connection
        assert isinstance(connection, PlannedConnection)
        known = None if resumed is None or not resumed.start else connection.listed(epoch)
        if known is not None and known[1] != list_digest(samples):
            raise _is_another_order(epoch)
        return self.asks_for(epoch, samples, 0 if resumed is None else resumed.start)

    def _known_length(self, epoch: int) -> int:
        return self._num_positions()

    def state_of(self, iteration: Iteration, position: int) -> dict[str, Any]:
        kept = {"batch_size": self.batch_size}
        return self.dataset.state_at(iteration.epoch, position, iteration.length, kept)

    def _check_length(self, state: ResumeState) -> None:
        if state.length != self._num_positions():
            raise InvalidInput(
                f"the state is of an epoch of {state.length} positions a rank, and this sampler's has "
                f"{self._num_positions()}"
            )
        had = state.sampler.get("batch_size", self.batch_size) if isinstance(state.sampler, dict) else self.batch_size
        if state.mid_epoch and had != self.batch_size and (self._follows_from_batches or self._num_parts > 1):
            raise InvalidInput(
                f"the state is of an epoch in batches of {had}, and this sampler has batches of {self.batch_size}, so "
                f"that its order is another one: go on with batch_size={had}, or from the state of an epoch's end"
            )

    def _samples(self, epoch: int) -> Int64Array:
        """What this rank asks for."""
        random = np.random.default_rng([self.seed % 2**64, epoch])
        order = self._classes_in(epoch, random)
        connection = self.dataset.connection
        assert isinstance(connection, PlannedConnection)
        samples = self._planned(epoch, order, connection, random)
        return rank_part(samples, connection.group, self._num_parts, self.batch_size, drop_last=self.drop_last)

    def _planned(
        self, epoch: int, order: Int64Array, connection: PlannedConnection, random: np.random.Generator
    ) -> Int64Array:
        """The sample of each position of all ranks."""
        plan = PlanSettings.from_dict(connection.plan)
        if plan.version != WITHIN_CLASSES_VERSION:
            return samples_for(order, self._classes, connection.plan_order(epoch, len(self._classes)), random)
        if self._stored is None:
            self._stored = connection.stored_samples(self.dataset.lengths)
        in_turn = positions_in_turn(len(order), self._num_parts, self.batch_size, drop_last=self.drop_last)
        return plan_epoch_within_classes(in_turn, order, self._classes, self._stored, plan, epoch)

    def _classes_in(self, epoch: int, random: np.random.Generator) -> Int64Array:
        """The order of an epoch, in numbers from 0 on."""
        order = np.asarray(self._order(epoch) if callable(self._order) else self._order)
        if callable(self._order) and not self._is_asked_twice:
            self._is_asked_twice = True  # ranks would not agree, nor would who goes on
            if not np.array_equal(order, np.asarray(self._order(epoch))):
                raise _is_another_order(epoch)
        if order.ndim != 1 or order.dtype.kind not in "iu":
            raise InvalidInput(f"order must be whole numbers, a class for each position, got {order.dtype}")
        places = np.minimum(np.searchsorted(self._names, order), len(self._names) - 1)
        if len(unknown := np.flatnonzero(self._names[places] != order)):
            raise InvalidInput(f"order asks for class {order[unknown[0]]}, which no sample has")
        wanted, there = (np.bincount(each, minlength=len(self._names)) for each in (places, self._classes))
        if len(wrong := np.flatnonzero(wanted != there)):
            name = self._names[wrong[0]]
            raise InvalidInput(
                f"order asks for {wanted[wrong[0]]} samples of class {name} in epoch {epoch}, and the dataset has "
                f"{there[wrong[0]]}: each sample comes once"
            )
        return places.astype(np.int64)


class BucketSampler(ClassSampler):
    """Batches of samples of about the same length, so that little is padded. Each sample comes once an epoch.

    In each step all ranks have a batch of the same bucket. What is left of a bucket comes in batches with what is left
    of the next ones; the last batch of the epoch may be smaller.

    :param batch_size: of the DataLoader; all ranks have the same.
    :param lengths: of each sample, by id: tokens, frames, pixels. None: its bytes in the store.
    :param boundaries: the lengths at which buckets begin, but for the first. None: so that ``num_buckets`` buckets have
        the same sum of lengths each, as lhotse's.
    """

    _follows_from_batches = True

    def __init__(
        self,
        dataset: CacheDataset,
        batch_size: int,
        lengths: ArrayLike | None = None,
        boundaries: Sequence[int] | None = None,
        num_buckets: int = 10,
    ) -> None:
        by_lengths = "lengths" if lengths is None else lengths
        _configure(
            type(self).__name__, dataset, batch_size, by_lengths, num_buckets, () if boundaries is None else boundaries
        )
        found = dataset.lengths if lengths is None else _of_each_sample("lengths", lengths, len(dataset))
        if boundaries is not None:
            self.boundaries = np.unique(np.asarray(boundaries, dtype=np.int64))
        elif num_buckets < 1:
            raise InvalidInput(f"num_buckets must be at least 1, got {num_buckets}")
        else:
            self.boundaries = bucket_boundaries(found, num_buckets)
        super().__init__(dataset, batch_size, (), np.searchsorted(self.boundaries, found, side="right"))

    def _classes_in(self, epoch: int, random: np.random.Generator) -> Int64Array:
        return bucket_order(self._classes, self._num_parts * self.batch_size, random)


class ClassBalancedSampler(ClassSampler):
    """Every batch has the classes in the same proportions, as near as whole numbers allow.

    :param batch_size: of the DataLoader; all ranks have the same.
    :param classes: the class of each sample, by id: whole numbers. None: ``dataset.labels``.
    :param per_class: None: the proportions of the dataset, and each sample comes once an epoch. A number: every class
        comes so many times an epoch, so that all are equally frequent. Then samples of smaller classes come again, and
        of larger ones some do not come, others in each epoch.
    """

    def __init__(
        self,
        dataset: CacheDataset,
        batch_size: int,
        classes: ArrayLike | None = None,
        per_class: int | None = None,
    ) -> None:
        if per_class is not None and per_class < 1:
            raise InvalidInput(f"per_class must be at least 1, got {per_class}")
        self.per_class, self._each_comes_once = per_class, per_class is None
        super().__init__(dataset, batch_size, (), classes)

    def _num_asked(self) -> int:
        return len(self._classes) if self.per_class is None else self.per_class * len(self._names)

    def _classes_in(self, epoch: int, random: np.random.Generator) -> Int64Array:
        counts = np.bincount(self._classes)
        return balanced_order(counts if self.per_class is None else np.full_like(counts, self.per_class), random)


class CurriculumSampler(ClassSampler):
    """Samples with low values first, in stages, each in an order of its own: short texts before long ones, easy before
    hard. Each sample comes once an epoch.

        sampler = refill.CurriculumSampler(dataset, 64, dataset.column("difficulty"), epochs=1)

    :param batch_size: of the DataLoader; all ranks have the same.
    :param by: a number of each sample, by id: a column of the index, ``dataset.lengths``, losses of a model.
    :param boundaries: the values at which stages begin, but for the first. None: so that ``num_stages`` stages have as
        many samples each. Equal values are in one stage.
    :param mixed: so large a part of the positions, 0 to 1, has samples of any stage.
    :param epochs: so many go in stages, and the others in an order that is drawn. None: all go in stages.
    """

    def __init__(
        self,
        dataset: CacheDataset,
        batch_size: int,
        by: ArrayLike,
        boundaries: Sequence[float] | None = None,
        num_stages: int = 10,
        mixed: float = 0.0,
        epochs: int | None = None,
    ) -> None:
        values = np.asarray(by)
        if values.shape != (len(dataset),) or values.dtype.kind not in "iuf" or not np.isfinite(values).all():
            raise InvalidInput(
                f"by must be a finite number for each of {len(dataset)} samples, by id, got {values.dtype} of shape "
                f"{values.shape}"
            )
        if not is_whole(num_stages) or num_stages < 1:
            raise InvalidInput(f"num_stages must be a whole number of at least 1, got {num_stages!r:.50}")
        if not isinstance(mixed, int | float) or not 0 <= mixed <= 1:
            raise InvalidInput(f"mixed must be a part of the positions, 0 to 1, got {mixed!r:.50}")
        if epochs is not None and (not is_whole(epochs) or epochs < 0):
            raise InvalidInput(f"epochs must be a whole number of at least 0, got {epochs!r:.50}")
        given = np.asarray(() if boundaries is None else boundaries, dtype=np.int64 if boundaries is None else None)
        if given.ndim != 1 or given.dtype.kind not in "iuf" or not np.isfinite(given).all():
            raise InvalidInput(f"boundaries must be finite numbers, got {boundaries!r:.50}")
        every = -1 if epochs is None else epochs
        _configure(type(self).__name__, dataset, batch_size, values, given, num_stages, float(mixed), every)
        self.boundaries = stage_boundaries(values, num_stages) if boundaries is None else np.unique(given)
        self.mixed, self.epochs = float(mixed), epochs
        super().__init__(dataset, batch_size, (), np.searchsorted(self.boundaries, values, side="right"))

    def _classes_in(self, epoch: int, random: np.random.Generator) -> Int64Array:
        in_stages = self.epochs is None or epoch < self.epochs
        return stage_order(self._classes, self.mixed if in_stages else 1.0, random)


def _is_another_order(epoch: int) -> InvalidInput:
    return InvalidInput(
        f"order gives another one for epoch {epoch} than it gave before, so that samples would be lost and others come "
        "twice: make it a function of the epoch alone, such as np.random.default_rng([seed, epoch]).permutation(labels)"
    )


def _configure(name: str, dataset: CacheDataset, batch_size: int, *classes_by: ArrayLike, once: bool = True) -> None:
    """:param classes_by: what the classes follow from, beside the dataset.
    :param once: whether each sample comes once an epoch."""
    check_count("batch_size", batch_size)
    dataset_alone(name, dataset)
    if dataset.policy != "planned":
        raise InvalidInput(f"{name} needs policy planned, the default: leave out policy={dataset.policy!r}")
    dataset.configure(order="explicit")
    dataset.selects_by((WITHIN_CLASSES if once else "") + _digest(classes_by))
    dataset.register()


def _digest(parts: Iterable[ArrayLike]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for part in map(np.asarray, parts):
        numbers = part.astype("<i8") if part.dtype.kind in "iu" else part.astype(str)
        found.update(f"{numbers.dtype.kind}{numbers.shape}".encode() + numbers.tobytes())
    return found.hexdigest()


def _numbered(dataset: CacheDataset, classes: ArrayLike | None) -> tuple[Int64Array, Int64Array]:
    """``(names, classes)``: the classes that there are, and the place among them of each sample's."""
    if classes is None and (classes := dataset.labels) is None:
        raise InvalidInput("the dataset has no labels: give classes, the class of each sample by id")
    names, numbers = np.unique(_of_each_sample("classes", classes, len(dataset)), return_inverse=True)
    if len(names) > _MOST_CLASSES:
        raise InvalidInput(f"there are {len(names)} classes; there may be {_MOST_CLASSES}")
    return names, numbers.astype(np.int64)


def _of_each_sample(what: str, given: ArrayLike, num_samples: int) -> Int64Array:
    found = np.asarray(given)
    if found.shape != (num_samples,):
        raise InvalidInput(f"{what} has shape {found.shape}, and must be one for each of {num_samples} samples, by id")

    if found.dtype.kind not in "iu":
        raise InvalidInput(f"{what} must be whole numbers, got {found.dtype}")
    return found.astype(np.int64)
