"""What does a frame hold that a pod answers with? Samples, read into one buffer and never copied again."""

from __future__ import annotations

import http.client
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import numpy as np

from refill.errors import InvalidInput, RefillError, SampleDamaged, error_from_wire
from refill.pods.answer_checks import decoded, not_of_a_pod
from refill.pods.pod_answer import PlainAnswer
from refill.protocol.wire_format import FRAME_HEADER_BYTES, FrameHeader, Int64Array, decode_frame_arrays

_MOST_ERROR_BYTES = 1 << 20

Answer = http.client.HTTPResponse | PlainAnswer


class ReceivedBatch:
    """Samples of one answer. ``payloads`` are views into one buffer, which lives as long as any of them.

    :param damaged: by place, why there is no sample; its payload is empty.
    """

    def __init__(
        self, sample_ids: Int64Array, payloads: list[memoryview], damaged: dict[int, RefillError] | None = None
    ) -> None:
        self.sample_ids = sample_ids
        self.payloads = payloads
        self.damaged = damaged or {}
        self.num_bytes = sum(map(len, payloads))

    def part(self, first: int, end: int) -> ReceivedBatch:
        """The samples ``first <= place < end`` of it."""
        damaged = {place - first: error for place, error in self.damaged.items() if first <= place < end}
        return ReceivedBatch(self.sample_ids[first:end], self.payloads[first:end], damaged)


def joined(count: int, parts: Sequence[tuple[Int64Array, ReceivedBatch]]) -> ReceivedBatch:
    """Samples of several answers, each with the places ``(n,)`` of its own among all."""
    if len(parts) == 1 and np.array_equal(parts[0][0], np.arange(count)):
        return parts[0][1]
    ids = np.empty(count, dtype=np.int64)
    payloads = [memoryview(b"")] * count
    damaged: dict[int, RefillError] = {}
    for places, part in parts:
        ids[places] = part.sample_ids
        at = places.tolist()
        for place, payload in zip(at, part.payloads, strict=True):
            payloads[place] = payload
        damaged |= {at[place]: error for place, error in part.damaged.items()}
    return ReceivedBatch(ids, payloads, damaged)


class Expected:
    """What a frame must answer: these positions, or exactly these samples.

    :param together: or several frames, one after another, each of these.
    """

    def __init__(
        self,
        positions: Int64Array | None = None,
        sample_ids: Int64Array | None = None,
        together: Sequence[Expected] = (),
    ) -> None:
        self.positions = positions
        self.sample_ids = sample_ids
        self.together = together

    @property
    def count(self) -> int:
        asked = self.sample_ids if self.positions is None else self.positions
        assert asked is not None
        return len(asked)


class ComingFrame:
    """The frame that an answer has as its body, of which the first bytes have come.

    :param source: the pod, for errors. Raises :class:`RefillError` for what no pod would send.
    """

    def __init__(self, response: Answer, expected: Expected, source: str) -> None:
        self.num_bytes = response.length or 0
        self.response = response
        self._expected, self._source = expected, source
        self._head = memoryview(bytearray(FRAME_HEADER_BYTES))
        _read_into(response, self._head)
        with _translated(source):
            # Before the rest has memory, and is waited for.
            if expected.together:
                _checked_header(self._head, None, expected.together[0])
            else:
                _checked_header(self._head, self.num_bytes, expected)

    def read_into(self, frame: memoryview) -> ReceivedBatch:
        """All of it. The payloads are views into ``frame``, of ``num_bytes``."""
        frame[:FRAME_HEADER_BYTES] = self._head
        _read_into(self.response, frame[FRAME_HEADER_BYTES:])
        return decode_frame(frame, self._expected, self._source)


def room_for(num_bytes: int, source: str) -> memoryview:
    """Raises :class:`RefillError` where this process has no memory for so much."""
    try:
        return np.empty(num_bytes, dtype=np.uint8).data
    except MemoryError as error:
        raise RefillError(
            f"{source} answers with {num_bytes:,} bytes, and this process has no memory for them"
        ) from error


def decode_frame(frame: memoryview, expected: Expected, source: str) -> ReceivedBatch:
    """Payloads are views into ``frame``; of several frames, one after another."""
    if expected.together:
        return _decode_together(frame, expected, source)
    with _translated(source):
        header = _checked_header(frame[:FRAME_HEADER_BYTES], len(frame), expected)
        found_positions, found_ids, lengths = decode_frame_arrays(header, frame[FRAME_HEADER_BYTES:])
        for asked, found in ((expected.positions, found_positions), (expected.sample_ids, found_ids)):
            if asked is not None and not (asked == found).all():
                raise InvalidInput(f"frame answers other requests than the {len(asked)} that were made")
    bounds = list(accumulate(map(abs, lengths.tolist()), initial=FRAME_HEADER_BYTES + header.arrays_bytes))
    payloads = list(map(frame.__getitem__, map(slice, bounds, bounds[1:])))
    damaged: dict[int, RefillError] = {}
    for place in np.flatnonzero(lengths < 0).tolist():
        damaged[place] = _error_in(payloads[place], source)
        payloads[place] = frame[:0]
    return ReceivedBatch(found_ids.copy(), payloads, damaged)


def _decode_together(frames: memoryview, expected: Expected, source: str) -> ReceivedBatch:
    parts, at, start = [], 0, 0
    for each in expected.together:
        with _translated(source):
            size = FrameHeader.decode(frames[start : start + FRAME_HEADER_BYTES]).total_bytes
            if start + size > len(frames):
                raise InvalidInput(f"frames together end after {len(frames)} bytes, within one")
        part = decode_frame(frames[start : start + size], each, source)
        parts.append((np.arange(at, at + each.count), part))
        at, start = at + each.count, start + size
    if start != len(frames):
        with _translated(source):
            raise InvalidInput(f"frames together have {start} bytes, but {len(frames)} come")
    return joined(at, parts)


def _error_in(text: memoryview, source: str) -> RefillError:
    if len(text) > _MOST_ERROR_BYTES:
        raise not_of_a_pod(source, f"an error of {len(text):,} bytes in place of a sample")
    try:
        answer = decoded(bytes(text))
    except ValueError:
        answer = bytes(text)
    return error_from_wire(answer, status=SampleDamaged.status, source=source)


def _checked_header(head: memoryview, length: int | None, expected: Expected) -> FrameHeader:
    """:param length: None: others may follow."""
    header = FrameHeader.decode(head)
    if length is not None and header.total_bytes != length:
        raise InvalidInput(f"frame says that it has {header.total_bytes} bytes, but {length} come")
    if header.count != expected.count:
        raise InvalidInput(f"frame answers {header.count} requests, and {expected.count} were made")
    return header


@contextmanager
def _translated(source: str) -> Iterator[None]:
    try:
        yield
    except InvalidInput as error:
        raise RefillError(f"{source} sent what no pod sends: {error.message}") from error


def _read_into(response: Answer, buffer: memoryview) -> None:
    filled = 0
    while filled < len(buffer):
        count = response.readinto(buffer[filled:])
        if count == 0:
            raise http.client.IncompleteRead(b"", len(buffer) - filled)
        filled += count
