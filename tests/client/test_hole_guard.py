"""What shows that a sampler's positions are divided a second time, and what must not be taken for it."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill.loops.hole_guard import Hole, HoleGuard


def batch(start: int, size: int) -> Any:
    return np.arange(start, start + size)


def asks(guard: HoleGuard, iteration: int, positions: Any, worker: int | None = None, workers: int = 0) -> Hole | None:
    info = None if worker is None else mock.Mock(id=worker, num_workers=workers)
    with mock.patch("torch.utils.data.get_worker_info", return_value=info):
        return guard.asks(iteration, positions)


def test_a_stride_shows_within_the_first_batch() -> None:
    guard = HoleGuard()
    hole = asks(guard, guard.begins(0), np.arange(0, 40, 2))
    assert hole == Hole(1, 2, "one of every 2 positions is asked for")


def test_every_second_batch_shows_with_the_second_request_of_a_process() -> None:
    guard = HoleGuard()
    iteration = guard.begins(0)
    assert asks(guard, iteration, batch(0, 20)) is None
    assert asks(guard, iteration, batch(40, 20)) == Hole(20, 40, "1 of 2 batches are left out")


def test_batches_that_were_skipped_at_the_start_show_with_the_first_request() -> None:
    guard = HoleGuard()
    assert asks(guard, guard.begins(0), batch(20, 20)) == Hole(0, 20, "1 of 2 batches are left out")


@given(
    workers=st.integers(1, 8),
    size=st.integers(1, 9),
    ranks=st.integers(2, 4),
    num_batches=st.integers(0, 40),
    data=st.data(),
)
def test_every_nth_batch_shows_whatever_the_order_in_which_workers_ask(
    workers: int, size: int, ranks: int, num_batches: int, data: st.DataObject
) -> None:
    """However short the epoch is: two batches of a rank suffice."""
    guard = HoleGuard()
    iteration = guard.begins(0)
    rank = data.draw(st.integers(0, ranks - 1))
    batches = [batch(number * size, size) for number in range(rank, (num_batches + 2) * ranks, ranks)]
    found = [
        hole
        for worker, positions in dealt(batches, workers, data)
        if (hole := asks(guard, iteration, positions, worker, workers))
    ]
    assert found


@given(
    workers=st.integers(1, 8),
    size=st.integers(1, 9),
    start=st.integers(0, 100),
    first_worker=st.integers(0, 7),
    num_batches=st.integers(1, 60),
    data=st.data(),
)
def test_an_iteration_without_holes_shows_none_wherever_it_is_broken_off(
    workers: int, size: int, start: int, first_worker: int, num_batches: int, data: st.DataObject
) -> None:
    """Also one that goes on from a state, which may deal its first batch to any of the workers."""
    guard = HoleGuard()
    iteration = guard.begins(start)
    batches = [batch(start + number * size, size) for number in range(num_batches)]
    asked = list(dealt(batches, workers, data, first_worker % workers))
    for worker, positions in asked[: data.draw(st.integers(0, len(asked)))]:
        assert asks(guard, iteration, positions, worker, workers) is None


def dealt(batches: list[Any], workers: int, data: st.DataObject, first: int = 0) -> Iterator[tuple[int, Any]]:
    """As DataLoader deals them, one after another to each worker, and as they come from workers of any speed."""
    queues = [batches[(worker - first) % workers :: workers] for worker in range(workers)]
    while waiting := [worker for worker in range(workers) if queues[worker]]:
        worker = data.draw(st.sampled_from(waiting))
        yield worker, queues[worker].pop(0)


def test_an_epoch_that_begins_again_is_no_hole() -> None:
    guard = HoleGuard()
    assert asks(guard, guard.begins(0), batch(0, 20)) is None
    iteration = guard.begins(0)
    assert asks(guard, iteration, batch(0, 20)) is None
    assert asks(guard, iteration, batch(20, 20)) is None


def test_requests_of_an_iteration_that_is_over_are_not_judged() -> None:
    guard = HoleGuard()
    before = guard.begins(0)
    guard.begins(0)
    assert asks(guard, before, batch(80, 20)) is None


def test_a_process_that_is_no_worker_and_has_no_sampler_is_not_judged() -> None:
    """It is one of several perhaps, of which nobody here knows: the pods judge what they ask together."""
    guard = HoleGuard()
    iteration = guard.begins(0)
    with mock.patch("os.getpid", return_value=-1):
        assert asks(guard, iteration, batch(40, 20)) is None


def test_threads_that_ask_side_by_side_are_not_judged() -> None:
    guard = HoleGuard()
    iteration = guard.begins(0)
    assert asks(guard, iteration, batch(0, 20)) is None
    found: list[Hole | None] = []
    thread = threading.Thread(target=lambda: found.append(guard.asks(iteration, batch(60, 20))))
    thread.start()
    thread.join()
    assert [*found, asks(guard, iteration, batch(40, 20)), asks(guard, iteration, batch(20, 20))] == [None] * 3


def test_positions_of_no_sampler_are_not_judged() -> None:
    assert asks(HoleGuard(), 0, batch(40, 20)) is None


def test_it_can_be_pickled_for_a_worker() -> None:
    guard = HoleGuard()
    iteration = guard.begins(0)
    copy: HoleGuard = pickle.loads(pickle.dumps(guard))
    assert asks(copy, iteration, batch(40, 20), 0, 1) == Hole(0, 40, "2 of 3 batches are left out")


@pytest.mark.parametrize("size", [1, 7])
def test_a_batch_is_described_in_any_size(size: int) -> None:
    guard = HoleGuard()
    iteration = guard.begins(0)
    asks(guard, iteration, batch(0, size))
    hole = asks(guard, iteration, batch(3 * size, size))
    assert hole is not None
    assert hole.pattern == "2 of 3 batches are left out"
