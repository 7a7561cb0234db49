"""The order of an epoch: a bijection with random access, dealt to ranks as torch does it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.draws import draws

from refill.errors import InvalidInput
from refill_service.cache_core.epoch_order import ExplicitTraces, KeyedPermutation, KeyedTraces

sizes = st.one_of(st.integers(1, 3000), st.integers(65_530, 70_000), st.sampled_from([2**17 - 1, 2**17, 2**17 + 1]))


@draws(60)
@given(sizes, st.text(max_size=20))
def test_bijection_and_inverse(n: int, key: str) -> None:
    permutation = KeyedPermutation(n, key)
    everything = np.arange(n)
    shuffled = permutation.forward(everything)
    assert np.array_equal(np.sort(shuffled), everything)
    assert np.array_equal(permutation.inverse(shuffled), everything)


@given(st.integers(10**9, 10**15), st.integers(0, 2**32))
def test_random_access_in_constant_memory(n: int, key: int) -> None:
    permutation = KeyedPermutation(n, str(key))
    places = np.random.default_rng(key).integers(0, n, 50)
    samples = permutation.forward(places)
    assert ((samples >= 0) & (samples < n)).all()
    assert np.array_equal(permutation.inverse(samples), places)


@pytest.mark.parametrize("n", [1000, 100_000])
def test_every_sample_is_equally_likely_everywhere(n: int) -> None:
    """Chi-square over 20 x 20 cells of (place, sample), many keys; and neighbours don't stay together."""
    cells = np.zeros((20, 20))
    places = np.arange(0, n, n // 1000)
    distances = []
    for key in range(200):
        samples = KeyedPermutation(n, f"k{key}").forward(places)
        np.add.at(cells, (places * 20 // n, samples * 20 // n), 1)
        distances.append(np.abs(np.diff(samples)).mean() / n)
    expected = cells.sum() / cells.size
    chi_square = ((cells - expected) ** 2 / expected).sum()
    assert chi_square < 361 + 5 * np.sqrt(2 * 361), f"chi-square {chi_square:.0f} with 361 degrees of freedom"
    assert abs(np.mean(distances) - 1 / 3) < 0.005, "mean distance of neighbours should be a third"


def test_the_order_never_changes() -> None:
    """Pods of different machines and versions must agree: these values are the format."""
    assert KeyedPermutation(10, "a").forward(np.arange(10)).tolist() == [6, 8, 3, 9, 4, 7, 0, 1, 2, 5]
    assert KeyedPermutation(10**12, "a").forward(np.arange(4)).tolist() == [
        715749773963,
        186208936152,
        361403496021,
        25479580382,
    ]


@settings(deadline=None)
@given(st.integers(1, 200), st.integers(1, 9), st.booleans(), st.booleans(), st.integers(0, 3))
def test_ranks_share_an_epoch_as_distributed_sampler_does(
    n: int, world: int, shuffle: bool, drop_last: bool, epoch: int
) -> None:
    from torch.utils.data import DistributedSampler

    traces = KeyedTraces(n, world, seed=1, epoch=epoch, shuffle=shuffle, drop_last=drop_last)
    requests = []
    for rank in range(world):
        theirs = DistributedSampler(range(n), num_replicas=world, rank=rank, shuffle=False, drop_last=drop_last)
        samples, repeats = traces.asked(rank, np.arange(traces.length(rank)))
        assert traces.length(rank) == len(theirs) <= traces.longest
        if not shuffle:
            assert samples.tolist() == list(theirs)
        requests += samples[~repeats].tolist()
    assert len(set(requests)) == len(requests)
    if not drop_last:
        assert sorted(requests) == list(range(n))


@given(st.integers(1, 500), st.integers(1, 7))
def test_position_of_is_the_inverse_of_asked(n: int, world: int) -> None:
    traces = KeyedTraces(n, world, seed=4)
    ranks, positions = traces.position_of(np.arange(n))
    for sample in range(0, n, 17):
        assert traces.asked(int(ranks[sample]), positions[sample : sample + 1])[0][0] == sample


@given(st.integers(1, 60), st.integers(1, 7), st.booleans(), st.integers(0, 20), st.integers(0, 20), st.integers(0, 99))
def test_ranks_in_step_ask_in_turn(n: int, world: int, drop_last: bool, start: int, more: int, seed: int) -> None:
    drawn = np.random.default_rng(seed)
    explicit = {rank: drawn.integers(0, n, drawn.integers(0, 30)) for rank in range(world)}
    for traces in (KeyedTraces(n, world, seed=seed, drop_last=drop_last), ExplicitTraces(n, explicit)):
        expected = []
        for position in range(start, start + more):
            for rank in range(world):
                if position < traces.length(rank):
                    samples, repeats = traces.asked(rank, np.array([position]))
                    expected.append((position * world + rank, int(samples[0]), bool(repeats[0])))
        found = traces.in_step(start, start + more)
        assert list(zip(*(column.tolist() for column in found), strict=True)) == expected


def test_explicit_traces_know_repeats_and_members() -> None:
    traces = ExplicitTraces(10, {1: np.array([3, 5]), 0: np.array([5, 2, 5])})
    assert traces.asked(0, np.arange(3))[1].tolist() == [False, False, True]
    assert traces.asked(1, np.arange(2))[1].tolist() == [False, True], "rank 0 asks for 5 first"
    members = traces.members(2, 6)
    assert members is not None
    assert members.tolist() == [True, True, False, True]
    with pytest.raises(InvalidInput, match="rank 2 asks for sample 10; there are 0 to 9"):
        ExplicitTraces(10, {2: np.array([1, 10])})


def test_two_epochs_differ() -> None:
    first, second = (KeyedTraces(1000, seed=1, epoch=e).asked(0, np.arange(1000))[0] for e in (0, 1))
    assert (first == second).mean() < 0.01
