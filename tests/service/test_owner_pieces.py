"""How much does an owner decide before others have their turn on the loop? Little, however much is asked for at once.

Counted, not timed: requests answered and reads ordered from one turn of the loop to the next.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.security.hostile_datasets import write_many_samples
from tests.service.lone_owner import owner_of, reads_end
from tests.waiting import until_in_loop

from refill.errors import JobLost
from refill_service.cache_core.policies.interface import Orders
from refill_service.cache_core.sample_mapping import Int64Array
from refill_service.jobs.job_at_pod import JobAtPod
from refill_service.jobs.owner import Owner
from refill_service.jobs.scores import keep_scores
from refill_service.jobs.waits import RankWaits
from refill_service.memory.byte_gate import ByteGate
from refill_service.memory.payload import Payload

NUM_SAMPLES, BATCH = 6000, 1500
MOST_ANSWERED = 256
MOST_FETCHED = 768
"""With what of a fetch goes on meanwhile."""
MOST_TAKEN_IN, MOST_LEAVE = 2048, 1024
MOST_GIVES_WAY = 1024
MOST_READS = {1: 100, 8: 16, 64: 8}
"""By chunk size: of a piece that answers, and one that decides what is read ahead."""


class Turns(selectors.EpollSelector):
    """An event loop asks it once in each turn what has come."""

    def __init__(self) -> None:
        super().__init__()
        self.before_each: Callable[[], None] = lambda: None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.before_each()
        return super().select(timeout)


def run(work: Callable[[Turns], Coroutine[Any, Any, None]]) -> None:
    turns = Turns()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(turns)) as runner:
        runner.run(work(turns))


async def most_in_a_turn(turns: Turns, owner: Owner, work: Coroutine[Any, Any, Any]) -> tuple[int, int]:
    """The most ``(requests answered, reads ordered)`` in one turn of the loop until ``work`` is done, and what it began
    to decide."""
    counts = owner.epochs[-1].core.counts
    most, before = (0, 0), (counts.takes, counts.refills)

    def look() -> None:
        nonlocal most, before
        now = counts.takes, counts.refills
        most = max(most[0], now[0] - before[0]), max(most[1], now[1] - before[1])
        before = now

    turns.before_each = look
    await work
    await reads_end(owner)
    look()
    return most


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_many_samples(tmp_path_factory.mktemp("many") / "bytes", NUM_SAMPLES)


@pytest.mark.variants("never-1", "rolling-8")
@pytest.mark.parametrize(("eviction", "chunk_size"), [("rolling", 64), ("rolling", 8), ("earliest", 64), ("never", 1)])
def test_a_batch_of_thousands_is_decided_in_little_pieces(many: str, eviction: str, chunk_size: int) -> None:
    settings = {"policy": "exact", "chunk_size": chunk_size, "policy_settings": {"eviction": eviction}}

    async def work(turns: Turns) -> None:
        async with owner_of(many, NUM_SAMPLES // 10, **settings) as owner:
            asked, _ = (await owner.job.traces(0, RankWaits(1))).asked(0, np.arange(2 * BATCH))
            state = await owner.open(0, 0)
            for start in (0, BATCH):
                part = asked[start : start + BATCH]
                answered, reads = await most_in_a_turn(turns, owner, owner.take(state, 0, part))
                assert 0 < answered <= MOST_ANSWERED
                assert 0 < reads <= MOST_READS[chunk_size]
            assert state.core.counts.takes == 2 * BATCH
            assert state.counts.exact_reads == 0, "read alone, though it was ordered"

    run(work)


def test_a_batch_that_reads_thousands_of_chunks_orders_few_at_once(many: str) -> None:
    """Chunks of one sample, by policy ``redox``: each request is a read."""

    async def work(turns: Turns) -> None:
        async with owner_of(many, NUM_SAMPLES // 10, chunk_size=1) as owner:
            asked, _ = (await owner.job.traces(0, RankWaits(1))).asked(0, np.arange(2 * BATCH))
            state = await owner.open(0, 0)
            for start in (0, BATCH):
                part = asked[start : start + BATCH]
                answered, reads = await most_in_a_turn(turns, owner, owner.take(state, 0, part))
                assert 0 < answered <= MOST_ANSWERED
                assert 0 < reads <= MOST_ANSWERED
            assert state.core.counts.takes == 2 * BATCH
            assert state.counts.exact_reads == 0, "read alone, though it was ordered"

    run(work)


@pytest.mark.parametrize("fetch_size", [pytest.param(1500, marks=pytest.mark.variant), 9000])
def test_a_fetch_of_thousands_is_ordered_in_little_pieces(many: str, fetch_size: int) -> None:
    fetching = {"eviction": "fifo", "fetch_size": fetch_size}

    async def work(turns: Turns) -> None:
        settings = {"policy": "exact", "chunk_size": 1, "policy_settings": fetching}
        async with owner_of(many, NUM_SAMPLES, **settings) as owner:
            asked, _ = (await owner.job.traces(0, RankWaits(1))).asked(0, np.arange(NUM_SAMPLES))
            state = await owner.open(0, 0)
            for start in range(0, NUM_SAMPLES, BATCH):
                part = asked[start : start + BATCH]
                answered, reads = await most_in_a_turn(turns, owner, owner.take(state, 0, part))
                assert answered <= MOST_ANSWERED
                assert reads <= MOST_FETCHED
            assert state.core.counts.refills == NUM_SAMPLES, "a sample was read twice, and there is memory for all"
            assert state.counts.exact_reads == 0, "read alone, though it was ordered"

    run(work)


def test_scores_by_the_thousand_are_kept_by_parts(many: str) -> None:
    settings = {"policy": "exact", "chunk_size": 1, "policy_settings": {"eviction": "importance"}}

    async def work(turns: Turns) -> None:
        async with owner_of(many, NUM_SAMPLES // 2, **settings) as owner:
            at_once, scored = [0], owner.scored

            def counted(sample_ids: Int64Array, scores: NDArray[np.float32]) -> str:
                at_once[-1] += len(sample_ids)
                return scored(sample_ids, scores)

            owner.scored = counted  # type: ignore[method-assign]
            turns.before_each = lambda: at_once.append(0)
            at_pod = cast("JobAtPod", SimpleNamespace(job=owner.job, owner=owner))
            await keep_scores(at_pod, np.arange(NUM_SAMPLES), np.ones(NUM_SAMPLES, dtype=np.float32))
            assert sum(at_once) == NUM_SAMPLES
            assert max(at_once) <= MOST_TAKEN_IN

    run(work)


def test_repeats_by_the_thousand_are_decided_in_little_pieces(many: str) -> None:
    async def work(turns: Turns) -> None:
        async with owner_of(many, NUM_SAMPLES // 10, policy="exact", chunk_size=64) as owner:
            state = await owner.open(0, 0)
            await reads_end(owner)
            samples = np.arange(0, NUM_SAMPLES, 5)
            _, reads = await most_in_a_turn(turns, owner, owner.exact(samples, repeats=True))
            assert 0 < reads <= MOST_READS[64]
            assert state.counts.exact_reads == 0, "read alone, though it was ordered"

    run(work)


@pytest.mark.variants("1", "40")
@pytest.mark.parametrize("turns", [1, 5, 40])
def test_who_goes_away_between_two_pieces_leaves_nothing_undone(many: str, turns: int) -> None:
    """What was ordered for him is read; the rest was never asked for."""

    async def run() -> None:
        async with owner_of(many, NUM_SAMPLES // 10, recent_bytes=100, policy="exact", chunk_size=64) as owner:
            asked, _ = (await owner.job.traces(0, RankWaits(1))).asked(0, np.arange(BATCH))
            state = await owner.open(0, 0)
            gone = asyncio.create_task(owner.take(state, 0, asked))
            for _ in range(turns):
                await asyncio.sleep(0)
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
            assert state.core.counts.takes < BATCH, "it was decided in one piece"
            await reads_end(owner)
            samples, payloads = await owner.take(state, 0, asked)
            assert samples.tolist() == asked.tolist()
            assert payloads == [b"x"] * BATCH

    asyncio.run(run())


@pytest.mark.parametrize("policy", ["redox", "exact"])
def test_a_chunk_of_thousands_is_taken_in_by_parts(many: str, policy: str) -> None:
    """By one GET all the same."""

    async def work(turns: Turns) -> None:
        async with owner_of(many, NUM_SAMPLES, policy=policy, chunk_size=NUM_SAMPLES) as owner:
            asked, _ = (await owner.job.traces(0, RankWaits(1))).asked(0, np.arange(32))
            state = await owner.open(0, 0)
            came = [0]
            turns.before_each = lambda: came.append(state.core.counts.samples_read)
            await owner.take(state, 0, asked)
            await reads_end(owner)
            turns.before_each()
            assert 0 < np.diff(came).max() <= MOST_TAKEN_IN
            assert came[-1] == NUM_SAMPLES
            assert state.core.counts.refills == 1

    run(work)


def test_what_gives_way_to_a_chunk_of_thousands_does_so_by_parts(tmp_path: Path) -> None:
    """And what is read again meanwhile stays when it comes."""
    chunk_size, num_chunks = 4000, 6
    url = write_many_samples(tmp_path / "bytes", num_chunks * chunk_size)
    settings = {"policy": "exact", "chunk_size": chunk_size, "policy_settings": {"eviction": "earliest"}}

    async def work(turns: Turns) -> None:
        async with owner_of(url, num_chunks * chunk_size * 4 // 10, **settings) as owner:
            asked, _ = (await owner.job.traces(0, RankWaits(1))).asked(0, np.arange(8))
            state = await owner.open(0, 0)
            ordered, read_and_drop = [0], state.read_and_drop
            at_once, drop = [0], state.payloads.drop

            def counted(orders: Orders) -> None:
                ordered.append(len(orders.drops))
                read_and_drop(orders)

            def counted_drop(samples: list[int]) -> None:
                at_once.append(len(samples))
                drop(samples)

            state.read_and_drop, state.payloads.drop = counted, counted_drop  # type: ignore[method-assign]
            for sample in asked.tolist():
                await owner.take(state, 0, np.array([sample]))
            await reads_end(owner)
            assert max(ordered) > MOST_GIVES_WAY
            assert max(at_once) <= MOST_GIVES_WAY
            here = {sample for sample in range(num_chunks * chunk_size) if state.payloads.get(sample) is not None}
            assert here >= set(state.core.kept().tolist())
            stays = state.core.stays(np.array(sorted(here)))
            assert stays is not None
            assert stays.all(), "what nobody wants was not dropped"

    run(work)


def test_a_batch_of_thousands_leaves_in_portions(many: str) -> None:
    async def work(turns: Turns) -> None:
        async with owner_of(many, NUM_SAMPLES // 10, policy="exact", chunk_size=1) as owner:
            asked, _ = (await owner.job.traces(0, RankWaits(1))).asked(0, np.arange(2 * BATCH))
            state = await owner.open(0, 0)
            left = [0]
            leave = state.leave

            def counted(samples: Int64Array) -> list[Payload | None]:
                left[-1] += len(samples)
                return leave(samples)

            state.leave = counted  # type: ignore[method-assign]
            turns.before_each = lambda: left.append(0)
            found, payloads = await owner.take(state, 0, asked)
            assert (found.tolist(), len(payloads)) == (asked.tolist(), 2 * BATCH)
            assert max(left) <= MOST_LEAVE
            assert state.counts.exact_reads == 0, "read alone, though it was ordered"

    run(work)


def test_thousands_of_reads_end_in_little_pieces(many: str) -> None:
    """Where a job ends while they wait for the store."""

    async def work(turns: Turns) -> None:
        gate, left = ByteGate(100), list[int]()
        assert gate.enter_now(100) is not None, "and stays"
        async with owner_of(many, NUM_SAMPLES // 10, gate=gate, chunk_size=1) as owner:
            asked, _ = (await owner.job.traces(0, RankWaits(1))).asked(0, np.arange(BATCH))
            state = await owner.open(0, 0)
            waits = asyncio.create_task(owner.take(state, 0, asked))
            await until_in_loop(lambda: state.core.counts.refills == BATCH, "all reads are ordered")
            turns.before_each = lambda: left.append(len(owner.reads))
            await owner.close(JobLost("the job was ended"))
            with pytest.raises(JobLost):
                await waits
            assert max(left) > 2 * MOST_ANSWERED
            assert left[-1] == 0
            assert -np.diff(left).min() <= MOST_ANSWERED

    run(work)


def test_a_job_that_ends_between_two_pieces_leaves_nobody_waiting(many: str) -> None:
    async def run() -> None:
        async with owner_of(many, NUM_SAMPLES // 10, policy="exact", chunk_size=64) as owner:
            asked, _ = (await owner.job.traces(0, RankWaits(1))).asked(0, np.arange(BATCH))
            state = await owner.open(0, 0)
            takes = [asyncio.create_task(owner.take(state, 0, part)) for part in (asked, asked[:8])]
            for _ in range(3):
                await asyncio.sleep(0)
            await owner.close(JobLost("the job was ended"))
            async with asyncio.timeout(4):  # less than reads are waited for
                long, short = await asyncio.gather(*takes, return_exceptions=True)
            assert isinstance(long, JobLost)
            assert isinstance(short, (JobLost, tuple)), "its samples may have come before"
            assert not owner.reads, "something is read for a job that has ended"

    asyncio.run(run())
