"""Transfers share a link fairly: what is over when, beside sums done by hand, and nothing is lost."""

from __future__ import annotations

import math

import pytest
from benchmarks.papers.processor_sharing import FairLink, SharedWork
from hypothesis import given
from hypothesis import strategies as st
from tests.draws import draws


def all_over(link: FairLink[str], transfers: list[tuple[float, int, float, str]]) -> dict[str, float]:
    """When each of ``(begins, pod, bytes, name)`` is over."""
    found, left = {}, sorted(transfers)
    while left or not math.isinf(link.next_over_at):
        if left and left[0][0] < link.next_over_at:
            link.begin(*left.pop(0))
            continue
        at = link.next_over_at
        found |= dict.fromkeys(link.over(at), at)
    return found


def test_one_that_begins_later_slows_the_other_down_and_waits_for_none() -> None:
    found = all_over(FairLink(2, math.inf, 100.0), [(0.0, 0, 100.0, "first"), (0.5, 1, 100.0, "second")])
    # Alone for .5 s, then half each: the first has 50 left, and the second its own 50 after that alone.
    assert found == {"first": pytest.approx(1.5), "second": pytest.approx(2.0)}


def test_what_a_pod_cannot_take_is_for_others() -> None:
    link: FairLink[str] = FairLink(2, 60.0, 100.0)
    found = all_over(link, [(0.0, 0, 30.0, "a"), (0.0, 0, 30.0, "b"), (0.0, 0, 30.0, "c"), (0.0, 1, 40.0, "alone")])
    # Equal parts are 25 for each of the four: 75 are more than a pod takes, so that its three get 20, and the other 40.
    assert found == {"alone": pytest.approx(1.0), **dict.fromkeys("abc", pytest.approx(1.5))}


def test_nothing_bounds_transfers() -> None:
    assert all_over(FairLink(1, math.inf, math.inf), [(2.0, 0, 9e9, "a")]) == {"a": 2.0}


def test_what_shares_workers_is_slowed_down_only_by_what_is_too_much() -> None:
    work: SharedWork[str] = SharedWork()
    work.begin(0.0, 1.0, "first")
    work.begin(0.5, 1.0, "second")
    work.go_on(0.5)
    work.rate = 0.7  # two of them, and 1.4 workers
    assert work.next_over_at == pytest.approx(0.5 + 0.5 / 0.7)
    assert work.over(work.next_over_at) == ["first"]
    work.rate = 1.0
    assert work.next_over_at == pytest.approx(0.5 + 0.5 / 0.7 + 0.5)


@draws(60)
@given(
    transfers=st.lists(
        st.tuples(st.floats(0, 10), st.integers(0, 2), st.floats(1, 1e6), st.integers(0, 10**9)),
        min_size=1,
        max_size=20,
    ),
    bandwidth=st.floats(10, 1e6),
    link=st.floats(10, 1e6),
)
def test_bytes_are_kept(transfers: list[tuple[float, int, float, int]], bandwidth: float, link: float) -> None:
    named = [(begins, pod, size, f"{number} {place}") for place, (begins, pod, size, number) in enumerate(transfers)]
    found = all_over(FairLink(3, bandwidth, link), named)
    assert found.keys() == {name for *_, name in named}, "each is over once"
    slack = 1 + 1e-6
    for begins, _, size, name in named:
        assert found[name] * slack >= begins + size / min(bandwidth, link), "none is faster than alone"
    total, first, last = sum(size for _, _, size, _ in named), min(each[0] for each in named), max(found.values())
    assert (last - first) * link * slack >= total
    # At every moment either the link is full or some pod with something to do is.
    of_pods = [sum(size for _, pod, size, _ in named if pod == each) for each in range(3)]
    begun = max(each[0] for each in named)
    assert last <= (begun + total / link + sum(of_pods) / bandwidth) * slack
