"""A global order dealt to ranks: what traces promise, for any ranks, padding and what is left of an epoch."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from refill_service.cache_core.planned.planned_traces import PlannedTraces


@st.composite
def orders(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    num_samples = draw(st.integers(1, 80))
    order = np.array(draw(st.permutations(range(num_samples))), dtype=np.int64)
    return order[: draw(st.integers(1, num_samples))], num_samples


@given(orders(), st.integers(1, 7), st.booleans())
def test_what_ranks_ask_for_is_the_order(drawn: tuple[np.ndarray, int], num_ranks: int, drop_last: bool) -> None:
    order, num_samples = drawn
    traces = PlannedTraces(order, num_samples, num_ranks, drop_last=drop_last)
    asked = np.full((traces.length(0), num_ranks), -1)
    repeats = np.zeros((traces.length(0), num_ranks), dtype=bool)
    for rank in range(num_ranks):
        assert traces.length(rank) == traces.length(0)
        asked[:, rank], repeats[:, rank] = traces.asked(rank, np.arange(traces.length(rank)))
    in_turn, again = asked.reshape(-1), repeats.reshape(-1)
    expected = order[: traces.num_requests]
    assert in_turn[: len(expected)].tolist() == expected.tolist(), "ranks in step ask for the order"
    assert not again[: len(expected)].any()
    assert again[len(expected) :].all()
    if drop_last:
        assert len(in_turn) == len(order) // num_ranks * num_ranks
    else:
        assert len(in_turn) >= len(order)
        filled = [order[place % len(order)] for place in range(len(order), len(in_turn))]
        assert in_turn[len(order) :].tolist() == filled

    ranks, positions = traces.position_of(expected)
    assert asked[positions, ranks].tolist() == expected.tolist()
    dropped = order[traces.num_requests :]
    assert (traces.position_of(dropped)[1] >= traces.length(0)).all()

    members = traces.members(0, num_samples)
    assert np.flatnonzero(np.ones(num_samples, bool) if members is None else members).tolist() == sorted(order.tolist())
    found = sorted(zip(*(column.tolist() for column in traces.repeats_of(0, num_samples)), strict=True))
    assert found == sorted(
        (int(asked[position, rank]), rank, position) for position, rank in np.argwhere(repeats).tolist()
    )
