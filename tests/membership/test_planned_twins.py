"""A second process of a rank of a planned job, which may ask any pod: who was there first stays the rank.

Also where its home is late, or was restarted, and it asks for nothing meanwhile.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.membership.planned_in_process import PlannedRank, Run, new_name
from tests.membership.pods_in_process import Packed, PodsInProcess

from refill.errors import PodUnreachable, RankHeld, RankTaken, RefillError
from refill_service.cache_core.rank_leases import LEASE_SECONDS
from refill_service.jobs import leased_ranks


class Clock:
    """By which pods know how long a process has been silent. It stands still."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(leased_ranks, "time", found)
    return found


@pytest.fixture
def pods() -> Iterator[PodsInProcess]:
    with PodsInProcess(2) as found:
        yield found


@pytest.fixture
def first(pods: PodsInProcess, packed: Packed) -> Run:
    """One rank, with pod 0 as its home. It has begun."""
    run = Run(pods, packed[0], new_name(), 1)
    run.take(0, 0, 100)
    return run


def twin_of(first: Run, pods: PodsInProcess, packed: Packed, **more: Any) -> Run:
    return Run(pods, packed[0], first.name, 1, **({"timeout_seconds": 0} | more))


def look(rank: PlannedRank) -> None:
    with contextlib.suppress(RefillError):
        rank.look()


def test_a_home_that_was_late_once_still_hears_of_a_rank_that_asks_for_nothing(
    first: Run, pods: PodsInProcess, packed: Packed, clock: Clock
) -> None:
    """It is reported to another pod then, for five seconds and more."""
    clock.now += 0.9 * LEASE_SECONDS
    pods.rule("/planned/received", to=0, times=1)
    look(first.ranks[0])
    assert first.ranks[0].home == pods.pod_urls[1]
    clock.now += 0.9 * LEASE_SECONDS
    with pytest.raises(RankHeld, match=r"rank 0 of job .* is process \d+ on test, heard 9 s ago"):
        twin_of(first, pods, packed).take(0, 0, 50)


def test_the_home_is_asked_before_other_pods_which_forget_a_rank_that_is_idle(
    first: Run, pods: PodsInProcess, packed: Packed, clock: Clock
) -> None:
    """It evaluates, or saves a checkpoint, for minutes."""
    rank = first.ranks[0]
    of_others = [each for each in range(300) if rank.pods_of_positions(0, [each]) == [pods.pod_urls[1]]]
    clock.now += 2 * LEASE_SECONDS
    rank.look()
    with pytest.raises(RankHeld, match=r"heard \d+ s ago"):
        twin_of(first, pods, packed).take_batch(0, 0, np.array(of_others[:10]))
    first.take(0, 100)
    first.check(packed[0])


def test_who_found_pods_away_asks_its_home_before_other_pods(first: Run, pods: PodsInProcess, packed: Packed) -> None:
    """Another process has become the rank meanwhile, and only the home has heard of it."""
    rank = first.ranks[0]
    of_home, of_others = (
        [each for each in range(100, 300) if rank.pods_of_positions(0, [each]) == [url]] for url in pods.pod_urls
    )
    rank.timeout_seconds = 0.2
    pods.kill(0, 1)
    with pytest.raises(PodUnreachable):
        first.take_batch(0, 0, np.array(of_others[:10]))
    pods.start(0, 1)
    twin_of(first, pods, packed).take_batch(0, 0, np.array(of_home[:10]))
    for _ in range(3):
        look(rank)  # and finds that all are back
    with pytest.raises(RankHeld, match=r"heard \d+ s ago"):
        first.take_batch(0, 0, np.array(of_others[:10]))


def test_a_pod_that_stands_in_for_the_home_hears_of_a_rank_that_asks_for_nothing(
    pods: PodsInProcess, packed: Packed, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlannedRank, "is_direct", False)  # so that no other pod has heard of it before
    first = Run(pods, packed[0], new_name(), 1)
    first.take(0, 0, 100)
    pods.kill(0)
    clock.now += 2 * LEASE_SECONDS
    for _ in range(2):
        look(first.ranks[0])
    with pytest.raises(RankHeld, match=r"heard \d+ s ago"):
        twin_of(first, pods, packed, first_pod=1, timeout_seconds=0.2).take(0, 0, 50)


def test_a_home_that_was_restarted_hears_of_a_rank_that_asks_for_nothing(
    first: Run, pods: PodsInProcess, packed: Packed, clock: Clock
) -> None:
    pods.kill(0)
    look(first.ranks[0])
    pods.start(0)
    clock.now += 2 * LEASE_SECONDS
    for _ in range(3):
        look(first.ranks[0])
    assert first.ranks[0].home == pods.pod_urls[0]
    with pytest.raises(RankHeld, match=r"heard \d+ s ago"):
        twin_of(first, pods, packed).take(0, 0, 50)


def test_who_only_looks_is_no_rank_of_a_pod_that_was_restarted(first: Run, pods: PodsInProcess, packed: Packed) -> None:
    """Not even with a state, by which samples have come to another process."""
    first.look()
    state = first.states(0, 100)
    looker = Run(pods, packed[0], first.name, 1, state)
    looker.ranks[0].info()
    pods.kill(0)
    look(looker.ranks[0])
    pods.start(0)
    for _ in range(3):
        look(looker.ranks[0])
    first.take(0, 100, 200)


def test_the_home_decides_which_process_is_the_rank(
    first: Run, pods: PodsInProcess, packed: Packed, clock: Clock
) -> None:
    """A twin that does not reach it is answered by another pod, where the rank was not heard for long; that one refuses
    the first then, which goes on all the same. The twin is told when it reaches the home."""
    clock.now += 2 * LEASE_SECONDS
    for rank in first.ranks:
        rank.look()
    away = pods.rule("", to=0, times=-1)
    twin = twin_of(first, pods, packed, first_pod=1, timeout_seconds=0.2)
    twin.take(0, 0, 50)
    away.times = 0
    first.take(0, 100, 200)  # the other pod knows two now
    clock.now += 1.1 * LEASE_SECONDS
    twin.take(0, 50, 100)
    first.take(0, 200, 300)
    first.look()
    twin.ranks[0].look()
    assert twin.ranks[0].home == pods.pod_urls[0]
    with pytest.raises(RankTaken, match=r"is process \d+ on test"):
        twin.take_batch(0, 0, np.arange(100, 150))
    clock.now += 1.1 * LEASE_SECONDS
    first.take(0, 300)
    with pytest.raises(RankTaken, match="calls itself rank 0") as error:
        twin.take_batch(0, 0, np.arange(100, 150))
    assert type(error.value) is RankTaken, "for good"
    first.take(1, 0, 50)
    first.check(packed[0])
    first.exact_receipt(0)
