"""An owner over several epochs: every sample once in each, within its memory, with the next epoch loaded ahead."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from tests.cache_core.one_by_one import ONE_BY_ONE, ONE_BY_ONE_TERMS, registered

from refill.errors import EpochEnded, JobLost, MemoryTooSmall, StoreUnavailable
from refill.protocol.job_spec import JobSpec
from refill.protocol.records import Kind, Record
from refill_service.cache_core.recollection import Recollection
from refill_service.cache_core.sample_mapping import ChunkLayout
from refill_service.datasets.dataset_reader import Dataset
from refill_service.jobs.job import Job
from refill_service.jobs.owner import Owner
from refill_service.jobs.rank_waits import RankWaits
from refill_service.memory.byte_gate import ByteGate
from refill_service.memory.pinned_tier import PinnedTier

BATCH = 32


@asynccontextmanager
async def owner_of(
    url: str, abstract_bytes: int, pinned_bytes: int = 0, trace_bytes: int = 0, **settings: Any
) -> AsyncIterator[Owner]:
    """An owner of a whole dataset, without a pod around it."""
    spec = JobSpec("job", url, **{"chunk_size": 8} | settings)
    dataset = await Dataset.open(url)
    records = await dataset.load_records(0, dataset.num_samples)
    job = Job(
        spec,
        dataset,
        records,
        ChunkLayout(dataset.blobs.first_sample, spec.chunk_size),
        ordinal=0,
        num_pods=1,
        memory_bytes=2 * abstract_bytes,
        abstract_bytes=abstract_bytes,
        incarnation="",
        trace_bytes=trace_bytes,
    )
    pinned = PinnedTier(pinned_bytes).lease("1", records)
    owner = Owner(job, ByteGate(100_000), pinned, 10_000, wait_seconds=5, waits=RankWaits(5))
    try:
        yield owner
    finally:
        await owner.close(JobLost("the job was ended"))
        await dataset.close()


async def take(owner: Owner, epoch: int, rank: int, start: int) -> list[int]:
    traces = await owner.job.traces(epoch, RankWaits(1))
    end = min(start + BATCH, traces.length(rank))
    asked, repeats = traces.asked(rank, np.arange(start, end))
    samples, payloads = await owner.take(await owner.open(epoch, rank), rank, asked[~repeats])
    for sample, payload in zip(samples.tolist(), payloads, strict=True):
        owner.job.dataset.verify_sample(payload, owner.job.records, sample)
    return samples.tolist()


async def reads_end(owner: Owner) -> None:
    while owner._reads:
        await asyncio.wait(owner._reads)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("policy", ["drain", "redox"])
def test_ranks_that_drift_apart_at_epoch_boundaries(packed: tuple[str, Any], policy: str, seed: int) -> None:
    """Three ranks of different speed; each epoch gives every sample once, and memory stays below its limit."""
    abstract_bytes, chooser = 300_000, random.Random(seed)

    async def run() -> None:
        async with owner_of(packed[0], abstract_bytes, policy=policy, world_size=3, seed=seed) as owner:
            received: dict[int, list[int]] = {epoch: [] for epoch in range(4)}

            async def rank_runs(rank: int) -> None:
                for epoch in range(4):
                    for start in range(0, owner.job.samples_per_rank(), BATCH):
                        received[epoch] += await take(owner, epoch, rank, start)
                        if policy == "drain":
                            held = sum(known.core.held_bytes for known in owner._epochs if not known.epoch.is_over)
                            assert held <= abstract_bytes, f"{held} bytes are held, {abstract_bytes} were given"
                        await asyncio.sleep(chooser.random() * 0.003 * rank)

            await asyncio.gather(*(rank_runs(rank) for rank in range(3)))
            for epoch, samples in received.items():
                counts = Counter(samples)
                assert len(counts) == len(samples) == owner.job.layout.num_samples, f"epoch {epoch} is not exact"

    asyncio.run(run())


def test_the_next_epoch_is_loaded_before_it_is_asked_for(packed: tuple[str, Any]) -> None:
    async def run() -> None:
        async with owner_of(packed[0], 500_000) as owner:
            length = owner.job.samples_per_rank()
            for start in range(0, length, BATCH):
                await take(owner, 0, 0, start)
            await reads_end(owner)
            assert owner.history[1].core.refills > 0, "nothing was loaded for the next epoch"
            assert 400_000 < owner.resident_bytes <= 500_000, "the memory that the epoch left is not filled"
            waited = []
            for start in range(0, length, BATCH):
                await take(owner, 1, 0, start)
                waited.append(owner.history[1].waited_takes)
                await reads_end(owner)
            assert waited[0] == 0, "the first batch of the next epoch waited for the store"
            assert owner.history[1].core.misses == 0

    asyncio.run(run())


def test_nothing_is_loaded_after_the_last_epoch(packed: tuple[str, Any]) -> None:
    async def run() -> None:
        async with owner_of(packed[0], 500_000, num_epochs=2) as owner:
            for epoch in range(2):
                for start in range(0, owner.job.samples_per_rank(), BATCH):
                    await take(owner, epoch, 0, start)
            await reads_end(owner)
            assert list(owner.history) == [0, 1]
            assert owner.resident_bytes == 0

    asyncio.run(run())


def test_an_epoch_that_ends_after_it_was_opened_gives_nothing(packed: tuple[str, Any]) -> None:
    """A request may wait for room between the two: what it takes then would be in nobody's receipt."""

    async def run() -> None:
        async with owner_of(packed[0], 300_000) as owner:
            opened, asked = await owner.open(0, 0), np.arange(1)
            for epoch in range(4):
                for start in range(0, owner.job.samples_per_rank(), BATCH):
                    await take(owner, epoch, 0, start)
            with pytest.raises(EpochEnded, match="at epoch 3, epoch 0 has ended"):
                await owner.take(opened, 0, asked)
            opened = await owner.open(3, 0)
        with pytest.raises(JobLost, match="the job was ended"):
            await owner.take(opened, 0, asked)

    asyncio.run(run())


def test_an_epoch_that_was_left_early_gives_its_memory_to_the_next(packed: tuple[str, Any]) -> None:
    async def run() -> None:
        async with owner_of(packed[0], 10_000_000, world_size=2) as owner:
            for rank in range(2):
                await take(owner, 0, rank, 0)  # all of the dataset is in memory now, and the next epoch was opened
            await reads_end(owner)
            received = [await take(owner, 1, 0, start) for start in range(0, owner.job.samples_per_rank(), BATCH)]
            await take(owner, 0, 1, BATCH)  # the other rank goes on, then leaves, too
            received += [await take(owner, 1, 1, start) for start in range(0, owner.job.samples_per_rank(), BATCH)]
            assert sorted(sample for batch in received for sample in batch) == list(range(owner.job.layout.num_samples))
            assert owner._epochs[0].payloads.num_bytes == 0, "the epoch that was left still holds samples"
            with pytest.raises(EpochEnded, match="left epoch 0"):
                await take(owner, 0, 1, 2 * BATCH)

    asyncio.run(run())


def test_the_epoch_before_can_be_asked_again_while_the_next_is_loaded(packed: tuple[str, Any]) -> None:
    async def run() -> None:
        async with owner_of(packed[0], 10_000_000) as owner:
            first = await take(owner, 0, 0, 0)
            for epoch in range(2):
                for start in range(0, owner.job.samples_per_rank(), BATCH):
                    await take(owner, epoch, 0, start)
            assert [known.number for known in owner._epochs] == [0, 1, 2]
            assert await take(owner, 0, 0, 0) == first

    asyncio.run(run())


@pytest.mark.parametrize("policy", ["drain", "redox"])
def test_what_is_pinned_is_not_read_again(packed: tuple[str, Any], policy: str) -> None:
    async def run() -> None:
        async with owner_of(packed[0], 300_000, pinned_bytes=700_000, policy=policy, num_epochs=3) as owner:
            reads = owner.job.dataset.store.counters.operations["read_range"]
            total = int(owner.job.records.length.sum())
            for epoch in range(3):
                before, samples = reads.bytes, []
                for start in range(0, owner.job.samples_per_rank(), BATCH):
                    samples += await take(owner, epoch, 0, start)
                await reads_end(owner)
                assert len(set(samples)) == len(samples) == owner.job.layout.num_samples
                counts = owner.history[epoch].core
                if policy == "drain":
                    assert counts.bytes_pinned + counts.bytes_read == total
                    if epoch:
                        # All but the chunk at the end of what fits, and the headers between samples of a blob.
                        assert counts.bytes_pinned == pytest.approx(700_000, abs=8 * 4000)
                        assert reads.bytes - before == pytest.approx(total - 700_000, rel=0.5, abs=0)
                else:
                    assert epoch == 0 or counts.bytes_pinned > 700_000 * 0.9

    asyncio.run(run())


class Outage:
    """A store whose reads fail while it lasts."""

    def __init__(self, owner: Owner) -> None:
        self._dataset, self._read = owner.job.dataset, owner.job.dataset.read_samples

    def __enter__(self) -> None:
        async def fails(*_: Any) -> memoryview:
            await asyncio.sleep(0)
            raise StoreUnavailable("the store is away")

        self._dataset.read_samples = fails  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        self._dataset.read_samples = self._read  # type: ignore[method-assign]


async def until_it_comes(owner: Owner, epoch: int, rank: int, start: int) -> list[int]:
    for _ in range(50):
        try:
            return await take(owner, epoch, rank, start)
        except StoreUnavailable:
            continue
    raise AssertionError("the batch never came")


def test_an_outage_at_the_end_of_an_epoch_takes_no_more_memory(
    packed: tuple[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """What was to be read keeps its place, though the next epoch has been given all that is free."""

    async def run() -> None:
        limit = 3_000_000
        async with owner_of(packed[0], limit) as owner:
            with Outage(owner):
                with pytest.raises(StoreUnavailable):
                    await take(owner, 0, 0, 0)
                await reads_end(owner)
            received = []
            for start in range(0, owner.job.samples_per_rank(), BATCH):
                received += await until_it_comes(owner, 0, 0, start)
                held = sum(known.core.held_bytes for known in owner._epochs if not known.epoch.is_over)
                assert held <= limit
                assert owner.resident_bytes <= limit
            assert len(set(received)) == len(received) == owner.job.layout.num_samples

    asyncio.run(run())
    assert sum("a refill failed" in record.message for record in caplog.records) == 1, "an outage is one line"
    assert not [record for record in caplog.records if "never retrieved" in record.message]


def test_what_came_is_not_lost_to_what_failed(packed: tuple[str, Any]) -> None:
    """Samples of a batch that are read alone: each attempt keeps what it got."""

    async def run() -> None:
        async with owner_of(packed[0], 300_000, num_epochs=1) as owner:
            with Outage(owner), pytest.raises(StoreUnavailable):
                await take(owner, 0, 0, 0)
            read, count = owner.job.dataset.read_samples, 0

            async def every_third(records: Any, first: int, end: int) -> memoryview:
                nonlocal count
                count += 1
                if count % 3 == 0:
                    raise StoreUnavailable("the store stutters")
                return await read(records, first, end)

            owner.job.dataset.read_samples = every_third  # type: ignore[method-assign]
            owner._recent.limit_bytes = 1_000_000
            for attempt in range(8):
                try:
                    assert len(await take(owner, 0, 0, 0)) == BATCH
                    break
                except StoreUnavailable:
                    assert attempt < 7, "no progress"

    asyncio.run(run())


@pytest.mark.parametrize("policy", ["drain", "redox"])
def test_who_waits_for_the_end_of_an_epoch_is_woken_by_it(packed: tuple[str, Any], policy: str) -> None:
    async def run() -> None:
        async with owner_of(packed[0], 300_000, policy=policy, world_size=2) as owner:
            length = owner.job.samples_per_rank()
            for start in range(0, length, BATCH):
                await take(owner, 0, 0, start)
            waiting = asyncio.create_task(take(owner, 1, 0, 0))
            for start in range(0, length, BATCH):
                await asyncio.sleep(0)
                await take(owner, 0, 1, start)
            assert len(await asyncio.wait_for(waiting, 1)) == BATCH, "it slept until its time was over"

    asyncio.run(run())


def test_ending_a_job_wakes_who_waits_for_an_epoch(packed: tuple[str, Any]) -> None:
    async def run() -> None:
        async with owner_of(packed[0], 300_000, policy="redox", world_size=2) as owner:
            await take(owner, 0, 0, 0)
            waiting = asyncio.create_task(take(owner, 1, 0, 0))
            await asyncio.sleep(0.01)
            await owner.close(JobLost("the job was ended"))
            with pytest.raises(JobLost):
                await asyncio.wait_for(waiting, 1)

    asyncio.run(run())


def test_a_rank_that_asks_for_nothing_holds_nobody_up(packed: tuple[str, Any]) -> None:
    async def run() -> None:
        async with owner_of(packed[0], 300_000, order="explicit", world_size=2) as owner:
            for epoch in range(3):
                await owner.job.post_trace(epoch, 0, np.arange(100))
                await owner.job.post_trace(epoch, 1, np.arange(0))
                if epoch == 1:  # left early
                    await take(owner, epoch, 0, 0)
                    continue
                samples = [await take(owner, epoch, 0, start) for start in range(0, 100, BATCH)]
                assert sorted(sample for batch in samples for sample in batch) == list(range(100))

    asyncio.run(run())


def test_a_longer_trace_gets_the_room_of_epochs_that_nobody_can_ask_for_any_more(packed: tuple[str, Any]) -> None:
    """Those that all ranks have left, but for the last of them."""

    async def run() -> None:
        room = 2 * 4 * (256 + 100 * 13)
        async with owner_of(packed[0], 300_000, trace_bytes=room, order="explicit", world_size=2) as owner:
            job = owner.job
            ended: list[int] = []

            async def epoch_ended(epoch: int) -> None:
                ended.append(epoch)

            owner.books.epoch_ended = epoch_ended

            async def post(epoch: int, rank: int, length: int) -> None:
                with job.posted.arriving(length, epoch):
                    await job.post_trace(epoch, rank, 500 * rank + np.arange(length))

            for epoch in range(3):
                for rank in range(2):
                    await post(epoch, rank, 100)
                taken = []
                for rank in range(2) if epoch < 2 else [0]:
                    for start in range(0, 100, BATCH):
                        taken += await take(owner, epoch, rank, start)
            assert job.posted.epochs == [0, 1, 2]
            with pytest.raises(MemoryTooSmall, match="give it more memory_bytes, or post shorter traces"):
                await post(3, 0, 300)
            assert job.posted.epochs == [0, 1, 2], "rank 1 is in epoch 1, and may ask for 0 again"
            taken += await take(owner, 2, 1, 0)
            await post(3, 0, 300)
            assert job.posted.epochs == [1, 2, 3]
            with pytest.raises(EpochEnded):
                await owner.open(0, 1)
            for start in range(BATCH, 100, BATCH):
                taken += await take(owner, 2, 1, start)
            assert sorted(taken) == [*range(100), *range(500, 600)]
            await asyncio.gather(*owner.books.closing)
            assert ended == [0]

    asyncio.run(run())


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


@pytest.mark.parametrize("policy", ["drain", "redox"])
def test_what_the_pinned_tier_has_is_no_miss(packed: tuple[str, Any], policy: str) -> None:
    async def run() -> None:
        async with owner_of(packed[0], 300_000, pinned_bytes=10_000_000, policy=policy) as owner:
            for epoch in range(2):
                for start in range(0, owner.job.samples_per_rank(), BATCH):
                    await take(owner, epoch, 0, start)
            assert owner.history[0].core.misses > 0
            assert (owner.history[1].core.misses, owner.history[1].waited_takes) == (0, 0)

    asyncio.run(run())


def test_one_slow_read_holds_up_nobody_while_others_come(packed: tuple[str, Any]) -> None:
    """A read that never ends: batches that wait for the reserve go on with what comes after it."""

    async def run() -> None:
        async with owner_of(packed[0], 400_000, num_epochs=1) as owner:
            read, count = owner.job.dataset.read_samples, 0

            async def one_hangs(records: Any, first: int, end: int) -> memoryview:
                nonlocal count
                count += 1
                if count == 30:
                    await asyncio.Event().wait()
                await asyncio.sleep(0.005)
                return await read(records, first, end)

            owner.job.dataset.read_samples = one_hangs  # type: ignore[method-assign]
            owner._chunks._limit_bytes = 0  # each chunk by a read of its own
            for start in range(0, 20 * BATCH, BATCH):
                assert len(await asyncio.wait_for(take(owner, 0, 0, start), 2)) == BATCH, "a slow read stalls everybody"

    asyncio.run(run())


def test_a_rank_that_only_reported_counts_as_begun(packed: tuple[str, Any]) -> None:
    """All pods were killed: one that has learned what it had delivered says to the others who has begun."""

    async def run() -> None:
        async with owner_of(packed[0], 500_000, world_size=3) as owner:
            recollection = Recollection()
            recollection.add([Record(Kind.WHOLE, 0, rank) for rank in range(2)], source=1)
            owner.restore(recollection)
            begun = {
                record.rank: record.columns[0].tolist()
                for record in owner.job.life.opened()
                if record.kind is Kind.OPENED
            }
            assert begun == {0: [1], 1: [1]}
            assert any(record.kind is Kind.ALL_RANKS for record in owner.job.life.opened())

    asyncio.run(run())


def test_homes_that_a_rank_left_long_ago_are_forgotten(packed: tuple[str, Any]) -> None:
    """Nobody would report for it there any more, and whoever lost its memory would wait for that."""

    async def run() -> None:
        def homes(owner: Owner) -> dict[int, list[int]]:
            return {
                record.rank: record.columns[0].tolist()
                for record in owner.job.life.opened()
                if record.kind is Kind.OPENED
            }

        async with owner_of(packed[0], 500_000, world_size=2) as owner:
            owner.rank_opens(0, 0, home=0)
            owner.rank_opens(0, 1, home=1)
            owner.rank_opens(0, 0, home=2)
            assert homes(owner) == {0: [0, 2], 1: [1]}
            owner.rank_opens(1, 0, home=2)
            assert homes(owner)[0] == [0, 2], "what came in epoch 0 can still be asked for"
            owner.rank_opens(2, 0, home=2)
            assert homes(owner)[0] == [0, 2], "rank 1 is in epoch 0, and must not be given what rank 0 had of it"
            owner.rank_opens(2, 1, home=1)
            assert homes(owner) == {0: [2], 1: [1]}
            owner.rank_opens(1, 0, home=1)  # by a worker that is behind
            assert homes(owner)[0] == [1, 2]

        async with owner_of(packed[0], 500_000, world_size=1) as owner:
            recollection = Recollection()
            recollection.add([Record(Kind.WHOLE, 0, 0)], source=1)
            owner.restore(recollection)
            for epoch in (5, 6, 7):
                owner.rank_opens(epoch, 0, home=2)
                assert homes(owner)[0] == [1, 2], "what came by way of pod 1 may be of epoch 6"
            owner.rank_opens(8, 0, home=2)
            assert homes(owner)[0] == [2]

    asyncio.run(run())


def test_an_owner_that_went_on_without_a_rank_does_not_say_that_it_has_not_begun(packed: tuple[str, Any]) -> None:
    async def run() -> None:
        async with owner_of(packed[0], 500_000, world_size=2) as owner:
            recollection = Recollection()
            recollection.add([Record(Kind.WHOLE, 0, 0)], source=0)
            owner.restore(recollection, without=[1])
            assert not any(record.kind is Kind.ALL_RANKS for record in owner.job.life.opened())

    asyncio.run(run())


def test_an_epoch_whose_tail_was_dropped_is_still_answered_from_when_all_have_left_it(packed: tuple[str, Any]) -> None:
    """A training process resumes from a checkpoint of the epoch before: the same samples, and no new ones."""

    async def run() -> None:
        async with owner_of(packed[0], 300_000, world_size=3, drop_last=True) as owner:
            length = owner.job.samples_per_rank()
            received = {
                (rank, start): await take(owner, 0, rank, start)
                for rank in range(3)
                for start in range(0, length, BATCH)
            }
            for rank in range(3):
                await take(owner, 1, rank, 0)
            for (rank, start), samples in received.items():
                assert await take(owner, 0, rank, start) == samples

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
                        held = sum(len(running.payloads) for running in owner._epochs)
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
            owner.memory_is(kept_bytes, 0)
            read_alone = owner._epochs[0].counts.exact_reads
            for _ in range(2):
                left, stays = (asyncio.create_task(owner.exact(samples, repeats=True)) for _ in range(2))
                await asyncio.sleep(0)
                left.cancel()
                payloads = await stays
                for sample, payload in zip(samples.tolist(), payloads, strict=True):
                    owner.job.dataset.verify_sample(payload, owner.job.records, sample)
                await reads_end(owner)
            counts = owner._epochs[0].counts
            assert counts.exact_reads == read_alone, "read alone"
            read_once = kept_bytes or pinned_bytes
            assert counts.core.samples_read == (20 if read_once else 40), "once a turn, and not where it stayed"
            assert (counts.core.misses, counts.core.takes) == (0, 0), "no request was made"
            assert (
                owner.resident_bytes == owner._epochs[0].core.held_bytes == sum(map(len, payloads)) * bool(kept_bytes)
            )

    asyncio.run(run())


@pytest.mark.parametrize("known_from", [1, 2, 3])
def test_what_is_unknown_in_an_epoch_is_unknown_in_its_final_receipt(packed: tuple[str, Any], known_from: int) -> None:
    async def run() -> None:
        async with owner_of(packed[0], 300_000) as owner:
            final: dict[int, tuple[int, int]] = {}

            async def epoch_ended(epoch: int) -> None:
                receipt = await owner.books.receipt(epoch)
                final[epoch] = (receipt.missing, receipt.unknown)

            owner.books.epoch_ended = epoch_ended
            owner.job.life.unknown.known_from(0, known_from)
            length = owner.job.samples_per_rank()
            for epoch in range(known_from + 4):
                owner.rank_opens(epoch, 0, 0)
                left_out = BATCH if epoch < known_from else 0
                for start in range(0, length - left_out, BATCH):
                    await take(owner, epoch, 0, start)
                await asyncio.gather(*owner.books.closing)
            last_batch = (length - 1) % BATCH + 1
            for epoch in range(known_from):
                assert final[epoch] == (0, last_batch), f"(missing, unknown) of epoch {epoch}"
            assert final[known_from] == (0, 0), "all that it asked for is known"

    asyncio.run(run())
