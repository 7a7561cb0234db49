"""In which order does a rank ask? Positions of its trace, which pods know from the seed, or which a client posts."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch.utils.data

from refill.epoch_place import EpochPlace, Iteration
from refill.errors import InvalidInput
from refill.lightning_place import lightning_place
from refill.protocol.wire_format import Int64Array
from refill.resume_state import ResumeState
from refill.trainer_division import Division, division_of_sampler, is_a_loaders_count

if TYPE_CHECKING:
    from refill.torch_dataset import CacheDataset

__all__ = ["EpochSampler", "PlacedSampler", "Position", "TraceSampler"]


class Position(NamedTuple):
    """What a sampler yields in place of an index: the name of one request of the rank.

    The epoch is part of it, so that persistent workers need not be told of a new one.
    """

    epoch: int
    position: int
    """-1: none; it fills up a batch that another process is left with."""
    iteration: int = 0
    """Of which iteration of the sampler (:mod:`refill.hole_guard`); 0: not known."""
    rank: int = -1
    """Whose position it is; -1: that of the dataset's own rank."""

    def __eq__(self, other: object) -> bool:
        """Whether both name the same request, in whichever iteration."""
        return isinstance(other, Position) and self._request == other._request

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self._request)

    @property
    def _request(self) -> tuple[int, int, int]:
        return self.epoch, self.position, self.rank


class _Positions(Iterator[Position]):
    """Hands out positions. Its iteration begins with the first: loaders make iterators that they throw away.

    It is here, and not at the sampler, that torchdata's StatefulDataLoader finds ``state_dict``. That loader asks for
    the state as it hands a batch to a worker, and keeps it until the loop gets the batch.
    """

    def __init__(self, sampler: PlacedSampler) -> None:
        self._sampler = sampler
        self._iteration: Iteration | None = None
        self._division: Division | None = None
        self._number = 0
        self._next = self._end = 0

    def __next__(self) -> Position:
        iteration = self._iteration or self._begin()
        if self._next + 1 >= self._end:
            self._sampler.place.handed_out(iteration.epoch)
            if self._next >= self._end:
                raise StopIteration
        self._next += 1
        if self._division is None:
            return Position(iteration.epoch, self._next - 1, self._number)
        return self._dealt(iteration, self._division, self._next - 1 - iteration.start)

    def _begin(self) -> Iteration:
        sampler = self._sampler
        sampler.follow_lightning()
        self._division = division_of_sampler(sampler)
        reads_nothing = self._division is not None and self._division.reads_nothing
        iteration = self._iteration = sampler.begin_nothing() if reads_nothing else sampler.begin()
        self._next, self._end = iteration.start, iteration.length
        if self._division is None:
            self._number = sampler.dataset.positions_begin(iteration.start, sampler.composes)
        elif reads_nothing:
            self._end = self._next
        else:
            self._division.check(sampler.num_replicas)
            self._number = (
                0 if self._division.dispatched else sampler.dataset.positions_begin(iteration.start, sampler.composes)
            )
            self._end = iteration.start + self._division.length(iteration.length - iteration.start)
        return iteration

    def _dealt(self, iteration: Iteration, division: Division, item: int) -> Position:
        """What a trainer that divides items a second time is to get in its place."""
        place = division.place(item, iteration.length - iteration.start)
        if place is None:
            return Position(iteration.epoch, -1)
        rank = place[0] if division.dispatched else -1
        return Position(iteration.epoch, iteration.start + place[1], self._number, rank)

    def state_dict(self) -> dict[str, Any]:
        """The place of the next position."""
        if self._iteration is None:
            return self._sampler.next_state()
        return self._sampler.state_of(self._iteration, self._next)

    def load_state_dict(self, state: Any) -> None:
        """Go on there. Errors as :meth:`CacheDataset.checked_state`."""
        found = self._sampler.resume(state)
        # At its end nothing is left to hand out, and what follows is for the next iterator.
        self._iteration = Iteration(found.epoch, found.length, found.length) if found.at_end else None
        self._next = self._end = found.length


class PlacedSampler(torch.utils.data.DistributedSampler[Position]):
    """What all samplers are: a place in the epochs, which can be left in one process and taken up in another.

    A DistributedSampler by type, since each rank has one of its own: trainers then leave it as it is. Its order and its
    epochs have nothing of torch's. There is no ``state_dict`` here: a sampler is ahead of the loop by what the loader's
    workers have prefetched.
    """

    dataset: CacheDataset
    composes = 0
    """How many positions belong together in a batch; 0: any do."""

    def __init__(self, dataset: CacheDataset) -> None:
        # Not torch's own: it would ask for the length, and for a process group.
        self.dataset = dataset
        self.place = EpochPlace()
        self.iteration: Iteration | None = None
        """The one that began last; None when the place was set since."""
        self._refused: InvalidInput | None = None
        spec = dataset.connection.spec
        self.num_replicas, self.rank = spec.world_size, dataset.rank
        self.shuffle, self.seed, self.drop_last = spec.shuffle, spec.seed, spec.drop_last
        dataset.is_sampled_by(self)

    def __len__(self) -> int:
        """Positions of this rank in a whole epoch; of all ranks, to a trainer that divides what a sampler yields."""
        count, division = self._num_positions(), division_of_sampler(self)
        return count if division is None else division.length(count)

    def _num_positions(self) -> int:
        """Positions of this rank in a whole epoch."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Position]:
        return _Positions(self)

    @property
    def epoch(self) -> int:  # type: ignore[override]  # an attribute there, which nobody but the sampler sets
        """The epoch that an iteration began last; or the one that was set or resumed since, and comes next."""
        return self.place.epoch

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch: from its start, or from the place in it that was resumed."""
        if self._refused is not None:
            raise self._refused
        self.place.set_epoch(self.place.next()[0] if is_a_loaders_count() else epoch)
        self.iteration = None

    def load_state_dict(self, state: Any) -> None:
        """Go on where a loop stood in another process.

        The next iteration yields the rest of the epoch; ``len()`` stays that of a whole one. After a state from the end
        of an epoch, the next iteration is the next epoch. Errors as :meth:`CacheDataset.checked_state`.

        :param state: of ``refill.timed(loader, dataset).state_dict()`` or :meth:`state_after`.
        """
        self.resume(state)

    def state_after(self, consumed: int) -> dict[str, Any]:
        """The state, for :meth:`load_state_dict`, of a loop that counts its samples itself.

        :param consumed: how many samples the loop has taken in the iteration that began last; 0 when none has begun
            since ``set_epoch`` or ``load_state_dict``. What workers have fetched ahead does not count.
        """
        most = 0 if self.iteration is None else self.iteration.length - self.iteration.start
        if not 0 <= consumed <= most:
            raise InvalidInput(f"the loop can't have consumed {consumed} samples: its iteration has {most}")
        if self.iteration is None:
            return self.next_state()
        return self.state_of(self.iteration, self.iteration.start + consumed)

    def resume(self, state: Any) -> ResumeState:
        found = self.dataset.checked_state(state)
        self._check_length(found)
        self.place.resume(Iteration(found.epoch, found.position, found.length))
        self.iteration = None
        return found

    def next_state(self) -> dict[str, Any]:
        """The state of a loop that has not begun its next iteration yet."""
        epoch, resumed = self.place.next()
        return self.state_of(resumed or Iteration(epoch, 0, self._known_length(epoch)), resumed.start if resumed else 0)

    def state_of(self, iteration: Iteration, position: int) -> dict[str, Any]:
        return self.dataset.state_at(iteration.epoch, position, iteration.length)

    def follow_lightning(self) -> None:
        """Lightning goes on from a checkpoint that has no state of this sampler's loader: where is that?

        Within an epoch, whose beginning would come again, is an error: now, or where Lightning sets the epoch, since
        one in the line that makes its loaders would be followed by others of its own.
        """
        found = None if self.place.was_resumed else lightning_place(self)
        if found is None:
            return
        if found.batches and not self.dataset.allow_skipped:
            error = InvalidInput(
                f"Lightning goes on after {found.batches} batches of an epoch, and its checkpoint has no state of the "
                "loader: those would come again, and as many at the epoch's end never. Give fit() refill.timed(loader, "
                "dataset), or a StatefulDataLoader, and go on from a checkpoint of one, or of an epoch's end; "
                "allow_skipped=True, given to the dataset, allows it"
            )
            if found.epoch is None:
                raise error
            self._refused = error
        elif found.epoch is not None:
            self.place.set_epoch(found.epoch)

    def begin(self) -> Iteration:
        """Called when the first position of an iteration is asked for."""
        raise NotImplementedError

    def begin_nothing(self) -> Iteration:
        """Fact: an iteration begins in a process that is given what another one reads."""
        epoch, _ = self.place.begin()
        return Iteration(epoch, 0, 0)

    def _known_length(self, epoch: int) -> int:
        """Positions of an epoch that has not begun, 0 if that can't be told yet."""
        return 0

    def _check_length(self, state: ResumeState) -> None:
        """Raises :class:`InvalidInput` when an epoch can't have so many positions."""

    def __getattr__(self, name: str) -> Any:
        if name == "state_dict":
            raise AttributeError(
                "a sampler does not know what the loop has consumed: use refill.timed(loader, dataset).state_dict(), "
                "torchdata's StatefulDataLoader, or sampler.state_after(consumed)"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class EpochSampler(PlacedSampler):
    """Takes the place of ``DistributedSampler(dataset, ...)``, with the same arguments.

    What you leave out is as the dataset says, or else as in DistributedSampler: shuffled, seed 0, padded, and the ranks
    of torch.distributed. Raises :class:`InvalidInput` if an argument contradicts the dataset. The job is registered
    here, so a wrong setting or an unknown dataset fails in this line. Workers inherit the answer.

    Call ``set_epoch`` before each epoch, as with DistributedSampler. Without it, the next epoch follows each complete
    iteration.
    """

    def __init__(
        self,
        dataset: CacheDataset,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool | None = None,
        seed: int | None = None,
        drop_last: bool | None = None,
    ) -> None:
        dataset.configure(
            world_size=num_replicas, rank=rank, shuffle=shuffle, seed=seed, drop_last=drop_last, order="keyed"
        )
        super().__init__(dataset)
        self.num_samples = dataset.samples_per_rank
        self.total_size = self.num_samples * self.num_replicas

    def _num_positions(self) -> int:
        return self.num_samples

    def begin(self) -> Iteration:
        epoch, resumed = self.place.begin()
        self.iteration = resumed or Iteration(epoch, 0, self.dataset.positions_in(epoch))
        return self.iteration

    def _known_length(self, epoch: int) -> int:
        return self.dataset.positions_in(epoch)

    def _check_length(self, state: ResumeState) -> None:
        self.dataset.check_epoch_length(state)


_IN_RANDOM_ORDER = (
    torch.utils.data.RandomSampler,
    torch.utils.data.SubsetRandomSampler,
    torch.utils.data.WeightedRandomSampler,
)


class TraceSampler(PlacedSampler):
    """Reads what a sampler of your own chooses: a subset, or by weights. With ``policy="exact"`` its order is kept,
    too; see docs/CLIENT.md.

    At the start of each epoch the ids are listed and posted to the pods. The pods then hand out only these samples,
    each as often as it was listed, in an order of their own. An epoch begins when all ranks have posted. Give
    ``order="explicit"`` to the dataset if your sampler asks for its length, because that registers the job.

    :param sampler: yields sample ids, ``0 <= id < len(dataset)``. With several ranks each one wraps its own.
    :param any_order: True says that the order of the sampler does not matter. Without it there is a warning when the
        sampler is not one of torch's random ones.
    """

    def __init__(self, dataset: CacheDataset, sampler: Iterable[int], any_order: bool = False) -> None:
        dataset.configure(order="explicit")
        dataset.register()
        spec = dataset.connection.spec
        if spec.shuffle and spec.policy != "exact" and not any_order and not _in_random_order(sampler):
            warnings.warn(
                f"the order of {type(sampler).__name__} is not kept: pods hand out its ids in an order of their own. "
                "If any will do, say TraceSampler(..., any_order=True); CacheDataset(..., policy='exact') keeps it and "
                "reads more from the store",
                stacklevel=2,
            )
        super().__init__(dataset)
        self.sampler = sampler
        self._state_is_of_another_rank = False

    def _num_positions(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]  # a sampler without a length has none here either

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        inner: Any = self.sampler
        if hasattr(inner, "set_epoch"):
            inner.set_epoch(self.epoch)

    def begin(self) -> Iteration:
        epoch, resumed = self.place.begin()
        if resumed is not None and resumed.start > 0 and not self._state_is_of_another_rank:
            self.iteration = resumed  # the pods have its ids, and listing them again might give others
            return resumed
        ids = self._ids()
        start = 0 if resumed is None else resumed.start
        if start > len(ids):
            raise InvalidInput(f"the state is of position {start}, and rank {self.rank} asks for {len(ids)} samples")
        self.dataset.connection.post_trace(epoch, ids)
        self.iteration = Iteration(epoch, start, len(ids))
        return self.iteration

    def state_of(self, iteration: Iteration, position: int) -> dict[str, Any]:
        """The state at a position. It holds the state of your sampler, too, or of its generator, so that the epochs to
        come are the same."""
        inner: Any = self.sampler
        if hasattr(inner, "state_dict"):
            kept = {"state": inner.state_dict()}
        elif isinstance(generator := getattr(inner, "generator", None), torch.Generator):
            kept = {"generator": generator.get_state()}
        else:
            kept = None
        return self.dataset.state_at(iteration.epoch, position, iteration.length, kept)

    def resume(self, state: Any) -> ResumeState:
        found = super().resume(state)
        inner: Any = self.sampler
        self._state_is_of_another_rank = found.rank != self.rank
        if self._state_is_of_another_rank:
            self._catch_up()
            return found
        if hasattr(inner, "set_epoch"):
            inner.set_epoch(self.epoch)
        kept = found.sampler if isinstance(found.sampler, dict) else {}
        if "state" in kept and hasattr(inner, "load_state_dict"):
            inner.load_state_dict(kept["state"])
        elif "generator" in kept and isinstance(generator := getattr(inner, "generator", None), torch.Generator):
            generator.set_state(kept["generator"])
        return found

    def _catch_up(self) -> None:
        """The wrapped sampler's state is another rank's, so it lists the epochs that are over once more: what it draws
        from then on is what it would have drawn had it not been stopped."""
        inner: Any = self.sampler
        for epoch in range(self.epoch):
            if hasattr(inner, "set_epoch"):
                inner.set_epoch(epoch)
            for _ in inner:
                pass
        if hasattr(inner, "set_epoch"):
            inner.set_epoch(self.epoch)

    def _ids(self) -> Int64Array:
        try:
            ids = np.fromiter((operator.index(sample_id) for sample_id in self.sampler), dtype=np.int64)
        except (TypeError, OverflowError) as error:
            raise InvalidInput(
                f"TraceSampler takes a sampler of sample ids, one by one (a BatchSampler goes around it): {error}"
            ) from error
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < len(self.dataset):
            wrong = ids[(ids < 0) | (ids >= len(self.dataset))][0]
            raise InvalidInput(f"there is no sample {wrong}; the dataset has samples 0 to {len(self.dataset) - 1}")
        return ids


def _in_random_order(sampler: Iterable[int]) -> bool:
    """Whether nobody can miss its order: one of the random samplers of torch or torchdata, none that is derived."""
    if type(sampler).__module__.partition(".")[0] not in ("torch", "torchdata"):
        return False
    if isinstance(sampler, torch.utils.data.DistributedSampler):
        return sampler.shuffle
    return isinstance(sampler, _IN_RANDOM_ORDER) or type(sampler).__name__ == "RandomSampler"
