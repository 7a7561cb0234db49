"""Which pods does a batch ask? A few, however many there are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refill.errors import RefillError
from refill.pods.direct_pods import DirectPods
from refill.protocol.dealing import Dealing
from refill.protocol.plan_settings import PlanSettings

BATCH = 256


@given(
    st.integers(1, 64),
    st.integers(1, 8),
    st.sampled_from([32, 64, 128, 256]),
    st.integers(1, 40),
    st.integers(1, 8),
    st.integers(0, 1000),
    st.data(),
)
def test_a_batch_asks_a_few_pods_however_many_there_are(
    num_pods: int, shares_of_pod: int, run: int, rounds: int, num_ranks: int, more: int, data: st.DataObject
) -> None:
    """Of 256 samples 256 / run + 2 at most, and each position one pod."""
    num_shares = num_pods * shares_of_pod
    num_samples = num_shares * run * rounds + more
    sizes = [num_samples // num_shares + (share < num_samples % num_shares) for share in range(num_shares)]
    settings = PlanSettings("drawn", num_samples, 8, num_shares, num_samples, run)
    urls = [f"http://pod-{pod}" for pod in range(num_pods)]
    pods = DirectPods(settings, sizes, urls, urls[0])
    dealing = Dealing(num_samples, num_ranks, BATCH)
    step = data.draw(st.integers(0, max(0, -(-dealing.per_rank // BATCH) - 2)))
    rank = data.draw(st.integers(0, num_ranks - 1))
    places = np.arange(step * BATCH, min(dealing.per_rank, (step + 1) * BATCH))
    parts = pods.parts(data.draw(st.integers(0, 3)), dealing.positions(rank, places) % num_samples)
    assert len(parts) <= BATCH / run + 2
    asked = np.concatenate([part for _, part in parts])
    assert sorted(asked.tolist()) == list(range(len(places)))


def test_shares_that_are_not_those_of_the_plan_are_refused() -> None:
    settings = PlanSettings("drawn", 100, 8, 2, 100)
    for sizes in ([50, 51], [100], [[50, 50]], ["50", "x"], None):
        with pytest.raises(RefillError):
            DirectPods(settings, sizes, ["http://a", "http://b"], "http://a")
