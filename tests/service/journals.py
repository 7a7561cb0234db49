"""What do tests write to a journal, and how do they read it?"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np

from refill.protocol.records import Kind, Record
from refill_service.journal.journal import JobJournal, Journal

__all__ = ["HEADER", "Table", "begun", "closed", "samples_in"]

HEADER = {"incarnation": "1", "num_pods": 1, "num_samples": 1000}


class Table:
    """An owner's table, as far as the journal is concerned."""

    def __init__(self) -> None:
        self.samples: dict[int, list[int]] = {}

    def answer(self, epoch: int, count: int) -> Record:
        known = self.samples.setdefault(epoch, [])
        new = np.arange(len(known), len(known) + count, dtype=np.int64)
        known += new.tolist()
        return Record(Kind.ANSWERED, epoch, 0, (new, new))

    def snapshot(self, epoch: int) -> Iterator[Record]:
        samples = np.array(self.samples.get(epoch, []), dtype=np.int64)
        yield Record(Kind.ANSWERED, epoch, 0, (samples, samples))


def begun(journal: Journal, table: Table, epochs: tuple[int, ...] = ()) -> JobJournal:
    found = journal.begin("run", HEADER, table.snapshot, epochs)
    assert found is not None
    return found


def samples_in(journal: Journal, epoch: int = 0) -> list[int]:
    kept = journal.find("run")
    assert kept is not None
    return [s for record in kept.records if record.epoch == epoch for s in record.columns[0].tolist()]


def closed(journal: Journal) -> None:
    asyncio.run(journal.close())
