"""What do the bytes of a batch look like on the wire?

All integers are little-endian. A *request* names positions, and with a planned order that ranks have in lists of their
own the samples that are wanted there, too; a *frame* carries samples:

    request   magic "RFQ2" | epoch u32 | rank u32 | count u32 | room_bytes u64 | started_below u64
              | ahead_from u64 | positions i64[count]
    of a list magic "RFL2" | the same | sample_ids i64[count]
    frame     magic "RFF1" | reserved u32 | count u64 | payload_bytes u64
              | positions i64[count] | sample_ids i64[count] | lengths i64[count] | payload u8[payload_bytes]

A client that goes on without damaged samples says so (``damaged=say`` in the request's path). For a sample that can't
be read it then gets, in place of its bytes, the error as JSON, and a length below 0: that of the text, negated.

The sizes of a frame follow from its first 24 bytes, and the payload is one run of bytes, so a reader can place
it into one preallocated buffer. Client and home pod exchange one request and one frame per batch. A home pod asks an
owner to *take* with the same request, and is answered with three frames in one stream:

    announced   positions and sample ids of what will be sent ahead; all lengths are 0 and there is no payload, so that
                the home knows before the answer which positions need not be asked for any more
    asked       what was asked for, in the order of the request
    ahead       what was announced, with its bytes; what comes with it does not delay what was asked for

An example: rank 3 asks for positions 0 to 9 of epoch 1, and position 9 asks for a sample of another pod. That one may
send 4,096 bytes ahead, for positions from 10 on. It gives sample 70, ``b"abc"``, for position 9, and has sample 71,
``b"de"``, for position 12:

    request     RFQ2 | 1 3 1 | 4096 10 10 | 9
    announced   RFF1 0 | 1 0 | 12 | 71 | 0 |
    asked       RFF1 0 | 1 3 |  9 | 70 | 3 | abc
    ahead       RFF1 0 | 1 2 | 12 | 71 | 2 | de

Requests of several jobs may come *together*, as one body, and are answered with a frame for each, one after another:

    together  magic "RFT1" | count u32 | (path_bytes u32 | body_bytes u32)[count] | (path | request)[count]

The magic is the version: a reader refuses any other, and whoever changes a byte of this raises it. It is held by
tests/protocol/test_golden_bytes.py.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from refill.errors import InvalidInput

Int64Array = NDArray[np.int64]

MAX_BATCH = 1 << 16
"""Most positions in one request; larger requests are refused before anything is allocated."""
MAX_EPOCHS = 1 << 31
MAX_LABELS = 1 << 18
"""Most numbers of the index in one answer, of a sample each."""
MAX_LISTED = 1 << 17
"""Most samples in one piece of a rank's list."""
MAX_SCORES = 1 << 15
"""Most scores of one request."""
MAX_SAMPLES = 1 << 12
"""Most samples of a request for exactly these; clients make several of a longer one."""

MAX_TOGETHER = 1 << 9
"""Most requests in one body."""
MAX_PATH_BYTES = 1 << 13
"""Of each of these."""

_TOGETHER, _SIZES = struct.Struct("<4sI"), struct.Struct("<II")
_REQUEST = struct.Struct("<4sIIIQQQ")
_FRAME = struct.Struct("<4sIQQ")
FRAME_HEADER_BYTES = _FRAME.size
_ARRAYS = 3


def check_samples(ids: Int64Array, num_samples: int) -> None:
    """Raises :class:`InvalidInput` for samples that the dataset does not have."""
    if len(wrong := ids[(ids < 0) | (ids >= num_samples)]):
        raise InvalidInput(f"there is no sample {wrong[0]}; the dataset has samples 0 to {num_samples - 1}")


class BatchRequest(NamedTuple):
    """One batch of one rank.

    Three fields are set by home pods only: how much the owner may send ahead (``room_bytes``), the position below
    which the rank has asked for everything, so that nothing sent ahead is still held for it (``started_below``),
    and the first position that is worth sending ahead (``ahead_from``).
    """

    epoch: int
    rank: int
    positions: Int64Array
    room_bytes: int = 0
    started_below: int = 0
    ahead_from: int = 0
    sample_ids: Int64Array | None = None
    """``(n,)`` what is wanted at each position; None: what the pods' order has there."""

    def at(self, places: Int64Array | slice) -> BatchRequest:
        """A part of it, with nothing to be sent ahead."""
        ids = None if self.sample_ids is None else self.sample_ids[places]
        return BatchRequest(self.epoch, self.rank, self.positions[places], sample_ids=ids)

    def encode(self) -> bytes:
        head = _REQUEST.pack(
            b"RFQ2" if self.sample_ids is None else b"RFL2",
            self.epoch,
            self.rank,
            len(self.positions),
            self.room_bytes,
            self.started_below,
            self.ahead_from,
        )
        arrays = [self.positions] if self.sample_ids is None else [self.positions, self.sample_ids]
        return head + b"".join(np.ascontiguousarray(each, dtype="<i8").tobytes() for each in arrays)

    @classmethod
    def decode(cls, body: bytes) -> BatchRequest:
        """Raises :class:`InvalidInput` for anything that :meth:`encode` did not write."""
        if len(body) < _REQUEST.size:
            raise InvalidInput(f"batch request is {len(body)} bytes, shorter than its {_REQUEST.size}-byte header")
        magic, epoch, rank, count, room_bytes, started_below, ahead_from = _REQUEST.unpack_from(body)
        if magic not in (b"RFQ2", b"RFL2"):
            raise InvalidInput(f"batch request starts with {magic!r}, not b'RFQ2': not a request of this version")
        num_arrays = 1 if magic == b"RFQ2" else 2
        if not 1 <= count <= MAX_BATCH or len(body) != _REQUEST.size + 8 * count * num_arrays:
            raise InvalidInput(f"batch request of {len(body)} bytes can't hold the {count} positions it announces")
        if epoch >= MAX_EPOCHS:
            raise InvalidInput(f"there is no epoch {epoch}: they are numbered from 0 to {MAX_EPOCHS - 1}")
        if max(room_bytes, started_below, ahead_from) >= 2**63:
            raise InvalidInput("batch request has a room_bytes, started_below or ahead_from of 2**63 or more")
        positions = np.frombuffer(body, dtype="<i8", count=count, offset=_REQUEST.size)
        sample_ids = None if num_arrays == 1 else np.frombuffer(body, dtype="<i8", offset=_REQUEST.size + 8 * count)
        different = set(positions.tolist())  # of a batch: numpy would take longer, for the next as well
        if (least := min(different)) < 0:
            raise InvalidInput(f"batch request names position {least}; positions start at 0")
        if len(different) != count:
            raise InvalidInput("batch request names a position twice")
        return cls(epoch, rank, positions, room_bytes, started_below, ahead_from, sample_ids)


@dataclass(frozen=True)
class FrameHeader:
    """The first 24 bytes of a frame."""

    count: int
    payload_bytes: int

    @classmethod
    def decode(cls, head: bytes | bytearray | memoryview) -> FrameHeader:
        if len(head) < FRAME_HEADER_BYTES:
            raise InvalidInput(f"frame ends after {len(head)} bytes, within its header")
        magic, _, count, payload_bytes = _FRAME.unpack_from(head)
        if magic != b"RFF1":
            raise InvalidInput(f"frame starts with {magic!r}, not b'RFF1': not a frame of this version")
        return cls(count, payload_bytes)

    @property
    def arrays_bytes(self) -> int:
        """Bytes between header and payload."""
        return _ARRAYS * 8 * self.count

    @property
    def total_bytes(self) -> int:
        return FRAME_HEADER_BYTES + self.arrays_bytes + self.payload_bytes


def encode_frame_head(positions: Int64Array, sample_ids: Int64Array, lengths: Int64Array) -> bytes:
    """Header and arrays of a frame; the payload follows it on the wire. Each array has shape ``(count,)``."""
    count = len(positions)
    head = _FRAME.pack(b"RFF1", 0, count, int(np.abs(lengths).sum()) if count else 0)
    return head + np.concatenate([positions, sample_ids, lengths]).astype("<i8", copy=False).tobytes()


def decode_frame_arrays(header: FrameHeader, arrays: bytes | bytearray | memoryview) -> list[Int64Array]:
    """``[positions, sample_ids, lengths]``, each of shape ``(count,)``, as views into ``arrays``. A length below 0 is
    that of an error in place of a sample.

    Raises :class:`InvalidInput` when the lengths don't add up to the payload.
    """
    if len(arrays) < header.arrays_bytes:
        raise InvalidInput(f"frame ends within its arrays: {len(arrays)} of {header.arrays_bytes} bytes")
    columns = np.frombuffer(arrays, dtype="<i8", count=_ARRAYS * header.count).reshape(_ARRAYS, header.count)
    sizes = np.abs(columns[2]).view(np.uint64)  # the least of int64 has one, too
    # The largest is looked at, too, because a sum of damaged lengths may wrap around.
    if int(sizes.max(initial=0)) > header.payload_bytes or int(sizes.sum()) != header.payload_bytes:
        raise InvalidInput("frame's lengths do not add up to its payload")
    return list(columns)


def encode_together(requests: Sequence[tuple[str, bytes]]) -> bytes:
    """:param requests: path and body of each."""
    paths = [path.encode() for path, _ in requests]
    bodies = [body for _, body in requests]
    sizes = [_SIZES.pack(len(path), len(body)) for path, body in zip(paths, bodies, strict=True)]
    joined = [each for both in zip(paths, bodies, strict=True) for each in both]
    return b"".join([_TOGETHER.pack(b"RFT1", len(requests)), *sizes, *joined])


def decode_together(body: bytes) -> list[tuple[str, bytes]]:
    """Raises :class:`InvalidInput` for anything that :func:`encode_together` did not write."""
    if len(body) < _TOGETHER.size:
        raise InvalidInput(f"requests together are {len(body)} bytes, shorter than their {_TOGETHER.size}-byte header")
    magic, count = _TOGETHER.unpack_from(body)
    if magic != b"RFT1":
        raise InvalidInput(f"requests together start with {magic!r}, not b'RFT1': none of this version")
    at = _TOGETHER.size + _SIZES.size * count
    if not 1 <= count <= MAX_TOGETHER or len(body) < at:
        raise InvalidInput(f"a body of {len(body)} bytes can't hold the {count} requests that it announces")
    sizes = [_SIZES.unpack_from(body, _TOGETHER.size + _SIZES.size * place) for place in range(count)]
    if max(path for path, _ in sizes) > MAX_PATH_BYTES or at + sum(map(sum, sizes)) != len(body):
        raise InvalidInput(f"a body of {len(body)} bytes can't hold {count} requests of the sizes that it announces")
    found = []
    for path_bytes, body_bytes in sizes:
        try:
            path = body[at : at + path_bytes].decode("ascii")
        except UnicodeDecodeError as error:
            raise InvalidInput("the path of one of several requests is not ASCII") from error
        at += path_bytes + body_bytes
        found.append((path, body[at - body_bytes : at]))
    return found
