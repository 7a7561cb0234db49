"""Training that is faster than the store: requests wait for chunks to arrive, so that memory spreads samples still."""

from __future__ import annotations

import numpy as np
import pytest

from refill_service.cache_core.epoch_order import KeyedTraces
from refill_service.cache_core.policies.drain import DrainPolicy
from refill_service.cache_core.policies.interface import EpochBegan, Read
from refill_service.cache_core.sample_mapping import AbstractMapping, ChunkLayout, abstract_chunks_for_budget
from refill_service.planning.shuffle_measures import spread

NUM_SAMPLES, CHUNK_SIZE, BATCH = 16_384, 8, 64


class SlowStore:
    """Chunks arrive one after another, in the order in which they were ordered, and only while somebody waits."""

    def __init__(self, memory_share: float) -> None:
        share = ChunkLayout(np.array([0, NUM_SAMPLES]), CHUNK_SIZE).share(0, 1)
        self.capacity = int(NUM_SAMPLES * memory_share)
        mapping = AbstractMapping(share, abstract_chunks_for_budget(share.num_chunks, CHUNK_SIZE, self.capacity))
        lengths = np.ones(NUM_SAMPLES, dtype=np.int64)
        self.core = DrainPolicy(EpochBegan(mapping, KeyedTraces(NUM_SAMPLES, seed=3), lengths, key="1"))
        self.ordered: list[Read] = [*self.core.memory_changed(self.capacity).reads]
        self.arrived: set[int] = set()

    def take(self, asked: np.ndarray) -> tuple[np.ndarray, int]:
        """``(samples, samples that arrived while the answer waited)``"""
        taken = self.core.requested(0, asked)
        self.ordered += taken.orders.reads
        before = len(self.arrived)
        while not set(taken.samples.tolist()) <= self.arrived or (
            self.ordered and self.core.came_bytes < taken.wait_until_bytes
        ):
            assert self.ordered, "an answer waits for what nobody has ordered"
            read = self.ordered.pop(0)
            self.core.arrived(read)
            self.arrived |= set(read.samples.tolist())
        return taken.samples, len(self.arrived) - before

    def epoch(self) -> tuple[np.ndarray, list[int]]:
        """``(position of each sample, samples that arrived for each batch)``"""
        asked = KeyedTraces(NUM_SAMPLES, seed=3).asked(0, np.arange(NUM_SAMPLES))[0]
        position, arrived = np.full(NUM_SAMPLES, -1), []
        for start in range(0, NUM_SAMPLES, BATCH):
            samples, count = self.take(asked[start : start + BATCH])
            position[samples] = np.arange(start, start + BATCH)
            arrived.append(count)
        return position, arrived


@pytest.mark.parametrize("memory_share", [0.1, 0.25])
def test_chunk_mates_are_spread_all_the_same(memory_share: float) -> None:
    position, _ = SlowStore(memory_share).epoch()
    assert sorted(position) == list(range(NUM_SAMPLES))
    distance, co_batch = spread(position, np.array([0, NUM_SAMPLES]), BATCH)
    assert distance > 0.3
    assert co_batch < 2.5, "chunks are handed out as they come (a chunk's samples in one batch gives 28)"


def test_the_first_answers_wait_for_half_as_much_again_as_they_take() -> None:
    store = SlowStore(0.25)
    _, arrived = store.epoch()
    filling = store.capacity // BATCH
    assert arrived[0] == pytest.approx(2 * BATCH, abs=2 * CHUNK_SIZE), "as much again, so that mates are not together"
    assert sum(arrived[:filling]) == pytest.approx(1.5 * BATCH * filling, rel=0.05)
    steady = arrived[filling + 5 : -store.capacity // BATCH - 5]
    assert np.mean(steady) == pytest.approx(BATCH, rel=0.05), "then as much comes as goes"


def test_a_fast_store_is_never_waited_for() -> None:
    store = SlowStore(0.1)
    asked = KeyedTraces(NUM_SAMPLES, seed=3).asked(0, np.arange(NUM_SAMPLES))[0]
    for start in range(0, NUM_SAMPLES, BATCH):
        while store.ordered:
            store.core.arrived(store.ordered.pop())
        taken = store.core.requested(0, asked[start : start + BATCH])
        store.ordered += taken.orders.reads
        assert taken.wait_until_bytes == 0
    assert store.core.counts.misses == 0
