"""How frames of another pod's answer are read: the same samples however the stream is cut, none copied without need."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from refill.errors import PodUnreachable
from refill_service.memory.payload import OutgoingFrame
from refill_service.peers.peers import Frame, FrameReader


class FakeReader:
    """Hands out pieces as pyreqwest's body reader does."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = iter(pieces)

    async def read_chunk(self) -> bytes | None:
        return next(self._pieces, None)


def wire(frames: list[list[bytes]]) -> bytes:
    return b"".join(b"".join(OutgoingFrame(np.arange(len(f)), np.arange(len(f)), f).parts()) for f in frames)


def read(pieces: list[bytes], count: int) -> list[Frame]:
    async def run() -> list[Frame]:
        reader = FrameReader(FakeReader(pieces), "pod 1")  # type: ignore[arg-type]
        return [await reader.frame() for _ in range(count)]

    return asyncio.run(run())


@pytest.mark.parametrize("seed", range(20))
def test_the_cuts_between_pieces_change_nothing(seed: int) -> None:
    dice = random.Random(seed)
    frames = [[dice.randbytes(dice.choice([0, 1, 7, 100])) for _ in range(dice.randrange(6))] for _ in range(3)]
    body = wire(frames)
    cuts = sorted(dice.sample(range(1, len(body)), min(len(body) - 1, dice.randrange(40))))
    pieces = [body[start:end] for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    assert [[bytes(p) for p in frame.payloads] for frame in read(pieces, 3)] == frames


def test_a_sample_that_comes_whole_is_not_copied() -> None:
    body = wire([[b"a" * 100, b"b" * 100]])
    (frame,) = read([body], 1)
    assert all(isinstance(payload, memoryview) and payload.obj is body for payload in frame.payloads)


def test_a_stream_that_breaks_off_is_an_error() -> None:
    body = wire([[b"a" * 100, b"b" * 100]])
    with pytest.raises(PodUnreachable, match="pod 1 broke off its answer after 250 bytes"):
        read([body[:200], body[200:250]], 1)
