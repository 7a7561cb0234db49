"""What a receipt of a planned epoch says follows from what ranks report, at whichever pods, however often."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill.errors import InvalidInput
from refill.protocol.dealing import Dealing
from refill.protocol.rank_life import RankLife
from refill_service.cache_core.planned import received
from refill_service.cache_core.planned.received import ReceivedEpochs, receipt_of, spans_in

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

    def _at(self, epoch: int, dealing: Dealing, now: float = 0) -> Any:
        return super()._at(epoch, dealing, next(self._clock))

    def asks(self, *told: Any, **more: Any) -> None:
        super().asks(*told, now=0, **more)

    def received(self, *told: Any) -> None:  # type: ignore[override]
        super().received(*told, now=0)

    def goes_without(self, *told: Any) -> None:  # type: ignore[override]
        super().goes_without(*told, now=0)


def receipt(*pods: ReceivedEpochs, epoch: int = 0) -> dict[str, object]:
    """The same, however pods write what they have been told."""
    known = [found for pod in pods if (found := pod.of(epoch)) is not None]
    written = [json.dumps(found.copy().to_dict(packed=packed)) for packed in (False, True) for found in known]
    of_lists, of_both, of_packed = (
        receipt_of(map(json.loads, part)) for part in (written[: len(known)], written, written[len(known) :])
    )
    assert of_lists == of_both == of_packed == receipt_of([found.to_dict() for found in known])
    return of_lists


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


class TestDealings:
    """Ranks that go through an epoch by different dealings are found out; ranks that take others' places are not."""

    WHOLE, OF_THREE, FROM_40 = Dealing(100, 2), Dealing(100, 3, start=30), Dealing(100, 2, start=40)

    def test_ranks_of_one_dealing_are_never_refused(self) -> None:
        pod = ReceivedEpochs()
        for now in range(100):
            assert pod.goes_by(now // 20, self.WHOLE, now % 2, now) is None

    def test_other_ranks_take_the_places_of_those_before(self) -> None:
        pod = ReceivedEpochs()
        assert all(pod.goes_by(0, self.WHOLE, rank, 1.0) is None for rank in range(2))
        assert all(pod.goes_by(0, self.OF_THREE, rank, 1.1 + rank / 10) is None for rank in (2, 0, 1))
        assert all(pod.goes_by(0, self.OF_THREE, rank, 2.0) is None for rank in range(3))

    def test_a_clock_that_was_set_back_keeps_no_ranks_alive(self) -> None:
        pod, day = ReceivedEpochs(), 86_400.0
        for rank in range(2):
            assert pod.goes_by(0, self.WHOLE, rank, day) is None
        for at in (0.0, 60.0, 3600.0):  # they are gone, and others go on from a state
            assert all(pod.goes_by(0, self.OF_THREE, rank, at) is None for rank in range(3))
        pod.received(0, self.OF_THREE, 2, [(0, 3)], now=3601.0)
        found = pod.of(0)
        assert found is not None
        assert (found.dealing, list(found.received[2])) == (self.OF_THREE, [(0, 3)])

    def test_a_rank_that_goes_on_from_an_earlier_step_than_others_is_found_out(self) -> None:
        pod = ReceivedEpochs()
        assert pod.goes_by(0, self.WHOLE, 0, 0.0) is None
        assert pod.goes_by(0, self.FROM_40, 1, 1.0) is None, "rank 0 may have ended"
        assert pod.goes_by(0, self.WHOLE, 0, 1.5) == (1, self.FROM_40, False)
        assert pod.goes_by(0, self.FROM_40, 1, 2.0) is None, "who was refused has asked for nothing"
        assert pod.goes_by(0, self.WHOLE, 0, 12.0) == (1, self.FROM_40, False)
        assert pod.goes_by(0, self.WHOLE, 0, 12.1) is None, "rank 1 is gone"
        assert pod.goes_by(0, self.FROM_40, 1, 12.2) == (0, self.WHOLE, False), "and came back too late"

    def test_it_is_for_good_where_both_processes_live(self) -> None:
        """Loaders of two batch sizes: who waits would be let in once the other waits for it, in each step anew."""
        pod = ReceivedEpochs()
        of_32, of_16 = Dealing(1000, 2, 32), Dealing(1000, 2, 16)
        rank_0, rank_1, rank_0_anew = (RankLife("host", number, 1, "") for number in (1, 2, 3))
        assert pod.goes_by(0, of_32, 0, 0.0, rank_0) is None
        assert pod.goes_by(0, of_16, 1, 1.0, rank_1) is None
        assert pod.goes_by(0, of_32, 0, 2.0, rank_0) == (1, of_16, False), "the other may be one that only looks"
        assert pod.goes_by(0, of_16, 1, 2.5, rank_1) is None
        assert pod.goes_by(0, of_32, 0, 2.8, rank_0) == (1, of_16, True)
        assert pod.goes_by(0, of_32, 0, 3.0, rank_0_anew) == (1, of_16, False), "a process that goes back waits"

    def test_it_is_for_good_where_each_waits_for_the_other(self) -> None:
        """In one step with it, the other asks for nothing until it has its batch."""
        pod = ReceivedEpochs()
        of_32, of_16 = Dealing(1000, 2, 32), Dealing(1000, 2, 16)
        lives = [RankLife("host", number, 1, "") for number in range(2)]
        assert pod.goes_by(0, of_32, 0, 0.0, lives[0]) is None
        assert pod.goes_by(0, of_16, 1, 1.0, lives[1]) is None
        assert pod.goes_by(0, of_32, 0, 2.0, lives[0]) == (1, of_16, False)
        assert pod.goes_by(0, of_32, 0, 12.0, lives[0]) is None, "the other may be gone"
        assert pod.goes_by(0, of_16, 1, 13.0, lives[1]) == (0, of_32, True), "it is not"

    def test_a_process_that_goes_back_waits_for_the_others_to_follow(self) -> None:
        pod = ReceivedEpochs()
        lives = [RankLife("host", number, 1, "") for number in range(2)]
        for dealing, at in ((self.WHOLE, 0.0), (self.FROM_40, 1.0)):
            assert all(pod.goes_by(0, dealing, rank, at, lives[rank]) is None for rank in range(2))
        assert pod.goes_by(0, self.WHOLE, 0, 2.0, lives[0]) == (1, self.FROM_40, False)

    def test_ranks_in_different_epochs_are_not_compared(self) -> None:
        pod = ReceivedEpochs()
        assert pod.goes_by(0, self.FROM_40, 0, 0.0) is None
        assert pod.goes_by(1, self.WHOLE, 1, 0.0) is None
        assert pod.goes_by(0, self.FROM_40, 0, 0.1) is None

    def test_a_late_report_by_a_dealing_of_before_does_not_take_the_receipt_over(self) -> None:
        pod = ReceivedEpochs()
        pod.goes_by(0, self.WHOLE, 0, 0.0)
        pod.goes_by(0, self.FROM_40, 0, 1.0)
        pod.received(0, self.FROM_40, 0, [(0, 30)], now=2.0)
        pod.received(0, self.WHOLE, 0, [(0, 50)], now=3.0)
        assert receipt(pod)["received"] == 40 + 30


def test_a_receipt_of_lists_counts_what_each_rank_has_of_its_own() -> None:
    """Pods know parts of it."""
    dealing = Dealing.of_lists(2)
    pods = [ReceivedEpochs(), ReceivedEpochs()]

    def receipt() -> dict[str, Any]:
        return receipt_of(part.to_dict() for pod in pods if (part := pod.of(0)) is not None)

    pods[0].is_listed(0, dealing, 0, 30, "a", now=1)
    pods[0].received(0, dealing, 0, [(0, 30)], now=1)
    found = receipt()
    assert (found["planned"], found["received"], found["lists"], found["exact"]) == (30, 30, 1, False), "one is unknown"
    pods[1].is_listed(0, dealing, 1, 10, "b", now=2)
    pods[1].received(0, dealing, 1, [(0, 4), (6, 99)], now=2)
    found = receipt()
    assert (found["planned"], found["received"], found["unconfirmed"], found["lists"]) == (40, 38, 2, 2)
    assert not found["exact"]
    pods[0].received(0, dealing, 1, [(4, 6)], now=2)
    assert receipt()["exact"]
    pods[1].is_listed(0, dealing, 1, 10, "c", now=3)
    assert receipt()["asked"] != found["asked"], "it says what was asked for"


def test_what_ranks_say_takes_no_more_than_there_is_and_the_newest_epoch_stays() -> None:
    pod, dealing = ReceivedEpochs(limit_bytes=100_000), Dealing(1_000_000, 1000, 10)
    for epoch in range(5):
        for rank in range(40):
            pod.goes_by(epoch, dealing, rank, now=epoch)
            pod.received(epoch, dealing, rank, [(0, 10)], now=epoch)
    assert 0 < pod.used_bytes <= 100_000
    assert pod.newest == 4
    newest = pod.of(4)
    assert newest is not None
    assert len(newest.received) == 40
    for rank in range(1000):
        pod.received(4, dealing, rank, [(place, place + 1) for place in range(0, 900, 2)], now=5)
        pod.asks(4, dealing, rank, np.arange(0, 900, 2), now=5)
        pod.goes_without(4, dealing, rank, np.arange(9), np.arange(9), now=5)
    assert 0 < pod.used_bytes <= 100_000
    assert pod.epochs == [4], "older ones have made room"


def test_a_pod_says_so_where_it_has_not_noted_all_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what it has not noted would count as left out."""
    monkeypatch.setattr(received, "_MOST_SPANS", 100)
    dealing = Dealing(1_000_000, 10, 10)
    for pod in (ReceivedEpochs(), ReceivedEpochs(limit_bytes=5000)):  # each of the two bounds
        pod.asks(0, dealing, 3, np.arange(0, 20, 2), now=0)
        assert pod.asked_of(0, 3)[2]
        for first in range(20, 1000, 10):
            pod.asks(0, dealing, 3, np.array([first, first + 2]), now=1)
        asked, largest, is_all = pod.asked_of(0, 3)
        assert (asked.count < 10 + 2 * 98, largest, is_all) == (True, 10, False)
    pod = ReceivedEpochs(limit_bytes=10_000)
    for epoch in range(30):
        pod.asks(epoch, dealing, 0, np.arange(0, 40, 2), now=epoch)
    assert not pod.asked_of(0, 0)[2], "it was forgotten for newer ones"
    assert pod.asked_of(30, 0)[2], "nobody has asked for it"
    pod.received(0, dealing, 1, [(0, 10)], now=31)
    assert not pod.asked_of(0, 0)[2], "a late report does not bring back what was forgotten"


def test_a_late_report_by_one_of_many_dealings_is_taken() -> None:
    """A run that was restarted five times within an epoch, in other ways each time."""
    pod = ReceivedEpochs()
    for start in range(1, 6):
        dealing = Dealing(100, 2, start=10 * start)
        pod.goes_by(0, dealing, 0, now=start)
        pod.received(0, dealing, 0, [(0, 5)], now=start)
    pod.received(0, Dealing(100, 2), 1, [(0, 5)], now=0)
    used_bytes = pod.used_bytes
    pod.forget_oldest()
    assert used_bytes > pod.used_bytes == 0


def test_spans_that_another_pod_says_are_spans() -> None:
    for wrong in ("!", "AAAA", "AAAAAAAAAAA="):
        with pytest.raises(InvalidInput, match="another pod says spans of positions that are none"):
            spans_in(wrong)
