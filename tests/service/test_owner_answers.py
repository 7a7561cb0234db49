"""An owner's answer as it comes, breaks off or is refused: what was asked for is not kept waiting by what comes ahead,
and whatever happens its room is free again and nobody waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from refill.errors import JobLost, PodUnreachable
from refill.protocol.wire_format import BatchRequest
from refill_service.cache_core.home_machine import Batch, HomeMachine
from refill_service.jobs.home import OwnerAnswers
from refill_service.memory.payload import OutgoingFrame, Payload
from refill_service.peers.peers import FrameReader

EACH = 1000
"""Samples of each of two pods; pod 0 is the home."""


class Stream:
    """What an owner sends, when the test says so."""

    def __init__(self, body: bytes) -> None:
        self.request = BatchRequest.decode(body)
        self._pieces: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def read_chunk(self) -> bytes | None:
        return await self._pieces.get()

    def send(self, positions: list[int], payloads: list[bytes]) -> None:
        samples = np.array(positions) + EACH
        self._pieces.put_nowait(b"".join(OutgoingFrame(np.array(positions, dtype=np.int64), samples, payloads).parts()))

    def break_off(self) -> None:
        self._pieces.put_nowait(None)


class Pods:
    """The other pods, as far as :class:`OwnerAnswers` asks them."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []

    @asynccontextmanager
    async def frames(
        self, pod: int, what: str, body: bytes, *, says_damage: bool = False
    ) -> AsyncIterator[FrameReader]:
        self.streams.append(Stream(body))
        yield FrameReader(self.streams[-1], f"pod {pod}")  # type: ignore[arg-type]


class Home:
    def __init__(self) -> None:
        self.machine: HomeMachine[Payload] = HomeMachine(0, np.array([0, EACH, 2 * EACH]), 1000)
        self.pods = Pods()
        self.answers = OwnerAnswers(self.machine, self.pods, 0)  # type: ignore[arg-type]

    def begin(self, *positions: int) -> Batch[Payload]:
        """All of them ask for samples of pod 1."""
        asked = np.array(positions)
        return self.machine.begin(0, 0, asked, asked + EACH, np.zeros(len(positions), dtype=bool))

    async def ask(self, batch: Batch[Payload]) -> tuple[asyncio.Task[Any], Stream]:
        task = asyncio.create_task(self.answers.ask(batch, 1, batch.of_owners[1], 1))
        before = len(self.pods.streams)
        await until(lambda: len(self.pods.streams) > before)
        return task, self.pods.streams[-1]

    async def begin_what_was_announced(self, position: int) -> Batch[Payload]:
        """Once the owner has said that it sends it ahead."""
        async with asyncio.timeout(30):
            while not (batch := self.begin(position)).awaited:
                self.machine.over(batch)
                await asyncio.sleep(0)
        return batch

    async def all_ended(self) -> None:
        await until(lambda: not self.answers.under_way)
        assert self.machine.remote_memory.granted == 0, "room is kept for an answer that has ended"


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():  # noqa: ASYNC110 nobody tells: the loop is to run everything that can run
            await asyncio.sleep(0)


def run(test: Callable[[Home], Awaitable[None]]) -> None:
    asyncio.run(test(Home()))  # type: ignore[arg-type]


def test_what_was_asked_for_does_not_wait_for_what_comes_ahead() -> None:
    async def test(home: Home) -> None:
        asked, stream = await home.ask(home.begin(0))
        stream.send([5], [b""])
        stream.send([0], [b"zero"])
        samples, payloads = await asked
        assert (samples.tolist(), list(map(bytes, payloads))) == ([EACH], [b"zero"])
        later = home.begin(5)
        waits = asyncio.create_task(home.answers.wait_for(later.awaited))
        stream.send([5], [b"five"])
        await waits
        assert home.machine.arrived(later) == {}
        assert later.payloads == [b"five"]
        assert isinstance(later.payloads[0], bytes), "it keeps the buffer of all that came with it"
        await home.all_ended()

    run(test)


def test_an_answer_that_is_lost_before_it_came_is_an_error() -> None:
    async def test(home: Home) -> None:
        asked, stream = await home.ask(home.begin(0))
        stream.send([5], [b""])
        later = await home.begin_what_was_announced(5)
        stream.break_off()
        with pytest.raises(PodUnreachable, match="broke off its answer"):
            await asked
        await home.answers.wait_for(later.awaited)
        assert [places.tolist() for places in home.machine.arrived(later).values()] == [[0]], "asked for again"
        await home.all_ended()

    run(test)


def test_what_is_lost_on_its_way_ahead_is_asked_for_again(caplog: pytest.LogCaptureFixture) -> None:
    async def test(home: Home) -> None:
        asked, stream = await home.ask(home.begin(0))
        stream.send([5], [b""])
        stream.send([0], [b"zero"])
        await asked
        later = home.begin(5)
        stream.break_off()
        await home.answers.wait_for(later.awaited)
        assert [places.tolist() for places in home.machine.arrived(later).values()] == [[0]]
        await home.all_ended()

    run(test)
    assert "samples sent ahead were lost: PodUnreachable" in caplog.text


def test_a_request_that_is_given_up_still_brings_what_comes_ahead() -> None:
    """The owner has assigned it; and a client that lost its connection asks again."""

    async def test(home: Home) -> None:
        batch = home.begin(0)
        asked, stream = await home.ask(batch)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        home.machine.over(batch)
        for positions, payloads in (([5], [b""]), ([0], [b"zero"]), ([5], [b"five"])):
            stream.send(positions, payloads)
        await home.all_ended()
        assert home.begin(5).payloads == [b"five"]

    run(test)


@pytest.mark.parametrize("begun", [True, False])
def test_requests_under_way_end_with_why_the_job_was_closed(begun: bool) -> None:
    async def test(home: Home) -> None:
        batch = home.begin(0)
        if begun:
            asked, _ = await home.ask(batch)
        else:
            asked = asyncio.create_task(home.answers.ask(batch, 1, batch.of_owners[1], 1))
            await asyncio.sleep(0)  # it waits, and the task that is to receive has not begun
            assert not home.pods.streams
        await home.answers.close(JobLost("the job was ended", job="run"))
        with pytest.raises(JobLost, match="the job was ended"):
            await asked
        await home.all_ended()

    run(test)


def test_each_attempt_is_granted_room_of_its_own() -> None:
    def rooms(home: Home) -> Iterator[int]:
        return (stream.request.room_bytes for stream in home.pods.streams)

    async def test(home: Home) -> None:
        batch = home.begin(0)
        asked, stream = await home.ask(batch)
        stream.break_off()
        with pytest.raises(PodUnreachable):
            await asked
        again, stream = await home.ask(batch)
        assert list(rooms(home)) == [1000, 1000]
        for positions, payloads in (([], []), ([0], [b"zero"]), ([], [])):
            stream.send(positions, payloads)
        await again
        await home.all_ended()

    run(test)
