"""What a receipt of a planned epoch says follows from what ranks report, at whichever pods, however often."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill.errors import InvalidInput
from refill.protocol.dealing import Dealing
from refill_service.cache_core.planned.received import ReceivedEpochs, receipt_of

dealings = st.builds(
    lambda positions, ranks, start, drop_last: Dealing(
        positions, ranks, start=min(start, positions), drop_last=drop_last
    ),
    st.integers(0, 60),
    st.integers(1, 7),
    st.integers(0, 60),
    st.booleans(),
)


class Pod(ReceivedEpochs):
    """Its clock goes on with each report."""

    _clock = itertools.count(1.0)

    def at(self, epoch: int, dealing: Dealing, now: float = 0) -> Any:
        return super().at(epoch, dealing, next(self._clock))

    def asks(self, *told: Any, **more: Any) -> None:
        super().asks(*told, now=0, **more)

    def received(self, *told: Any) -> None:  # type: ignore[override]
        super().received(*told, now=0)

    def goes_without(self, *told: Any) -> None:  # type: ignore[override]
        super().goes_without(*told, now=0)


def receipt(*pods: ReceivedEpochs, epoch: int = 0) -> dict[str, object]:
    return receipt_of([found.to_dict() for pod in pods if (found := pod.of(epoch)) is not None])


@given(dealings, st.data())
def test_it_counts_each_position_of_the_epoch_once(dealing: Dealing, data: st.DataObject) -> None:
    """Each rank's positions in any spans, to two pods, with repeats; against a set of the epoch's positions."""
    pods = Pod(), Pod()
    pods[0].received(0, dealing, 0, [])
    had: set[int] = set(range(dealing.start))
    repeats = 0
    for rank in range(dealing.num_ranks):
        places: set[int] = set()
        for _ in range(data.draw(st.integers(0, 3), label="reports")):
            first = data.draw(st.integers(0, dealing.per_rank), label="first")
            end = data.draw(st.integers(first, dealing.per_rank), label="end")
            data.draw(st.sampled_from(pods), label="pod").received(0, dealing, rank, [(first, end)])
            places |= set(range(first, end))
        of_rank = dealing.positions(rank, np.array(sorted(places), dtype=np.int64)).tolist()
        had |= {position for position in of_rank if position < dealing.num_positions}
        repeats += sum(position >= dealing.num_positions for position in of_rank)
    planned = {
        position
        for rank in range(dealing.num_ranks)
        for position in dealing.positions(rank, np.arange(dealing.per_rank)).tolist()
        if position < dealing.num_positions
    } | set(range(dealing.start))
    found = receipt(*pods)
    assert (found["planned"], found["received"], found["repeats"]) == (len(planned), len(had), repeats)
    assert found["unconfirmed"] == len(planned) - len(had)
    assert found["dropped"] == dealing.num_positions - len(planned)
    assert found["exact"] == (had == planned)


def test_an_epoch_that_is_dealt_anew_was_had_up_to_there() -> None:
    """The pods that hear of it last may have been told of the ranks before, too."""
    before, after = Dealing(100, 2), Dealing(100, 3, start=40)
    first, second = Pod(), Pod()
    first.received(0, before, 0, [(0, 30)])
    second.received(0, before, 1, [(0, 30)])
    assert receipt(first, second)["received"] == 60
    second.received(0, after, 0, [(0, 5)])
    found = receipt(first, second)
    assert (found["received"], found["from_checkpoint"], found["ranks"]) == (45, 40, {0: 5})
    second.received(0, after, 2, [(0, 20)])
    first.received(0, after, 1, [(0, 20)])
    first.received(0, after, 0, [(0, 20)])
    assert receipt(first, second)["exact"]


def test_damaged_samples_are_named_once() -> None:
    dealing, pod, other = Dealing(20, 2), Pod(), Pod()
    for each in (pod, pod, other):
        each.received(0, dealing, 0, [(0, 10)])
        each.goes_without(0, dealing, 0, np.array([3, 4]), np.array([17, 5]))
    found = receipt(pod, other)
    assert (found["damaged"], found["damaged_samples"]) == (2, [5, 17])
    assert pod.num_damaged == 2, "a report that comes twice counts once"


@pytest.mark.parametrize("span", [(-1, 2), (0, 11), (5, 4)])
def test_positions_that_a_rank_does_not_have_are_refused(span: tuple[int, int]) -> None:
    pod, dealing = Pod(), Dealing(20, 2)
    with pytest.raises(InvalidInput, match="rank 1 has 10 positions in epoch 3, got"):
        pod.received(3, dealing, 1, [span])
    with pytest.raises(InvalidInput, match="rank 1 has 10 positions in epoch 3, got 10"):
        pod.goes_without(3, dealing, 1, np.array([10]), np.array([0]))
    assert pod.of(3) is None, "what is refused has changed something"


def test_a_rank_comes_to_an_epoch_once_and_only_from_the_one_before() -> None:
    pod, dealing = Pod(), Dealing(20, 2)
    assert not pod.comes_to(0, 0)
    pod.asks(0, dealing, 0, np.arange(3))
    assert not pod.comes_to(1, 1), "another rank has asked for epoch 0"
    assert pod.comes_to(1, 0)
    pod.asks(1, dealing, 0, np.arange(3))
    assert not pod.comes_to(1, 0)
    assert not pod.comes_to(3, 0)


def test_what_lies_in_a_checkpoint_was_asked_for() -> None:
    pod, dealing = Pod(), Dealing(100, 2)
    pod.asks(0, dealing, 0, np.arange(30, 35), had=30)
    found = pod.of(0)
    assert found is not None
    assert list(found.asked[0]) == [(0, 35)]


def test_what_is_kept_is_bounded() -> None:
    pod, dealing = Pod(), Dealing(20, 1)
    for epoch in range(400):
        pod.asks(epoch, dealing, 0, np.arange(20))
        pod.received(epoch, dealing, 0, [(0, 20)])
    kept = [epoch for epoch in range(400) if pod.of(epoch) is not None]
    assert kept == list(range(100, 400))
    asked = [epoch for epoch in kept if (found := pod.of(epoch)) is not None and found.asked]
    assert asked == [397, 398, 399]
    assert receipt(pod, epoch=100)["exact"]
