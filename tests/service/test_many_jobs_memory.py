"""Memory that thousands of jobs share is shared anew every second: how often that looks at a job grows with their
number, not with its square."""

from __future__ import annotations

from typing import cast

import pytest

from refill.protocol.job_spec import JobSpec
from refill_service.cache_core.memory_shares import Claim
from refill_service.cache_core.team_quotas import TeamQuotas
from refill_service.datasets.early_opening import EarlyOpening
from refill_service.jobs.job_table import JobTable, TakesMemory
from refill_service.jobs.job_use import SLEEPS_AFTER_SECONDS, JobUse
from refill_service.jobs.leased_ranks import LeasedRanks
from refill_service.memory.byte_gate import ByteGate
from refill_service.memory.pinned_tier import PinnedTier
from refill_service.peers.peers import Peers
from refill_service.settings import load_settings

TEAMS = ["vision", "speech"]
MB = 1 << 20
MEMORY_BYTES = 1 << 30
NUM_JOBS = 200
LOOKS = 6
"""At a job, each time."""


class CountedJob:
    """Holds all that it may."""

    def __init__(self, number: int) -> None:
        self.spec = JobSpec(f"job-{number}", "s3://bucket/x", holder=TEAMS[number % 2], policy="planned")
        self.claim = Claim(self.spec.holder, MB, (4 + number % 5) * MB)
        self.memory_bytes = self.looks = 0
        self.gave_all = self.has_let_go = False
        self.use = JobUse(LeasedRanks(self.spec.name))

    @property
    def taken_bytes(self) -> int:
        self.looks += 1
        return 0 if self.has_let_go else self.memory_bytes

    def memory_is(self, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes

    def let_go(self) -> None:
        assert not self.has_let_go, "once is enough"
        self.has_let_go = True
        self.memory_bytes = 0

    def sleep(self) -> None:
        self.use.last_used -= 2 * SLEEPS_AFTER_SECONDS


@pytest.fixture
def jobs() -> dict[str, CountedJob]:
    return {job.spec.name: job for job in map(CountedJob, range(NUM_JOBS))}


@pytest.fixture
def table(jobs: dict[str, CountedJob]) -> JobTable:
    return JobTable(
        load_settings(memory_bytes=MEMORY_BYTES),
        TeamQuotas(lambda: TEAMS, 0.5, NUM_JOBS + 1),
        Peers([], 1.0),
        ByteGate(MB),
        PinnedTier(0),
        cast("EarlyOpening", None),
        cast("dict[str, TakesMemory]", jobs),
    )


def is_looked_at_a_few_times(jobs: dict[str, CountedJob]) -> None:
    looks = sum(job.looks for job in jobs.values())
    for job in jobs.values():
        job.looks = 0
    assert looks <= LOOKS * len(jobs)


def test_all_get_their_share_at_once(table: JobTable, jobs: dict[str, CountedJob]) -> None:
    table.share_memory()
    is_looked_at_a_few_times(jobs)
    assert 0.9 * MEMORY_BYTES < sum(job.memory_bytes for job in jobs.values()) <= MEMORY_BYTES


def test_one_ends_and_all_others_get_more(table: JobTable, jobs: dict[str, CountedJob]) -> None:
    table.share_memory()
    is_looked_at_a_few_times(jobs)
    before = {name: job.memory_bytes for name, job in jobs.items()}
    for number in range(0, 2 * 20, 2):
        del jobs[f"job-{number}"]
    table.share_memory()
    is_looked_at_a_few_times(jobs)
    assert all(job.memory_bytes >= before[name] for name, job in jobs.items())
    assert sum(job.memory_bytes > before[name] for name, job in jobs.items()) >= 0.3 * len(jobs)


def test_one_comes_while_all_sleep_and_as_many_let_go_as_have_to(table: JobTable, jobs: dict[str, CountedJob]) -> None:
    table.share_memory()
    is_looked_at_a_few_times(jobs)
    for job in jobs.values():
        job.sleep()
    spec = JobSpec("new", "s3://bucket/x", holder=TEAMS[0], policy="planned")
    wanted = MEMORY_BYTES // 2
    given, _ = table.memory_for(spec, Claim(TEAMS[0], MB, wanted))
    assert given == wanted
    is_looked_at_a_few_times(jobs)
    left = [job.memory_bytes for job in jobs.values() if not job.has_let_go]
    assert MEMORY_BYTES - sum(left) >= wanted
    assert MEMORY_BYTES - sum(left) < wanted + 10 * MB, "others keep theirs"
