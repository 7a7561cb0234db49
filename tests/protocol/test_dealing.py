"""Which positions each rank asks for: as torch's DistributedSampler counts, and the same global steps for any ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch.utils.data
from hypothesis import given
from hypothesis import strategies as st

from refill.errors import InvalidInput
from refill.protocol.dealing import Dealing

dealings = st.builds(
    Dealing, st.integers(0, 200), st.integers(1, 9), st.integers(1, 20), st.just(0), st.booleans()
) | st.integers(0, 200).flatmap(
    lambda n: st.builds(
        Dealing, st.just(n), st.integers(1, 9), st.integers(1, 20), st.integers(0, n), drop_last=st.booleans()
    )
)


def positions_of(dealing: Dealing, rank: int) -> list[int]:
    return dealing.positions(rank, np.arange(dealing.per_rank)).tolist()


def batches_of(dealing: Dealing, rank: int) -> list[list[int]]:
    found = positions_of(dealing, rank)
    return [found[first : first + dealing.batch] for first in range(0, len(found), dealing.batch)]


@given(dealings)
def test_every_position_that_is_left_is_dealt_once(dealing: Dealing) -> None:
    dealt = sorted(position for rank in range(dealing.num_ranks) for position in positions_of(dealing, rank))
    assert dealt == list(range(dealing.start, dealing.start + len(dealt))), "not a run of positions, each once"
    missing = dealing.num_positions - dealing.start - len(dealt)
    if dealing.drop_last:
        assert 0 <= missing < dealing.num_ranks
    else:
        assert -dealing.num_ranks < missing <= 0


@given(dealings)
def test_every_rank_has_as_many_batches_of_the_same_sizes(dealing: Dealing) -> None:
    """Or a rank waits in an all-reduce for others that have ended."""
    sizes = [[len(batch) for batch in batches_of(dealing, rank)] for rank in range(dealing.num_ranks)]
    assert all(each == sizes[0] for each in sizes)
    assert len(sizes[0]) == -(-dealing.per_rank // dealing.batch)


@given(dealings)
def test_places_are_the_inverse_of_positions(dealing: Dealing) -> None:
    for rank in range(dealing.num_ranks):
        places = np.arange(dealing.per_rank)
        ranks, found = dealing.places(dealing.positions(rank, places))
        assert (ranks == rank).all()
        assert found.tolist() == places.tolist()
    dropped = np.arange(dealing.start + dealing.per_rank * dealing.num_ranks, dealing.num_positions)
    ranks, found = dealing.places(dropped)
    assert (found >= dealing.per_rank).all(), "a position that was dropped is some rank's"
    assert ((ranks >= 0) & (ranks < dealing.num_ranks)).all()


@pytest.mark.parametrize(("samples", "ranks"), [(1000, 3), (1_281_167, 1000), (7, 8), (1, 3), (64, 4)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_rank_has_as_many_samples_as_torch_says(samples: int, ranks: int, drop_last: bool) -> None:
    of_torch = torch.utils.data.DistributedSampler(range(samples), ranks, 0, drop_last=drop_last)
    assert Dealing(samples, ranks, 256, drop_last=drop_last).per_rank == of_torch.num_samples


@given(st.integers(0, 300), st.integers(0, 100), st.sampled_from([4, 8, 12]), st.data())
def test_global_steps_are_the_same_for_any_number_of_ranks(n: int, start: int, step: int, data: st.DataObject) -> None:
    """Whole steps, that is: the last is filled up for as many ranks as there are."""
    start = min(start, n)
    num_whole = (n - start) // step
    expected = [set(range(first, first + step)) for first in range(start, start + num_whole * step, step)]
    for ranks in [divisor for divisor in range(1, step + 1) if step % divisor == 0]:
        dealing = Dealing(n, ranks, step // ranks, start)
        of_ranks = [batches_of(dealing, rank) for rank in range(ranks)]
        steps = [{position for batches in of_ranks for position in batches[each]} for each in range(num_whole)]
        assert steps == expected, f"{ranks} ranks"


@given(st.integers(1, 300), st.integers(1, 6), st.integers(1, 12))
def test_dealt_one_by_one_steps_of_any_batch_are_steps_of_the_order(n: int, ranks: int, batch: int) -> None:
    dealing = Dealing(n, ranks)
    of_ranks = [positions_of(dealing, rank) for rank in range(ranks)]
    taken = 0
    for first in range(0, dealing.per_rank, batch):
        step = sorted(position for positions in of_ranks for position in positions[first : first + batch])
        assert step == list(range(taken, taken + len(step)))
        taken += len(step)


@given(st.integers(1, 200), st.integers(1, 5), st.integers(1, 9), st.integers(1, 5), st.integers(1, 9), st.data())
def test_going_on_with_other_ranks_leaves_nothing_out(
    n: int, ranks: int, batch: int, then_ranks: int, then_batch: int, data: st.DataObject
) -> None:
    first = Dealing(n, ranks, batch)
    steps = data.draw(st.integers(0, -(-first.per_rank // batch)))
    had = [position for rank in range(ranks) for each in batches_of(first, rank)[:steps] for position in each]
    rest = Dealing(n, then_ranks, then_batch, min(n, len(had)))
    had += [position for rank in range(then_ranks) for position in positions_of(rest, rank)]
    assert set(range(n)) <= set(had)
    assert len(had) - n < ranks + then_ranks, "more comes twice than fills up the last step"


def test_what_can_not_be_is_refused_in_a_line() -> None:
    with pytest.raises(InvalidInput, match="an epoch of 10 positions can't go on from position 11"):
        Dealing(10, start=11)
    with pytest.raises(InvalidInput, match="num_ranks must be at least 1, got 0"):
        Dealing(10, 0)
