"""How does a loop without torch get its samples? A rank's epoch in batches of arrays, which threads fetch ahead."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from refill.errors import InvalidInput
from refill.formats.sample_decoder import check_alike, is_view, why_not_alike
from refill.job_samples import JobSamples
from refill.loops.epoch_place import EpochPlace, Iteration
from refill.loops.given_counts import check_count

__all__ = ["EpochReader", "iterate"]

_STRETCH = 64
"""So many samples are asked for at once where they are handed out one by one."""
_REMEDY = "Have them made alike by transform=function of iterate, or leave batch_size out, for samples one by one"
_LEFT_SECONDS = 1.0
"""For requests under way, when a loop is left."""
_AHEAD = 2
"""Requests for each thread: one is under way, one is finished and waits for the loop."""


def iterate(
    service_url: str, *, dataset: str, job: str, batch_size: int | None = None, threads: int = 4, **arguments: Any
) -> EpochReader:
    """The samples of a rank's epochs, for loops without PyTorch: JAX, Keras, NumPy. Imports no torch.

        reader = refill.iterate("http://refill:8000", dataset="s3://bucket/images", job="run-1", batch_size=256)
        for epoch in range(90):
            reader.set_epoch(epoch)
            for batch in reader:
                ...

    :param batch_size: samples in a batch; the last one of an epoch may have fewer. In a batch arrays and numbers are
        stacked, ``(batch, ...)``; texts, bytes, views and all else are lists. None: samples one by one.
    :param threads: how many fetch and decode ahead of the loop.
    :param arguments: as of :class:`CacheDataset`, such as ``rank``, ``world_size``, ``seed``, ``decode``, ``transform``
        and ``as_tuple``. None of ``rank`` and ``world_size``: those of the variables RANK and WORLD_SIZE, else 0 of 1.

    The job is registered here, so a wrong setting or an unknown dataset fails in this line.
    """
    return EpochReader(service_url, dataset=dataset, job=job, batch_size=batch_size, threads=threads, **arguments)


class EpochReader(JobSamples):
    """What :func:`iterate` returns. Each iteration is an epoch of this rank: the one that was set, or, after a whole
    one, the next.

    Threads fetch and decode, and no process is forked: JAX, which has threads of its own, could hang in a forked one.
    """

    _called = "iterate"

    def __init__(self, service_url: str, *, batch_size: int | None = None, threads: int = 4, **arguments: Any) -> None:
        for name, value in (("batch_size", batch_size), ("threads", threads)):
            if value is not None:
                check_count(name, value)
        self.batch_size = batch_size
        self._threads = threads
        self._epochs = EpochPlace()
        self._iteration: Iteration | None = None
        """The one that began last; None when the place was set since."""
        self._next = 0
        """The first of its positions that the loop has not been given."""
        super().__init__(service_url, **arguments)
        self.configure(order="keyed")
        self.register()

    def __len__(self) -> int:
        """Batches of this rank in a whole epoch; without ``batch_size``, samples."""
        return -(-self.samples_per_rank // (self.batch_size or 1))

    @property
    def epoch(self) -> int:
        """The epoch that an iteration began last; or the one that was set or loaded since, and comes next."""
        return self._epochs.epoch

    def set_epoch(self, epoch: int) -> None:
        """The next iteration is this epoch: from its start, or from the place in it that a state says."""
        self._epochs.set_epoch(epoch)
        self._iteration = None

    def __iter__(self) -> Iterator[Any]:
        self.asks_in_batches(self.batch_size or _STRETCH)
        epoch, resumed = self._epochs.begin(shuffled=self.connection.spec.shuffle)
        iteration = self._iteration = resumed or Iteration(epoch, 0, self.positions_in(epoch))
        self._next = iteration.start
        return self._iterate(iteration)

    def _iterate(self, iteration: Iteration) -> Iterator[Any]:
        if iteration.start >= iteration.length:
            self._epochs.handed_out(iteration.epoch)
        step = self.batch_size or _STRETCH
        starts = iter(range(iteration.start, iteration.length, step))
        under_way: deque[tuple[int, Future[list[Any]]]] = deque()
        readers = _Readers(self._threads)
        try:
            for start in starts:
                end = min(start + step, iteration.length)
                under_way.append((start, readers.submit(partial(self._samples, iteration.epoch, start, end))))
                if len(under_way) >= _AHEAD * self._threads:
                    yield from self._handed_out(iteration, *under_way.popleft())
            while under_way:
                yield from self._handed_out(iteration, *under_way.popleft())
        finally:
            readers.end()

    def _samples(self, epoch: int, start: int, end: int) -> list[Any]:
        positions = np.arange(start, end, dtype=np.int64)
        batch = self.connection.batch(epoch, positions)
        # One by one, places count samples: each position has one, though a damaged one be left out.
        return self._answered(self.connection, epoch, positions, batch, as_many=self.batch_size is None)

    def _handed_out(self, iteration: Iteration, start: int, answer: Future[list[Any]]) -> Iterator[Any]:
        """What the loop is given, and where that leaves it."""
        samples = answer.result()
        if self.batch_size is None:
            for place, sample in enumerate(samples):
                self._is_at(iteration, start + place + 1)
                yield sample
        else:
            batch = _stacked(samples)
            self._is_at(iteration, min(start + self.batch_size, iteration.length))
            yield batch

    def _is_at(self, iteration: Iteration, position: int) -> None:
        if self._iteration is iteration:
            self._next = position
            if position == iteration.length:
                self._epochs.handed_out(iteration.epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands: after the batch, or sample, that it has been given last. A few numbers and names; what
        threads have fetched ahead does not count."""
        if self._iteration is not None:
            return self._state(self._iteration, self._next)
        epoch, resumed = self._epochs.next()
        return self._state(resumed or Iteration(epoch, 0, self.positions_in(epoch)), resumed.start if resumed else 0)

    def _state(self, iteration: Iteration, position: int) -> dict[str, Any]:
        return self.state_at(iteration.epoch, position, iteration.length)

    def load_state_dict(self, state: Any) -> None:
        """Go on where a loop stood in another process: the next iteration yields the rest of its epoch. After a state
        from the end of an epoch it is the next epoch.

        :param state: of :meth:`state_dict`, of any rank in the same step. With another number of ranks or pods it goes
            to ``iterate(..., resume=state)``, too.

        Raises :class:`InvalidInput` for something that is no state, or is one of another job, dataset or world size,
        and :class:`JobLost` when the pods no longer know which samples of the epoch the loop has had.
        """
        found = self.checked_state(state)
        self.check_epoch_length(found)
        self._epochs.resume(Iteration(found.epoch, found.position, found.length))
        self._iteration = None


class _Readers:
    """Threads that fetch for one iteration. Whoever leaves it, by ``break`` or ^C, need not wait for pods that do not
    answer, as with a pool of threads, which is waited for when the process ends, too."""

    def __init__(self, count: int) -> None:
        self._work: SimpleQueue[tuple[Future[list[Any]], Callable[[], list[Any]]] | None] = SimpleQueue()
        self._threads = [threading.Thread(target=self._run, name="refill-reader", daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], list[Any]]) -> Future[list[Any]]:
        answer: Future[list[Any]] = Future()
        self._work.put((answer, work))
        return answer

    def end(self) -> None:
        with suppress(Empty):
            while True:
                self._work.get_nowait()
        for _ in self._threads:
            self._work.put(None)
        ends = time.monotonic() + _LEFT_SECONDS
        for thread in self._threads:
            if not sys.is_finalizing():  # then no thread can be waited for
                thread.join(max(0.0, ends - time.monotonic()))

    def _run(self) -> None:
        while (given := self._work.get()) is not None:
            answer, work = given
            try:
                answer.set_result(work())
            except BaseException as error:  # the loop gets it
                answer.set_exception(error)


def _stacked(samples: Sequence[Any]) -> Any:
    """One batch: dicts and tuples by their items, arrays and numbers as one array, all else as a list."""
    if (why := why_not_alike(samples)) is not None:
        raise InvalidInput(f"{why}. {_REMEDY}")
    check_alike(samples, _REMEDY)
    return _stacked_values(samples)


def _stacked_values(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, dict) and all(isinstance(value, dict) and value.keys() == first.keys() for value in values):
        return {name: _stacked_values([value[name] for value in values]) for name in first}
    if isinstance(first, tuple) and all(isinstance(value, tuple) and len(value) == len(first) for value in values):
        return tuple(_stacked_values(items) for items in zip(*values, strict=True))
    if not is_view(first) and isinstance(first, (np.ndarray, np.generic, bool, int, float, complex)):
        return np.stack([np.asarray(value) for value in values])
    return list(values)
