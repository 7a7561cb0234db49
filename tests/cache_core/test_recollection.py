"""What others remember, put together: when is it enough, and what does it say?"""

from __future__ import annotations

import numpy as np

from refill.protocol.records import Kind, Record
from refill_service.cache_core.epoch_order import ExplicitTraces, KeyedTraces
from refill_service.cache_core.recollection import Recollection


def opened(rank: int, *homes: int, epoch: int = 0) -> Record:
    return Record(Kind.OPENED, epoch, rank, (np.array(homes),))


def whole(rank: int) -> Record:
    return Record(Kind.WHOLE, 0, rank)


ALL_RANKS = Record(Kind.ALL_RANKS, 0)


def test_nobody_has_said_anything() -> None:
    assert Recollection().unreported(3) == [0, 1, 2]


def test_a_rank_has_reported_when_all_its_homes_say_so() -> None:
    recollection = Recollection()
    recollection.add([opened(0, 1, 2), ALL_RANKS, whole(0)], source=1)
    assert recollection.unreported(1) == [0], "its other home has not reported"
    recollection.add([whole(0)], source=2)
    assert recollection.unreported(1) == []


def test_another_pod_does_not_speak_for_the_home() -> None:
    recollection = Recollection()
    recollection.add([opened(0, 1), whole(0), ALL_RANKS], source=2)
    assert recollection.unreported(1) == [0]


def test_a_rank_that_has_not_begun_has_nothing_to_report() -> None:
    recollection = Recollection()
    recollection.add([opened(0, 1)], source=1)
    assert recollection.unreported(2) == [0, 1], "the pod may have forgotten rank 1"
    recollection.add([whole(0), ALL_RANKS], source=1)
    assert recollection.unreported(2) == []


def test_the_only_pod_believes_its_ranks() -> None:
    recollection = Recollection()
    recollection.add([whole(0), whole(2)], source=0)
    assert recollection.unreported(3) == [1]


def test_a_rank_that_reports_has_begun() -> None:
    """A pod that learned so itself must not say to the next one that this rank has not begun."""
    recollection = Recollection()
    recollection.add([whole(2)], source=1)
    assert recollection.ranks == {2: (-1, {1})}
    assert recollection.epochs() == []


def test_its_own_table_is_enough() -> None:
    recollection = Recollection()
    recollection.add([Record(Kind.WHOLE_TABLE, 0)], source=1)
    assert recollection.unreported(5) == []


def test_received_is_translated_by_the_traces_and_overlaps_do_no_harm() -> None:
    traces = KeyedTraces(10, 2, seed=1)
    asked, _ = traces.asked(1, np.arange(3))
    recollection = Recollection()
    recollection.add([Record(Kind.ANSWERED, 0, 0, (asked[:2], np.array([7, 8])))], source=0)
    recollection.add([Record(Kind.RECEIVED, 0, 1, (np.arange(3), np.array([7, 8, 9])))], source=1)
    found = dict(zip(*(column.tolist() for column in recollection.answered(0, traces, 0, 10)), strict=True))
    assert found == dict(zip(asked.tolist(), [7, 8, 9], strict=True))
    assert recollection.received_epochs() == [0]


def test_only_of_the_share_and_no_repeats() -> None:
    traces = ExplicitTraces(10, {0: np.array([1, 8, 1])})
    recollection = Recollection()
    recollection.add([Record(Kind.RECEIVED, 0, 0, (np.arange(3), np.array([2, 9, 1])))], source=0)
    asked, samples = recollection.answered(0, traces, 0, 5)
    assert (asked.tolist(), samples.tolist()) == ([1], [2])


def test_the_latest_epoch_of_a_rank() -> None:
    recollection = Recollection()
    recollection.add([opened(0, 1, epoch=3), opened(0, 2, epoch=2)], source=1)
    assert recollection.ranks[0] == (3, {1, 2})
    assert recollection.epochs() == [3]


def test_what_every_rank_has_left_long_ago_is_not_taken_up_again() -> None:
    """Another pod may still have what it was left in an old epoch."""
    recollection = Recollection()
    recollection.add(
        [Record(Kind.ANSWERED, epoch, 0, (np.array([1]), np.array([1]))) for epoch in (0, 5, 6, 7)], source=0
    )
    assert recollection.epochs() == [0, 5, 6, 7], "any rank may be in any of them"
    recollection.add([opened(0, 1, epoch=7), opened(1, 1, epoch=6)], source=1)
    assert recollection.epochs() == [5, 6, 7], "what the rank that is behind had before may be asked for again"
    assert recollection.oldest_entered == 6
