"""What all processes of a rank know of its place in a planned job, and what its checkpoint holds."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from refill.errors import InvalidInput, JobConflict
from refill.pods.planned_place import RankPlace
from refill.pods.resume_state import ResumeState
from refill.protocol.plan_settings import PlanSettings

PLAN = PlanSettings("00112233aabbccdd", 1000, 16, 8, 2_000_000, 32, 7)


def test_samples_come_by_one_plan_only() -> None:
    shared = [0] * RankPlace.NUM_SHARED
    place, of_worker = RankPlace(shared), RankPlace(shared)
    assert not place.has_begun
    place.goes_by(PLAN.plan_id)
    place.goes_by(PLAN.plan_id)
    assert of_worker.has_begun, "another process of the rank does not know"
    other = replace(PLAN, memory_bytes=3_000_000).plan_id
    with pytest.raises(JobConflict, match=rf"by another plan than {other[:8]}: end the job"):
        of_worker.goes_by(other)
    place.goes_by(PLAN.plan_id)


def test_one_epoch_is_dealt_from_where_the_loop_goes_on() -> None:
    shared = [0] * RankPlace.NUM_SHARED
    place, of_worker = RankPlace(shared), RankPlace(shared)
    assert (place.epoch, place.start(0), place.had(0)) == (None, 0, 0)
    place.is_dealt(0, 0, 40, 20)
    assert (of_worker.epoch, of_worker.start(0), of_worker.had(0)) == (0, 0, 40)
    place.is_dealt(3, 200, 0, 0)
    assert [of_worker.start(epoch) for epoch in (2, 3, 4)] == [0, 200, 0]
    assert of_worker.had(0) == 0, "an epoch that the loop has left"


def state(**changes: Any) -> ResumeState:
    found = ResumeState("job", "file:///d", PLAN.plan_id, 3, 1, 2, 40, 100, PLAN.to_dict(), 380)
    return replace(found, **changes)


def test_a_state_holds_the_plan_whole_and_survives_text() -> None:
    again = ResumeState.from_dict(json.loads(json.dumps(state().to_dict())))
    assert again == state()
    assert again.plan is not None
    assert PlanSettings.from_dict(again.plan).plan_id == PLAN.plan_id


def test_what_all_ranks_have_had_is_one_number() -> None:
    assert state().num_had == 380 + 3 * 40
    assert state(position=0).num_had == 380


def test_states_of_other_jobs_hold_neither_plan_nor_start() -> None:
    found = state(plan=None, start=0).to_dict()
    assert not {"plan", "start"} & set(found)
    assert ResumeState.from_dict(found).plan is None


@pytest.mark.parametrize("start", [-1, True, "3", None, 2**62, 1.0])
def test_a_start_that_is_no_place_is_refused(start: Any) -> None:
    with pytest.raises(InvalidInput, match="the state is damaged: start must be a number of at least 0"):
        ResumeState.from_dict(state().to_dict() | {"start": start})


def test_batches_stay_what_the_first_loader_makes_them() -> None:
    """What was asked for stays dealt as it was: a position must not become another sample."""
    shared = [0] * RankPlace.NUM_SHARED
    place, of_worker = RankPlace(shared), RankPlace(shared)
    assert place.batch(0) == 1, "nobody has said so far"
    place.asks_in_batches(32)
    of_worker.asks_in_batches(1)
    place.asks_in_batches(64)
    assert (place.batch(0), of_worker.batch(0)) == (32, 32)
    place.is_dealt(3, 0, 96, 48)
    assert [of_worker.batch(epoch) for epoch in (2, 3, 4)] == [32, 48, 32], "as the state says"
    place.is_dealt(3, 192, 0, 0)
    assert of_worker.batch(3) == 32, "what is left is dealt anew"
