"""A rank's report is read and noted in small pieces, however long its lists are, and ends at the first thing wrong."""

from __future__ import annotations

import json
from collections.abc import Generator
from typing import Any, TypeVar

import numpy as np
import pytest

from refill.errors import InvalidInput
from refill.protocol.dealing import Dealing
from refill_service.cache_core.planned.received import EpochReceived, ReceivedEpochs
from refill_service.serving.rank_report import MOST_DIGEST_SPANS, MOST_DIGESTS, RankReport, noted, read_report

Result = TypeVar("Result")
DEALT = {"epoch": 3, "rank": 0, "num_ranks": 1}
LENGTH = 400_000
MANY = 100_000
LARGEST_PIECE = 500
"""Pairs of numbers."""


def carried_out(steps: Generator[None, None, Result]) -> tuple[Result, int]:
    """What comes of it, and the number of its pieces."""
    pieces = 1
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value, pieces
        pieces += 1


def read(body: bytes) -> RankReport:
    return carried_out(read_report(body))[0]


def report(**lists: Any) -> bytes:
    return json.dumps(DEALT | lists).encode()


def spans_of(count: int) -> list[list[int]]:
    return [[2 * place, 2 * place + 1] for place in range(count)]


def known(received: ReceivedEpochs) -> EpochReceived:
    found = received.of(DEALT["epoch"])
    assert found is not None
    return found


def test_everything_that_it_says_is_noted() -> None:
    digest = [1, 1, 0, False, 0, [[0, 3], [5, 9]], "ab"]
    found = read(report(spans=[[0, 3], [5, 9]], damaged=[[4, 17]], digests=[digest], listed=[9, "abc"], later=1))
    assert found.spans.tolist() == [[0, 3], [5, 9]]
    assert found.damaged.tolist() == [[4, 17]]
    assert [part.to_list() for part in found.digests] == [[*digest[:6], "ab".rjust(32, "0")]]
    received = ReceivedEpochs()
    carried_out(noted(found, received, Dealing(LENGTH), is_listed=True, now=1.0))
    epoch = known(received)
    assert list(epoch.received[0]) == [(0, 3), (5, 9)]
    assert epoch.damaged == {0: {4: 17}}
    assert epoch.lists == {0: (9, "abc")}
    assert [part.digest for parts in epoch.digests.values() for part in parts] == [0xAB]


@pytest.mark.parametrize("body", [b'{"epoch":3,"rank":0,"num_ranks":1}', b' { "epoch" : 3 , "rank":0,"num_ranks":1 } '])
def test_a_rank_that_has_received_nothing_so_far_is_noted(body: bytes) -> None:
    received = ReceivedEpochs()
    carried_out(noted(read(body), received, Dealing(LENGTH), is_listed=False, now=1.0))
    assert known(received).received[0].count == 0


@pytest.mark.parametrize("name", ["spans", "damaged"])
def test_long_lists_are_read_and_noted_a_little_at_a_time(name: str) -> None:
    pairs = np.random.default_rng(7).permutation(spans_of(MANY))
    found, pieces = carried_out(read_report(report(**{name: pairs.tolist()})))
    assert pieces > MANY / LARGEST_PIECE
    received = ReceivedEpochs()
    _, pieces = carried_out(noted(found, received, Dealing(LENGTH), is_listed=False, now=1.0))
    assert pieces > MANY / LARGEST_PIECE
    epoch = known(received)
    assert epoch.received[0].count == (65_536 if name == "spans" else 0), "as many spans as are kept of a rank"
    assert received.num_damaged == (MANY if name == "damaged" else 0)


def test_each_digest_is_a_piece_and_of_one_in_too_many_parts_nothing_is_kept() -> None:
    digests = [[100, 1, 0, False, rank, spans_of(50), "1"] for rank in range(100)]
    found, pieces = carried_out(read_report(report(digests=digests)))
    assert pieces > len(digests)
    _, pieces = carried_out(noted(found, ReceivedEpochs(), Dealing(LENGTH), is_listed=False, now=1.0))
    assert pieces > len(digests)
    many = [1, 1, 0, False, 0, spans_of(MOST_DIGEST_SPANS + 1), "1"]
    assert [part.rank for part in read(report(digests=[many, digests[7]])).digests] == [7]


def test_nothing_is_noted_of_a_report_that_is_wrong_at_its_end() -> None:
    for lists in ({"spans": [*spans_of(2_000), [LENGTH, LENGTH + 1]]}, {"damaged": [[1, 1], [LENGTH, 5]]}):
        received = ReceivedEpochs()
        with pytest.raises(InvalidInput, match=f"rank 0 has {LENGTH} positions in epoch 3, got {LENGTH}-"):
            carried_out(noted(read(report(**lists)), received, Dealing(LENGTH), is_listed=False, now=1.0))
        assert received.of(3) is None


WRONG = {
    "numbers in place of pairs": (
        b'{"spans":[' + b"1," * 1_000_000 + b"1]}",
        "spans should have a pair of numbers at byte 10",
    ),
    "text in place of pairs": (b'{"spans":["x","x"]}', "spans should have a pair of numbers"),
    "a number below 0": (b'{"spans":[[-1,0]]}', "spans should have a pair of numbers"),
    "a large number": (b'{"spans":[[0,9999999999999999999]]}', "spans should have numbers below"),
    "a very large number": (b'{"spans":[[0,' + b"9" * 5_000 + b"]]}", "spans should have a pair of numbers"),
    "a list that does not end": (b'{"spans":[[0,1],', "spans should have a pair of numbers"),
    "no list": (b'{"spans":1}', "spans should have a list"),
    "many fields": (b"{" + b",".join(b'"%d":1' % name for name in range(1_000)) + b"}", "at most 100 fields"),
    "a long field": (b'{"epoch":[' + b"1," * 1_000 + b"1]}", "epoch should have a number, or a short text"),
    "deep lists": (b'{"epoch":' + b"[" * 100_000, "epoch should have a number, or a short text"),
    "a name in place of a number": (b'{"epoch":"x","rank":0,"num_ranks":1}', "body.epoch: Input should be a valid int"),
    "no epoch": (b'{"rank":0,"num_ranks":1}', "body.epoch: Field required"),
    "no object": (b"[]", "a report should have an object at byte 0"),
    "more behind it": (report() + b"x", "a report should have nothing more"),
    "many digests": (report(digests=[[1, 1, 0, False, 0, [], "1"]] * (MOST_DIGESTS + 1)), "at most 1,000"),
}


@pytest.mark.parametrize(("body", "message"), WRONG.values(), ids=WRONG)
def test_the_first_thing_that_is_wrong_ends_it_in_one_line(body: bytes, message: str) -> None:
    with pytest.raises(InvalidInput, match=message) as error:
        read(body)
    assert len(error.value.message) < 200


def test_what_is_said_again_takes_no_more_memory() -> None:
    received = ReceivedEpochs()
    for _ in range(3):
        found = read(report(spans=[[0, 5]], damaged=[[5, 6]], digests=[[1, 1, 0, False, 0, [[0, 5]], "1"]]))
        carried_out(noted(found, received, Dealing(LENGTH), is_listed=False, now=1.0))
    once = ReceivedEpochs()
    carried_out(noted(found, once, Dealing(LENGTH), is_listed=False, now=1.0))
    assert received.used_bytes == once.used_bytes
