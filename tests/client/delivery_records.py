"""What do tests add to a rank's delivery record, and what does it report?"""

from __future__ import annotations

import numpy as np

from refill.delivery_record import DeliveryRecord
from refill.protocol.records import Kind, Record, RecordReader

__all__ = ["received", "reported", "since"]


def received(epoch: int, first: int, count: int = 4) -> Record:
    positions = np.arange(first, first + count)
    return Record(Kind.RECEIVED, epoch, 0, (positions, positions + 1000))


def reported(record: DeliveryRecord) -> tuple[list[int], bool]:
    """The positions in it, and whether they are all."""
    records = list(RecordReader(record.report(0)))
    positions = [p for each in records if each.kind is Kind.RECEIVED for p in each.columns[0].tolist()]
    return sorted(positions), records[-1:] != [] and records[-1].kind is Kind.WHOLE


def since(record: DeliveryRecord) -> int:
    """The epoch from which on it says to be whole."""
    (last,) = list(RecordReader(record.report(0)))[-1:]
    assert last.kind is Kind.WHOLE
    return last.epoch
