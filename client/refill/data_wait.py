"""How long does the training loop wait for data, and where does it stand? Seen from around its loader."""

from __future__ import annotations

import logging
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from refill.dataset_parts import dataset_inside
from refill.errors import InvalidInput, RefillError
from refill.job_samples import JobSamples
from refill.loop_progress import LoopProgress
from refill.loops.nested_loops import Steps
from refill.pods.background_work import background_work
from refill.protocol.part_names import whole_of

if TYPE_CHECKING:
    from torch.utils.data import Subset

    from refill.iterable_dataset import CacheIterableDataset
    from refill.torch_dataset import CacheDataset

__all__ = ["TimedLoader", "timed"]

log = logging.getLogger(__name__)

Batch = TypeVar("Batch")
_REPORT_EVERY_SECONDS = 1.0
_LAST_REPORT_SECONDS = 10.0


def timed(loader: Iterable[Batch], dataset: CacheDataset | CacheIterableDataset | Subset[Any]) -> TimedLoader[Batch]:
    """Wraps a loader: ``for batch in refill.timed(loader, dataset)`` gives the same batches.

    What it returns measures how long the loop waits for data (``wait_seconds``, ``batches``). It has ``state_dict``
    and ``load_state_dict`` for checkpoints: docs/CLIENT.md, "Checkpoints".

    :param dataset: the dataset that the loader reads.
    """
    return TimedLoader(loader, dataset)


class TimedLoader(Generic[Batch]):
    """A loader that measures how long its caller waits for batches.

    ``wait_seconds`` and ``batches`` are totals since it was made. About once a second, and at the end of an iteration,
    the home pod is told of the wait, and of the samples and bytes that were fetched; its ``/metrics`` shows the sums
    by job and rank. A thread does that, so that a slow pod does not hold up the loop. A report that fails is logged,
    and its figures go with the next.

    ``state_dict`` and ``load_state_dict`` are for checkpoints: a loop goes on in another process with the samples
    that it has not had, each exactly once. Keep this object for all epochs then.
    """

    def __init__(self, loader: Iterable[Batch], dataset: CacheDataset | CacheIterableDataset | Subset[Any]) -> None:
        self._dataset = _read_by(loader, dataset)
        self._loader = loader
        self.wait_seconds = 0.0
        self.batches = 0
        self._reported = (0.0, *self._dataset.fetched())
        self._failing = False
        self._progress = LoopProgress(loader, dataset)
        self._reporter: tuple[threading.Event, threading.Thread] | None = None
        self._newest: Callable[[], _Iteration[Batch] | None] = lambda: None

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands: after the batch that it has been given last. What workers fetch ahead is not counted.

        Taken within the loop or between two, and the state of torchdata's StatefulDataLoader if that is the loader.
        Raises :class:`InvalidInput` when that does not follow from batches of the loader.
        """
        state: dict[str, Any] = (self._stateful or self._progress).state_dict()
        return state

    def load_state_dict(self, state: Any) -> None:
        """Go on where ``state_dict`` was taken; ``sampler.epoch`` says in which epoch then.

        The next iteration gives the rest of that epoch, even if it is set again, and those after it are whole. The
        number of workers and the batch size may be others. Errors as :meth:`CacheDataset.checked_state`.
        """
        (self._stateful or self._progress).load_state_dict(state)

    @property
    def _stateful(self) -> Any:
        """The loader, if it keeps a state of its own."""
        stateful = all(hasattr(self._loader, name) for name in ("state_dict", "load_state_dict"))
        return self._loader if stateful else None

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # a loader without a length has none here either

    def __getattr__(self, name: str) -> Any:
        """Whatever else the loader has, such as ``sampler``."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Batch]:
        return _Iteration(self, self._loader, self._progress)

    def begins(self, iteration: _Iteration[Batch]) -> None:
        """Fact: one of its iterations has begun, and asks for its first batch."""
        newest = self._newest()
        if newest is not None:
            newest.another_begins(iteration)
        self._newest = weakref.ref(iteration)

    def begins_reports(self) -> None:
        """Fact: a loop waits for batches."""
        if self._reporter is None:
            over = threading.Event()
            args = (over,)
            thread = threading.Thread(target=self._report_until, args=args, name="refill-report", daemon=True)
            self._reporter = over, thread
            thread.start()

    def ends_reports(self) -> None:
        """Fact: no loop does, for now."""
        if self._reporter is None:
            return
        (over, thread), self._reporter = self._reporter, None
        over.set()
        # A thread that ends an iteration as garbage may be this one. None can be waited for where Python ends.
        if thread is not threading.current_thread() and not sys.is_finalizing():
            thread.join(_LAST_REPORT_SECONDS)

    def _report_until(self, over: threading.Event) -> None:
        while not over.wait(_REPORT_EVERY_SECONDS):
            self._report()
        self._report()

    @background_work()
    def _report(self) -> None:
        seen = (self.wait_seconds, *self._dataset.fetched())
        wait, samples, num_bytes = (now - before for now, before in zip(seen, self._reported, strict=True))
        if not (wait or samples):
            return
        try:
            self._dataset.connection.report(float(wait), int(samples), int(num_bytes))
        except RefillError as error:
            if not self._failing:
                log.warning("data wait could not be reported, training goes on: %s", error)
            self._failing = True
        else:
            self._reported = seen
            self._failing = False


class _Iteration(Iterator[Batch]):
    """One iteration. An error of the loader does not end it, as it does not end a DataLoader's."""

    def __init__(self, timed: TimedLoader[Batch], loader: Iterable[Batch], progress: LoopProgress) -> None:
        self._timed = timed
        self._loader = loader
        self._progress = progress
        self._batches: Iterator[Batch] | None = None
        self._steps: Steps | None = None
        self._is_done = False
        self._is_replaced = False

    def __next__(self) -> Batch:
        if self._is_done:
            raise StopIteration
        started = time.perf_counter()
        if self._batches is None or self._steps is None:
            self._steps = self._progress.begins()
            self._timed.ends_reports()  # of a loop that this one lies in
            self._batches = iter(self._loader)  # forks workers, so before there is a thread
            self._timed.begins(self)
        self._timed.begins_reports()
        if self._is_replaced:
            _say_replaced()
        steps, number = self._steps, _number_of_next(self._batches)
        try:
            try:
                batch = next(self._batches)
            finally:
                self._timed.wait_seconds += time.perf_counter() - started
                self._progress.asked(steps)
        except StopIteration:
            self._progress.ended(steps)
            self.close()
            raise
        except BaseException as error:
            if isinstance(error, Exception) and (number is None or _number_of_next(self._batches) != number):
                self._progress.failed(steps)
            self._stop(steps)
            raise
        self._timed.batches += 1
        self._progress.came(steps)
        return batch

    def another_begins(self, other: _Iteration[Batch]) -> None:
        """Fact: of the same loader. Persistent workers have one iteration, which begins anew then."""
        if self._batches is not None and self._batches is other._batches and other is not self:
            self._steps, self._is_replaced = other._steps, True

    def close(self) -> None:
        """Fact: the loop wants no more batches. As that of a generator."""
        if not self._is_done and self._steps is not None:
            self._stop(self._steps)
        self._is_done, self._batches = True, None

    def __del__(self) -> None:
        self.close()

    def _stop(self, steps: Steps) -> None:
        self._progress.left(steps)
        self._timed.ends_reports()


def _number_of_next(batches: Any) -> int | None:
    """Of the batch that a loader with workers hands out next: it keeps one that did not come yet, or whose worker is
    gone. None: there are none, or it does not say."""
    number = getattr(batches, "_rcvd_idx", None)
    return number if isinstance(number, int) else None


def _say_replaced() -> None:
    warnings.warn(
        "the loop goes on with batches of another iteration: with persistent_workers a DataLoader has one, which "
        "iter(loader) begins anew. Look at batches by another DataLoader, of a dataset with a job of its own",
        stacklevel=3,
    )


def _read_by(loader: Any, dataset: Any) -> CacheDataset:
    """The dataset that is asked for samples: of a Subset, its part, though the whole one be given."""
    found = dataset_inside(getattr(loader, "dataset", None))
    if isinstance(found, JobSamples):
        given = dataset_inside(dataset)
        job = getattr(getattr(given, "dataset", given), "job", None)
        if isinstance(job, str) and (whole_of(job) or job) != (whole_of(found.job) or found.job):
            raise InvalidInput(f"the loader reads job {found.job}, and the dataset beside it is of job {job}")
        return found  # type: ignore[return-value]  # what a loader reads is a dataset
    inner: CacheDataset = getattr(dataset_inside(dataset), "dataset", dataset_inside(dataset))
    if not hasattr(inner, "fetched") or not hasattr(type(loader), "__iter__"):
        raise InvalidInput(
            "timed(loader, dataset) takes the loader first, and then the dataset of refill's that it reads; got a "
            f"{type(loader).__name__} and a {type(dataset).__name__}"
        )
    return inner
