"""What shows that loader workers never ask for their parts, and what must not be taken for it: with a model of a loader
that deals batches in order, to workers of any speed, and is left anywhere."""

from __future__ import annotations

import math
import multiprocessing
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill.loops.loader_turns import LoaderDeals, LoaderTurns
from refill.loops.worker_parts import Part, PartOfWorker, Unasked, WorkerParts


def as_worker(worker: int | None, workers: int = 0, loader: int = 7) -> mock._patch[mock.Mock]:
    info = None if worker is None else mock.Mock(id=worker, num_workers=workers, seed=loader + worker)
    return mock.patch("torch.utils.data.get_worker_info", return_value=info)


def all_told(parts: WorkerParts) -> None:
    """Else what was left is said when this is collected."""
    while left := parts.left():
        parts.forget(left[0])


@dataclass
class Worker:
    """One that iterates a wrapper: it ends after ``most`` samples, if that is said."""

    part: Part
    parts: WorkerParts
    most: float
    dealing: LoaderDeals
    yielded: int = 0
    ended: bool = False
    queue: deque[int] = field(default_factory=deque)
    found: list[Unasked] = field(default_factory=list)
    guard: PartOfWorker | None = None

    def fetch(self, batch_size: int) -> int | None:
        """The next batch's number; None: it has come to its end."""
        number = self.queue.popleft()
        for _ in range(batch_size):
            if self.ended or not self.pull(number):
                return None if _ == 0 else number
        return number

    def pull(self, number: int) -> bool:
        if self.yielded >= self.most:
            self.ended = True
            return False
        if self.guard is None:
            with as_worker(self.part.worker, self.part.workers):
                assert self.parts.left() == []
                self.guard = self.parts.part(self.part, self.dealing)
            assert self.guard is not None
        assert self.guard.turns is not None
        self.guard.turns.deals(number)
        turn, offset = divmod(self.yielded, self.part.size)
        start, end = self.part.turn(self.part.worker, turn)
        self.ended = start + offset >= end
        if offset == 0 or self.ended:
            self.found += self.guard.asks(turn, ended=self.ended)
        self.yielded += not self.ended
        return not self.ended


@dataclass(frozen=True)
class Loader:
    workers: int
    batch_size: int
    prefetch: int
    stretch: int
    length: int

    def iterated(
        self, parts: WorkerParts, most: Callable[[int], float], draw: Callable[[list[int]], int], batches: float
    ) -> list[Worker]:
        """An iteration that is left after so many batches; ``draw`` says which worker goes on."""
        part = [Part(worker, self.workers, 0, 0, 0, self.stretch, self.length) for worker in range(self.workers)]
        dealing = LoaderDeals(True, (self.prefetch + 1) * self.batch_size)
        workers = [Worker(each, parts, most(each.worker), dealing) for each in part]
        active, cycle = set(range(self.workers)), 0
        dealt: dict[int, int] = {}
        came: set[int] = set()
        sent = received = 0

        def deal() -> None:
            nonlocal cycle, sent
            if not active:
                return
            while cycle % self.workers not in active:
                cycle += 1
            workers[cycle % self.workers].queue.append(sent)
            dealt[sent] = cycle % self.workers
            cycle, sent = cycle + 1, sent + 1

        for _ in range(self.prefetch * self.workers):
            deal()
        while active and received < batches:
            able = [each for each in range(self.workers) if workers[each].queue and each in active]
            worker = draw(able)
            number = workers[worker].fetch(self.batch_size)
            if number is None:
                active.discard(worker)
                deal()
            else:
                came.add(number)
            while dealt and received < batches:
                first = min(dealt)
                if first in came:
                    received += 1
                    deal()
                elif dealt[first] in active:
                    break
                del dealt[first]
        return workers


LOADERS = st.builds(
    Loader,
    workers=st.integers(2, 5),
    batch_size=st.integers(1, 40),
    prefetch=st.integers(1, 5),
    stretch=st.integers(1, 8),
    length=st.integers(1, 300),
)


def drawn(data: st.DataObject) -> Callable[[list[int]], int]:
    """Mostly the same worker, or the others."""
    favourite = data.draw(st.permutations(range(5)))
    hurries = data.draw(st.booleans())
    return lambda able: min(able, key=favourite.index) if hurries else data.draw(st.sampled_from(able))


@given(
    loader=LOADERS, most=st.none() | st.integers(0, 60), batches=st.integers(0, 60) | st.just(math.inf), data=st.data()
)
def test_nothing_shows_where_every_worker_goes_as_far(
    loader: Loader, most: int | None, batches: float, data: st.DataObject
) -> None:
    """Wherever the loop stops, however much its loader prefetches, and though one worker is slower than all others."""
    parts = WorkerParts("job")
    each = math.inf if most is None else most
    longer = data.draw(st.integers(0, loader.workers))
    workers = loader.iterated(parts, lambda worker: each + (worker < longer), drawn(data), batches)
    assert [worker.found for worker in workers] == [[]] * loader.workers
    for worker in [None, *range(loader.workers)]:
        with as_worker(worker, loader.workers, loader=8):
            assert parts.left() == []


@given(loader=LOADERS, data=st.data())
def test_it_shows_before_the_end_when_a_worker_never_asks(loader: Loader, data: st.DataObject) -> None:
    parts = WorkerParts("job")
    runs = data.draw(st.lists(st.booleans(), min_size=loader.workers, max_size=loader.workers).filter(any))
    workers = loader.iterated(parts, lambda worker: math.inf if runs[worker] else 0, drawn(data), math.inf)
    part = workers[0].part
    missing = {worker for worker in range(loader.workers) if not runs[worker] and part.turn(worker, 0)[0] < part.length}
    found = [worker.found for worker in workers if worker.found]
    # One that is slow may be named beside one that never asks.
    assert all(missing & {left.worker for left in at_once} for at_once in found)
    turns = loader.length // (loader.stretch * loader.workers)
    if missing and turns > 3 and turns * loader.stretch >= (loader.prefetch + 3) * loader.batch_size:
        assert found
        assert all((left.start, left.end) == part.turn(left.worker, 0) for left in found[0] if left.never)
    all_told(parts)


def iterated_by_first(parts: WorkerParts, turns: int, *, ended: bool = True, loader: int = 7, workers: int = 2) -> None:
    """Worker 0 alone asks for so many turns."""
    with as_worker(0, workers, loader):
        part = parts.part(Part(0, workers, 0, 3, 0, 10, 10 * workers * turns), LoaderDeals(in_order=False))
    assert part is not None
    for turn in range(turns):
        assert part.asks(turn, ended=False) == []
    if ended:
        assert part.asks(turns, ended=True) == []


@pytest.mark.parametrize("asks_next", [0, None])
def test_what_a_loader_left_shows_when_the_next_iteration_begins(asks_next: int | None) -> None:
    parts = WorkerParts("job")
    iterated_by_first(parts, 20)
    with as_worker(asks_next, 2, loader=8):
        (left,) = parts.left()
        assert (left.worker, left.start, left.end, left.part.epoch) == (1, 10, 20, 3)
        parts.forget(left)
        assert parts.left() == [], "it is said once"


def test_what_is_left_of_few_stretches_may_be_of_a_loop_that_stopped_early() -> None:
    parts = WorkerParts("job")
    iterated_by_first(parts, 7)
    with as_worker(0, 2, loader=8):
        assert parts.left() == []


def test_a_worker_that_did_not_come_to_its_end_may_have_been_stopped() -> None:
    parts = WorkerParts("job")
    iterated_by_first(parts, 500, ended=False)
    with as_worker(0, 2, loader=8):
        assert parts.left() == []


def test_it_is_said_in_one_line_when_the_dataset_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    parts = WorkerParts("job")
    iterated_by_first(parts, 20, workers=3)
    del parts
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "rank 0 of job job lost samples: in epoch 3 worker 1 of 3 loader workers never asked for its positions, 10 to "
    )
    assert "\n" not in record.getMessage()


@pytest.mark.parametrize(("loader_is_done", "loader", "shows"), [(False, 7, True), (True, 7, False), (False, 6, False)])
def test_a_worker_whose_process_ends_before_its_loader_has_nothing_more_to_yield(
    loader_is_done: bool, loader: int, shows: bool
) -> None:
    """One that ends with its loader may have been stopped."""
    parts = WorkerParts("job")
    iterated_by_first(parts, 2)
    fork = multiprocessing.get_context("fork")
    done = fork.Event()
    if loader_is_done:
        done.set()
    worker = fork.Process(target=lambda dataset, done: None, args=("dataset", done))
    with as_worker(1, 2, loader=loader):
        worker.start()
        worker.join()
    with as_worker(0, 2, loader=8):
        assert [left.worker for left in parts.left()] == ([1] if shows else [])
    all_told(parts)


def test_nothing_is_said_of_workers_of_a_loader_before() -> None:
    """It had more of them: their rows stay."""
    parts = WorkerParts("job")
    with as_worker(3, 4, loader=7):
        part = parts.part(Part(3, 4, 0, 0, 0, 10, 1000), LoaderDeals(in_order=False))
    assert part is not None
    for turn in range(25):
        part.asks(turn, ended=False)
    part.asks(25, ended=True)
    with as_worker(0, 2, loader=8):
        parts.part(Part(0, 2, 0, 1, 0, 10, 1000), LoaderDeals(in_order=False))
    with as_worker(None):
        assert parts.left() == []


def test_a_loader_deals_in_turn_to_those_that_go_on() -> None:
    turns = LoaderTurns()
    ended = []
    for number in (1, 1, 4, 7, 9, 11, 12, 13):
        turns.deals(number)
        ended.append(turns.ended(3))
    assert ended == [0, 0, 0, 0, 1, 1, 2, 2]
    turns.deals(1)
    assert turns.ended(3) == 0, "a persistent worker's loader begins anew"


def test_outside_of_a_loaders_workers_nothing_is_known() -> None:
    turns = LoaderTurns()
    turns.look()
    assert turns.ended(3) == 0
