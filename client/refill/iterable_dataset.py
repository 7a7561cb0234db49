"""The same data path for those who iterate: samples of a rank's epoch, dealt batch-wise to loader workers."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, islice
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import torch
import torch.utils.data

from refill.build import say_once
from refill.errors import InvalidInput, SamplesSkipped
from refill.loops.epoch_place import EpochPlace, Iteration
from refill.loops.given_counts import check_count
from refill.loops.kept_samples import Divided, KeptSamples
from refill.loops.loader_batch import check_one_shape
from refill.loops.loader_turns import LoaderDeals, batch_of_next, is_iterated_by_loader, loader_deals
from refill.loops.shared_blocks import share_again, shared_zeros
from refill.loops.trainer_division import Division, check_whole, division_of_dataset, is_a_loaders_count
from refill.loops.worker_parts import Part, PartOfWorker, Unasked, WorkerParts
from refill.pods.resume_state import ResumeState
from refill.protocol.wire_format import Int64Array
from refill.torch_dataset import CacheDataset

__all__ = ["CacheIterableDataset"]

log = logging.getLogger(__name__)

_WORKERS = 256
"""More are not compared."""


class CacheIterableDataset(torch.utils.data.IterableDataset[Any]):
    """A PyTorch dataset (iterable) that yields the samples of a rank's epoch. Takes the arguments of
    :class:`CacheDataset`, or one of these, such as a :class:`Mixture`, in place of them.

    Give the DataLoader the same ``batch_size``: each of its batches is then one request, and ``len(loader)`` is right.
    The workers take turns: each asks for a stretch of ``batch_size`` positions. Call ``set_epoch`` before each epoch,
    because workers can't know by themselves that another one begins.

    All workers have to iterate it. A wrapper that lets only some of them do so, such as a generator of Hugging Face's
    ``datasets``, would lose the parts of the others: that is an error (:class:`refill.errors.SamplesSkipped`), in that
    epoch or at the start of the next one, and where none follows a warning when the process ends. Give such a loader
    ``num_workers=1``. ``allow_skipped=True`` allows it.

    With ``on_damaged="skip"`` another sample of the same stretch takes the place of a damaged one, and so comes twice.
    A rank that yielded fewer samples than the others would end before them.
    """

    def __init__(self, service_url: str | CacheDataset, *, batch_size: int = 64, **arguments: Any) -> None:
        check_count("batch_size", batch_size)
        self.batch_size = batch_size
        if isinstance(service_url, CacheDataset):
            if arguments:
                raise InvalidInput(f"give {next(iter(arguments))} to the dataset that is iterated")
            self.dataset = service_url
        else:
            self.dataset = CacheDataset(service_url, **arguments)
        self.dataset.configure(order="keyed")
        self._parts = WorkerParts(self.dataset.job)
        self._dealing: LoaderDeals | None = None
        self._place = EpochPlace()
        self._iteration: Iteration | None = None
        self._division: Division | None = None
        self._ahead_of_loader: int | None = 0
        # Epoch and first position, in shared memory: persistent workers hold a copy of this object and must see those
        # of the next iteration. And whether it has come to its end since it was set; -1: that it came again was said.
        self._shared_place = shared_zeros(3)
        self._begun = _BegunByWorkers()
        self._begun_in = 0
        """The process of the worker that has begun here."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dataset!r}, batch_size={self.batch_size}, epoch={self.epoch})"

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return self._place.epoch

    def set_epoch(self, epoch: int) -> None:
        """Call it before each epoch, as with DistributedSampler. It reaches persistent workers, too.

        An epoch that was resumed goes on from its place until you set another one.
        """
        if not is_a_loaders_count():
            self._ahead_of_loader = None
        else:
            # It counts on from where the loop said, or the state that was loaded.
            if self._ahead_of_loader is None:
                self._ahead_of_loader = self.epoch - epoch
            epoch += self._ahead_of_loader
        self._place.set_epoch(epoch)
        self._publish()

    def load_state_dict(self, state: Any) -> None:
        """Go on where a loop stood in another process, with any number of workers.

        The next iteration yields the rest of the epoch; ``len()`` stays that of a whole one. After a state from the end
        of an epoch, the next iteration is the next epoch. Errors as :meth:`CacheDataset.checked_state`.

        :param state: of ``refill.timed(loader, dataset).state_dict()`` or :meth:`state_after`.
        """
        found = self.dataset.checked_state(state)
        self.dataset.check_epoch_length(found)
        self._place.resume(Iteration(found.epoch, found.position, found.length))
        self._ahead_of_loader = None
        self._publish()

    def state_after(self, consumed: int) -> dict[str, Any]:
        """The state, for :meth:`load_state_dict`, of a loop that counts its samples itself.

        :param consumed: how many samples the loop has taken in this iteration, in the order of the positions. With
            several workers that is the order of a DataLoader with the same ``batch_size``.
        """
        iteration = self.iteration
        if not 0 <= consumed <= iteration.length - iteration.start:
            raise InvalidInput(
                f"the loop can't have consumed {consumed} samples: its iteration has "
                f"{iteration.length - iteration.start}"
            )
        return self.state_of(iteration, iteration.start + consumed)

    @property
    def transform(self) -> Any:
        """As that of :class:`CacheDataset`."""
        return self.dataset.transform

    @transform.setter
    def transform(self, function: Any) -> None:
        self.dataset.transform = function

    @property
    def iteration(self) -> Iteration:
        """The running iteration, or else the next. Another object after each ``set_epoch`` and ``load_state_dict``.
        Called by what counts batches."""
        if self._iteration is None:
            epoch, start, _ = self._shared_place.tolist()
            self._iteration = Iteration(epoch, start, self.dataset.positions_in(epoch))
        return self._iteration

    def next_state(self) -> dict[str, Any]:
        """The state of a loop that has not begun its next iteration yet. Called by what counts batches."""
        return self.state_of(self.iteration, self.iteration.start)

    def state_of(self, iteration: Iteration, position: int) -> dict[str, Any]:
        return self.dataset.state_at(iteration.epoch, position, iteration.length)

    def __len__(self) -> int:
        """Samples of this rank in a whole epoch; of all ranks, to a trainer that divides what this yields."""
        length, division = self.dataset.samples_per_rank, division_of_dataset(self)
        return length if division is None else division.length(length)

    def __iter__(self) -> Iterator[Any]:
        epoch, start = self.begins_at()
        division = division_of_dataset(self) or self._division
        worker = torch.utils.data.get_worker_info()
        self.dataset.asks_in_batches(self.batch_size, 0 if worker is None else worker.num_workers)
        is_direct = is_iterated_by_loader()
        wrapped = None if division is not None or is_direct else loader_deals() or self._dealing or LoaderDeals()
        dealt = _DealtSamples(self.dataset, epoch, start, self.batch_size, self._parts, wrapped)
        dealt.is_direct = is_direct
        dealt.place = self._shared_place
        if is_direct and worker is not None:
            dealt.check_begun = self._begun.by(worker, epoch, start)
        if division is None:
            check_whole(type(self).__name__, self.dataset)
            return dealt
        division.check(self.dataset.connection.spec.world_size)
        return self._for_all_ranks(epoch, start, division) if division.dispatched else _in_places(dealt, division)

    def begins_at(self) -> tuple[int, int]:
        """Epoch and first position. A worker's first iteration begins where its loader was when it started the worker,
        with the others: the loop may have set another epoch since. Called by what deals them."""
        if torch.utils.data.get_worker_info() is not None and self._begun_in != os.getpid():
            self._begun_in = os.getpid()
            epoch, resumed = self._place.next()
            return epoch, 0 if resumed is None else resumed.start
        epoch, start, _ = self._shared_place.tolist()
        return epoch, start

    def __getstate__(self) -> dict[str, Any]:
        # A worker that is spawned can't see who has started it.
        division = division_of_dataset(self) or self._division
        if division is None:
            check_whole(type(self).__name__, self.dataset)
        return self.__dict__ | {
            "_division": division,
            "_dealing": loader_deals() or self._dealing,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        share_again(self._shared_place, self._begun.rows)

    def _for_all_ranks(self, epoch: int, start: int, division: Division) -> Iterator[Any]:
        """What this worker is dealt of all ranks' samples: a trainer sends them on from here."""
        worker = torch.utils.data.get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        length = 0 if division.reads_nothing else self.dataset.positions_in(epoch)
        for run in count(number, workers):
            turn, rank = divmod(run, division.num_processes)
            first = start + turn * self.batch_size
            if first >= length:
                return
            positions = np.arange(first, min(first + self.batch_size, length), dtype=np.int64)
            yield from self.dataset.samples_for_rank(rank, epoch, positions)

    def _publish(self) -> None:
        epoch, resumed = self._place.next()
        self._shared_place[0] = epoch
        self._shared_place[1] = 0 if resumed is None else resumed.start
        self._shared_place[2] = min(0, int(self._shared_place[2]))
        self._iteration = None


class _BegunByWorkers:
    """Where each loader worker has begun. Those that stay are told of an iteration one after another, and the loop may
    set another epoch meanwhile."""

    def __init__(self) -> None:
        # Of the iteration that it began last: of which loader and the how manieth it is, epoch and first position.
        self.rows = shared_zeros((_WORKERS, 4))

    def by(self, worker: Any, epoch: int, start: int) -> Callable[[], None]:
        """Fact: a worker begins there. Returns what looks, at its first sample, whether the others do."""
        if worker.id >= _WORKERS:
            return lambda: None
        loader, row = worker.seed - worker.id, self.rows[worker.id]
        number = 1 + (int(row[1]) if int(row[0]) == loader else 0)
        found = [loader, number, epoch, start]
        row[1] = 0  # nobody compares what is half written
        row[2:] = torch.tensor(found[2:])
        row[0] = loader
        row[1] = number
        return partial(self._check, found)

    def _check(self, mine: list[int]) -> None:
        """Raises :class:`InvalidInput` where another worker has begun the same iteration elsewhere."""
        for other in self.rows.tolist():
            if other[:2] == mine[:2] and other[2:] != mine[2:]:
                raise InvalidInput(
                    f"workers of one loader began epochs {mine[2]} and {other[2]}: set_epoch was called as the loader "
                    "began to iterate. Call it before iter(loader), or for the next epoch once a batch has come"
                )


def came_to_its_end(place: torch.Tensor) -> None:
    """Fact: an iteration did, of a worker.

    :param place: that all processes share.
    """
    if not place[2]:
        place[2] = 1


def warn_if_again(place: torch.Tensor, job: str, form: str) -> None:
    """An iteration begins: warns where it is that which came to its end last."""
    if place[2] == 1:
        place[2] = -1
        warnings.warn(
            f"epoch {int(place[0])} of job {job} comes again, the same samples in the same order: call "
            f"set_epoch(epoch) of the {form} before each epoch (under Lightning in a callback's on_train_epoch_start)",
            stacklevel=4,
        )


_watched_batches: set[int] = set()
"""The processes that look at their end."""


def _say_if_empty(batch: list[Any] | None, said: str) -> None:
    """At the end of this process, once, when nothing more can come into the batch."""
    if batch is not None and os.getpid() not in _watched_batches:
        _watched_batches.add(os.getpid())
        Finalize(None, lambda: None if batch else log.warning(said), exitpriority=100)


def _in_places(samples: Iterator[Any], division: Division) -> Iterator[Any]:
    """A rank's samples where a trainer that divides them a second time picks them out. At the other places, and where
    it fills its last batch up, it finds one that it has already."""
    while own := list(islice(samples, division.run)):
        yield from own[:1] * (division.process * division.run)
        yield from own
        if len(own) == division.run:
            yield from own[:1] * ((division.num_processes - division.process - 1) * division.run)


class _DealtSamples(Iterator[Any]):
    """What one worker is dealt of an iteration. torchdata's StatefulDataLoader keeps the state of each worker."""

    def __init__(
        self,
        dataset: CacheDataset,
        epoch: int,
        start: int,
        batch_size: int,
        parts: WorkerParts,
        wrapped: LoaderDeals | None,
    ) -> None:
        """:param wrapped: how batches are dealt that something else makes of this; None: a loader makes them itself, so
        that each worker iterates its part."""
        worker = torch.utils.data.get_worker_info()
        self._dataset = dataset
        self._number, self._workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        self._epoch = epoch
        self._start = start
        self._batch_size = batch_size
        self._parts = parts
        self._wrapped = wrapped
        self.is_direct = False
        """Whether a loader makes its batches of what comes from here, and of nothing else."""
        self.place = torch.zeros(3, dtype=torch.int64)
        """Epoch and first position of the iteration, and whether it came to its end before."""
        self.check_begun: Callable[[], None] | None = None
        """Raises :class:`InvalidInput` where other workers have begun elsewhere."""
        self._part: PartOfWorker | None = None
        self._kept: KeptSamples | None = None
        """None: a loader makes its batches of what comes from here, or no more is to be seen."""
        self._watched: KeptSamples | None = None
        self._begun = False
        self._yielded = 0
        self._fetched: Iterator[Any] = iter(())

    def __next__(self) -> Any:
        if not self._begun:
            if self.is_direct and self._number == 0 and self._workers > 1:
                self._compare_batches(batch_of_next())
            self._begin()
        if self._part is not None:
            self._part.goes_on()
        if self._kept is not None:
            self._look_at_wrapper(self._kept)
        for sample in self._fetched:
            self._yielded += 1
            if self._kept is not None:
                self._kept.gives(sample)
            return sample
        positions = self._next_positions()
        if self._part is not None:
            self._check(self._part.asks(self._yielded // self._batch_size, ended=not len(positions)))
        if not len(positions):
            if self._number == 0 and not self.place[2]:  # another worker may be at its end before this one begins
                self.place[2] = 1
            if self._watched is not None and self._yielded:
                _say_if_empty(self._watched.none_kept(), self._said_of(None))
            raise StopIteration
        self._fetched = iter(self._asked(positions))
        return next(self)

    def _asked(self, positions: Int64Array) -> list[Any]:
        """What fails is passed over: a loop that catches the error would get it for ever."""
        try:
            samples = self._dataset.samples_of(self._epoch, positions, as_many=True)
            if self.is_direct:
                check_one_shape(samples, self._yielded)
        except Exception as error:
            self._yielded += len(positions)
            error.add_note(
                f"a loop that goes on does without positions {positions[0]} to {positions[-1]} of epoch {self._epoch}"
            )
            raise
        return samples

    def _compare_batches(self, of_loader: int) -> None:
        """:param of_loader: how many samples it puts into a batch; 0: it makes none."""
        if of_loader not in (0, self._batch_size):
            say_once(
                f"the DataLoader makes batches of {of_loader}, and its {self._workers} workers are dealt "
                f"{self._batch_size} positions at a time: no batch is one request, len(loader) is wrong, "
                "loader.state_dict() is refused, and drop_last leaves out samples of each worker. Give "
                f"batch_size={of_loader} to the CacheIterableDataset, too"
            )

    def _begin(self) -> None:
        if self._number == 0 and self._dataset.connection.spec.shuffle:
            warn_if_again(self.place, self._dataset.job, "CacheIterableDataset")
        if self.check_begun is not None:
            self.check_begun()
        if not self._dataset.allow_skipped:
            self._check(self._parts.left())
            if self._wrapped is not None:
                length = self._dataset.positions_in(self._epoch)
                dealt = (self._dataset.rank, self._epoch, self._start, self._batch_size, length)
                self._part = self._parts.part(Part(self._number, self._workers, *dealt), self._wrapped)
                ranks = self._dataset.connection.spec.world_size
                self._kept = self._watched = KeptSamples({self._workers, ranks, self._workers * ranks})
        self._begun = True

    def _look_at_wrapper(self, kept: KeptSamples) -> None:
        """Raises :class:`SamplesSkipped` when it divides samples once more. In the stored order it may choose by what
        is in them: what is there may take turns."""
        if (divided := kept.look()) is not None:
            said = self._said_of(divided)
            if divided.as_they_are and self._dataset.connection.spec.shuffle:
                raise SamplesSkipped(said, epoch=self._epoch, rank=self._dataset.rank)
            warnings.warn(said, stacklevel=3)
        if kept.is_over:
            self._kept = None

    def _said_of(self, divided: Divided | None) -> str:
        """:param divided: None: nothing was kept."""
        ranks = self._dataset.connection.spec.world_size
        dealt = [f"{number} {whose}" for number, whose in ((ranks, "ranks"), (self._workers, "workers")) if number > 1]
        if divided is None:
            keeps, lost = f"keeps none of the {self._yielded} samples that it took in one of them", "they are lost"
        else:
            keeps, lost = f"keeps one of every {divided.of} samples that it takes", "the others are lost"
            if not divided.as_they_are:
                lost += f", unless it makes one sample of {divided.of}"
            elif not self._dataset.connection.spec.shuffle:
                lost += ", unless it was to leave them out"
        return (
            f"a wrapper around the CacheIterableDataset of job {self._dataset.job} {keeps}, and "
            f"{lost}: refill has dealt them to {' and '.join(dealt)} already. "
            "Leave out what splits by worker, node or rank there, such as islice (docs/TRAINERS.md); "
            "allow_skipped=True, given to the dataset, allows it"
        )

    def _check(self, left: list[Unasked]) -> None:
        """Raises :class:`SamplesSkipped` when pods, too, have never been asked for it."""
        for unasked in left:
            epoch, start, end = unasked.part.epoch, unasked.start, unasked.end
            if self._dataset.left_out(epoch, start, end):
                self._parts.forget(unasked)
                raise SamplesSkipped(
                    f"rank {unasked.part.rank} of job {self._dataset.job} asks for a part of its positions only: "
                    f"{unasked}; its samples would be lost. A wrapper runs the dataset in some workers only, as a "
                    "generator of Hugging Face datasets with one shard: give the DataLoader num_workers=1, or the "
                    "CacheIterableDataset itself (docs/TRAINERS.md). allow_skipped=True, given to the dataset, allows "
                    "it",
                    epoch=epoch,
                    rank=unasked.part.rank,
                    start=start,
                    end=end,
                )

    def _next_positions(self) -> Int64Array:
        """What is left of the run that comes after those yielded; empty at the end."""
        run, offset = divmod(self._yielded, self._batch_size)
        first = self._start + (self._number + run * self._workers) * self._batch_size
        end = min(first + self._batch_size, self._dataset.positions_in(self._epoch))
        return np.arange(first + offset, end, dtype=np.int64)

    def state_dict(self) -> dict[str, Any]:
        began = self._dataset.state_at(self._epoch, self._start, self._dataset.samples_per_rank)
        return began | {"workers": self._workers, "batch_size": self._batch_size, "yielded": self._yielded}

    def load_state_dict(self, state: Any) -> None:
        """Go on where this worker stood. Raises :class:`InvalidInput` when it was one of another number of workers."""
        found = self._dataset.checked_state(state)
        self._dataset.check_epoch_length(found)
        try:
            workers, batch_size, yielded = (int(state[name]) for name in ("workers", "batch_size", "yielded"))
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidInput(f"the state is not that of a loader worker: {error!r}") from error
        num_groups = self._dataset.connection.spec.num_groups
        ranks = ResumeState.from_dict(state).num_groups  # the one that was found is of the ranks that there are now
        for what, had, have in (("workers", workers, self._workers), ("ranks", ranks, num_groups)):
            if had != have:
                raise InvalidInput(
                    f"the state is of a StatefulDataLoader with {had} {what}, and needs as many again, not {have}; "
                    "that of refill.timed(loader, dataset) works with any number"
                )
        self._epoch, self._start, self._batch_size, self._yielded = found.epoch, found.position, batch_size, yielded
        if yielded:
            self._dataset.must_remember(found)
        self._fetched = iter(())
