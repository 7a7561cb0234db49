"""What pods have heard of each other's tables, and what a journal lacks of it."""

from __future__ import annotations

import pytest

from refill_service.cache_core.heard_answers import HeardAnswers, encode_count, what_is_missing


def test_the_most_that_was_heard_counts() -> None:
    heard = HeardAnswers()
    for count in (3, 7, 5):  # answers of several requests may come in any order
        heard.count_came(1, encode_count(2, count))
    heard.count_came(1, encode_count(3, 1))
    assert heard.of(1) == {2: 7, 3: 1}
    assert heard.of(0) == {}


def test_old_epochs_are_forgotten() -> None:
    heard = HeardAnswers()
    for epoch in range(10):
        heard.count_came(0, encode_count(epoch, 5))
    assert sorted(heard.of(0)) == [7, 8, 9]


@pytest.mark.parametrize(
    "text", ["", "1", "a.1", "1.-1", "1.1.1", "9" * 5000 + ".1", "1." + "9" * 19, "²\N{FULL STOP}1"]
)
def test_anything_else_tells_nothing(text: str) -> None:
    heard = HeardAnswers()
    heard.count_came(0, text)
    assert heard.of(0) == {}


@pytest.mark.parametrize(
    ("journal", "heard", "lacks"),
    [
        ({}, {}, ""),
        ({0: 10}, {0: 10}, ""),
        ({0: 10}, {0: 9}, ""),
        ({0: 10}, {0: 11}, "10 answers of epoch 0, and other pods have heard of 11"),
        ({0: 10}, {0: 10, 1: 1}, "0 answers of epoch 1, and other pods have heard of 1"),
        ({2: 5}, {1: 500, 2: 5}, ""),  # epoch 1 is over for good
        ({}, {4: 1}, "0 answers of epoch 4"),
    ],
)
def test_a_journal_that_lacks_what_others_have_heard_of(
    journal: dict[int, int], heard: dict[int, int], lacks: str
) -> None:
    found = what_is_missing(journal, heard)
    assert (found is not None) == bool(lacks)
    assert lacks in (found or "")
