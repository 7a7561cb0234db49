"""Which samples does a part of a dataset have?"""

from __future__ import annotations

from fractions import Fraction
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill.errors import InvalidInput
from refill.protocol.part_choice import checked_ids, in_fraction, in_split, labels_named, of_keys, of_lengths, of_mask

FRACTION = [4, 10, 28, 39, 57, 126, 146]
NUMBERS = [3405396810240292928, 8453121595177857668]
LABELS = np.array([0, 2, 3])
SPLIT = [0, 3, 16, 47, 57, 61, 69, 71]
Parts = st.dictionaries(st.text(max_size=3), st.integers(0, 100), min_size=1, max_size=5).filter(
    lambda parts: sum(parts.values()) > 0
)


@given(Parts, st.integers(1, 2000))
def test_each_sample_is_in_one_split_and_stays_there_when_others_are_added(
    parts: dict[str, int], num_samples: int
) -> None:
    total = sum(parts.values())
    splits = {name: Fraction(part, total) for name, part in parts.items()}
    ids = np.arange(num_samples)
    where = np.stack([in_split(ids, name, splits) for name in splits])
    assert (where.sum(axis=0) == 1).all()
    more = np.stack([in_split(np.arange(num_samples + 500), name, splits) for name in splits])
    assert (more[:, :num_samples] == where).all()


def test_splits_that_are_all_have_every_sample_in_their_proportions() -> None:
    ids, splits = np.arange(100_000), {"train": 0.8, "validation": 0.1, "test": 0.1}
    where = {name: in_split(ids, name, splits) for name in splits}
    assert (np.sum([each.astype(int) for each in where.values()], axis=0) == 1).all()
    for name, part in splits.items():
        assert abs(where[name].mean() - part) < 0.005


@given(st.floats(0, 1), st.floats(0, 1))
def test_a_smaller_part_lies_in_each_larger_one(one: float, other: float) -> None:
    small, large = (in_fraction(np.arange(3000), part) for part in sorted((one, other)))
    assert not (small & ~large).any()


def test_splits_and_fractions_are_independent_and_the_same_for_ever() -> None:
    ids = np.arange(100_000)
    both = in_fraction(ids, 0.1) & in_split(ids, "a", {"a": 0.5, "b": 0.5})
    assert abs(both.mean() - 0.05) < 0.003
    assert np.flatnonzero(in_fraction(ids[:200], 0.05)).tolist() == FRACTION
    assert np.flatnonzero(in_split(ids[:100], "b", {"a": 0.9, "b": 0.1})).tolist() == SPLIT


def keys_of(keys: list[str], patterns: object = None) -> tuple[list[bool], np.ndarray]:
    matches, numbers = of_keys([keys[:2], keys[2:]], patterns)  # type: ignore[arg-type]
    return matches.tolist(), numbers


@given(st.lists(st.text(max_size=8), unique=True), st.randoms(), st.integers(0, 100))
def test_by_key_a_sample_stays_in_its_split_and_fraction_wherever_it_lies(
    keys: list[str], random: Random, percent: int
) -> None:
    more = [*keys, *(f"{key} more" for key in keys)]
    random.shuffle(more)
    splits = {"a": Fraction(percent, 100), "b": 1 - Fraction(percent, 100)}
    of_some, of_more = (
        {
            key: (bool(inside), bool(part))
            for key, inside, part in zip(
                each, in_split(numbers, "a", splits), in_fraction(numbers, percent / 100), strict=True
            )
        }
        for each, numbers in ((each, keys_of(each)[1]) for each in (keys, more))
    )
    assert {key: of_more[key] for key in keys} == of_some


def test_keys_match_patterns_and_their_numbers_are_the_same_for_ever() -> None:
    keys = ["dog/1", "cat/1", "dog/12", "a.b", "ab", "[x]"]
    for patterns, found in (
        (None, keys),
        ("dog/*", ["dog/1", "dog/12"]),
        (["*/1", "a.b"], ["dog/1", "cat/1", "a.b"]),
        ("[x]", []),
        ("[[]x]", ["[x]"]),
        ([], []),
    ):
        matches, _ = keys_of(keys, patterns)
        assert [key for key, is_like in zip(keys, matches, strict=True) if is_like] == found, patterns
    assert keys_of(["a", "b"])[1].tolist() == NUMBERS
    for wrong in (3, [3], b"a"):
        with pytest.raises(InvalidInput, match="keys must be patterns"):
            keys_of(keys, wrong)
    with pytest.raises(InvalidInput, match="holds numbers, and keys are text"):
        of_keys([np.zeros(3)], None)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda: of_mask([1, 0], 2), "where takes a mask"),
        (lambda: of_mask([True], 2), "where takes a mask, true or false for each of 2"),
        (lambda: checked_ids("ids", [0, 7], 7), "ids name sample 7, and the dataset has samples 0 to 6"),
        (lambda: checked_ids("without", [0.5], 7), "without must be whole numbers"),
        (lambda: in_fraction(np.arange(3), 1.5), "fraction must be a number from 0 to 1"),
        (lambda: of_lengths(np.arange(3), 100), r"lengths must be \(least, most\) bytes of a sample, got 100"),
        (lambda: of_lengths(np.arange(3), ("a", "b")), "lengths must be"),
        (lambda: of_lengths(np.arange(3), (5000, 100)), r"lengths must be .* got \(5000, 100\)"),
        (lambda: in_split(np.arange(3), "x", {"a": 1}), "split must be one of 'a', got 'x'"),
        (lambda: in_split(np.arange(3), None, {"a": 1, "b": 0}), "split must be one of 'a', 'b', got None"),
        (lambda: in_split(np.arange(3), "a", None), "splits must be parts by name"),
        (lambda: in_split(np.arange(3), "a", {"a": 0.9, "b": 0.2}), "more than there are"),
        (lambda: labels_named("dog", ["cat"], LABELS), "there is no class 'dog'; the dataset has 'cat'"),
        (lambda: labels_named("dog", None, LABELS), "there is no class 'dog'; the dataset has no names of classes"),
        (
            lambda: labels_named([0, 77], None, LABELS),
            "there is no class 77; the dataset has classes 0 to 3, 3 of them",
        ),
        (lambda: labels_named(1.5, None, LABELS), "classes must be numbers or names of classes, got 1.5"),
    ],
)
def test_what_is_no_part_is_refused_in_a_line(wrong: object, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        wrong()  # type: ignore[operator]
    assert labels_named(["cat", 3], ["bird", "cat"], LABELS) == [1, 3]
    assert labels_named(np.int64(2), None, LABELS) == [2]
    assert labels_named([], None, LABELS) == []
    assert checked_ids("ids", [3, 1, 3], 7).tolist() == [1, 3]
