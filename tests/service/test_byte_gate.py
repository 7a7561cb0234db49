"""The gate in front of the store: what fits goes in, in the order of asking, and no cancellation loses room."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.draws import draws

from refill_service.cache_core.fair_queue import Need
from refill_service.cache_core.shared_room import Asker
from refill_service.memory.byte_gate import ByteGate


class Visitor:
    """Someone at the gate: ``inside`` is set once it is let in; it leaves when told, or is cancelled."""

    def __init__(
        self,
        gate: ByteGate,
        size_bytes: int,
        due: int | None = None,
        job: str = "",
        near: int | None = None,
        ahead: int | None = None,
    ) -> None:
        self._job = job
        self.need = Need(due, near, ahead)
        self.size_bytes = size_bytes
        self.inside = asyncio.Event()
        self._leave = asyncio.Event()
        self.task = asyncio.create_task(self._visit(gate))

    async def _visit(self, gate: ByteGate) -> None:
        async with gate.passage(self.size_bytes, self._job, need=self.need):
            self.inside.set()
            try:
                await self._leave.wait()
            finally:
                self.inside.clear()

    def leave(self) -> None:
        self._leave.set()


async def settle() -> None:
    """Let every task go on until none can."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_lets_in_what_fits_in_the_order_of_asking() -> None:
    async def run() -> None:
        gate = ByteGate(100)
        first, second, third, small = (Visitor(gate, size) for size in (60, 40, 50, 1))
        await settle()
        assert first.inside.is_set(), "an empty gate refused what fits"
        assert second.inside.is_set(), "60 + 40 bytes fit under 100"
        assert not third.inside.is_set(), "150 bytes inside a gate of 100"
        assert not small.inside.is_set(), "a small one overtook one that waits: large ones would wait for ever"
        assert gate.used_bytes == 100
        first.leave()
        await settle()
        assert third.inside.is_set(), "room was free and the first that waits was not let in"
        assert gate.used_bytes == 90 + 1, "the one behind fits too"
        for visitor in (second, third, small):
            visitor.leave()
        await asyncio.gather(first.task, second.task, third.task, small.task)
        assert gate.used_bytes == 0

    asyncio.run(run())


def test_what_is_larger_than_the_gate_goes_alone() -> None:
    async def run() -> None:
        gate = ByteGate(100)
        before, large, after = (Visitor(gate, size) for size in (10, 1000, 10))
        await settle()
        assert (before.inside.is_set(), large.inside.is_set(), after.inside.is_set()) == (True, False, False)
        before.leave()
        await settle()
        assert (large.inside.is_set(), after.inside.is_set()) == (True, False), "the large one must be alone"
        large.leave()
        await settle()
        assert after.inside.is_set()
        after.leave()
        await asyncio.gather(before.task, large.task, after.task)
        assert gate.used_bytes == 0

    asyncio.run(run())


def test_opens_by_what_has_come_through() -> None:
    async def run() -> None:
        gate = ByteGate(100, opens_with_bytes=20)
        visitors = [Visitor(gate, 10) for _ in range(20)]
        inside = []
        for _ in range(5):
            await settle()
            inside.append([visitor for visitor in visitors if visitor.inside.is_set()])
            for visitor in inside[-1]:
                visitor.leave()
        assert [len(round_) for round_ in inside] == [2, 4, 8, 6, 0], "twice as many each round, up to the limit"
        await asyncio.gather(*(visitor.task for visitor in visitors))
        visitors = [Visitor(gate, 10) for _ in range(3)]
        await settle()
        assert sum(v.inside.is_set() for v in visitors) == 2, "a gate that nobody uses opens a little again"
        for visitor in visitors:
            visitor.leave()
        await asyncio.gather(*(visitor.task for visitor in visitors))

    asyncio.run(run())


def test_what_somebody_waits_for_goes_before_the_rest_what_is_due_first_in_front() -> None:
    async def run() -> None:
        gate = ByteGate(10)
        dues = [0, None, 7, 3, None]
        visitors = [Visitor(gate, 10, due=due) for due in dues]
        came = []
        for _ in dues:
            await settle()
            (inside,) = (number for number, visitor in enumerate(visitors) if visitor.inside.is_set())
            came.append(inside)
            visitors[inside].leave()
        await asyncio.gather(*(visitor.task for visitor in visitors))
        assert came == [0, 3, 2, 1, 4]

    asyncio.run(run())


def test_what_somebody_will_wait_for_soonest_goes_before_what_waits_longer() -> None:
    """A pod has several shares of a job, and orders much of one before some of the next."""

    async def run() -> None:
        gate = ByteGate(10)
        aheads = [0, 5, 9, 2, 7]
        visitors = [Visitor(gate, 10, ahead=ahead) for ahead in aheads]
        await settle()
        visitors[2].need.is_due(9)
        came = []
        for _ in aheads:
            await settle()
            (inside,) = (number for number, visitor in enumerate(visitors) if visitor.inside.is_set())
            came.append(inside)
            visitors[inside].leave()
        await asyncio.gather(*(visitor.task for visitor in visitors))
        assert came == [0, 2, 3, 1, 4]

    asyncio.run(run())


def test_what_waits_already_goes_first_as_soon_as_somebody_waits_for_it() -> None:
    async def run() -> None:
        gate = ByteGate(10, opens_with_bytes=1)
        visitors = [Visitor(gate, 10) for _ in range(4)]
        await settle()
        visitors[3].need.is_due(5)
        visitors[2].need.is_due(3)
        visitors[0].need.is_due(0)  # it is inside, and has begun long since
        came = []
        for _ in visitors:
            await settle()
            (inside,) = (number for number, visitor in enumerate(visitors) if visitor.inside.is_set())
            came.append(inside)
            visitors[inside].leave()
        await asyncio.gather(*(visitor.task for visitor in visitors))
        assert came == [0, 2, 3, 1]
        visitors[1].need.is_due(0)  # it has gone

    asyncio.run(run())


def test_what_is_due_earlier_than_was_known_goes_first() -> None:
    async def run() -> None:
        gate = ByteGate(10)
        visitors = [Visitor(gate, 10, due=due) for due in (0, 7, 9)]
        await settle()
        visitors[2].need.is_due(3)
        visitors[1].need.is_due(8)  # another one waits for it, too, further on
        visitors[0].leave()
        await settle()
        assert [visitor.inside.is_set() for visitor in visitors] == [False, False, True]
        for visitor in visitors:
            visitor.leave()
        await asyncio.gather(*(visitor.task for visitor in visitors))

    asyncio.run(run())


def test_what_is_far_ahead_of_another_one_may_have_half_of_its_jobs_share() -> None:
    """Its job may have four times what is left free: 80."""

    async def run() -> None:
        gate = ByteGate(100, most_of_free=4)
        first, *ahead = (Visitor(gate, 20, due, "a", near=10) for due in (50, 100, 105, 110))
        await settle()
        assert [each.inside.is_set() for each in ahead] == [True, False, False]
        earlier, near = (Visitor(gate, 20, due, "a", near=10) for due in (0, 9))
        await settle()
        assert earlier.inside.is_set(), "what is needed first is kept out by what is not"
        assert near.inside.is_set()
        other = Visitor(gate, 4, 1000, "b", near=10)
        await settle()
        assert other.inside.is_set(), "it is not far ahead of any of its own job"
        for visitor in (first, earlier, near):
            visitor.leave()
        await settle()
        assert [each.inside.is_set() for each in ahead] == [True, True, True], "they are the first now"
        for visitor in (*ahead, other):
            visitor.leave()
        await settle()
        assert gate.used_bytes == 0

    asyncio.run(run())


def test_what_becomes_due_is_let_in_at_once_where_the_gate_has_room_for_it() -> None:
    async def run() -> None:
        gate = ByteGate(100, opens_with_bytes=10)
        visitors = [Visitor(gate, 10) for _ in range(3)]
        await settle()
        assert [visitor.inside.is_set() for visitor in visitors] == [True, False, False]
        visitors[2].need.is_due(0)
        await settle()
        assert [visitor.inside.is_set() for visitor in visitors] == [True, False, True]
        visitors[1].task.cancel()
        for visitor in visitors:
            visitor.leave()
        await asyncio.gather(*(visitor.task for visitor in visitors), return_exceptions=True)
        assert gate.used_bytes == 0

    asyncio.run(run())


def test_what_somebody_waits_for_is_not_held_up_by_a_gate_that_opens_slowly() -> None:
    async def run() -> None:
        gate = ByteGate(100, opens_with_bytes=10)
        visitors = [*(Visitor(gate, 10) for _ in range(3)), *(Visitor(gate, 30, due=place) for place in range(4))]
        await settle()
        assert [visitor.inside.is_set() for visitor in visitors] == [True, False, False, True, True, True, False]
        for visitor in visitors:
            visitor.leave()
        await asyncio.gather(*(visitor.task for visitor in visitors))

    asyncio.run(run())


def test_no_more_are_inside_than_may_be() -> None:
    async def run() -> None:
        gate = ByteGate(100, limit_visitors=2)
        visitors = [Visitor(gate, 0, due=due) for due in (None, 0, 1)]
        await settle()
        assert [visitor.inside.is_set() for visitor in visitors] == [True, True, False]
        visitors[0].leave()
        await settle()
        assert visitors[2].inside.is_set()
        for visitor in visitors:
            visitor.leave()
        await asyncio.gather(*(visitor.task for visitor in visitors))

    asyncio.run(run())


@pytest.mark.parametrize(
    ("size_bytes", "others", "is_doubled"),
    [(40, [], True), (60, [], False), (30, [40], True), (30, [50], False), (1, [1], True), (1, [1, 1], False)],
)
def test_what_is_inside_counts_twice_where_there_is_room_to_spare(
    size_bytes: int, others: list[int], is_doubled: bool
) -> None:
    async def run() -> None:
        gate = ByteGate(100, opens_with_bytes=1, limit_visitors=3)
        async with gate.passage(size_bytes, "a") as passage:
            visitors = [Visitor(gate, each, due=0, job="b") for each in others]
            await settle()
            with passage.doubled() as found:
                assert found == is_doubled
                assert gate.used_bytes == sum(others) + size_bytes * (1 + is_doubled)
            assert gate.used_bytes == sum(others) + size_bytes
            for visitor in visitors:
                visitor.leave()
            waits = Visitor(gate, 101)
            await settle()
            with passage.doubled() as found:
                assert not found, "somebody waits for that room"
        waits.leave()
        await asyncio.gather(waits.task, *(visitor.task for visitor in visitors))
        assert (gate.used_bytes, gate.inside_bytes) == (0, 0)
        await visit(gate, 100)

    asyncio.run(run())


def _waiting(inside: Visitor, first: Visitor, second: Visitor) -> None:
    first.task.cancel()


def _inside(inside: Visitor, first: Visitor, second: Visitor) -> None:
    inside.task.cancel()


def _waiting_while_room_comes_free(inside: Visitor, first: Visitor, second: Visitor) -> None:
    inside.leave()
    first.task.cancel()


def _all_at_once(inside: Visitor, first: Visitor, second: Visitor) -> None:
    for visitor in (inside, first, second):
        visitor.task.cancel()


def _the_last_first(inside: Visitor, first: Visitor, second: Visitor) -> None:
    for visitor in (second, first, inside):
        visitor.task.cancel()


@pytest.mark.parametrize(
    "cancel",
    [_waiting, _inside, _waiting_while_room_comes_free, _all_at_once, _the_last_first],
    ids=lambda f: f.__name__,
)
def test_a_cancellation_loses_no_room(cancel: Callable[[Visitor, Visitor, Visitor], None]) -> None:
    async def run() -> None:
        gate = ByteGate(100)
        visitors = [Visitor(gate, 80) for _ in range(3)]
        await settle()
        cancel(*visitors)
        for visitor in visitors:
            visitor.leave()
        ends = await asyncio.gather(*(visitor.task for visitor in visitors), return_exceptions=True)
        wrong = [end for end in ends if end is not None and not isinstance(end, asyncio.CancelledError)]
        assert not wrong, f"a cancelled visit ended with {wrong[0]!r}"
        assert gate.used_bytes == 0, f"{gate.used_bytes} bytes are counted as inside, and nobody is"
        await asyncio.wait_for(visit(gate, 100), 1)

    asyncio.run(run())


def test_an_error_inside_frees_the_room() -> None:
    async def run() -> None:
        gate = ByteGate(10)
        with pytest.raises(OSError, match="store"):
            async with gate.passage(10):
                raise OSError("store")
        await asyncio.wait_for(visit(gate, 10), 1)

    asyncio.run(run())


@draws(60)
@given(
    st.lists(
        st.tuples(st.sampled_from(["come", "hurry", "leave", "cancel", "go on"]), st.integers(0, 120)), max_size=40
    ),
    st.sampled_from([None, 1, 30]),
)
def test_never_more_inside_than_the_limit_and_nothing_left_behind(
    steps: list[tuple[str, int]], opens_with_bytes: int | None
) -> None:
    async def run() -> None:
        gate, visitors = ByteGate(100, opens_with_bytes), []
        for step, number in steps:
            if step in ("come", "hurry"):
                visitors.append(Visitor(gate, number, due=number if step == "hurry" else None))
            elif step == "go on":
                await settle()
            elif visitors:
                visitor = visitors[number % len(visitors)]
                visitor.leave() if step == "leave" else visitor.task.cancel()
            sizes = [visitor.size_bytes for visitor in visitors if visitor.inside.is_set()]
            assert sum(sizes) <= 100 or sum(size > 0 for size in sizes) == 1, f"{sizes} are inside a gate of 100"
        for visitor in visitors:
            visitor.leave()
        ends = await asyncio.wait_for(asyncio.gather(*(v.task for v in visitors), return_exceptions=True), 2)
        assert all(end is None or isinstance(end, asyncio.CancelledError) for end in ends), ends
        assert gate.used_bytes == 0, f"{gate.used_bytes} bytes stay counted after all have left"

    asyncio.run(run())


def visit(gate: ByteGate, size_bytes: int) -> Coroutine[Any, Any, None]:
    async def through() -> None:
        async with gate.passage(size_bytes):
            pass

    return through()


def test_a_small_job_gets_its_turn_beside_a_greedy_one() -> None:
    async def run() -> None:
        gate, order = ByteGate(10), []

        async def through(job: str) -> None:
            async with gate.passage(10, job):
                order.append(job)

        before = Visitor(gate, 10)
        await settle()
        waiting = [asyncio.create_task(through("greedy")) for _ in range(100)]
        await settle()
        waiting += [asyncio.create_task(through("small")) for _ in range(5)]
        await settle()
        before.leave()
        await asyncio.gather(before.task, *waiting)
        assert order[:10].count("small") == 5, f"a small job waited behind all of a greedy one: {order}"

    asyncio.run(run())


def test_a_team_with_many_jobs_gets_no_more_of_the_store_than_one_with_one() -> None:
    async def run() -> None:
        gate, order = ByteGate(10), list[str]()

        async def through(team: str, job: str) -> None:
            async with gate.passage(10, Asker(team, job)):
                order.append(team)

        before = Visitor(gate, 10)
        await settle()
        many = [asyncio.create_task(through("many", f"job-{number % 20}")) for number in range(100)]
        one = [asyncio.create_task(through("one", "job")) for _ in range(20)]
        await settle()
        before.leave()
        await asyncio.gather(before.task, *many, *one)
        assert 18 <= order[:40].count("one") <= 20

    asyncio.run(run())


def test_a_job_that_reads_large_chunks_does_not_wait_for_thousands_of_single_bytes() -> None:
    async def run() -> None:
        gate, order = ByteGate(1000, limit_visitors=1, least_bytes=100), list[str]()

        async def through(job: str, size_bytes: int) -> None:
            async with gate.passage(size_bytes, job):
                order.append(job)

        before = Visitor(gate, 10)
        await settle()
        bytes_ = [asyncio.create_task(through("bytes", 1)) for _ in range(1000)]
        chunks = [asyncio.create_task(through("chunks", 400)) for _ in range(10)]
        await settle()
        before.leave()
        await asyncio.gather(before.task, *bytes_, *chunks)
        last = len(order) - order[::-1].index("chunks")
        assert order[:last].count("bytes") <= 10 * 400 / 100

    asyncio.run(run())


def test_a_job_leaves_room_for_others_even_when_nobody_leaves() -> None:
    async def run() -> None:
        gate = ByteGate(100, most_of_free=4)
        greedy = [Visitor(gate, 10, job="greedy") for _ in range(20)]
        await settle()
        assert sum(visitor.inside.is_set() for visitor in greedy) == 8, "80 of 100 bytes are four times what is left"
        other = Visitor(gate, 10, job="other")
        await settle()
        assert other.inside.is_set(), "a job that waits for its own share must not hold up another"
        for visitor in (*greedy, other):
            visitor.leave()
        await asyncio.gather(other.task, *(visitor.task for visitor in greedy))
        assert gate.used_bytes == 0

    asyncio.run(run())


def test_what_is_resized_counts_as_that() -> None:
    async def run() -> None:
        gate = ByteGate(100)
        async with gate.passage(90) as inside:
            waiting = Visitor(gate, 50)
            await settle()
            assert not waiting.inside.is_set()
            inside.resize(50)
            await settle()
            assert waiting.inside.is_set(), "room came free, and who waits was not let in"
            inside.resize(200)
            assert gate.used_bytes == 250, "what is here already counts, be there room or not"
        waiting.leave()
        await waiting.task
        assert gate.used_bytes == 0

    asyncio.run(run())
