"""Are the plans of a chunk the cheapest ones? Beside all schedules, told by their definition."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.draws import draws

from refill_service.cache_core.exact.chunk_caches import RollingPlan, uses_before
from refill_service.cache_core.sample_mapping import Int64Array


def of_all_schedules(uses: Int64Array, since: Int64Array, sizes: Int64Array, price: float) -> int:
    """As :class:`RollingPlan`, with the next GET at each later use for each GET."""
    cheapest = np.zeros(len(uses) + 1)
    for each in range(len(uses) - 1, -1, -1):
        held = (uses - np.maximum(uses[each], since)) * sizes
        held[: each + 1] = 0
        cheapest[each] = 1 + (cheapest[each + 1 :] + (price * np.cumsum(held))[each:]).min()
    cheapest[1:] += price * np.cumsum((uses - since) * sizes)
    return int(np.argmin(cheapest))


@draws(100)
@given(st.integers(0, 3000), st.integers(1, 3000), st.integers(1, 30), st.floats(-9, 0), st.integers(0, 2**32))
def test_a_rolling_plan_is_the_cheapest_of_all(
    num_uses: int, num_samples: int, gap: int, exponent: float, seed: int
) -> None:
    drawn = np.random.default_rng(seed)
    uses = np.cumsum(drawn.integers(0, gap, num_uses), dtype=np.int64) + 1
    samples = drawn.integers(0, num_samples, num_uses)
    before, sizes = uses_before(samples), drawn.integers(1, 100, num_samples)[samples]
    since = np.where(before < 0, 0, uses[before]) if num_uses else uses
    plan = RollingPlan(0, uses, before, sizes, 10**exponent)
    assert plan.num_kept() == of_all_schedules(uses, since, sizes, 10**exponent)
