"""Which process is a rank, at one pod? Known by what it asks, and by its connections where it is silent for long."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from refill.errors import RankHeld, RankTaken
from refill.protocol.rank_life import RankLife
from refill_service.cache_core import rank_leases
from refill_service.jobs.leased_ranks import LeasedRanks
from refill_service.serving.other_end import is_of_proxy

FIRST, SECOND, THIRD = (RankLife("host", process, 1, "") for process in range(3))


class Connection:
    """Of a client.

    :param passes_on: whether it is a proxy's.
    """

    def __init__(self, *, passes_on: bool = False) -> None:
        self.passes_on = passes_on
        self.machine_is_there = True
        self._tell: list[Callable[[], None]] = []

    def when_lost(self, tell: Callable[[], None]) -> None:
        self._tell.append(tell)

    @property
    def num_told(self) -> int:
        return len(self._tell)

    def is_answered(self) -> bool:
        return self.machine_is_there

    def is_lost(self) -> None:
        for tell in self._tell:
            tell()


@pytest.fixture
def leases(monkeypatch: pytest.MonkeyPatch) -> LeasedRanks:
    """Every process is silent for longer than a lease."""
    monkeypatch.setattr(rank_leases, "LEASE_SECONDS", 0.0)
    return LeasedRanks("job")


def test_a_second_process_is_told_of_the_first_that_stands_still_and_goes_on_when_that_is_gone(
    leases: LeasedRanks,
) -> None:
    of_worker, of_process = Connection(), Connection()
    leases.asks(0, FIRST, over=of_worker)
    leases.heard(0, FIRST, of_process)
    for _ in range(3):
        with pytest.raises(
            RankHeld, match=r"rank 0 of job job is process 0 on host, which has a connection .*: it sta"
        ):
            leases.asks(0, SECOND, over=Connection())
    of_worker.is_lost()
    with pytest.raises(RankHeld):
        leases.asks(0, SECOND)
    of_process.is_lost()
    leases.asks(0, SECOND)
    assert leases.holder(0) == SECOND


def test_a_first_that_comes_back_late_is_told_who_is_the_rank(leases: LeasedRanks) -> None:
    leases.asks(0, FIRST)
    leases.asks(0, SECOND, over=Connection())
    assert leases.holder(0) == SECOND, "the first had no connection"
    with pytest.raises(RankHeld, match="is process 1 on host"):
        leases.asks(0, FIRST, over=Connection())
    leases.heard(0, SECOND)
    with pytest.raises(RankTaken, match=r"process 0 on host calls itself rank 0 .*process 1 on host has") as error:
        leases.asks(0, FIRST, over=Connection())
    assert type(error.value) is RankTaken, "for good"


def test_a_connection_that_others_ask_over_too_keeps_nobody_the_rank(leases: LeasedRanks) -> None:
    """Of the connection holder of a machine, or of a proxy: it stays when a process ends."""
    for connection in (Connection(passes_on=True), Connection()):
        leases.asks(0, FIRST, over=connection)
        leases.asks(1, THIRD, over=connection)
        leases.asks(0, SECOND)
        assert leases.holder(0) == SECOND
        leases.returned(0, SECOND)


def test_a_process_whose_machine_says_nothing_is_replaced(leases: LeasedRanks) -> None:
    """An answer was on its way when the machine went off: the kernel goes on sending it for a quarter of an hour."""
    connection = Connection()
    leases.asks(0, FIRST, over=connection)
    connection.machine_is_there = False
    leases.asks(0, SECOND)
    assert leases.holder(0) == SECOND


@pytest.mark.parametrize("name", [b"via", b"forwarded", b"x-forwarded-for", b"x-request-id"])
def test_requests_that_were_passed_on_say_so(name: bytes) -> None:
    own = [(b"host", b"refill:8000"), (b"authorization", b"Bearer x"), (b"content-length", b"0")]
    assert not is_of_proxy(own)
    assert is_of_proxy([*own, (name, b"1")])


def test_processes_that_follow_each_other_over_one_connection_leave_nothing(leases: LeasedRanks) -> None:
    """Whoever has asked as a rank, and is none any more, is forgotten, though the connection stays."""
    over = Connection()
    lives = [RankLife("host", process, 1, "") for process in range(500)]
    leases.asks(0, lives[0], over=over)
    for before, life in pairwise(lives):
        leases.ended(0, before, by=life)
        leases.asks(0, life, over=over)
    assert leases.holder(0) == lives[-1]
    assert over.num_told <= 1
    assert len(leases.connected) <= 2
    leases.asks(0, FIRST, over=Connection())  # that connection says nothing of the last one: it outlives processes
