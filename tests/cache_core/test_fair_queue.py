"""Whose turn it is: equal shares by bytes among jobs that wait, everything for a job alone, nothing lost."""

from __future__ import annotations

from collections import Counter
from time import thread_time

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from refill_service.cache_core.fair_queue import FairQueue, Waiting

SIZES = st.lists(st.integers(1, 100), min_size=1, max_size=60)


def next_of(queue: FairQueue[int]) -> Waiting[int]:
    waiting = next(queue.heads())
    queue.serve(waiting)
    return waiting


@given(st.dictionaries(st.sampled_from("abcd"), SIZES, min_size=2))
def test_jobs_that_all_wait_get_the_same_bytes(sizes_of: dict[str, list[int]]) -> None:
    """At any time, to within their largest requests together."""
    queue: FairQueue[int] = FairQueue()
    for job, sizes in sizes_of.items():
        for size in sizes:
            queue.put(Waiting(job, size, 0))
    left, served = Counter({job: len(sizes) for job, sizes in sizes_of.items()}), Counter(dict.fromkeys(sizes_of, 0))
    while all(left.values()):
        for one in sizes_of:
            for other in sizes_of:
                assert served[one] - served[other] <= max(sizes_of[one]) + max(sizes_of[other])
        waiting = next_of(queue)
        served[str(waiting.job)] += waiting.size_bytes
        left[str(waiting.job)] -= 1


def test_who_gives_up_is_no_more_work_where_very_many_wait() -> None:
    """Else a job that ends while it waits for very many chunks holds its pod for a minute."""

    def cpu_seconds_each(num_waiting: int) -> float:
        queue: FairQueue[int] = FairQueue()
        waiting = [Waiting("a", 1, number) for number in range(num_waiting)]
        for each in waiting:
            queue.put(each)
        gives_up = [waiting[place] for place in np.random.default_rng(1).permutation(num_waiting).tolist()]
        before = thread_time()
        for each in gives_up:
            queue.discard(each)
        assert not queue
        return (thread_time() - before) / num_waiting

    assert cpu_seconds_each(32_000) < 8 * cpu_seconds_each(320)


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.integers(0, 100),
            st.none() | st.integers(0, 3),
            st.none() | st.integers(0, 3),
            st.booleans(),
        ),
        max_size=60,
    )
)
def test_everything_is_served_once_what_is_due_first_then_what_will_be_soonest(
    steps: list[tuple[str, int, int | None, int | None, bool]],
) -> None:
    """Of a job; the rest in order."""
    queue: FairQueue[int] = FairQueue()
    put: list[Waiting[int]] = []
    given_up: set[int] = set()
    for number, (job, size, due, ahead, gives_up) in enumerate(steps):
        put.append(Waiting(job, size, number, due, ahead=ahead))
        queue.put(put[-1])
        if gives_up:
            victim = put[number // 2]
            if victim.item not in given_up:
                queue.discard(victim)
                given_up.add(victim.item)
    served = []
    while queue:
        served.append(next_of(queue))
    assert sorted(waiting.item for waiting in served) == sorted({w.item for w in put} - given_up)
    for job in "abc":
        of_job = [w for w in served if w.job == job]
        order = [
            (0, w.due, w.item) if w.due is not None else (2, 0, w.item) if w.ahead is None else (1, w.ahead, w.item)
            for w in of_job
        ]
        assert order == sorted(order), "what is due waited for what its job can wait for, or requests changed places"


@given(SIZES, st.dictionaries(st.sampled_from("abcdef"), SIZES, min_size=2))
def test_a_team_gets_no_more_with_many_jobs_than_with_one(of_one: list[int], of_many: dict[str, list[int]]) -> None:
    """And within a team its jobs get the same."""
    queue: FairQueue[int] = FairQueue(team_of=lambda job: job == "one")
    for job, sizes in {"one": of_one, **of_many}.items():
        for size in sizes:
            queue.put(Waiting(job, size, 0))
    left = Counter({job: len(sizes) for job, sizes in of_many.items()} | {"one": len(of_one)})
    most_of_one, most_of_many = max(of_one), max(map(max, of_many.values()))
    served = Counter(dict.fromkeys(left, 0))
    while all(left.values()):
        of_team = sum(served[job] for job in of_many)
        assert abs(of_team - served["one"]) <= most_of_one + most_of_many
        assert max(served[job] for job in of_many) - min(served[job] for job in of_many) <= 2 * most_of_many
        waiting = next_of(queue)
        served[str(waiting.job)] += waiting.size_bytes
        left[str(waiting.job)] -= 1
    while queue:
        left[str(next_of(queue).job)] -= 1
    assert not any(left.values()), "something was lost, or served twice"


def test_a_job_that_comes_back_has_saved_nothing_up_and_owes_nothing() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(1000):
        queue.put(Waiting("greedy", 10, number))
    for _ in range(500):
        next_of(queue)
    for number in range(10):
        queue.put(Waiting("small", 10, number))
    first = [next_of(queue).job for _ in range(20)]
    assert Counter(first) == {"greedy": 10, "small": 10}, "what one had before, alone, counts for neither"


def test_a_request_that_is_given_up_costs_its_job_nothing() -> None:
    queue: FairQueue[int] = FairQueue()
    given_up = [Waiting("a", 1000, number) for number in range(5)]
    for waiting in given_up:
        queue.put(waiting)
    queue.put(Waiting("b", 10, 0))
    for waiting in given_up:
        queue.discard(waiting)
    queue.put(Waiting("a", 10, 5))
    queue.put(Waiting("b", 10, 1))
    assert Counter(next_of(queue).job for _ in range(2)) == {"a": 1, "b": 1}


def test_a_job_can_not_go_before_others_by_being_urgent() -> None:
    """Reads of single samples are urgent, and whoever asks for many of them is a job like any other."""
    queue: FairQueue[int] = FairQueue()
    for number in range(1000):
        queue.put(Waiting("greedy", 10, number, due=0))
    for number in range(10):
        queue.put(Waiting("patient", 10, number))
    first = [next_of(queue).job for _ in range(20)]
    assert Counter(first) == {"greedy": 10, "patient": 10}


def test_a_job_that_wanted_less_than_its_part_has_saved_some_of_it() -> None:
    """So much, and no more: then it takes turns as before."""
    queue: FairQueue[int] = FairQueue(saved_bytes=10)
    queue.charge("greedy", 100)
    for _ in range(20):
        queue.put(Waiting("greedy", 5, 0))
    next_of(queue)
    for _ in range(6):
        queue.put(Waiting("rare", 5, 0))
    served = Counter(next_of(queue).job for _ in range(8))
    assert served["rare"] - served["greedy"] in (2, 4), "ten bytes more, to within a request"


def test_who_would_be_next_is_who_would_be_served_before_all_that_wait() -> None:
    queue: FairQueue[int] = FairQueue(saved_bytes=10)
    assert not queue.would_be_next("a"), "nobody waits"
    queue.put(Waiting("b", 10, 0))
    queue.charge("a", 5)
    assert not queue.would_be_next("a")
    queue.charge("b", 10)
    assert queue.would_be_next("a")
    assert queue.has_others("a")
    assert not queue.has_others("b")
    queue.put(Waiting("a", 10, 0))
    assert queue.has_others("b")
    assert next_of(queue).job == "a"
