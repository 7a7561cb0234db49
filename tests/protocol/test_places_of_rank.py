"""Which of a request's positions are a rank's own? The short way, for those of one step, says the same as the long."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from refill.protocol.dealing import Dealing


@given(st.data())
def test_the_short_way_says_the_same(data: st.DataObject) -> None:
    num_positions = data.draw(st.integers(1, 300), "positions")
    dealing = Dealing(
        num_positions,
        data.draw(st.integers(1, 5), "ranks"),
        data.draw(st.integers(1, 40), "batch"),
        data.draw(st.integers(0, num_positions), "start"),
        data.draw(st.booleans(), "drop_last"),
    )
    first = data.draw(st.integers(0, num_positions - 1), "first")
    end = data.draw(st.integers(first + 1, num_positions), "end")
    positions = np.arange(first, end, dtype=np.int64)
    rank = data.draw(st.integers(0, dealing.num_ranks - 1), "rank")
    of_ranks, places = dealing.places(positions)
    expected = places[(of_ranks == rank) & (positions >= dealing.start)]
    assert dealing.places_of_rank(rank, positions).tolist() == expected.tolist()
