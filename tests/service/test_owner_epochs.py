"""Does an owner give every sample once in each of several epochs, and go from one to the next in time?"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from tests.service.lone_owner import BATCH, owner_of, reads_end, take
from tests.waiting import until_in_loop

from refill.errors import EpochEnded, JobLost, MemoryTooSmall


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.variant) for seed in range(1, 6))])
@pytest.mark.parametrize("policy", ["exact", "redox"])
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
                        for _ in range(chooser.randrange(1 + 20 * rank)):
                            await asyncio.sleep(0)

            await asyncio.gather(*(rank_runs(rank) for rank in range(3)))
            for epoch, samples in received.items():
                counts = Counter(samples)
                assert len(counts) == len(samples) == owner.job.layout.num_samples, f"epoch {epoch} is not exact"

    asyncio.run(run())


def test_the_next_epoch_is_loaded_before_it_is_asked_for(packed: tuple[str, Any]) -> None:
    async def run() -> None:
        async with owner_of(packed[0], 500_000, policy="exact") as owner:
            length = owner.job.samples_per_rank()
            for start in range(0, length, BATCH):
                await take(owner, 0, 0, start)
            await reads_end(owner)
            assert owner.history[1].core.refills > 0, "nothing was loaded for the next epoch"
            assert 400_000 < owner.resident_bytes <= 500_000, "the memory that the epoch left is not filled"

    asyncio.run(run())


def test_nothing_is_loaded_after_the_last_epoch(packed: tuple[str, Any]) -> None:
    async def run() -> None:
        async with owner_of(packed[0], 500_000, policy="exact", num_epochs=2) as owner:
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
        async with owner_of(packed[0], 10_000_000, policy="exact", world_size=2) as owner:
            for rank in range(2):
                await take(owner, 0, rank, 0)
            await reads_end(owner)
            left = asyncio.create_task(take(owner, 1, 0, 0))  # it waits for the other rank
            await take(owner, 0, 1, BATCH)  # which goes on, then leaves, too
            received = [await take(owner, 1, 1, start) for start in range(0, owner.job.samples_per_rank(), BATCH)]
            received += [await left]
            received += [await take(owner, 1, 0, start) for start in range(BATCH, owner.job.samples_per_rank(), BATCH)]
            assert sorted(sample for batch in received for sample in batch) == list(range(owner.job.layout.num_samples))
            assert owner.epochs[0].payloads.num_bytes == 0, "the epoch that was left still holds samples"
            with pytest.raises(EpochEnded, match="left epoch 0"):
                await take(owner, 0, 1, 2 * BATCH)

    asyncio.run(run())


def test_two_epochs_before_can_be_asked_again_while_the_next_is_under_way(packed: tuple[str, Any]) -> None:
    async def run() -> None:
        async with owner_of(packed[0], 10_000_000) as owner:
            first = await take(owner, 0, 0, 0)
            for epoch in range(2):
                for start in range(0, owner.job.samples_per_rank(), BATCH):
                    await take(owner, epoch, 0, start)
            await take(owner, 2, 0, 0)
            assert [known.number for known in owner.epochs] == [0, 1, 2]
            assert await take(owner, 0, 0, 0) == first

    asyncio.run(run())


@pytest.mark.parametrize("policy", ["exact", "redox"])
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
            await until_in_loop(lambda: owner.epoch == 1, "the rank's question")
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
            await asyncio.gather(*(take(owner, 1, rank, 0) for rank in range(3)))
            for (rank, start), samples in received.items():
                assert await take(owner, 0, rank, start) == samples

    asyncio.run(run())
