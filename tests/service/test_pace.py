"""Progress all the time, and in a time that has an end."""

from __future__ import annotations

from refill_service.serving.request_guard import LEAST_BYTES, LEAST_BYTES_PER_SECOND, Pace


def test_who_moves_nothing_has_the_timeout() -> None:
    assert Pace(60, 100.0).ends == 160


def test_what_was_moved_before_earns_no_silence() -> None:
    pace = Pace(60, 0)
    for second in range(20):
        pace.moved(1 << 20, second)
    assert pace.ends == 19 + 60


def test_a_byte_now_and_then_is_no_progress() -> None:
    pace = Pace(60, 0)
    for second in range(50):
        pace.moved(1, second)
    assert pace.ends == 60


def test_progress_at_its_least_does_not_go_on_for_ever() -> None:
    pace, now = Pace(60, 0), 0.0
    while now <= pace.ends:
        pace.moved(LEAST_BYTES, now)
        now += 59
    assert now < 240


def test_who_moves_as_much_as_is_asked_for_is_never_cut_off() -> None:
    pace = Pace(60, 0)
    for second in range(100_000):
        assert second < pace.ends
        pace.moved(LEAST_BYTES_PER_SECOND, second)
