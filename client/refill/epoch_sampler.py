"""In which order does a rank ask? Positions of its trace, which pods know from the seed, or which a client posts."""

from __future__ import annotations

import copy
import operator
import warnings
from collections.abc import Iterable, Iterator
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.utils.data

from refill.dataset_parts import dataset_and_ids
from refill.errors import InvalidInput
from refill.loops.epoch_place import EpochPlace, Iteration
from refill.loops.given_counts import check_count
from refill.loops.lightning_place import lightning_place
from refill.loops.loader_turns import batch_of_loader, is_forwarded, num_forwarded, workers_of_loader
from refill.loops.position import Position, job_number
from refill.loops.trainer_division import DealtToRanks, Division, check_whole, division_of_sampler, is_a_loaders_count
from refill.pods.planned_connection import PlannedConnection
from refill.pods.pod_connection import PodConnection
from refill.pods.resume_state import ResumeState
from refill.protocol.class_order import in_turns, positions_of_rank
from refill.protocol.wire_format import Int64Array, check_samples

if TYPE_CHECKING:
    from refill.torch_dataset import CacheDataset

__all__ = ["EpochSampler", "PlacedSampler", "TraceSampler"]


class _ListedIteration(Iteration):
    listed: Int64Array | None = None
    """The samples of its positions, where pods don't keep them."""


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
        self._listed: Int64Array | None = None
        self._listed_of_ranks: dict[int, Int64Array] = {}

    def __next__(self) -> Position:
        iteration = self._iteration or self._begin()
        if self._next + 1 >= self._end:
            self._sampler.place.handed_out(iteration.epoch)
            if self._next >= self._end:
                raise StopIteration
        self._next += 1
        if self._division is None:
            return self._position(iteration, self._next - 1)
        return self._dealt(iteration, self._division, self._next - 1 - iteration.start)

    def _begin(self) -> Iteration:
        sampler = self._sampler
        sampler.follow_lightning()
        self._division = division_of_sampler(sampler)
        if self._division is None:
            check_whole(type(sampler).__name__, sampler.dataset)
        if not sampler.place.was_said and is_forwarded(sampler):
            raise InvalidInput(
                "a StatefulDataLoader goes on within an epoch, and its state does not say in which: torch's "
                "BatchSampler has no state. Call set_epoch(epoch) of the sampler before, or give the loader "
                "torchdata.stateful_dataloader.sampler.BatchSampler"
            )
        is_listed = sampler.dataset.connection.spec.is_listed
        if self._division is not None and self._division.dispatched and is_listed and not sampler.knows_all_lists:
            raise InvalidInput(
                "process 0 reads for all (dispatch_batches=True), and knows only the samples of its own rank: set "
                "dispatch_batches=False"
            )
        reads_nothing = self._division is not None and self._division.reads_nothing
        sampler.asks_in_batches(batch_of_loader(sampler) if self._division is None else self._division.run)
        iteration = self._iteration = sampler.begin_nothing() if reads_nothing else sampler.begin()
        self._next, self._end = iteration.start, iteration.length
        self._listed, self._listed_of_ranks = sampler.listed, sampler.listed_of_ranks
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
        return self._position(iteration, iteration.start + place[1], rank)

    def _position(self, iteration: Iteration, position: int, rank: int = -1) -> Position:
        listed = self._listed_of_ranks.get(rank, self._listed)
        sample = -1 if listed is None else int(listed[position])
        return Position(iteration.epoch, position, self._number, rank, self._sampler.job, sample)

    def state_dict(self) -> dict[str, Any]:
        """The place of the next position."""
        if self._iteration is None:
            return self._sampler.next_state()
        return self._sampler.state_of(self._iteration, self._next)

    def load_state_dict(self, state: Any) -> None:
        """Go on there. Errors as :meth:`CacheDataset.checked_state`."""
        found = self._sampler.resume(state)
        saved, batch = ResumeState.from_dict(state), batch_of_loader(self._sampler)
        is_other_batch = min(saved.batch, batch) > 1 and saved.batch != batch
        if (saved.world_size != found.world_size or is_other_batch) and (passed := num_forwarded()):
            raise InvalidInput(
                f"the state was saved with world_size {saved.world_size} and batches of {saved.batch}, and this job "
                f"has {found.world_size} and {batch}: StatefulDataLoader would pass over {passed} of each rank, "
                "since its last snapshot was so long ago, and they are others now. Save with snapshot_every_n_steps=1, "
                "the default, or go on with the same"
            )
        # At its end nothing is left to hand out, and what follows is for the next iterator.
        self._iteration = Iteration(found.epoch, found.length, found.length) if found.at_end else None
        self._next = self._end = found.length


class PlacedSampler(DealtToRanks, torch.utils.data.DistributedSampler[Position]):
    """What all samplers are: a place in the epochs, which can be left in one process and taken up in another.

    A DistributedSampler by type, since each rank has one of its own: trainers then leave it as it is. Its order and its
    epochs have nothing of torch's. There is no ``state_dict`` here: a sampler is ahead of the loop by what the loader's
    workers have prefetched.
    """

    dataset: CacheDataset
    composes = 0
    """How many positions belong together in a batch; 0: any do."""
    knows_all_lists = False
    """Whether it knows what other ranks ask for, where ranks ask by lists."""

    def __init__(self, dataset: CacheDataset) -> None:
        # Not torch's own: it would ask for the length, and for a process group.
        self.dataset = dataset
        self.job = job_number(dataset.job)
        self.place = EpochPlace()
        self.iteration: Iteration | None = None
        """The one that began last; None when the place was set since."""
        self.listed: Int64Array | None = None
        """The samples of its positions, where each request names them; None: pods know them."""
        self.listed_of_ranks: dict[int, Int64Array] = {}
        """Those of each rank, where this process reads for all."""
        self.list_of_state: Int64Array | None = None
        """Those of the epoch that a state is of, which was loaded since."""
        self._refused: InvalidInput | None = None
        spec = dataset.connection.spec
        self.num_replicas, self.rank = spec.world_size, dataset.rank
        self.shuffle, self.seed, self.drop_last = spec.shuffle, spec.seed, spec.drop_last
        dataset.is_sampled_by(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dataset!r}, epoch={self.epoch})"

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
        if not is_a_loaders_count():
            self.place.set_epoch(epoch)
        else:
            self.place.goes_on()
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

    def asks_in_batches(self, of_loader: int) -> None:
        """Called before an iteration begins.

        :param of_loader: how many positions its loader puts into a batch; 0: not known.
        """

    def begin(self) -> Iteration:
        """Called when the first position of an iteration is asked for."""
        raise NotImplementedError

    def begin_nothing(self) -> Iteration:
        """Fact: an iteration begins in a process that is given what another one reads."""
        epoch, _ = self.place.begin()
        return Iteration(epoch, 0, 0)

    def asks_for(self, epoch: int, sample_ids: Int64Array, start: int) -> Iteration:
        """Fact: an epoch begins, at position ``start`` of these samples. They are posted to the pods."""
        connection = self.dataset.connection
        iteration = _ListedIteration(epoch, start, len(sample_ids))
        if isinstance(connection, PlannedConnection):
            self.listed = iteration.listed = sample_ids
            connection.post_list(epoch, sample_ids, start)
        elif isinstance(connection, PodConnection):
            connection.post_trace(epoch, sample_ids)
        self.iteration = iteration
        return iteration

    def list_at(self, iteration: Iteration, position: int) -> dict[str, Any]:
        """For a state within an epoch of which pods don't keep the samples: these. Another iteration may have listed
        others since."""
        listed = iteration.listed if isinstance(iteration, _ListedIteration) else self.list_of_state
        if listed is not None and 0 < position < iteration.length == len(listed):
            return {"list": torch.from_numpy(listed)}
        return {}

    def load_list(self, state: ResumeState) -> None:
        """Fact: the sampler goes on from a state. Raises :class:`InvalidInput` if that lacks the samples of its
        epoch."""
        self.list_of_state = None
        if not state.mid_epoch or not self.dataset.connection.spec.is_listed:
            return
        kept = state.sampler if isinstance(state.sampler, dict) else {}
        listed = kept.get("list")
        if not isinstance(listed, torch.Tensor) or tuple(listed.shape) != (state.length,):
            raise InvalidInput(
                f"the state is damaged, or not of a {type(self).__name__}: it does not list the {state.length} samples "
                f"of epoch {state.epoch}"
            )
        ids = listed.numpy().astype(np.int64)
        check_samples(ids, len(self.dataset))
        self.list_of_state = ids

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

    :param dataset: or a torch ``Subset`` of one, as of ``random_split``; the DataLoader reads the same. Each sample of
        the part comes once an epoch, over all ranks. It is a job of its own, and ``sampler.dataset`` its dataset. The
        indices of a Subset of a Subset are ids of the dataset from then on.
    :param batch_size: with ``policy="planned"``: how many positions in a row of the epoch's one order a rank gets
        together, the same for all ranks. None: as many as the DataLoader puts into a batch. Then a batch needs few
        pods, and global steps are the same for any number of ranks. 1 goes with loaders of any batch size.
    """

    knows_all_lists = True

    def __init__(
        self,
        dataset: CacheDataset | torch.utils.data.Subset[Any],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool | None = None,
        seed: int | None = None,
        drop_last: bool | None = None,
        batch_size: int | None = None,
    ) -> None:
        if batch_size is not None:
            check_count("batch_size", batch_size)
        self._batch_size = batch_size
        read, self._ids = dataset_and_ids("EpochSampler", dataset)
        order = "keyed" if self._ids is None else "explicit"
        read.configure(world_size=num_replicas, rank=rank, shuffle=shuffle, seed=seed, drop_last=drop_last, order=order)
        super().__init__(read)
        self._count()

    def _count(self) -> None:
        if self._ids is None:
            self.num_samples = self.dataset.samples_per_rank
        else:
            num_parts = self.dataset.connection.spec.num_groups
            self.num_samples = positions_of_rank(len(self._ids), num_parts, drop_last=self.drop_last)
        self.total_size = self.num_samples * self.num_replicas

    def resume(self, state: Any) -> ResumeState:
        found = super().resume(state)
        self._count()  # the state may be of a version of the dataset with fewer samples
        return found

    def _num_positions(self) -> int:
        return self.num_samples

    def asks_in_batches(self, of_loader: int) -> None:
        if found := self._batch_size or of_loader:
            self.dataset.asks_in_batches(found, workers_of_loader())

    def begin(self) -> Iteration:
        epoch, resumed = self.place.begin(shuffled=self.shuffle)
        connection = self.dataset.connection
        if self._ids is not None and isinstance(connection, PlannedConnection):
            ids = self._ids
            if self.shuffle:
                ids = in_turns(ids, connection.plan_order(epoch, self.dataset.num_samples))
            start = 0 if resumed is None else resumed.start
            self._list_for_others(ids, epoch, start, connection)
            return self.asks_for(epoch, self._dealt(ids, connection.group, connection.spec.num_groups), start)
        if self._ids is not None and isinstance(connection, PodConnection):
            self._post(self._ids, epoch, connection)
        self.iteration = resumed or Iteration(epoch, 0, self._known_length(epoch))
        return self.iteration

    def _of_rank(self, ids: Int64Array, epoch: int, rank: int, num_ranks: int) -> Int64Array:
        """What a rank asks for of a part: as DistributedSampler deals it, in an order that follows from seed and
        epoch."""
        if self.shuffle:
            ids = np.random.default_rng([self.seed % 2**64, epoch]).permutation(ids)
        return self._dealt(ids, rank, num_ranks)

    def _dealt(self, ids: Int64Array, rank: int, num_ranks: int) -> Int64Array:
        return np.resize(ids, self.num_samples * num_ranks)[rank::num_ranks].copy()

    def _list_for_others(self, ids: Int64Array, epoch: int, start: int, connection: PlannedConnection) -> None:
        """Where this process reads for all ranks, it also says for the others what they ask for."""
        division, self.listed_of_ranks = division_of_sampler(self), {}
        if division is None or not division.dispatched:
            return
        for rank in range(self.num_replicas):
            other = connection.of_rank(rank)
            self.listed_of_ranks[rank] = self._dealt(ids, other.group, connection.spec.num_groups)
            if rank != self.rank:
                other.post_list(epoch, self.listed_of_ranks[rank], start)

    def _post(self, ids: Int64Array, epoch: int, connection: PodConnection) -> None:
        """Tell pods what this rank asks for of a part; and where this process reads for all ranks, what they do."""
        division = division_of_sampler(self)
        for rank in range(self.num_replicas):
            trace = self._of_rank(ids, epoch, rank, self.num_replicas)
            if rank == self.rank:
                connection.post_trace(epoch, trace)
            elif division is not None and division.dispatched:
                connection.of_rank(rank).post_trace(epoch, trace)

    def _known_length(self, epoch: int) -> int:
        return self.dataset.positions_in(epoch) if self._ids is None else self.num_samples

    def _check_length(self, state: ResumeState) -> None:
        if self._ids is None:
            self.dataset.check_epoch_length(state)
        elif state.length != self.num_samples:
            raise InvalidInput(
                f"the state counts {state.length} samples of rank {state.rank} in an epoch of this part, and there are "
                f"{self.num_samples}: drop_last has changed since it was saved"
            )


_IN_RANDOM_ORDER = (
    torch.utils.data.RandomSampler,
    torch.utils.data.SubsetRandomSampler,
    torch.utils.data.WeightedRandomSampler,
)


class TraceSampler(PlacedSampler):
    """Reads what a sampler of your own chooses: a subset, or by weights. With ``policy="planned"`` or ``"exact"`` its
    order is kept, too; see docs/CLIENT.md.

    At the start of each epoch the ids are listed and posted to the pods. With other policies pods then hand out only
    these samples, each as often as it was listed, in an order of their own, and an epoch begins when all ranks have
    posted.

    :param dataset: or a torch ``Subset`` of one, whose samples are numbered from 0 on then.
    :param sampler: yields sample ids, ``0 <= id < len(dataset)``, anew each epoch: a generator has no second one. With
        several ranks each one wraps its own.
    :param any_order: True says that the order of the sampler does not matter. With ``policy="planned"`` its samples
        then come in the plan's own order, which reads far less. Where an order can't be kept there is a warning without
        it, unless the sampler is one of torch's random ones.
    """

    def __init__(
        self,
        dataset: CacheDataset | torch.utils.data.Subset[Any],
        sampler: Iterable[int],
        any_order: bool = False,
    ) -> None:
        read, self._ids_of_part = dataset_and_ids("TraceSampler", dataset)
        _check_comes_anew(sampler)
        read.configure(order="explicit")
        read.register()
        spec = read.connection.spec
        if spec.shuffle and spec.policy not in ("exact", "planned") and not any_order and not _in_random_order(sampler):
            warnings.warn(
                f"the order of {type(sampler).__name__} is not kept: pods hand out its ids in an order of their own. "
                "If any will do, say TraceSampler(..., any_order=True); CacheDataset(..., policy='exact') keeps it and "
                "reads more from the store",
                stacklevel=2,
            )
        known = len(read) if self._ids_of_part is None else len(self._ids_of_part)
        if spec.num_groups > 1 and _lists_all(sampler, known):
            warnings.warn(
                f"{type(sampler).__name__} lists all {known} samples, and each of {spec.num_groups} ranks asks for its "
                f"own list: each sample comes {spec.num_groups} times an epoch. Give TraceSampler a "
                "DistributedSampler, or use EpochSampler",
                stacklevel=2,
            )
        super().__init__(read)
        self._any_order = any_order
        self.sampler = sampler
        self._state_of_new_sampler = copy.deepcopy(self._state_of_sampler())
        self._state_is_of_another_rank = False

    def _num_positions(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]  # a sampler without a length has none here either

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._set_epoch_of_sampler(self.epoch)

    def begin(self) -> Iteration:
        epoch, resumed = self.place.begin()
        start = 0 if resumed is None else resumed.start
        if resumed is not None and start > 0 and not self._state_is_of_another_rank:
            # Listing them again might give others.
            if self.list_of_state is not None:
                return self.asks_for(epoch, self.list_of_state, start)
            self.iteration = resumed  # the pods have its ids
            return resumed
        ids, connection = self._ids(), self.dataset.connection
        if self._any_order and isinstance(connection, PlannedConnection) and connection.spec.shuffle:
            ids = in_turns(ids, connection.plan_order(epoch, self.dataset.num_samples))
        if start > len(ids):
            raise InvalidInput(f"the state is of position {start}, and rank {self.rank} asks for {len(ids)} samples")
        return self.asks_for(epoch, ids, start)

    def state_of(self, iteration: Iteration, position: int) -> dict[str, Any]:
        """The state at a position. It holds the state of your sampler, too, or of its generator, so that the epochs to
        come are the same. Within an epoch of policy ``planned`` it holds the ids of that epoch: pods do not keep
        them."""
        kept = self._state_of_sampler() | self.list_at(iteration, position)
        if hasattr(self.sampler, "set_epoch") and type(epoch := getattr(self.sampler, "epoch", None)) is int:
            kept["epoch"] = epoch  # it stays that of the first one where nobody sets it
        return self.dataset.state_at(iteration.epoch, position, iteration.length, kept or None)

    def resume(self, state: Any) -> ResumeState:
        found = super().resume(state)
        kept = found.sampler if isinstance(found.sampler, dict) else {}
        self._state_is_of_another_rank = found.rank != self.rank
        stood_at = kept.get("epoch")
        stays_at = stood_at if type(stood_at) is int and stood_at != found.epoch else None
        if self._state_is_of_another_rank:
            self._catch_up(stays_at)
            return found
        self._set_epoch_of_sampler(self.epoch if stays_at is None else stays_at)
        self.load_list(found)
        self._load_state_of_sampler(kept)
        return found

    def _catch_up(self, stays_at: int | None) -> None:
        """The wrapped sampler's state is another rank's, so it lists the epochs that are over once more: what it draws
        from then on is what it would have drawn had it not been stopped.

        :param stays_at: the wrapped sampler's epoch, where nobody sets it; None: it goes along.
        """
        self._load_state_of_sampler(copy.deepcopy(self._state_of_new_sampler))
        for epoch in range(self.epoch):
            self._set_epoch_of_sampler(epoch if stays_at is None else stays_at)
            for _ in self.sampler:
                pass
        self._set_epoch_of_sampler(self.epoch if stays_at is None else stays_at)

    def _set_epoch_of_sampler(self, epoch: int) -> None:
        inner: Any = self.sampler
        if hasattr(inner, "set_epoch"):
            inner.set_epoch(epoch)

    def _state_of_sampler(self) -> dict[str, Any]:
        """Of the one that it wraps: its own, or that of its generator."""
        inner: Any = self.sampler
        if hasattr(inner, "state_dict"):
            return {"state": inner.state_dict()}
        if isinstance(generator := getattr(inner, "generator", None), torch.Generator):
            return {"generator": generator.get_state()}
        return {}

    def _load_state_of_sampler(self, kept: dict[str, Any]) -> None:
        inner: Any = self.sampler
        if "state" in kept and hasattr(inner, "load_state_dict"):
            inner.load_state_dict(kept["state"])
        elif "generator" in kept and isinstance(generator := getattr(inner, "generator", None), torch.Generator):
            generator.set_state(kept["generator"])

    def _ids(self) -> Int64Array:
        try:
            ids = np.fromiter((operator.index(sample_id) for sample_id in self.sampler), dtype=np.int64)
        except (TypeError, OverflowError) as error:
            raise InvalidInput(
                f"TraceSampler takes a sampler of sample ids, one by one (a BatchSampler goes around it): {error}"
            ) from error
        part = self._ids_of_part
        check_samples(ids, len(self.dataset) if part is None else len(part))
        return ids if part is None else part[ids]


def _check_comes_anew(sampler: Iterable[int]) -> None:
    """An iterator of Python's own is used up after one epoch; one of a class may begin anew."""
    if isinstance(sampler, Iterator) and not isinstance(type(sampler).__iter__, FunctionType):
        raise InvalidInput(
            f"TraceSampler lists its sampler anew in each epoch, and a {type(sampler).__name__} has ids for one only: "
            "give a list, or an object whose __iter__ begins anew"
        )


def _lists_all(sampler: Iterable[int], num_samples: int) -> bool:
    """Whether it is a sampler of torch's that yields each sample, whichever rank it is of."""
    if type(sampler) is torch.utils.data.RandomSampler and sampler.replacement:
        return False
    kinds = (torch.utils.data.RandomSampler, torch.utils.data.SequentialSampler)
    return isinstance(sampler, kinds) and type(sampler) in kinds and len(sampler) >= num_samples


def _in_random_order(sampler: Iterable[int]) -> bool:
    """Whether nobody can miss its order: one of the random samplers of torch or torchdata, none that is derived."""
    if type(sampler).__module__.partition(".")[0] not in ("torch", "torchdata"):
        return False
    if isinstance(sampler, torch.utils.data.DistributedSampler):
        return sampler.shuffle
    return isinstance(sampler, _IN_RANDOM_ORDER) or type(sampler).__name__ == "RandomSampler"
