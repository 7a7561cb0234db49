"""Of two runs of a pod only the later one is used: lists of facts, and who is believed then."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from refill.errors import InvalidInput, PodClockAhead
from refill.protocol.pod_life import PodLife, pod_life_of
from refill_service.cache_core.pod_lives import LEASE_SECONDS, MOST_AHEAD_SECONDS, Announced, PodLives

FIRST, SECOND, THIRD = PodLife(100, "a"), PodLife(200, "b"), PodLife(300, "c")


def pod(ordinal: int, life: PodLife, now: float = 0.0, num_pods: int = 3) -> PodLives:
    return PodLives(ordinal, num_pods, life, now)


def announce(new: PodLives, others: list[PodLives], now: float, number_now: int = 0) -> None:
    answers = {each.ordinal: each.announced(new.ordinal, new.own, now) for each in others}
    new.announcement_answered(answers, now, max(number_now, new.own.number))


def test_an_earlier_run_is_refused_once_a_later_one_was_heard_of() -> None:
    other = pod(0, FIRST)
    assert other.came_from(1, FIRST, 1.0)
    assert other.came_from(1, SECOND, 2.0)
    assert not other.came_from(1, FIRST, 3.0)
    assert other.take_succeeded() == {1}
    assert other.take_succeeded() == set()
    assert other.came_from(1, SECOND, 4.0)


def test_a_pod_learns_of_its_successor_from_any_other() -> None:
    earlier = pod(1, FIRST)
    earlier.confirmed(5.0)
    assert earlier.is_confirmed(5.5)
    earlier.named(FIRST)
    assert earlier.replaced_by is None
    earlier.named(SECOND)
    assert earlier.replaced_by == SECOND
    assert not earlier.is_confirmed(5.5)


def test_a_confirmation_lasts_for_a_moment() -> None:
    alive = pod(1, FIRST, now=10.0)
    assert not alive.is_confirmed(10.0)
    alive.confirmed(asked_at=11.0)
    assert alive.is_confirmed(11.0 + LEASE_SECONDS / 2)
    assert not alive.is_confirmed(11.0 + LEASE_SECONDS)


def test_a_pod_that_starts_waits_until_its_earlier_run_can_not_be_confirmed() -> None:
    others = [pod(0, FIRST), pod(2, FIRST)]
    others[0].came_from(1, FIRST, 50.0)
    others[1].came_from(1, FIRST, 50.2)
    new = pod(1, SECOND, now=50.5)
    announce(new, others[:1], 50.5)
    assert new.unaware == [2]
    announce(new, others[1:], 50.6)
    assert new.unaware == []
    assert new.waits_seconds(50.6) == pytest.approx(50.2 + LEASE_SECONDS - 50.6)
    assert new.waits_seconds(60.0) == 0.0
    assert new.earlier == FIRST


def test_a_pod_that_is_alone_waits_for_its_earlier_run_as_well() -> None:
    assert pod(0, SECOND, now=50.0, num_pods=1).waits_seconds(50.0) == LEASE_SECONDS


def test_what_a_pod_that_was_started_itself_may_have_confirmed_before_is_waited_for() -> None:
    new = pod(1, SECOND, now=50.5)
    announce(new, [pod(0, THIRD, now=50.4), pod(2, FIRST, now=3.0)], 50.5)
    assert new.waits_seconds(50.5) == pytest.approx(50.4 + LEASE_SECONDS - 50.5)


def test_a_pod_that_has_ended_in_order_is_not_waited_for() -> None:
    other = pod(0, FIRST)
    other.came_from(1, FIRST, 50.0)
    other.ended(1, FIRST)
    new = pod(1, SECOND, now=50.1)
    announce(new, [other], 50.1)
    assert new.waits_seconds(50.1) == 0.0


def test_a_clock_that_went_back_does_not_make_an_earlier_run_the_later_one() -> None:
    others = [pod(0, FIRST), pod(2, FIRST)]
    for other in others:
        other.came_from(1, SECOND, 5.0)
    new = pod(1, PodLife(7, "late"), now=20.0)
    announce(new, others, 20.0)
    assert new.unaware == [0, 2], "nobody has accepted it so far"
    assert (new.own, new.earlier) == (PodLife(SECOND.number + 1, "late"), SECOND)
    announce(new, others, 20.1)
    assert (new.unaware, new.replaced_by) == ([], None)
    assert not others[0].came_from(1, SECOND, 21.0)


def test_one_that_stood_still_before_anybody_heard_of_it_does_not_take_its_successors_place() -> None:
    other, woken, successor = pod(0, FIRST), pod(1, FIRST), pod(1, SECOND)
    announce(successor, [other], 5.0)
    announce(woken, [other], 6.0, number_now=SECOND.number + 1)
    assert (woken.own, woken.replaced_by) == (FIRST, SECOND)
    announce(successor, [other], 7.0)
    assert successor.replaced_by is None


def test_one_that_others_have_known_and_that_finds_another_one_is_the_earlier() -> None:
    woken = pod(1, FIRST)
    announce(woken, [pod(0, FIRST)], 1.0)
    other = pod(2, FIRST)
    other.came_from(1, SECOND, 5.0)
    announce(woken, [other], 6.0)
    assert woken.replaced_by == SECOND
    assert woken.own == FIRST


def test_a_pod_that_lost_its_memory_learns_from_others_who_is_the_newest() -> None:
    knows, forgot = pod(0, FIRST), pod(2, SECOND, now=9.0)
    knows.came_from(1, SECOND, 8.0)
    announce(forgot, [knows], 9.0)
    assert not forgot.came_from(1, FIRST, 10.0)


def test_pods_of_another_number_are_not_counted() -> None:
    one = pod(0, FIRST, num_pods=2)
    assert one.came_from(5, FIRST, 1.0)
    assert one.newest(5) is None
    assert one.announced(5, FIRST, 1.0).wait_seconds == 0.0


@pytest.mark.parametrize(
    "text", ["", "1", "1 ", "x 1-a", "1 -a", "1 1-", "1 1-G", "-1 1-a", "9999999999 1-a", "1 1-a b"]
)
def test_a_header_that_names_no_run_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="names no process"):
        pod_life_of(text)


def test_headers() -> None:
    assert pod_life_of(None) is None
    assert pod_life_of(f"12 {SECOND.encode()}") == (12, SECOND)
    answer = Announced({0: FIRST, 1: SECOND}, 0.5, FIRST)
    assert Announced.from_dict(answer.to_dict()) == answer


@pytest.mark.parametrize("ordinal", [0, 1, 7], ids=["its own", "another's", "one that there is none of"])
def test_a_life_that_begins_minutes_from_now_is_refused(ordinal: int) -> None:
    one, now = pod(0, FIRST), 10**18
    last = now + MOST_AHEAD_SECONDS * 10**9
    one.check_begun(ordinal, PodLife(last, "b"), now)
    with pytest.raises(PodClockAhead, match=f"pod {ordinal} .* 15 minutes from now .* 5 at most: set the clocks"):
        one.check_begun(ordinal, PodLife(last + 600 * 10**9, "b"), now)


def test_what_was_known_before_the_clock_was_set_back_is_known_still() -> None:
    one, hour = PodLives(0, 3, PodLife(10**18, "a"), 0.0), 3600 * 10**9
    known = PodLife(10**18 - 1, "b")
    assert one.came_from(1, known, 1.0)
    one.check_begun(1, known, 10**18 - hour)
    one.check_begun(0, one.own, 10**18 - hour)
    with pytest.raises(PodClockAhead):
        one.check_begun(1, PodLife(10**18 + 1, "c"), 10**18 - hour)


@given(st.lists(st.integers(0, 10**19 - 1), max_size=20), st.integers(0, 2**63 - 1))
@example([10**19 - 1], 2**63 - 1)
def test_whatever_others_know_the_next_number_is_one_that_others_take(said: list[int], clock: int) -> None:
    """Up to the last nanosecond that a clock can tell."""
    new = pod(1, PodLife(clock, "ff"))
    for number in said:
        earlier = PodLife(number, "ee")
        try:
            new.check_begun(1, earlier, clock)
        except PodClockAhead:
            continue
        new.announcement_answered({0: Announced({1: earlier}, 0.0)}, 1.0, clock)
    assert PodLife.decode(new.own.encode()) == new.own
    assert new.own.number <= clock + MOST_AHEAD_SECONDS * 10**9 + 1 or new.own.number == clock


STEPS = st.lists(
    st.sampled_from(
        [
            "time passes",
            "the earlier assigns and writes",
            "the earlier asks another",
            "the other answers it",
            "the earlier answers its rank",
            "the later announces itself",
            "the later reads the journal",
        ]
    ),
    max_size=40,
)


@given(STEPS, st.integers(2, 3))
@example(
    [
        "the earlier asks another",
        "the other answers it",
        "the later announces itself",
        "the later announces itself",
        "the later reads the journal",
        "the earlier assigns and writes",
        "the earlier answers its rank",
    ],
    2,
)
def test_all_that_an_earlier_run_answers_is_in_the_journal_that_the_later_one_reads(
    steps: list[str], num_pods: int
) -> None:
    """The earlier run may stand still between any two of its steps, for as long as it likes."""
    now = 0.0
    earlier, later = pod(1, FIRST, num_pods=num_pods), pod(1, SECOND, num_pods=num_pods)
    others = [pod(each, FIRST, num_pods=num_pods) for each in range(num_pods) if each != 1]
    announce(earlier, others, now)
    assigned = answered = 0
    read: int | None = None
    asked: list[tuple[float, PodLives]] = []
    for count, step in enumerate(steps):
        other = others[count % len(others)]
        if step == "time passes":
            now += LEASE_SECONDS / 3
        elif step == "the earlier assigns and writes":
            assigned += 1
        elif step == "the earlier asks another":
            asked.append((now, other))
        elif step == "the other answers it" and asked:
            asked_at, other = asked.pop(0)
            if other.came_from(1, FIRST, now):
                earlier.confirmed(asked_at)
            else:
                earlier.named(SECOND)
        elif step == "the earlier answers its rank" and earlier.is_confirmed(now):
            answered = assigned
        elif step == "the later announces itself":
            announce(later, [other], now)
        elif step == "the later reads the journal" and not later.unaware and not later.waits_seconds(now):
            read = assigned if read is None else read
        assert read is None or answered <= read, "the later one gives to others what the earlier one has answered with"
