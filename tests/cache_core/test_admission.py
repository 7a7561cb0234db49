"""Is of several things that are wrong always the first in the one order of checks said?"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import pytest

from refill.errors import InvalidInput, NotAllowed, NotAuthenticated, PodBusy, PodStopping, PodUnreachable, RefillError
from refill.protocol.rank_life import RankLife
from refill_service.cache_core.admission import AsksAs, admission, rank_admission


@dataclass
class Head:
    """Of a request that nothing is wrong with."""

    looks_after_the_pod: bool = False
    is_health: bool = False
    stopping: RefillError | None = None
    most_requests: int = 10
    is_one_too_many: bool = False
    foreign_name: str | None = None
    of_pods: bool = False
    shows_token: bool = True
    team: str | None = "vision"
    there_is_room: bool = True
    pod: tuple[int, int] = 0, 2
    said_num_pods: bytes | None = b"2"
    job_of_others: str | None = None
    known: list[str] = field(default_factory=list)

    def comes_from(self, team: str) -> bool:
        self.known.append(team)
        return self.there_is_room


WRONG: list[tuple[dict[str, Any], type[RefillError], str]] = [
    ({"stopping": PodStopping("pod 0 stops", pod=0)}, PodStopping, "stops"),
    ({"is_one_too_many": True}, PodBusy, "10 requests or connections"),
    ({"foreign_name": ""}, NotAllowed, "localhost"),
    ({"team": None}, NotAuthenticated, "token"),
    ({"there_is_room": False}, PodBusy, "as one team may have"),
    ({"said_num_pods": b"3"}, PodUnreachable, "one of 2 and was asked by one of 3"),
    ({"job_of_others": "job"}, NotAllowed, "belongs to another token"),
]
"""In the order of the checks."""


def test_a_request_that_nothing_is_wrong_with_is_answered() -> None:
    assert admission(Head()) is None


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_the_first_of_what_is_wrong_is_said(number: int) -> None:
    """Whatever else is wrong that comes after it."""
    first, kind, said = WRONG[number]
    after = [wrong for wrong, _, _ in WRONG[number + 1 :]]
    for count in range(len(after) + 1):
        for others in combinations(after, count):
            fields: dict[str, Any] = {}
            for each in (*others, first):
                fields |= each
            refusal = admission(replace(Head(), **fields))
            assert type(refusal) is kind
            assert said in str(refusal)


def test_nobody_is_known_by_a_request_that_shows_no_token() -> None:
    head = Head(team=None)
    admission(head)
    assert head.known == []


def test_who_looks_after_the_pod_is_answered_when_it_is_full_and_needs_a_token_for_all_but_its_health() -> None:
    full = {"is_one_too_many": True, "looks_after_the_pod": True, "team": None}
    assert admission(Head(**full, is_health=True)) is None
    assert isinstance(admission(Head(**full)), NotAuthenticated)
    assert isinstance(admission(Head(**full, is_health=True, foreign_name="rebound.example")), NotAllowed)


class Leases:
    """What became known of who asks, in order."""

    def __init__(self) -> None:
        self.facts: list[tuple[Any, ...]] = []

    def ended(self, rank: int, life: RankLife, by: RankLife, *, takes: bool = True) -> None:
        self.facts.append(("ended", rank, life, by, takes))

    def held_elsewhere(self, rank: int, holder: RankLife, by: RankLife) -> None:
        self.facts.append(("held elsewhere", rank, holder, by))

    def heard(self, rank: int, life: RankLife | None, over: str | None = None) -> None:
        self.facts.append(("heard", rank, life, over))

    def asks(self, rank: int, life: RankLife | None, *, takes: bool = True, over: str | None = None) -> None:
        self.facts.append(("asks", rank, life, takes, over))


class OneRank:
    def check_rank(self, asks: AsksAs) -> None:
        if asks.rank:
            raise InvalidInput("there is rank 0 alone")


BEFORE, ELSEWHERE, NOW = (RankLife("host", number, 1, "") for number in range(3))


def test_a_rank_that_there_is_not_leaves_no_trace() -> None:
    leases = Leases()
    with pytest.raises(InvalidInput, match="rank 0 alone"):
        rank_admission(OneRank(), leases, AsksAs(1, NOW, ended=BEFORE), "connection")
    assert leases.facts == []


@pytest.mark.parametrize(
    ("asks", "facts"),
    [
        (AsksAs(0), []),
        (AsksAs(0, NOW), [("asks", 0, NOW, True, "over")]),
        (AsksAs(0, NOW, takes=False), [("asks", 0, NOW, False, "over")]),
        (AsksAs(0, NOW, is_heard=True), [("heard", 0, NOW, "over")]),
        (AsksAs(0, NOW, group=4, member=3), [("asks", 3, NOW, True, "over")]),
        (
            AsksAs(0, NOW, ended=BEFORE, refused_by=ELSEWHERE),
            [
                ("ended", 0, BEFORE, NOW, True),
                ("held elsewhere", 0, ELSEWHERE, NOW),
                ("asks", 0, NOW, True, "over"),
            ],
        ),
    ],
)
def test_what_is_known_of_who_asks_comes_to_the_leases_in_one_order(asks: AsksAs, facts: list[tuple[Any, ...]]) -> None:
    leases = Leases()
    rank_admission(OneRank(), leases, asks, "over")
    assert leases.facts == facts
    rank_admission(OneRank(), None, asks, "over")  # of a rank whose home is another pod
