"""When has a rank left positions out for good?"""

from __future__ import annotations

import pytest

from refill.protocol.position_set import PositionSet
from refill_service.cache_core.skipped_positions import JudgedEpochs, skipped_for_good


def asked(*ranges: tuple[int, int]) -> PositionSet:
    found = PositionSet()
    for start, end in ranges:
        found.add(start, end)
    return found


def test_every_second_batch_of_a_long_epoch_is_found() -> None:
    batches = [(start, start + 8) for start in range(0, 16 * 300, 16)]
    assert skipped_for_good(asked(*batches), 8) == (8, 16)


def test_a_whole_epoch_and_its_beginning_leave_nothing_out() -> None:
    assert skipped_for_good(asked((0, 10_000)), 8) is None
    assert skipped_for_good(asked(), 8) is None


def test_batches_that_were_in_flight_when_a_loop_was_broken_off_are_no_hole() -> None:
    """Here those of 32 workers that each have 16 batches, of which one has yet to begin with its first."""
    batches = [number for number in range(1000, 1000 + 32 * 16) if number % 32]
    assert skipped_for_good(asked((0, 8000), *((8 * number, 8 * number + 8) for number in batches)), 8) is None


def test_what_lies_before_the_first_position_is_another_homes_perhaps() -> None:
    assert skipped_for_good(asked((500, 50_000)), 8) is None


@pytest.mark.parametrize("largest", [1, 8])
def test_the_hole_has_to_lie_512_batches_below_the_last_position(largest: int) -> None:
    assert skipped_for_good(asked((0, 10), (11, 11 + 512 * largest)), largest) == (10, 11)
    assert skipped_for_good(asked((0, 10), (11, 10 + 512 * largest)), largest) is None


class TestWhatIsJudged:
    def test_all_epochs_of_a_rank_that_was_always_here(self) -> None:
        judged = JudgedEpochs()
        judged.comes(0, 3)
        judged.comes(0, 4)
        assert [judged(0, epoch) for epoch in (2, 3, 4)] == [False, True, True]
        assert not judged(1, 3), "a rank that never came"

    def test_no_epoch_in_which_a_rank_was_elsewhere(self) -> None:
        """Nor when it comes back: so a rank that asks several homes is not judged at all."""
        judged = JudgedEpochs()
        for epoch in range(3):
            judged.comes(0, epoch)
            judged.left(0, epoch)
            judged.comes(0, epoch)
            assert not judged(0, epoch)
        judged.comes(0, 3)
        assert judged(0, 3)
