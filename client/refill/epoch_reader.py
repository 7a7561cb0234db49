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
from refill.loops.nested_loops import NestedLoops, Steps

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
        self._loops = NestedLoops()
        """Those that began since the place was set."""
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
        self._loops = NestedLoops()

    def __iter__(self) -> Iterator[Any]:
        self.asks_in_batches(self.batch_size or _STRETCH)
        epoch, resumed = self._epochs.begin(shuffled=self.connection.spec.shuffle)
        iteration = resumed or Iteration(epoch, 0, self.positions_in(epoch))
        return _EpochOfReader(iteration, self.batch_size, self._threads, self._samples, self._loops, self._epochs)

    def _samples(self, epoch: int, start: int, end: int) -> list[Any]:
        positions = np.arange(start, end, dtype=np.int64)
        batch = self.connection.batch(epoch, positions)
        # One by one, places count samples: each position has one, though a damaged one be left out.
        return self._answered(self.connection, epoch, positions, batch, as_many=self.batch_size is None)

    def state_dict(self) -> dict[str, Any]:
        """Where the loop stands: after the batch, or sample, that it has been given last. A few numbers and names; what
        threads have fetched ahead does not count."""
        steps = self._loops.counts()
        if steps is not None and steps.iteration is not None:
            return self._state(steps.iteration, steps.position)
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
        self._loops = NestedLoops()


class _EpochOfReader(Iterator[Any]):
    """One iteration. An error of one batch does not end it: the next one follows."""

    def __init__(
        self,
        iteration: Iteration,
        batch_size: int | None,
        threads: int,
        samples: Callable[[int, int, int], list[Any]],
        loops: NestedLoops,
        epochs: EpochPlace,
    ) -> None:
        """:param samples: fetches those of an epoch at the positions from the one to the other, exclusive."""
        self._iteration = iteration
        self._batch_size = batch_size
        self._step = batch_size or _STRETCH
        self._threads = threads
        self._fetch = samples
        self._loops, self._epochs = loops, epochs
        self._steps = Steps(iteration)
        loops.asked(self._steps)
        self._readers: _Readers | None = None
        self._next_to_ask = iteration.start
        self._under_way: deque[tuple[int, Future[list[Any]]]] = deque()
        self._came: Iterator[Any] = iter(())
        """Of samples that are handed out one by one."""
        self._is_over = False

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        self._loops.asked(self._steps)
        for sample in self._came:
            self._is_given(self._steps.position + 1)
            return sample
        self._ask_ahead()
        if not self._under_way:
            self._is_given(self._iteration.length)
            self.close()
            raise StopIteration
        start, answer = self._under_way[0]
        answer.exception()  # ^C may come meanwhile, and then it is still to come
        self._under_way.popleft()
        end = min(start + self._step, self._iteration.length)
        try:
            found = answer.result() if self._batch_size is None else _stacked(answer.result())
        except Exception as error:
            error.add_note(
                f"a loop that goes on does without positions {start} to {end - 1} of epoch {self._iteration.epoch}"
            )
            self._loops.left(self._steps)
            raise
        finally:
            del answer  # an error that it holds would hold this by its traceback
        if self._batch_size is None:
            self._steps.position, self._came = start, iter(found)
            return next(self)
        self._is_given(end)
        return found

    def close(self) -> None:
        """Fact: the loop wants no more. As that of a generator."""
        self._is_over = True
        self._loops.left(self._steps)
        self._under_way.clear()
        if self._readers is not None:
            readers, self._readers = self._readers, None
            readers.end()

    def __del__(self) -> None:
        self.close()

    def _ask_ahead(self) -> None:
        if self._readers is None:
            self._readers = _Readers(self._threads)
        epoch, length = self._iteration.epoch, self._iteration.length
        while self._next_to_ask < length and len(self._under_way) < _AHEAD * self._threads:
            start, end = self._next_to_ask, min(self._next_to_ask + self._step, length)
            self._under_way.append((start, self._readers.submit(partial(self._fetch, epoch, start, end))))
            self._next_to_ask = end

    def _is_given(self, position: int) -> None:
        """Fact: the loop is, but for what failed, up to this position."""
        is_new = position != self._steps.position or not self._steps.batches
        self._steps.batches += 1
        self._steps.position = position
        if is_new and position == self._iteration.length:
            self._epochs.was_had(self._iteration.epoch)


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
