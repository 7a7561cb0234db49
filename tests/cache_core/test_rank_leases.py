"""Which process is a rank: one at a time, the one that is heard; another one waits, goes on, or is refused."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st

from refill.protocol.rank_life import RankLife
from refill_service.cache_core.rank_leases import LEASE_SECONDS, RankLeases

FIRST, SECOND, THIRD = (RankLife("host", process, 7, "aa") for process in (11, 12, 13))
LIVES = (FIRST, SECOND, THIRD)
BEAT_SECONDS = 3.0


def held_by(leases: RankLeases, life: RankLife, now: float = 0.0) -> RankLeases:
    assert leases.asks(0, life, now) is None
    return leases


def test_who_asks_first_is_the_rank_and_stays_it() -> None:
    leases = held_by(RankLeases(), FIRST)
    assert leases.asks(0, FIRST, 5) is None
    refusal = leases.asks(0, SECOND, 6)
    assert refusal is not None
    assert (refusal.holder, refusal.held_seconds, refusal.silent_seconds) == (FIRST, 6, 1)
    assert not refusal.final
    assert leases.asks(1, SECOND, 6) is None, "another rank is another lease"


def test_a_process_that_fell_silent_is_replaced() -> None:
    leases = held_by(RankLeases(), FIRST)
    assert leases.asks(0, SECOND, LEASE_SECONDS) is not None
    assert leases.asks(0, SECOND, LEASE_SECONDS + 0.1) is None
    assert leases.holder(0) == SECOND


def test_a_process_that_stands_still_keeps_its_place_while_it_has_a_connection() -> None:
    connected = {FIRST}
    leases = held_by(RankLeases(connected), FIRST)
    for now in (LEASE_SECONDS, 60, 3600):
        refusal = leases.asks(0, SECOND, now)
        assert refusal is not None
        assert (refusal.holder, refusal.silent_seconds, refusal.final) == (FIRST, now, False)
        assert refusal.stands_still == (now > LEASE_SECONDS)
        leases.held_elsewhere(0, THIRD, SECOND, now)
        assert leases.holder(0) == FIRST, "nor does another pod's word take it away"
    leases.heard(0, FIRST, 3601)
    refusal = leases.asks(0, SECOND, 3602)
    assert refusal is not None
    assert refusal.final, "it goes on: there are two"
    connected.clear()
    assert leases.asks(0, SECOND, 3601 + LEASE_SECONDS) is not None, "its workers may have been the last to be heard"
    assert leases.asks(0, SECOND, 3601 + LEASE_SECONDS + 0.1) is None


def test_a_process_that_fell_silent_may_go_on_while_nobody_has_replaced_it() -> None:
    leases = held_by(RankLeases(), FIRST)
    assert leases.asks(0, FIRST, 1000) is None


def test_a_twin_is_refused_for_good_when_the_other_goes_on_being_heard_and_then_at_once() -> None:
    leases, finals = held_by(RankLeases(), FIRST), []
    now = 1.0
    while not finals:
        leases.heard(0, FIRST, now)
        refusal = leases.asks(0, SECOND, now)
        assert refusal is not None
        finals = [now] if refusal.final else []
        now += BEAT_SECONDS
    assert LEASE_SECONDS < finals[0] - 1.0 <= LEASE_SECONDS + BEAT_SECONDS
    again = leases.asks(0, SECOND, finals[0] + 0.1)
    assert again is not None
    assert again.final


def test_workers_of_a_killed_process_that_ask_for_some_seconds_make_nobody_a_twin() -> None:
    leases = held_by(RankLeases(), FIRST)
    for now in (1.0, 4.0, 6.0):
        leases.asks(0, FIRST, now)
        refusal = leases.asks(0, SECOND, now + 0.5)
        assert refusal is not None
        assert not refusal.final
    assert leases.asks(0, SECOND, 6.0 + LEASE_SECONDS + 0.1) is None


def test_being_there_makes_nobody_a_rank() -> None:
    leases = RankLeases()
    leases.heard(0, FIRST, 0)
    assert leases.holder(0) is None
    assert leases.asks(0, SECOND, 1) is None
    leases.heard(0, FIRST, 5)
    assert leases.asks(0, THIRD, 1 + LEASE_SECONDS + 0.1) is None, "the observer did not keep it alive"


def test_speaking_for_a_rank_makes_nobody_it_and_is_not_for_others() -> None:
    leases = RankLeases()
    assert leases.asks(0, FIRST, 0, takes=False) is None
    assert leases.holder(0) is None
    held_by(leases, SECOND)
    assert leases.asks(0, FIRST, 1, takes=False) is not None


def test_a_process_that_has_ended_is_replaced_at_once_and_its_workers_are_refused() -> None:
    leases = held_by(RankLeases(), FIRST)
    assert leases.ended(0, FIRST, SECOND, 1) is None
    assert leases.holder(0) == SECOND
    left_over = leases.asks(0, FIRST, 2)
    assert left_over is not None
    assert left_over.final
    assert left_over.ended
    assert left_over.holder == SECOND
    later = leases.asks(0, FIRST, 1000)
    assert later is not None, "nor later, when the other has been silent for long"
    leases.returned(0, SECOND)
    assert leases.asks(0, FIRST, 1001) is not None
    assert leases.asks(0, THIRD, 1002) is None


def test_a_pod_that_only_hears_that_a_process_was_replaced_counts_no_rank_and_refuses_the_old_one() -> None:
    for leases in (RankLeases(), held_by(RankLeases(), FIRST)):
        assert leases.ended(0, FIRST, SECOND, 1, takes=False) is None
        assert leases.holder(0) is None
        assert leases.ranks_heard(1) == [], "the rank counts at its home"
        left_over = leases.asks(0, FIRST, 2)
        assert left_over is not None
        assert (left_over.final, left_over.holder) == (True, SECOND)
        assert leases.asks(0, SECOND, 3) is None, "it may ask here as well"


def test_that_one_has_ended_is_no_reason_to_replace_another() -> None:
    leases = held_by(RankLeases(), FIRST)
    refusal = leases.ended(0, SECOND, THIRD, 1)
    assert refusal is not None
    assert refusal.holder == FIRST
    assert leases.holder(0) == FIRST


def test_who_has_ended_ends_nobody_but_whoever_took_its_place() -> None:
    """It had left the rank to a process that it started, and goes on when that one is gone."""
    leases = held_by(RankLeases(), FIRST)
    leases.ended(0, FIRST, SECOND, 1)
    assert leases.ended(0, THIRD, FIRST, 2) is not None
    assert leases.holder(0) == SECOND
    assert leases.ended(0, SECOND, FIRST, 3) is None
    assert leases.holder(0) == FIRST
    assert leases.asks(0, FIRST, 4) is None
    refusal = leases.asks(0, SECOND, 5)
    assert refusal is not None
    assert (refusal.holder, refusal.ended) == (FIRST, True)


def test_a_rank_that_was_returned_is_free() -> None:
    leases = held_by(RankLeases(), FIRST)
    leases.returned(0, SECOND)
    assert leases.holder(0) == FIRST, "it is not its to return"
    leases.returned(0, FIRST)
    assert leases.asks(0, SECOND, 1) is None
    leases.returned(0, SECOND)
    assert leases.asks(0, FIRST, 2) is None, "who has returned it may come back"


STEPS = st.lists(
    st.tuples(st.sampled_from(["asks", "heard", "returned", "ended"]), st.sampled_from(LIVES), st.floats(0, 8)),
    max_size=60,
)


@given(STEPS)
def test_a_rank_is_one_process_that_asked_and_changes_only_after_silence_or_by_word(
    steps: list[tuple[str, RankLife, float]],
) -> None:
    leases, now, heard = RankLeases(), 0.0, 0.0
    gone: set[RankLife] = set()
    for what, life, pause in steps:
        now += pause
        before, other = leases.holder(0), LIVES[(LIVES.index(life) + 1) % len(LIVES)]
        if what == "asks":
            answered = leases.asks(0, life, now) is None
            assert answered == (leases.holder(0) == life)
            assert answered or leases.holder(0) == before
            assert not (answered and life in gone)
            if answered and before not in (None, life):
                assert now - heard > LEASE_SECONDS
        elif what == "heard":
            leases.heard(0, life, now)
            assert leases.holder(0) == before
        elif what == "returned":
            leases.returned(0, life)
            assert leases.holder(0) == (None if before == life else before)
        else:
            answered = leases.ended(0, life, other, now) is None
            if other in gone and answered:
                assert before in (life, None), "it has ended another one than took its place"
                gone.remove(other)
            if other not in gone:
                gone.add(life)
                assert leases.holder(0) != life
            else:
                assert leases.holder(0) == before
        asker = other if what == "ended" else life
        if what != "returned" and leases.holder(0) == asker:
            heard = now


@given(st.integers(1, 100))
def test_nothing_grows_with_those_that_were_refused(count: int) -> None:
    def num_bytes(count: int) -> int:
        leases = held_by(RankLeases(), FIRST)
        for process in range(100, 100 + count):
            leases.asks(0, RankLife("host", process, 7, "aa"), 1)
            leases.ended(0, RankLife("other", process, 7, "aa"), SECOND, 1)
        return len(pickle.dumps(leases))

    assert num_bytes(count) <= num_bytes(16)


class TestWhoWasRefusedElsewhere:
    """A pod that was restarted knows no rank; a twin that is first to ask there says who refused it before."""

    def refused(self, leases: RankLeases, now: float) -> bool:
        leases.held_elsewhere(0, FIRST, SECOND, now)
        return leases.asks(0, SECOND, now) is not None

    def test_the_rank_goes_on_there(self) -> None:
        leases = RankLeases()
        assert self.refused(leases, 0)
        assert leases.asks(0, FIRST, 1) is None
        assert all(self.refused(leases, now) for now in (2, 9, 10.9))

    def test_one_that_is_gone_is_waited_for_as_long_as_a_lease_lasts(self) -> None:
        leases = RankLeases()
        assert self.refused(leases, 0)
        assert self.refused(leases, LEASE_SECONDS)
        assert not self.refused(leases, LEASE_SECONDS + 0.1)
        assert leases.holder(0) == SECOND

    def test_one_that_was_here_long_ago_is_the_rank_again(self) -> None:
        leases = held_by(RankLeases(), FIRST)
        assert self.refused(leases, 100)
        assert leases.asks(0, FIRST, 101) is None

    def test_nobody_takes_the_place_of_who_is_here(self) -> None:
        leases = held_by(RankLeases(), THIRD)
        assert self.refused(leases, 1)
        assert leases.holder(0) == THIRD
