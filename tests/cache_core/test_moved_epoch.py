"""What positions ask for when an epoch goes on with other pods: what they got, or one of what is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill_service.cache_core.epoch_order import ExplicitTraces, KeyedTraces, Traces
from refill_service.cache_core.moved_epoch import moved_traces
from refill_service.cache_core.sample_mapping import Int64Array

Received = dict[int, tuple[Int64Array, Int64Array]]


def flat(parts: Iterable[Int64Array]) -> list[int]:
    return [sample for part in parts for sample in part.tolist()]


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


def some_answers(
    traces: Traces, world_size: int, num_samples: int, random: np.random.Generator, before: Received
) -> Received:
    """Any positions beside those of ``before``, answered with any sample that nobody has: as redirection may do."""
    members = traces.members(0, num_samples)
    left = set(range(num_samples) if members is None else np.flatnonzero(members).tolist())
    requests = {rank: ~traces.asked(rank, np.arange(traces.length(rank)))[1] for rank in range(world_size)}
    asked_of = {rank: traces.asked(rank, np.arange(traces.length(rank)))[0] for rank in range(world_size)}
    taken = [asked_of[rank][positions[requests[rank][positions]]] for rank, (positions, _) in before.items()]
    left -= set(np.concatenate([*taken, np.empty(0, dtype=np.int64)]).tolist())
    pool = list(random.permutation(sorted(left)))
    received = {}
    for rank in range(world_size):
        had = dict(zip(*(column.tolist() for column in before[rank]), strict=True)) if rank in before else {}
        for position in np.flatnonzero(random.random(traces.length(rank)) < random.random()).tolist():
            if position not in had:
                had[position] = int(pool.pop()) if requests[rank][position] else int(asked_of[rank][position])
        received[rank] = (
            np.array(sorted(had), dtype=np.int64),
            np.array([had[position] for position in sorted(had)], dtype=np.int64),
        )
    return received


@given(epochs(), st.integers(0, 2**32), st.integers(1, 3))
def test_positions_keep_what_they_got_and_share_the_rest(
    epoch: tuple[Traces, int, int], seed: int, num_moves: int
) -> None:
    """However often the job moves: what ranks received is all that is known from one move to the next."""
    before, world_size, num_samples = epoch
    random, received, now = np.random.default_rng(seed), Received(), before
    wanted = Counter(flat(before.asked(rank, np.arange(before.length(rank)))[0] for rank in range(world_size)))
    members = before.members(0, num_samples)
    for _ in range(num_moves):
        received = some_answers(now, world_size, num_samples, random, received)
        traces = moved_traces(before, world_size, num_samples, received, "key")
        for rank in range(world_size):
            assert len(traces[rank]) == before.length(rank), f"rank {rank} has other positions than before"
            positions, samples = received[rank]
            assert (traces[rank][positions] == samples).all(), f"rank {rank} would get others for what it has had"
        asked = Counter(flat(traces.values()))
        if before.num_requests == (num_samples if members is None else np.count_nonzero(members)):
            assert asked == wanted, "positions ask for other samples than before, all together"
        else:  # some are dropped, whichever
            assert set(asked.values()) <= {1}, "a sample is asked for twice"
        now = ExplicitTraces(num_samples, traces)
        assert now.num_requests == before.num_requests


@given(epochs())
def test_where_nothing_was_received_nothing_changes(epoch: tuple[Traces, int, int]) -> None:
    before, world_size, num_samples = epoch
    traces = moved_traces(before, world_size, num_samples, {}, "key")
    for rank in range(world_size):
        unmoved, _ = before.asked(rank, np.arange(before.length(rank)))
        assert traces[rank].tolist() == unmoved.tolist()


def test_the_same_key_deals_the_same() -> None:
    before = KeyedTraces(100, 2, seed=3)
    received = {0: (np.arange(20), np.arange(20)), 1: (np.arange(5), np.arange(50, 55))}
    first, second = (moved_traces(before, 2, 100, received, "key") for _ in range(2))
    assert all((first[rank] == second[rank]).all() for rank in range(2))


def test_a_sample_that_came_twice_is_refused() -> None:
    before, one = KeyedTraces(10, 2), np.array([0])
    with pytest.raises(ValueError, match="sample 4 was received 2 times"):
        moved_traces(before, 2, 10, {0: (one, np.array([4])), 1: (one, np.array([4]))}, "key")
