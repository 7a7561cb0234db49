"""Who waits for a fact wakes when it holds, whatever else changes before."""

from __future__ import annotations

import asyncio

import pytest

from refill_service.jobs.changes import Changes


def test_all_who_wait_look_again_at_each_change() -> None:
    async def run() -> None:
        changes, facts = Changes(), set[str]()
        waiting = [asyncio.create_task(changes.wait_until(lambda name=name: name in facts)) for name in "aab"]
        for name, done in (("x", [False] * 3), ("a", [True, True, False]), ("b", [True] * 3)):
            await asyncio.sleep(0)  # each waits now
            facts.add(name)
            changes.happened()
            for _ in range(3):
                await asyncio.sleep(0)
            assert [task.done() for task in waiting] == done, f"after {name}"
        await changes.wait_until(lambda: True)  # holds already

    asyncio.run(run())


def test_a_change_that_does_not_come_can_be_given_up() -> None:
    async def run() -> None:
        changes = Changes()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await changes.wait_until(lambda: False)

    asyncio.run(run())
