"""What positions ask for when an epoch goes on with other pods: what they got, or one of what is left."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill_service.cache_core.epoch_order import ExplicitTraces, KeyedTraces, Traces
from refill_service.cache_core.moved_epoch import moved_traces
from refill_service.cache_core.sample_mapping import Int64Array

Received = dict[int, tuple[Int64Array, Int64Array]]


@st.composite
def epochs(draw: st.DrawFn) -> tuple[Traces, int, int]:
    """``(traces, ranks, samples)``: from a seed, with padding or with a tail that is dropped, or posted by ranks."""
    num_samples, world_size = draw(st.integers(1, 60)), draw(st.integers(1, 4))
    if draw(st.booleans()):
        drop_last = draw(st.booleans()) and num_samples >= world_size
        keyed = KeyedTraces(num_samples, world_size, seed=draw(st.integers(0, 5)), drop_last=drop_last)
        return keyed, world_size, num_samples
    ids = st.lists(st.integers(0, num_samples - 1), max_size=40)
    posted = {rank: np.array(draw(ids), dtype=np.int64) for rank in range(world_size)}
    return ExplicitTraces(num_samples, posted), world_size, num_samples


def some_answers(traces: Traces, world_size: int, num_samples: int, random: np.random.Generator) -> Received:
    """Any positions, in any order, each answered with any sample that nobody has: what redirection may come to."""
    members = traces.members(0, num_samples)
    left = list(random.permutation(np.arange(num_samples) if members is None else np.flatnonzero(members)))
    received = {}
    for rank in range(world_size):
        length = traces.length(rank)
        positions = np.flatnonzero(random.random(length) < random.random())
        asked, repeats = traces.asked(rank, positions)
        samples = [int(a) if again else int(left.pop()) for a, again in zip(asked, repeats, strict=True)]
        received[rank] = positions, np.array(samples, dtype=np.int64)
    return received


@given(epochs(), st.integers(0, 2**32))
def test_positions_keep_what_they_got_and_share_the_rest(epoch: tuple[Traces, int, int], seed: int) -> None:
    before, world_size, num_samples = epoch
    received = some_answers(before, world_size, num_samples, np.random.default_rng(seed))
    traces = moved_traces(before, world_size, num_samples, received, "key")
    requests: list[int] = []
    for rank in range(world_size):
        length = before.length(rank)
        assert len(traces[rank]) == length, f"rank {rank} has other positions than before"
        positions, samples = received[rank]
        assert (traces[rank][positions] == samples).all(), f"rank {rank} would get others for what it has had"
        asked, repeats = before.asked(rank, np.arange(length))
        assert (traces[rank][repeats] == asked[repeats]).all(), "a repeat asks for another sample"
        requests += traces[rank][~repeats].tolist()
    assert len(requests) == len(set(requests)) == before.num_requests, "a sample is asked for twice"
    members = before.members(0, num_samples)
    assert members is None or set(requests) == set(np.flatnonzero(members).tolist()), "others than before"
    if not any(len(positions) for positions, _ in received.values()):
        for rank in range(world_size):
            unmoved, _ = before.asked(rank, np.arange(before.length(rank)))
            assert (traces[rank] == unmoved).all(), "nothing was received, and still something has changed"


def test_the_same_key_deals_the_same() -> None:
    before = KeyedTraces(100, 2, seed=3)
    received = {0: (np.arange(20), np.arange(20)), 1: (np.arange(5), np.arange(50, 55))}
    first, second = (moved_traces(before, 2, 100, received, "key") for _ in range(2))
    assert all((first[rank] == second[rank]).all() for rank in range(2))


def test_a_sample_that_came_twice_is_refused() -> None:
    before, one = KeyedTraces(10, 2), np.array([0])
    with pytest.raises(ValueError, match="rank 1 has received samples that were another's"):
        moved_traces(before, 2, 10, {0: (one, np.array([4])), 1: (one, np.array([4]))}, "key")
