"""Whose turn is it to use the pod's loop? Teams take turns by the CPU time that they have used of it, strangers last.

A loop goes on with whatever comes first. So a team that asks on 200 connections would have it for 200 requests, between
two of another team. Here what is to run waits, in pieces from one ``await`` to the next, for its team's turn
(:mod:`refill_service.cache_core.fair_queue`): while two teams both have something to run, they get the same time,
however many requests that is. But for two things. A pod is there for batches: all else that a team asks for counts four
times, and so does what strangers ask for, who have shown no token and are one team together, with those who connect.
And who has let many pieces pile up pays up to twice: a team that asks for one batch after another on a few connections
has nothing to do meanwhile, and one that asks on hundreds waits for a queue of its own. In one round of the loop pieces
run for no more than half a millisecond or one of them: then it looks who else has come.

What the loop does between pieces (writing, looking who has come) can't be told by team; the piece that comes next pays
for it, to a limit. Else who asks for many little things would have it for nothing. What was read for a piece counts as
a part of it. Else a hundred little pieces of large requests would fit into a round, and bring 2 ms of reading after it.

While nobody waits and a round has time left, a piece runs at once; that costs two looks at the clock.
"""

from __future__ import annotations

import asyncio
import time
import types
from collections.abc import Callable, Coroutine, Generator, Iterable
from contextlib import suppress
from contextvars import Context, ContextVar
from functools import partial
from typing import Any, NamedTuple, TypeVar

from refill_service.cache_core.fair_queue import FairQueue, Waiting

STRANGERS = None
"""In place of a team's name: all who have shown no token."""
COMERS = "/"
"""The same: all who connect, until they can be heard. As strangers each of them would wait, one after another, for
whatever all strangers ask, and a team whose connections broke for hours. No team's name has a slash."""
KEEPERS = "//"
"""The same: all who ask at the port for those who look after the pod. Behind strangers a kubelet's probe would come too
late, and the pod would be ended for it."""
MANY_WAITING = 64
"""Pieces that wait for a team. Each of its pieces counts twice then, and with fewer for less."""

_ROUND_NANOSECONDS = 500_000
_MOST_BETWEEN_NANOSECONDS = 100_000
"""That a piece pays for what came before it. More is work that takes no turns, or the machine's."""
_SAVED_NANOSECONDS = 10_000_000
"""By a team that had less than its part: a batch now and then does not wait, piece by piece, for who always asks."""
_ROUNDS_FOR_LAST = 2
"""That the loop waits for the next piece of what ran last, where it would go before those that wait: asyncio takes so
many from the end of two tasks to whoever waits for both. Else a batch of five pieces would wait five times."""
_TIMES_AS_DEAR = 4
_MOST_GIVEN_UP = 1 << 7
"""Tasks that end together, some 50 us each: there may be as many reads as a job has chunks."""

Result = TypeVar("Result")


def _new_queue() -> FairQueue[Callable[[], None]]:
    return FairQueue(_SAVED_NANOSECONDS, lambda team: STRANGERS if team == COMERS else team)


def _never() -> bool:
    return False


class _Asker(NamedTuple):
    """Tasks keep it: nothing of a request is in it."""

    turns: LoopTurns
    team: str | None
    is_dear: bool
    """When it began."""


_ASKER: ContextVar[_Asker | None] = ContextVar("whose turns the task that runs takes", default=None)


class LoopTurns:
    """Gives teams their turns on the loop that all servers of a pod share."""

    def __init__(self) -> None:
        self._waiting = _new_queue()
        self._used_nanoseconds = 0
        """In this round of the loop."""
        self._charged_until = 0
        """By the clock of the thread."""
        self._looks_next_round = False
        self._was_given = False
        """To a task that has not gone on since."""
        self._last: str | None = STRANGERS
        """Whose piece ran last."""
        self._rounds_for_last = 0

    def call(
        self,
        team: str | None,
        piece: Callable[[], None],
        is_dear: Callable[[], bool] = _never,
        read_nanoseconds: int = 0,
    ) -> bool:
        """Have ``piece`` called in the team's turn. False: later.

        :param is_dear: asked behind it: whether it was for something else than a batch.
        :param read_nanoseconds: what it took to read that which the piece is for.
        """
        if not self._is_free():
            self._wait(team, partial(self._call, team, piece, is_dear, read_nanoseconds))
            return False
        self._call(team, piece, is_dear, read_nanoseconds)
        return True

    @types.coroutine
    def run(
        self,
        team: str | None,
        steps: Coroutine[Any, Any, Result],
        is_dear: Callable[[], bool] = _never,
        *,
        only_behind_others: bool = False,
    ) -> Generator[Any, Any, Result]:
        """Await ``steps``, each of which waits for the team's turn.

        :param is_dear: asked behind each: whether they are for something else than a batch.
        :param only_behind_others: they wait, and count, only while another team waits.
        """
        _ASKER.set(_Asker(self, team, is_dear()))
        go_on = partial(steps.send, None)
        try:
            while True:
                counts = not only_behind_others or self._waiting.has_others(team)
                try:
                    if counts and not self._is_free():
                        yield from self._turn(team).__await__()
                except asyncio.CancelledError as error:
                    go_on = partial(steps.throw, error)
                started = time.thread_time_ns()
                try:
                    waits_for = [go_on()]
                except StopIteration as end:
                    result: Result = end.value
                    return result
                finally:
                    del go_on  # what is raised holds this frame, which must not hold it: circular garbage
                    if counts:
                        self._has_used(team, started, is_dear)
                try:
                    go_on = partial(steps.send, (yield waits_for.pop()))
                except Exception as error:
                    go_on = partial(steps.throw, error)
                except asyncio.CancelledError as error:
                    go_on = partial(steps.throw, error)
        finally:
            steps.close()

    def _is_free(self) -> bool:
        return not self._waiting and not self._was_given and self._used_nanoseconds < _ROUND_NANOSECONDS

    async def _turn(self, team: str | None) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting = self._wait(team, partial(self._give, turn))
        try:
            await turn
        except asyncio.CancelledError:
            with suppress(KeyError, ValueError):  # not there: it was given, or passed over
                self._waiting.discard(waiting)
            raise
        finally:
            if not turn.cancelled():
                self._was_given = False  # what goes on now runs at once

    def _wait(self, team: str | None, piece: Callable[[], None]) -> Waiting[Callable[[], None]]:
        waiting = Waiting(team, 0, piece)
        self._waiting.put(waiting)
        self._look_next_round()
        return waiting

    def _give(self, turn: asyncio.Future[None]) -> None:
        if not turn.cancelled():
            self._was_given = True
            turn.set_result(None)

    def _call(
        self, team: str | None, piece: Callable[[], None], is_dear: Callable[[], bool], read_nanoseconds: int
    ) -> None:
        _ASKER.set(_Asker(self, team, is_dear()))  # of what the piece begins
        started = time.thread_time_ns()
        try:
            piece()
        finally:
            self._has_used(team, started, is_dear, read_nanoseconds)

    def _has_used(self, team: str | None, started: int, is_dear: Callable[[], bool], read_nanoseconds: int = 0) -> None:
        ended = time.thread_time_ns()
        self._used_nanoseconds += ended - started + read_nanoseconds
        between = min(started - self._charged_until, _MOST_BETWEEN_NANOSECONDS)
        nanoseconds = ended - started + max(between, read_nanoseconds)
        self._charged_until = ended
        self._last, self._rounds_for_last = team, _ROUNDS_FOR_LAST
        if team is STRANGERS or is_dear():
            nanoseconds *= _TIMES_AS_DEAR
        nanoseconds += nanoseconds * min(self._waiting.num_waiting(team), MANY_WAITING) // MANY_WAITING
        self._waiting.charge(team, nanoseconds)
        self._look_next_round()

    def _look_next_round(self) -> None:
        if not self._looks_next_round:
            self._looks_next_round = True
            asyncio.get_running_loop().call_soon(self._next_round, context=Context())

    def _next_round(self) -> None:
        self._looks_next_round = False
        self._used_nanoseconds = 0
        while self._waiting and not self._was_given and self._used_nanoseconds < _ROUND_NANOSECONDS:
            if self._rounds_for_last and not self._waiting.has(self._last) and self._waiting.would_be_next(self._last):
                self._rounds_for_last -= 1
                break
            first = next(self._waiting.heads())
            self._waiting.serve(first)
            first.item()
        if self._waiting:
            self._look_next_round()
        elif not self._was_given:
            # Nobody has to wait for what was used while nobody else wanted it.
            self._waiting = _new_queue()


async def in_turn(steps: Coroutine[Any, Any, Result]) -> Result:
    """For a task that is a part of what this one runs: it has the same team's turns, if this one has any."""
    found = _ASKER.get()
    return await (steps if found is None else found.turns.run(found.team, steps, lambda: found.is_dear))


async def in_turn_of_team(steps: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """For a task of a job, which outlives what this one runs: while others wait it has its team's turns, and counts as
    batches do. Else it costs nothing more than without turns.

    :param steps: called when the task begins, which may be cancelled before.
    """
    found = _ASKER.get()
    if found is None:
        return await steps()
    return await found.turns.run(found.team, steps(), only_behind_others=True)


async def all_done(*work: Coroutine[Any, Any, Result]) -> list[Result]:
    """Run all to their end, then raise the first error: what one owner answered is not lost to another's failure."""
    if len(work) == 1:
        return [await work[0]]
    try:
        results = await asyncio.gather(*map(in_turn, work), return_exceptions=True)
    finally:
        for each in work:
            each.close()  # who was cancelled before it began
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


async def given_up(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel them, a few at a time, and wait until they have ended."""
    left = list(tasks)
    for start in range(0, len(left), _MOST_GIVEN_UP):
        piece = left[start : start + _MOST_GIVEN_UP]
        for task in piece:
            task.cancel()
        await asyncio.gather(*piece, return_exceptions=True)
