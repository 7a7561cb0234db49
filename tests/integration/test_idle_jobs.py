"""A job that nobody asks anything of ends on every pod; one that is in use at one of them ends on none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
from tests.pod_fixtures import metric, rank_of, settings_of
from tests.waiting import until

from refill.errors import EpochNotReady, JobLost
from refill.pods.planned_connection import PlannedConnection
from refill_service.demo.local_cluster import LocalCluster

IDLE_SECONDS = 1
Packed = tuple[str, dict[str, bytes]]


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    settings = {"memory_bytes": "4MiB", "pinned_fraction": 0, "job_idle_seconds": IDLE_SECONDS, "wait_seconds": 4}
    with LocalCluster(3, tmp_path_factory.mktemp("pods"), settings) as cluster:
        yield cluster


def until_ended(pods: LocalCluster, job: dict[str, Any]) -> None:
    """Looks at the job all the while, which must not keep it alive."""

    def ended() -> bool:
        for url in pods.pod_urls:
            for path in ("", "/epochs/0", "/epochs/0/receipt"):
                httpx.get(f"{url}/v1/jobs/{job['name']}{path}")
        return not any(metric(url, "refill_jobs") for url in pods.pod_urls)

    until(ended, "the end of a job that is only looked at")


def test_it_ends_on_every_pod_and_leaves_nothing(pods: LocalCluster, packed: Packed) -> None:
    job = settings_of(packed[0])
    rank = rank_of(pods, job, timeout_seconds=0)
    rank.batch(0, np.arange(100))
    until_ended(pods, job)
    for url in pods.pod_urls:
        assert metric(url, "refill_resident_bytes") == 0
        assert job["name"] not in httpx.get(f"{url}/metrics").text
    with pytest.raises(JobLost, match=f"job {job['name']} ") as caught:
        rank.batch(0, np.arange(100, 110))
    assert "\n" not in str(caught.value)


def test_jobs_stay_everywhere_while_their_homes_hear_of_ranks(
    pods: LocalCluster, packed: Packed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loops are in one long step, or live from what was sent ahead. The home of a live job alone has reports of it; a
    planned one looks after its home by itself."""
    monkeypatch.setattr(PlannedConnection, "report_every_seconds", IDLE_SECONDS / 4)
    live, planned = (rank_of(pods, settings_of(packed[0], policy=policy)) for policy in ("redox", "planned"))
    for rank in (live, planned):
        rank.batch(0, np.arange(100))
    deadline = time.monotonic() + 4 * IDLE_SECONDS
    while time.monotonic() < deadline:
        live.report(0.1, 1, 1)
        time.sleep(0.1)
    for url in pods.pod_urls:
        assert metric(url, "refill_jobs") == 2, f"{url} has ended a job that is in use"
    for rank in (live, planned):
        rank.batch(0, np.arange(100, 1000))
        rank.end_job()


def test_a_request_that_waits_for_longer_keeps_it(pods: LocalCluster, packed: Packed) -> None:
    job = settings_of(packed[0], policy="redox", world_size=2)
    rank = rank_of(pods, job, timeout_seconds=0)
    rank.batch(0, np.arange(10))
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(rank.batch, 1, np.arange(10))
        error = waits.exception(30)
    assert isinstance(error, EpochNotReady), f"the job was taken from under a request that waited: {error!r}"
    until_ended(pods, job)
