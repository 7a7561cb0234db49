"""Do the caches that keep the order reach the answers that are known for them? Orders are portable ones, answers are of
simulations that were written apart, from the papers."""

from __future__ import annotations

from time import thread_time
from typing import Protocol

import numpy as np
import pytest
from benchmarks.papers.known_uses import KnownUses
from numpy.testing import assert_allclose
from tests.cache_core.portable_order import PortableRandom

from refill_service.cache_core.exact.chunk_caches import ChunkRead, ClairvoyantCache, EarliestUseCache, Plan, Uses
from refill_service.cache_core.exact.sample_caches import (
    FifoCache,
    LruCache,
    NeverEvictCache,
)
from refill_service.cache_core.sample_mapping import Int64Array


class ChunkCache(Protocol):
    held_bytes: int

    def holds(self, sample: int) -> bool: ...
    def used(self, sample: int, time: int, uses: Uses) -> bool: ...
    def missed(self, sample: int, time: int, uses: Uses) -> ChunkRead: ...


def gets_of_epochs(cache: ChunkCache, orders: list[Int64Array], capacity: int) -> list[int]:
    """This epoch and the next are known. Memory is never over its limit."""
    num_samples, found = len(orders[0]), []
    uses = KnownUses(np.concatenate(orders), num_samples)
    for epoch, order in enumerate(orders):
        gets, uses.known_until = 0, min(epoch + 2, len(orders)) * num_samples
        for place, sample in enumerate(order.tolist()):
            time = epoch * num_samples + place
            if cache.holds(sample):
                cache.used(sample, time, uses)
            else:
                gets += 1
                cache.missed(sample, time, uses)
            assert cache.held_bytes <= capacity
        found.append(gets)
    return found


def starts(num_samples: int, chunk_size: int) -> Int64Array:
    return np.append(np.arange(0, num_samples, chunk_size), num_samples)


def test_the_orders_are_the_ones_meant() -> None:
    assert PortableRandom(1).permutation(2048)[:8].tolist() == [880, 545, 793, 1131, 563, 1165, 40, 183]
    assert PortableRandom(5).skewed(500, 8).tolist() == [56, 126, 57, 204, 27, 21, 70, 271]


@pytest.mark.variants("64-204-gets2", "1-204-gets0")
@pytest.mark.parametrize(
    ("chunk_size", "capacity", "gets"),
    [(1, 204, [2048, 1844, 1844]), (8, 204, [767, 671, 694]), (64, 204, [215, 209, 208]), (64, 512, [125, 95, 95])],
)
def test_earliest_use(chunk_size: int, capacity: int, gets: list[int]) -> None:
    random, one_byte_each = PortableRandom(1), np.ones(2048, dtype=np.int64)
    orders = [random.permutation(2048) for _ in range(3)]
    cache = EarliestUseCache(starts(2048, chunk_size), one_byte_each, capacity)
    assert gets_of_epochs(cache, orders, capacity) == gets


def test_a_sample_without_bytes_stays_where_there_is_room_without_it() -> None:
    cache = EarliestUseCache(starts(3, 3), np.array([0, 1, 1]), 2)
    cache.missed(2, 0, KnownUses(np.array([2, 0, 1, 2, 0, 1]), 3))
    cache.capacity_bytes = 0
    assert cache.shrink().tolist() == [1, 2]
    assert cache.holds(0)


@pytest.mark.variants("4-3000", "1-700")
@pytest.mark.parametrize("chunk_size", [1, 8, 700, 3000])
@pytest.mark.parametrize("largest", [1, 4])
def test_what_is_used_last_leaves_first_and_of_equals_the_smallest(chunk_size: int, largest: int) -> None:
    """By a model that sorts all that is in memory each time."""
    generator, num_samples = np.random.default_rng(chunk_size), 6000
    lengths = generator.integers(0, largest + 1, num_samples)
    orders = [generator.permutation(num_samples) for _ in range(2)]
    uses = KnownUses(np.concatenate(orders), num_samples)
    cache = EarliestUseCache(starts(num_samples, chunk_size), lengths, int(lengths.sum()) * 2 // 5)
    held: dict[int, int] = {}

    def evicted(spared: set[int]) -> list[int]:
        gone = []
        for sample in sorted(held, key=lambda sample: (-held[sample], sample)):
            if int(lengths[list(held)].sum()) <= cache.capacity_bytes:
                break
            if sample not in spared:
                gone.append(sample)
                del held[sample]
        return gone

    for time, sample in enumerate(orders[0][:40].tolist()):
        if cache.holds(sample):
            held.pop(sample)
            cache.forget(np.array([sample]))
            continue
        chunk = range(sample // chunk_size * chunk_size, min(num_samples, (sample // chunk_size + 1) * chunk_size))
        new, (times, samples) = set(chunk) - set(held), uses.after(chunk.start, chunk.stop, time)
        for use, each in sorted(zip(times.tolist(), samples.tolist(), strict=True), reverse=True):
            if each in new:
                held[each] = use
        read = cache.missed(sample, time, uses)
        assert read.forgotten.tolist() == sorted(set(evicted(set())) - new)
        assert read.kept.tolist() == sorted(set(chunk) & set(held))
        if not time % 5:
            spared = set(generator.choice(num_samples, 1000).tolist())
            cache.capacity_bytes -= cache.capacity_bytes // 10
            assert cache.shrink(spared).tolist() == sorted(evicted(spared))
        assert cache.held_bytes == lengths[list(held)].sum()


@pytest.mark.variants("renewal")
@pytest.mark.parametrize(
    ("plan", "chunk_size", "share", "gets"),
    [
        pytest.param("rolling", 8, 0.1, 18.0, marks=pytest.mark.variant),
        pytest.param("rolling", 64, 0.1, 3.90, marks=pytest.mark.variant),
        ("rolling", 64, 0.2, 2.33),
        pytest.param("renewal", 8, 0.2, 12.0, marks=pytest.mark.variant),
        ("renewal", 64, 0.4, 1.26),
    ],
)
def test_plans(plan: Plan, chunk_size: int, share: float, gets: float) -> None:
    """GETs for 64 samples, once memory is full. Known for 131,072 samples; here there are fewer, and some 3 % more."""
    num_samples = 16_384
    generator, capacity = np.random.default_rng(1), int(share * num_samples)
    orders = [generator.permutation(num_samples) for _ in range(4)]
    cache = ClairvoyantCache(starts(num_samples, chunk_size), np.ones(num_samples, dtype=np.int64), capacity, plan)
    found = gets_of_epochs(cache, orders, capacity)
    assert_allclose(sum(found[1:3]) / 2 / num_samples * 64, gets, rtol=0.05)


@pytest.mark.parametrize("plan", ["rolling", "renewal"])
@pytest.mark.parametrize(("chunk_size", "gets_at_80_percent"), [(8, 3.9), (64, 0.6)])
def test_memory_for_more_than_half_is_used(plan: Plan, chunk_size: int, gets_at_80_percent: float) -> None:
    """Plans end at the end of the next epoch: by themselves they read each chunk again in every second epoch, even if
    there is memory for all."""
    num_samples = 2048
    generator, one_byte_each = np.random.default_rng(1), np.ones(num_samples, dtype=np.int64)
    orders = [generator.permutation(num_samples) for _ in range(5)]

    def gets(capacity: int) -> list[int]:
        cache = ClairvoyantCache(starts(num_samples, chunk_size), one_byte_each, capacity, plan)
        return gets_of_epochs(cache, orders, capacity)

    num_chunks = num_samples // chunk_size
    assert gets(num_samples) == [num_chunks, 0, 0, 0, 0], "what fits is read twice"
    assert sum(gets(num_samples - chunk_size)[1:]) < num_chunks, "a little less memory, and half is read again"
    assert sum(gets(int(0.8 * num_samples))[1:]) / 4 / num_samples * 64 < gets_at_80_percent


def test_what_was_held_for_good_leaves_when_memory_becomes_less() -> None:
    num_samples, generator = 512, np.random.default_rng(1)
    cache = ClairvoyantCache(starts(num_samples, 8), np.ones(num_samples, dtype=np.int64), num_samples)
    asked = np.concatenate([generator.permutation(num_samples) for _ in range(4)])
    uses = KnownUses(asked, num_samples)
    for time, sample in enumerate(asked[: 3 * num_samples].tolist()):
        if time == num_samples:
            cache.capacity_bytes = 200
            assert len(cache.shrink()) == num_samples - 200
        if cache.holds(sample):
            cache.used(sample, time, uses)
        else:
            cache.missed(sample, time, uses)
        if time % 16 == 0:
            assert sum(map(cache.holds, range(num_samples))) == cache.held_bytes <= cache.capacity_bytes


def hits(cache: ChunkCache, asked: Int64Array, num_samples: int) -> int:
    found, uses = 0, KnownUses(asked, num_samples)
    for time, sample in enumerate(asked.tolist()):
        if cache.holds(sample):
            found += 1
            cache.used(sample, time, uses)
        else:
            cache.missed(sample, time, uses)
    return found


@pytest.mark.variants("50")
@pytest.mark.parametrize(
    ("capacity", "fifo", "lru", "never", "least"),
    [(50, 3623, 3720, 4349, 10156), (150, 9467, 10154, 10492, 15591)],
)
def test_hits_of_skewed_accesses(capacity: int, fifo: int, lru: int, never: int, least: int) -> None:
    asked, lengths = PortableRandom(5).skewed(500, 20_000), np.ones(500, dtype=np.int64)
    assert hits(FifoCache(lengths, capacity), asked, 500) == fifo
    assert hits(LruCache(lengths, capacity), asked, 500) == lru
    assert hits(NeverEvictCache(lengths, capacity), asked, 500) == never
    assert hits(EarliestUseCache(starts(500, 1), lengths, capacity), asked, 500) == least


@pytest.mark.parametrize(("share", "lru"), [(0.1, 0.005), (0.2, 0.0215), (0.5, 0.153)])
def test_an_epoch_is_a_scan_that_a_cache_by_recency_does_not_survive(share: float, lru: float) -> None:
    num_samples, generator = 20_000, np.random.default_rng(3)
    lengths, epochs = np.ones(num_samples, dtype=np.int64), [generator.permutation(num_samples) for _ in range(2)]
    for make, expected in ((LruCache, lru), (NeverEvictCache, share)):
        cache = make(lengths, int(share * num_samples))
        assert hits(cache, epochs[0], num_samples) == 0
        assert_allclose(hits(cache, epochs[1], num_samples) / num_samples, expected, atol=0.005)


def test_a_chunk_is_no_more_work_where_a_hundred_times_as_much_is_in_memory() -> None:
    """Else many chunks that are read together hold a pod for minutes."""

    def cpu_seconds(num_samples: int) -> float:
        """Of the last of the chunks that there is memory for."""
        order = np.random.default_rng(1).permutation(num_samples)
        uses = KnownUses(np.concatenate([order, order]), num_samples)
        cache = EarliestUseCache(starts(num_samples, 64), np.ones(num_samples, dtype=np.int64), num_samples)
        for sample in range(0, num_samples - 64 * 32, 64):
            cache.missed(sample, 0, uses)
        before = thread_time()
        for sample in range(num_samples - 64 * 32, num_samples, 64):
            cache.missed(sample, 0, uses)
        return thread_time() - before

    assert cpu_seconds(204_800) < 5 * cpu_seconds(4_096)
