"""A policy for tests, whole: what it takes to add one, and what outlives an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from refill.protocol.policies import POLICIES, PolicySetting, PolicyTerms
from refill_service.cache_core.policies.interface import (
    NO_ORDERS,
    Carried,
    EpochBegan,
    Orders,
    Policy,
    PolicyKind,
    Read,
)
from refill_service.cache_core.policies.registry import KINDS
from refill_service.cache_core.sample_mapping import Int64Array


class OneByOne(Policy):
    """A whole policy: each request gets the very sample that it asks for, read alone; the last few stay for who comes
    next, over the end of the epoch, too."""

    def __init__(self, began: EpochBegan) -> None:
        super().__init__(began)
        self._kept: dict[int, None] = dict.fromkeys(began.carried.samples.tolist())
        self._most_kept = int(began.settings["most_kept"])

    def _answer(self, rank: int, asked: Int64Array) -> tuple[Int64Array, Orders]:
        missing = [sample for sample in asked.tolist() if sample not in self._kept]
        self.counts.misses += len(missing)
        self.counts.refills += len(missing)
        kept = [*self._kept, *missing]
        drops, kept = kept[: -self._most_kept], kept[-self._most_kept :]
        self._kept = dict.fromkeys(kept)
        reads = [Read(sample, sample + 1, np.array([sample])) for sample in missing]
        return asked.copy(), Orders(reads, np.array(drops, dtype=np.int64))

    def stays(self, samples: Int64Array) -> np.ndarray | None:
        return np.array([sample in self._kept for sample in samples.tolist()], dtype=bool)

    def _arrived(self, read: Read, kept: Int64Array) -> Orders:
        if not len(kept):
            self._kept.pop(read.first, None)
        return NO_ORDERS

    def failed(self, read: Read) -> Orders:
        self._kept.pop(read.first, None)
        return NO_ORDERS

    def close(self) -> Carried:
        kept, self._kept = np.array([*self._kept], dtype=np.int64), {}
        return Carried(kept)


ONE_BY_ONE = PolicyKind(
    "one-by-one",
    OneByOne,
    default_chunk_size=lambda num_samples, sample_bytes, largest_blob, by_class: 1,
    first_batch_gets=lambda asked, chunk_size, abstract_chunks: asked,
    analysed_chunk_sizes=(1,),
)
ONE_BY_ONE_TERMS = PolicyTerms("for tests", (PolicySetting("most_kept", 5, "samples that stay", least=1, most=1000),))


@contextmanager
def registered(kind: PolicyKind, terms: PolicyTerms) -> Iterator[None]:
    """A policy more, for a while: all that a new one has to be entered in."""
    KINDS[kind.name], POLICIES[kind.name] = kind, terms
    try:
        yield
    finally:
        del KINDS[kind.name], POLICIES[kind.name]
