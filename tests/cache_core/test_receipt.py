"""Receipts: counted from the table, so that what is wrong in it shows."""

from __future__ import annotations

import json

import numpy as np
import pytest

from refill_service.cache_core.epoch_order import ExplicitTraces, KeyedTraces
from refill_service.cache_core.receipt import EpochReceipt, receipt_of, sum_of_receipts

SAMPLES = np.arange(100)


def receipt(asked: np.ndarray, samples: np.ndarray) -> EpochReceipt:
    return receipt_of(asked, samples, 0, 100, KeyedTraces(100, 3, seed=1))


def test_exact() -> None:
    found = receipt(SAMPLES, np.roll(SAMPLES, 1))
    assert found.exact
    assert (found.requests, found.delivered, found.redirected) == (100, 100, 100)
    assert found.ranks == {0: 34, 1: 33, 2: 33}


def test_a_sample_for_two_requests_is_a_duplicate() -> None:
    samples = SAMPLES.copy()
    samples[7] = 8
    found = receipt(SAMPLES, samples)
    assert (found.duplicates, found.delivered, found.exact) == (1, 100, False)
    assert found.samples_digest != receipt(SAMPLES, SAMPLES).samples_digest


def test_what_was_not_asked_for_is_missing() -> None:
    found = receipt(SAMPLES[:10], SAMPLES[:10])
    assert (found.requests, found.delivered, found.missing, found.exact) == (100, 10, 90, False)


def test_the_digest_is_of_who_got_what_and_of_no_order() -> None:
    first = receipt(SAMPLES, np.roll(SAMPLES, 1))
    assert receipt(SAMPLES[::-1], np.roll(SAMPLES, 1)[::-1]).digest == first.digest
    other = receipt(SAMPLES, np.roll(SAMPLES, 2))
    assert other.digest != first.digest
    assert other.samples_digest == first.samples_digest


def test_the_digest_is_of_rank_position_and_sample() -> None:
    """Each request gets what it asks for: another order is another digest, as it is if a rank has another's samples."""
    first = receipt(SAMPLES, SAMPLES)
    assert receipt_of(SAMPLES, SAMPLES, 0, 100, KeyedTraces(100, 3, seed=1)).digest == first.digest
    assert receipt_of(SAMPLES, SAMPLES, 0, 100, KeyedTraces(100, 3, seed=2)).digest != first.digest
    orders = ([5, 6, 7], [8, 9]), ([6, 5, 7], [8, 9]), ([8, 9], [5, 6, 7]), ([5, 6], [7, 8, 9])
    ids = np.arange(5, 10)
    found = {
        receipt_of(
            ids, ids, 0, 100, ExplicitTraces(100, {rank: np.array(asked) for rank, asked in enumerate(order)})
        ).digest
        for order in orders
    }
    assert len(found) == len(orders)


def test_the_digest_is_also_of_repeats() -> None:
    ids = np.array([5, 6])
    digests = [
        receipt_of(ids, ids, 0, 100, ExplicitTraces(100, {0: np.array(order)})).digest
        for order in ([5, 6, 5], [5, 6, 6], [5, 6])
    ]
    assert len(set(digests)) == 3


@pytest.mark.parametrize("cut", [0, 1, 50, 99, 100])
def test_owners_add_up(cut: int) -> None:
    traces = KeyedTraces(100, 3, seed=1)
    parts = [
        receipt_of(ids, ids, first, end, traces)
        for ids, first, end in ((SAMPLES[:cut], 0, cut), (SAMPLES[cut:], cut, 100))
    ]
    assert sum_of_receipts(parts) == receipt(SAMPLES, SAMPLES), "two positions are padding"


def test_the_tail_that_was_dropped_is_not_missing() -> None:
    traces = KeyedTraces(100, 3, seed=1, drop_last=True)
    _, positions = traces.position_of(SAMPLES)
    asked = SAMPLES[positions < 33]
    found = receipt_of(asked, asked, 0, 100, traces)
    assert (found.requests, found.exact) == (99, True)


def test_explicit_traces() -> None:
    traces = ExplicitTraces(100, {0: np.array([5, 6, 5]), 1: np.array([7])})
    found = receipt_of(np.array([5, 6, 7]), np.array([6, 5, 7]), 0, 100, traces)
    assert (found.requests, found.exact, found.ranks) == (3, True, {0: 2, 1: 1})


def test_sent_ahead_and_never_asked_for_is_not_delivered() -> None:
    found = receipt(SAMPLES, SAMPLES).without({1: 3})
    assert (found.delivered, found.missing, found.ranks[1], found.exact) == (97, 3, 30, False)


def test_as_json_and_back() -> None:
    found = receipt(SAMPLES[:50], np.roll(SAMPLES[:50], 1))
    assert EpochReceipt.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_nothing_at_all() -> None:
    empty = np.empty(0, dtype=np.int64)
    assert receipt_of(empty, empty, 40, 40, KeyedTraces(100)).exact
