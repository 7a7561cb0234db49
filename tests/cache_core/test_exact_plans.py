"""Are the plans of a chunk the cheapest ones? Beside all schedules, told by their definition."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.draws import draws

from refill_service.cache_core.exact.plans import held_from, rolling
from refill_service.cache_core.sample_mapping import Int64Array


def of_all_schedules(uses: Int64Array, since: Int64Array, sizes: Int64Array, price: float) -> int:
    """As :func:`rolling`, with the next GET at each later use for each GET."""
    cheapest = np.zeros(len(uses) + 1)
    for each in range(len(uses) - 1, -1, -1):
        held = (uses - np.maximum(uses[each], since)) * sizes
        held[: each + 1] = 0
        cheapest[each] = 1 + (cheapest[each + 1 :] + (price * np.cumsum(held))[each:]).min()
    cheapest[1:] += price * np.cumsum((uses - since) * sizes)
    return int(np.argmin(cheapest))


@draws(50)
@given(st.integers(0, 700), st.integers(1, 400), st.floats(-7, 0), st.integers(0, 2**32))
def test_a_rolling_plan_is_the_cheapest_of_all(num_uses: int, num_samples: int, exponent: float, seed: int) -> None:
    drawn = np.random.default_rng(seed)
    uses = np.cumsum(drawn.integers(1, 30, num_uses), dtype=np.int64)
    samples = drawn.integers(0, num_samples, num_uses)
    since, sizes = held_from(samples, uses, 0), drawn.integers(1, 100, num_samples)[samples]
    assert rolling(0, uses, since, sizes, 10**exponent) == of_all_schedules(uses, since, sizes, 10**exponent)
