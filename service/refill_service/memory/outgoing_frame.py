"""What does an answer with samples consist of, before it is copied? Its head, and the samples where they lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from refill.protocol.wire_format import Int64Array, encode_frame_head
from refill_service.memory.payload import Damage, Payload

__all__ = ["OutgoingFrame"]


class OutgoingFrame:
    """A frame to be sent: ``head`` holds header and arrays, ``payloads`` the samples."""

    def __init__(self, positions: Int64Array, sample_ids: Int64Array, payloads: Sequence[Payload]) -> None:
        lengths = np.fromiter(map(len, payloads), dtype=np.int64, count=len(payloads))
        num_bytes = int(lengths.sum())
        for place in [place for place, payload in enumerate(payloads) if type(payload) is Damage]:
            lengths[place] *= -1
        self.head = encode_frame_head(positions, sample_ids, lengths)
        self.payloads = payloads
        self.total_bytes = len(self.head) + num_bytes

    def parts(self) -> Iterator[Payload]:
        yield self.head
        yield from self.payloads
