"""Whose turn it is on the loop: who asks rarely does not wait for who always asks, and tasks are what they were."""

from __future__ import annotations

import asyncio
import functools
import gc
import operator
import time
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from refill_service.memory.loop_turns import COMERS, MANY_WAITING, STRANGERS, LoopTurns, in_turn, in_turn_of_team

PIECE_SECONDS = 0.002
PIECES = 30


def on_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    @functools.wraps(test)
    def run() -> None:
        uvloop.run(test())

    return run


def work() -> None:
    ends = time.thread_time() + PIECE_SECONDS
    while time.thread_time() < ends:
        pass


@on_a_loop
async def test_a_team_does_not_wait_for_all_tasks_of_another() -> None:
    turns, done = LoopTurns(), list[str]()

    async def steps(team: str) -> None:
        work()
        await asyncio.sleep(0)
        work()
        done.append(team)

    greedy = [asyncio.create_task(steps_of(turns, "greedy", steps("greedy"))) for _ in range(PIECES)]
    await asyncio.sleep(0)
    victim = asyncio.create_task(steps_of(turns, "victim", steps("victim")))
    await asyncio.gather(victim, *greedy)
    assert done.index("victim") < 5
    assert len(done) == PIECES + 1


@on_a_loop
async def test_strangers_get_less_than_a_team() -> None:
    turns, done = LoopTurns(), list[str]()

    async def steps(who: str) -> None:
        work()
        done.append(who)

    asked = [steps_of(turns, STRANGERS, steps("stranger")) for _ in range(PIECES)]
    asked += [steps_of(turns, "team", steps("team")) for _ in range(PIECES)]
    await asyncio.gather(*asked)
    assert done[:PIECES].count("team") > done[:PIECES].count("stranger")
    assert len(done) == 2 * PIECES


@pytest.mark.parametrize(("num_waiting", "of_team", "of_strangers"), [(4, 1, 1 / 4), (2 * MANY_WAITING, 1 / 2, 1 / 8)])
def test_while_a_batch_is_answered_others_who_always_ask_get_a_part_of_its_time(
    num_waiting: int, of_team: float, of_strangers: float
) -> None:
    """A team with few pieces waiting as much, one with many half of it; strangers and all who connect a quarter of
    that, together."""

    async def run() -> None:
        turns, used = LoopTurns(), Counter[str | None]()
        begun, is_over = asyncio.Event(), asyncio.Event()

        async def always(team: str | None) -> None:
            while not is_over.is_set():
                work()
                used[team] += 1
                if len(used) == 3:
                    begun.set()
                await asyncio.sleep(0)

        async def batch() -> None:
            for _ in range(4 * PIECES):
                work()
                await asyncio.sleep(0)

        asked = ["greedy", STRANGERS, COMERS] * num_waiting

        async def ask(team: str | None) -> None:
            await turns.run(team, always(team), functools.partial(operator.eq, team, COMERS))

        others = [asyncio.create_task(ask(team)) for team in asked]
        await begun.wait()
        before = used.copy()
        await turns.run("victim", batch())
        used.subtract(before)
        is_over.set()
        await asyncio.gather(*others)
        assert 0.7 * of_team < used["greedy"] / (4 * PIECES) < 1.1 * of_team
        assert 0.7 * of_strangers < (used[STRANGERS] + used[COMERS]) / (4 * PIECES) < 1.3 * of_strangers

    uvloop.run(run())


@on_a_loop
async def test_what_is_no_batch_waits_for_batches() -> None:
    """Also what turns out to be none, as a refused one."""
    turns, done = LoopTurns(), list[str]()

    async def steps(who: str) -> None:
        work()
        done.append(who)

    refused = [turns.run("greedy", steps("refused"), lambda: True) for _ in range(PIECES)]
    await asyncio.gather(*refused, *(turns.run("team", steps("batch")) for _ in range(PIECES)))
    assert done[:PIECES].count("batch") > 2 * done[:PIECES].count("refused")
    assert len(done) == 2 * PIECES


@on_a_loop
async def test_a_task_of_a_job_takes_its_teams_turns_whatever_began_it() -> None:
    turns, done = LoopTurns(), list[str]()

    async def piece(who: str) -> None:
        work()
        done.append(who)

    async def begin() -> None:
        reads = [in_turn_of_team(functools.partial(piece, "read")) for _ in range(PIECES)]
        await asyncio.gather(*map(asyncio.create_task, reads))

    batches = [turns.run("team", piece("batch")) for _ in range(PIECES)]
    await asyncio.gather(turns.run("greedy", begin(), lambda: True), *batches)
    assert PIECES // 3 < done[:PIECES].count("read") < PIECES * 2 // 3
    assert len(done) == 2 * PIECES
    await in_turn_of_team(functools.partial(piece, "without turns"))
    assert done[-1] == "without turns"


@on_a_loop
async def test_many_little_pieces_pay_for_what_the_loop_does_between_them() -> None:
    turns, done = LoopTurns(), list[str]()

    def loops_own() -> None:
        """Of no piece, as reading from a socket is."""
        ends = time.thread_time() + PIECE_SECONDS / 10
        while time.thread_time() < ends:
            pass

    async def little() -> None:
        for _ in range(20):
            asyncio.get_running_loop().call_soon(loops_own)
            await asyncio.sleep(0)
        done.append("little")

    async def large() -> None:
        work()
        done.append("large")

    asked = [turns.run("greedy", little()) for _ in range(PIECES)]
    await asyncio.gather(*asked, *(turns.run("team", large()) for _ in range(PIECES)))
    last = len(done) - done[::-1].index("little")
    assert done[:last].count("large") > PIECES // 2


@on_a_loop
async def test_what_waits_for_its_turn_can_be_cancelled_and_keeps_nobody_waiting() -> None:
    turns = LoopTurns()
    was_cancelled = list[int]()

    async def steps(number: int) -> int:
        try:
            work()
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            was_cancelled.append(number)
            raise
        return number

    tasks = [asyncio.create_task(steps_of(turns, "team", steps(number))) for number in range(PIECES)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    assert [each for each in found if isinstance(each, int)] == list(range(PIECES))[1::2]
    assert all(isinstance(each, asyncio.CancelledError) for each in found[::2])


@on_a_loop
async def test_errors_timeouts_and_parts_are_those_of_the_task() -> None:
    turns = LoopTurns()

    async def fails() -> None:
        await asyncio.sleep(0)
        raise LookupError("as it is")

    async def waits() -> str:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.Event().wait()
        with pytest.raises(LookupError, match="as it is"):
            await asyncio.gather(in_turn(fails()), in_turn(asyncio.sleep(0)))
        return "done"

    assert await turns.run("team", waits()) == "done"
    assert await in_turn(asyncio.sleep(0, "without turns")) == "without turns"


@on_a_loop
async def test_a_call_waits_for_its_turn_and_comes_once() -> None:
    turns, called, all_called = LoopTurns(), list[int](), asyncio.Event()

    def call(number: int) -> None:
        work()
        called.append(number)
        if number == 2:
            all_called.set()

    assert [turns.call("team", functools.partial(call, number)) for number in range(3)] == [True, False, False]
    await all_called.wait()
    assert called == [0, 1, 2]


@on_a_loop
async def test_what_was_read_for_pieces_counts_in_a_round() -> None:
    """A hundred pieces of large requests, each of which goes on with reading, would hold who comes up for 2 ms."""
    turns, called = LoopTurns(), list[int]()
    for number in range(100):
        turns.call("team", functools.partial(called.append, number), read_nanoseconds=100_000)
    in_rounds = [len(called)]
    while len(called) < 100:
        before = len(called)
        await asyncio.sleep(0)
        in_rounds.append(len(called) - before)
    assert called == list(range(100))
    assert max(in_rounds) <= 5


@on_a_loop
async def test_what_is_given_up_leaves_no_garbage() -> None:
    """Nothing that holds itself: Python looks for that seldom in a pod."""

    class Held:
        pass

    async def steps(held: Held) -> None:
        await asyncio.gather(*(in_turn(asyncio.sleep(3600)) for _ in range(2)))  # it keeps what it raises

    held = Held()
    is_held = weakref.ref(held)
    task = asyncio.create_task(steps_of(LoopTurns(), "team", steps(held)))
    del held
    for _ in range(3):
        await asyncio.sleep(0)
    gc.disable()
    try:
        task.cancel()
        await asyncio.wait([task])
        del task
        await asyncio.sleep(0)
        assert is_held() is None
    finally:
        gc.enable()


async def steps_of(turns: LoopTurns, team: str | None, steps: Coroutine[Any, Any, Any]) -> Any:
    return await turns.run(team, steps)
