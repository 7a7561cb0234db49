"""Whoever is greedy shuts out nobody else, whatever the others hold and though nobody lets go of anything."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from refill_service.cache_core.shared_room import Asker, SharedRoom

LIMIT = 12_000


def fill(room: SharedRoom, asker: Asker) -> int:
    """As much as it gets."""
    while room.fits(asker, 1):
        room.hold(asker, 1)
    return room.held_by(asker)


def test_a_job_alone_gets_half_and_a_team_alone_two_thirds() -> None:
    room = SharedRoom(LIMIT)
    assert fill(room, Asker("vision", "a")) == LIMIT // 2
    for number in range(100):
        fill(room, Asker("vision", f"job {number}"))
    assert room.used_bytes == LIMIT * 2 // 3
    assert fill(room, Asker("speech", "b")) == LIMIT // 6, "another team finds room, however many jobs the first has"


def test_without_tokens_there_are_no_teams_and_jobs_are_told_apart() -> None:
    room = SharedRoom(LIMIT)
    assert [fill(room, Asker("", name)) for name in "abc"] == [LIMIT // 2, LIMIT // 4, LIMIT // 8]


def test_what_is_trusted_may_be_of_any_size_while_it_is_alone() -> None:
    room = SharedRoom(LIMIT, one_may_be_larger=True)
    pod, other = Asker("", "a"), Asker("", "b")
    room.hold(pod, LIMIT)
    assert room.fits(pod, 5 * LIMIT, has_bytes=LIMIT)
    assert not room.fits(other, 1)
    room.hold(pod, -LIMIT)
    assert room.fits(other, 5 * LIMIT)


@given(st.lists(st.tuples(st.sampled_from(["", "x", "y"]), st.sampled_from("ab"), st.integers(1, LIMIT)), max_size=60))
def test_it_never_holds_more_than_its_limit_and_forgets_who_left(steps: list[tuple[str, str, int]]) -> None:
    room, inside = SharedRoom(LIMIT), []
    for team, job, size in steps:
        if room.fits(Asker(team, job), size):
            room.hold(Asker(team, job), size)
            inside.append((Asker(team, job), size))
        assert room.used_bytes <= LIMIT
    for asker, size in inside:
        room.hold(asker, -size)
    assert (room.used_bytes, room.held_by(Asker("x", "a"))) == (0, 0)
