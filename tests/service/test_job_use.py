"""When may others have a job's memory? When its processes have said goodbye, or have lost their connections."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from refill.protocol.rank_life import RankLife
from refill_service.jobs import job_use
from refill_service.jobs.job_use import JobUse
from refill_service.jobs.leased_ranks import LeasedRanks

LIVES = [RankLife("host", process, 1, "") for process in range(3)]


class Connection:
    passes_on = False

    def __init__(self) -> None:
        self.tell: list[Callable[[], None]] = []

    def when_lost(self, tell: Callable[[], None]) -> None:
        self.tell.append(tell)

    def is_answered(self) -> bool:
        return True

    def is_lost(self) -> None:
        for tell in self.tell:
            tell()


@pytest.fixture
def leases(monkeypatch: pytest.MonkeyPatch) -> LeasedRanks:
    monkeypatch.setattr(job_use, "GONE_SECONDS", 0.0)
    return LeasedRanks("job")


def test_the_last_goodbye_counts(leases: LeasedRanks) -> None:
    use = JobUse(leases)
    for rank in range(2):
        leases.asks(rank, LIVES[rank], over=Connection())
    use.said_goodbye(0, LIVES[0])
    assert not use.is_found_left(), "rank 1 is there"
    use.said_goodbye(1, LIVES[2])
    assert not use.is_found_left(), "a process that was not the rank says nothing of it"
    use.said_goodbye(1, LIVES[1])
    assert use.is_found_left()
    assert not use.is_found_left(), "found twice"
    assert (use.is_left, use.sleeps) == (True, True)
    use.asked()
    assert (use.is_left, use.sleeps) == (False, False)
    assert use.is_found_left(), "what a process asked before it ended was answered late, and nobody has come since"
    use.asked()
    leases.asks(0, LIVES[2], over=Connection())
    assert not use.is_found_left(), "somebody has come"


def test_a_process_is_gone_with_its_last_connection(leases: LeasedRanks) -> None:
    use = JobUse(leases)
    first, second = Connection(), Connection()
    leases.asks(0, LIVES[0], over=first)
    leases.asks(0, LIVES[0], over=second)
    first.is_lost()
    assert (use.may_be_left, use.is_found_left()) == (False, False)
    second.is_lost()
    assert use.may_be_left
    assert use.is_found_left()
    leases.heard(0, LIVES[0], Connection())
    use.asked()
    assert (use.may_be_left, use.is_found_left()) == (False, False), "it was not gone, and has another connection"


def test_nothing_follows_from_what_is_not_known(leases: LeasedRanks) -> None:
    """A job that was registered, and one whose process asks over something that does not say when it is closed."""
    use = JobUse(leases)
    assert not use.is_found_left(), "nobody has asked for anything so far"
    leases.asks(0, LIVES[0])
    assert (use.may_be_left, use.is_found_left()) == (False, False)
    with use.under_way():
        use.said_goodbye(0, LIVES[0])
        assert not use.is_found_left(), "somebody asks right now"
    assert use.is_found_left()


def test_a_pod_that_is_nobodys_home_is_told_by_those_that_are(leases: LeasedRanks) -> None:
    use = JobUse(leases)
    use.asked(pod=1)
    use.asked(pod=2)
    use.pod_said_goodbye(1)
    assert not use.is_found_left(), "ranks of pod 2 are there"
    use.pod_said_goodbye(2)
    assert use.is_found_left()
