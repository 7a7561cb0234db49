"""Do requests wait for other ranks as long as they may, and no more when the pod ends?"""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from refill_service.jobs.waits import Changes, RankWaits
from refill_service.memory.loop_turns import given_up


def test_who_waits_is_answered_at_once_when_the_pod_ends() -> None:
    async def end_while_some_wait() -> list[object]:
        waits, came = RankWaits(3600), Changes()
        waiting = [asyncio.create_task(waits.until(came, lambda: False)) for _ in range(3)]
        await asyncio.sleep(0)
        waits.end()
        waits.end()  # twice is once
        return await asyncio.gather(*waiting, return_exceptions=True)

    assert [type(found) for found in asyncio.run(end_while_some_wait())] == [TimeoutError] * 3


def test_who_comes_later_does_not_wait() -> None:
    async def come_late() -> None:
        waits, came = RankWaits(3600), Changes()
        waits.end()
        await waits.until(came, lambda: True)
        with pytest.raises(TimeoutError):
            await waits.until(came, lambda: False)

    asyncio.run(come_late())


def test_all_who_wait_look_again_at_each_change() -> None:
    async def run() -> None:
        changes, facts = Changes(), set[str]()
        waiting = [asyncio.create_task(changes.wait_until(lambda name=name: name in facts)) for name in "aab"]  # type: ignore[misc]
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


def test_thousands_of_tasks_are_given_up_a_few_at_a_time() -> None:
    """A loop that ends all of them in one piece answers nobody meanwhile."""

    async def run() -> None:
        tasks = [asyncio.create_task(asyncio.sleep(3600)) for _ in range(2000)]
        await asyncio.sleep(0)
        left, ending = [len(tasks)], asyncio.create_task(given_up(tasks))
        while not ending.done():
            await asyncio.sleep(0)
            left.append(sum(not task.done() for task in tasks))
        assert left[-1] == 0
        assert max(before - after for before, after in pairwise(left)) <= 128

    asyncio.run(run())


def test_what_comes_as_the_time_ends_has_come() -> None:
    """Of a process that stood still, both are seen in one round of the loop."""

    async def waits() -> None:
        changes, came = Changes(), list[int]()

        def comes() -> None:
            came.append(1)
            changes.happened()

        asyncio.get_running_loop().call_soon(comes)
        await RankWaits(0).until(changes, lambda: bool(came))

    asyncio.run(waits())
