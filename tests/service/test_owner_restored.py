"""What does an owner know of a rank from reports alone, and what does it call unknown?"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.service.lone_owner import BATCH, owner_of, take

from refill.protocol.records import Kind, Record
from refill_service.cache_core.recollection import Recollection
from refill_service.jobs.owner import Owner


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
