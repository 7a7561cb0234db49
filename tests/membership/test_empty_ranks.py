"""What do pods keep for a rank whose traces are empty, epoch after epoch? No more than for the others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tests.membership.jobs import Packed, spec_of
from tests.membership.pods_in_process import PodsInProcess, Rank
from tests.pod_fixtures import NUM_SAMPLES


def test_what_others_received_is_forgotten_though_a_rank_never_asks(packed: Packed, tmp_path: Path) -> None:
    with PodsInProcess(2, tmp_path, journal=False) as pods:
        spec = spec_of(packed, order="explicit")
        full, empty = (Rank(pods, spec, rank) for rank in range(2))
        for epoch in range(9):
            empty.post_trace(epoch, np.empty(0, dtype=np.int64))
            full.post_trace(epoch, np.random.default_rng(epoch).permutation(NUM_SAMPLES))
            for start in range(0, NUM_SAMPLES, 100):
                full.batch(epoch, np.arange(start, start + 100))
        received = pods.node(0).table.jobs[spec.name].home.record._received
        kept = sorted(received.epochs(0))
        assert kept[-1] == 8
        assert len(kept) <= 5, f"what rank 0 received is kept of epochs {kept}"
