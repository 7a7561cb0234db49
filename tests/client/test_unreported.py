"""What does a process keep of what it has reported?"""

from __future__ import annotations

from refill.unreported import Unreported


def test_epochs_that_pods_know_are_not_kept_but_for_the_last_two() -> None:
    unreported = Unreported()
    for epoch in range(5):
        unreported.came(epoch, 0, (0, 100))
    assert unreported.num_kept == 5
    unreported.was_reported(unreported.taken())
    assert unreported.num_kept == 2
    assert [epoch for epoch, _, _ in unreported.taken().received] == [3, 4]


def test_what_came_since_it_was_taken_is_kept() -> None:
    unreported = Unreported()
    for epoch in range(3):
        unreported.came(epoch, 0, (0, 100))
    taken = unreported.taken()
    unreported.came(0, 0, (100, 101))
    unreported.was_reported(taken)
    assert unreported
    assert (0, 0, [(0, 101)]) in unreported.taken().received


def test_what_was_not_taken_is_due_with_what_comes_next_or_seconds_later() -> None:
    """Not at once: of a job that was ended, each rank that lives on would ask pods for it four times a second."""
    unreported = Unreported()
    unreported.came(0, 0, (0, 100))
    assert unreported.is_due(report_seconds=100, quiet_seconds=-1)
    unreported.taken()
    unreported.was_not_taken()
    assert not unreported.is_due(report_seconds=100, quiet_seconds=-1)
    assert unreported.is_due(report_seconds=-1, quiet_seconds=-1)
    unreported.came(0, 0, (100, 200))
    assert unreported.is_due(report_seconds=100, quiet_seconds=-1)


def test_two_reports_at_once_may_both_have_come() -> None:
    """The job's end reports, and so does the thread that looks after the home pod."""
    unreported = Unreported()
    unreported.came(0, 0)
    for epoch in range(1, 4):
        unreported.came(epoch, 0, (0, 100))
    one, other = unreported.taken(), unreported.taken()
    unreported.was_reported(one)
    unreported.was_reported(other)
    assert unreported.num_kept == 2
