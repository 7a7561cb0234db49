"""Which dataset does each position of a mixture have, and which sample of it? Arithmetic, on all numbers."""

from __future__ import annotations

import hashlib
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill.errors import InvalidInput
from refill.protocol.mixture_order import MemberPlace, MixtureEpoch
from refill.protocol.mixture_weights import MixtureWeights, counts_by_weights, memory_parts

Counts = st.lists(st.integers(0, 400), min_size=1, max_size=12).filter(any)


@given(Counts, st.integers(1, 300), st.integers(0, 2**62), st.integers(0, 50))
def test_each_dataset_has_its_count_and_its_samples_come_in_their_order(
    counts: list[int], block: int, seed: int, epoch: int
) -> None:
    order = MixtureEpoch(counts, block, seed, epoch)
    members, nth = order.samples_at(np.arange(order.num_positions))
    for member, count in enumerate(counts):
        assert nth[members == member].tolist() == list(range(count))


@given(Counts, st.integers(1, 300), st.integers(0, 2**62), st.data())
def test_any_positions_are_found_alone_and_what_comes_before_them_is_counted(
    counts: list[int], block: int, seed: int, data: st.DataObject
) -> None:
    members, nth = MixtureEpoch(counts, block, seed, 3).samples_at(np.arange(sum(counts)))
    order = MixtureEpoch(counts, block, seed, 3)
    some = np.array(data.draw(st.lists(st.integers(0, sum(counts) - 1), max_size=20)), dtype=np.int64)
    found = order.samples_at(some)
    assert found[0].tolist() == members[some].tolist()
    assert found[1].tolist() == nth[some].tolist()
    position = data.draw(st.integers(0, sum(counts)))
    assert order.num_before(position) == np.bincount(members[:position], minlength=len(counts)).tolist()


@given(Counts, st.integers(1, 300), st.integers(0, 2**62))
def test_each_block_has_each_dataset_in_its_proportion_to_one_sample(counts: list[int], block: int, seed: int) -> None:
    order, total = MixtureEpoch(counts, block, seed, 0), sum(counts)
    members, _ = order.samples_at(np.arange(total))
    whole = total // block * block
    for first in range(0, total, block):
        here = np.bincount(members[first : first + block], minlength=len(counts)).tolist()
        size = min(block, total - first)
        for count, found in zip(counts, here, strict=True):
            # What is not in whole blocks was rounded, too: a part of a sample, divided among them all.
            apart = abs(found - Fraction(size * count, total))
            assert apart < 1 + (Fraction(block, whole) if first < whole else 0)


@pytest.mark.variants("32", "128", "1024")
@pytest.mark.parametrize("window", [32, 64, 128, 256, 1024])
@pytest.mark.parametrize(
    "counts", [[70_000, 20_000, 9_000, 1_000], [3_000] * 35, [90_000, 9_000, 900, 90, 10]], ids=["few", "many", "skew"]
)
def test_any_positions_in_a_row_have_proportions_to_a_few_samples(counts: list[int], window: int) -> None:
    """Of batches at any place, and of any size; drawn at random they would be up to 40 samples apart."""
    members, _ = MixtureEpoch(counts, 256, 11, 2).samples_at(np.arange(sum(counts)))
    had = np.zeros((len(members) + 1, len(counts)))
    np.cumsum(members[:, None] == np.arange(len(counts)), axis=0, out=had[1:])
    apart = np.abs(had[window:] - had[:-window] - window * np.array(counts) / sum(counts))
    assert apart.max() < 6
    assert apart[::256].max() < 3


@given(
    st.integers(1, 60),
    st.lists(st.integers(0, 200), min_size=1, max_size=8),
)
def test_no_sample_comes_more_often_in_an_epoch_than_its_repeats_rounded_up(size: int, counts: list[int]) -> None:
    place, had = MemberPlace(), Counter[tuple[int, int]]()
    for count in counts:
        place = place.begins(size, count)
        positions = [place.after(size, nth) for nth in range(count)]
        had.update(positions)
        if place.position == 0 or count <= size:
            times = Counter(at.position for at in positions)
            assert set(times.values()) <= {count // size, -(-count // size)}
        place = place.after(size, count)
    assert set(had.values()) <= {1}, "a pass has each sample once"


@pytest.mark.parametrize(
    ("how", "sizes", "expected"),
    [
        ({"weights": [0.7, 0.2, 0.1]}, [1000, 500, 77], [1103, 316, 158]),
        ({"weights": [1, 1, 1], "epoch_size": 1000}, [100, 100, 100], [333, 333, 334]),
        ({"weights": [0.5, 0.3, 0.15, 0.05], "epoch_size": 12345}, [9, 9, 9, 9], [6172, 3703, 1852, 618]),
        ({"weights": [3, 0, 5]}, [10, 20, 30], [22, 0, 38]),
        ({"repeat": [2.5, None, 0.3]}, [101, 50, 33], [252, 50, 9]),
        ({"choose": [7, None, 99], "repeat": [None, 1.5, None]}, [101, 51, 33], [7, 76, 99]),
        ({"epoch_size": 50}, [101, 51, 33], [27, 14, 9]),
        (
            {"weights": [0.27, 0.11, 0.08, 0.54], "epoch_size": 999_999},
            [1, 2, 3, 4],
            [269_999, 110_000, 80_000, 540_000],
        ),
    ],
)
def test_counts_are_those_of_mosaicml_streaming(how: dict[str, Any], sizes: list[int], expected: list[int]) -> None:
    """``expected`` is what ``Stream.apply_weights`` of mosaicml-streaming 0.13.0 says with its default seed. Which
    datasets get one more, of those that are drawn for what is lacking, is another draw here."""
    names = [f"set{number}" for number in range(len(sizes))]
    given_by_name = {
        what: {name: number for name, number in zip(names, numbers, strict=True) if number is not None}
        for what, numbers in how.items()
        if what != "epoch_size"
    }
    found = MixtureWeights.of(
        names,
        given_by_name.get("weights"),
        given_by_name.get("repeat"),
        given_by_name.get("choose"),
        how.get("epoch_size"),
    ).counts(0, sizes, seed=9176)
    assert sum(found) == sum(expected)
    apart = [abs(one - other) for one, other in zip(found, expected, strict=True)]
    if "repeat" in how or "choose" in how:
        assert not any(apart)
    parts = given_by_name.get("weights") or dict(zip(names, sizes, strict=True))
    for name, count in zip(names, found, strict=True):
        if "repeat" not in how and "choose" not in how:
            share = Fraction(str(parts[name])) * sum(found) / sum(Fraction(str(part)) for part in parts.values())
            assert count in (int(share), int(share) + 1)
            assert max(apart) <= 1


@given(st.lists(st.fractions(0, 10), min_size=1, max_size=9).filter(any), st.integers(0, 10_000), st.integers(0, 99))
def test_parts_of_an_epoch_are_rounded_and_add_up(weights: list[Fraction], size: int, seed: int) -> None:
    found = counts_by_weights(weights, size, seed)
    assert sum(found) == size
    for weight, count in zip(weights, found, strict=True):
        assert 0 <= count - int(size * weight / sum(weights)) <= bool(weight)


def test_weights_hold_from_their_epoch_on_and_survive_a_state() -> None:
    weights = MixtureWeights.of(["a", "b"], {0: {"a": 1}, 5: {"a": 0.5, "b": 0.5}, 9: {"b": 1}}, None, None, 100)
    again = MixtureWeights.from_dict(weights.to_dict())
    for each in (weights, again):
        counts = [each.counts(epoch, [10, 10], 0) for epoch in (0, 4, 5, 8, 9, 99)]
        assert counts == [[100, 0], [100, 0], [50, 50], [50, 50], [0, 100], [0, 100]]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"weights": {"c": 1}}, "weights name 'c', and the mixture has a, b"),
        ({"weights": {"a": -1}}, "weights of a must be a number of at least 0"),
        ({"weights": {"a": "nan"}}, "weights of a must be a number"),
        ({"weights": {}}, "weights name no dataset"),
        ({"weights": [0.5, 0.5]}, "weights must be numbers by the names of datasets"),
        ({"weights": {"a": 0}}, "all weights from epoch 0 on are 0"),
        ({"weights": {3: {"a": 1}}}, "weights begin at epoch 3"),
        ({"weights": {"a": 1}, "repeat": {"a": 1}}, "not both"),
        ({"repeat": {"a": 1}, "choose": {"a": 1}}, "dataset a has repeat and choose"),
        ({"choose": {"a": 1.5}}, "choose of a must be a whole number"),
        ({"repeat": {"a": 2}, "epoch_size": 5}, "epoch_size goes with weights"),
        ({"epoch_size": 0}, "epoch_size must be a whole number of at least 1"),
        ({"repeat": [1, 2]}, "repeat must be numbers by the names of datasets"),
    ],
)
def test_what_makes_no_mixture_is_refused_in_a_line(how: dict[str, Any], said: str) -> None:
    named = {"weights": None, "repeat": None, "choose": None, "epoch_size": None} | how
    with pytest.raises(InvalidInput, match=said):
        MixtureWeights.of(["a", "b"], **named)
    with pytest.raises(InvalidInput, match="dataset b of the mixture has no samples"):
        MixtureWeights.of(["a", "b"], {"b": 1}, None, None, 5).counts(0, [5, 0], 0)


def test_memory_follows_what_comes_of_each_dataset() -> None:
    assert sum(memory_parts(10**9, [900, 100, 0], [10.0, 10.0, 10.0])) <= 10**9
    found = memory_parts(80_000, [100, 100], [30.0, 10.0])
    assert found == [5000 + 52_500, 5000 + 17_500]
    few, some, much = (memory_parts(memory, [100, 0], [10.0, 10.0], 64) for memory in (1000, 10_000, 100_000))
    assert few == [750, 250], "half of it is divided evenly, at most"
    assert some == [7500, 2500]
    assert much == [100_000 - 6250, 6250], "an eighth, at least"
    assert memory_parts(16_000, [100, 0], [10.0, 10.0], 64)[1] == 4 * 64 * 10, "four chunks"


@given(
    st.integers(1, 10**9),
    st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 10**5), st.integers(1, 10**8)), min_size=1, max_size=6),
)
def test_what_small_datasets_can_not_use_the_others_have(
    memory_bytes: int, datasets: list[tuple[int, int, int]]
) -> None:
    counts, sample_bytes, most = zip(*datasets, strict=True)
    without = memory_parts(memory_bytes, counts, sample_bytes)
    parts = memory_parts(memory_bytes, counts, sample_bytes, 0, most)
    assert all(min(had, can_use) <= part <= can_use for part, had, can_use in zip(parts, without, most, strict=True))
    if any(count and part < can_use for count, part, can_use in zip(counts, parts, most, strict=True)):
        assert sum(without) - len(parts) ** 2 <= sum(parts) <= sum(without), "but for what is rounded down"


@pytest.mark.parametrize(
    ("counts", "block", "seed", "epoch", "digest"),
    [
        ([700, 200, 100], 64, 0, 0, "218978c14e04a949"),
        ([3000] * 7, 256, 5, 2, "ce4273dd29a9f1ff"),
        ([10**10, 10**9, 7], 256, 5, 2, "bfb463c86de58d48"),
    ],
)
def test_orders_are_those_of_every_machine_and_version(
    counts: list[int], block: int, seed: int, epoch: int, digest: str
) -> None:
    """Whoever changes one raises MIXTURE_VERSION: ranks and states of two versions must not mix."""
    places = np.arange(0, sum(counts), max(1, sum(counts) // 5000))
    found = np.stack(MixtureEpoch(counts, block, seed, epoch).samples_at(places))
    assert hashlib.blake2b(found.astype("<i8").tobytes(), digest_size=8).hexdigest() == digest
