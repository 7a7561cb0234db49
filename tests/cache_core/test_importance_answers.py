"""Does SHADE's cache, with its ranks and draws, reach the answers that are known for it? They are of simulations that
were written apart, from the paper."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.papers.known_uses import KnownUses
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose
from tests.draws import draws

from refill.protocol.importance import drawn, rank_scores, share_of, with_cached_first
from refill_service.cache_core.exact.sample_caches import ImportanceCache

NOTHING_KNOWN = KnownUses(np.empty(0, dtype=np.int64), 0)


def one_byte_each(num_samples: int) -> np.ndarray:
    return np.ones(num_samples, dtype=np.int64)


@pytest.mark.parametrize(
    ("losses", "ranks"),
    [
        ([0.3, 0.5, 0.4], [2.3026, 2.4849, 2.3979]),
        ([0.6, 1.2, 0.8], [2.3026, 2.4849, 2.3979]),
        ([0.3, 0.5, 0.5, 0.1], [2.3979, 2.4849, 2.4849, 2.3026]),
    ],
)
def test_ranks_within_a_batch(losses: list[float], ranks: list[float]) -> None:
    assert_allclose(rank_scores(np.array(losses)), ranks, atol=5e-5)


def test_the_shares_of_the_papers_example() -> None:
    draws, generator = np.array([4, 7, 3, 5, 3, 5, 2, 2, 1, 10]), np.random.default_rng(1)
    improving = share_of(draws, 0, 2, improving=True, generator=generator)
    assert sorted(improving.tolist()) == [2, 3, 3, 5, 5], "ties by who came first, not by id"
    assert share_of(draws, 1, 2, improving=False, generator=generator).tolist() == [7, 5, 5, 2, 10]
    mine = share_of(draws, 0, 2, improving=False, generator=generator)
    assert mine.tolist() == [4, 3, 3, 2, 1]
    cached = np.isin(np.arange(11), [2])
    assert with_cached_first(mine, cached, 1).tolist() == [2, 4, 3, 3, 1]
    assert with_cached_first(mine, cached, 2).tolist() == [2, 2, 4, 3, 3]
    assert with_cached_first(mine, np.ones(11, dtype=bool), 3).tolist() == [4, 3, 3, 2, 1]


@draws(40)
@given(seed=st.integers(0, 1 << 32), size=st.integers(1, 60), processes=st.integers(1, 9), repetition=st.floats(0, 9))
def test_each_process_has_as_many_positions_and_all_were_drawn(
    seed: int, size: int, processes: int, repetition: float
) -> None:
    generator = np.random.default_rng(seed)
    scores, cached = generator.random(size) + 1, generator.random(size) < 0.5
    scores[generator.random(size) < 0.5] = np.nan
    draws = drawn(scores, generator)
    for improving in (False, True):
        for process in range(processes):
            share = share_of(draws, process, processes, improving=improving, generator=generator)
            order = with_cached_first(share, cached, repetition)
            assert len(order) == -(-size // processes)
            assert set(order.tolist()) <= set(share.tolist()) <= set(draws.tolist())


def test_draws_are_as_probable_as_scores_are_high() -> None:
    generator = np.random.default_rng(2)
    counts = np.bincount(drawn(np.repeat([1.0, np.nan, 3.0], 20_000), generator), minlength=60_000)
    assert_allclose(counts.reshape(3, -1).sum(axis=1) / 60_000, [0.2, 0.2, 0.6], atol=0.01)
    of_equal = np.bincount(drawn(np.full(40_000, np.nan), generator), minlength=40_000)
    shares = [np.mean(of_equal == 0), np.mean(of_equal >= 2), np.mean(of_equal >= 3)]
    assert_allclose(shares, [0.368, 0.264, 0.080], atol=0.006)


def test_importance() -> None:
    """SHADE's Algorithm 1, with two places."""
    cache, done = ImportanceCache(one_byte_each(6), 2), []
    batches = [(1, 2, 3), (3, 4, 1), (4, 2, 5), (5, 3, 4)]
    losses = [(0.9, 0.2, 0.6), (0.1, 0.8, 0.5), (0.7, 0.3, 0.4), (0.2, 0.9, 0.6)]
    for batch, of_batch in zip(batches, losses, strict=True):
        for sample in batch:
            if cache.holds(sample):
                done.append("hit")
                continue
            read = cache.missed(sample, 0, NOTHING_KNOWN)
            evicted = [f"evict {each}" for each in read.forgotten.tolist()]
            done += evicted or (["insert"] if cache.holds(sample) else ["past"])
        cache.scored(np.array(batch), rank_scores(np.array(of_batch)))
    assert done[:3] == ["insert", "insert", "past"]
    assert done[3:6] == ["evict 2", "past", "hit"]
    assert done[6:9] == ["evict 3", "past", "past"]
    assert done[9:] == ["evict 1", "past", "hit"]
    assert [sample for sample in range(6) if cache.holds(sample)] == [4, 5]


def test_what_has_no_score_stays_until_it_has_one() -> None:
    cache = ImportanceCache(one_byte_each(4), 1)
    cache.scored(np.array([1, 2]), np.array([2.0, 1.0]))
    cache.missed(0, 0, NOTHING_KNOWN)
    cache.missed(1, 0, NOTHING_KNOWN)
    assert cache.holds(0), "it has no score"
    cache.scored(np.array([0]), np.array([1.0]))
    cache.missed(3, 0, NOTHING_KNOWN)
    assert cache.holds(0), "nothing is known of 3"
    cache.missed(2, 0, NOTHING_KNOWN)
    assert cache.holds(2), "it is as important as 0"


def test_a_large_sample_takes_the_place_of_several_that_are_all_less_important_or_of_none() -> None:
    cache = ImportanceCache(np.array([1, 1, 1, 3, 2, 9]), 3)
    for sample in range(3):
        cache.missed(sample, 0, NOTHING_KNOWN)
    cache.scored(np.arange(6), np.array([1.0, 2.0, 3.0, 2.5, 2.5, 9.0]))
    assert not len(cache.missed(3, 0, NOTHING_KNOWN).forgotten), "2 is more important"
    assert not len(cache.missed(5, 0, NOTHING_KNOWN).forgotten), "it has no room at all"
    assert cache.missed(4, 0, NOTHING_KNOWN).forgotten.tolist() == [0, 1]
    assert cache.held_bytes == 3
    cache.capacity_bytes = 1
    assert cache.shrink().tolist() == [4], "what is less important leaves first"


@pytest.mark.parametrize(
    ("repetition", "share", "hit", "never_drawn"), [(1, 0.2, 0.325, 0.38), (2.5, 0.2, 0.681, 0.58), (2, 0.5, 1.0, None)]
)
def test_hits_of_the_papers_training_with_made_up_losses(
    repetition: float, share: float, hit: float, never_drawn: float | None
) -> None:
    """Known for 20,000 samples, epochs 5 to 12; here there are fewer of both, and the same within a few hundredths."""
    num_samples, batch = 5000, 64
    generator = np.random.default_rng(1)
    base = np.exp(generator.standard_normal(num_samples))
    cache = ImportanceCache(one_byte_each(num_samples), int(share * num_samples))
    scores = np.full(num_samples, np.nan)
    hits, unseen = [], []
    for _ in range(7):
        cached = np.array([cache.holds(sample) for sample in range(num_samples)])
        mine = share_of(drawn(scores, generator), 0, 1, improving=False, generator=generator)
        order = with_cached_first(mine, cached, repetition)
        hits.append(0)
        for start in range(0, num_samples, batch):
            samples = order[start : start + batch]
            for sample in samples.tolist():
                hits[-1] += cache.holds(sample)
                if not cache.holds(sample):
                    cache.missed(sample, 0, NOTHING_KNOWN)
            ranks = rank_scores(base[samples] * np.exp(0.5 * generator.standard_normal(len(samples))))
            scores[samples] = ranks
            cache.scored(samples, ranks)
        unseen.append(1 - len(np.unique(order)) / num_samples)
    assert np.mean(hits[4:]) / num_samples == pytest.approx(hit, abs=0.035)
    if never_drawn is not None:
        assert np.mean(unseen[4:]) == pytest.approx(never_drawn, abs=0.035)
