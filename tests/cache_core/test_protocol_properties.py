"""Exactly once an epoch, whatever the shape, the interleaving and the losses."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cache_core.cluster_model import ClusterModel, Shape, run_epoch, shapes
from tests.draws import draws

from refill_service.cache_core.epoch_order import ExplicitTraces
from refill_service.cache_core.policies.redox import RedoxPolicy


@draws(150)
@given(shapes())
def test_every_sample_once(shape: Shape) -> None:
    model = ClusterModel(shape)
    run_epoch(model)
    delivered = model.delivered()
    expected = shape.num_samples if not shape.drop_last else shape.num_samples // shape.num_ranks * shape.num_ranks
    assert len(delivered) == sum(delivered.values()) == expected
    # With nothing dropped, waste is what was read and not delivered, to the byte.
    counts = [owner.counts for owner in model.owners]
    assert sum(count.bytes_read for count in counts) == model.read_bytes
    if not shape.drop_last:
        assert sum(count.bytes_filled for count in counts) == model.lengths.sum()
        assert sum(count.bytes_wasted for count in counts) == model.read_bytes - model.lengths.sum()
        assert all(owner.finished for owner in model.owners)
        for owner in model.owners:
            assert isinstance(owner, RedoxPolicy)
            assert (~owner.memory.slots < 0).all(), "samples left in memory"


@draws(80)
@given(shapes(), st.floats(0.05, 0.5))
def test_every_sample_once_with_lost_answers(shape: Shape, lose: float) -> None:
    model = ClusterModel(shape)
    run_epoch(model, lose=lose)
    delivered = model.delivered()
    assert max(delivered.values(), default=1) == 1, "a sample was delivered to two positions"
    if not shape.drop_last:
        assert len(delivered) == shape.num_samples


@draws(80)
@given(shapes(), st.floats(0.05, 0.5))
def test_every_sample_once_with_failed_reads(shape: Shape, fail: float) -> None:
    """A read that fails loses nothing: what it promised stays promised, the rest is read again later."""
    model = ClusterModel(shape)
    run_epoch(model, fail=fail)
    delivered = model.delivered()
    assert max(delivered.values(), default=1) == 1
    if not shape.drop_last:
        assert len(delivered) == shape.num_samples
        counts = [owner.counts for owner in model.owners]
        # What a failed read had promised is read alone later, so it fills no slot.
        assert sum(count.bytes_filled for count in counts) <= model.lengths.sum(), "a sample was filled twice"
        assert sum(count.bytes_read for count in counts) == model.read_bytes


@draws(60)
@given(shapes(), st.data())
def test_explicit_traces_stay_within_their_samples(shape: Shape, data: st.DataObject) -> None:
    """A subset, weighted with replacement: every position is answered, and only with samples of the subset."""
    ids = st.integers(0, shape.num_samples - 1)
    traces = {rank: np.array(data.draw(st.lists(ids, max_size=40)), dtype=np.int64) for rank in range(shape.num_ranks)}
    model = ClusterModel(shape, ExplicitTraces(shape.num_samples, traces))
    run_epoch(model)
    asked = Counter(np.concatenate(list(traces.values())).tolist())
    answered = Counter(model.answers.values())
    assert answered == asked, "each sample is delivered as often as the traces ask for it"


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_same_seed_same_calls_same_decisions(batch: int) -> None:
    shape = Shape((100, 33, 64), 8, 4, 3, 2, batch, 50, 5000, seed=5)
    first, second = ClusterModel(shape), ClusterModel(shape)
    run_epoch(first)
    run_epoch(second)
    assert first.answers == second.answers
    assert [o.counts for o in first.owners] == [o.counts for o in second.owners]
