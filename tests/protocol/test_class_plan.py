"""Plans within classes, judged by the order alone: each sample once, classes as asked, and no share holds more than it
is planned for."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill.errors import InvalidInput
from refill.protocol.class_order import balanced_order, bucket_order, positions_in_turn, rank_part
from refill.protocol.class_plan import (
    StoredSamples,
    chunk_entries,
    chunks_and_shares,
    plan_epoch_within_classes,
    plan_within_classes,
)
from refill.protocol.plan_settings import PLAN_VERSION, WITHIN_CLASSES, WITHIN_CLASSES_VERSION, PlanSettings


class Drawn(NamedTuple):
    asked: np.ndarray
    classes: np.ndarray
    stored: StoredSamples
    memory_bytes: int
    num_shares: int
    key: int
    ramped: bool


@st.composite
def drawn(draw: st.DrawFn) -> Drawn:
    num_samples = draw(st.one_of(st.sampled_from([1, 2, 7]), st.integers(1, 1500)))
    chunk_size = draw(st.sampled_from([1, 2, 8, 16, 64, 1000]))
    num_shares = draw(st.integers(1, 9))
    draws = np.random.default_rng(draw(st.integers(0, 999)))
    num_classes = draw(st.sampled_from([1, 2, 10, 30, 300]))
    classes = draws.integers(0, num_classes, num_samples)
    if draw(st.booleans()):  # a rare one
        classes[draws.integers(0, num_samples, 3)] = num_classes
    if draw(st.booleans()):
        classes = np.sort(classes)
    classes = np.unique(classes, return_inverse=True)[1].astype(np.int64)
    asked = {
        "random": lambda: classes[draws.permutation(num_samples)],
        "sorted": lambda: np.sort(classes),
        "balanced": lambda: balanced_order(np.bincount(classes), draws),
        "buckets": lambda: bucket_order(classes, 32, draws),
    }[draw(st.sampled_from(["random", "sorted", "balanced", "buckets"]))]()
    sizes = {
        "one size": lambda: np.ones(num_samples, dtype=np.int64),
        "log-normal": lambda: draws.lognormal(11, 1, num_samples).astype(np.int64),
        "some empty": lambda: draws.integers(0, 3, num_samples) * 1000,
    }[draw(st.sampled_from(["one size", "log-normal", "some empty"]))]()
    chunks = np.arange(num_samples, dtype=np.int64) // chunk_size
    shares = draws.integers(0, num_shares, int(chunks[-1]) + 1)[chunks]
    total = int(sizes.sum())
    memory = draw(st.sampled_from([0, total // 20, total // 10, total // 4, total, 3 * total]))
    key = draw(st.integers(0, 2**64 - 1))
    return Drawn(asked, classes, StoredSamples(chunks, shares, sizes), memory, num_shares, key, draw(st.booleans()))


def most_held(samples: np.ndarray, stored: StoredSamples, share: int) -> tuple[int, int]:
    """The most bytes that a share ever holds, if each chunk is read when it is first used; and of its largest chunk."""
    mine = samples[stored.shares[samples] == share]
    chunk_bytes = np.bincount(stored.chunks, stored.lengths).astype(np.int64)
    chunks, first_use = np.unique(stored.chunks[mine], return_index=True)
    comes = np.zeros(len(mine), dtype=np.int64)
    comes[first_use] = chunk_bytes[chunks]
    gone = np.cumsum(stored.lengths[mine]) - stored.lengths[mine]
    return int((np.cumsum(comes) - gone).max(initial=0)), int(chunk_bytes[chunks].max(initial=0))


@given(drawn())
def test_each_sample_comes_once_composed_as_asked_and_memory_holds_what_was_read(of: Drawn) -> None:
    found = plan_within_classes(*of[:-1], ramped=of.ramped)
    assert np.sort(found.samples).tolist() == list(range(len(of.classes))), "a sample is missing, or comes twice"
    assert of.classes[found.samples].tolist() == of.asked.tolist(), "a position has a sample of another class"
    if found.keeps_rule:
        for share in range(of.num_shares):
            memory = of.memory_bytes * int((of.stored.shares == share).sum()) // len(of.classes)
            held, largest = most_held(found.samples, of.stored, share)
            assert held <= max(memory, largest), f"share {share} holds {held} bytes, and {memory} are planned for"


@given(drawn())
def test_a_plan_follows_from_its_arguments(of: Drawn) -> None:
    first, again = (plan_within_classes(*of[:-1], ramped=of.ramped).samples.tolist() for _ in range(2))
    assert first == again


@given(drawn())
def test_with_memory_for_all_every_order_of_classes_keeps_the_rule(of: Drawn) -> None:
    total = int(of.stored.lengths.sum())
    largest = int(np.bincount(of.stored.chunks, of.stored.lengths).max())
    memory = (total + largest) * len(of.classes) * 2  # of each share, however few samples it has
    assert plan_within_classes(*of._replace(memory_bytes=memory)[:-1]).keeps_rule


def mixed(num_samples: int, num_classes: int) -> np.ndarray:
    return np.random.default_rng(1).permutation(num_samples) % num_classes


def stored_in(chunk_size: int, num_samples: int, num_shares: int) -> StoredSamples:
    chunks = np.arange(num_samples, dtype=np.int64) // chunk_size
    return StoredSamples(chunks, chunks % num_shares, np.ones(num_samples, dtype=np.int64))


@pytest.mark.variants("balanced-False-1", "balanced-True-8", "buckets-False-8", "buckets-True-1")
@pytest.mark.parametrize("num_shares", [1, 8])
@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("order", ["buckets", "balanced"])
def test_the_rule_is_kept_where_memory_holds_a_dozen_chunks_of_each_class(
    num_shares: int, is_sorted: bool, order: str
) -> None:
    """10 classes, memory for 10 %, chunks of 64: 20 chunks of each class."""
    num_samples = 131_072
    classes = np.sort(mixed(num_samples, 10)) if is_sorted else mixed(num_samples, 10)
    draws = np.random.default_rng(2)
    asked = bucket_order(classes, 256, draws) if order == "buckets" else balanced_order(np.bincount(classes), draws)
    found = plan_within_classes(
        asked, classes, stored_in(64, num_samples, num_shares), num_samples // 10, num_shares, key=1
    )
    assert found.keeps_rule


@given(st.integers(1, 500), st.integers(1, 5), st.integers(1, 20), st.booleans())
def test_positions_in_turn(num_positions: int, world_size: int, batch_size: int, drop_last: bool) -> None:
    """All of them once; and each rank's in the order in which it has them."""
    found = positions_in_turn(num_positions, world_size, batch_size, drop_last=drop_last)
    assert np.sort(found).tolist() == list(range(num_positions))
    places = np.argsort(found)
    whole_steps = np.arange(num_positions // (world_size * batch_size) * world_size * batch_size)
    for rank in range(world_size):
        mine = rank_part(whole_steps, rank, world_size, batch_size, drop_last=drop_last)
        assert (np.diff(places[mine]) > 0).all()


def test_where_samples_lie_comes_through() -> None:
    chunks, shares = np.array([0, 0, 5, 2**40]), np.array([0, 0, 65_535, 3])
    found = chunks_and_shares(chunk_entries(chunks, shares))
    assert [each.tolist() for each in found] == [chunks.tolist(), shares.tolist()]


def settings_of(version: int, selection: str) -> PlanSettings:
    return PlanSettings("golden", 5000, 16, 4, 600, seed=-3, selection=selection, version=version)


@pytest.mark.parametrize(("epoch", "digest"), [(0, "d9ec323645e94222"), (1, "20cb74b522a95079")])
def test_golden(epoch: int, digest: str) -> None:
    """A change of this order is a new version of the plan."""
    plan = settings_of(WITHIN_CLASSES_VERSION, WITHIN_CLASSES + "golden")
    classes = np.arange(5000) * 7919 % 5000 // 400
    order = np.arange(5000) * 17 % 5000 * 7919 % 5000 // 400
    in_turn = positions_in_turn(5000, 2, 32, drop_last=False)
    samples = plan_epoch_within_classes(in_turn, order, classes, stored_in(16, 5000, 4), plan, epoch)
    assert classes[samples].tolist() == order.tolist()
    assert hashlib.blake2b(samples.astype("<i8").tobytes(), digest_size=8).hexdigest() == digest


def test_versions_have_names_of_their_own() -> None:
    assert settings_of(PLAN_VERSION, "0123").plan_id == "405d8abcc8c42b3a019b064bb351377e"
    within = WITHIN_CLASSES + "0123"
    with pytest.raises(InvalidInput, match="plan version 1 does not go with selection 'within:0123'"):
        settings_of(PLAN_VERSION, within)
    with pytest.raises(InvalidInput, match="plan version 2 does not go with selection ''"):
        settings_of(WITHIN_CLASSES_VERSION, "")
    with pytest.raises(InvalidInput, match="plan version 3 is not known here; versions 1 and 2 are"):
        settings_of(3, within)
