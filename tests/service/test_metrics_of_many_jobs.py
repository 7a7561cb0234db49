"""A scrape looks at each job once, a few at a time, whatever the number of jobs, pods and epochs."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from refill_service.cache_core.home_machine import HomeCounts
from refill_service.jobs.job_figures import Clients, JobCounts, JobFigures
from refill_service.jobs.running_epoch import OwnerCounts
from refill_service.planned.planned_job import PlannedJob
from refill_service.pod.cache_node import CacheNode
from refill_service.serving import metrics
from refill_service.settings import load_settings

NUM_JOBS, NUM_EPOCHS, NUM_PODS, NUM_RANKS = 100, 40, 20, 5
AT_ONCE = 12
"""Jobs with so many epochs and ranks."""
PODS = ",".join(f"http://refill-{pod}:8000" for pod in range(NUM_PODS))


class CountedJob:
    """Has read and answered as much as its number in each epoch."""

    def __init__(self, number: int) -> None:
        self.spec = SimpleNamespace(name=f"job-{number}", holder=f"team-{number % 2}")
        self.number, self.looks = number, 0
        self.counts, self.clients = JobCounts(), Clients()
        for epoch in range(NUM_EPOCHS):
            self.counts.owner(epoch).core.takes = number
            self.counts.home(epoch).local = number
        for rank in range(NUM_RANKS):
            self.clients.client(rank).samples = number
        self.num_counts = 2 * NUM_EPOCHS + NUM_RANKS

    def figures(self) -> JobFigures:
        self.looks += 1
        homes: list[HomeCounts] = list(self.counts.homes.values())
        return JobFigures(
            *("planned", 1, self.counts.owners, homes, self.clients),
            *(0, 0, self.number, 0, 0),
            {pod: 7 for pod in range(1, NUM_PODS)},
            waiting={1: 2},
        )


@pytest.fixture
def jobs() -> list[CountedJob]:
    return [CountedJob(number) for number in range(NUM_JOBS)]


@pytest.fixture
def node(jobs: list[CountedJob]) -> CacheNode:
    settings = load_settings(replicas=NUM_PODS, ordinal=0, pod_urls=PODS, peer_urls=PODS.replace("8000", "8001"))
    node = CacheNode(settings)
    node.planned.jobs.update({job.spec.name: cast("PlannedJob", job) for job in jobs})
    return node


def samples_of(text: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Each sample by its name and labels. No metric, and no sample, comes twice."""
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    names = set()
    for family in text_string_to_metric_families(text.decode()):
        assert family.name not in names
        names.add(family.name)
        for sample in family.samples:
            place = sample.name, tuple(sorted(sample.labels.items()))
            assert place not in found
            found[place] = sample.value
    return found


def test_each_job_is_looked_at_once_and_shown_once(node: CacheNode, jobs: list[CountedJob]) -> None:
    found = samples_of(asyncio.run(metrics.text_of(node)))
    assert [job.looks for job in jobs] == [1] * NUM_JOBS
    assert found["refill_jobs", ()] == NUM_JOBS
    assert found["refill_resident_bytes", (("kind", "abstract"),)] == sum(range(NUM_JOBS))
    assert found["refill_waiting_requests", (("peer", "1"),)] == 2 * NUM_JOBS
    assert found["refill_peer_sent_bytes_total", (("peer", "19"),)] == 7 * NUM_JOBS
    for job in jobs:
        name = ("training_job", job.spec.name)
        assert found["refill_takes_total", (name,)] == NUM_EPOCHS * job.number
        assert found["refill_requests_total", (("answered", "local"), name)] == NUM_EPOCHS * job.number
        assert found["refill_client_samples_total", (("rank", "4"), name)] == job.number


def test_a_team_is_shown_its_own_and_told_sums_of_all(node: CacheNode) -> None:
    found = samples_of(asyncio.run(metrics.text_of(node, "team-1")))
    shown = {value for _, labels in found for name, value in labels if name == "training_job"}
    assert shown == {f"job-{number}" for number in range(1, NUM_JOBS, 2)}
    assert found["refill_jobs", ()] == NUM_JOBS


def test_of_many_jobs_a_few_at_a_time_are_shown(node: CacheNode, jobs: list[CountedJob]) -> None:
    waiting: set[int] = set()
    most = 0

    class Shown(dict[int, OwnerCounts]):
        def values(self) -> Any:
            waiting.discard(id(self))
            return super().values()

    def watched(job: CountedJob) -> JobFigures:
        nonlocal most
        figures = CountedJob.figures(job)
        owners = Shown(figures.owners)
        waiting.add(id(owners))
        most = max(most, len(waiting))
        return replace(figures, owners=owners)

    for job in jobs:
        job.figures = partial(watched, job)  # type: ignore[method-assign]
    asyncio.run(metrics.text_of(node))
    assert not waiting
    assert 1 < most < AT_ONCE
