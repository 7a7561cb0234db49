"""Nothing holds a pod's loop for long, however many samples and chunks a job has: in CPU time of the loop's thread,
while a job is registered, begins an epoch, is asked for, and ends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.membership.planned_in_process import PlannedDataset, new_name
from tests.membership.pods_in_process import PodsInProcess, Rank, spec_of
from tests.security.hostile_datasets import write_many_samples
from tests.service.lone_owner import owner_of, reads_end
from tests.timed_loop import TimedLoop

from refill.errors import MemoryTooSmall
from refill.protocol.dealing import Dealing
from refill.protocol.job_spec import JobSpec
from refill_service.jobs.waits import RankWaits
from refill_service.serving import client_routes

MOST_SECONDS = 0.05
"""10 ms are aimed at; where cores are shared by many, the same work takes more of their time."""


TRIES = 4
"""A machine's other guests make the same work take three times its CPU time, now and then; not each time."""


class HeldTooLong(AssertionError):
    pass


def held_at_most(loop: TimedLoop, what: str) -> None:
    longest = loop.longest
    print(f"{what}: {1000 * longest.cpu_seconds:.1f} ms, {longest.what}")
    if longest.cpu_seconds >= MOST_SECONDS:
        raise HeldTooLong(f"{what}: {longest}")
    loop.begin_anew()


def tried_anew(test: Callable[..., None]) -> Callable[..., None]:
    """A test that a loop held for too long fails only if it does so each time."""

    @functools.wraps(test)
    def until_quick(**fixtures: Any) -> None:
        for _ in range(TRIES - 1):
            try:
                return test(**fixtures)
            except HeldTooLong as slow:
                print(f"tried anew: {slow}")
        test(**fixtures)

    return until_quick


@pytest.mark.parametrize(
    ("num_samples", "chunk_size", "memory_bytes"),
    [(100_000, 1, 37_000_000), pytest.param(2_000_000, 1024, 300_000_000, marks=pytest.mark.variant)],
)
@tried_anew
def test_a_planned_job_of_very_many_samples_holds_the_loop_for_no_long_piece(
    tmp_path: Path, num_samples: int, chunk_size: int, memory_bytes: int
) -> None:
    url, loop = write_many_samples(tmp_path / "bytes", num_samples), TimedLoop()
    with PodsInProcess(1, loop=loop, memory_bytes="1GiB", wait_seconds=60) as pods:
        settings = {"chunk_size": chunk_size, "memory_bytes": memory_bytes}
        dataset = PlannedDataset(
            pods, dataset=url, job=new_name(), rank=0, world_size=1, timeout_seconds=300, **settings
        )
        connection = dataset.connection
        held_at_most(loop, "a job is registered")
        for first in range(0, 2000, 1000):
            assert len(set(connection.batch(0, np.arange(first, first + 1000)).sample_ids.tolist())) == 1000
        held_at_most(loop, "an epoch begins")
        connection.batch(0, np.arange(num_samples - 1000, num_samples))
        connection.batch(1, np.arange(1000))
        held_at_most(loop, "another one begins")
        pods.do(pods.node(0).planned.end_here(dataset.job))
        held_at_most(loop, "the job ends")


@tried_anew
def test_a_job_that_keeps_its_order_holds_the_loop_for_no_long_piece(tmp_path: Path) -> None:
    """Of a first batch of thousands, nearly each sample is a chunk that is read, and a plan that is made for it."""
    num_samples, batch = 200_000, 2048
    url, loop = write_many_samples(tmp_path / "bytes", num_samples), TimedLoop()
    with PodsInProcess(1, loop=loop, memory_bytes="1GiB", wait_seconds=60) as pods:
        spec = spec_of(url, policy="exact", chunk_size=64, memory_bytes=24_000_000, world_size=1)
        rank = Rank(pods, spec, 0, timeout_seconds=300)
        rank.info()
        loop.begin_anew()
        assert len(set(rank.batch(0, np.arange(batch)).sample_ids.tolist())) == batch
        held_at_most(loop, "the first batch")


@tried_anew
def test_a_live_job_with_chunks_of_one_sample_holds_the_loop_for_no_long_piece(tmp_path: Path) -> None:
    num_samples, batch = 200_000, 4096
    url, loop = write_many_samples(tmp_path / "bytes", num_samples), TimedLoop()
    with PodsInProcess(1, loop=loop, memory_bytes="1GiB", wait_seconds=60) as pods:
        spec = spec_of(url, policy="redox", chunk_size=1, memory_bytes=400_000_000, world_size=1)
        rank = Rank(pods, spec, 0, timeout_seconds=300)
        rank.info()
        held_at_most(loop, "a job is registered")
        assert len(set(rank.batch(0, np.arange(batch)).sample_ids.tolist())) == batch
        held_at_most(loop, "a batch")


@pytest.mark.variants("80000")
@pytest.mark.parametrize("memory_samples", [80_000, 180_000])
@tried_anew
def test_a_plan_for_a_chunk_of_thousands_holds_the_loop_for_no_long_piece(tmp_path: Path, memory_samples: int) -> None:
    num_samples, loop = 200_000, TimedLoop()
    url = write_many_samples(tmp_path / "bytes", num_samples)

    async def ask() -> None:
        async with owner_of(url, memory_samples, policy="exact", chunk_size=4096) as owner:
            asked, _ = (await owner.job.traces(0, RankWaits(1))).asked(0, np.arange(64))
            await owner.take(await owner.open(0, 0), 0, asked)
            await reads_end(owner)
            assert owner.epochs[-1].core.counts.refills > 32

    loop.run_until_complete(ask())
    held_at_most(loop, "chunks are read")
    loop.close()


@tried_anew
def test_a_receipt_of_very_many_spans_holds_the_loop_for_no_long_piece(tmp_path: Path) -> None:
    """Ranks that leave out every other position, as told to the other pod."""
    num_samples, num_ranks, loop = 400_000, 20, TimedLoop()
    url = write_many_samples(tmp_path / "bytes", num_samples)
    with PodsInProcess(2, loop=loop, memory_bytes="1GiB", wait_seconds=60) as pods:
        spec = JobSpec("told", url, policy="planned", chunk_size=1000, memory_bytes=400_000_000)
        pods.do(pods.node(0).planned.register(spec, None, begun=False, again=False))
        dealing = Dealing(num_samples, num_ranks)
        every_other = [(place, place + 1) for place in range(0, dealing.per_rank, 2)]
        for rank in range(num_ranks):
            pods.node(1).planned.jobs["told"].received.received(0, dealing, rank, every_other, now=1.0)
        loop.begin_anew()
        receipt = pods.do(pods.node(0).planned.receipts.receipt("told", 0, "", ""))
        assert receipt is not None
        assert (receipt["received"], receipt["unconfirmed"]) == (num_samples // 2, num_samples // 2)
        held_at_most(loop, "a receipt")


def test_jobs_are_listed_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, on_a_page = write_many_samples(tmp_path / "bytes", 100), 20
    monkeypatch.setattr(client_routes, "LISTED_JOBS", on_a_page)  # each job is a registration
    with PodsInProcess(1, memory_bytes="1GiB", wait_seconds=60) as pods:
        names = sorted(f"job-{number}" for number in range(on_a_page + 3))
        for name in names:
            spec = JobSpec(name, url, policy="planned", chunk_size=8, memory_bytes=200_000)
            pods.do(pods.node(0).planned.register(spec, None, begun=False, again=False))
        listed: list[str] = []
        for num_listed in (on_a_page, 3, 0):
            found: Any = pods.get(0, f"/v1/jobs?after={listed[-1] if listed else ''}")
            assert len(found) == num_listed
            listed += [each["spec"]["name"] for each in found]
        assert listed == names


def test_a_job_whose_memory_has_no_place_for_so_many_ranks_refuses_them(tmp_path: Path) -> None:
    url = write_many_samples(tmp_path / "bytes", 100)
    with PodsInProcess(1) as pods:
        settings = {"chunk_size": 8, "memory_bytes": 600_000, "world_size": 2**20}
        with pytest.raises(MemoryTooSmall, match="2,097 processes find a place, and you ask as one of 1,048,"):
            PlannedDataset(pods, dataset=url, job=new_name(), rank=0, **settings).connection.batch(0, np.arange(1))
