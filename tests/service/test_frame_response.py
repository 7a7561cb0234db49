"""How frames leave a pod: on-demand bytes first, small samples joined, none copied into one body."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill.protocol.wire_format import FRAME_HEADER_BYTES, FrameHeader, decode_frame_arrays
from refill_service.memory.payload import OutgoingFrame
from refill_service.serving.frame_response import PIECE_BYTES, FrameResponse


def sent_by(response: FrameResponse) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        messages.append(message)

    asyncio.run(response({"type": "http"}, None, send))  # type: ignore[arg-type]
    return messages


def frame_of(first: int, payloads: list[bytes]) -> OutgoingFrame:
    places = np.arange(first, first + len(payloads))
    return OutgoingFrame(places, places + 1000, payloads)


@pytest.mark.parametrize("sizes", [[10] * 500, [3 * PIECE_BYTES], [PIECE_BYTES - 1, 5, PIECE_BYTES], [0, 1, 0], []])
def test_frames_come_as_they_were_given(sizes: list[int]) -> None:
    payloads = [bytes([i % 256]) * size for i, size in enumerate(sizes)]
    response = FrameResponse([frame_of(5, payloads)])
    messages = sent_by(response)
    assert dict(messages[0]["headers"])[b"content-length"] == str(response.total_bytes).encode()
    body = b"".join(message["body"] for message in messages[1:])
    assert len(body) == response.total_bytes
    header = FrameHeader.decode(body)
    positions, ids, lengths = decode_frame_arrays(header, body[FRAME_HEADER_BYTES:])
    assert positions.tolist() == list(range(5, 5 + len(sizes)))
    assert ids.tolist() == list(range(1005, 1005 + len(sizes)))
    assert lengths.tolist() == sizes
    assert body[FRAME_HEADER_BYTES + header.arrays_bytes :] == b"".join(payloads)
    assert [message["more_body"] for message in messages[1:]] == [True] * (len(messages) - 2) + [False]


def test_on_demand_bytes_leave_before_what_is_sent_ahead() -> None:
    """The announcement first, then all that was asked for, and only then the first byte of what is sent ahead."""
    asked, ahead = [b"d" * 1000] * 3, [b"a" * 1000] * 3
    frames = [frame_of(10, [b""] * 3), frame_of(0, asked), frame_of(10, ahead)]
    pieces = [message["body"] for message in sent_by(FrameResponse(frames))[1:]]
    with_asked = [i for i, piece in enumerate(pieces) if b"dddd" in piece]
    with_ahead = [i for i, piece in enumerate(pieces) if b"aaaa" in piece]
    assert max(with_asked) < min(with_ahead), "a piece of what was asked for waits for bytes that are sent ahead"
    assert with_asked[0] > 0, "the announcement comes first"


def test_small_samples_are_joined_and_large_ones_are_not_copied() -> None:
    large = b"x" * (2 * PIECE_BYTES)
    pieces = [message["body"] for message in sent_by(FrameResponse([frame_of(0, [b"s" * 100] * 1000 + [large])]))[1:]]
    assert len(pieces) == 3, "head and small samples in one piece, the large one, the end"
    assert pieces[1] is large


def test_sent_bytes_are_reported_at_the_end() -> None:
    sent_bytes: Counter[int] = Counter()
    response = FrameResponse([frame_of(0, [b"12345"])], sent_bytes, 2)
    sent_by(response)
    assert sent_bytes == {2: response.total_bytes}


@given(st.lists(st.lists(st.binary(max_size=20_000), max_size=5), min_size=1, max_size=3))
def test_an_answer_to_a_pod_is_the_same_and_ends_with_small_pieces(frames: list[list[bytes]]) -> None:
    of_client, of_pod = (
        [message["body"] for message in sent_by(FrameResponse([frame_of(0, each) for each in frames], *to))[1:]]
        for to in ((), (Counter[int](), 1))
    )
    whole = b"".join(of_pod)
    assert whole == b"".join(of_client)
    *pieces, end = of_pod
    assert all(pieces)
    assert not end
    if len(whole) > 16 << 10:
        assert sum(len(piece) for piece in pieces[-5:]) <= 20 << 10, "what the server holds that took it"
