"""What gives way is drawn from what is in memory, all of it alike, though nobody looks at all of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.draws import draws

from refill_service.cache_core.exact.chunk_caches import BlockCounts, ClairvoyantCache, nth_of
from refill_service.cache_core.sample_mapping import Int64Array

NUM_SAMPLES, CHUNK_SIZE = 5000, 40


class InOrder:
    """Samples are used one after another, for ever."""

    known_until = 2 * NUM_SAMPLES
    goes_on = True

    def after(self, first: int, end: int, time: int) -> tuple[Int64Array, Int64Array]:
        times = np.concatenate([np.arange(first, end), NUM_SAMPLES + np.arange(first, end)])
        known = times > time
        return times[known], (times % NUM_SAMPLES)[known]


@draws(30)
@given(st.integers(0, 1 << 32), st.floats(0, 1))
def test_the_nth_sample_is_that_of_all_in_a_row(seed: int, part: float) -> None:
    generator = np.random.default_rng(seed)
    there, counts = np.zeros(NUM_SAMPLES, dtype=bool), BlockCounts(NUM_SAMPLES)
    for came in (generator.random(NUM_SAMPLES) < part, generator.random(NUM_SAMPLES) < part / 2):
        counts.add(np.flatnonzero(came & ~there))
        there |= came
        left = there & (generator.random(NUM_SAMPLES) < part)
        counts.remove(np.flatnonzero(left))
        there[left] = False

    def are_there(first: int, end: int) -> NDArray[np.bool_]:
        return there[first:end]

    in_a_row = np.flatnonzero(there)
    assert counts.in_block.sum() == len(in_a_row)
    places = generator.integers(0, len(in_a_row), 20) if len(in_a_row) else np.empty(0, dtype=np.int64)
    assert [nth_of(counts.in_block, are_there, place) for place in places.tolist()] == in_a_row[places].tolist()


class LooksAtAll(ClairvoyantCache):
    """The same by the plain rule."""

    def _forget_some(
        self, in_block: Int64Array, may_go: Callable[[int, int], NDArray[np.bool_]], num_bytes: int
    ) -> Int64Array:
        if num_bytes <= 0:
            return np.empty(0, dtype=np.int64)
        held = np.flatnonzero(may_go(0, NUM_SAMPLES))
        assert in_block.sum() == len(held)
        drawn = held[self._random.sample(range(len(held)), min(64, len(held)))]
        if self._lengths[drawn].sum() < num_bytes:
            drawn = np.random.default_rng(self._random.getrandbits(64)).permutation(held)
        forgotten = np.sort(drawn[: int(np.searchsorted(np.cumsum(self._lengths[drawn]), num_bytes)) + 1])
        self.forget(forgotten)
        return forgotten


@draws(30)
@given(st.integers(0, 1 << 32), st.sampled_from([0.2, 0.6, 0.9]))
def test_what_gives_way_is_as_if_all_were_looked_at(seed: int, capacity: float) -> None:
    """What a job with a seed reads does not depend on how it is found."""
    generator, found = np.random.default_rng(seed), list[list[int]]()
    lengths, starts = generator.integers(0, 9, NUM_SAMPLES), np.arange(0, NUM_SAMPLES + 1, CHUNK_SIZE)
    asked = generator.integers(0, NUM_SAMPLES, 60).tolist()
    spared = [set(generator.integers(0, NUM_SAMPLES, 500).tolist()) for _ in asked]
    capacity_bytes = int(capacity * lengths.sum())
    for kind in (ClairvoyantCache, LooksAtAll):
        cache = kind(starts, lengths, capacity_bytes, key=str(seed))
        for number, sample in enumerate(asked):
            if cache.holds(sample):
                cache.used(sample, number, InOrder())
            else:
                found.append(cache.missed(sample, number, InOrder()).forgotten.tolist())
            cache.capacity_bytes = cache.held_bytes - (0, 1, 300, 10_000)[number % 4]
            found.append(cache.shrink(spared[number]).tolist())
            cache.capacity_bytes = capacity_bytes
        found.append(np.flatnonzero(cache.held(np.arange(NUM_SAMPLES))).tolist())
    assert found[: len(found) // 2] == found[len(found) // 2 :]
