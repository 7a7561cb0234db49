"""Are the bytes of the wire those that pods and clients out there write and read?

Pods of a cluster are replaced one after another, clients when their image is built anew: each reads what another
version wrote. These are the bytes of today, written out.
"""

from __future__ import annotations

import numpy as np
import pytest

from refill.errors import InvalidInput
from refill.protocol.wire_format import (
    FRAME_HEADER_BYTES,
    BatchRequest,
    FrameHeader,
    decode_frame_arrays,
    decode_together,
    encode_frame_head,
    encode_together,
)


def ids(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def golden(text: str) -> bytes:
    """Hex, with what it means behind ``#``."""
    return bytes.fromhex("".join(line.partition("#")[0] for line in text.splitlines()))


def check(what: str, found: bytes, expected: bytes, version: str) -> None:
    if found != expected:
        pytest.fail(
            f"{what} is written in other bytes than before, and other versions of pods and clients can't read them. If "
            f"that is meant: raise {version}, say in CHANGELOG.md what can't be mixed any more, and put these bytes "
            f"here:\n{found.hex(' ', 8)}\nThey were:\n{expected.hex(' ', 8)}"
        )


THE_MAGIC = "the number in its magic (client/refill/protocol/wire_format.py)"

REQUEST = golden("""
    52465132 01000000 03000000 01000000     # RFQ2, epoch 1, rank 3, one position
    0010000000000000                        # room_bytes 4096
    0a00000000000000                        # started_below 10
    0a00000000000000                        # ahead_from 10
    0900000000000000                        # position 9
""")
LISTED = REQUEST.replace(b"RFQ2", b"RFL2") + golden("""
    4600000000000000                        # sample 70 is wanted there
""")
ANNOUNCED = golden("""
    52464631 00000000                       # RFF1
    0100000000000000 0000000000000000       # one sample, no payload
    0c00000000000000                        # for position 12
    4700000000000000                        # sample 71
    0000000000000000                        # without its bytes
""")
ASKED = golden("""
    52464631 00000000
    0200000000000000 0500000000000000       # two samples, 5 bytes
    0900000000000000 0800000000000000       # for positions 9 and 8
    4600000000000000 ffffffff00000000       # samples 70 and 2**32 - 1
    0300000000000000 0200000000000000       # of 3 and 2 bytes
""")
WITHOUT_DAMAGED = golden("""
    52464631 00000000
    0200000000000000 0500000000000000       # two samples, 5 bytes
    0900000000000000 0800000000000000       # for positions 9 and 8
    4600000000000000 4700000000000000       # samples 70 and 71
    0300000000000000 feffffffffffffff       # of 3 bytes; and an error, as JSON, of 2
""")


class TestWire:
    def test_a_request(self) -> None:
        request = BatchRequest(1, 3, ids(9), room_bytes=4096, started_below=10, ahead_from=10)
        check("a request", request.encode(), REQUEST, THE_MAGIC)
        assert BatchRequest.decode(REQUEST).encode() == REQUEST
        listed = request._replace(sample_ids=ids(70))
        check("a request that names its samples", listed.encode(), LISTED, THE_MAGIC)
        assert BatchRequest.decode(LISTED).encode() == LISTED

    def test_frames(self) -> None:
        check("a frame without payload", encode_frame_head(ids(12), ids(71), ids(0)), ANNOUNCED, THE_MAGIC)
        check("a frame", encode_frame_head(ids(9, 8), ids(70, 2**32 - 1), ids(3, 2)), ASKED, THE_MAGIC)
        header = FrameHeader.decode(ASKED)
        arrays = decode_frame_arrays(header, ASKED[FRAME_HEADER_BYTES:])
        assert [array.tolist() for array in arrays] == [[9, 8], [70, 2**32 - 1], [3, 2]]

    def test_a_frame_without_a_damaged_sample(self) -> None:
        found = encode_frame_head(ids(9, 8), ids(70, 71), ids(3, -2))
        check("a frame without a damaged sample", found, WITHOUT_DAMAGED, THE_MAGIC)
        arrays = decode_frame_arrays(FrameHeader.decode(found), found[FRAME_HEADER_BYTES:])
        assert arrays[2].tolist() == [3, -2]

    def test_another_version_is_refused_by_name(self) -> None:
        with pytest.raises(InvalidInput, match="not a request of this version"):
            BatchRequest.decode(REQUEST.replace(b"RFQ2", b"RFQ1"))
        with pytest.raises(InvalidInput, match="not a frame of this version"):
            FrameHeader.decode(ASKED.replace(b"RFF1", b"RFF2"))


TOGETHER = golden("""
    52465431 02000000                       # RFT1, two requests
    22000000 30000000                       # a path of 34 bytes, a body of 48
    22000000 30000000
""")


def test_requests_together() -> None:
    path, body = "/v1/jobs/mix.web/planned/batch?p=1", BatchRequest(1, 3, ids(9), 4096, 10, 10).encode()
    found = encode_together([(path, body), (path, body)])
    check("the body of several requests", found, TOGETHER + 2 * (path.encode() + REQUEST), THE_MAGIC)
    assert decode_together(found) == [(path, body), (path, body)]
    for wrong in (
        b"",
        found[:-1],
        found + b"x",
        found.replace(b"RFT1", b"RFT2"),
        found.replace(b"/v1", b"\xff\xff\xff"),
    ):
        with pytest.raises(InvalidInput):
            decode_together(wrong)
