"""What does a process keep of what it has reported?"""

from __future__ import annotations

from refill.pods.unreported import MOST_SPANS, MOST_SPANS_OF_DIGEST, Unreported, digests_in_reports, in_reports
from refill.protocol.receipt_digest import DigestPart


def test_epochs_that_pods_know_are_not_kept_but_for_the_last_two() -> None:
    unreported = Unreported()
    for epoch in range(5):
        unreported.came(epoch, 0, (0, 100))
    taken = unreported.taken()
    assert [epoch for epoch, _, _ in taken.received] == [0, 1, 2, 3, 4]
    unreported.was_reported(taken)
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
    assert [epoch for epoch, _, _ in unreported.taken().received] == [2, 3]


def test_what_is_much_makes_several_reports() -> None:
    spans = [(2 * place, 2 * place + 1) for place in range(2 * MOST_SPANS + 1)]
    assert [len(each) for each in in_reports(spans)] == [MOST_SPANS, MOST_SPANS, 1]
    assert [span for each in in_reports(spans) for span in each] == spans
    assert in_reports([]) == [[]], "a rank that has received nothing is reported, too"


def test_digests_make_several_reports_but_those_in_too_many_parts() -> None:
    def part(rank: int, num_spans: int) -> DigestPart:
        return DigestPart(9, 1, 0, False, rank, tuple((2 * place, 2 * place + 1) for place in range(num_spans)), 1)

    parts = [part(0, 10), part(1, MOST_SPANS_OF_DIGEST + 1), part(2, MOST_SPANS_OF_DIGEST), part(3, 5)]
    reports = [[each.rank for each in report] for report in digests_in_reports(parts)]
    assert reports == [[0], [2], [3]]
    assert max(map(len, digests_in_reports([part(rank, 0) for rank in range(5_000)]))) <= 1000


def test_it_is_known_for_how_long_an_epoch_goes_by_each_way_to_deal_it() -> None:
    unreported = Unreported()
    unreported.came(0, 0, (0, 8))
    unreported.came(0, 40, (0, 8))
    unreported.came(0, 0, (8, 16))
    assert unreported.age_seconds(0, 0) > unreported.age_seconds(0, 40) > 0
    assert unreported.age_seconds(1, 0) == 0
