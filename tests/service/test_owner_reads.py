"""What does an owner read of the store, and what does it keep, within its memory and when reads fail or hang?"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from tests.cache_core.one_by_one import ONE_BY_ONE, ONE_BY_ONE_TERMS, registered
from tests.service.lone_owner import BATCH, owner_of, reads_end, take

from refill.errors import StoreUnavailable
from refill_service.jobs.owner import Owner
from refill_service.jobs.waits import RankWaits


def test_unshuffled_ranks_that_drift_apart_stay_within_memory(packed: tuple[str, Any]) -> None:
    async def run() -> None:
        async with owner_of(packed[0], 100_000, shuffle=False, world_size=2) as owner:
            received = []
            for rank in range(2):
                for start in range(0, owner.job.samples_per_rank(), BATCH):
                    received += await take(owner, 0, rank, start)
                    assert owner.resident_bytes <= 100_000
            assert sorted(received) == list(range(owner.job.layout.num_samples))

    asyncio.run(run())


def test_what_is_pinned_is_not_read_again(packed: tuple[str, Any]) -> None:
    async def run() -> None:
        async with owner_of(packed[0], 300_000, pinned_bytes=700_000, policy="redox", num_epochs=3) as owner:
            for epoch in range(3):
                samples = []
                for start in range(0, owner.job.samples_per_rank(), BATCH):
                    samples += await take(owner, epoch, 0, start)
                await reads_end(owner)
                assert len(set(samples)) == len(samples) == owner.job.layout.num_samples
                assert epoch == 0 or owner.history[epoch].core.bytes_pinned > 700_000 * 0.9

    asyncio.run(run())


@pytest.mark.parametrize("policy", ["exact", "redox"])
def test_what_the_pinned_tier_has_is_no_miss(packed: tuple[str, Any], policy: str) -> None:
    async def run() -> None:
        async with owner_of(packed[0], 300_000, pinned_bytes=10_000_000, policy=policy) as owner:
            for epoch in range(2):
                for start in range(0, owner.job.samples_per_rank(), BATCH):
                    await take(owner, epoch, 0, start)
            assert owner.history[0].core.misses > 0
            assert (owner.history[1].core.misses, owner.history[1].waited_takes) == (0, 0)

    asyncio.run(run())


class Outage:
    """A store whose reads fail while it lasts."""

    def __init__(self, owner: Owner) -> None:
        self._dataset, self._read = owner.job.dataset, owner.job.dataset.read_samples

    def __enter__(self) -> None:
        async def fails(*_: Any) -> memoryview:
            await asyncio.sleep(0)
            raise StoreUnavailable("the store is away")

        self._dataset.read_samples = fails  # type: ignore[assignment, method-assign]

    def __exit__(self, *_: object) -> None:
        self._dataset.read_samples = self._read  # type: ignore[assignment, method-assign]


async def until_it_comes(owner: Owner, epoch: int, rank: int, start: int) -> list[int]:
    for _ in range(50):
        try:
            return await take(owner, epoch, rank, start)
        except StoreUnavailable:
            continue
    raise AssertionError("the batch never came")


@pytest.mark.parametrize("policy", ["exact", "redox"])
def test_an_outage_at_the_end_of_an_epoch_takes_no_more_memory(
    packed: tuple[str, Any], policy: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What was to be read keeps its place, though the next epoch has been given all that is free."""

    async def run() -> None:
        limit = 3_000_000
        async with owner_of(packed[0], limit, policy=policy) as owner:
            with Outage(owner):
                with pytest.raises(StoreUnavailable):
                    await take(owner, 0, 0, 0)
                await reads_end(owner)
            received = []
            for start in range(0, owner.job.samples_per_rank(), BATCH):
                received += await until_it_comes(owner, 0, 0, start)
                held = sum(known.core.held_bytes for known in owner.epochs if not known.epoch.is_over)
                assert held <= limit
                assert owner.resident_bytes <= limit
            assert len(set(received)) == len(received) == owner.job.layout.num_samples

    asyncio.run(run())
    assert sum("a refill failed" in record.message for record in caplog.records) == 1, "an outage is one line"
    assert not [record for record in caplog.records if "never retrieved" in record.message]


def test_what_came_is_not_lost_to_what_failed(packed: tuple[str, Any]) -> None:
    """Samples of a batch that are read alone: each attempt keeps what it got."""

    async def run() -> None:
        async with owner_of(packed[0], 300_000, recent_bytes=1_000_000, num_epochs=1) as owner:
            with Outage(owner), pytest.raises(StoreUnavailable):
                await take(owner, 0, 0, 0)
            read, count = owner.job.dataset.read_samples, 0

            async def every_third(records: Any, first: int, end: int, room: Any) -> memoryview:
                nonlocal count
                count += 1
                if count % 3 == 0:
                    raise StoreUnavailable("the store stutters")
                return await read(records, first, end, room)

            owner.job.dataset.read_samples = every_third  # type: ignore[assignment, method-assign]
            for attempt in range(8):
                try:
                    assert len(await take(owner, 0, 0, 0)) == BATCH
                    break
                except StoreUnavailable:
                    assert attempt < 7, "no progress"

    asyncio.run(run())


def test_a_policy_whose_memory_outlives_epochs(packed: tuple[str, Any]) -> None:
    """Its drops are carried out, what it wants to stay stays, and the next epoch begins with what the last one left."""
    kept = 400

    async def run() -> None:
        settings = {"policy": "one-by-one", "policy_settings": {"most_kept": kept}, "num_epochs": 3}
        with registered(ONE_BY_ONE, ONE_BY_ONE_TERMS):
            async with owner_of(packed[0], 10_000_000, **settings) as owner:
                num_samples = owner.job.layout.num_samples
                reads = owner.job.dataset.store.counters.operations["read_range"]
                for epoch in range(3):
                    traces = await owner.job.traces(epoch, RankWaits(1))
                    asked, _ = traces.asked(0, np.arange(num_samples))
                    before, received = reads.requests, []
                    for start in range(0, num_samples, BATCH):
                        received += await take(owner, epoch, 0, start)
                        held = sum(len(running.payloads) for running in owner.epochs)
                        assert held <= kept, "what was dropped is still there"
                    assert received == asked.tolist(), "not the samples that were asked for"
                    if epoch:
                        assert owner.history[epoch].core.misses < num_samples, "nothing was left from the epoch before"
                        # Neighbours that are missing at once are read together.
                        assert reads.requests - before <= owner.history[epoch].core.misses
                    assert owner.history[epoch].exact_reads == 0, "bytes that were to stay were gone"

    asyncio.run(run())


@pytest.mark.parametrize("pinned_bytes", [0, 10_000_000])
@pytest.mark.parametrize("kept_bytes", [0, 200_000])
def test_repeats_are_kept_as_the_policy_says_whoever_waits(
    packed: tuple[str, Any], pinned_bytes: int, kept_bytes: int
) -> None:
    """Two wait for the same read, and one of them goes away; bytes that do not stay are nobody's afterwards."""

    async def run() -> None:
        settings = {"policy": "exact", "policy_settings": {"eviction": "never", "read_ahead": 0.0}}
        async with owner_of(packed[0], 200_000, pinned_bytes, **settings) as owner:
            samples = np.arange(0, 40, 2)
            assert len(await owner.exact(samples, repeats=True)) == 20, "no epoch is open"
            await owner.open(0, 0)
            owner.epochs[0].core.memory_changed(kept_bytes)
            read_alone = owner.epochs[0].counts.exact_reads
            for _ in range(2):
                left, stays = (asyncio.create_task(owner.exact(samples, repeats=True)) for _ in range(2))
                await asyncio.sleep(0)
                left.cancel()
                payloads = await stays
                for sample, payload in zip(samples.tolist(), payloads, strict=True):
                    owner.job.dataset.verify_sample(payload, owner.job.records, sample)
                await reads_end(owner)
            counts = owner.epochs[0].counts
            assert counts.exact_reads == read_alone, "read alone"
            read_once = kept_bytes or pinned_bytes
            assert counts.core.samples_read == (20 if read_once else 40), "once a turn, and not where it stayed"
            assert (counts.core.misses, counts.core.takes) == (0, 0), "no request was made"
            assert owner.resident_bytes == owner.epochs[0].core.held_bytes == sum(map(len, payloads)) * bool(kept_bytes)

    asyncio.run(run())
