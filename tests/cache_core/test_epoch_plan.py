"""The order of a whole epoch: shares of the dataset, woven; the same whoever asks, in whatever order."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill.protocol.plan_settings import STORED_ORDER, PlanSettings
from refill.protocol.weaving import Weaving
from refill_service.cache_core.planned.epoch_plan import EpochPlan
from refill_service.cache_core.planned.shares import Shares
from refill_service.cache_core.sample_mapping import ChunkLayout
from refill_service.planning.plan_measures import spread_of


def of_one_size(samples: np.ndarray) -> np.ndarray:
    return np.ones(len(samples), dtype=np.int64)


def plan_of(
    blobs: list[int],
    chunk_size: int,
    shares: int,
    memory: int,
    run: int = 64,
    seed: int = 0,
    epoch: int = 0,
    selection: str = "",
    read_seed: int | None = None,
) -> EpochPlan:
    first_sample = np.concatenate([[0], np.cumsum(blobs)]).astype(np.int64)
    layout = ChunkLayout(first_sample, min(chunk_size, max(blobs)))
    settings = PlanSettings(
        "made up", int(first_sample[-1]), chunk_size, shares, memory, run, seed, selection, read_seed=read_seed
    )
    return EpochPlan(settings, Shares(layout, shares), of_one_size, epoch, ramped=epoch == 0)


plans = st.builds(
    plan_of,
    st.lists(st.integers(0, 400), min_size=1, max_size=5).filter(lambda blobs: max(blobs) > 0),
    st.integers(1, 70),
    st.integers(1, 40),
    st.integers(0, 500),
    st.integers(1, 80),
    st.integers(-5, 5),
    st.integers(0, 3),
    read_seed=st.none() | st.integers(-5, 5),
)


@given(plans)
def test_every_sample_is_at_one_position(plan: EpochPlan) -> None:
    order = plan.whole()
    assert np.sort(order).tolist() == list(range(plan.settings.num_samples))


of_stored_order = st.builds(
    plan_of,
    st.lists(st.integers(0, 400), min_size=1, max_size=5).filter(lambda blobs: max(blobs) > 0),
    st.integers(1, 70),
    st.integers(1, 40),
    st.integers(0, 500),
    selection=st.just(STORED_ORDER),
)


@given(of_stored_order)
def test_in_stored_order_position_p_is_sample_p(plan: EpochPlan) -> None:
    everything = list(range(plan.num_positions))
    assert plan.whole().tolist() == everything
    assert plan.samples(np.array(everything)).tolist() == everything
    for number in range(plan.shares.num_shares):
        share, order = plan.of_share(number)
        assert (np.diff(order.reads) > 0).all(), "chunks are read in the order of the dataset"
        assert plan.weaving.places(share.samples)[1].tolist() == list(range(len(share.samples)))


@given(plans, st.randoms(use_true_random=False))
def test_any_positions_can_be_asked_in_any_order(plan: EpochPlan, random: object) -> None:
    order = plan.whole()
    again = EpochPlan(plan.settings, plan.shares, of_one_size, 1, ramped=False)
    asked = np.arange(plan.num_positions)
    random.shuffle(asked)  # type: ignore[attr-defined]
    first = again.samples(asked[: len(asked) // 2])
    rest = again.samples(asked[len(asked) // 2 :])
    whole = EpochPlan(plan.settings, plan.shares, of_one_size, 1, ramped=False).whole()
    assert np.concatenate([first, rest]).tolist() == whole[asked].tolist()
    assert plan.samples(np.arange(plan.num_positions)).tolist() == order.tolist()


@given(plans)
def test_memory_holds_what_was_read_at_every_position(plan: EpochPlan) -> None:
    """From the order alone: chunks are read at their first use at the latest, and all that was read and not delivered
    fits into memory, but for a chunk of each share, if memory is smaller than those."""
    order = plan.whole()
    layout = ChunkLayout(plan.shares.layout.first_sample, plan.shares.layout.chunk_size)
    chunks = layout.locate(order)[0]
    _, first_use = np.unique(chunks, return_index=True)
    sizes = np.diff(layout.starts(np.arange(layout.num_chunks + 1)))
    read = np.zeros(len(order) + 1, dtype=np.int64)
    np.add.at(read, first_use, sizes)
    held = np.cumsum(read)[:-1] - np.arange(len(order))
    of_shares = plan.shares.sizes * plan.settings.memory_bytes // max(1, plan.num_positions)
    largest = np.zeros(plan.shares.num_shares, dtype=np.int64)
    np.maximum.at(largest, plan.shares.share_of(np.arange(layout.num_chunks)), sizes)
    assert held.max(initial=0) <= np.maximum(of_shares, largest).sum()


def test_epochs_seeds_and_settings_give_other_orders_of_other_streams() -> None:
    """Seed 1 in epoch 0 is not seed 0 in epoch 1."""
    orders = [
        plan_of([1000], 10, 2, 200, seed=seed, epoch=epoch).whole().tolist()
        for seed, epoch in itertools.product(range(4), range(4))
    ]
    orders.append(plan_of([1000], 10, 3, 200, epoch=1).whole().tolist())
    orders.append(plan_of([1000], 8, 2, 200, epoch=1).whole().tolist())
    for one, other in itertools.combinations(orders, 2):
        assert one != other
        assert sum(a == b for a, b in zip(one, other, strict=True)) < 30


def test_orders_never_change() -> None:
    """States and receipts name a plan by its id: what that stands for is the format."""
    order = plan_of([5000, 333, 0, 4711], 16, 6, 1000, 32, 12345, 3).whole()
    digest = hashlib.blake2b(order.astype("<i8").tobytes(), digest_size=8).hexdigest()
    assert (digest, order[:5].tolist()) == ("d935baa420ecad40", [4061, 8549, 7474, 3098, 7974])


def reads_of(plan: EpochPlan) -> list[list[int]]:
    return [plan.of_share(number)[1].reads.tolist() for number in range(plan.shares.num_shares)]


@given(plans, st.integers(-5, 5))
def test_plans_of_one_read_seed_read_chunks_in_one_order(plan: EpochPlan, seed: int) -> None:
    """And a plan whose seed that is reads in the order that it has without one."""
    read_seed = plan.settings.seed if plan.settings.read_seed is None else plan.settings.read_seed
    other = replace(plan.settings, seed=seed, read_seed=read_seed)
    without = replace(plan.settings, seed=read_seed, read_seed=None)
    plan, of_other, alone = (
        EpochPlan(settings, plan.shares, of_one_size, 1, ramped=False) for settings in (plan.settings, other, without)
    )
    assert reads_of(plan) == reads_of(of_other) == reads_of(alone)
    if seed == read_seed:
        assert of_other.whole().tolist() == alone.whole().tolist()


def test_samples_of_one_read_seed_are_where_chance_has_them() -> None:
    """Two plans have as few samples at the same position as two that read in other orders. What was read together
    meets in a batch as rarely as ever."""
    first_sample, met = np.array([0, 20_000]), []
    for read_seed in (None, 7):
        plans_here = [plan_of([20_000], 16, 2, 4000, seed=seed, read_seed=read_seed, epoch=1) for seed in (1, 2)]
        one, other = (plan.whole() for plan in plans_here)
        assert np.count_nonzero(one == other) < 10
        met.append(spread_of(one, first_sample, 16, 64, 64)["cobatch_rank_mates"]["all"])
    assert max(met) <= 0.05


def test_orders_of_read_seeds_never_change() -> None:
    plan = plan_of([5000, 333, 0, 4711], 16, 6, 1000, 32, 12345, 3, read_seed=-4)
    digest = hashlib.blake2b(plan.whole().astype("<i8").tobytes(), digest_size=8).hexdigest()
    assert digest == "ee0ee3d0d100db9b"


@given(st.lists(st.integers(0, 300), min_size=1, max_size=20), st.integers(1, 70), st.integers(0, 2**64 - 1))
def test_weaving_is_arithmetic_both_ways(sizes: list[int], run: int, key: int) -> None:
    weaving = Weaving(np.array(sizes), run, key)
    positions = np.arange(sum(sizes))
    shares, places = weaving.places(positions)
    for share, size in enumerate(sizes):
        assert places[shares == share].tolist() == list(range(size)), "a share's samples keep their order"
        found = weaving.positions(share, np.arange(size))
        assert found.tolist() == np.flatnonzero(shares == share).tolist()
    some = np.random.default_rng(1).permutation(positions)[:17]
    with mock.patch("refill.protocol.weaving._CELLS_NEAR", 0):  # else so few rounds are looked through at once
        far = Weaving(np.array(sizes), run, key)
    for asking, asked in ((weaving, some), (far, some), (far, positions)):
        for alone, of_all in zip(asking.places(asked), (shares, places), strict=True):
            assert alone.tolist() == of_all[asked].tolist()


@pytest.mark.parametrize(("num_samples", "shares"), [(131_072, 8), (1_281_167, 128), (100_000, 400)])
def test_a_batch_needs_few_shares_however_many_there_are(num_samples: int, shares: int) -> None:
    sizes = np.full(shares, num_samples // shares)
    weaving = Weaving(sizes, 64, 5)
    of, _ = weaving.places(np.arange(weaving.num_positions))
    for first in range(0, weaving.num_positions - 256, 1000):
        runs = 1 + np.count_nonzero(np.diff(of[first : first + 256]))
        assert runs <= 256 / 64 + 2, f"the batch from {first} on is of {runs} runs"


def test_shares_end_together() -> None:
    """Where they are not equal, too: else the last positions would all be of one share."""
    sizes = np.array([3000, 5000, 4000])
    shares, _ = Weaving(sizes, 64, 1).places(np.arange(12_000))
    for end in range(1000, 12_001, 1000):
        delivered = np.bincount(shares[:end], minlength=3)
        assert (abs(delivered - sizes * end / 12_000) <= 128).all(), f"{delivered} of {end}"


@given(st.lists(st.integers(0, 500), min_size=1, max_size=6).filter(max), st.integers(1, 40), st.integers(1, 50))
def test_each_chunk_is_of_one_share(blobs: list[int], chunk_size: int, num_shares: int) -> None:
    layout = ChunkLayout(np.concatenate([[0], np.cumsum(blobs)]), min(chunk_size, max(blobs)))
    shares = Shares(layout, num_shares)
    of_chunks = shares.share_of(np.arange(layout.num_chunks))
    for number in range(num_shares):
        share = shares.share(number)
        assert share.chunks.tolist() == np.flatnonzero(of_chunks == number).tolist()
        assert len(share.samples) == shares.sizes[number] == share.starts[-1]
        assert layout.locate(share.samples)[0].tolist() == np.repeat(share.chunks, np.diff(share.starts)).tolist()


def test_a_share_looks_like_the_whole_dataset() -> None:
    """Each has as much of each sixty-fourth of it, whatever its number; and shares are equal."""
    shares = Shares(ChunkLayout(np.array([0, 1_000_000]), 16), 10)
    assert shares.sizes.max() - shares.sizes.min() <= 64 * 16
    for number in range(10):
        counts = np.bincount(shares.share(number).samples * 64 // 1_000_000, minlength=64)
        assert counts.min() > 0.5 * counts.mean()
        assert counts.max() < 1.5 * counts.mean()


def test_a_hundred_million_samples_are_planned_share_by_share() -> None:
    """Nothing is as long as the dataset: neither chunks nor samples."""
    layout = ChunkLayout(np.arange(0, 10**8 + 1, 10**6), 64)
    shares = Shares(layout, 5_000)
    settings = PlanSettings("made up", 10**8, 64, 5_000, 10**7, 64, 1)
    plan = EpochPlan(settings, shares, of_one_size, 7, ramped=False)
    positions = plan.weaving.positions(17, np.arange(10))
    share, order = plan.of_share(17)
    assert plan.samples(positions).tolist() == share.samples[order.samples[:10]].tolist()
    assert len(share.samples) < 30_000
